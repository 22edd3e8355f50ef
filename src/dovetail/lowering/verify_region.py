"""Verification of compiled code against the body it was compiled from, on sample inputs, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.ir.graph_module import Body
from dovetail.ir.nodes import example_size
from dovetail.ir.process_state import preserve_rng_state
from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Compiled, contract_of
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.numerics.compare import bitwise_equal, flatten_results, output_gradients, type_mismatch
from dovetail.numerics.sample_inputs import as_non_leaf, clone_span, random_inputs
from dovetail.numerics.tolerance import (
    Float64Interpreter,
    Reference,
    base_tolerance,
    comparable,
    difference,
    epsilon_range,
    float64_operands,
    perturbation,
)
from dovetail.outlining.region import Region, results

if TYPE_CHECKING:
    from dovetail.rules.library.library_rule import Kind

_SEEDS = (0, 1000, 2000)
_REFERENCE_TOLERANCE = 2e-6
"""How far, relative to a value's size, a kind's reference may be from the body in float64: constants are rounded."""
_MAX_BYTES = 2**31


def verify_unit(
    unit: CompileUnit,
    run: Compiled,
    examples: Sequence[Any],
    specialization: Specialization,
    bound: float | None = None,
) -> str | None:
    """Run code and body on the same sample inputs; return the first difference, or None.

    Results, written operands and, where gradients are recorded, the gradients of all operands are compared: each
    number by the error of the body itself against float64, or, with a `bound`, each value as a whole by its relative
    error. It covers these runs, not later ones. `uncovered` returns what is not compared; inputs that the body
    rejects are skipped. A region of a library kind must also compute what the kind's reference computes, for kernels
    selected by kind rely on that.
    """
    if why_not_run(unit, examples) is not None:
        return None
    reason = reference_mismatch(unit, examples)
    if reason is not None:
        return reason
    with preserve_rng_state(), torch.set_grad_enabled(specialization.grad):
        trial = _RegionTrial(unit, specialization.grad, bound)
        for seed in _SEEDS:
            # Where the body gives NaN the code must too, so one run draws from outside the domains.
            domains = {i: d for i, d in unit.domains.items() if d.strict or seed != _SEEDS[-1]}
            inputs = random_inputs(examples, seed, domains)
            reason = trial.compare_specs(run, inputs) if unit.effects.random else trial.compare(run, inputs)
            if reason is not None:
                return reason
    return None


def uncovered(unit: CompileUnit, examples: Sequence[Any]) -> str | None:
    """Return what of a body verification does not compare, and why; None if it compares everything."""
    not_run = why_not_run(unit, examples)
    if not_run is not None:
        return f"not run: {not_run}"
    return "shapes only: it draws random numbers" if unit.effects.random else None


def reference_mismatch(
    unit: CompileUnit, examples: Sequence[Any], seeds: Sequence[int] = _SEEDS
) -> str | None:
    """Return how the body of a region differs from the reference of its kind on sample inputs; None if it does not.

    Both run in float64 where every operator has it, from the same random state. Only results that the kind names are
    compared. None too where the kind is not one of the library's, and where the body rejects the inputs.
    """
    contract = contract_of(unit.region)
    if contract is None:
        return None
    region = unit.region
    with preserve_rng_state(), torch.no_grad():
        for seed in seeds:
            inputs = [
                a.detach() if isinstance(a, Tensor) else a
                for a in random_inputs(examples, seed, unit.domains)
            ]
            try:
                operands = float64_operands(inputs)
                run = Float64Interpreter(cast("Body", region.body)).run
                outputs = _run_seeded(run, seed, *_fresh_operands(operands, unit.effects.writes)[1])
            except Exception:
                # Not every operator has a float64 kernel.
                operands = inputs
                try:
                    outputs = _run_seeded(
                        region.body, seed, *_fresh_operands(operands, unit.effects.writes)[1]
                    )
                except Exception:
                    continue  # the body rejects these inputs, so they show nothing about its kind
            named = {name: operands[i] for name, i in region.arguments.items()}
            try:
                computed = _as_tuple(_run_seeded(contract.reference, seed, **named, **region.attrs))
            except Exception as error:
                return (
                    f"it is not of kind '{region.kind}': the reference raised {type(error).__name__}: {error}"
                )
            for i, k in enumerate(region.results):
                if k is None:
                    continue
                reason = _reference_difference(outputs[i], computed[k] if k < len(computed) else None)
                if reason is not None:
                    return f"it is not of kind '{region.kind}': result {i} {reason}"
            if seed == seeds[0] and (reason := _dtype_mismatch(region, contract, inputs)) is not None:
                return f"it is not of kind '{region.kind}': {reason}"
    return None


def _dtype_mismatch(region: Region, contract: Kind, operands: Sequence[Any]) -> str | None:
    """Return which result of the reference has another dtype than the body's: a run in float64 does not show it."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in operands]
        named = {name: fakes[i] for name, i in region.arguments.items()}
        try:
            computed = _as_tuple(contract.reference(**named, **region.attrs))
        except Exception as error:
            # In float64 all operands have one precision.
            return f"in its own dtypes the reference raised {type(error).__name__}: {error}"
    for i, (node, k) in enumerate(zip(results(region.body), region.results, strict=True)):
        value = node.meta.get("val")
        if k is not None and isinstance(value, Tensor) and value.dtype != computed[k].dtype:
            return f"result {i} is {value.dtype}, the reference {computed[k].dtype}"
    return None


