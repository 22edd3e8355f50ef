"""Tolerances of floating-point results, derived from the same computation in float64.

How far a result may be off cannot be fixed for all programs: cancellation, other orders of summation and narrow dtypes
lose different numbers of digits. The forward error of the body itself is measured instead (against float64), and its
condition (the change in float64 when the operands are perturbed by a few units in the last place); compiled code may
be as far off as a small multiple of both. See Higham, Accuracy and Stability of Numerical Algorithms, chapter 1.
"""

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
from dovetail.numerics.sample_inputs import clone_span
from dovetail.outlining.inline import flat

# How many epsilons more than the body's own error a result may be off by: vectorised functions and other orders of
# summation need tens of them in the wide dtypes; a few in the narrow ones, which are computed in wider ones.
_EPSILONS = {torch.float64: 64, torch.float32: 64, torch.complex128: 64, torch.complex64: 64}
_FEW = 2


@dataclass(frozen=True, eq=False)
class Reference:
    """One value as `owner` computes it, in float64 (`precise`), and in float64 from perturbed operands (`perturbed`).

    `coarsest` is the largest machine epsilon of any dtype in the computation: results cannot be better than that. With
    a `bound` single numbers are not compared, only the error of all together relative to their size.
    """

    expected: Tensor
    precise: Tensor | None = None
    perturbed: Tensor | None = None
    coarsest: float = 0.0
    bound: float | None = None
    owner: str = "the body"


@dataclass(frozen=True)
class Tolerance:
    """How close the values of a model must be to a reference: equal (`exact`), within rounding, or within a `bound`.

    `coarsest` is the largest machine epsilon of any dtype that the model computes in.
    """

    exact: bool = False
    bound: float | None = None
    coarsest: float = 0.0


def machine_epsilon(dtype: torch.dtype) -> float:
    """Return the relative distance between numbers of a dtype; 0 where they are exact."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def base_tolerance(dtype: torch.dtype) -> float:
    """Return how far off, relative to its size, a number may be whatever the error of the body."""
    return _EPSILONS.get(dtype, _FEW) * machine_epsilon(dtype)


def perturbation(finest: float) -> float:
    """Return by how much of themselves operands are perturbed, for the smallest machine epsilon of a computation."""
    return (64 if finest < 1e-6 else 2) * finest


def comparable(value: object, like: Tensor) -> Tensor | None:
    """Return a value if it can serve as a float64 reference of a tensor: same shape, both exact or both rounded."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return None
    return value.detach() if bool(machine_epsilon(value.dtype)) == bool(machine_epsilon(like.dtype)) else None


def difference(actual: Tensor, reference: Reference) -> str | None:
    """Return the largest difference from a reference and where it is; None if all numbers are within tolerance.

    Integers and booleans are exact, those that float64 gives being as good as the expected ones. NaN and infinities
    must be where the expected value has them; where only a narrow dtype overflowed, the number itself is as good.
    Numbers below the smallest normal one count as zero: compilers may flush them, and sample inputs have none.
    """
    expected = reference.expected
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, not {expected.dtype}"
    if not expected.numel():
        return None
    if not machine_epsilon(expected.dtype):
        return _unequal(actual, reference)
    if reference.bound is None:
        return _out_of_tolerance(actual, reference)
    error = relative_error(actual, expected)
    if error <= reference.bound:
        return None
    return f"is off by {error:.2%} of its size, and {reference.bound:.2%} is allowed"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of a difference relative to that of the expected value, where that is finite.

    Infinite if a finite number is expected and another is not finite, or if all numbers must be zero and one is not.
    """
    has, needs = _widened(actual.detach()), _widened(expected.detach())
    finite = needs.isfinite()
    has, needs = has[finite], needs[finite]
    if not bool(has.isfinite().all()):
        return math.inf
    error, size = _rms(has - needs), _rms(needs)
    return error / size if size else (math.inf if error else 0.0)


def _unequal(actual: Tensor, reference: Reference) -> str | None:
    wrong = actual != reference.expected
    precise = reference.precise
    if precise is not None and precise.shape == actual.shape and precise.dtype == actual.dtype:
        wrong &= actual != precise
    if not wrong.any():
        return None
    error = (actual.double() - reference.expected.double()).abs().masked_fill(~wrong, -1.0)
    return _describe(error, wrong, actual, reference.expected, None, reference.owner)


def _out_of_tolerance(actual: Tensor, reference: Reference) -> str | None:
    has, expected = _widened(actual.detach()), _widened(reference.expected.detach())
    base = base_tolerance(reference.expected.dtype)
    smallest = torch.finfo(reference.expected.dtype).tiny
    exact, allowed = _tolerances(reference, expected, base)
    around_expected = base * (expected.abs() + _rms(expected)) if reference.precise is not None else allowed
    near = ((has - expected).abs() <= around_expected + smallest) | (
        (has - exact).abs() <= allowed + smallest
    )
    same = (has == expected) | (has.isnan() & expected.isnan())
    overflowed = ~expected.isfinite() & exact.isfinite()
    wrong = ~torch.where(expected.isfinite() | overflowed, near & has.isfinite(), same) & ~same
    if not wrong.any():
        return None
    error = (has - expected).abs()
    error = error.masked_fill(error.isnan(), float("inf")).masked_fill(~wrong, -1.0)
    return _describe(error, wrong, has, expected, allowed, reference.owner)


def _tolerances(reference: Reference, expected: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Return what a value is compared with, and how far each number may be from it."""
    if reference.precise is None or reference.precise.shape != reference.expected.shape:
        return expected, 4 * max(base, _FEW * reference.coarsest) * (expected.abs() + _rms(expected))
    exact = _widened(reference.precise.detach())
    error = (expected - exact).abs()
    error = error.masked_fill(~error.isfinite(), 0.0)
    size, noise = _rms(exact), _rms(error)
    limit = max(reference.coarsest, machine_epsilon(reference.expected.dtype)) ** (1 / 3)
    if size < limit * noise:
        # The value is rounding error alone, as of a gradient that is zero by its nature: noise is as good as noise.
        return exact, torch.full_like(exact, 16 * noise)
    scale = exact.abs() + size
    own = _rms(error / scale) if size else 0.0
    if own > limit:
        # In its own precision the computation is another one, and float64 is not a reference for it.
        return expected, max(base, _FEW * reference.coarsest) * (expected.abs() + _rms(expected))
    allowed = 4 * error + (10 * own + base) * scale
    if reference.perturbed is not None and reference.perturbed.shape == reference.expected.shape:
        shift = (_widened(reference.perturbed.detach()) - exact).abs()
        shift = shift.masked_fill(~shift.isfinite(), 0.0)
        allowed = allowed + shift + (_rms(shift / scale) if size else 0.0) * scale
    return exact, allowed


