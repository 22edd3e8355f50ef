"""What a backend takes, as regions: maximal convex sets of accepted operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dovetail.errors import checked_call
from dovetail.rules.op_predicate import (
    Ops,
    Predicate,
    Refusals,
    as_accepts,
    closed,
    ground,
    require_rule,
    spelled,
    verdicts,
    weight,
    why_closed,
)
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext

_STEPS_PER_NODE = 16
_LEAST_STEPS = 1 << 18
_STEPS_PER_PAIR = 1 << 14
_LONGEST_KEY = 64
_SURE_LOOKS = 8
GIVEN_UP = -1
Key = tuple[int, ...]


class PartitionContraction:
    """Regions grown from accepted units by merging neighbours; no two that are left can be merged.

    That holds exactly while the search stays within its budget, 16 steps per node and at least a quarter of a million;
    beyond it regions are legal still, but two of them may be left that could be one. `most` limits the weight of a
    region. `blocked` has for each pair that was kept apart the position in between that keeps it so, or GIVEN_UP.
    """

    def __init__(
        self, context: RuleContext, accepted: Sequence[bool], weights: Sequence[int], most: int
    ) -> None:
        self.context, self.accepted, self.most = context, accepted, most
        self.before, self.data = context.index.before, context.index.data
        self.root = list(range(len(accepted)))
        self.size = list(weights)
        on = ground(context)
        for unit, parts in on.parts.items():
            if accepted[unit]:
                for part in parts:
                    self.root[part] = unit
        self._listed = on.listed
        self.blocked: dict[tuple[int, int], int] = {}
        self._sweep()
        pairs = self._open_pairs()
        if pairs:
            _MergeSearch(self, pairs).run()

    def find(self, i: int) -> int:
        root = self.root
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    def _sweep(self) -> None:
        """Merge each unit into its last predecessors; the merged one stands where the predecessor stood."""
        root, size, accepted, order, find = self.root, self.size, self.accepted, self.context.order, self.find
        # No outside predecessor of a region stands behind this place.
        last = [-1] * len(root)
        for unit in self._listed:
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
                if size[other] + size[at] > self.most:
                    break
                inherited = max(last[other], min(inherited, place - 1))
                last[other] = max(inherited, places[k + 1])
                root[at] = other
                size[other] += size[at]
                at = other

    def _open_pairs(self) -> list[tuple[int, int]]:
        """Data edges whose ends are accepted and not in one region, in structural order."""
        accepted, find, order = self.accepted, self.find, self.context.order
        found = [
            (j, i)
            for i, reads in enumerate(self.data)
            if accepted[i]
            for j in reads
            if accepted[j] and find(i) != find(j)
        ]
        found.sort(key=lambda pair: (order[pair[1]], order[pair[0]]))
        return found


class _MergeSearch:
    """The units of a contracted graph with their neighbours, merged further where no path forbids it.

    Places are keys to be compared: a unit that has to move goes right before or right behind another.
    """

    def __init__(self, made: PartitionContraction, pairs: list[tuple[int, int]]) -> None:
        self.made, self.pairs = made, pairs
        count = len(made.root)
        find = made.find
        self.into: list[set[int]] = [set() for _ in range(count)]
        self.out: list[set[int]] = [set() for _ in range(count)]
        for i, earlier in enumerate(made.before):
            unit = find(i)
            for j in earlier:
                other = find(j)
                if other != unit:
                    self.into[unit].add(other)
                    self.out[other].add(unit)
        self.key: list[Key] = [(place, 0) for place in made.context.order]
        self.left = max(_LEAST_STEPS, _STEPS_PER_NODE * count)
        self.changed = [0] * count
        self.clock = self.keys = 0
        self._tree: tuple[list[int], list[int]] | None = None

    def run(self) -> None:
        """Look at every pair, and again for as long as one of its ends has changed since."""
        made = self.made
        looked: dict[tuple[int, int], int] = {}
        merged = True
        while merged and self.left > 0:
            merged = False
            for pair in self.pairs:
                early, late = made.find(pair[0]), made.find(pair[1])
                if early == late or max(self.changed[early], self.changed[late]) < looked.get(pair, 0):
                    continue
                if made.size[early] + made.size[late] > made.most:
                    continue
                if self.left <= 0:
                    made.blocked[pair] = GIVEN_UP
                    continue
                self.clock += 1
                looked[pair] = self.clock
                between = self._between(early, late, pair[1])
                merged |= between is None
                if between is not None:
                    made.blocked[pair] = between
        made.blocked = {p: x for p, x in made.blocked.items() if made.find(p[0]) != made.find(p[1])}

    def _between(self, early: int, late: int, reader: int) -> int | None:
        """A unit on another path between two units; None if there was none, and they are merged now."""
        key, into = self.key, self.into
        low = key[early]
        self.left -= 1 + len(into[late])
        behind = [y for y in into[late] if y != early and key[y] > low]
        if not behind:
            self._merge(early, late, low)
            return None
        for x in islice(self.out[early], _SURE_LOOKS):
            if x != late and self._leads_to(x, reader):
                return x
        return self._meet(early, late, max(key[y] for y in behind))

    def _meet(self, early: int, late: int, top: Key) -> int | None:
        """Search from both ends by turns; whichever has seen all there is first lets the two be merged."""
        key, into, out, low = self.key, self.into, self.out, self.key[early]
        ahead, behind = set[int](), set[int]()
        forward = _explore(early, out, ahead, lambda x: x != late and key[x] <= top)
        backward = _explore(late, into, behind, lambda y: y != early and key[y] > low)
        for _ in range(min(self.left, _STEPS_PER_PAIR)):
            self.left -= 2
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
        return GIVEN_UP

    def _move(self, units: list[int], where: Key, side: int) -> None:
        self.left -= len(units)
        for unit in units:
            self.key[unit] = self._beside(where, side)

    def _beside(self, where: Key, side: int) -> Key:
        """A new key right before (1) or right behind (-1) another: between it and whatever was next to it."""
        self.keys += 1
        return (*where[:-1], -side, side * self.keys, 0)

    def _merge(self, early: int, late: int, key: Key) -> None:
        into, out, made = self.into, self.out, self.made
        stays, goes = early, late
        if len(into[early]) + len(out[early]) < len(into[late]) + len(out[late]):
            stays, goes = late, early
        self.left -= len(into[goes]) + len(out[goes])
        for ends, back in ((into, out), (out, into)):
            for other in ends[goes]:
                back[other].discard(goes)
                if other != stays:
                    back[other].add(stays)
                    ends[stays].add(other)
            ends[goes] = set()
        made.root[goes] = stays
        made.size[stays] += made.size[goes]
        self.key[stays] = key
        self.changed[stays] = self.clock
        if len(key) > _LONGEST_KEY:
            self._renumber()

    def _renumber(self) -> None:
        units = sorted({self.made.find(i) for i in range(len(self.key))}, key=self.key.__getitem__)
        self.left -= len(self.key)
        for place, unit in enumerate(units):
            self.key[unit] = (place, 0)

    def _leads_to(self, source: int, target: int) -> bool:
        """Whether a path is known beforehand: from target back, always to the last predecessor."""
        if self._tree is None:
            self._tree = _last_predecessors(self.made.before, self.made.context.order)
        first, count = self._tree
        return first[source] <= first[target] < first[source] + count[source]


def _explore(
    start: int, edges: Sequence[set[int]], seen: set[int], wanted: Callable[[int], bool]
) -> Iterator[int]:
    """What can be reached through wanted units only, one by one as it is seen; -1 for a look in vain."""
    stack = [iter(edges[start])]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
        elif found in seen or not wanted(found):
            yield -1
        else:
            seen.add(found)
            stack.append(iter(edges[found]))
            yield found


def _last_predecessors(before: Sequence[list[int]], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tree in which the last predecessor of a position is its parent, as intervals: first number and count."""
    size = len(before)
    places = [0] * size
    for i, place in enumerate(order):
        places[place] = i
    parent = [max(earlier, key=order.__getitem__) if earlier else -1 for earlier in before]
    count = [1] * size
    for i in reversed(places):
        if parent[i] >= 0:
            count[parent[i]] += count[i]
    first, free, roots = [0] * size, [0] * size, 0
    for i in places:
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
    """A rule for "my backend takes these operations": regions of what is accepted, as large as they can be.

    `accepts` is a predicate that says True, False or a `Decline` of each operation (parts of tuples go with what made
    them), or a set of operators: overloads, packets, torch functions, module classes, or names such as
    "aten.add.Tensor" and "add", or kinds of regions. Regions are connected unless
    `join_siblings` is set. None depends on itself through what lies outside, by data or by effects. No two neighbours
    could be one region; on very large graphs the search for that is bounded (see `Contraction`).
    """
    checked = as_accepts(accepts)
    return Capability(
        checked,
        kind,
        f"capability:{kind}" if name is None else name,
        priority,
        min_size,
        join_siblings,
        nests,
    )


