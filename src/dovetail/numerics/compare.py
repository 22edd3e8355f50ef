"""Comparisons of a run with what it must produce: outputs, memory layout, aliasing, written operands, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dovetail.ir.effects import BodySummary
from dovetail.ir.nodes import example_size, storage_key
from dovetail.ir.weight_guard import packed_bytes
from dovetail.numerics.sample_inputs import as_non_leaf
from dovetail.numerics.tolerance import (
    Reference,
    Tolerance,
    comparable,
    difference,
    machine_epsilon,
    perturbation,
    relative_error,
)

_MAX_NOISE = 0.1
"""The largest error of the numbers of a model, relative to their size, that counts as rounding."""


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """The outputs of a body on fake operands, and the effects of the body."""

    outputs: tuple[Any, ...]
    effects: BodySummary

    def mismatch(self, results: object) -> str | None:
        """Return how results differ from the body's in structure, spec or aliasing; None if they agree."""
        if not isinstance(results, (tuple, list)):
            return f"it returned a {type(results).__name__}; the body returns a tuple of {len(self.outputs)}"
        values = cast("Sequence[Any]", results)
        if len(values) != len(self.outputs):
            return f"it returned {len(values)} results; the body returns {len(self.outputs)}"
        actual, expected = flatten_results(values), flatten_results(self.outputs)
        for label, output in expected.items():
            reason = _spec_mismatch(actual[label], output) if label in actual else "is missing"
            if reason is not None:
                return f"{label} {reason}"
        if len(actual) != len(expected):
            return "it returned more than the body does"
        return _new_alias(actual, expected)


def expected_outcome(
    body: Callable[..., Any], effects: BodySummary, examples: Sequence[Any], *, grad: bool
) -> ExpectedOutcome:
    """Run a body on fake operands and return its outputs, with the gradient flags they have."""
    mode = next((e.fake_mode for e in examples if isinstance(e, FakeTensor)), None) or FakeTensorMode()
    # Some of torch's composite operators ask for symbolic sizes as numbers unless Python decomposes them; but then
    # dropout that is off returns a copy.
    dispatcher = contextlib.nullcontext() if mode.shape_env is None else enable_python_dispatcher()
    with mode, dispatcher, torch.set_grad_enabled(grad), torch.random.fork_rng(devices=[]):
        outputs = body(*(as_non_leaf(_empty_like(e), i in effects.writes) for i, e in enumerate(examples)))
    return ExpectedOutcome(tuple(outputs), effects)


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return empty.requires_grad_(value.requires_grad)


def flatten_results(results: Sequence[Any]) -> dict[str, Any]:
    """Return results by label ("result 0", "result 0[1]"), the elements of nested tuples and lists included."""
    labelled: dict[str, Any] = {}
    worklist = [(f"result {i}", value) for i, value in enumerate(results)]
    for label, value in worklist:
        labelled[label] = value
        if isinstance(value, (tuple, list)):
            worklist += [(f"{label}[{k}]", v) for k, v in enumerate(cast("Sequence[Any]", value))]
    return labelled


def type_mismatch(actual: object, expected: object) -> str | None:
    """Return how the class of a value differs from the expected one; None if they agree."""
    if isinstance(expected, Tensor):
        return None if isinstance(actual, Tensor) else f"is a {type(actual).__name__}, not a tensor"
    same = type(actual) is type(expected)
    return None if same else f"is a {type(actual).__name__}, not a {type(expected).__name__}"


def tensor_mismatch(actual: object, expected: Tensor, *, values: bool) -> str | None:
    """Return how a value differs from a tensor in dtype, shape, device or layout, with `values` in its numbers too."""
    if not isinstance(actual, Tensor):
        return type_mismatch(actual, expected)
    has, needs = ((v.shape, v.dtype, v.device, v.layout) for v in (actual, expected))
    if has != needs:
        return f"is {describe_tensor(actual)}, not {describe_tensor(expected)}"
    return difference(actual.detach(), Reference(expected)) if values else None


def describe_tensor(value: Tensor) -> str:
    """Describe a tensor in messages, as in "float32[4, 8] on cuda:0"."""
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    layout = "" if value.layout is torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}{layout}"


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(packed_bytes(a), packed_bytes(b))


