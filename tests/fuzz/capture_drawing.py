"""Drawing models to capture: draws into views, writes through detach, generators, and tensors changed themselves."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch

from . import effects, units
from .builder import Builder
from .generate import INPUTS, STRIDED_INPUTS, Category
from .program import Case, Ref
from .vocabulary import UNARY

DRAWS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("normal_", ()),
    ("normal_", (1.0, 0.5)),
    ("uniform_", (-1.0, 2.0)),
    ("bernoulli_", (0.4,)),
    ("exponential_", (2.0,)),
    ("random_", (10,)),
    ("random_", (2, 9)),
    ("cauchy_", ()),
    ("log_normal_", ()),
    ("geometric_", (0.3,)),
)
FUNCTIONS = (
    "torch.dropout_",
    "torch.alpha_dropout_",
    "torch.feature_dropout_",
    "torch.feature_alpha_dropout_",
)
IN_PLACE_VIEWS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("t_", ()),
    ("squeeze_", ()),
    ("unsqueeze_", (0,)),
    ("transpose_", (0, 1)),
    ("swapaxes_", (0, -1)),
    ("as_strided_", ((2, 2), (1, 1))),
    ("resize_", (1,)),
)


def _view_of(b: Builder, x: Ref) -> Ref:
    """The tensor, or a view of it with other strides."""
    shape = b.of(x).shape
    ways: list[tuple[str, tuple[Any, ...]]] = [("view_as", (x,))]
    if len(shape) == 2:
        ways += [("t", ()), ("diagonal", ()), ("narrow", (1, 0, max(1, shape[1] - 1))), ("select", (1, 0))]
        ways += [("__getitem__", ((slice(None, None, None), slice(None, None, 2)),))]
        ways += [("__getitem__", ((slice(0, 5, None), slice(1, 7, None)),))]
    if len(shape) > 0:
        ways += [("unsqueeze", (0,)), ("__getitem__", (slice(None, None, 2),)), ("flatten", ())]
    name, args = b.choice(ways)
    if name == "__getitem__":
        return b.call("operator.getitem", x, *args) or x
    return b.method(name, x, *args) or x


def _look(b: Builder, x: Ref) -> None:
    seen = b.call(b.choice(UNARY), x)
    if seen is not None:
        b.watched.append(seen)


def draw_into_view(b: Builder) -> None:
    """Random numbers over a part of something, with gradients or without."""
    x = b.tensor()
    if x is None:
        return
    view = _view_of(b, x) if b.rng.randrange(4) else x
    way = b.rng.randrange(4)
    if way == 0:
        b.call(b.choice(FUNCTIONS), view, b.choice((0.4, 0.4, 0.0, 1.0)), b.rng.randrange(4) > 0)
    elif way == 1:
        b.call("F.dropout", view, 0.4, True, inplace=True)
    elif way == 2 and b.chance(2):
        b.call("F.rrelu", view, 0.1, 0.4, True, inplace=True)
    else:
        name, args = b.choice(DRAWS)
        b.method(name, view, *args)
    _look(b, x)


def write_detached(b: Builder) -> None:
    """A write that does not go into the gradient history of what it writes, and a look at both."""
    x = b.tensor()
    if x is None:
        return
    way = b.rng.randrange(5)
    if way == 0:
        into: Ref | None = x
        y = b.like(x)
        b.call(f"quietly(torch.Tensor.{b.choice(('add_', 'copy_', 'mul_'))})", x, y or 0.5)
    else:
        into = b.call("getattr", x, "data") if b.chance(12) else b.method("detach", x)
        if into is None:
            return
        if b.chance(3):
            into = _view_of(b, into)
        effects.write(b, into)
    for ref in (x, into):
        if b.rng.randrange(2):
            _look(b, ref)


def generator(b: Builder) -> None:
    """Numbers from a generator: one the model keeps, or one of forward's own."""
    if b.rng.randrange(3):
        held = [o.name for o in b.owned if "Generator" in o.make]
        name = b.choice(held) if held else b.new_owned("constant", "torch.Generator().manual_seed(5)").name
        source = b.attr(name)
    else:
        source = b.call("torch.Generator")
    if source is None:
        return
    if b.chance(3):
        b.method("manual_seed", source, 3)
    x = b.tensor()
    if b.chance(2) or x is None:
        b.call("torch.rand", 2, 3, generator=source)
    else:
        b.method("normal_", _view_of(b, x), generator=source)


def seeding(b: Builder) -> None:
    b.call("torch.default_generator.manual_seed" if b.chance(2) else "torch.manual_seed", b.rng.randrange(3))


def change_in_place(b: Builder) -> None:
    """Sizes, strides or the gradient flag of a tensor changed, of inputs too."""
    x = b.tensor(lambda v: v.dim() > 0)
    if x is None:
        return
    way = b.rng.randrange(8)
    if way == 0:
        b.method("requires_grad_", x)
    elif way == 1:
        b.method("detach_", x)
    else:
        name, args = b.choice(IN_PLACE_VIEWS)
        b.method(name, x, *args)
    _look(b, x)


def write_input(b: Builder) -> None:
    """A write into an input or a part of it."""
    x = Ref(b.choice(b.inputs)[0])
    if not isinstance(b.of(x), torch.Tensor):
        return
    part = _view_of(b, x) if b.rng.randrange(3) else x
    if b.of(part).is_leaf and b.of(part).requires_grad:
        return
    effects.write(b, part)


def own_buffer(b: Builder) -> None:
    """A module called with a buffer of its own, which it writes."""
    x = b.module("Tally()", b.tensor())
    if x is not None:
        held = [o.name for o in b.owned if o.make == "Tally()"]
        name = b.choice(held)
        count = b.attr(f"{name}.count")
        if count is not None:
            b._add("call_module", name, (count,), {}, getattr(b.root, name))


CATEGORIES: dict[Category, int] = {
    draw_into_view: 10,
    write_detached: 10,
    generator: 1,
    change_in_place: 2,
    write_input: 4,
    own_buffer: 2,
    effects.clash: 4,
}


def draw_captured(rng: Random) -> Case:
    """A model of a few classes, to be captured."""
    rare: dict[Category, int] = {seeding: 1} if rng.randrange(8) == 0 else {}
    inputs = INPUTS[:3] if rng.randrange(2) else (*INPUTS[:3], *STRIDED_INPUTS)
    case = units.draw_model(rng, {**CATEGORIES, **rare}, inputs)
    return replace(case, captures=True)