@dataclass(frozen=True, repr=False)
class Capability(Rule):
    """The rule that `capability` makes."""

    accepts: Ops | Predicate
    kind: str
    name: str
    priority: int = 0
    min_size: int = 2
    join_siblings: bool = False
    nests: bool = False

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def __repr__(self) -> str:
        return f"capability({spelled(self.accepts)}, kind={self.kind!r}, name={self.name!r})"

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Regions that are legal each and all together, and what was declined or had to stay apart."""
        plan = context.analysis(self._plan)
        on = ground(context)
        for units in plan.regions:
            yield Candidate(
                self.name,
                self.kind,
                on.positions(units),
                escapes="output",
                priority=self.priority,
                divisible=True,
            )
        yield from plan.refused.found

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        """Why two positions are not in one region: what is not accepted, or what lies between them."""
        home = ground(context).home
        early, late = sorted((home[first], home[second]), key=context.order.__getitem__)
        return context.analysis(self._plan).why_not(early, late)

    def _plan(self, context: RuleContext) -> _Plan:
        return _Plan(context, self)


class _Plan:
    """The regions of one context. `number` has for each position that is accepted the number of its region."""

    def __init__(self, context: RuleContext, rule: Capability) -> None:
        self.context, self.rule = context, rule
        self.on = ground(context)
        self.refused = Refusals(rule.name)
        shut = closed(context, rule.kind, rule.nests)
        self.said = verdicts(rule.accepts, context, [u for u in self.on.listed if not shut[u]], rule.name)
        accepted = [False] * len(context.nodes)
        for unit, said in self.said.items():
            if isinstance(said, Decline):
                self.refused.add((unit,), said.reason, unit)
            elif said:
                accepted[unit] = True
        for unit, parts in self.on.parts.items():
            for part in parts:
                accepted[part] = accepted[unit]
        weights = [1] * len(accepted)
        for i in context.calls:
            weights[i] = weight(context, i)
        self.accepted, self.weights = accepted, weights
        self.most = context.limits.nodes or sum(weights)
        self.blocked: dict[tuple[int, int], int] = {}
        self.number = self._levels() if rule.join_siblings else self._connected()
        self.regions = self._listed(rule.min_size)

    def _connected(self) -> Sequence[int]:
        made = PartitionContraction(self.context, self.accepted, self.weights, self.most)
        self.blocked = made.blocked
        for (early, late), between in made.blocked.items():
            self.refused.add((early, late), self._why_blocked(between), None if between < 0 else between)
        return [made.find(i) for i in range(len(self.accepted))]

    def _why_blocked(self, between: int) -> str:
        if between == GIVEN_UP:
            return "whether something lies between them was not found out: the search is bounded"
        name = self.context.nodes[between].name
        return f"one region would depend on itself: '{name}' lies between them"

    def _levels(self) -> Sequence[int]:
        """One region for all that comes after as many alternations: two of them always have something between."""
        before, accepted, home = self.context.index.before, self.accepted, self.on.home
        level = [-1] * len(accepted)
        for i, earlier in enumerate(before):
            if accepted[i]:
                level[i] = max([level[j] + (not accepted[j]) for j in earlier], default=0)
                level[i] = max(level[i], level[home[i]], 0)
            else:
                level[i] = max([level[j] for j in earlier], default=-1)
        filled: dict[int, tuple[int, int]] = {}
        number, fresh = list(range(len(accepted))), len(accepted)
        for unit in self.on.listed:
            if not accepted[unit]:
                continue
            current, size = filled.get(level[unit], (-1, 0))
            if current < 0 or size + self.weights[unit] > self.most:
                current, size, fresh = fresh, 0, fresh + 1
            filled[level[unit]] = (current, size + self.weights[unit])
            number[unit] = current
        return [number[unit] for unit in home]

    def _listed(self, min_size: int) -> list[list[int]]:
        members: dict[int, list[int]] = {}
        for unit in self.on.listed:
            if self.accepted[unit]:
                members.setdefault(self.number[unit], []).append(unit)
        for units in members.values():
            if len(units) < min_size:
                self.refused.add(tuple(units), f"a region has at least {min_size} operations", units[0])
        return [units for units in members.values() if len(units) >= min_size]

    def why_not(self, early: int, late: int) -> list[str]:
        """Why two units are not in one region, empty if they are."""
        if early == late or (self.accepted[early] and self.number[early] == self.number[late]):
            return []
        context, nodes, rule = self.context, self.context.nodes, self.rule
        found: list[str] = []
        for unit in (early, late):
            shut = why_closed(context, rule.kind, rule.nests, unit)
            said = self.said.get(unit)
            if shut:
                found.append(shut)
            elif isinstance(said, Decline):
                found.append(f"'{nodes[unit].name}' is declined: {said.reason}")
            elif not said:
                found.append(f"'{nodes[unit].name}' is not accepted by {spelled(rule.accepts)}")
        path = context.index.path(early, late)
        outside = [i for i in path[1:-1] if not self.accepted[i]]
        if outside:
            found.append(f"between them lies '{nodes[outside[0]].name}', which is not accepted")
        if not path and not rule.join_siblings:
            found.append(f"'{nodes[early].name}' and '{nodes[late].name}' are not connected")
        if found:
            return found
        between = [
            x
            for (a, b), x in self.blocked.items()
            if {self.number[a], self.number[b]} == {self.number[early], self.number[late]}
        ]
        if between:
            return [self._why_blocked(between[0])]
        return [f"the region would be larger than {self.most} operations, or depend on itself through others"]
