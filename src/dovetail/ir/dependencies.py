"""What must come before what: data edges, and effect edges kept per storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidGraph
from dovetail.ir.alias_analysis import storages
from dovetail.ir.effects import PURE, Effects, Reader
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import makes_tuple
from dovetail.ir.op_traits import traits


@dataclass(frozen=True)
class Dependencies:
    """Effect edges of a graph by position; data edges are the nodes' own arguments.

    `before[i]` are earlier positions that must stay before `i`. `effects` has an entry for each node that is not
    plainly a value. `written` tells of the nodes whose memory some node of the graph writes, `reshaping` are the
    positions of those that may give what they write other sizes or strides.
    """

    nodes: list[Node]
    position: dict[Node, int]
    before: dict[int, list[int]]
    effects: dict[int, Effects]
    written: set[int] = field(default_factory=set[int])
    switches_modes: bool = False
    reshaping: set[int] = field(default_factory=set[int])

    def value_read(self, node: Node, position: int) -> Any:
        """What is known of a value where the node at a position reads it: `t_` and the like may have changed its form.

        None after a call of a graph that does so.
        """
        if not self.reshaping:
            return node.meta.get("val")
        first = node
        while (written := self._is_returned(first)) is not None:
            first = written
        same, latest = [first], self.position[node]
        for each in same:
            for user in each.users:
                at = self.position.get(user, position)
                if at < position and each in self.effects.get(at, PURE).writes:
                    latest = max(latest, at) if at in self.reshaping else latest
                    if self._is_returned(user) is each:
                        same.append(user)
        is_known = self.nodes[latest] in same or self.nodes[latest] is node
        return self.nodes[latest].meta.get("val") if is_known else None

    def _is_returned(self, node: Node) -> Node | None:
        """The operand that an in-place operator writes and returns."""
        told = self.effects.get(self.position[node], PURE)
        is_operator = node.op in ("call_function", "call_method")
        return (
            told.writes[0] if is_operator and len(told.writes) == 1 and told.writes == told.aliases else None
        )

    def why(self, first: int, second: int) -> str:
        """Why the effect edge between two positions is there."""
        a, b = self.effects.get(first, PURE), self.effects.get(second, PURE)
        if a.barrier or b.barrier:
            return "one of them switches a mode for everything after it"
        if a.random and b.random:
            return "both draw from the random stream"
        if a.world and b.world:
            return f"{a.world}, then {b.world}"
        writes_first = bool(a.writes or a.state_written)
        writes_second = bool(b.writes or b.state_written)
        if writes_first and writes_second:
            return "both write the same memory"
        return (
            "it reads what the first has written"
            if writes_first
            else "the second overwrites what the first reads"
        )


def dependencies(root: nn.Module, nodes: list[Node], position: dict[Node, int] | None = None) -> Dependencies:
    """The effect edges among `nodes`, which are all the nodes of a graph owned by `root`, in its order."""
    if position is None:
        position = {node: i for i, node in enumerate(nodes)}
    found: dict[int, Effects] = {}
    cheap = _Cheap(root)
    for i, node in enumerate(nodes):
        told = cheap(node)
        if told is not PURE:
            found[i] = told
    edges: dict[int, list[int]] = {}
    _chain(edges, [i for i, e in found.items() if e.random])
    _chain(edges, [i for i, e in found.items() if e.world])
    written: set[int] = set()
    reshaping: set[int] = set()
    if any(e.writes or e.state_written for e in found.values()):
        inner = _Inner(root)
        reshaping = {i for i, e in found.items() if e.writes and inner.reshapes(nodes[i])}
        written = _order_memory(root, nodes, found, edges, inner, reshaping)
    switches_modes = any(e.barrier for e in found.values())
    if switches_modes:
        _order_barriers(nodes, found, edges)
    return Dependencies(nodes, position, edges, found, written, switches_modes, reshaping)


class _Cheap:
    """Effects by node, asking only once per target for the many that are plainly values."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._plain: dict[Any, bool] = {}
        self._reader = Reader(root)

    def __call__(self, node: Node) -> Effects:
        if node.op == "call_function" and not self._reader.declared:
            plain = self._plain.get(node.target)
            if plain is None:
                plain = self._plain[node.target] = traits(node).plain
            if plain:
                return PURE
        return self._reader.effects(node, self._root)


def _chain(edges: dict[int, list[int]], positions: list[int]) -> None:
    for first, second in pairwise(positions):
        edges.setdefault(second, []).append(first)


def _order_memory(
    root: nn.Module,
    nodes: list[Node],
    found: dict[int, Effects],
    edges: dict[int, list[int]],
    inner: _Inner,
    reshaping: set[int],
) -> set[int]:
    """Reads and writes of one memory keep their order. Returns the positions whose memory is written."""
    classes = storages(root, nodes, [found.get(i, PURE) for i in range(len(nodes))])
    written = {classes.of(w) for e in found.values() for w in e.writes}
    written |= {classes.of_state(t) for e in found.values() for t in e.state_written}
    reshaped = {classes.of(w) for i in reshaping for w in found[i].writes}
    listed = _views_from_lists(nodes, found, inner)
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        told = found.get(i, PURE)
        writes = {classes.of(w) for w in told.writes} | {classes.of_state(t) for t in told.state_written}
        reads = {classes.of(n) for n in node.all_input_nodes} | {classes.of_state(t) for t in told.state_read}
        if not told.looks:
            # A view reads the form of what it views, if not the data; some may not be taken after a write.
            reads &= reshaped | {classes.of(n) for n in node.all_input_nodes if n in listed}
        for c in (reads & written) - writes:
            if c in last_write:
                edges.setdefault(i, []).append(last_write[c])
            readers.setdefault(c, []).append(i)
        for c in writes:
            before = readers.pop(c, [])
            if c in last_write:
                before.append(last_write[c])
            if before:
                edges.setdefault(i, []).extend(b for b in before if b != i)
            last_write[c] = i
    return {i for i, node in enumerate(nodes) if classes.of(node) in written}


