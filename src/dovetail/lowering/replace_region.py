"""Replacement of a region by a callable, checked like the code of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, LoweringError, RegionError, UnknownRegion, checked_call
from dovetail.ir.graph_module import require_graph
from dovetail.lowering.backend_protocol import Backend, Compiled
from dovetail.lowering.lower import lower_with, with_lowering
from dovetail.lowering.lowered_state import LoweredState, lowered_state_of
from dovetail.lowering.options import Options
from dovetail.outlining.region import Region, local_name, regions


@checked_call()
def replace_region(
    gm: GraphModule,
    name_or_key: str,
    callable: Callable[..., Any],
    *,
    check: bool = True,
    trains: bool = False,
) -> GraphModule:
    """Return a graph in which a region, or every region with a body of this key, runs a callable.

    It takes the operands as `region.export` lists them and returns a tensor, or a tuple of them. It is run on sample
    inputs: its results must have the body's dtypes, shapes and strides and, with `check`, its values; otherwise
    LoweringError is raised with the difference. With `trains` autograd goes through it, and gradients are compared too.
    Calls that it does not cover (gradients without `trains`, autocast) run the body. Other regions keep their backends.
    """
    require_graph(gm)
    _check_arguments(name_or_key, callable, check, trains)
    candidates = regions(gm, nested=True)
    replaced = [r for r in candidates if r.name == name_or_key]
    replaced = replaced or [r for r in candidates if r.key == name_or_key]
    if not replaced:
        raise UnknownRegion(
            f"the graph has no region of the name or key '{name_or_key}'",
            [r.name for r in candidates],
            name_or_key,
        )
    before = lowered_state_of(gm)
    _require_unassigned(before, replaced)
    backend = _Replacement(callable, trains)
    if trains:
        # Code for calls with gradients is compiled when such a call comes; it is compared now.
        _lower(gm, backend, replaced, check, grad=True)
    lowered = _lower(gm, backend, replaced, check, grad=False)
    if before is None:
        return lowered
    inside = tuple(f"{region.name}/" for region in replaced)
    nested = [local_name(r.name) for r in candidates if r.name.startswith(inside)]
    after = lowered_state_of(lowered)
    joined = before.joined(after, nested) if after is not None else before
    return with_lowering(gm, joined, {local_name(r.name): joined.backend_of(r.name) for r in candidates})


class _Replacement(Backend):
    """Runs regions by one callable."""

    smallest = 1

    def __init__(self, function: Callable[..., Any], trains: bool) -> None:
        self.name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.function, self.trains = function, trains

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        def call(*operands: Any) -> Any:
            results = self.function(*operands)
            return (results,) if isinstance(results, Tensor) else results

        return call


def _check_arguments(name_or_key: Any, function: Any, check: Any, trains: Any) -> None:
    if not isinstance(name_or_key, str):
        raise InvalidArgument(f"{name_or_key!r} is neither the name of a region nor the key of a body.")
    if not callable(function):
        raise InvalidArgument(f"a {type(function).__name__} cannot be called in place of '{name_or_key}'.")
    for name, value in (("check", check), ("trains", trains)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} {value!r}; give True or False.")


def _lower(
    gm: GraphModule, backend: Backend, replaced: list[Region], check: bool, *, grad: bool
) -> GraphModule:
    options = Options(on_error="raise", verify=check, smallest=1, cache=False, grad=grad)
    lowered = lower_with(gm, {region.name: backend for region in replaced}, options, progress=False)
    state = lowered_state_of(lowered)
    for region in replaced:
        if state is None or state.backend_of(region.name) is None:
            reasons = [] if state is None else [e.reason for e in state.events if e.reason]
            reason = reasons[0] if reasons else "its operands have no known values"
            raise LoweringError(region.name, backend.name, f"it cannot replace the region: {reason}")
    return lowered


def _require_unassigned(before: LoweredState | None, replaced: list[Region]) -> None:
    """Raise for a region inside one that a backend runs as a whole."""
    if before is None:
        return
    for region in replaced:
        path = region.name.split("/")[:-1]
        for n in range(1, len(path) + 1):
            outer = "/".join(path[:n])
            if local_name(outer) in before.assigned:
                raise RegionError(
                    f"region '{region.name}' is inside '{outer}', which '{before.backend_of(outer)}' runs as a whole. "
                    f"Replace that one, or lower the graph without it."
                )
