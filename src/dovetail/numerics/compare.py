"""What a call of compiled code must have done: the results the body would give, and nothing else touched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dovetail.ir.effects import BodySummary
from dovetail.ir.weight_guard import packed_bytes
from dovetail.numerics.sample_inputs import hint_of, passed


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """What a body gives back for certain operands, by a run on fake ones."""

    outputs: tuple[Any, ...]
    effects: BodySummary

    def wrong(self, made: Any) -> str | None:
        """What is wrong with results, in words; None if nothing is."""
        if not isinstance(made, (tuple, list)):
            return f"it returned a {type(made).__name__}; the body returns a tuple of {len(self.outputs)}"
        values = cast("Sequence[Any]", made)
        if len(values) != len(self.outputs):
            return f"it returned {len(values)} results; the body returns {len(self.outputs)}"
        has, needs = flat_results(values), flat_results(self.outputs)
        for label, wanted in needs.items():
            reason = _differs(has[label], wanted) if label in has else "is missing"
            if reason is not None:
                return f"{label} {reason}"
        if len(has) != len(needs):
            return "it returned more than the body does"
        return _joined(has, needs)


def flat_results(made: Sequence[Any]) -> dict[str, Any]:
    """Results by the words they are told by: each, and what is in those that are tuples or lists."""
    found: dict[str, Any] = {}
    waiting = [(f"result {i}", value) for i, value in enumerate(made)]
    for label, value in waiting:
        found[label] = value
        if isinstance(value, (tuple, list)):
            waiting += [(f"{label}[{k}]", v) for k, v in enumerate(cast("Sequence[Any]", value))]
    return found


def _joined(has: dict[str, Any], needs: dict[str, Any]) -> str | None:
    """Which results share memory that do not in the body; None if none do."""
    first: dict[int, str] = {}
    for label, value in has.items():
        if isinstance(value, Tensor) and value.numel():
            other = first.setdefault(_place(value), label)
            if other != label and _place(needs[other]) != _place(needs[label]):
                return f"{label} shares memory with {other}, which the body's does not"
    return None


def _place(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _differs(value: Any, wanted: Any) -> str | None:
    if not isinstance(wanted, Tensor):
        # A size that may vary is a number in every call.
        has, needs = type(value).__name__, type(hint_of(wanted)).__name__
        return None if has == needs else f"is a {has}, not a {needs}"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    for what, has, needs in (
        ("shape", tuple(value.shape), tuple(hint_of(n) for n in wanted.shape)),
        ("dtype", value.dtype, wanted.dtype),
        ("device", value.device, wanted.device),
        ("requires_grad", value.requires_grad, wanted.requires_grad),
    ):
        if has != needs:
            return f"has {what} {has}, not {needs}"
    strides = tuple(hint_of(n) for n in wanted.stride())
    for size, has, needs in zip(value.shape, value.stride(), strides, strict=True):
        if size > 1 and value.numel() and has != needs:
            return f"has strides {tuple(value.stride())}, not {strides}"
    return None


class MutationCheck:
    """Tells after a run whether operands were written that the body leaves alone, or were returned."""

    def __init__(self, args: Sequence[Any], effects: BodySummary) -> None:
        self.effects = effects
        self.tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()]
        self.copies = {i: a.detach().clone() for i, a in self.tensors if i not in effects.writes}

    def wrong(self, made: Sequence[Any]) -> str | None:
        """What was done to the operands that the body does not do; None if nothing."""
        for i, a in self.tensors:
            if i in self.copies and not same_bits(self.copies[i], a.detach()):
                return f"it wrote operand {i}, which the body leaves as it is"
        mine = {_place(a): i for i, a in self.tensors}
        for label, value in flat_results(made).items():
            if isinstance(value, Tensor) and value.numel():
                i = mine.get(_place(value))
                if i is not None and i not in self.effects.returns:
                    return f"{label} shares memory with operand {i}, which the body's does not"
        return None

    def kept(self, made: Sequence[Any], again: Sequence[Any]) -> str | None:
        """What of the results of one run the next one gives once more, or writes over; None if nothing."""
        given = {_place(a) for _, a in self.tensors}
        before = {_place(v) for v in flat_results(made).values() if isinstance(v, Tensor) and v.numel()}
        for label, value in flat_results(again).items():
            if isinstance(value, Tensor) and value.numel() and _place(value) in before - given:
                return f"{label} is in the same memory in every call"
        return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(packed_bytes(a), packed_bytes(b))


def expected_of(body: Any, effects: BodySummary, examples: Sequence[Any], *, grad: bool) -> ExpectedOutcome:
    """A run of the body on fake operands: its results, with the gradients they carry."""
    mode = next((e.fake_mode for e in examples if isinstance(e, FakeTensor)), None) or FakeTensorMode()
    # Some of torch's composite operators ask for symbolic sizes as numbers unless Python writes them out; but then
    # dropout that is off returns a copy.
    dispatcher = contextlib.nullcontext() if mode.shape_env is None else enable_python_dispatcher()
    with mode, dispatcher, torch.set_grad_enabled(grad), torch.random.fork_rng(devices=[]):
        made = body(*(passed(_like(e), i in effects.writes) for i, e in enumerate(examples)))
    return ExpectedOutcome(tuple(made), effects)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)
