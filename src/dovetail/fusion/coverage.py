"""Coverage: what operations move and compute, and what share of it is inside regions.

An operation is a node that is not an input, a constant, a result of a graph or an element of a tuple. Its bytes are those it
reads and writes when it runs alone, so that the figures of a graph are the same before and after fusing. Views and sizes are
operations that cost nothing. A graph is walked once and each distinct body once, however often it is called: linear in the
nodes of the graph and of its bodies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.fusion.cost import Figures
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Body, GraphOwner, called_body, graphs_of
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region import RegionCall, call_of, calls_in, clone_of, walk


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What an operation moves and computes when it runs alone. Sizes that are not known count as zero.

    `is_free` marks one for which nothing is launched: a view, or the reading of a size. `uncounted` is the operator if
    its flops are not known and count as one for each element.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    is_free: bool = False
    uncounted: str = ""

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


_NOTHING = OperationCost(is_free=True)


@dataclass(frozen=True, slots=True)
class Extent:
    """A number of operations, with the bytes they move and the flops they compute one by one.

    `launches` counts those that are not views or sizes.
    """

    operations: int = 0
    launches: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.operations + other.operations,
            self.launches + other.launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
        )


@dataclass(frozen=True, slots=True)
class KindCoverage:
    """The regions of one kind, and what their operations amount to."""

    kind: str
    regions: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class OutsideOperation:
    """An operation that is in no region, and what it costs."""

    node: Node
    cost: OperationCost


@dataclass(frozen=True)
class Coverage:
    """What share of a graph is inside regions.

    `kinds` sums to `inside`: a region within a region counts for the outermost one. `nested` are the kinds of the regions
    within regions, which are part of those sums already. `outside` are the operations in no region, in order.
    `uncounted` has the operators whose flops are not known, one for each element of their results, and how often each is.
    """

    total: Extent = Extent()
    inside: Extent = Extent()
    regions: int = 0
    kinds: tuple[KindCoverage, ...] = ()
    nested: tuple[KindCoverage, ...] = ()
    outside: tuple[OutsideOperation, ...] = ()
    uncounted: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Coverage]) -> Coverage:
        """Return the sum over graphs."""
        each = list(parts)
        return cls(
            total_extent(part.total for part in each),
            total_extent(part.inside for part in each),
            sum(part.regions for part in each),
            _summed(kind for part in each for kind in part.kinds),
            _summed(kind for part in each for kind in part.nested),
            tuple(operation for part in each for operation in part.outside),
            _counts((name, count) for part in each for name, count in part.uncounted),
        )

    @property
    def operations_share(self) -> float:
        """The share of operations inside regions; 0 for a graph without operations."""
        return _share(self.inside.operations, self.total.operations)

    @property
    def bytes_share(self) -> float:
        """The share of bytes that operations inside regions move."""
        return _share(self.inside.bytes, self.total.bytes)

    @property
    def flops_share(self) -> float:
        """The share of flops that operations inside regions compute."""
        return _share(self.inside.flops, self.total.flops)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class GraphCosts:
    """The costs of the nodes of one graph, each computed on first use. The graph is not to be edited meanwhile."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._figures = Figures(Index(gm))

    def cost(self, node: Node) -> OperationCost:
        """Return what a node costs; for the call of a region, the sum over its operations."""
        body = called_body(self.gm, node)
        if body is not None:
            each = [cost for cost in _body_costs(body) if cost is not None]
            return OperationCost(
                sum(c.bytes_read for c in each),
                sum(c.bytes_written for c in each),
                sum(c.flops for c in each),
            )
        position = self._figures.index.position.get(node)
        if position is None:
            raise InvalidArgument(f"'{node.name}' is not a node of this graph.")
        figures = self._figures
        if figures.free(position):
            return _NOTHING
        return OperationCost(
            figures.bytes_read(position),
            figures.bytes_written(position),
            figures.flops(position),
            is_free=False,
            uncounted=figures.without_formula(position),
        )


def operation_cost(node: Node) -> OperationCost:
    """Return what a node costs, by the shapes in its meta; for the call of a region, the sum over its operations.

    It analyzes the node's whole graph: for many nodes of one graph, make a `GraphCosts` once.
    """
    owner = node.graph.owning_module
    if owner is None:
        raise InvalidArgument(f"the graph of '{node.name}' belongs to no GraphModule.")
    return GraphCosts(owner).cost(node)


def is_operation(node: Node) -> bool:
    """Whether a node is an operation, and not an input, a constant, the output or an element of a tuple."""
    return node.op not in ("placeholder", "get_attr", "output") and not is_projection(node)


# Of each node of a body that is not an input or the output, in order; None for what is not an operation.
_BODY_COSTS: WeakKeyDictionary[Body, tuple[OperationCost | None, ...]] = WeakKeyDictionary()


def _body_costs(body: Body) -> tuple[OperationCost | None, ...]:
    """Return the costs of a body's nodes. It is kept: bodies never change."""
    costs = _BODY_COSTS.get(body)
    if costs is None:
        graph = GraphCosts(body)
        nodes = calls_in(body)
        costs = tuple(graph.cost(node) if is_operation(node) else None for node in nodes)
        _BODY_COSTS[body] = costs
    return costs


