"""What the vertical, horizontal and partition rules share: fusion units, exclusions, refusals and option checks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch.fx import Node

from dovetail.errors import InvalidArgument
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region import make_identity
from dovetail.rules.rule import Refusal, RuleContext

_MAX_REFUSALS = 2000


@dataclass(frozen=True)
class FusionUnits:
    """The operations of a graph, each taken as one unit with the getitems that project its tuple.

    `unit_of` maps a position to its unit: itself, or the operation whose tuple it projects. `projections` are those
    positions by unit, `readers` the units that read any value of a unit, `ordered` the units in structural order.
    """

    unit_of: list[int]
    projections: dict[int, list[int]]
    readers: list[list[int]]
    ordered: list[int]

    def positions(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of units and of their projections, in the graph's order."""
        return tuple(sorted([*units, *(p for u in units for p in self.projections.get(u, ()))]))


def fusion_units(context: RuleContext) -> FusionUnits:
    """Return the units of a context's graph, computed once."""
    return context.analysis(_compute_units)


def _compute_units(context: RuleContext) -> FusionUnits:
    nodes, position = context.nodes, context.index.position
    unit_of = list(range(len(nodes)))
    projections: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.target is operator.getitem and is_projection(node):
            unit_of[i] = unit_of[position[cast("Node", node.args[0])]]
            projections.setdefault(unit_of[i], []).append(i)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(context.index.data):
        unit = unit_of[i]
        for j in reads:
            source = unit_of[j]
            if source != unit and (not readers[source] or readers[source][-1] != unit):
                readers[source].append(unit)
    ordered = [i for i in by_rank(context.order) if unit_of[i] == i]
    return FusionUnits(unit_of, projections, readers, ordered)


def by_rank(order: Sequence[int]) -> list[int]:
    """Return the positions sorted by rank, given the rank of each."""
    positions = [0] * len(order)
    for i, rank in enumerate(order):
        positions[rank] = i
    return positions


def excluded_positions(context: RuleContext, kind: str, nests: bool, grows: bool = True) -> list[bool]:
    """Return for each position whether it is excluded from regions of a kind.

    Excluded are positions barred by the context, regions of the same kind unless `nests`, inputs, attributes and the
    output, and without `grows` all regions.
    """
    excluded = [node.op in ("placeholder", "get_attr", "output") for node in context.nodes]
    units = fusion_units(context)
    for i in context.barred:
        excluded[i] = excluded[units.unit_of[i]] = True
    effects = context.index.dependencies.before
    for unit, projections in units.projections.items() if effects else ():
        # A projection ordered after an effect that its tuple is not ordered after cannot be in one unit with it.
        if any(not set(effects.get(p, ())) <= set(effects.get(unit, ())) for p in projections):
            excluded[unit] = True
    for i, call in context.calls.items():
        if not grows or (not nests and call.identity.kind == kind):
            excluded[i] = True
    return excluded


def why_excluded(context: RuleContext, kind: str, nests: bool, position: int, grows: bool = True) -> str:
    """Return why `excluded_positions` excludes a position, "" if it does not."""
    node = context.nodes[position]
    if node.op in ("placeholder", "get_attr", "output"):
        return f"'{node.name}' is the graph's {node.op}, not an operation"
    if position in context.barred:
        return f"'{node.name}' may not be taken: {context.barred[position]}"
    if not nests and context.kind_of(position) == kind:
        return f"'{node.name}' is a region of kind '{kind}' already"
    if not grows and position in context.calls:
        return f"'{node.name}' is a region, and regions are left as they are"
    return ""


def unit_weights(context: RuleContext) -> list[int]:
    """Return for each position how many operations it counts for against a limit: those inside, for a region."""
    weights = [1] * len(context.nodes)
    for i, call in context.calls.items():
        weights[i] = call.size
    return weights


@dataclass
class RefusalLog:
    """The first `_MAX_REFUSALS` refusals of one rule."""

    rule: str
    refusals: list[Refusal] = field(default_factory=list[Refusal])

    @property
    def full(self) -> bool:
        return len(self.refusals) >= _MAX_REFUSALS

    def add(self, members: tuple[int, ...], reason: str, at: int | None = None) -> None:
        if not self.full:
            self.refusals.append(Refusal(self.rule, members, reason, at))


def check_rule_options(name: object, kind: object, priority: object, **least: tuple[object, int]) -> None:
    """Raise InvalidArgument for options of the wrong type; `least` maps an option to its value and lower bound."""
    make_identity(kind, 1, None)
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"name {name!r} of a rule for '{kind}' is not a text.")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidArgument(f"priority {priority!r} of rule '{name}' is not an int.")
    for argument, (value, lowest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InvalidArgument(f"{argument}={value!r} of rule '{name}' is not an int of {lowest} or more.")
