"""Partitioning for a backend: the `capability` rule, regions of accepted operations that are as large as possible.

The problem is graph partitioning into maximal convex subgraphs, as in TVM's MergeCompilerRegions, XLA's clustering and
Torch-TensorRT's partitioner: contract edges between accepted operations for as long as the contracted graph stays
acyclic. A region is convex if no path leaves it and comes back, so two neighbours may be merged if the only path
between them is their own edge.

The sweep visits units in structural order and merges each into its last predecessor while that is a region it reads;
no path can run through anything between the two, as predecessors stand before. It needs one comparison per edge and
merges nearly all that can be merged. For the edges left, a bidirectional search looks for another path between the two
ends within the part of a dynamic topological order that such a path would have to lie in (Pearce and Kelly 2006); when
one side is exhausted no such path exists, the order is repaired by moving that side past the other end, and the two are
merged. Order keys are tuples, so that a key between two others always exists. A tree of last predecessors answers many
searches at once: a path along it is detected by comparing intervals.

The sweep takes O(edges log edges). The search is exact within a budget of 16 steps per node and at least 2^18; beyond
it all regions are legal, but two of them may be left that could be one.

Reference: Pearce and Kelly, "A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs", ACM JEA 11, 2006.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dovetail.errors import checked_call
from dovetail.ir.quotient_graph import UnionFind
from dovetail.rules.fusion_units import (
    OpSet,
    Predicate,
    UnitPlan,
    UnitRule,
    as_op_predicate,
    by_rank,
    check_rule_options,
    fusion_units,
    predicate_name,
    verdicts,
)
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext

_STEPS_PER_NODE = 16
_MIN_STEPS = 1 << 18
_STEPS_PER_PAIR = 1 << 14
_MAX_KEY_LENGTH = 64
_TREE_LOOKUPS = 8
BUDGET_EXHAUSTED = -1
Key = tuple[int, ...]


class PartitionContraction:
    """Regions grown from accepted units by merging neighbours; no two that are left can be merged, budget permitting.

    `max_weight` limits the weight of a region. `blocked` maps each pair that could not be merged to a position on the
    other path between them, or to BUDGET_EXHAUSTED.
    """

    def __init__(
        self, context: RuleContext, accepted: Sequence[bool], weights: Sequence[int], max_weight: int
    ) -> None:
        self.context, self.accepted, self.max_weight = context, accepted, max_weight
        self.before, self.data = context.index.before, context.index.data
        sets = UnionFind(len(accepted))
        self.root, self.find = sets.parent, sets.find
        self.size = list(weights)
        units = fusion_units(context)
        for unit, projections in units.projections.items():
            if accepted[unit]:
                for projection in projections:
                    self.root[projection] = unit
        self.blocked: dict[tuple[int, int], int] = {}
        self._sweep(units.ordered)
        pairs = self._open_pairs()
        if pairs:
            _MergeSearch(self, pairs).run()

    def _sweep(self, units: Sequence[int]) -> None:
        """Merge each unit into its last predecessors; the result takes the place of the predecessor in the order."""
        root, size, accepted, order, find = self.root, self.size, self.accepted, self.context.order, self.find
        # An upper bound on the ranks of a region's predecessors outside it.
        last = [-1] * len(root)
        for unit in units:
            earlier = self.before[unit]
            if not accepted[unit] or not earlier:
                continue
            ranked = sorted({find(j) for j in earlier}, key=order.__getitem__, reverse=True)
            read = {find(j) for j in self.data[unit]}
            places = [order[r] for r in ranked]
            places.append(-1)
            last[unit] = places[0]
            at, inherited = unit, -1
            for k, other in enumerate(ranked):
                place = places[k]
                if not accepted[other] or other not in read or inherited > place:
                    break
                if size[other] + size[at] > self.max_weight:
                    break
                inherited = max(last[other], min(inherited, place - 1))
                last[other] = max(inherited, places[k + 1])
                root[at] = other
                size[other] += size[at]
                at = other

    def _open_pairs(self) -> list[tuple[int, int]]:
        """Return the data edges between accepted operations of different regions, in structural order."""
        accepted, find, order = self.accepted, self.find, self.context.order
        pairs = [
            (j, i)
            for i, reads in enumerate(self.data)
            if accepted[i]
            for j in reads
            if accepted[j] and find(i) != find(j)
        ]
        pairs.sort(key=lambda pair: (order[pair[1]], order[pair[0]]))
        return pairs


class _MergeSearch:
    """Merges the remaining neighbours of a contraction, searching for other paths in a dynamic topological order."""

    def __init__(self, contraction: PartitionContraction, pairs: list[tuple[int, int]]) -> None:
        self.contraction, self.pairs = contraction, pairs
        count = len(contraction.root)
        find = contraction.find
        self.into: list[set[int]] = [set() for _ in range(count)]
        self.out: list[set[int]] = [set() for _ in range(count)]
        for i, earlier in enumerate(contraction.before):
            unit = find(i)
            for j in earlier:
                other = find(j)
                if other != unit:
                    self.into[unit].add(other)
                    self.out[other].add(unit)
        self.key: list[Key] = [(rank, 0) for rank in contraction.context.order]
        self.budget = max(_MIN_STEPS, _STEPS_PER_NODE * count)
        self.changed = [0] * count
        self.clock = self.keys = 0
        self._tree: tuple[list[int], list[int]] | None = None

    def run(self) -> None:
        """Try to merge every pair, and again for as long as one of its ends has changed since."""
        contraction = self.contraction
        tried: dict[tuple[int, int], int] = {}
        merged = True
        while merged and self.budget > 0:
            merged = False
            for pair in self.pairs:
                early, late = contraction.find(pair[0]), contraction.find(pair[1])
                if early == late or max(self.changed[early], self.changed[late]) < tried.get(pair, 0):
                    continue
                if contraction.size[early] + contraction.size[late] > contraction.max_weight:
                    continue
                if self.budget <= 0:
                    contraction.blocked[pair] = BUDGET_EXHAUSTED
                    continue
                self.clock += 1
                tried[pair] = self.clock
                between = self._merge_or_path(early, late, pair[1])
                merged |= between is None
                if between is not None:
                    contraction.blocked[pair] = between
        contraction.blocked = {
            p: x for p, x in contraction.blocked.items() if contraction.find(p[0]) != contraction.find(p[1])
        }

    def _merge_or_path(self, early: int, late: int, reader: int) -> int | None:
        """Merge two units and return None, or return a unit on another path between them."""
        key, into = self.key, self.into
        low = key[early]
        self.budget -= 1 + len(into[late])
        behind = [y for y in into[late] if y != early and key[y] > low]
        if not behind:
            self._merge(early, late, low)
            return None
        for x in islice(self.out[early], _TREE_LOOKUPS):
            if x != late and self._leads_to(x, reader):
                return x
        return self._bidirectional_search(early, late, max(key[y] for y in behind))

    def _bidirectional_search(self, early: int, late: int, top: Key) -> int | None:
        """Search from both ends by turns; once either side is exhausted there is no other path: merge the two."""
        key, into, out, low = self.key, self.into, self.out, self.key[early]
        ahead, behind = set[int](), set[int]()
        forward = _explore(early, out, ahead, lambda x: x != late and key[x] <= top)
        backward = _explore(late, into, behind, lambda y: y != early and key[y] > low)
        for _ in range(min(self.budget, _STEPS_PER_PAIR)):
            self.budget -= 2
            y = next(backward, None)
            if y is None:
                self._move(sorted(behind, key=key.__getitem__), low, 1)
                self._merge(early, late, low)
                return None
            if y >= 0 and (y in ahead or early in into[y]):
                return y
            x = next(forward, None)
            if x is None:
                self._move(sorted(ahead, key=key.__getitem__, reverse=True), top, -1)
                self._merge(early, late, self._beside(top, -1))
                return None
            if x >= 0 and (x in behind or late in out[x]):
                return x
        return BUDGET_EXHAUSTED

    def _move(self, units: list[int], where: Key, side: int) -> None:
        self.budget -= len(units)
        for unit in units:
            self.key[unit] = self._beside(where, side)

    def _beside(self, where: Key, side: int) -> Key:
        """Return a new key right before (1) or right after (-1) another, next to it in the order."""
        self.keys += 1
        return (*where[:-1], -side, side * self.keys, 0)

    def _merge(self, early: int, late: int, key: Key) -> None:
        into, out, contraction = self.into, self.out, self.contraction
        stays, goes = early, late  # the one with fewer edges is merged into the other
        if len(into[early]) + len(out[early]) < len(into[late]) + len(out[late]):
            stays, goes = late, early
        self.budget -= len(into[goes]) + len(out[goes])
        for ends, back in ((into, out), (out, into)):
            for other in ends[goes]:
                back[other].discard(goes)
                if other != stays:
                    back[other].add(stays)
                    ends[stays].add(other)
            ends[goes] = set()
        contraction.root[goes] = stays
        contraction.size[stays] += contraction.size[goes]
        self.key[stays] = key
        self.changed[stays] = self.clock
        if len(key) > _MAX_KEY_LENGTH:
            self._renumber()

    def _renumber(self) -> None:
        units = sorted({self.contraction.find(i) for i in range(len(self.key))}, key=self.key.__getitem__)
        self.budget -= len(self.key)
        for place, unit in enumerate(units):
            self.key[unit] = (place, 0)

    def _leads_to(self, source: int, target: int) -> bool:
        """Whether the chain of last predecessors from `target` back reaches `source`."""
        if self._tree is None:
            self._tree = _last_predecessors(self.contraction.before, self.contraction.context.order)
        first, count = self._tree
        return first[source] <= first[target] < first[source] + count[source]


def _explore(
    start: int, edges: Sequence[set[int]], visited: set[int], within: Callable[[int], bool]
) -> Iterator[int]:
    """Depth-first search among the units that `within` admits: yield each new unit, -1 for an edge that adds none."""
    stack = [iter(edges[start])]
    while stack:
        unit = next(stack[-1], None)
        if unit is None:
            stack.pop()
        elif unit in visited or not within(unit):
            yield -1
        else:
            visited.add(unit)
            stack.append(iter(edges[unit]))
            yield unit


def _last_predecessors(before: Sequence[list[int]], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tree in which the parent of a position is its last predecessor, as preorder intervals: first, count."""
    size, positions = len(before), by_rank(order)
    parent = [max(earlier, key=order.__getitem__) if earlier else -1 for earlier in before]
    count = [1] * size
    for i in reversed(positions):
        if parent[i] >= 0:
            count[parent[i]] += count[i]
    first, free, roots = [0] * size, [0] * size, 0
    for i in positions:
        above = parent[i]
        if above < 0:
            first[i] = roots
            roots += count[i]
        else:
            first[i] = free[above]
            free[above] += count[i]
        free[i] = first[i] + 1
    return first, count