@dataclass(slots=True)
class _Tally:
    """Sums while a graph is walked; `clones` are the copies of operations whose originals may be elsewhere."""

    kinds: dict[str, KindCoverage] = field(default_factory=dict[str, KindCoverage])
    nested: dict[str, KindCoverage] = field(default_factory=dict[str, KindCoverage])
    outside: list[OutsideOperation] = field(default_factory=list[OutsideOperation])
    clones: list[tuple[str, str, OperationCost]] = field(default_factory=list[tuple[str, str, OperationCost]])
    uncounted: list[str] = field(default_factory=list[str])

    def add_region(self, body: Body, call: RegionCall) -> None:
        kind = call.identity.kind
        operations, launches, moved, flops = self._add_members(body, call, kind)
        _add(self.kinds, kind, 1, Extent(operations, launches, moved, flops))

    def _add_members(self, body: Body, call: RegionCall, outermost: str) -> tuple[int, int, int, int]:
        operations = launches = moved = flops = 0
        nodes = calls_in(body) if call.depth > 1 else ()
        inner_calls = {
            k: (node, inner) for k, node in enumerate(nodes) if (inner := call_of(call.members[k].meta))
        }
        for k, (member, cost) in enumerate(zip(call.members, _body_costs(body), strict=True)):
            if cost is None:
                continue
            if k in inner_calls:
                node, inner = inner_calls[k]
                part = self._add_members(cast("Body", called_body(body, node)), inner, outermost)
                _add(self.nested, inner.identity.kind, 1, Extent(*part))
            elif not member.is_original:
                self.clones.append((outermost, member.original, cost))
                continue
            else:
                part = (1, int(not cost.is_free), cost.bytes, cost.flops)
                if cost.uncounted:
                    self.uncounted.append(cost.uncounted)
            operations, launches = operations + part[0], launches + part[1]
            moved, flops = moved + part[2], flops + part[3]
        return operations, launches, moved, flops


def _add(kinds: dict[str, KindCoverage], kind: str, regions: int, extent: Extent) -> None:
    before = kinds.get(kind)
    if before is not None:
        regions, extent = before.regions + regions, before.extent + extent
    kinds[kind] = KindCoverage(kind, regions, extent)


def _extent(cost: OperationCost) -> Extent:
    return Extent(1, int(not cost.is_free), cost.bytes, cost.flops)


def coverage(gm: GraphModule | GraphOwner) -> Coverage:
    """Return what share of a graph's operations, bytes and flops is inside regions, and what is in none.

    For a compiled model, the sum over its graphs. An operation of which regions have copies counts once.
    """
    return Coverage.of(_graph_coverage(graph) for graph in graphs_of(gm))


def _graph_coverage(gm: GraphModule) -> Coverage:
    tally = _Tally()
    _walk_graph(gm, tally)
    inside = total_extent(kind.extent for kind in tally.kinds.values())
    outside = total_extent(_extent(operation.cost) for operation in tally.outside)
    regions = sum(kind.regions for kind in tally.kinds.values())
    kinds, nested = _summed(tally.kinds.values()), _summed(tally.nested.values())
    names = [*tally.uncounted, *(o.cost.uncounted for o in tally.outside if o.cost.uncounted)]
    uncounted = _counts((name, 1) for name in names)
    total = total_extent((inside, outside))
    return Coverage(total, inside, regions, kinds, nested, tuple(tally.outside), uncounted)


def _counts(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the sum for each name, the greatest first."""
    sums: dict[str, int] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0) + count
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _summed(kinds: Iterable[KindCoverage]) -> tuple[KindCoverage, ...]:
    """Return the sum for each kind, those that compute and move the most first."""
    sums: dict[str, KindCoverage] = {}
    for kind in kinds:
        _add(sums, kind.kind, kind.regions, kind.extent)
    return tuple(sorted(sums.values(), key=lambda k: (-k.extent.flops, -k.extent.bytes, k.kind)))


def total_extent(extents: Iterable[Extent]) -> Extent:
    operations = launches = moved = flops = 0
    for extent in extents:
        operations, launches = operations + extent.operations, launches + extent.launches
        moved, flops = moved + extent.bytes, flops + extent.flops
    return Extent(operations, launches, moved, flops)


def _walk_graph(gm: GraphModule, tally: _Tally) -> None:
    costs = GraphCosts(gm)
    calls: list[RegionCall] = []
    restored: list[Node] = []
    names: set[str] = set()
    for node in gm.graph.nodes:
        if not is_operation(node):
            continue
        call, body = call_of(node.meta), called_body(gm, node)
        if call is not None and body is not None:
            calls.append(call)
            tally.add_region(body, call)
        elif clone_of(node) is not None:
            restored.append(node)
        else:
            names.add(node.name)
            tally.outside.append(OutsideOperation(node, costs.cost(node)))
    if tally.clones or restored:
        names.update(m.name for call in calls for m in walk(call) if m.is_original)
        _count_clones(costs, tally, restored, names)


def _count_clones(costs: GraphCosts, tally: _Tally, restored: Iterable[Node], names: set[str]) -> None:
    """Count the first copy of each operation whose original is nowhere in the graph any more."""
    for kind, original, cost in tally.clones:
        if original not in names:
            names.add(original)
            _add(tally.kinds, kind, 0, _extent(cost))
    tally.clones.clear()
    for node in restored:
        if clone_of(node) not in names:
            names.add(clone_of(node) or node.name)
            tally.outside.append(OutsideOperation(node, costs.cost(node)))