def _as_tuple(returned: Any) -> Sequence[Any]:
    return returned if isinstance(returned, (tuple, list)) else (returned,)


def _run_seeded(run: Callable[..., Any], seed: int, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return run(*args, **kwargs)


def _reference_difference(value: object, reference: object) -> str | None:
    """Return how far a reference is from the body's value; None if it is within tolerance."""
    if not isinstance(value, Tensor) or not isinstance(reference, Tensor):
        return None if value is None and reference is None else "is not computed by the reference"
    if value.shape != reference.shape:
        return f"has shape {tuple(value.shape)}, the reference {tuple(reference.shape)}"
    if value.dtype != reference.dtype:
        return f"is {value.dtype}, the reference {reference.dtype}"
    finite = torch.abs(value[value.isfinite()])
    size = float(finite.max()) if finite.numel() else 1.0
    tolerance = max(_REFERENCE_TOLERANCE, base_tolerance(value.dtype)) * size
    if torch.allclose(value, reference, rtol=0.0, atol=tolerance, equal_nan=True):
        return None
    error = (value.double() - reference.double()).abs().nan_to_num(math.inf)
    return f"is off the reference by up to {float(error.max()):.3g}, where {tolerance:.1g} is allowed"


def why_not_run(unit: CompileUnit, examples: Sequence[Any]) -> str | None:
    """Return why a body cannot be run on sample inputs; None if it can."""
    if unit.effects.host_effect:
        return f"it acts on the host ({unit.effects.host_effect})"
    tensors = [e for e in examples if isinstance(e, Tensor)]
    size = sum(t.element_size() * math.prod(example_size(n) for n in t.shape) for t in tensors)
    if size > _MAX_BYTES:
        return f"its operands are too large for sample inputs ({size / 2**30:.1f} GiB)"
    return None


@dataclass(frozen=True, eq=False)
class _RunOutcome:
    """Results, gradients and written operands of a run by label, and all operands before and after it."""

    values: dict[str, Any]
    before: list[Any]
    after: list[Any]


class _RegionTrial:
    """Runs of one body and of code compiled for it."""

    def __init__(self, unit: CompileUnit, grad: bool, bound: float | None) -> None:
        self.body, self.writes, self.grad = cast("Body", unit.region.body), unit.effects.writes, grad
        self.bound = bound
        self.finest, self.coarsest = epsilon_range(self.body)

    def compare_specs(self, run: Compiled, inputs: Sequence[Any]) -> str | None:
        """Return how shapes and dtypes of results differ from the body's; None if they agree."""
        try:
            expected = self.body(*_fresh_operands(inputs, self.writes)[1])
        except Exception:
            # Inputs that the body rejects show nothing about the code.
            return None
        results = run(*_fresh_operands(inputs, self.writes)[1])
        if len(results) != len(expected):
            return f"it returned {len(results)} results; the body returns {len(expected)}"
        actual = flatten_results(results)
        for label, needs in flatten_results(expected).items():
            has = actual.get(label)
            if not isinstance(needs, Tensor):
                continue
            if not isinstance(has, Tensor):
                return f"{label} {type_mismatch(has, needs)}"
            if (has.shape, has.dtype) != (needs.shape, needs.dtype):
                return f"{label} is {has.dtype} of shape {tuple(has.shape)}, not {needs.dtype} of {tuple(needs.shape)}"
        return None

    def compare(self, run: Compiled, inputs: Sequence[Any]) -> str | None:
        """Return the first difference between one run of the code and of the body, or None."""
        try:
            expected = self._run(self.body, inputs)
        except Exception:
            # The body may reject sample inputs: an index out of range, a matrix that has no inverse.
            return None
        references: list[_RunOutcome | None] = [None, None]
        if self.coarsest and self.bound is None:
            references = [self._run_float64(inputs, by) for by in (0.0, perturbation(self.finest))]
        actual = self._run(run, inputs)
        if len(actual.values) != len(expected.values):
            missing = next(
                (label for label in expected.values if label not in actual.values), "a result more"
            )
            return f"it does not give what the body gives: {missing}"
        for i, (old, new) in enumerate(zip(actual.before, actual.after, strict=True)):
            if i not in self.writes and isinstance(old, Tensor) and not bitwise_equal(old, new):
                return f"it wrote operand {i}, which the body leaves as it is"
        for label, needs in expected.values.items():
            reason = self._difference(actual.values[label], needs, label, references)
            if reason is not None:
                return f"{label} {reason}"
        return None

    def _difference(
        self, has: object, needs: object, label: str, references: Sequence[_RunOutcome | None]
    ) -> str | None:
        if isinstance(needs, (tuple, list)):
            return type_mismatch(has, needs)  # the elements have labels of their own
        if not isinstance(needs, Tensor):
            return None if type(has) is type(needs) and has == needs else f"is {has!r}, not {needs!r}"
        if not isinstance(has, Tensor):
            return type_mismatch(has, needs)
        precise, perturbed = (
            None if r is None else comparable(r.values.get(label), needs) for r in references
        )
        return difference(has, Reference(needs, precise, perturbed, self.coarsest, self.bound))

    def _run_float64(self, inputs: Sequence[Any], perturbed_by: float) -> _RunOutcome | None:
        try:
            return self._run(
                Float64Interpreter(self.body).run, float64_operands(inputs, perturbed_by), like=inputs
            )
        except Exception:
            # Not every operator has a float64 kernel; the body alone is the reference then.
            return None

    def _run(
        self, run: Callable[..., Any], inputs: Sequence[Any], like: Sequence[Any] | None = None
    ) -> _RunOutcome:
        leaves, operands = _fresh_operands(inputs, self.writes)
        before = [a.detach().clone() if isinstance(a, Tensor) else a for a in operands]
        results = flatten_results(run(*operands))
        values: dict[str, Any] = {
            label: v.detach() if isinstance(v, Tensor) else v for label, v in results.items()
        }
        if self.grad:
            inputs = leaves if like is None else like
            indices = [i for i, a in enumerate(inputs) if isinstance(a, Tensor) and a.requires_grad]
            gradients = output_gradients(list(results.values()), [leaves[i] for i in indices])
            if gradients is not None:
                values |= {
                    f"the gradient of operand {i}": torch.zeros_like(leaves[i]) if g is None else g.detach()
                    for i, g in zip(indices, gradients, strict=True)
                }
        after = [a.detach() if isinstance(a, Tensor) else a for a in operands]
        values |= {f"operand {i} after the call": after[i] for i in sorted(self.writes)}
        return _RunOutcome(values, before, after)


def _fresh_operands(inputs: Sequence[Any], writes: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Return copies of inputs as leaves, and the operands to pass for them."""
    leaves = [
        clone_span(a).as_strided(a.shape, a.stride()).requires_grad_(a.requires_grad)
        if isinstance(a, Tensor)
        else a
        for a in inputs
    ]
    return leaves, [as_non_leaf(a, i in writes) for i, a in enumerate(leaves)]
