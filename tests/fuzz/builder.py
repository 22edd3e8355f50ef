"""Growing a program step by step: each step is run on real values at once, so that the next one fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch import nn

from .program import Owned, Program, Ref, Step, make, own, substitute, target

T = TypeVar("T")
SHAPES = ((2, 3), (2, 3), (2, 3), (3, 2), (2, 2), (3,), (2, 2, 3), ())
# Names that regions, bodies or FX itself would like to have.
ODD_NAMES = ("fused_0", "fused", "npu_pool_0", "add_1", "fused_1", "getitem", "pair_0")


class Builder:
    """A program in the making. A step that does not run is not kept."""

    def __init__(self, rng: Random, *, grads: bool) -> None:
        self.rng = rng
        self.grads = grads
        self.root = nn.Module()
        self.inputs: list[tuple[str, str]] = []
        self.owned: list[Owned] = []
        self.steps: list[Step] = []
        self.values: dict[str, Any] = {}
        self.watched: list[Ref] = []  # values that tell of an order, more often returned
        self._odd = list(ODD_NAMES)

    # Choices

    def chance(self, one_in: int) -> bool:
        return self.rng.randrange(one_in) == one_in - 1

    def choice(self, items: Sequence[T]) -> T:
        return items[self.rng.randrange(len(items))]

    def pick(self, fits: Callable[[Any], bool]) -> Ref | None:
        """A value that fits, more often a late one."""
        names = [name for name, value in self.values.items() if _fits(fits, value)]
        if not names:
            return None
        recent = names[-6:] if self.rng.randrange(3) else names
        return Ref(self.choice(recent))

    def tensor(self, fits: Callable[[torch.Tensor], bool] | None = None) -> Ref | None:
        """A float tensor, of those that fit."""
        return self.pick(
            lambda v: (
                isinstance(v, torch.Tensor)
                and v.dtype is torch.float32
                and v.numel() > 0
                and (not fits or fits(v))
            )
        )

    def like(self, ref: Ref) -> Ref | None:
        """Another tensor of the same shape, perhaps the same one."""
        shape = self.of(ref).shape
        return self.tensor(lambda v: v.shape == shape)

    def of(self, ref: Ref) -> Any:
        return self.values[ref.name]

    # Steps

    def add_input(self, expression: str) -> Ref:
        name = f"x{len(self.inputs)}"
        value = make(expression)
        if self.grads and isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
        self.inputs.append((name, expression))
        self.values[name] = value
        return Ref(name)

    def call(self, expression: str, *args: Any, **kwargs: Any) -> Ref | None:
        return self._add("call_function", expression, args, kwargs, target(expression))

    def method(self, name: str, *args: Any, **kwargs: Any) -> Ref | None:
        return self._add("call_method", name, args, kwargs, lambda x, *a, **k: getattr(x, name)(*a, **k))

    def module(self, expression: str, *args: Any) -> Ref | None:
        """Call a child made by an expression: a new one, or one that is there already."""
        known = [o for o in self.owned if o.make == expression]
        owned = known[0] if known and self.rng.randrange(2) else self.new_owned("module", expression)
        return self._add("call_module", owned.name, args, {}, getattr(self.root, owned.name))

    def attr(self, path: str) -> Ref | None:
        def fetch() -> Any:
            value: Any = self.root
            for atom in path.split("."):
                value = getattr(value, atom)
            return value

        return self._add("get_attr", path, (), {}, fetch)

    def new_owned(self, how: str, expression: str) -> Owned:
        stem = {"parameter": "w", "buffer": "b", "transient": "b", "constant": "c", "module": "m"}[how]
        name = f"{stem}{len(self.owned)}"
        if self._odd and self.chance(20):
            name = self._odd.pop()
        owned = Owned(name, how, expression)
        own(self.root, owned)
        self.owned.append(owned)
        return owned

    def _add(
        self, op: str, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Ref | None:
        try:
            with warnings.catch_warnings():
                # Torch warns of some steps that it takes: masked_fill_ of an expanded tensor.
                warnings.simplefilter("ignore")
                value = run(*substitute(args, self.of), **substitute(kwargs, self.of))
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            return None  # does not fit the values: another step will
        if isinstance(value, torch.Tensor) and value.numel() > 64:
            return None
        name = f"v{len(self.steps)}"
        if self._odd and self.chance(40):
            name = self._odd.pop(0)
        self.steps.append(Step(name, op, what, args, kwargs))
        self.values[name] = value
        return Ref(name)

    def finish(self, output: Any, **facts: Any) -> Program:
        return Program(
            tuple(self.inputs), tuple(self.owned), tuple(self.steps), output, grads=self.grads, **facts
        )


def _fits(fits: Callable[[Any], bool], value: Any) -> bool:
    try:
        return fits(value)
    except RuntimeError:  # a view that autograd has given up on may not even be looked at
        return False
