"""What rules that grow regions operation by operation have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch.fx import Node

from dovetail.errors import InvalidArgument
from dovetail.outlining.record import make_identity
from dovetail.outlining.requests import is_projection
from dovetail.rules.rule import Refusal
from dovetail.rules.scene import Scene

MOST_REFUSALS = 2000


@dataclass(frozen=True)
class Ground:
    """The operations of a graph with the parts of their tuples, so that each is one unit.

    `home` has for each position its unit: itself, or the operation whose tuple it takes a part of. `parts` are those
    positions by unit, `readers` the units that read anything of a unit, `listed` the units in structural order.
    """

    home: list[int]
    parts: dict[int, list[int]]
    readers: list[list[int]]
    listed: list[int]

    def positions(self, units: Sequence[int]) -> tuple[int, ...]:
        """The units with their parts, in the graph's order."""
        if not self.parts:
            return tuple(sorted(units))
        return tuple(sorted([*units, *(p for u in units for p in self.parts.get(u, ()))]))


def ground(scene: Scene) -> Ground:
    """The units of a scene, worked out once."""
    return scene.fact(_ground)


def _ground(scene: Scene) -> Ground:
    nodes, data, at = scene.nodes, scene.index.data, scene.index.position
    home = list(range(len(nodes)))
    parts: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.target is operator.getitem and is_projection(node):
            home[i] = home[at[cast("Node", node.args[0])]]
            parts.setdefault(home[i], []).append(i)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(data):
        unit = home[i]
        for j in reads:
            source = home[j]
            if source != unit and (not readers[source] or readers[source][-1] != unit):
                readers[source].append(unit)
    places = [0] * len(nodes)
    for i, place in enumerate(scene.order):
        places[place] = i
    listed = [i for i in places if home[i] == i] if parts else places
    return Ground(home, parts, readers, listed)


def closed(scene: Scene, kind: str, nests: bool, grows: bool = True) -> list[bool]:
    """Which positions a rule of a kind may not take: what is barred, regions of the kind, what is no operation.

    A rule that does not grow leaves all regions alone.
    """
    found = [node.op in ("placeholder", "get_attr", "output") for node in scene.nodes]
    home = ground(scene).home
    for i in scene.barred:
        found[i] = found[home[i]] = True
    effects = scene.index.dependencies.before
    for unit, parts in ground(scene).parts.items() if effects else ():
        # A part that waits for an effect which its tuple does not wait for cannot be one with it.
        if any(not set(effects.get(p, ())) <= set(effects.get(unit, ())) for p in parts):
            found[unit] = True
    for i, call in scene.calls.items():
        if not grows or (not nests and call.identity.kind == kind):
            found[i] = True
    return found


def why_closed(scene: Scene, kind: str, nests: bool, position: int, grows: bool = True) -> str:
    """The reason for the same of one position, "" if it may be taken."""
    node = scene.nodes[position]
    if node.op in ("placeholder", "get_attr", "output"):
        return f"'{node.name}' is a graph's {node.op}, no operation"
    if position in scene.barred:
        return f"'{node.name}' may not be taken: {scene.barred[position]}"
    if not nests and scene.kind_of(position) == kind:
        return f"'{node.name}' is a region of kind '{kind}' already"
    if not grows and position in scene.calls:
        return f"'{node.name}' is a region, and regions are left as they are"
    return ""


def weight(scene: Scene, unit: int) -> int:
    """How many operations a unit counts for against a limit."""
    call = scene.calls.get(unit)
    return call.size if call is not None else 1


@dataclass
class Refusals:
    """Refusals of one rule, the first few thousand of them."""

    rule: str
    found: list[Refusal] = field(default_factory=list[Refusal])

    @property
    def full(self) -> bool:
        return len(self.found) >= MOST_REFUSALS

    def add(self, members: tuple[int, ...], reason: str, at: int | None = None) -> None:
        if not self.full:
            self.found.append(Refusal(self.rule, members, reason, at))


def require_rule(name: object, kind: object, priority: object, **least: tuple[object, int]) -> None:
    """Refuse a rule made with arguments of the wrong form; `least` has a number and its lowest value by name."""
    make_identity(kind, 1, None)
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"name {name!r} of a rule for '{kind}' is not a text.")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidArgument(f"priority {priority!r} of rule '{name}' is not an int.")
    for argument, (value, lowest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InvalidArgument(f"{argument}={value!r} of rule '{name}' is not an int of {lowest} or more.")