def output_gradients(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor | None] | None:
    """Return the gradients of leaves for cotangents that depend on nothing but the shapes of the outputs.

    None where no output requires gradients, an element None where no output depends on the leaf.
    """
    differentiable = [(i, v) for i, v in enumerate(outputs) if isinstance(v, Tensor) and v.requires_grad]
    if not differentiable:
        return None
    cotangents: list[Tensor] = []
    for i, value in differentiable:
        numbers = torch.randn(
            value.shape, generator=torch.Generator().manual_seed(7 + i), dtype=torch.float32
        )
        # Numbers that every dtype holds exactly: all runs must get the same ones.
        cotangents.append((numbers * 4).round().div(4).to(value.device, value.dtype))
    return list(
        torch.autograd.grad([v for _, v in differentiable], list(leaves), cotangents, allow_unused=True)
    )


class MutationCheck:
    """Copies of the operands of a run, to find writes and aliases that the body does not have."""

    def __init__(self, args: Sequence[Any], effects: BodySummary) -> None:
        self.effects = effects
        self.tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()]
        self.copies = {i: a.detach().clone() for i, a in self.tensors if i not in effects.writes}

    def mismatch(self, results: Sequence[Any]) -> str | None:
        """Return which operand was written or returned that the body does not write or return; None if none was."""
        for i, a in self.tensors:
            if i in self.copies and not bitwise_equal(self.copies[i], a.detach()):
                return f"it wrote operand {i}, which the body leaves as it is"
        operands = {storage_key(a): i for i, a in self.tensors}
        for label, value in flatten_results(results).items():
            if isinstance(value, Tensor) and value.numel():
                i = operands.get(storage_key(value))
                if i is not None and i not in self.effects.returns:
                    return f"{label} shares memory with operand {i}, which the body's does not"
        return None

    def reused_memory(self, first: Sequence[Any], second: Sequence[Any]) -> str | None:
        """Return which result of a second run is in memory of the first run's results; None if none is."""
        operands = {storage_key(a) for _, a in self.tensors}
        before = {
            storage_key(v) for v in flatten_results(first).values() if isinstance(v, Tensor) and v.numel()
        }
        for label, value in flatten_results(second).items():
            if isinstance(value, Tensor) and value.numel() and storage_key(value) in before - operands:
                return f"{label} is in the same memory in every call"
        return None


