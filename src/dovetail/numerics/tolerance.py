"""Whether numbers are as good as their dtype lets them be, judged by the same computation in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map

from dovetail.ir.graph_module import Body
from dovetail.numerics.sample_inputs import memory
from dovetail.outlining.inline import flat

# How many roundings more than the body's own a result may be off by: vectorised functions and other orders of
# summation need tens of them in the wide dtypes; a few in the narrow ones, which are computed in wider ones.
_STEPS = {torch.float64: 64, torch.float32: 64, torch.complex128: 64, torch.complex64: 64}
_FEW = 2


@dataclass(frozen=True, eq=False)
class Reference:
    """One value as the body computes it; in float64; and in float64 from operands moved by a few roundings.

    `coarsest` is the largest rounding of any dtype in the body: what it computes cannot be better than that. With a
    `bound` nothing is asked of single numbers, only that all together are not further off, relative to their size.
    """

    body: Tensor
    precise: Tensor | None = None
    moved: Tensor | None = None
    coarsest: float = 0.0
    bound: float | None = None


def rounding(dtype: torch.dtype) -> float:
    """The relative distance between numbers of a dtype; 0 where they are exact."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def margin(dtype: torch.dtype) -> float:
    """How far off, relative to its size, a number may be whatever the body does."""
    return _STEPS.get(dtype, _FEW) * rounding(dtype)


def difference(made: Tensor, reference: Reference) -> str | None:
    """How a value differs from what it must be, the largest difference and where; None if it is close enough.

    Whole numbers and truth values are exact, those that float64 gives being as good as the body's. NaN and infinities
    must stand where the body has them; where only a narrow dtype overflowed, the number itself is as good. Numbers below
    the smallest normal one are not told from zero: compilers may flush them, and sample inputs have none.
    """
    body = reference.body
    for what, has, needs in (("shape", made.shape, body.shape), ("dtype", made.dtype, body.dtype)):
        if has != needs:
            return f"has {what} {_plain(has)}, not {_plain(needs)}"
    if not body.numel():
        return None
    if not rounding(body.dtype):
        return _unequal(made, reference)
    return _far(made, reference) if reference.bound is None else _beyond(made, body, reference.bound)


def relative_error(made: Tensor, wanted: Tensor) -> float:
    """The root mean square of a difference as a part of that of the value itself, where that is finite.

    Infinite if there is no number where one is wanted, or any but zero where all must be zero.
    """
    given, needs = _wide(made.detach()), _wide(wanted.detach())
    finite = needs.isfinite()
    given, needs = given[finite], needs[finite]
    if not bool(given.isfinite().all()):
        return math.inf
    off, size = _size(given - needs), _size(needs)
    return off / size if size else (math.inf if off else 0.0)


def _beyond(made: Tensor, body: Tensor, bound: float) -> str | None:
    error = relative_error(made, body)
    return None if error <= bound else f"is off by {error:.2%} of its size, and {bound:.2%} is allowed"


def _unequal(made: Tensor, reference: Reference) -> str | None:
    wrong = made != reference.body
    precise = reference.precise
    if precise is not None and precise.shape == made.shape and precise.dtype == made.dtype:
        wrong &= made != precise
    if not wrong.any():
        return None
    off = (made.double() - reference.body.double()).abs().masked_fill(~wrong, -1.0)
    return _told(off, wrong, made, reference.body, None)


def _far(made: Tensor, reference: Reference) -> str | None:
    given, body = _wide(made.detach()), _wide(reference.body.detach())
    base = margin(reference.body.dtype)
    smallest = torch.finfo(reference.body.dtype).tiny
    exact, allowed = _allowed(reference, body, base)
    unit = body.abs() + _size(body)
    beside = base * unit if reference.precise is not None else allowed
    near = ((given - body).abs() <= beside + smallest) | ((given - exact).abs() <= allowed + smallest)
    same = (given == body) | (given.isnan() & body.isnan())
    overflown = ~body.isfinite() & exact.isfinite()
    wrong = ~torch.where(body.isfinite() | overflown, near & given.isfinite(), same) & ~same
    if not wrong.any():
        return None
    off = (given - body).abs()
    off = off.masked_fill(off.isnan(), float("inf")).masked_fill(~wrong, -1.0)
    return _told(off, wrong, given, body, allowed)


