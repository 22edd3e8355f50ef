"""Linear layers and convolutions in 8-bit integers, by oneDNN, after watching the values they are given."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import CallMismatch, InvalidArgument, checked_init
from dovetail.graph.forking import released_by_fork
from dovetail.graph.module import Body
from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.lowering.backends.common import why_not_plain
from dovetail.lowering.backends.int8_plan import Plan
from dovetail.lowering.backends.int8_products import products_of
from dovetail.lowering.backends.int8_ranges import Calibration, Calibrations, fingerprint
from dovetail.lowering.backends.int8_steps import Step, why_not_here
from dovetail.lowering.closeness import relative_error
from dovetail.lowering.examples import random_state_kept
from dovetail.lowering.faults import Failure
from dovetail.lowering.flattening import flat
from dovetail.lowering.lowering import lowering_of
from dovetail.lowering.site import CallSite
from dovetail.lowering.situation import autocast_off, is_trial
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_CALLS = 4
_BOUND = 0.05


@checked_init()
class Int8(Backend):
    """Runs regions with products in int8: linear layers and convolutions, with the batch norm and activation behind.

    Each call of a region runs in float32 until it was calibrated: by `calibration`, sample inputs of the model that
    are run through it when it is lowered, fused by name or built (a tuple of arguments, a mapping of keyword arguments,
    or the one argument), otherwise in its own first `calibrate` calls. If its result in int8 is further than `bound` from that in
    float32, relative to its size, in the last of these, it stays in float32 and the record says so; `verify` allows
    code the same. Where the weights of one call change, all calls of the graph calibrate again.

    Weights have steps of their own for each output, values one range that takes in zero. For inference, in place of
    float32, on an x86 CPU with AVX512-VNNI. Values that are not finite become finite ones.
    """

    name = "int8"
    smallest = 1

    def __init__(
        self, calibration: Iterable[Any] = (), *, calibrate: int = _CALLS, bound: float = _BOUND
    ) -> None:
        _check(calibration, calibrate, bound)
        self.samples = tuple(calibration)
        self.calibrate = len(self.samples) or calibrate
        self.bound = float(bound)
        self.version = f"1 {torch.__version__}"

    @property
    def rules(self) -> Any:
        """What finds the regions it takes: the library's rules for products, and those that take them alone."""
        from dovetail.lowering.backends.int8_rules import RULES

        return RULES

    @property
    def options(self) -> Mapping[str, Any]:
        return {"calibrate": self.calibrate, "bound": self.bound, "samples": len(self.samples)}

    def supports(self, region: Region) -> Answer:
        reason = why_not_here() or why_not_plain(region)
        if reason is None:
            try:
                products_of(flat(cast("Body", region.body)).graph)
            except Failure as failure:
                reason = str(failure)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return Uncalibrated(Plan(cast("Body", region.body), examples))

    def prepare(self, site: CallSite) -> Compiled:
        plan = cast("Uncalibrated", site.compiled).plan
        changing = sorted(plan.constants - site.constants)
        if changing:
            site.tell(
                f"stays in float32: its operand {changing[0]} is a weight, and no parameter or constant"
            )
            return plan.plain
        return Calibrated(self, plan, site)

    def settle(self, lowered: nn.Module) -> None:
        """Run the sample inputs through a model or its graph; its state is put back afterwards."""
        if not self.samples:
            return
        buffers = [(b, b.detach().clone()) for b in lowered.buffers() if not b.is_inference()]
        versions = [b._version for b, _ in buffers]
        fitting = 0
        with torch.no_grad(), autocast_off(), random_state_kept():
            try:
                fitting = sum(_ran(lowered, sample) for sample in self.samples)
            finally:
                for (buffer, before), version in zip(buffers, versions, strict=True):
                    if buffer._version != version:
                        buffer.copy_(before)
        lowering = lowering_of(lowered) if isinstance(lowered, GraphModule) else None
        if fitting < len(self.samples) and lowering is not None:
            told = (
                f"{fitting} of {len(self.samples)} sample inputs fit this graph; calls make up for the others"
            )
            lowering.note("", self.name, "calibration", told)

    def __getstate__(self) -> dict[str, Any]:
        # What was calibrated travels with the graph; the samples would only make it large.
        return {**self.__dict__, "samples": ()}