@checked_call()
def capability(
    accepts: Predicate | Iterable[Any],
    kind: str,
    *,
    name: str | None = None,
    priority: int = 0,
    min_size: int = 2,
    join_siblings: bool = False,
    nests: bool = False,
) -> Rule:
    """A rule for "my backend takes these operations": regions of accepted operations, as large as possible.

    `accepts` is a predicate that returns True, False or a `Decline` for each operation (parts of tuples go with the
    operation that returns the tuple), or a set of operators: overloads, packets, torch functions, module classes, names
    such as "aten.add.Tensor" and "add", or kinds of regions. Regions are connected unless `join_siblings` is set. No
    region depends on itself through operations outside it, by data or by effects. No two neighbours could be one
    region; on very large graphs the search for that is bounded (see `PartitionContraction`).
    """
    label = f"capability:{kind}" if name is None else name
    return Capability(as_op_predicate(accepts), kind, label, priority, min_size, join_siblings, nests)


@dataclass(frozen=True, repr=False)
class Capability(UnitRule):
    """The rule that `capability` returns."""

    accepts: OpSet | Predicate
    kind: str
    name: str
    priority: int = 0
    min_size: int = 2
    join_siblings: bool = False
    nests: bool = False

    def __post_init__(self) -> None:
        check_rule_options(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def __repr__(self) -> str:
        return f"capability({predicate_name(self.accepts)}, kind={self.kind!r}, name={self.name!r})"

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Yield regions that are legal each and all together, and refusals of what is declined or not merged."""
        plan = context.analysis(self.plan)
        for units in plan.regions:
            yield Candidate(
                self.name,
                self.kind,
                plan.units.positions(units),
                escapes="output",
                priority=self.priority,
                divisible=True,
            )
        yield from plan.refusals

    def plan(self, context: RuleContext) -> PartitionPlan:
        return PartitionPlan(context, self)


class PartitionPlan(UnitPlan):
    """The regions of one graph; `number` is the region of each accepted position."""

    def __init__(self, context: RuleContext, rule: Capability) -> None:
        super().__init__(context, rule)
        self.rule = rule
        candidates = [u for u in self.units.ordered if not self.excluded[u]]
        self.verdicts = verdicts(rule.accepts, context, candidates, rule.name)
        self.accepted = accepted = [False] * len(context.nodes)
        for unit, verdict in self.verdicts.items():
            if isinstance(verdict, Decline):
                self.refuse((unit,), verdict.reason, unit)
            elif verdict:
                accepted[unit] = True
        for unit, projections in self.units.projections.items():
            for projection in projections:
                accepted[projection] = accepted[unit]
        self.blocked: dict[tuple[int, int], int] = {}
        self.number = self._levels() if rule.join_siblings else self._connected()
        self.regions = self._collect(rule.min_size)

    def _connected(self) -> Sequence[int]:
        contraction = PartitionContraction(self.context, self.accepted, self.weights, self.max_weight)
        self.blocked = contraction.blocked
        for (early, late), between in contraction.blocked.items():
            self.refuse((early, late), self._why_blocked(between), None if between < 0 else between)
        return [contraction.find(i) for i in range(len(self.accepted))]

    def _why_blocked(self, between: int) -> str:
        if between == BUDGET_EXHAUSTED:
            return (
                "whether there is another path between them is unknown: the budget of the search is exhausted"
            )
        name = self.context.nodes[between].name
        return f"one region would depend on itself: '{name}' is between them"

    def _levels(self) -> Sequence[int]:
        """Return one region per level, the number of accepted-to-rejected alternations on the longest path before.

        Levels are convex, and two of them cannot be merged: a rejected operation is between them.
        """
        before, accepted, unit_of = self.context.index.before, self.accepted, self.units.unit_of
        level = [-1] * len(accepted)
        for i, earlier in enumerate(before):
            if accepted[i]:
                level[i] = max([level[j] + (not accepted[j]) for j in earlier], default=0)
                level[i] = max(level[i], level[unit_of[i]], 0)
            else:
                level[i] = max([level[j] for j in earlier], default=-1)
        filled: dict[int, tuple[int, int]] = {}
        number, fresh = list(range(len(accepted))), len(accepted)
        for unit in self.units.ordered:
            if not accepted[unit]:
                continue
            current, size = filled.get(level[unit], (-1, 0))
            if current < 0 or size + self.weights[unit] > self.max_weight:
                current, size, fresh = fresh, 0, fresh + 1
            filled[level[unit]] = (current, size + self.weights[unit])
            number[unit] = current
        return [number[unit] for unit in unit_of]

    def _collect(self, min_size: int) -> list[list[int]]:
        members: dict[int, list[int]] = {}
        for unit in self.units.ordered:
            if self.accepted[unit]:
                members.setdefault(self.number[unit], []).append(unit)
        for units in members.values():
            if len(units) < min_size:
                self.refuse(tuple(units), f"a region has at least {min_size} operations", units[0])
        return [units for units in members.values() if len(units) >= min_size]

    def why_not(self, early: int, late: int) -> list[str]:
        """Return why two units are not in one region: what is not accepted, or what is between them."""
        if early == late or (self.accepted[early] and self.number[early] == self.number[late]):
            return []
        context, nodes, rule = self.context, self.context.nodes, self.rule
        reasons: list[str] = []
        for unit in (early, late):
            excluded = self.why_excluded(unit)
            verdict = self.verdicts.get(unit)
            if excluded:
                reasons.append(excluded)
            elif isinstance(verdict, Decline):
                reasons.append(f"'{nodes[unit].name}' is declined: {verdict.reason}")
            elif not verdict:
                reasons.append(f"'{nodes[unit].name}' is not accepted by {predicate_name(rule.accepts)}")
        path = context.index.path(early, late)
        outside = [i for i in path[1:-1] if not self.accepted[i]]
        if outside:
            reasons.append(f"between them is '{nodes[outside[0]].name}', which is not accepted")
        if not path and not rule.join_siblings:
            reasons.append(f"'{nodes[early].name}' and '{nodes[late].name}' are not connected")
        if reasons:
            return reasons
        between = [
            x
            for (a, b), x in self.blocked.items()
            if {self.number[a], self.number[b]} == {self.number[early], self.number[late]}
        ]
        if between:
            return [self._why_blocked(between[0])]
        return [
            f"the region would be larger than {self.max_weight} operations, or depend on itself through others"
        ]
