"""The user's last word: what must be fused and what never may, found in the graph before anything is decided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, UnknownNode, did_you_mean
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region import call_of, walk
from dovetail.rules.by_module import make_frame, matches_path

Wish = Node | str | Callable[[Node], bool]
_GLOB = frozenset("*?[")
_NO_OPERATION = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class RequestedRegion:
    """One wish, found in the graph: the kinds it names, and groups of operations by name.

    Of each group at least one operation is meant, of `never` all.
    """

    text: str
    kinds: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Constraints:
    """Everything the user asked for."""

    must: tuple[RequestedRegion, ...] = ()
    never: tuple[RequestedRegion, ...] = ()
    together: tuple[tuple[RequestedRegion, ...], ...] = ()

    @cached_property
    def barred(self) -> Mapping[str, str]:
        """The operations that no region may take, each with the reason."""
        return {
            name: f"never was asked for, by {asked.text}"
            for asked in reversed(self.never)
            for group in asked.groups
            for name in group
        }

    @cached_property
    def barred_kinds(self) -> Mapping[str, str]:
        """The kinds of which no region may be made, each with the reason."""
        return {kind: f"never was asked for, by {a.text}" for a in self.never for kind in a.kinds}


def resolve_constraints(gm: GraphModule, must: Any, never: Any, kinds: Iterable[str]) -> Constraints:
    """The wishes as facts about a graph. `kinds` are those that the rules make.

    Raises UnknownNode for what names nothing in the graph, and InvalidArgument where `must` and `never` contradict
    each other or are neither nodes, names, kinds, module paths nor predicates.
    """
    required, excluded = _grouped(must), _listed(never)
    if not required and not excluded:
        return Constraints()
    place = _GraphNames(gm, frozenset(kinds))
    resolved = [tuple(place.find("must", item) for item in items) for items in required]
    together = tuple(group for group in resolved if len(group) > 1)
    for asked in (one for group in together for one in group if not one.groups):
        raise InvalidArgument(
            f"must: a list in the list names operations that belong into one region, and {asked.text} names none. "
            f"Give it by itself."
        )
    word = Constraints(
        tuple(asked for group in resolved for asked in group),
        tuple(place.find("never", item) for item in excluded),
        together,
    )
    _require_agreement(word)
    return word


def _grouped(items: Any) -> list[list[Any]]:
    """What must be, each by itself or, in a list of its own, several in one region."""
    if items is None or _is_one(items):
        return [_listed(items)] if items is not None else []
    return [listed for item in items if (listed := _flat(item))]


def _listed(items: Any) -> list[Any]:
    return [] if items is None else _flat(items)


def _flat(items: Any) -> list[Any]:
    return [items] if _is_one(items) else [one for item in items for one in _flat(item)]


def _is_one(item: Any) -> bool:
    """Whether something is not a list; what names nothing at all is refused where it is looked up."""
    single = isinstance(item, (Node, str, bytes, Mapping, Tensor)) or callable(item)
    return single or not isinstance(item, Iterable)


def _require_agreement(word: Constraints) -> None:
    for asked in word.must:
        for kind in asked.kinds:
            if kind in word.barred_kinds:
                other = next(a for a in word.never if kind in a.kinds)
                raise InvalidArgument(
                    f"must and never contradict each other: {asked.text} and {other.text} are both about "
                    f"kind '{kind}'. Take one of them away."
                )
        for group in asked.groups:
            if all(name in word.barred for name in group):
                name = min(group)
                other = next(a for a in word.never if any(name in g for g in a.groups))
                raise InvalidArgument(
                    f"must and never contradict each other: {asked.text} and {other.text} are both about "
                    f"'{name}'. Take one of them away."
                )


class _GraphNames:
    """The names, kinds and module paths that a graph has."""

    def __init__(self, gm: GraphModule, kinds: frozenset[str]) -> None:
        self.nodes = list(gm.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.calls = [call for node in self.nodes if (call := call_of(node.meta)) is not None]
        self.inner = {member.name for call in self.calls for member in walk(call)}
        made = {call.identity.kind for call in self.calls}
        for call in self.calls:
            made.update(c.identity.kind for m in walk(call) if (c := call_of(m.meta)) is not None)
        self.kinds = kinds | made

    @cached_property
    def paths(self) -> dict[str, list[str]]:
        """The operations of each module, by its path."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            if node.op not in _NO_OPERATION:
                leaf = node.op == "call_module" and call_of(node.meta) is None
                for path in _module_paths(node.meta, cast("str", node.target) if leaf else ""):
                    found.setdefault(path, []).append(node.name)
        for call in self.calls:
            for member in walk(call):
                for path in _module_paths(member.meta):
                    found.setdefault(path, []).append(member.name)
        return found

    def find(self, which: str, item: Any) -> RequestedRegion:
        if isinstance(item, Node):
            if self.by_name.get(item.name) is not item:
                raise UnknownNode(f"{which}: not a node of this graph", [item.name], "Give the name instead.")
            return self._named(which, item.name)
        if isinstance(item, str):
            return self._word(which, item)
        if callable(item):
            return self._predicate(which, cast("Callable[[Node], Any]", item))
        raise InvalidArgument(
            f"{which}: {item!r} is neither a node, a name, a kind, a module path nor a predicate."
        )

    def _named(self, which: str, name: str) -> RequestedRegion:
        node = self.by_name.get(name)
        if node is not None and node.op in _NO_OPERATION:
            raise UnknownNode(f"{which}: a graph's {node.op} is not an operation", [name])
        return RequestedRegion(f"{which}='{name}'", groups=(frozenset([name]),))

    def _word(self, which: str, text: str) -> RequestedRegion:
        """A name of an operation, a kind, or both; otherwise a path of modules."""
        named = text in self.by_name or text in self.inner
        kinds = frozenset([text]) & self.kinds
        if named:
            asked = self._named(which, text)
            return RequestedRegion(asked.text, kinds, asked.groups)
        if kinds:
            return RequestedRegion(f"{which}='{text}'", kinds)
        modules = {path: names for path, names in self.paths.items() if matches_path(text, path)}
        if modules:
            outermost = [p for p in modules if not any(p.startswith(f"{o}.") for o in modules)]
            groups = [frozenset(modules[path]) for path in sorted(outermost)]
            return RequestedRegion(f"{which}='{text}'", groups=tuple(groups))
        known = [*self.by_name, *self.inner, *self.kinds, *self.paths]
        advice = did_you_mean(text, known, otherwise="`dovetail.text` lists the names.")
        what = "no module path" if _GLOB & set(text) else "no node, kind or module path"
        raise UnknownNode(f"{which}: the graph has {what} of this name", [text], advice)

    def _predicate(self, which: str, predicate: Callable[[Node], Any]) -> RequestedRegion:
        label = getattr(predicate, "__name__", type(predicate).__name__)
        chosen: list[frozenset[str]] = []
        for node in self.nodes:
            if node.op in _NO_OPERATION:
                continue
            try:
                wanted = bool(predicate(node))
            except Exception as error:
                raise InvalidArgument(
                    f"{which}: the predicate {label} raised {type(error).__name__} on '{node.name}': {error}."
                ) from error
            if wanted:
                chosen.append(frozenset([node.name]))
        if which == "must" and not chosen and not self.calls:
            raise InvalidArgument(f"must: the predicate {label} holds for no operation of this graph.")
        return RequestedRegion(f"{which}={label}", groups=tuple(chosen))


