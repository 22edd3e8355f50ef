"""Verifying: compiled code against the body, on made-up operands, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.ir.graph_module import Body
from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Compiled, contract_of
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.numerics.compare import flat_results, same_bits
from dovetail.numerics.sample_inputs import hint_of, memory, passed, random_state_kept, real_examples
from dovetail.numerics.tolerance import (
    Precise,
    Reference,
    difference,
    margin,
    precise_operands,
    rounding,
    roundings,
)
from dovetail.outlining.region import Region
from dovetail.rules.library.library_rule import Kind

_SEEDS = (0, 1000, 2000)
_REFERENCE_TOLERANCE = 2e-6
"""How far, relative to a value's size, a kind's reference may be from the body in float64: constants are rounded."""
_LARGEST = 2**31


def verify_unit(
    unit: CompileUnit,
    run: Compiled,
    examples: Sequence[Any],
    situation: Specialization,
    bound: float | None = None,
) -> str | None:
    """Run code and body on the same made-up operands; what is wrong in words, None if nothing is.

    Results, written operands and, where gradients are recorded, the gradients of all operands are compared, each
    number by how well the body itself does against float64, or, with a `bound`, each value as a whole by how far it
    is off relative to its size. It covers these runs, not later ones. `uncovered` says what it does not look at;
    operands that the body does not take are not tried either. A region of a well-known kind must also be what the
    kind's reference computes: a kernel chosen by kind has only that to go by.
    """
    if _not_run(unit, examples) is not None:
        return None
    reason = reference_mismatch(unit, examples)
    if reason is not None:
        return reason
    with random_state_kept(), torch.set_grad_enabled(situation.grad):
        trial = _RegionTrial(unit, situation.grad, bound)
        for seed in _SEEDS:
            # Where the body gives NaN the code must too, so one run takes numbers from everywhere.
            drawn = {i: d for i, d in unit.domains.items() if d.strict or seed != _SEEDS[-1]}
            given = real_examples(examples, seed, drawn)
            reason = trial.shapes(run, given) if unit.effects.random else trial.values(run, given)
            if reason is not None:
                return reason
    return None


def uncovered(unit: CompileUnit, examples: Sequence[Any]) -> str | None:
    """What of a body verifying cannot compare, and why; None if it compares everything."""
    not_run = _not_run(unit, examples)
    if not_run is not None:
        return f"not run: {not_run}"
    return "shapes only: it draws random numbers" if unit.effects.random else None


def reference_mismatch(
    unit: CompileUnit, examples: Sequence[Any], seeds: Sequence[int] = _SEEDS
) -> str | None:
    """How the body of a region differs from the reference of its kind, on made-up operands; None if it does not.

    Both run in float64 where every operator has it, from the same state of the random generators. Only results that
    the kind names are compared. None too where the kind is not one of the library's, and where the body does not take
    the operands.
    """
    contract = contract_of(unit.region)
    if contract is None:
        return None
    region = unit.region
    with random_state_kept(), torch.no_grad():
        for seed in seeds:
            given = [
                a.detach() if isinstance(a, Tensor) else a
                for a in real_examples(examples, seed, unit.domains)
            ]
            try:
                run: Callable[..., Any] = Precise(cast("Body", region.body)).run
                operands = precise_operands(given)
                body = _seeded(run, seed, *_fresh(operands, unit.effects.writes)[1])
            except Exception:
                # Not every operator has double precision.
                operands = given
                try:
                    body = _seeded(region.body, seed, *_fresh(operands, unit.effects.writes)[1])
                except Exception:
                    continue  # operands that the body does not take say nothing of its kind
            named = {name: operands[i] for name, i in region.arguments.items()}
            try:
                results = _as_tuple(_seeded(contract.reference, seed, **named, **region.attrs))
            except Exception as error:
                return (
                    f"it is not of kind '{region.kind}': the reference raised {type(error).__name__}: {error}"
                )
            for i, k in enumerate(region.results):
                if k is None:
                    continue
                reason = _apart(body[i], results[k] if k < len(results) else None)
                if reason is not None:
                    return f"it is not of kind '{region.kind}': result {i} {reason}"
            if seed == seeds[0] and (reason := _dtypes_apart(region, contract, given)) is not None:
                return f"it is not of kind '{region.kind}': {reason}"
    return None


def _dtypes_apart(region: Region, contract: Kind, operands: Sequence[Any]) -> str | None:
    """Which result of the reference has another dtype than the body's: a run in float64 does not show it."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in operands]
        named = {name: fakes[i] for name, i in region.arguments.items()}
        try:
            results = _as_tuple(contract.reference(**named, **region.attrs))
        except Exception as error:
            # In float64 all operands have one precision.
            return f"in its own dtypes the reference raised {type(error).__name__}: {error}"
    (returned,) = region.body.graph.output_node().args
    for i, (node, k) in enumerate(zip(cast("Sequence[Any]", returned), region.results, strict=True)):
        value = node.meta.get("val") if k is not None else None
        if isinstance(value, Tensor) and value.dtype != results[cast("int", k)].dtype:
            return f"result {i} is {value.dtype}, the reference {results[cast('int', k)].dtype}"
    return None