def _allowed(reference: Reference, body: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """What a value is compared with, and how far each number may be from it."""
    if reference.precise is None or reference.precise.shape != reference.body.shape:
        return body, 4 * max(base, _FEW * reference.coarsest) * (body.abs() + _size(body))
    exact = _wide(reference.precise.detach())
    error = (body - exact).abs()
    error = error.masked_fill(~error.isfinite(), 0.0)
    size = _size(exact)
    noise = _size(error)
    limit = max(reference.coarsest, rounding(reference.body.dtype)) ** (1 / 3)
    if size < limit * noise:
        # Nothing but rounding is left of it, as of a gradient that is zero by its nature: noise is as good as noise.
        return exact, torch.full_like(exact, 16 * noise)
    unit = exact.abs() + size
    own = _size(error / unit) if size else 0.0
    if own > limit:
        # In its own precision the computation is another one, and float64 says nothing about it.
        return body, max(base, _FEW * reference.coarsest) * (body.abs() + _size(body))
    allowed = 4 * error + (10 * own + base) * unit
    if reference.moved is not None and reference.moved.shape == reference.body.shape:
        shift = (_wide(reference.moved.detach()) - exact).abs()
        shift = shift.masked_fill(~shift.isfinite(), 0.0)
        allowed = allowed + shift + (_size(shift / unit) if size else 0.0) * unit
    return exact, allowed


def _wide(value: Tensor) -> Tensor:
    """The same numbers in float64, real and imaginary parts beside each other."""
    value = value if value.device.type in ("cpu", "cuda") else value.cpu()
    if value.dtype.is_complex:
        return torch.view_as_real(value.resolve_conj().to(torch.complex128))
    return value.to(torch.float64)


def _size(value: Tensor) -> float:
    """The root of the mean square of what is finite."""
    finite = value[value.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _told(off: Tensor, wrong: Tensor, made: Tensor, wanted: Tensor, allowed: Tensor | None) -> str:
    at = int(off.reshape(-1).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), off.shape)]
    has, needs = made.reshape(-1)[at].item(), wanted.reshape(-1)[at].item()
    count = f"{int(wrong.sum())} of {off.numel()} wrong"
    amount = float(off.reshape(-1)[at])
    if allowed is None or math.isinf(amount):
        return f"is {has} at {place} where the body has {needs} ({count})"
    most = float(allowed.reshape(-1)[at])
    return (
        f"is off by {amount:.2g} at {place}: {has:.6g} where the body has {needs:.6g} "
        f"(allowed {most:.1g}; {count})"
    )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


class Precise(Interpreter):
    """Runs a body with its floating numbers in double precision, casts to other ones included.

    Operators that have no double precision, or that look at bits, raise, or give shapes that are not the body's.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(flat(body))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.dtype:
            raise TypeError("a view of bits has no double precision")
        return super().call_function(target, *tree_map(_wider, (tuple(args), dict(kwargs))))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = "double" if target in ("float", "half", "bfloat16") else target
        return super().call_method(target, *tree_map(_wider, (tuple(args), dict(kwargs))))


def _wider(value: Any) -> Any:
    return widened(value) if isinstance(value, torch.dtype) else value


def widened(dtype: torch.dtype) -> torch.dtype:
    """The double-precision dtype for a floating or complex one; others as they are."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def precise_operands(args: Sequence[Any], moved_by: float = 0.0) -> list[Any]:
    """Operands in double precision; on request each number moved up or down by so much of itself."""
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor) or not rounding(a.dtype):
            made.append(a)
            continue
        wide = memory(a).to(widened(a.dtype))
        if moved_by:
            signs = torch.randint(0, 2, wide.shape, generator=generator).mul_(2).sub_(1)
            wide = wide * (1 + moved_by * signs.to(wide.device, torch.float64))
        made.append(wide.as_strided(a.shape, a.stride()).requires_grad_(a.requires_grad))
    return made


def roundings(body: GraphModule) -> tuple[float, float]:
    """The smallest and the largest rounding of the dtypes in a body; zeros where it has no floating numbers."""
    found: set[float] = set()
    stack = [body]
    while stack:
        at = stack.pop()
        for node in at.graph.nodes:
            value = node.meta.get("val")
            for v in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
                if isinstance(v, Tensor) and rounding(v.dtype):
                    found.add(rounding(v.dtype))
        stack.extend(m for m in at._modules.values() if isinstance(m, Body))
    return (min(found), max(found)) if found else (0.0, 0.0)
