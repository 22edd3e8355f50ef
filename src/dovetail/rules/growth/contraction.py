"""Merging operations along data edges for as long as no merged one would depend on itself.

An edge can be contracted if no other path leads from its one end to its other. The last predecessor that a unit has in
a topological order is always such an end, so most merging needs no search: a sweep in structural order does it.
What the sweep leaves is searched for another path from both ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from dovetail.rules.growth.common import ground
from dovetail.rules.scene import Scene

_STEPS_PER_NODE = 16
_LEAST_STEPS = 1 << 18
_STEPS_PER_PAIR = 1 << 14
_LONGEST_KEY = 64
_SURE_LOOKS = 8
GIVEN_UP = -1

Key = tuple[int, ...]


class Contraction:
    """Regions grown from accepted units by merging neighbours; no two that are left can be merged.

    That holds exactly while the search stays within its budget, 16 steps per node and at least a quarter of a million;
    beyond it regions are legal still, but two of them may be left that could be one. `most` limits the weight of a
    region. `blocked` has for each pair that was kept apart the position in between that keeps it so, or GIVEN_UP.
    """

    def __init__(self, scene: Scene, accepted: Sequence[bool], weights: Sequence[int], most: int) -> None:
        self.scene, self.accepted, self.most = scene, accepted, most
        self.before, self.data = scene.index.before, scene.index.data
        self.root = list(range(len(accepted)))
        self.size = list(weights)
        on = ground(scene)
        for unit, parts in on.parts.items():
            if accepted[unit]:
                for part in parts:
                    self.root[part] = unit
        self._listed = on.listed
        self.blocked: dict[tuple[int, int], int] = {}
        self._sweep()
        pairs = self._open_pairs()
        if pairs:
            _Search(self, pairs).run()

    def find(self, i: int) -> int:
        root = self.root
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    def _sweep(self) -> None:
        """Merge each unit into its last predecessors; the merged one stands where the predecessor stood."""
        root, size, accepted, order, find = self.root, self.size, self.accepted, self.scene.order, self.find
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
        accepted, find, order = self.accepted, self.find, self.scene.order
        found = [
            (j, i)
            for i, reads in enumerate(self.data)
            if accepted[i]
            for j in reads
            if accepted[j] and find(i) != find(j)
        ]
        found.sort(key=lambda pair: (order[pair[1]], order[pair[0]]))
        return found


class _Search:
    """The units of a contracted graph with their neighbours, merged further where no path forbids it.

    Places are keys to be compared: a unit that has to move goes right before or right behind another.
    """

    def __init__(self, made: Contraction, pairs: list[tuple[int, int]]) -> None:
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
        self.key: list[Key] = [(place, 0) for place in made.scene.order]
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
            self._tree = _last_predecessors(self.made.before, self.made.scene.order)
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
