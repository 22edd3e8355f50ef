"""The families of equal blocks of a line, outermost first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from dovetail.rules.repeating.blocks import Block, Family, acyclic, border, windows
from dovetail.rules.repeating.line import Line
from dovetail.rules.repeating.runs import Stretch
from dovetail.rules.repeating.sight import Sight

# Stretches that are worked out fully before the best of them are taken, and how often what is left is looked at.
_TRIED = 512
_PASSES = 16
# Families that cover no less than this part of what the best does are weighed by their borders.
_RIVALS = 0.75
# A block that consists of a row of smaller ones to this part is no block of its own.
_ROW = 0.9


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a family must have to be of use; `most` is the largest block allowed."""

    min_size: int
    min_repeats: int
    most: int | None


class Search:
    """Looks for families of equal blocks in a line. What is found inside of other blocks is left for later."""

    def __init__(self, line: Line, wanted: Wanted) -> None:
        self.line, self.wanted = line, wanted
        self.small: list[Family] = []  # equal blocks that are too small or too few

    def families(self) -> list[Family]:
        """Disjoint families of the whole line."""
        taken = {q for q, free in enumerate(self.line.free) if not free}
        found: list[Family] = []
        effort = 0
        for _ in range(_PASSES):
            sight = Sight(self.line, taken, effort=effort)
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
        for _ in range(_PASSES):
            sight = Sight(self.line, taken, where, effort)
            fresh = self._pass(sight)
            effort = sight.effort
            if not fresh:
                break
            found.extend(fresh)
            taken.update(q for part in fresh for block in part.blocks for q in block)
        return [_for_all(family, part) for part in found]

    def _pass(self, sight: Sight) -> list[Family]:
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
        while kept and not acyclic(self.line, windows(self.line, (b for f in kept for b in f.blocks))):
            # Each is sound by itself: rather the larger of them than none.
            kept.pop()
        return [part for family in kept for part in self._rows(sight, family)]

    def _chosen(self, families: list[Family]) -> list[Family]:
        """Disjoint ones of the families: of those that cover about as much, first those with the least border."""
        borders = {id(family): border(self.line, family) for family in families}
        left = sorted(families, key=lambda f: (-f.covered, f.length, f.first))
        kept: list[Family] = []
        while left:
            rivals = [f for f in left if f.covered >= _RIVALS * left[0].covered]
            best = min(rivals, key=lambda f: borders[id(f)])  # of equals the first
            taken = {q for block in best.blocks for q in block}
            kept.append(best)
            left = [f for f in left if all(taken.isdisjoint(block) for block in f.blocks)]
        return kept

    def _promising(self, sight: Sight, owner: dict[int, Block]) -> Iterator[Stretch]:
        """The stretches that cover most, without those inside of blocks already found."""
        tries = 0
        for stretch in sight.names.stretches(max(2, self.wanted.min_size * 3 // 4)):
            if tries >= _TRIED or sight.effort > sight.bearable:
                return
            last = stretch.start + stretch.length - 1
            ends = [sight.where[i] for i in (stretch.start, last)]
            ends += [sight.where[i - stretch.distance] for i in (stretch.start, last)]
            blocks = [owner.get(q) for q in ends]
            if None not in blocks and blocks[0] is blocks[1] and blocks[2] is blocks[3]:
                continue
            tries += 1
            yield stretch

    def _rows(self, sight: Sight, family: Family) -> list[Family]:
        """The family itself, or what its blocks are rows of: four layers twice are eight layers."""
        if family.length < 2 * self.wanted.min_size:
            return [family]
        inner = Sight(self.line, frozenset(), sorted(family.blocks[0]))
        most = _ROW * family.length
        for stretch in inner.names.stretches(self.wanted.min_size):
            if not stretch.in_a_row or stretch.covered < most:
                continue
            part = inner.realise(stretch)
            if part is not None and part.covered >= most and self._is_enough(part) and self._is_chain(part):
                return [sight.extended(_for_all(family, part))]
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


def _for_all(family: Family, part: Family) -> Family:
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