def _widened(value: Tensor) -> Tensor:
    """Return the numbers in float64, real and imaginary parts beside each other."""
    value = value if value.device.type in ("cpu", "cuda") else value.cpu()
    if value.dtype.is_complex:
        return torch.view_as_real(value.resolve_conj().to(torch.complex128))
    return value.to(torch.float64)


def _rms(value: Tensor) -> float:
    """Return the root mean square of the finite numbers."""
    finite = value[value.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _describe(
    error: Tensor, wrong: Tensor, actual: Tensor, expected: Tensor, allowed: Tensor | None, owner: str
) -> str:
    at = int(error.reshape(-1).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)]
    has, needs = actual.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    count = f"{int(wrong.sum())} of {error.numel()} wrong"
    amount = float(error.reshape(-1)[at])
    if allowed is None or math.isinf(amount):
        return f"is {has} at {index} where {owner} has {needs} ({count})"
    return (
        f"is off by {amount:.2g} at {index}: {has:.6g} where {owner} has {needs:.6g} "
        f"(allowed {float(allowed.reshape(-1)[at]):.1g}; {count})"
    )


class Float64Interpreter(Interpreter):
    """Runs a body with its floating-point numbers in float64, casts to other dtypes included.

    Operators without a float64 kernel, or that reinterpret bits, raise, or give shapes that are not the body's.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(flat(body))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.dtype:
            raise TypeError("a view of bits has no double precision")
        return super().call_function(target, *_with_float64_dtypes(args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = "double" if target in ("float", "half", "bfloat16") else target
        return super().call_method(target, *_with_float64_dtypes(args, kwargs))


def _with_float64_dtypes(args: Any, kwargs: Any) -> Any:
    def widen(value: Any) -> Any:
        return float64_dtype(value) if isinstance(value, torch.dtype) else value

    return tree_map(widen, (tuple(args), dict(kwargs)))


def float64_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the double-precision dtype for a floating-point or complex one; others as they are."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def float64_operands(args: Sequence[Any], perturbed_by: float = 0.0) -> list[Any]:
    """Return operands in float64, each number increased or decreased by the fraction `perturbed_by` of itself."""
    generator = torch.Generator().manual_seed(0)
    operands: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor) or not machine_epsilon(a.dtype):
            operands.append(a)
            continue
        wide = clone_span(a).to(float64_dtype(a.dtype))
        if perturbed_by:
            signs = torch.randint(0, 2, wide.shape, generator=generator).mul_(2).sub_(1)
            wide = wide * (1 + perturbed_by * signs.to(wide.device, torch.float64))
        operands.append(wide.as_strided(a.shape, a.stride()).requires_grad_(a.requires_grad))
    return operands


def epsilon_range(body: GraphModule) -> tuple[float, float]:
    """Return the smallest and largest machine epsilon of the dtypes in a body; zeros if none is floating-point."""
    epsilons: set[float] = set()
    stack = [body]
    while stack:
        at = stack.pop()
        for node in at.graph.nodes:
            value = node.meta.get("val")
            for v in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
                if isinstance(v, Tensor):
                    epsilons.add(machine_epsilon(v.dtype))
        stack.extend(m for m in at._modules.values() if isinstance(m, Body))
    epsilons.discard(0.0)
    return (min(epsilons), max(epsilons)) if epsilons else (0.0, 0.0)
