"""Block search: disjoint families of equal blocks of a graph, outermost first.

The problem is to find repeated subgraphs that cover a graph best (frequent subgraph mining, template extraction), which is
NP-hard. The heuristic reduces it to repeats in a string: operations are linearized in an order that depends only on
structure and labelled by what they compute, so equal blocks are equal windows of labels. Windows of widths 2^k are numbered by
Karp, Miller and Rosenberg's doubling, which gives all maximal repeats in O(n log n). A tandem repeat (copies in a row: the
layers of a model) is cut where fewest values cross; a repeat with gaps is trimmed likewise. The windows then become blocks: they are
grouped by exact wiring, grown along the dataflow while all copies agree (operations of one block need not be adjacent in
the line), and checked to be acyclic when all are contracted. Families that cover most are chosen greedily, and what is left
is searched again for a bounded number of passes. Effort is bounded by 20 operations visited per operation of the graph.

Reference: Karp, Miller and Rosenberg, "Rapid Identification of Repeated Patterns in Strings, Trees and Arrays", STOC 1972.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
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

# How many cuts of a tandem repeat are ranked, and how many of them are extracted.
_MAX_BORDERS = 16
_MAX_ROTATIONS = 3

# Bounds on the operations visited; only hard cases come near.
_MIN_EFFORT = 50_000
_EFFORT_PER_NODE = 20


class BlockExtractor:
    """Turns maximal repeats of a line, or of the ascending places `where` of it, into families of blocks.

    Places in `taken` are left out. Repeats are in indices of `where`. `effort` counts the operations visited so far, here
    and in earlier passes.
    """

    def __init__(
        self, line: Linearization, taken: Set[int], where: Sequence[int] | None = None, effort: int = 0
    ) -> None:
        self.line = line
        self.where: Sequence[int] = where if where is not None else range(len(line))
        self._index = None if where is None else {q: i for i, q in enumerate(where)}
        self.open = {q for q in self.where if q not in taken}
        unique = max(line.labels, default=0) + 1
        self.windows = WindowNumbering([line.labels[q] if q in self.open else unique + q for q in self.where])
        self._last: dict[int, list[int]] = {}
        self._readers: dict[tuple[int, int, int], list[int]] = {}
        self.effort = effort
        self.max_effort = max(_MIN_EFFORT, _EFFORT_PER_NODE * len(self.where))

    def extract(self, repeat: MaximalRepeat) -> Family | None:
        """Return a family of equal blocks grown from a repeat, None without any.

        Of the cuts of a tandem repeat, the first whose blocks cover most of it is taken, else the best one.
        """
        best: Family | None = None
        for start, length in self._rotations(repeat) if repeat.is_tandem else [self._trimmed(repeat)]:
            family = self._grown(start, length)
            if family is not None and (best is None or family.covered > best.covered):
                best = family
            if best is not None and 2 * best.covered > repeat.covered:
                break
        return best

    def extended(self, family: Family) -> Family:
        """Return the family with further equal blocks whose operations are not adjacent in the line."""
        more = self._scattered(family)
        return (self._sound([*family.blocks, *more]) or family) if more else family

    def _grown(self, start: int, length: int) -> Family | None:
        """Return the family grown from the window of `length` places at `start` and its equals."""
        blocks = [
            tuple([self.where[i] for i in block])
            for block in disjoint(self.windows.occurrences(start, length), length)
        ]
        self.effort += len(blocks) * length
        groups: dict[object, list[Block]] = {}
        for block in blocks:
            groups.setdefault(wiring(self.line, block), []).append(block)
        seed = max(groups.values(), key=len)
        if len(seed) < 2:
            return None
        growth = BlockGrowth(self.line, seed, self.open)
        families: list[Family] = []
        # Growth may end in blocks that are not convex; the family before it is used then.
        for grown in (seed, growth.backward(), growth.forward()):
            if families and len(grown[0]) == families[-1].length:
                continue
            family = self._sound(grown)
            if family is not None:
                families.append(family)
        return self.extended(max(families, key=lambda f: f.covered)) if families else None

    def _sound(self, blocks: list[Block]) -> Family | None:
        """Return the largest group of equal blocks, if it has two or more and contracting all leaves no cycle."""
        group = group_equal(self.line, blocks)[0]
        if len(group) < 2:
            return None
        self.effort += sum(high - low + 1 for low, high in block_windows(self.line, group))
        return Family(tuple(group)) if acyclic(self.line, group) else None

    def _scattered(self, family: Family) -> list[Block]:
        line, model = self.line, family.blocks[0]
        steps = match_plan(line, model)
        if len(steps) < max(1, len(model) - 1) or steps[0].forward:
            return []
        taken = {q for block in family.blocks for q in block}
        shape = wiring(line, model)
        blocks: list[Block] = []
        for root in self._similar_readers(model, steps[0]):
            if root in taken or self.effort > self.max_effort:
                continue
            places, _ = follow_plan(line, model, steps, root)
            self.effort += len(places)
            block = tuple(places[k] for k in sorted(places))
            if len(set(block)) < len(model) or not self.open.issuperset(block):
                continue
            if taken.isdisjoint(block) and wiring(line, block) == shape:
                blocks.append(block)
                taken.update(block)
        return blocks

    def _similar_readers(self, model: Block, step: DataflowStep) -> list[int]:
        """Return the places with the label and operand label of a step's source and target, in the same slot."""
        labels, place = self.line.labels, self.line.place
        if not self._readers:
            for q in self.open:
                for slot, value in enumerate(self.line.reads[q]):
                    if place[value] >= 0:
                        key = (labels[q], slot, labels[place[value]])
                        self._readers.setdefault(key, []).append(q)
        key = (labels[model[step.source]], step.slot, labels[model[step.target]])
        return sorted(self._readers.get(key, ()))

    def _rotations(self, repeat: MaximalRepeat) -> list[tuple[int, int]]:
        """Return the starts of a tandem repeat's blocks, best first: fewest values cross, then most blocks are whole.

        Ties are broken by the number of readers of the crossing values, most first, then by position.
        """
        period, begin = repeat.distance, repeat.start - repeat.distance
        end = repeat.start + repeat.length
        crossing, readers = self._crossing(begin + (end - begin) // period // 2 * period, period)
        whole = [(end - begin - o) // period for o in range(period)]
        ranked = sorted(range(period), key=lambda o: (crossing[o], -whole[o], -readers[o], o))
        keys: list[tuple[int, int, int, int]] = []
        for o in ranked[:_MAX_BORDERS]:
            count = whole[o] + self._has_block_before(begin + o, period)
            if 2 * count > whole[0] and count > 1:
                keys.append((crossing[o], -count, -readers[o], o))
        return [(begin + key[-1], period) for key in sorted(keys)[:_MAX_ROTATIONS]] or [(begin, period)]

    def _has_block_before(self, start: int, length: int) -> bool:
        """Whether an equal block ends right before `start`, though its operations are not adjacent."""
        labels, where = self.line.labels, self.where
        if start == 0 or labels[where[start - 1]] != labels[where[start + length - 1]]:
            return False
        model = tuple(where[start : start + length])
        return len(follow_plan(self.line, model, match_plan(self.line, model), where[start - 1])[0]) == length

    def _crossing(self, middle: int, period: int) -> tuple[list[int], list[int]]:
        """Return for each cut of one period how many values cross it, and how many reads these have beyond it.

        Reads more than two periods away are of values that all blocks share, or by the end of the graph.
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
            for places in users.values():
                for counts, ends in ((values, [max(places)]), (reads, places)):
                    for last in (min(end - middle, period - 1) for end in ends):
                        if first <= last:
                            counts[first] += 1
                            counts[last + 1] -= 1
        for o in range(1, period):
            values[o] += values[o - 1]
            reads[o] += reads[o - 1]
        return values[:period], reads[:period]

    def _trimmed(self, repeat: MaximalRepeat) -> tuple[int, int]:
        """Return the window of a repeat with gaps, shortened by at most half to where fewest values leave it."""
        start = repeat.start - repeat.distance
        leaving = [0] * (repeat.length + 2)
        for k in range(repeat.length):
            for user in self._last_reads(self.where[start + k]):
                leaving[k + 1] += 1
                leaving[min(max(user - start, k), repeat.length) + 1] -= 1
        for cut in range(1, len(leaving)):
            leaving[cut] += leaving[cut - 1]
        least = max(2, (repeat.length + 1) // 2)
        return start, min(range(least, repeat.length + 1), key=lambda cut: (leaving[cut], -cut))

    def _last_reads(self, place: int) -> list[int]:
        """Return the index of the last reader of each value of an operation."""
        if place not in self._last:
            last: dict[int, int] = {}
            for part, user, _ in self.line.uses[place]:
                last[part] = max(last.get(part, 0), self._at(user))
            self._last[place] = list(last.values())
        return self._last[place]

    def _at(self, place: int) -> int:
        """Return the index of a place in `where`, beyond all of them for any other."""
        return place if self._index is None else self._index.get(place, len(self.where))


# How many repeats are extracted before families are chosen, and how often the rest is searched again.
_MAX_TRIED = 512
_MAX_PASSES = 16

# Families that cover at least this fraction of what the best one does are compared by their boundaries.
_RIVAL_RATIO = 0.75

# A block of which smaller equal blocks in a row cover this fraction is split into them.
_CHAIN_RATIO = 0.9


class BlockSearch:
    """Searches a line for families of equal blocks; those inside other blocks are left to `inside`.

    A family has at least `min_repeats` blocks of at least `min_size` operations, and of no more than the context allows.
    """

    def __init__(self, line: Linearization, min_size: int, min_repeats: int) -> None:
        self.line, self.min_size, self.min_repeats = line, min_size, min_repeats
        self.small: list[Family] = []  # equal blocks that are too small or too few

    def families(self) -> list[Family]:
        """Return disjoint families of the whole line."""
        return self._search({q for q, free in enumerate(self.line.free) if not free})

    def inside(self, family: Family) -> list[Family]:
        """Return the families inside the blocks of another, for all of its blocks at once."""
        return [_replicate(family, part) for part in self._search(set(), sorted(family.blocks[0]))]

    def _search(self, taken: set[int], where: Sequence[int] | None = None) -> list[Family]:
        families: list[Family] = []
        effort = 0
        for _ in range(_MAX_PASSES):
            extractor = BlockExtractor(self.line, taken, where, effort)
            added = self._pass(extractor)
            effort = extractor.effort
            if not added:
                break
            families.extend(added)
            taken.update(q for family in added for block in family.blocks for q in block)
        return families

    def _pass(self, extractor: BlockExtractor) -> list[Family]:
        """Return disjoint families of one pass."""
        extracted: list[Family] = []
        owner: dict[int, Block] = {}
        for repeat in self._promising(extractor, owner):
            family = extractor.extract(repeat)
            if family is None:
                continue
            if not self._is_enough(family):
                if repeat.is_tandem and family.length > 1:
                    self.small.append(family)
                continue
            extracted.append(family)
            owner.update((q, block) for block in family.blocks for q in block)
            if 2 * family.saved >= len(extractor.where):
                break  # nothing else can save more
        chosen = self._choose(_outermost(extracted))
        # Families that are acyclic each may not be so together; the larger ones come first.
        while chosen and not acyclic(self.line, [b for f in chosen for b in f.blocks]):
            chosen.pop()
        return [part for family in chosen for part in self._split_chain(extractor, family)]

    def _choose(self, families: list[Family]) -> list[Family]:
        """Return disjoint families, greedily: of those that cover about as much, the smallest boundary first."""
        boundaries = {id(family): boundary_size(self.line, family) for family in families}
        left = sorted(families, key=lambda f: (-f.covered, f.length, f.first))
        chosen: list[Family] = []
        while left:
            rivals = [f for f in left if f.covered >= _RIVAL_RATIO * left[0].covered]
            best = min(rivals, key=lambda f: boundaries[id(f)])  # the first among equals
            taken = {q for block in best.blocks for q in block}
            chosen.append(best)
            left = [f for f in left if all(taken.isdisjoint(block) for block in f.blocks)]
        return chosen

    def _promising(self, extractor: BlockExtractor, owner: dict[int, Block]) -> Iterator[MaximalRepeat]:
        """Yield the repeats that cover most, without those inside blocks already extracted."""
        tries = 0
        for repeat in extractor.windows.maximal_repeats(max(2, self.min_size * 3 // 4)):
            if tries >= _MAX_TRIED or extractor.effort > extractor.max_effort:
                return
            last = repeat.start + repeat.length - 1
            ends = [extractor.where[i] for i in (repeat.start, last)]
            ends += [extractor.where[i - repeat.distance] for i in (repeat.start, last)]
            blocks = [owner.get(q) for q in ends]
            if None not in blocks and blocks[0] is blocks[1] and blocks[2] is blocks[3]:
                continue
            tries += 1
            yield repeat

    def _split_chain(self, extractor: BlockExtractor, family: Family) -> list[Family]:
        """Return the family, or the one its blocks are chains of: four layers twice are eight layers."""
        if family.length < 2 * self.min_size:
            return [family]
        inner = BlockExtractor(self.line, frozenset(), sorted(family.blocks[0]))
        least = _CHAIN_RATIO * family.length
        for repeat in inner.windows.maximal_repeats(self.min_size):
            if not repeat.is_tandem or repeat.covered < least:
                continue
            part = inner.extract(repeat)
            if part is not None and part.covered >= least and self._is_enough(part) and self._is_chain(part):
                return [extractor.extended(_replicate(family, part))]
        return [family]

    def _is_chain(self, family: Family) -> bool:
        """Whether each block reads a value of the one before it."""
        ordered = sorted(family.blocks, key=max)
        return all(
            any(user in later for q in earlier for _, user, _ in self.line.uses[q])
            for earlier, later in pairwise([set(block) for block in ordered])
        )

    def _is_enough(self, family: Family) -> bool:
        size = sum(self.line.size(q) for q in family.blocks[0])
        if family.length < 2 or size < self.min_size:
            return False
        max_size = self.line.context.limits.nodes
        if max_size is not None and len(self.line.positions(family.blocks[0])) > max_size:
            return False
        return len(family.blocks) >= self.min_repeats


def _replicate(family: Family, part: Family) -> Family:
    """Return a family inside the first block of another, inside all of its blocks."""
    index = {q: k for k, q in enumerate(family.blocks[0])}
    inner = [[index[q] for q in block] for block in part.blocks]
    return Family(tuple(tuple([block[k] for k in indices]) for block in family.blocks for indices in inner))


def _outermost(families: list[Family]) -> list[Family]:
    """Return the families of which not every block is inside a larger block of another."""
    owners: dict[int, list[tuple[int, int]]] = {}
    for n, family in enumerate(families):
        for k, block in enumerate(family.blocks):
            for q in block:
                owners.setdefault(q, []).append((n, k))

    def is_inside(block: Block, other: int) -> bool:
        blocks = {next((k for n, k in owners[q] if n == other), -1) for q in block}
        return len(blocks) == 1 and -1 not in blocks

    outermost: list[Family] = []
    for family in families:
        around = [n for n, _ in owners[family.blocks[0][0]] if families[n].length > family.length]
        if not any(all(is_inside(block, n) for block in family.blocks) for n in around):
            outermost.append(family)
    return outermost