def _module_paths(meta: Mapping[str, Any], leaf: str = "") -> list[str]:
    """The paths of the modules that an operation came from, and of the one it calls."""
    stack = cast("Mapping[str, Any]", meta.get("nn_module_stack") or {})
    found = [*(make_frame(key, entry).path for key, entry in stack.items()), leaf]
    return [path for path in dict.fromkeys(found) if path]


def locate(nodes: list[Node], names: Collection[str]) -> dict[str, int]:
    """Where named operations are now: their own position, or that of the region that holds them."""
    found: dict[str, int] = {}
    wanted = set(names)
    if not wanted:
        return found
    held: dict[str, int] = {}
    for i, node in enumerate(nodes):
        call = call_of(node.meta)
        if call is not None:
            for member in walk(call):
                if member.name in wanted:
                    held.setdefault(member.name, i)
        if node.name in wanted and not _is_result(node):
            found[node.name] = i
    for name, i in held.items():
        found.setdefault(name, i)
    return found


def _is_result(node: Node) -> bool:
    """Whether a node only hands on what a region computes, under the operation's old name."""
    return is_projection(node) and call_of(cast("Node", node.args[0]).meta) is not None


@dataclass
class Pending:
    """What `must` asks for, on one graph: which operations and kinds bring about which wish."""

    kinds: dict[str, int] = field(default_factory=dict[str, int])
    at: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    def met(self, kind: str, positions: Collection[int]) -> frozenset[int]:
        """The wishes that a region of this kind with these operations brings about."""
        found: set[int] = set()
        if kind in self.kinds:
            found.add(self.kinds[kind])
        if self.at:
            small, large = (
                (positions, self.at) if len(positions) < len(self.at) else (self.at, set(positions))
            )
            for i in small:
                if i in large:
                    found |= self.at[i]
        return frozenset(found)


