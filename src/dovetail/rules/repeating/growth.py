"""Equal blocks grow side by side: each step takes one more operation into every one of them."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dovetail.rules.repeating.blocks import Block
from dovetail.rules.repeating.line import Line

# A value with more readers than this is shared far and wide: none of them is the block's own.
_MANY = 64


class Growth:
    """Blocks that take in what is `free` around them, as far as it is alike for all of them.

    First towards operands, so that a block has what its results need; then towards readers. Where the surroundings
    differ, or are one and the same operation for several blocks, or belong to another block, the border stays.
    """

    def __init__(self, line: Line, blocks: Sequence[Block], free: Set[int]) -> None:
        self.line, self.free = line, free
        self.blocks = [list(block) for block in blocks]
        self.owner = {q: (b, k) for b, block in enumerate(self.blocks) for k, q in enumerate(block)}
        self.lowest = [min(block) for block in self.blocks]

    def backward(self) -> list[Block]:
        """Take in the makers of operands, and theirs."""
        first = self.blocks[0]
        for k, q in enumerate(first):  # grows while it is walked
            for slot in range(len(self.line.reads[q])):
                if self._is_open(self._maker(q, slot)):
                    self._take([self._maker(block[k], slot) for block in self.blocks])
        return self._done()

    def forward(self) -> list[Block]:
        """Take in what reads the blocks and needs nothing that may come of them in another way."""
        for k, _ in enumerate(self.blocks[0]):
            readers = self._readers(0, k)
            if not any(self._is_open(q) for places in readers.values() for q in places):
                continue
            others = [self._readers(b, k) for b in range(1, len(self.blocks))]
            for label, places in readers.items():
                for nth, q in enumerate(places):
                    kin = [found[label][nth] for found in others if len(found.get(label, ())) > nth]
                    if len(kin) == len(others):
                        self._take([q, *kin], reader=True)
        return self._done()

    def _done(self) -> list[Block]:
        return [tuple(block) for block in self.blocks]

    def _maker(self, place: int, slot: int) -> int:
        return self.line.place[self.line.reads[place][slot]]

    def _is_open(self, place: int) -> bool:
        return place in self.free and place not in self.owner

    def _readers(self, b: int, k: int) -> dict[int, list[int]]:
        """Operations outside of a block that read one inside, by label, in the order of the line."""
        found: dict[int, list[int]] = {}
        uses = self.line.uses[self.blocks[b][k]]
        if len(uses) > _MANY:
            return found
        for q in sorted({q for _, q, _ in uses if q < len(self.line)}):
            if self.owner.get(q, (-1, 0))[0] != b:
                found.setdefault(self.line.labels[q], []).append(q)
        return found

    def _take(self, places: list[int], *, reader: bool = False) -> None:
        """Give each block its place, if they are alike, open, all different and wired alike."""
        line = self.line
        if not all(map(self._is_open, places)) or len(set(places)) < len(places):
            return
        label = line.labels[places[0]]
        if any(line.labels[q] != label for q in places):
            return
        for slot in range(len(line.reads[places[0]])):
            if len({self._wire(b, q, slot) for b, q in enumerate(places)}) > 1:
                return
        if reader and not all(self._is_late(b, q) for b, q in enumerate(places)):
            return
        for b, q in enumerate(places):
            self.owner[q] = (b, len(self.blocks[b]))
            self.blocks[b].append(q)
            self.lowest[b] = min(self.lowest[b], q)

    def _wire(self, b: int, place: int, slot: int) -> int:
        """The index in its block of what is read, -1 for a value from outside."""
        block, k = self.owner.get(self._maker(place, slot), (-1, -1))
        return k if block == b else -1

    def _is_late(self, b: int, place: int) -> bool:
        """Whether everything else that an operation needs comes before the block, and so cannot depend on it."""
        before = self.line.before[place]
        return all(q < self.lowest[b] or self.owner.get(q, (-1, 0))[0] == b for q in before)
