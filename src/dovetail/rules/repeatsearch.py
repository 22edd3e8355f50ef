"""From stretches that look alike to blocks that are: where they begin and end, and where else they are."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from dovetail.rules.repeatblocks import (
    Block,
    Family,
    acyclic,
    disjoint,
    follow,
    plan,
    same,
    windows,
    wiring,
)
from dovetail.rules.repeatgrowth import Growth
from dovetail.rules.repeatline import Line
from dovetail.rules.repeatruns import Names, Stretch

# Stretches that are worked out fully before the best of them are taken, and how often what is left is looked at.
_TRIED = 512
_PASSES = 16
# Borders of a row that are weighed, and of these the ones that blocks are made of.
_BORDERS = 16
_ROTATIONS = 3
# Operations looked at in one pass, at least, and per operation of the line: only hard cases come near.
_LEAST_EFFORT = 20_000
_EFFORT = 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a family must have to be of use; `most` is the largest block allowed."""

    min_size: int
    min_repeats: int
    most: int | None


class Search:
    """Looks for families of equal blocks in a line, those that cover most first."""

    def __init__(self, line: Line, wanted: Wanted) -> None:
        self.line, self.wanted = line, wanted
        self.small: list[Family] = []  # equal blocks that are too small or too few

    def families(self, outside: Set[int] = frozenset()) -> list[Family]:
        """Disjoint families, outermost first; nothing of `outside` is in any of them."""
        taken = {q for q in range(len(self.line)) if not self.line.free[q]} | set(outside)
        found: list[Family] = []
        for _ in range(_PASSES):
            if len(self.line) - len(taken) < self.wanted.min_repeats * 2:
                break
            fresh = self._pass(taken)
            found.extend(fresh)
            if not fresh:
                break
        return found

    def _pass(self, taken: set[int]) -> list[Family]:
        """Families of one look at the line, added to what is taken."""
        sight = Sight(self.line, taken)
        tried: list[Family] = []
        seen: set[int] = set()
        left = len(self.line) - len(taken)
        for stretch in self._promising(sight, seen):
            family = sight.realise(stretch)
            if family is None:
                continue
            if not self._is_enough(family):
                if stretch.in_a_row and family.length > 1:
                    self.small.append(family)
                continue
            tried.append(family)
            seen.update(q for block in family.blocks for q in block)
            if 2 * family.covered >= left:
                break  # nothing else can cover more
        tried.sort(key=lambda f: (-f.covered, f.length, f.first))
        kept: list[Family] = []
        for family in tried:
            places = {q for block in family.blocks for q in block}
            if taken.isdisjoint(places):
                kept.append(family)
                taken |= places
        while not acyclic(self.line, windows(self.line, (b for f in kept for b in f.blocks))):
            # Each is sound by itself: rather the larger of them than none.
            taken.difference_update(q for block in kept.pop().blocks for q in block)
        return kept

    def _promising(self, sight: Sight, seen: Set[int]) -> Iterator[Stretch]:
        """The stretches that cover most, without those inside of blocks already found."""
        tries = 0
        for stretch in sight.names.stretches(max(2, self.wanted.min_size * 3 // 4)):
            if tries >= _TRIED or sight.effort < 0:
                return
            if stretch.start in seen and stretch.start - stretch.distance in seen:
                continue
            tries += 1
            yield stretch

    def _is_enough(self, family: Family) -> bool:
        size = sum(self.line.size(q) for q in family.blocks[0])
        if family.length < 2 or size < self.wanted.min_size:
            return False
        if self.wanted.most is not None and family.length > self.wanted.most:
            return False
        return len(family.blocks) >= self.wanted.min_repeats


class Sight:
    """One look at a line: where what is not yet taken repeats itself."""

    def __init__(self, line: Line, taken: Set[int]) -> None:
        self.line, self.taken = line, frozenset(taken)
        apart = max(line.labels, default=0) + 1
        self.names = Names([apart + q if q in self.taken else label for q, label in enumerate(line.labels)])
        self.by_label: dict[int, list[int]] = {}
        for q, label in enumerate(line.labels):
            if q not in self.taken:
                self.by_label.setdefault(label, []).append(q)
        self._last: dict[int, list[int]] = {}
        self.effort = max(_LEAST_EFFORT, _EFFORT * len(line))

    def realise(self, stretch: Stretch) -> Family | None:
        """A family of exactly equal blocks that a stretch leads to.

        The first border of a row that makes blocks of most of it is taken, else the one that makes most.
        """
        best: Family | None = None
        for start, length in self._rotations(stretch) if stretch.in_a_row else [self._trimmed(stretch)]:
            family = self._grown(start, length)
            if family is not None and (best is None or family.covered > best.covered):
                best = family
            if best is not None and 2 * best.covered > stretch.covered:
                break
        return best

    def _grown(self, start: int, length: int) -> Family | None:
        """The family that the items from `start` on, and all that are like them, are grown to."""
        blocks = disjoint(self.names.places(start, length), length)
        self.effort -= len(blocks) * length
        groups: dict[object, list[Block]] = {}
        for block in blocks:
            groups.setdefault(wiring(self.line, block), []).append(block)
        seed = max(groups.values(), key=len)
        if len(seed) < 2:
            return None
        growth = Growth(self.line, seed, self.taken)
        found: list[Family] = []
        # Growing may have led to what cannot be drawn together: then what was before it stands.
        for grown in (seed, growth.backward(), growth.forward()):
            if found and len(grown[0]) == found[-1].length:
                continue
            family = self._sound(grown)
            if family is not None:
                found.append(family)
        if not found:
            return None
        best = max(found, key=lambda f: f.covered)
        return self._sound([*best.blocks, *self.elsewhere(best)]) or best

    def _sound(self, blocks: list[Block]) -> Family | None:
        """The blocks that are exactly equal, if there are several and they can all be drawn together."""
        group = same(self.line, blocks)[0]
        if len(group) < 2:
            return None
        spanned = windows(self.line, group)
        self.effort -= sum(window.high - window.low + 1 for window in spanned)
        return Family(tuple(group)) if acyclic(self.line, spanned) else None

    def elsewhere(self, family: Family) -> list[Block]:
        """Further blocks equal to those of a family, wherever operations stand between theirs in the line."""
        line, model = self.line, family.blocks[0]
        steps = plan(line, model)
        if len(steps) < len(model) - 1:
            return []
        taken = {q for block in family.blocks for q in block}
        shape = wiring(line, model)
        made: list[Block] = []
        for root in self.by_label.get(line.labels[max(model)], ()):
            if root in taken or self.effort < 0:
                continue
            places, _ = follow(line, model, steps, root)
            self.effort -= len(places)
            block = tuple(places[k] for k in sorted(places))
            if len(set(block)) < len(model) or not (taken.isdisjoint(block) and self.taken.isdisjoint(block)):
                continue
            if wiring(line, block) == shape:
                made.append(block)
                taken.update(block)
        return made

    def _rotations(self, stretch: Stretch) -> list[tuple[int, int]]:
        """Where a block of a row may begin: where fewest values cross, then so that most blocks are whole.

        Of borders alike in that, crossing values with more readers are the more likely one, and then the first.
        """
        period, begin = stretch.distance, stretch.start - stretch.distance
        end = stretch.start + stretch.length
        crossing, readers = self._crossing(begin + (end - begin) // period // 2 * period, period)
        whole = [(end - begin - o) // period for o in range(period)]
        ranked = sorted(range(period), key=lambda o: (crossing[o], -whole[o], -readers[o], o))
        keys: list[tuple[int, int, int, int]] = []
        for o in ranked[:_BORDERS]:
            count = whole[o] + self._one_earlier(begin + o, period)
            if 2 * count > whole[0] and count > 1:
                keys.append((crossing[o], -count, -readers[o], o))
        return [(begin + key[-1], period) for key in sorted(keys)[:_ROTATIONS]] or [(begin, period)]

    def _one_earlier(self, start: int, length: int) -> bool:
        """Whether the block before a row is equal too, though other operations stand between its own."""
        if start == 0 or self.line.labels[start - 1] != self.line.labels[start + length - 1]:
            return False
        model = tuple(range(start, start + length))
        return len(follow(self.line, model, plan(self.line, model), start - 1)[0]) == length

    def _crossing(self, middle: int, period: int) -> tuple[list[int], list[int]]:
        """For each cut of one period the values that cross it, and how many reads they have beyond it.

        Reads further away than two periods are those of values that all blocks share, or of the end.
        """
        values, reads = [0] * (period + 1), [0] * (period + 1)
        for q in range(max(0, middle - 2 * period), min(middle + period, len(self.line))):
            users: dict[int, list[int]] = {}
            for part, user, _ in self.line.uses[q]:
                if user > q + 2 * period:
                    break
                users.setdefault(part, []).append(user)
            for places in users.values():
                first = max(q + 1 - middle, 0)
                last = min(max(places) - middle, period - 1)
                if first <= last:
                    values[first] += 1
                    values[last + 1] -= 1
                for user in places:
                    last = min(user - middle, period - 1)
                    if first <= last:
                        reads[first] += 1
                        reads[last + 1] -= 1
        for o in range(1, period):
            values[o] += values[o - 1]
            reads[o] += reads[o - 1]
        return values[:period], reads[:period]

    def _trimmed(self, stretch: Stretch) -> tuple[int, int]:
        """A stretch that stands alone, cut short where fewer values leave it; at most by half."""
        start = stretch.start - stretch.distance
        leaving = [0] * (stretch.length + 2)
        for k in range(stretch.length):
            for user in self._last_reads(start + k):
                leaving[k + 1] += 1
                leaving[min(user - start, stretch.length) + 1] -= 1
        for cut in range(1, len(leaving)):
            leaving[cut] += leaving[cut - 1]
        least = max(2, (stretch.length + 1) // 2)
        return start, min(range(least, stretch.length + 1), key=lambda cut: (leaving[cut], -cut))

    def _last_reads(self, place: int) -> list[int]:
        """The last reader of each value of an operation."""
        found = self._last.get(place)
        if found is None:
            last = {part: user for part, user, _ in self.line.uses[place]}  # ascending: the last one stays
            found = self._last[place] = list(last.values())
        return found
