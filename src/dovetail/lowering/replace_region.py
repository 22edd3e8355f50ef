"""Bringing a region's own code back: a callable in place of a region, checked as any backend's code is."""

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
    """A graph in which a region, or by the key of its body every region with it, runs a callable; the input is untouched.

    It takes the operands as `region.export` lists them and returns a tensor, or a tuple of them. It is tried on made-up
    operands: what it returns must have the body's dtypes, shapes and strides and, with `check`, its values, or
    LoweringError says what is wrong. `trains` says that autograd can go through it; gradients are compared too then.
    Calls for which it is not made (gradients without `trains`, autocast) run the body. Other regions keep their backends.
    """
    require_graph(gm)
    _check_arguments(name_or_key, callable, check, trains)
    listed = regions(gm, nested=True)
    found = [r for r in listed if r.name == name_or_key] or [r for r in listed if r.key == name_or_key]
    if not found:
        raise UnknownRegion(
            f"the graph has no region of the name or key '{name_or_key}'",
            [r.name for r in listed],
            name_or_key,
        )
    before = lowered_state_of(gm)
    _require_free(before, found, listed)
    backend = _Replacement(callable, trains)
    wanted: dict[str, Backend] = {region.name: backend for region in found}
    if trains:
        # Code for calls with gradients is made and compared when such a call comes; what is wrong with it is told now.
        _lowered(gm, wanted, _options(check, grad=True), found)
    made = _lowered(gm, wanted, _options(check, grad=False), found)
    if before is None:
        return made
    inside = tuple(f"{region.name}/" for region in found)
    gone = [local_name(r.name) for r in listed if r.name.startswith(inside)]
    fresh = lowered_state_of(made)
    joined = before.joined(fresh, gone) if fresh is not None else before
    return with_lowering(gm, joined, {local_name(r.name): joined.backend_of(r.name) for r in listed})


class _Replacement(Backend):
    """Runs the regions that it is asked for by one callable."""

    smallest = 1

    def __init__(self, function: Callable[..., Any], trains: bool) -> None:
        self.name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.function, self.trains = function, trains

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return _Called(self.function)


class _Called:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *operands: Any) -> Any:
        made = self.function(*operands)
        return (made,) if isinstance(made, Tensor) else made


def _check_arguments(name_or_key: Any, function: Any, check: Any, trains: Any) -> None:
    if not isinstance(name_or_key, str):
        raise InvalidArgument(f"{name_or_key!r} is neither the name of a region nor the key of a body.")
    if not callable(function):
        raise InvalidArgument(f"a {type(function).__name__} cannot be called in place of '{name_or_key}'.")
    for what, given in (("check", check), ("trains", trains)):
        if not isinstance(given, bool):
            raise InvalidArgument(f"{what} {given!r}; give True or False.")


def _options(check: bool, grad: bool) -> Options:
    return Options(on_error="raise", verify=check, smallest=1, cache=False, grad=grad)


def _lowered(
    gm: GraphModule, wanted: dict[str, Backend], options: Options, found: list[Region]
) -> GraphModule:
    made = lower_with(gm, wanted, options, progress=False)
    lowering = lowered_state_of(made)
    for region in found:
        if lowering is None or lowering.backend_of(region.name) is None:
            events = [] if lowering is None else [e.reason for e in lowering.events if e.reason]
            reason = events[0] if events else "nothing is known of its operands"
            raise LoweringError(
                region.name, wanted[region.name].name, f"it cannot stand for the region: {reason}"
            )
    return made


def _require_free(before: LoweredState | None, found: list[Region], listed: list[Region]) -> None:
    """A region inside one that a backend runs as a whole cannot have code of its own."""
    if before is None:
        return
    for region in found:
        above = region.name.split("/")[:-1]
        for n in range(1, len(above) + 1):
            outer = "/".join(above[:n])
            if local_name(outer) in before.assigned:
                raise RegionError(
                    f"region '{region.name}' is inside '{outer}', which '{before.backend_of(outer)}' runs as a whole. "
                    f"Replace that one, or lower the graph without it."
                )
