"""The user's constraints: what must be fused and what never may be, resolved against the graph before fusing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, UnknownNode, did_you_mean
from dovetail.ir.module_paths import frames_of, matches_path
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region import RegionCall, call_of, walk

NodeSelector = Node | str | Callable[[Node], bool]
_GLOB = frozenset("*?[")
_NO_OPERATION = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class Constraint:
    """One selector resolved in the graph: the kinds it names, and groups of operations by name.

    `must` concerns at least one operation of each group, `never` all of them.
    """

    text: str
    kinds: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Constraints:
    """All constraints of a call; `together` are the groups of `must` that belong into one region each."""

    must: tuple[Constraint, ...] = ()
    never: tuple[Constraint, ...] = ()
    together: tuple[tuple[Constraint, ...], ...] = ()

    @cached_property
    def excluded(self) -> Mapping[str, str]:
        """The operations that no region may contain, each with the reason."""
        return {
            name: f"excluded by {constraint.text}"
            for constraint in reversed(self.never)
            for group in constraint.groups
            for name in group
        }

    @cached_property
    def excluded_kinds(self) -> Mapping[str, str]:
        """The kinds that no region may have, each with the reason."""
        return {kind: f"excluded by {c.text}" for c in self.never for kind in c.kinds}


def resolve_constraints(gm: GraphModule, must: Any, never: Any, kinds: Iterable[str]) -> Constraints:
    """Return the constraints as names and kinds of a graph. `kinds` are those that the rules make.

    Raise UnknownNode for a selector that matches nothing in the graph, and InvalidArgument if `must` and `never`
    contradict each other or a selector is neither a node, a name, a kind, a module path nor a predicate.
    """
    required = _grouped(must)
    excluded = [] if never is None else _flatten(never)
    if not required and not excluded:
        return Constraints()
    names = _GraphNames(gm, frozenset(kinds))
    resolved = [tuple(names.find("must", item) for item in items) for items in required]
    together = tuple(group for group in resolved if len(group) > 1)
    for constraint in (one for group in together for one in group if not one.groups):
        raise InvalidArgument(
            f"must: a list in the list names operations that belong into one region, and {constraint.text} names no "
            f"operation. Give it by itself."
        )
    # A list names operations, also where an operation and a kind have one name.
    must = [c if len(group) == 1 else replace(c, kinds=frozenset()) for group in resolved for c in group]
    constraints = Constraints(tuple(must), tuple(names.find("never", item) for item in excluded), together)
    _require_agreement(constraints)
    return constraints


def _grouped(items: Any) -> list[list[Any]]:
    """Return the selectors of `must`, each alone or, from a nested list, those that belong into one region."""
    if items is None:
        return []
    if _is_selector(items):
        return [[items]]
    return [group for item in items if (group := _flatten(item))]


def _flatten(items: Any) -> list[Any]:
    return [items] if _is_selector(items) else [one for item in items for one in _flatten(item)]


def _is_selector(item: Any) -> bool:
    """Whether something is not a list; an invalid selector is refused when it is resolved."""
    single = isinstance(item, (Node, str, bytes, Mapping, Tensor)) or callable(item)
    return single or not isinstance(item, Iterable)


def _require_agreement(constraints: Constraints) -> None:
    for required in constraints.must:
        for kind in required.kinds:
            if kind in constraints.excluded_kinds:
                other = next(c for c in constraints.never if kind in c.kinds)
                raise InvalidArgument(
                    f"must and never contradict each other: {required.text} and {other.text} are both about "
                    f"kind '{kind}'. Take one of them away."
                )
        for group in required.groups:
            if all(name in constraints.excluded for name in group):
                name = min(group)
                other = next(c for c in constraints.never if any(name in g for g in c.groups))
                raise InvalidArgument(
                    f"must and never contradict each other: {required.text} and {other.text} are both about "
                    f"'{name}'. Take one of them away."
                )


class _GraphNames:
    """The names, kinds and module paths that a graph has."""

    def __init__(self, gm: GraphModule, kinds: frozenset[str]) -> None:
        self.nodes = list(gm.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.calls = _calls(self.nodes)
        self.inner = {member.name for call in self.calls for member in walk(call)}
        self.kinds = kinds | _kinds(self.calls)

    @cached_property
    def paths(self) -> dict[str, list[str]]:
        """The operations of each module, by its path."""
        names: dict[str, list[str]] = {}
        for node in self.nodes:
            if node.op not in _NO_OPERATION:
                leaf = node.op == "call_module" and call_of(node.meta) is None
                for path in _module_paths(node.meta, cast("str", node.target) if leaf else ""):
                    names.setdefault(path, []).append(node.name)
        for call in self.calls:
            for member in walk(call):
                for path in _module_paths(member.meta):
                    names.setdefault(path, []).append(member.name)
        return names

    def find(self, which: str, item: Any) -> Constraint:
        if isinstance(item, Node):
            if self.by_name.get(item.name) is not item:
                raise UnknownNode(f"{which}: not a node of this graph", [item.name], "Give the name instead.")
            return self._named(which, item.name)
        if isinstance(item, str):
            return self._by_text(which, item)
        if callable(item):
            return self._predicate(which, cast("Callable[[Node], Any]", item))
        raise InvalidArgument(
            f"{which}: {item!r} is neither a node, a name, a kind, a module path nor a predicate."
        )

    def _named(self, which: str, name: str) -> Constraint:
        node = self.by_name.get(name)
        if node is not None and node.op in _NO_OPERATION:
            raise UnknownNode(f"{which}: a graph's {node.op} is not an operation", [name])
        return Constraint(f"{which}='{name}'", groups=(frozenset([name]),))

    def _by_text(self, which: str, text: str) -> Constraint:
        """Resolve the name of an operation, a kind, or both; otherwise a module path."""
        named = text in self.by_name or text in self.inner
        kinds = frozenset([text]) & self.kinds
        if named:
            constraint = self._named(which, text)
            return Constraint(constraint.text, kinds, constraint.groups)
        if kinds:
            return Constraint(f"{which}='{text}'", kinds)
        modules = {path: names for path, names in self.paths.items() if matches_path(text, path)}
        if modules:
            outermost = [p for p in modules if not any(p.startswith(f"{o}.") for o in modules)]
            groups = [frozenset(modules[path]) for path in sorted(outermost)]
            return Constraint(f"{which}='{text}'", groups=tuple(groups))
        known = [*self.by_name, *self.inner, *self.kinds, *self.paths]
        advice = did_you_mean(text, known, otherwise="`dovetail.text` lists the names.")
        what = "no module path" if _GLOB & set(text) else "no node, kind or module path"
        raise UnknownNode(f"{which}: the graph has {what} of this name", [text], advice)

    def _predicate(self, which: str, predicate: Callable[[Node], Any]) -> Constraint:
        label = getattr(predicate, "__name__", type(predicate).__name__)
        chosen: list[frozenset[str]] = []
        for node in self.nodes:
            if node.op in _NO_OPERATION:
                continue
            try:
                selected = bool(predicate(node))
            except Exception as error:
                raise InvalidArgument(
                    f"{which}: the predicate {label} raised {type(error).__name__} on '{node.name}': {error}."
                ) from error
            if selected:
                chosen.append(frozenset([node.name]))
        if which == "must" and not chosen and not self.calls:
            raise InvalidArgument(f"must: the predicate {label} holds for no operation of this graph.")
        return Constraint(f"{which}={label}", groups=tuple(chosen))


def _module_paths(meta: Mapping[str, Any], leaf: str = "") -> list[str]:
    """Return the paths of the modules that an operation came from, and of the one it calls."""
    paths = [*(frame.path for frame in frames_of(meta)), leaf]
    return [path for path in dict.fromkeys(paths) if path]


def _calls(nodes: Iterable[Node]) -> list[RegionCall]:
    return [call for node in nodes if (call := call_of(node.meta)) is not None]


def _kinds(calls: Sequence[RegionCall]) -> set[str]:
    """Return the kinds of regions, nested ones included."""
    nested = (c for call in calls for m in walk(call) if (c := call_of(m.meta)) is not None)
    return {call.identity.kind for call in (*calls, *nested)}


def locate(nodes: list[Node], names: Collection[str]) -> dict[str, int]:
    """Return the positions of named operations: their own, or that of the region that contains them."""
    outside: dict[str, int] = {}
    inside: dict[str, int] = {}
    if not names:
        return outside
    requested = set(names)
    for i, node in enumerate(nodes):
        call = call_of(node.meta)
        if call is not None:
            for member in walk(call):
                if member.name in requested:
                    inside.setdefault(member.name, i)
        if node.name in requested and not is_region_result(node):
            outside[node.name] = i
    return outside | {name: i for name, i in inside.items() if name not in outside}


def is_region_result(node: Node) -> bool:
    """Whether a node is a result of a region, which has the name of the operation inside that computes it."""
    return is_projection(node) and call_of(cast("Node", node.args[0]).meta) is not None


@dataclass
class Requirements:
    """The open requirements of `must` on one graph, each a number, by kind and by position.

    A requirement in `together` is met by a region with an operation of each of its groups of positions, any other one by
    a single operation.
    """

    kinds: dict[str, int] = field(default_factory=dict[str, int])
    positions: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    together: dict[int, list[set[int]]] = field(default_factory=dict[int, list[set[int]]])

    def met_by(self, kind: str, members: Collection[int]) -> frozenset[int]:
        """Return the requirements that a region of this kind with these operations meets."""
        met: set[int] = set()
        if kind in self.kinds:
            met.add(self.kinds[kind])
        if self.positions:
            small, large = members, self.positions
            if len(members) >= len(self.positions):
                small, large = self.positions, set(members)
            for i in small:
                if i in large:
                    met |= self.positions[i]
        for number in [n for n in met if n in self.together]:
            if any(group.isdisjoint(members) for group in self.together[number]):
                met.remove(number)
        return frozenset(met)


def open_requirements(constraints: Constraints, nodes: list[Node]) -> Requirements:
    """Return the requirements of `must` that no region of a graph meets yet."""
    requirements = Requirements()
    where = locate(nodes, {name for c in constraints.must for group in c.groups for name in group})
    number = 0
    for constraint in constraints.must:
        for kind in constraint.kinds:
            requirements.kinds.setdefault(kind, number)
            number += 1
        for group in constraint.groups:
            positions = {where[name] for name in group if name in where}
            if not any(call_of(nodes[i].meta) is not None for i in positions):
                for i in positions:
                    requirements.positions.setdefault(i, set()).add(number)
            number += 1
    for constraints_of_one in constraints.together:
        groups = [
            {where[name] for name in group if name in where}
            for constraint in constraints_of_one
            for group in constraint.groups
        ]
        # Operations of one region already are at one position.
        if len(set().union(*groups)) > 1:
            requirements.together[number] = groups
            for i in set().union(*groups):
                requirements.positions.setdefault(i, set()).add(number)
        number += 1
    return requirements


def separated(constraints: Constraints, nodes: list[Node]) -> list[tuple[str, str, str]]:
    """Return for each group that is not in one region its text and two operations that are apart."""
    held = [{m.name for m in walk(call)} for call in _calls(nodes)]
    apart: list[tuple[str, str, str]] = []
    for group in constraints.together:
        groups = [names for constraint in group for names in constraint.groups]
        if any(all(not names.isdisjoint(group) for group in groups) for names in held):
            continue
        home = next((names for names in held if not names.isdisjoint(groups[0])), set[str]())
        other = next((g for g in groups[1:] if home.isdisjoint(g)), groups[-1])
        names = ", ".join(constraint.text.partition("=")[2] for constraint in group)
        apart.append((f"must=[{names}]", min(groups[0]), min(other)))
    return apart


def unmet(constraints: Constraints, nodes: list[Node]) -> list[tuple[Constraint, frozenset[str]]]:
    """Return the constraints of `must` that a graph does not meet, each with the operations that are in no region."""
    calls = _calls(nodes)
    inside, kinds = {member.name for call in calls for member in walk(call)}, _kinds(calls)
    violated: list[tuple[Constraint, frozenset[str]]] = []
    for constraint in constraints.must:
        missing = [group for group in constraint.groups if inside.isdisjoint(group)]
        # A text that is both a name and a kind is met by either.
        if missing or (not constraint.groups and constraint.kinds and kinds.isdisjoint(constraint.kinds)):
            violated.append((constraint, frozenset(name for group in missing for name in group)))
    return violated