def _views_from_lists(nodes: list[Node], found: dict[int, Effects], inner: _Inner) -> set[Node]:
    """Values that are views which came in a list with others, or views of those.

    Autograd lets nobody use them, not even for another view, once their base was written.
    """
    lists: set[Node] = set()
    views: set[Node] = set()
    for i, node in enumerate(nodes):
        told = found.get(i, PURE)
        if not told.aliases:
            continue
        taken = any(n in views or n in lists for n in told.aliases)
        if inner.makes_lists(node) or (taken and makes_tuple(node)):
            lists.add(node)
        elif taken:
            views.add(node)
    return views


class _Inner:
    """What a node does at any depth, in its own right or in the graphs it calls, that its effects do not tell."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: dict[int, tuple[bool, bool]] = {}

    def reshapes(self, node: Node) -> bool:
        """Whether what it writes may have other sizes or strides afterwards."""
        return self._facts(node, self._root)[0]

    def makes_lists(self, node: Node) -> bool:
        """Whether a result may be one of several views that came in a list."""
        return self._facts(node, self._root)[1]

    def _facts(self, node: Node, root: nn.Module) -> tuple[bool, bool]:
        if node.op in ("call_function", "call_method"):
            told = traits(node)
            if not told.higher_order:
                shares = told.aliases is None or any(name != "out" for name in told.aliases)
                return told.reshapes_in_place, told.several and shares
        reshapes = lists = False
        for body in _called(node, root):
            if id(body) not in self._known:
                each = [self._facts(n, body) for n in body.graph.nodes]
                self._known[id(body)] = (any(r for r, _ in each), any(several for _, several in each))
            reshapes, lists = reshapes or self._known[id(body)][0], lists or self._known[id(body)][1]
        return reshapes, lists


def _called(node: Node, root: nn.Module) -> list[GraphModule]:
    """The graphs that a node runs: a body, or those that a higher-order operator is given."""
    if node.op == "call_module":
        targets = [node.target]
    elif node.op == "call_function":
        targets = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    else:
        return []
    found = [attribute(root, cast("str", target)) for target in targets]
    return [value for value in found if isinstance(value, GraphModule)]


def _order_barriers(nodes: list[Node], found: dict[int, Effects], edges: dict[int, list[int]]) -> None:
    """A switch of modes stays between what came before it and what comes after."""
    last: int | None = None
    since: list[int] = []
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        if last is not None:
            edges.setdefault(i, []).append(last)
        if found.get(i, PURE).barrier:
            edges.setdefault(i, []).extend(since)
            last, since = i, []
        else:
            since.append(i)


class Index:
    """Positions, neighbours and reachability of a graph as it was when the index was made.

    Edges are data edges plus effect edges. A position is a place in the graph's own (topological) order.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.position: dict[Node, int] = {node: i for i, node in enumerate(self.nodes)}

    def require_order(self) -> None:
        """Raise InvalidGraph if a node reads one that comes later, or one of another graph."""
        at = self.position
        for i, node in enumerate(self.nodes):
            for used in node.all_input_nodes:
                if at.get(used, i) >= i:
                    where = "comes later or belongs to another graph"
                    raise InvalidGraph(f"it reads '{used.name}', which {where}", node.name)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def names(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def dependencies(self) -> Dependencies:
        return dependencies(self.gm, self.nodes, self.position)

    @cached_property
    def data(self) -> list[list[int]]:
        """The positions each position reads, each once, in the order of first use."""
        at = self.position
        return [[at[n] for n in node.all_input_nodes] for node in self.nodes]

    @cached_property
    def before(self) -> list[list[int]]:
        """Everything that must come before each position: what it reads, then effect edges."""
        effects = self.dependencies.before
        if not effects:
            return self.data
        return [[*reads, *effects[i]] if i in effects else reads for i, reads in enumerate(self.data)]

    @cached_property
    def after(self) -> list[list[int]]:
        """Everything that must come after each position."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                found[j].append(i)
        return found

    def reaches(self, source: int, target: int) -> bool:
        """Whether `target` depends on `source`, directly or through others."""
        return bool(self.path(source, target))

    def path(self, source: int, target: int) -> list[int]:
        """A shortest chain of dependencies from `source` to `target`, empty if there is none.

        Looks only at what lies between the two in the graph's order.
        """
        if source == target:
            return [source]
        came: dict[int, int] = {source: source}
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for later in self.after[at]:
                if later <= target and later not in came:
                    came[later] = at
                    if later == target:
                        return _walk_back(came, target)
                    queue.append(later)
        return []

    def between(self, members: Iterable[int]) -> set[int]:
        """What lies on a path from a member to a member without being one; empty if the set is convex."""
        inside = set(members)
        if not inside:
            return set()
        low, high = min(inside), max(inside)
        below: set[int] = set()
        for i in range(low, high):
            if i not in inside and any(j in inside or j in below for j in self.before[i]):
                below.add(i)
        above: set[int] = set()
        for i in range(high, low, -1):
            if i in inside or i in above:
                above.update(j for j in self.before[i] if j in below)
        return above


def _walk_back(came: dict[int, int], target: int) -> list[int]:
    chain = [target]
    while came[chain[-1]] != chain[-1]:
        chain.append(came[chain[-1]])
    return chain[::-1]