def _check(calibration: Any, calibrate: Any, bound: Any) -> None:
    if isinstance(calibration, (str, Tensor, Mapping)) or not isinstance(calibration, Iterable):
        raise InvalidArgument("calibration: give an iterable of sample inputs, a tuple of arguments each.")
    if not isinstance(calibrate, int) or isinstance(calibrate, bool) or calibrate < 1:
        raise InvalidArgument(f"calibrate {calibrate!r}; give the number of calls, 1 or more.")
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not 0 < bound < float("inf"):
        raise InvalidArgument(f"bound {bound!r}; give a relative error such as 0.05.")


def _ran(lowered: nn.Module, sample: Any) -> bool:
    args, kwargs = (sample, {}) if isinstance(sample, tuple) else ((), sample)
    if not isinstance(sample, (tuple, Mapping)):
        args, kwargs = (sample,), {}
    try:
        lowered(*args, **kwargs)
    except CallMismatch:
        return False
    return True


class Uncalibrated:
    """A body whose products go to integers by the range of the very values they are given."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.products = plan, plan.ranging()

    def __call__(self, *operands: Any) -> Any:
        with torch.no_grad():
            return self.plan.quantised(*self.products, *operands)


class Calibrated:
    """One call of a region: in float32 while it is watched, then in integers by ranges and weights that are fixed."""

    def __init__(self, backend: Int8, plan: Plan, site: CallSite) -> None:
        self.plan, self.tell, self.name = plan, site.tell, site.name
        self.reads_in_place = site.constants - plan.constants
        self.wanted, self.bound = backend.calibrate, cast("float", backend.bound)
        self.fingerprint = fingerprint(site.operands[i] for i in sorted(plan.constants))
        self.all: Calibrations = site.notes.setdefault(backend.name, Calibrations())
        self._lock = released_by_fork(threading.Lock())
        known = self._known()
        seen = known.seen if not known.refused else None
        # One value, so that a thread never has the ranges of one calibration and the state of another.
        self._state: tuple[Calibration, tuple[Step, ...] | None] = (
            known,
            None if seen is None else plan.packed(seen, site.operands),
        )

    def _known(self) -> Calibration:
        inputs = tuple(product.inputs for product in self.plan.products)
        return self.all.of(self.name, self.fingerprint, inputs, self.wanted)

    def __call__(self, *operands: Any) -> Any:
        known, steps = self._state
        if known.generation != self.all.generation:
            known, steps = self._state = (self._known(), None)
        if steps is not None:
            return self.plan.quantised(*steps, *operands)
        if known.refused or is_trial():
            return self.plan.plain(*operands)
        made = self.plan.watched(*known.watches, *operands)
        if known.watched():
            with self._lock:
                if self._state == (known, None) and not known.refused:
                    self._change_over(known, operands, made)
        return made

    def _change_over(self, known: Calibration, operands: tuple[Any, ...], made: Sequence[Any]) -> None:
        """From now on in integers, if that is close to what was just computed in float32."""
        assert known.seen is not None
        steps = self.plan.packed(known.seen, operands)
        instead = self.plan.quantised(*steps, *operands)
        pairs = [(a, b) for a, b in zip(instead, made, strict=True) if isinstance(b, Tensor)]
        error = max((relative_error(a, b) for a, b in pairs), default=0.0)
        if error > self.bound:
            known.refused = f"stays in float32: in int8 it is off by {error:.1%} of its size, and {self.bound:.1%} is allowed"
            self.tell(known.refused)
            return
        self._state = (known, steps)
