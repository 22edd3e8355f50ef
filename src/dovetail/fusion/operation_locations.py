"""Where operations are: at the top of a graph or in which regions, by the names that users know them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, UnknownNode, did_you_mean
from dovetail.fusion.constraints import is_region_result, locate
from dovetail.outlining.region import RegionCall, call_of
from dovetail.rules.rule import Limits, RuleContext, RuleSet


class Reasons(tuple[str, ...]):
    """Reasons in words, the most important first; printed one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(f"- {reason}" for reason in self)


@dataclass(frozen=True)
class FusionRecord:
    """What a ledger recorded: the refusals, what the user excluded, the limits, the rules and their errors."""

    declined: Sequence[Any]
    never: Mapping[str, str]
    limits: Limits
    rules: RuleSet
    errors: Sequence[Any] = ()
    was_fused: bool = True


@dataclass(frozen=True)
class NodeLocation:
    """The position of an operation's own node or of its outermost region, and the regions around it.

    A region is an operation too; `call` is its record then.
    """

    name: str
    position: int
    meta: Mapping[str, Any]
    regions: tuple[tuple[str, RegionCall], ...] = ()

    @property
    def call(self) -> RegionCall | None:
        return call_of(self.meta)

    def region(self) -> str:
        return region_text(*self.regions[-1])


def region_text(name: str, call: RegionCall) -> str:
    by = f", made by rule '{call.rule}' in round {call.round}" if call.rule else ""
    return f"region '{name}' (kind '{call.identity.kind}'{by})"


def make_context(gm: GraphModule, record: FusionRecord) -> RuleContext:
    excluded = locate(list(gm.graph.nodes), record.never)
    return RuleContext(
        gm, limits=record.limits, barred={i: record.never[name] for name, i in excluded.items()}
    )


def operation_locations(context: RuleContext) -> dict[str, NodeLocation]:
    """Return every operation by name. The name of a region's result denotes the operation inside that computes it."""
    places: dict[str, NodeLocation] = {}
    for i, node in enumerate(context.nodes):
        if not is_region_result(node):
            places[node.name] = NodeLocation(node.name, i, node.meta)
    for i, call in context.calls.items():
        stack: list[tuple[tuple[tuple[str, RegionCall], ...], RegionCall]] = [
            (((context.nodes[i].name, call),), call)
        ]
        while stack:
            around, at = stack.pop()
            for member in at.members:
                place = NodeLocation(member.name, i, member.meta, around)
                inner = call_of(member.meta)
                if inner is not None:
                    name = f"{around[-1][0]}/{member.name}"
                    places[name] = place
                    stack.append(((*around, (name, inner)), inner))
                known = places.get(member.name)
                # An original outside takes precedence over its clones, a deeper member over results.
                if known is None or len(known.regions) in range(1, len(around)):
                    places[member.name] = place
    return places


def locate_operation(
    context: RuleContext, places: Mapping[str, NodeLocation], item: str | Node
) -> NodeLocation:
    name = item.name if isinstance(item, Node) else item
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"why_not takes nodes or names, not {type(name).__name__}.")
    place = places.get(name)
    if place is None:
        advice = did_you_mean(name, places, otherwise="`dovetail.text` lists the names.")
        raise UnknownNode("why_not: no such operation", [name], advice)
    op = context.nodes[place.position].op
    if not place.regions and op in ("placeholder", "output", "get_attr"):
        raise UnknownNode(f"why_not: a graph's {op} is not an operation", [name])
    return place


def regions_around(place: NodeLocation) -> list[tuple[str, RegionCall]]:
    """Return the regions around an operation, and itself if it is one."""
    around = list(place.regions)
    if place.call is not None:
        around.append((f"{around[-1][0]}/{place.name}" if around else place.name, place.call))
    return around