def pending(word: Constraints, nodes: list[Node]) -> Pending:
    """The wishes of a word by position in a graph; what a region holds already is met."""
    made = Pending()
    where = locate(nodes, {name for asked in word.must for group in asked.groups for name in group})
    number = 0
    for asked in word.must:
        for kind in asked.kinds:
            made.kinds.setdefault(kind, number)
            number += 1
        for group in asked.groups:
            positions = {where[name] for name in group if name in where}
            if not any(call_of(nodes[i].meta) is not None for i in positions):
                for i in positions:
                    made.at.setdefault(i, set()).add(number)
            number += 1
    return made


def apart(word: Constraints, nodes: list[Node]) -> list[tuple[str, str, str]]:
    """Of each group that is in no common region, what was asked for and two operations that are apart."""
    held = [{m.name for m in walk(call)} for node in nodes if (call := call_of(node.meta)) is not None]
    separated: list[tuple[str, str, str]] = []
    for asked in word.together:
        groups = [group for one in asked for group in one.groups]
        if any(all(not names.isdisjoint(group) for group in groups) for names in held):
            continue
        home = next((names for names in held if not names.isdisjoint(groups[0])), set[str]())
        other = next((g for g in groups[1:] if home.isdisjoint(g)), groups[-1])
        names = ", ".join(one.text.partition("=")[2] for one in asked)
        separated.append((f"must=[{names}]", min(groups[0]), min(other)))
    return separated


def unmet(word: Constraints, nodes: list[Node]) -> list[tuple[RequestedRegion, frozenset[str]]]:
    """The wishes that a graph does not show, each with the operations that are in no region."""
    inside: set[str] = set()
    kinds: set[str] = set()
    for node in nodes:
        call = call_of(node.meta)
        if call is not None:
            kinds.add(call.identity.kind)
            for member in walk(call):
                inside.add(member.name)
                inner = call_of(member.meta)
                if inner is not None:
                    kinds.add(inner.identity.kind)
    found: list[tuple[RequestedRegion, frozenset[str]]] = []
    for asked in word.must:
        missing = [group for group in asked.groups if inside.isdisjoint(group)]
        # A word that is a name and a kind is met by either.
        if missing or (not asked.groups and asked.kinds and kinds.isdisjoint(asked.kinds)):
            found.append((asked, frozenset(name for group in missing for name in group)))
    return found
