"""Drawing random programs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch

from . import effects, vocabulary
from .builder import Builder
from .program import Program, Ref, seed

Category = Callable[[Builder], None]

PURE: dict[Category, int] = {
    vocabulary.unary: 14,
    vocabulary.binary: 18,
    vocabulary.exponential: 2,
    vocabulary.reduction: 5,
    vocabulary.product: 5,
    vocabulary.joining: 5,
    vocabulary.selecting: 3,
    vocabulary.constant: 6,
    vocabulary.multiple_results: 6,
    vocabulary.late_part: 2,
    vocabulary.view: 8,
}
MEMORY: dict[Category, int] = {
    vocabulary.view: 22,
    effects.write: 26,
    effects.clash: 14,
    effects.state: 12,
    effects.reshape_in_place: 2,
}
HOST_EFFECTS: dict[Category, int] = {
    effects.host_effects: 12,
    effects.draw: 16,
    effects.write: 8,
    effects.state: 6,
    effects.grad_mode: 2,
    vocabulary.nested_arguments: 2,
}
MODULES: dict[Category, int] = {effects.module: 24, effects.state: 14, effects.write: 5, effects.draw: 3}
SIZES: dict[Category, int] = {vocabulary.size: 14, vocabulary.use_size: 10, effects.write: 5}
EVERYTHING: dict[Category, int] = {
    effects.write: 12,
    effects.clash: 4,
    effects.draw: 8,
    effects.host_effects: 5,
    effects.state: 8,
    effects.module: 6,
    effects.grad_mode: 1,
    effects.branching: 2,
    effects.reshape_in_place: 1,
    vocabulary.size: 3,
    vocabulary.nested_arguments: 2,
}


@dataclass(frozen=True)
class Flavour:
    """How often each category of steps is drawn, and what else sets such programs apart."""

    name: str
    weights: dict[Category, int]
    values: tuple[str, ...] = ("none", "all")
    grads: int = 3  # one in so many has inputs that require gradients
    traced: tuple[str, ...] = ("",)
    stages: tuple[int, ...] = (1, 1, 2, 3, 4)
    thorough: int = 3  # one in so many is also copied, pickled and inlined in part
    share: int = 5  # how many of a mixed run are of this flavour, in proportion
    fuses: bool = False  # stages are fusions by rules more often than not
    captures: bool = False  # programs are the modules of a model, which is captured
    schedules: bool = False  # programs are the modules of a model, and stages the steps of a schedule of it

    def draw(self, rng: Random) -> Category:
        return pick_category(rng, self.weights)


def pick_category(rng: Random, weights: dict[Category, int]) -> Category:
    bounds = list(accumulate(weights.values()))
    return list(weights)[bisect_right(bounds, rng.randrange(bounds[-1]))]


def _with(*weights: dict[Category, int]) -> dict[Category, int]:
    merged: dict[Category, int] = {}
    for each in weights:
        for category, weight in each.items():
            merged[category] = merged.get(category, 0) + weight
    return merged


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("pure", PURE, values=("none", "all", "all", "some")),
        Flavour("memory", _with(PURE, MEMORY), values=("none", "all", "some"), grads=6),
        Flavour("world", _with(PURE, HOST_EFFECTS)),
        Flavour("modules", _with(PURE, MODULES), grads=2),
        Flavour("sizes", _with(PURE, SIZES), values=("none", "symbolic", "symbolic"), grads=6),
        Flavour("everything", _with(PURE, EVERYTHING), values=("none", "all", "all", "some", "symbolic")),
        Flavour(
            "nested",
            _with(PURE, {vocabulary.constant: 12, effects.state: 8, effects.draw: 4}),
            stages=(3, 4, 5, 6),
            thorough=1,
            share=3,
        ),
        Flavour(
            "traced",
            _with(PURE, MEMORY, {effects.draw: 6}),
            traced=("real", "real", "fake", "symbolic"),
            grads=8,
            share=1,
        ),
        Flavour(
            "fused",
            _with(PURE, EVERYTHING),
            values=("none", "all", "all", "symbolic"),
            stages=(1, 1, 2, 3),
            share=3,
            fuses=True,
        ),
        Flavour(
            "reshapes",
            _with(PURE, MEMORY, {effects.reshape_in_place: 40}),
            values=("all", "all", "some"),
            stages=(1, 2, 3, 4, 5),
            grads=6,
            share=2,
        ),
        Flavour("captured", {}, share=3, captures=True),
        Flavour("scheduled", {}, stages=(2, 3, 4, 5, 6, 8), share=1, schedules=True),
    )
}

INPUTS = (
    "torch.linspace(-1, 1, 6).reshape(2, 3)",
    "torch.linspace(2, -2, 6).reshape(2, 3)",
    "torch.tensor([0.5, -1.5, 2.0])",
    "torch.linspace(-1, 2, 6).reshape(3, 2)",
    "torch.linspace(-1, 1, 12).reshape(2, 2, 3)",
    "torch.tensor(-0.5)",
)
# For models that are captured: memory that is shared, permuted or has gaps.
STRIDED_INPUTS = (
    "torch.linspace(-1, 1, 3).expand(2, 3)",
    "torch.linspace(-1, 1, 2).reshape(2, 1).expand(2, 3)",
    "torch.linspace(-1, 1, 6).reshape(3, 2).t()",
    "torch.linspace(-1, 1, 12).reshape(2, 6)[:, ::2]",
    "torch.linspace(-1, 1, 48).reshape(6, 8)",
)


def draw_program(rng: Random, flavour: Flavour) -> Program:
    """A program that runs, with three to twenty-five nodes or a few more."""
    grads = rng.randrange(flavour.grads) == flavour.grads - 1
    b = Builder(rng, grads=grads)
    enabled, stream = torch.is_grad_enabled(), torch.get_rng_state()
    seed(1)
    try:
        b.add_input(INPUTS[0])
        for _ in range(rng.randrange(3)):
            b.add_input(b.choice(INPUTS))
        length = 3 + rng.randrange(23)
        for _ in range(3 * length):
            if len(b.steps) >= length:
                break
            flavour.draw(rng)(b)
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_rng_state(stream)
    output = draw_output(b)
    return b.finish(
        output, values=b.choice(flavour.values), traced=b.choice(flavour.traced), marks=b.chance(3)
    )


def draw_output(b: Builder) -> Any:
    """What a program returns: some of its values, in one structure or another."""
    names = [step.name for step in b.steps if step.op != "get_attr"] or [name for name, _ in b.inputs]
    taken = [Ref(names[-1])]
    for _ in range(b.rng.randrange(4)):
        taken.append(b.choice(b.watched) if b.watched and b.rng.randrange(2) else Ref(b.choice(names)))
    way = b.rng.randrange(8)
    if way == 0:
        return taken[0]
    if way == 1:
        return list(taken)
    if way == 2:
        return {"first": taken[0], "rest": tuple(taken[1:])}
    if way == 3:
        return (*taken, Ref(b.inputs[0][0]), None)
    return tuple(taken)