def _as_tuple(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (tuple, list)) else (results,)


def _seeded(run: Callable[..., Any], seed: int, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return run(*args, **kwargs)


def _apart(body: Any, reference: Any) -> str | None:
    """How far a reference is from the body's value, if too far."""
    if not isinstance(body, Tensor) or not isinstance(reference, Tensor):
        return None if body is None and reference is None else "is not computed by the reference"
    if body.shape != reference.shape:
        return f"has shape {tuple(body.shape)}, the reference {tuple(reference.shape)}"
    if body.dtype != reference.dtype:
        return f"is {body.dtype}, the reference {reference.dtype}"
    size = torch.abs(body[body.isfinite()])
    tolerance = max(_REFERENCE_TOLERANCE, margin(body.dtype)) * (
        1.0 if not size.numel() else float(size.max())
    )
    if torch.allclose(body, reference, rtol=0.0, atol=tolerance, equal_nan=True):
        return None
    off = (body.double() - reference.double()).abs().nan_to_num(math.inf)
    return f"is off the reference by up to {float(off.max()):.3g}, where {tolerance:.1g} is allowed"


def _not_run(unit: CompileUnit, examples: Sequence[Any]) -> str | None:
    if unit.effects.world:
        return f"it acts on the world ({unit.effects.world})"
    tensors = [e for e in examples if isinstance(e, Tensor)]
    if sum(t.element_size() * math.prod(hint_of(n) for n in t.shape) for t in tensors) > _LARGEST:
        return "its operands are too large to be made up"
    return None


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What a run came to, each value under the words that it is told by."""

    values: dict[str, Any]
    before: list[Any]
    after: list[Any]


class _RegionTrial:
    """Runs of one body and of code made for it."""

    def __init__(self, unit: CompileUnit, grad: bool, bound: float | None) -> None:
        self.body, self.writes, self.grad = cast("Body", unit.region.body), unit.effects.writes, grad
        self.bound = bound
        self.finest, self.coarsest = roundings(self.body)

    def shapes(self, run: Compiled, given: Sequence[Any]) -> str | None:
        """Whether results have the shapes and dtypes of the body's, whatever their numbers."""
        try:
            wanted = self.body(*_fresh(given, self.writes)[1])
        except Exception:
            # Made-up operands that the body does not take say nothing of the code.
            return None
        made = run(*_fresh(given, self.writes)[1])
        if len(made) != len(wanted):
            return f"it returned {len(made)} results; the body returns {len(wanted)}"
        found = flat_results(made)
        for label, needs in flat_results(wanted).items():
            has = found.get(label)
            if not isinstance(needs, Tensor):
                continue
            if not isinstance(has, Tensor):
                return f"{label} is a {type(has).__name__}, not a tensor"
            if (has.shape, has.dtype) != (needs.shape, needs.dtype):
                return f"{label} is {has.dtype} of shape {tuple(has.shape)}, not {needs.dtype} of {tuple(needs.shape)}"
        return None

    def values(self, run: Compiled, given: Sequence[Any]) -> str | None:
        """What is wrong with the numbers of one run."""
        try:
            wanted = self._ran(self.body, given)
        except Exception:
            # Made-up operands may be none that it takes: an index out of range, a matrix that has no inverse.
            return None
        precise, moved = (
            (self._precise(given, 0.0), self._precise(given, _moved_by(self.finest)))
            if self.coarsest and self.bound is None
            else (None, None)
        )
        made = self._ran(run, given)
        if len(made.values) != len(wanted.values):
            missing = next((w for w in wanted.values if w not in made.values), "a result more")
            return f"it does not give what the body gives: {missing}"
        for i, (old, new) in enumerate(zip(made.before, made.after, strict=True)):
            if i not in self.writes and isinstance(old, Tensor) and not same_bits(old, new):
                return f"it wrote operand {i}, which the body leaves as it is"
        for label, needs in wanted.values.items():
            has = made.values[label]
            reason = _compared(has, needs, label, precise, moved, self.coarsest, self.bound)
            if reason is not None:
                return f"{label} {reason}"
        return None

    def _precise(self, given: Sequence[Any], moved_by: float) -> _Outcome | None:
        try:
            return self._ran(Precise(self.body).run, precise_operands(given, moved_by), like=given)
        except Exception:
            # Not every operator has double precision; the body alone is compared with then.
            return None

    def _ran(
        self, run: Callable[..., Any], given: Sequence[Any], like: Sequence[Any] | None = None
    ) -> _Outcome:
        leaves, operands = _fresh(given, self.writes)
        before = [a.detach().clone() if isinstance(a, Tensor) else a for a in operands]
        made = flat_results(run(*operands))
        values: dict[str, Any] = {
            label: v.detach() if isinstance(v, Tensor) else v for label, v in made.items()
        }
        if self.grad:
            values |= _gradients(list(made.values()), leaves, leaves if like is None else like)
        after = [a.detach() if isinstance(a, Tensor) else a for a in operands]
        values |= {f"operand {i} after the call": after[i] for i in sorted(self.writes)}
        return _Outcome(values, before, after)


def _moved_by(finest: float) -> float:
    return (64 if finest < 1e-6 else 2) * finest


def _fresh(given: Sequence[Any], writes: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Copies of operands as leaves, and what is passed for them."""
    leaves: list[Any] = []
    operands: list[Any] = []
    for i, a in enumerate(given):
        if not isinstance(a, Tensor):
            leaves.append(a)
            operands.append(a)
            continue
        leaf = memory(a).as_strided(a.shape, a.stride()).requires_grad_(a.requires_grad)
        leaves.append(leaf)
        operands.append(passed(leaf, i in writes))
    return leaves, operands


def _gradients(made: Sequence[Any], leaves: Sequence[Any], like: Sequence[Any]) -> dict[str, Any]:
    """Gradients of all operands that require them, for random cotangents that depend on shapes alone."""
    outputs = [(i, v) for i, v in enumerate(made) if isinstance(v, Tensor) and v.requires_grad]
    wanted = [i for i, a in enumerate(like) if isinstance(a, Tensor) and a.requires_grad]
    if not outputs:
        return {}
    cotangents: list[Tensor] = []
    for i, value in outputs:
        generator = torch.Generator().manual_seed(7 + i)
        numbers = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        # Numbers that every dtype holds exactly: all runs must get the same ones.
        cotangents.append((numbers * 4).round().div(4).to(value.device, value.dtype))
    found: Any = torch.autograd.grad(
        [v for _, v in outputs], [leaves[i] for i in wanted], cotangents, allow_unused=True
    )
    return {
        f"the gradient of operand {i}": torch.zeros_like(leaves[i]) if g is None else g.detach()
        for i, g in zip(wanted, found, strict=True)
    }


def _compared(
    has: Any,
    needs: Any,
    label: str,
    precise: _Outcome | None,
    moved: _Outcome | None,
    coarsest: float,
    bound: float | None,
) -> str | None:
    if isinstance(needs, (tuple, list)):
        # What is in it is compared by itself.
        return (
            None if type(has) is type(needs) else f"is a {type(has).__name__}, not a {type(needs).__name__}"
        )
    if not isinstance(needs, Tensor):
        return None if type(has) is type(needs) and has == needs else f"is {has!r}, not {needs!r}"
    if not isinstance(has, Tensor):
        return f"is a {type(has).__name__}, not a tensor"
    seen = [_tensor(outcome, label, needs) for outcome in (precise, moved)]
    return difference(has, Reference(needs, seen[0], seen[1], coarsest, bound))


def _tensor(outcome: _Outcome | None, label: str, like: Tensor) -> Tensor | None:
    value = outcome.values.get(label) if outcome is not None else None
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return None
    return value if bool(rounding(value.dtype)) == bool(rounding(like.dtype)) else None
