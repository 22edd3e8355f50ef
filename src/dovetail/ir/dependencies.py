"""The dependence graph of a graph module: data edges, effect edges, and reachability over both.

Data edges are the arguments of nodes. Effect edges order what arguments do not: random draws among themselves, effects on
the host among themselves, mode switches against everything, and the reads and writes of one memory (read after write,
write after read, write after write; see K. D. Cooper and L. Torczon, "Engineering a Compiler", on dependence graphs).
Memories are distinguished by alias class. A chain of draws or of writes has one edge per link, not one per pair, so that edges
and the time to find them are linear in the size of the graph and the number of reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidGraph
from dovetail.ir.alias_analysis import alias_classes
from dovetail.ir.effects import PURE, EffectAnalysis, Effects
from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.inplace_reshapes import InplaceReshapes
from dovetail.ir.nodes import returns_tuple
from dovetail.ir.op_traits import traits_of


@dataclass(frozen=True)
class Dependencies:
    """Effect edges of a graph by position; data edges are the nodes' own arguments.

    `before[i]` are earlier positions that must stay before `i`. `effects` has an entry for each node that is not
    known to be pure. `written` are the positions of values whose memory some node of the graph writes, `reshaping`
    those of nodes that may give what they write other sizes or strides.
    """

    root: nn.Module
    nodes: list[Node]
    position: dict[Node, int]
    before: dict[int, list[int]]
    effects: dict[int, Effects]
    written: set[int] = field(default_factory=set[int])
    switches_modes: bool = False
    reshaping: set[int] = field(default_factory=set[int])

    def value_read(self, node: Node, position: int, region: Collection[int] = ()) -> Any:
        """Return the fake value of `node` where the node at `position` reads it, after in-place changes of its shape.

        Changes by the nodes of a region that reads it are left out: its operands have the values before it runs.
        None if the value is not known.
        """
        reshapes = self.inplace_reshapes
        return node.meta.get("val") if reshapes is None else reshapes.value(node, position, region)

    @cached_property
    def inplace_reshapes(self) -> InplaceReshapes | None:
        """Where sizes or strides are changed in place; None if no node, nor a graph that is called, does that."""
        nested = _NestedTraits(self.root)
        if not self.reshaping and not any(n.op == "call_module" and nested.reshapes(n) for n in self.nodes):
            return None
        return InplaceReshapes(
            self,
            lambda body: dependencies(body, list(body.graph.nodes)),
            # Of a graph's inputs, guards compare which are the same; a body may be called by any operands.
            distinct_operands=not isinstance(self.root, Body),
        )

    def why(self, first: int, second: int) -> str:
        """Return the reason of the effect edge between two positions."""
        a, b = self.effects.get(first, PURE), self.effects.get(second, PURE)
        if a.barrier or b.barrier:
            return "one of them switches a mode for everything after it"
        if a.random and b.random:
            return "both draw from the random stream"
        if a.host_effect and b.host_effect:
            return f"{a.host_effect}, then {b.host_effect}"
        if not (a.writes or a.state_written):
            return "the second overwrites what the first reads"
        writes_both = b.writes or b.state_written
        return "both write the same memory" if writes_both else "it reads what the first has written"


def dependencies(root: nn.Module, nodes: list[Node], position: dict[Node, int] | None = None) -> Dependencies:
    """Return the effect edges among `nodes`, which are all the nodes of a graph owned by `root`, in its order."""
    if position is None:
        position = {node: i for i, node in enumerate(nodes)}
    effects = _impure_effects(root, nodes)
    edges: dict[int, list[int]] = {}
    _chain(edges, [i for i, e in effects.items() if e.random])
    _chain(edges, [i for i, e in effects.items() if e.host_effect])
    written: set[int] = set()
    reshaping: set[int] = set()
    if any(e.writes or e.state_written for e in effects.values()):
        nested = _NestedTraits(root)
        reshaping = {i for i, e in effects.items() if e.writes and nested.reshapes(nodes[i])}
        written = _order_memory(root, nodes, effects, edges, nested, reshaping)
    switches_modes = any(e.barrier for e in effects.values())
    if switches_modes:
        _order_barriers(nodes, effects, edges)
    return Dependencies(root, nodes, position, edges, effects, written, switches_modes, reshaping)


def _impure_effects(root: nn.Module, nodes: list[Node]) -> dict[int, Effects]:
    """Return the effects of all nodes but those whose target is pure, which is looked up once per target."""
    analysis = EffectAnalysis(root)
    pure: dict[Any, bool] = {}
    effects: dict[int, Effects] = {}
    for i, node in enumerate(nodes):
        if node.op == "call_function" and not analysis.declared:
            is_pure = pure.get(node.target)
            if is_pure is None:
                is_pure = pure[node.target] = traits_of(node).pure
            if is_pure:
                continue
        node_effects = analysis.effects(node, root)
        if node_effects is not PURE:
            effects[i] = node_effects
    return effects


def _chain(edges: dict[int, list[int]], positions: list[int]) -> None:
    for first, second in pairwise(positions):
        edges.setdefault(second, []).append(first)


def _order_memory(
    root: nn.Module,
    nodes: list[Node],
    effects: dict[int, Effects],
    edges: dict[int, list[int]],
    nested: _NestedTraits,
    reshaping: set[int],
) -> set[int]:
    """Add edges between reads and writes of one memory. Return the positions whose memory is written."""
    classes = alias_classes(root, nodes, [effects.get(i, PURE) for i in range(len(nodes))])
    written = {classes.of(w) for e in effects.values() for w in e.writes}
    written |= {classes.of_state(t) for e in effects.values() for t in e.state_written}
    reshaped = {classes.of(w) for i in reshaping for w in effects[i].writes}
    multi_views = _views_from_lists(nodes, effects, nested)
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        own = effects.get(i, PURE)
        writes = {classes.of(w) for w in own.writes} | {classes.of_state(t) for t in own.state_written}
        reads = {classes.of(n) for n in node.all_input_nodes} | {classes.of_state(t) for t in own.state_read}
        if not own.reads_data:
            # A view reads the shape of what it views, if not the data; some may not be taken after a write.
            reads &= reshaped | {classes.of(n) for n in node.all_input_nodes if n in multi_views}
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


def _views_from_lists(nodes: list[Node], effects: dict[int, Effects], nested: _NestedTraits) -> set[Node]:
    """Return the values that are views out of a list of views, or views of those.

    Autograd refuses every use of them, another view included, once their base was written.
    """
    lists: set[Node] = set()
    views: set[Node] = set()
    for i, node in enumerate(nodes):
        aliases = effects.get(i, PURE).aliases
        if not aliases:
            continue
        from_list = any(n in views or n in lists for n in aliases)
        if nested.returns_view_list(node) or (from_list and returns_tuple(node)):
            lists.add(node)
        elif from_list:
            views.add(node)
    return views


class _NestedTraits:
    """Traits of a node that its effects do not have: its own, and those of the graphs it calls at any depth."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: dict[int, tuple[bool, bool]] = {}

    def reshapes(self, node: Node) -> bool:
        """Whether what it writes may have other sizes or strides afterwards."""
        return self._traits(node, self._root)[0]

    def returns_view_list(self, node: Node) -> bool:
        """Whether a result may be one of several views that were returned in a list."""
        return self._traits(node, self._root)[1]

    def _traits(self, node: Node, root: nn.Module) -> tuple[bool, bool]:
        if node.op in ("call_function", "call_method"):
            traits = traits_of(node)
            if not traits.higher_order:
                shares = traits.aliases is None or any(name != "out" for name in traits.aliases)
                return traits.reshapes_in_place, traits.returns_tuple and shares
        reshapes = lists = False
        for body in _called_graphs(node, root):
            if id(body) not in self._known:
                pairs = [self._traits(n, body) for n in body.graph.nodes]
                self._known[id(body)] = any(pair[0] for pair in pairs), any(pair[1] for pair in pairs)
            reshapes, lists = reshapes or self._known[id(body)][0], lists or self._known[id(body)][1]
        return reshapes, lists


