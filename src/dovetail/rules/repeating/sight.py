"""From stretches that look alike to blocks that are: where they begin and end, and where else they are."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dovetail.rules.repeating.blocks import (
    Block,
    Family,
    Step,
    acyclic,
    disjoint,
    follow,
    plan,
    same,
    windows,
    wiring,
)
from dovetail.rules.repeating.growth import Growth
from dovetail.rules.repeating.line import Line
from dovetail.rules.repeating.runs import Names, Stretch

# Borders of a row that are weighed, and of these the ones that blocks are made of.
_BORDERS = 16
_ROTATIONS = 3
# Operations looked at in all, at least, and per operation in sight: only hard cases come near.
_LEAST_EFFORT = 50_000
_EFFORT = 20


class Sight:
    """One look at a line, or at the ascending places `where` of it: what repeats of all that is not yet taken.

    Stretches count by index in `where`. `effort` is what was looked at so far, here and in earlier looks.
    """

    def __init__(
        self, line: Line, taken: Set[int], where: Sequence[int] | None = None, effort: int = 0
    ) -> None:
        self.line = line
        self.where: Sequence[int] = where if where is not None else range(len(line))
        self._index = None if where is None else {q: i for i, q in enumerate(where)}
        self.open = {q for q in self.where if q not in taken}
        apart = max(line.labels, default=0) + 1
        self.names = Names([line.labels[q] if q in self.open else apart + q for q in self.where])
        self._last: dict[int, list[int]] = {}
        self._readers: dict[tuple[int, int, int], list[int]] = {}
        self.effort = effort
        self.bearable = max(_LEAST_EFFORT, _EFFORT * len(self.where))

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
        growth = Growth(self.line, seed, self.open)
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
        group = same(self.line, blocks)[0]
        if len(group) < 2:
            return None
        spanned = windows(self.line, group)
        self.effort += sum(window.high - window.low + 1 for window in spanned)
        return Family(tuple(group)) if acyclic(self.line, spanned) else None

    def _elsewhere(self, family: Family) -> list[Block]:
        line, model = self.line, family.blocks[0]
        steps = plan(line, model)
        if len(steps) < max(1, len(model) - 1) or steps[0].forward:
            return []
        taken = {q for block in family.blocks for q in block}
        shape = wiring(line, model)
        made: list[Block] = []
        for root in self._readers_alike(model, steps[0]):
            if root in taken or self.effort > self.bearable:
                continue
            places, _ = follow(line, model, steps, root)
            self.effort += len(places)
            block = tuple(places[k] for k in sorted(places))
            if len(set(block)) < len(model) or not self.open.issuperset(block):
                continue
            if taken.isdisjoint(block) and wiring(line, block) == shape:
                made.append(block)
                taken.update(block)
        return made

    def _readers_alike(self, model: Block, step: Step) -> list[int]:
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
        labels, where = self.line.labels, self.where
        if start == 0 or labels[where[start - 1]] != labels[where[start + length - 1]]:
            return False
        model = tuple(where[start : start + length])
        return len(follow(self.line, model, plan(self.line, model), where[start - 1])[0]) == length

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

    def _trimmed(self, stretch: Stretch) -> tuple[int, int]:
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
