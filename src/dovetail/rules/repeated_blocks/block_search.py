"""The families of equal blocks of a line, outermost first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from dovetail.rules.repeated_blocks.blocks import (
    Block,
    BlockGrowth,
    DataflowStep,
    Family,
    acyclic,
    block_windows,
    boundary_size,
    disjoint,
    follow_plan,
    group_equal,
    match_plan,
    wiring,
)
from dovetail.rules.repeated_blocks.linearize import Linearization, MaximalRepeat, WindowNumbering

# Borders of a row that are weighed, and of these the ones that blocks are made of.
_MAX_BORDERS = 16
_MAX_ROTATIONS = 3

# Operations looked at in all, at least, and per operation in sight: only hard cases come near.
_MIN_EFFORT = 50_000
_EFFORT_PER_NODE = 20


class BlockExtractor:
    """One look at a line, or at the ascending places `where` of it: what repeats of all that is not yet taken.

    Stretches count by index in `where`. `effort` is what was looked at so far, here and in earlier looks.
    """

    def __init__(
        self, line: Linearization, taken: Set[int], where: Sequence[int] | None = None, effort: int = 0
    ) -> None:
        self.line = line
        self.where: Sequence[int] = where if where is not None else range(len(line))
        self._index = None if where is None else {q: i for i, q in enumerate(where)}
        self.open = {q for q in self.where if q not in taken}
        apart = max(line.labels, default=0) + 1
        self.names = WindowNumbering([line.labels[q] if q in self.open else apart + q for q in self.where])
        self._last: dict[int, list[int]] = {}
        self._readers: dict[tuple[int, int, int], list[int]] = {}
        self.effort = effort
        self.bearable = max(_MIN_EFFORT, _EFFORT_PER_NODE * len(self.where))

    def realise(self, stretch: MaximalRepeat) -> Family | None:
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

    def extended(self, family: Family) -> Family:
        """A family with further blocks, equal to its own, in which other operations stand between theirs."""
        more = self._elsewhere(family)
        return (self._sound([*family.blocks, *more]) or family) if more else family

    def _grown(self, start: int, length: int) -> Family | None:
        """The family that the items from `start` on, and all that are like them, are grown to."""
        blocks = [
            tuple([self.where[i] for i in block])
            for block in disjoint(self.names.places(start, length), length)
        ]
        self.effort += len(blocks) * length
        groups: dict[object, list[Block]] = {}
        for block in blocks:
            groups.setdefault(wiring(self.line, block), []).append(block)
        seed = max(groups.values(), key=len)
        if len(seed) < 2:
            return None
        growth = BlockGrowth(self.line, seed, self.open)
        found: list[Family] = []
        # Growing may have led to what cannot be drawn together: then what was before it stands.
        for grown in (seed, growth.backward(), growth.forward()):
            if found and len(grown[0]) == found[-1].length:
                continue
            family = self._sound(grown)
            if family is not None:
                found.append(family)
        return self.extended(max(found, key=lambda f: f.covered)) if found else None

    def _sound(self, blocks: list[Block]) -> Family | None:
        """The blocks that are exactly equal, if there are several and they can all be drawn together."""
        group = group_equal(self.line, blocks)[0]
        if len(group) < 2:
            return None
        self.effort += sum(high - low + 1 for low, high in block_windows(self.line, group))
        return Family(tuple(group)) if acyclic(self.line, group) else None

    def _elsewhere(self, family: Family) -> list[Block]:
        line, model = self.line, family.blocks[0]
        steps = match_plan(line, model)
        if len(steps) < max(1, len(model) - 1) or steps[0].forward:
            return []
        taken = {q for block in family.blocks for q in block}
        shape = wiring(line, model)
        made: list[Block] = []
        for root in self._readers_alike(model, steps[0]):
            if root in taken or self.effort > self.bearable:
                continue
            places, _ = follow_plan(line, model, steps, root)
            self.effort += len(places)
            block = tuple(places[k] for k in sorted(places))
            if len(set(block)) < len(model) or not self.open.issuperset(block):
                continue
            if taken.isdisjoint(block) and wiring(line, block) == shape:
                made.append(block)
                taken.update(block)
        return made

    def _readers_alike(self, model: Block, step: DataflowStep) -> list[int]:
        """Places that are to one of their operands what the known end of a step is to the found one."""
        labels, place = self.line.labels, self.line.place
        if not self._readers:
            for q in self.open:
                for slot, value in enumerate(self.line.reads[q]):
                    if place[value] >= 0:
                        key = (labels[q], slot, labels[place[value]])
                        self._readers.setdefault(key, []).append(q)
        key = (labels[model[step.known]], step.slot, labels[model[step.found]])
        return sorted(self._readers.get(key, ()))

    def _rotations(self, stretch: MaximalRepeat) -> list[tuple[int, int]]:
        """Where a block of a row may begin: where fewest values cross, then so that most blocks are whole.

        Of borders alike in that, crossing values with more readers are the more likely one, and then the first.
        """
        period, begin = stretch.distance, stretch.start - stretch.distance
        end = stretch.start + stretch.length
        crossing, readers = self._crossing(begin + (end - begin) // period // 2 * period, period)
        whole = [(end - begin - o) // period for o in range(period)]
        ranked = sorted(range(period), key=lambda o: (crossing[o], -whole[o], -readers[o], o))
        keys: list[tuple[int, int, int, int]] = []
        for o in ranked[:_MAX_BORDERS]:
            count = whole[o] + self._one_earlier(begin + o, period)
            if 2 * count > whole[0] and count > 1:
                keys.append((crossing[o], -count, -readers[o], o))
        return [(begin + key[-1], period) for key in sorted(keys)[:_MAX_ROTATIONS]] or [(begin, period)]

    def _one_earlier(self, start: int, length: int) -> bool:
        """Whether the block before a row is equal too, though other operations stand between its own."""
        labels, where = self.line.labels, self.where
        if start == 0 or labels[where[start - 1]] != labels[where[start + length - 1]]:
            return False
        model = tuple(where[start : start + length])
        return len(follow_plan(self.line, model, match_plan(self.line, model), where[start - 1])[0]) == length

    def _crossing(self, middle: int, period: int) -> tuple[list[int], list[int]]:
        """For each cut of one period the values that cross it, and how many reads they have beyond it.

        Reads further away than two periods are those of values that all blocks share, or of the end.
        """
        values, reads = [0] * (period + 1), [0] * (period + 1)
        for i in range(max(0, middle - 2 * period), min(middle + period, len(self.where))):
            users: dict[int, list[int]] = {}
            for part, user, _ in self.line.uses[self.where[i]]:
                at = self._at(user)
                if at <= i + 2 * period:
                    users.setdefault(part, []).append(at)
                elif self._index is None:
                    break  # readers come in ascending order
            first = max(i + 1 - middle, 0)
            for found in users.values():
                for counts, ends in ((values, [max(found)]), (reads, found)):
                    for last in (min(end - middle, period - 1) for end in ends):
                        if first <= last:
                            counts[first] += 1
                            counts[last + 1] -= 1
        for o in range(1, period):
            values[o] += values[o - 1]
            reads[o] += reads[o - 1]
        return values[:period], reads[:period]

    def _trimmed(self, stretch: MaximalRepeat) -> tuple[int, int]:
        """A stretch that stands alone, cut short where fewer values leave it; at most by half."""
        start = stretch.start - stretch.distance
        leaving = [0] * (stretch.length + 2)
        for k in range(stretch.length):
            for user in self._last_reads(self.where[start + k]):
                leaving[k + 1] += 1
                leaving[min(max(user - start, k), stretch.length) + 1] -= 1
        for cut in range(1, len(leaving)):
            leaving[cut] += leaving[cut - 1]
        least = max(2, (stretch.length + 1) // 2)
        return start, min(range(least, stretch.length + 1), key=lambda cut: (leaving[cut], -cut))

    def _last_reads(self, place: int) -> list[int]:
        """The last reader of each value of an operation."""
        found = self._last.get(place)
        if found is None:
            last: dict[int, int] = {}
            for part, user, _ in self.line.uses[place]:
                last[part] = max(last.get(part, 0), self._at(user))
            found = self._last[place] = list(last.values())
        return found

    def _at(self, place: int) -> int:
        """The index of a place in sight, beyond all of them for any other."""
        return place if self._index is None else self._index.get(place, len(self.where))


# Stretches that are worked out fully before the best of them are taken, and how often what is left is looked at.
_MAX_TRIED = 512
_MAX_PASSES = 16

# Families that cover no less than this part of what the best does are weighed by their borders.
_RIVAL_RATIO = 0.75

# A block that consists of a row of smaller ones to this part is no block of its own.
_CHAIN_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """What a family must have to be of use; `most` is the largest block allowed."""

    min_size: int
    min_repeats: int
    most: int | None


class BlockSearch:
    """Looks for families of equal blocks in a line. What is found inside of other blocks is left for later."""

    def __init__(self, line: Linearization, wanted: BlockLimits) -> None:
        self.line, self.wanted = line, wanted
        self.small: list[Family] = []  # equal blocks that are too small or too few

    def families(self) -> list[Family]:
        """Disjoint families of the whole line."""
        taken = {q for q, free in enumerate(self.line.free) if not free}
        found: list[Family] = []
        effort = 0
        for _ in range(_MAX_PASSES):
            sight = BlockExtractor(self.line, taken, effort=effort)
            fresh = self._pass(sight)
            effort = sight.effort
            if not fresh:
                break
            found.extend(fresh)
            taken.update(q for family in fresh for block in family.blocks for q in block)
        return found

    def inside(self, family: Family) -> list[Family]:
        """Families inside of the blocks of another, for all of its blocks at once."""
        where = sorted(family.blocks[0])
        found: list[Family] = []
        taken: set[int] = set()
        effort = 0
        for _ in range(_MAX_PASSES):
            sight = BlockExtractor(self.line, taken, where, effort)
            fresh = self._pass(sight)
            effort = sight.effort
            if not fresh:
                break
            found.extend(fresh)
            taken.update(q for part in fresh for block in part.blocks for q in block)
        return [_replicate(family, part) for part in found]

    def _pass(self, sight: BlockExtractor) -> list[Family]:
        """Disjoint families of one look."""
        tried: list[Family] = []
        owner: dict[int, Block] = {}
        for stretch in self._promising(sight, owner):
            family = sight.realise(stretch)
            if family is None:
                continue
            if not self._is_enough(family):
                if stretch.in_a_row and family.length > 1:
                    self.small.append(family)
                continue
            tried.append(family)
            owner.update((q, block) for block in family.blocks for q in block)
            if 2 * family.saved >= len(sight.where):
                break  # nothing else can save more
        kept = self._chosen(_outermost(tried))
        while kept and not acyclic(self.line, [b for f in kept for b in f.blocks]):
            # Each is sound by itself: rather the larger of them than none.
            kept.pop()
        return [part for family in kept for part in self._rows(sight, family)]

    def _chosen(self, families: list[Family]) -> list[Family]:
        """Disjoint ones of the families: of those that cover about as much, first those with the least border."""
        borders = {id(family): boundary_size(self.line, family) for family in families}
        left = sorted(families, key=lambda f: (-f.covered, f.length, f.first))
        kept: list[Family] = []
        while left:
            rivals = [f for f in left if f.covered >= _RIVAL_RATIO * left[0].covered]
            best = min(rivals, key=lambda f: borders[id(f)])  # of equals the first
            taken = {q for block in best.blocks for q in block}
            kept.append(best)
            left = [f for f in left if all(taken.isdisjoint(block) for block in f.blocks)]
        return kept

    def _promising(self, sight: BlockExtractor, owner: dict[int, Block]) -> Iterator[MaximalRepeat]:
        """The stretches that cover most, without those inside of blocks already found."""
        tries = 0
        for stretch in sight.names.stretches(max(2, self.wanted.min_size * 3 // 4)):
            if tries >= _MAX_TRIED or sight.effort > sight.bearable:
                return
            last = stretch.start + stretch.length - 1
            ends = [sight.where[i] for i in (stretch.start, last)]
            ends += [sight.where[i - stretch.distance] for i in (stretch.start, last)]
            blocks = [owner.get(q) for q in ends]
            if None not in blocks and blocks[0] is blocks[1] and blocks[2] is blocks[3]:
                continue
            tries += 1
            yield stretch

    def _rows(self, sight: BlockExtractor, family: Family) -> list[Family]:
        """The family itself, or what its blocks are rows of: four layers twice are eight layers."""
        if family.length < 2 * self.wanted.min_size:
            return [family]
        inner = BlockExtractor(self.line, frozenset(), sorted(family.blocks[0]))
        most = _CHAIN_RATIO * family.length
        for stretch in inner.names.stretches(self.wanted.min_size):
            if not stretch.in_a_row or stretch.covered < most:
                continue
            part = inner.realise(stretch)
            if part is not None and part.covered >= most and self._is_enough(part) and self._is_chain(part):
                return [sight.extended(_replicate(family, part))]
        return [family]

    def _is_chain(self, family: Family) -> bool:
        """Whether each block reads what the one before it makes."""
        ordered = sorted(family.blocks, key=max)
        return all(
            any(user in later for q in earlier for _, user, _ in self.line.uses[q])
            for earlier, later in pairwise([set(block) for block in ordered])
        )

    def _is_enough(self, family: Family) -> bool:
        size = sum(self.line.size(q) for q in family.blocks[0])
        if family.length < 2 or size < self.wanted.min_size:
            return False
        if self.wanted.most is not None and len(self.line.positions(family.blocks[0])) > self.wanted.most:
            return False
        return len(family.blocks) >= self.wanted.min_repeats


def _replicate(family: Family, part: Family) -> Family:
    """What was found inside of the first block of a family, inside of all of them."""
    index = {q: k for k, q in enumerate(family.blocks[0])}
    spots = [[index[q] for q in block] for block in part.blocks]
    return Family(tuple(tuple([block[k] for k in spot]) for block in family.blocks for spot in spots))


def _outermost(families: list[Family]) -> list[Family]:
    """The families of which not every block lies in a larger block of another."""
    homes: dict[int, list[tuple[int, int]]] = {}
    for n, family in enumerate(families):
        for k, block in enumerate(family.blocks):
            for q in block:
                homes.setdefault(q, []).append((n, k))

    def is_inside(block: Block, other: int) -> bool:
        blocks = {next((k for n, k in homes[q] if n == other), -1) for q in block}
        return len(blocks) == 1 and -1 not in blocks

    found: list[Family] = []
    for family in families:
        around = [n for n, _ in homes[family.blocks[0][0]] if families[n].length > family.length]
        if not any(all(is_inside(block, n) for block in family.blocks) for n in around):
            found.append(family)
    return found