def _new_alias(actual: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Return which results share memory that do not in the body; None if none do."""
    first: dict[int, str] = {}
    for label, value in actual.items():
        if isinstance(value, Tensor) and value.numel():
            other = first.setdefault(storage_key(value), label)
            if other != label and storage_key(expected[other]) != storage_key(expected[label]):
                return f"{label} shares memory with {other}, which the body's does not"
    return None


def _spec_mismatch(actual: Any, expected: Any) -> str | None:
    if not isinstance(expected, Tensor):
        # A symbolic size is a number in every call.
        return type_mismatch(actual, example_size(expected))
    if not isinstance(actual, Tensor):
        return type_mismatch(actual, expected)
    for what, has, needs in (
        ("shape", tuple(actual.shape), tuple(example_size(n) for n in expected.shape)),
        ("dtype", actual.dtype, expected.dtype),
        ("device", actual.device, expected.device),
        ("requires_grad", actual.requires_grad, expected.requires_grad),
    ):
        if has != needs:
            return f"has {what} {has}, not {needs}"
    strides = tuple(example_size(n) for n in expected.stride())
    for size, has, needs in zip(actual.shape, actual.stride(), strides, strict=True):
        if size > 1 and actual.numel() and has != needs:
            return f"has strides {tuple(actual.stride())}, not {strides}"
    return None


@dataclass(frozen=True, eq=False)
class ModelOutcome:
    """The values of one run of a model by label: results, inputs and buffers afterwards, gradients, generator states."""

    structure: str
    results: dict[str, Any]
    inputs: dict[str, Any]
    buffers: dict[str, Any]
    gradients: dict[str, Any]
    random: dict[str, Tensor]

    def get(self, label: str) -> Any:
        """Return the value of a label; None without one."""
        return {**self.results, **self.inputs, **self.buffers, **self.gradients}.get(label)

    def drew_like(self, other: ModelOutcome) -> bool:
        """Return whether a run drew the same random numbers as another."""
        return all(torch.equal(state, other.random[label]) for label, state in self.random.items())


class ReferenceRuns(Protocol):
    """Runs of a reference model on fixed inputs, all from the same state and random numbers."""

    @property
    def epsilons(self) -> Collection[float]:
        """The machine epsilons of the dtypes of the model and its inputs."""
        ...

    def run(self) -> ModelOutcome:
        """Run the model as it is."""
        ...

    def run_perturbed(self, by: float, *, float64: bool = False) -> ModelOutcome | None:
        """Run a copy with its numbers perturbed, on request in float64; None where that is not possible."""
        ...


@dataclass(frozen=True, eq=False)
class Difference:
    """A value that is not as in the reference run, and how it differs."""

    what: str
    how: str
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


class RunComparison:
    """Compares runs of a changed model with a reference model on the same inputs.

    A value may differ by the tolerance that the float64 run of the reference gives it (`tolerance.difference`), or by
    the noise of the reference itself when its numbers are perturbed by a rounding. These further runs of the
    reference happen when a value is not equal, each once.
    """

    def __init__(self, reference: ReferenceRuns) -> None:
        self.reference = reference
        self.expected = reference.run()
        self._perturbed: dict[tuple[float, ...], list[ModelOutcome]] = {}

    @cached_property
    def _repeated(self) -> ModelOutcome:
        return self.reference.run()

    @cached_property
    def _precise(self) -> tuple[ModelOutcome | None, ModelOutcome | None]:
        """The reference in float64, as it is and perturbed by a few roundings."""
        precise = self.reference.run_perturbed(0.0, float64=True)
        if precise is None or not precise.drew_like(self.expected):
            return None, None
        by = perturbation(min(self.reference.epsilons, default=0.0))
        return precise, self.reference.run_perturbed(by, float64=True)

    def difference(self, actual: ModelOutcome, tolerance: Tolerance) -> Difference | None:
        """Return the first difference: of random numbers, results, inputs, buffers or gradients."""
        expected = self.expected
        for label, state in expected.random.items():
            if not torch.equal(actual.random[label], state):
                return Difference(label, "is another one: more, fewer or other random numbers were drawn")
        if actual.structure != expected.structure:
            return Difference(
                "the results", f"have the structure {actual.structure}, not {expected.structure}"
            )
        for has, needs, allowed in (
            (actual.results, expected.results, tolerance),
            (actual.inputs, expected.inputs, tolerance),
            (actual.buffers, expected.buffers, tolerance),
            (actual.gradients, expected.gradients, replace(tolerance, exact=False)),
        ):
            for label, value in needs.items():
                how = self._value_difference(has[label], value, label, allowed) if label in has else None
                if how is not None:
                    return Difference(label, how)
        return None

    def nondeterminism(self) -> Difference | None:
        """Return how the reference differs from itself beyond rounding; None if it does not."""
        return self.difference(self._repeated, Tolerance())

    def largest_error(self, actual: ModelOutcome) -> float:
        """Return the largest relative error among floating-point results."""
        errors = [
            relative_error(has, needs)
            for label, needs in self.expected.results.items()
            if isinstance(needs, Tensor)
            and machine_epsilon(needs.dtype)
            and not equal_values(has := actual.results[label], needs)
        ]
        return max(errors, default=0.0)

    def _value_difference(self, has: Any, needs: Any, label: str, tolerance: Tolerance) -> str | None:
        if not isinstance(needs, Tensor):
            return type_mismatch(has, needs) or _object_difference(has, needs)
        if not isinstance(has, Tensor):
            return type_mismatch(has, needs)
        if has.device != needs.device:
            return f"is on {has.device}, not on {needs.device}"
        if has.requires_grad != needs.requires_grad:
            return "requires gradients" if has.requires_grad else "has no gradients"
        if equal_values(has, needs):
            return None
        if tolerance.bound is None:
            return self._beyond_rounding(has, needs, label, tolerance)
        if has.shape == needs.shape and has.dtype == needs.dtype and not machine_epsilon(needs.dtype):
            return self._integer_difference(has, needs, label, tolerance.bound)
        return difference(has.detach(), Reference(needs, bound=tolerance.bound, owner="the model"))

    def _integer_difference(self, has: Tensor, needs: Tensor, label: str, bound: float) -> str | None:
        """Count integers that differ though the reference keeps them when perturbed by `bound`; allow that share."""
        differs = has != needs
        for outcome in self._perturbed_runs(bound, -bound):
            value = comparable(outcome.get(label), needs)
            differs = differs if value is None else differs & (value == needs)
        wrong = int(differs.sum())
        if wrong <= bound * differs.numel():
            return None
        return (
            f"has other integers, {wrong} of {differs.numel()}, where the model keeps its own if all of it is off "
            f"by {bound:.1%}"
        )

    def _perturbed_runs(self, *amounts: float) -> list[ModelOutcome]:
        if amounts not in self._perturbed:
            runs = [self.reference.run_perturbed(by) for by in amounts]
            self._perturbed[amounts] = [run for run in runs if run is not None]
        return self._perturbed[amounts]

    def _beyond_rounding(self, has: Tensor, needs: Tensor, label: str, tolerance: Tolerance) -> str | None:
        precise, perturbed = (
            None if run is None else comparable(run.get(label), needs) for run in self._precise
        )
        coarsest = max((tolerance.coarsest, machine_epsilon(needs.dtype), *self.reference.epsilons))
        reason = difference(has.detach(), Reference(needs, precise, perturbed, coarsest, owner="the model"))
        if reason is not None and precise is not None and self._is_noise(has, needs, precise, label):
            reason = None
        if reason is not None or not tolerance.exact or not equal_values(self._repeated.get(label), needs):
            return reason
        most = float((has.detach().double() - needs.detach().double()).abs().nan_to_num(0.0).max())
        return f"is off by {most:.2g} at most, and nothing was done that may change a number"

    def _is_noise(self, has: Tensor, needs: Tensor, precise: Tensor, label: str) -> bool:
        """Return whether a value is as close to float64 as the reference is, up to a small factor.

        Gradients that nearly cancel, as before a batch norm, have few digits in any order of summation; how few,
        shows when the numbers of the reference are perturbed by a rounding.
        """
        if has.shape != needs.shape or has.dtype != needs.dtype or not machine_epsilon(needs.dtype):
            return False
        epsilon = max(self.reference.epsilons, default=0.0)
        runs = self._perturbed_runs(epsilon, -epsilon, 2 * epsilon)
        own = [needs, *(comparable(run.get(label), needs) for run in runs if run.drew_like(self.expected))]
        error, *samples = (
            (v.detach().to(precise.dtype) - precise).abs() for v in (has, *own) if v is not None
        )
        if not all(bool(values.isfinite().all()) for values in (error, *samples)):
            return False
        mean, most = max(_rms(s) for s in samples), max(float(s.max()) for s in samples)
        is_small = mean <= _MAX_NOISE * _rms(precise) or mean <= self._rounding_of_largest(label)
        return is_small and _rms(error) <= 4 * mean and float(error.max()) <= 8 * most

    def _rounding_of_largest(self, label: str) -> float:
        """Return what counts as rounding beside the largest of the results, buffers or gradients a value is among."""
        groups = (self.expected.results, self.expected.buffers, self.expected.gradients)
        values = next((group for group in groups if label in group), {}).values()
        sizes = [
            _rms(v.detach()) for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()
        ]
        relative = min(_MAX_NOISE, 100 * max(self.reference.epsilons, default=0.0))
        return relative * max(sizes, default=0.0)


def equal_values(a: object, b: Tensor) -> bool:
    """Return whether a value is a tensor with the numbers of another, NaN where that has NaN."""
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.detach(), b.detach()
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _object_difference(has: object, needs: object) -> str | None:
    """Return how a value of the same class differs; classes without an equality of their own are not compared."""
    try:
        is_equal = bool(has == needs)
    except Exception:  # a class of the user's that cannot be compared
        return None
    is_compared = type(needs).__eq__ is not object.__eq__
    return f"is {has!r}, not {needs!r}" if is_compared and not is_equal else None


def _rms(value: Tensor) -> float:
    return float(value.abs().square().mean().sqrt())