def _called_graphs(node: Node, root: nn.Module) -> list[GraphModule]:
    """Return the graphs that a node runs: a body, or the operands of a higher-order operator that are graphs."""
    if node.op == "call_module":
        targets = [node.target]
    elif node.op == "call_function":
        targets = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    else:
        return []
    values = [attribute(root, cast("str", target)) for target in targets]
    return [value for value in values if isinstance(value, GraphModule)]


def _order_barriers(nodes: list[Node], effects: dict[int, Effects], edges: dict[int, list[int]]) -> None:
    """Add edges that keep a mode switch between what comes before it and what comes after."""
    last: int | None = None
    since: list[int] = []
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        if last is not None:
            edges.setdefault(i, []).append(last)
        if effects.get(i, PURE).barrier:
            edges.setdefault(i, []).extend(since)
            last, since = i, []
        else:
            since.append(i)


class Index:
    """Positions, neighbors and reachability of a graph, as of when the index was built.

    Edges are data edges and effect edges. A position is an index into the graph's own (topological) order.
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
        """The positions that each position reads, each once, in the order of first use."""
        at = self.position
        return [[at[n] for n in node.all_input_nodes] for node in self.nodes]

    @cached_property
    def before(self) -> list[list[int]]:
        """The positions that must come before each position: what it reads, then effect edges."""
        effects = self.dependencies.before
        if not effects:
            return self.data
        return [[*reads, *effects[i]] if i in effects else reads for i, reads in enumerate(self.data)]

    @cached_property
    def after(self) -> list[list[int]]:
        """The positions that must come after each position."""
        after: list[list[int]] = [[] for _ in self.nodes]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                after[j].append(i)
        return after

    def reaches(self, source: int, target: int) -> bool:
        """Whether `target` depends on `source`, directly or through others."""
        return bool(self.path(source, target))

    def path(self, source: int, target: int) -> list[int]:
        """Return a shortest path of edges from `source` to `target`, empty if `target` is not reachable.

        A breadth-first search that visits only positions between the two.
        """
        if source == target:
            return [source]

        def edges(i: int) -> Iterable[int]:
            return (j for j in self.after[i] if j <= target)

        return shortest_path([source], edges, lambda _, j: j == target)

    def effect_edge(self, path: Iterable[int]) -> tuple[int, int] | None:
        """Return the first edge of a path that only effects impose, None if all are data edges."""
        effects = self.dependencies.before
        for a, b in pairwise(path):
            if a not in self.data[b] and a in effects.get(b, ()):
                return a, b
        return None

    def between(self, members: Iterable[int]) -> set[int]:
        """Return the positions on a path between two members that are not members; empty if the set is convex."""
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


def shortest_path(
    starts: Iterable[int],
    edges: Callable[[int], Iterable[int]],
    is_goal: Callable[[int, int], bool],
    most_steps: int | None = None,
) -> list[int]:
    """Return a shortest path from a start along an edge `(i, j)` for which `is_goal(i, j)` holds, empty if none exists.

    A breadth-first search that expands all starts and at most `most_steps` vertices beyond them.
    """
    queue = deque(starts)
    left = None if most_steps is None else most_steps + len(queue)
    previous: dict[int, int] = {}
    visited = set(queue)
    while queue and (left is None or left > 0):
        left = None if left is None else left - 1
        i = queue.popleft()
        for j in edges(i):
            if is_goal(i, j):
                path = [j, i]
                while path[-1] in previous:
                    path.append(previous[path[-1]])
                return path[::-1]
            if j not in visited:
                visited.add(j)
                previous[j] = i
                queue.append(j)
    return []
