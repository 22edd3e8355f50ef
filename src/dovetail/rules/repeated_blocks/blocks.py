"""Blocks of operations that are equal to one another, operand by operand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from dovetail.ir.quotient_graph import contract_window, merge_windows, topological_order
from dovetail.rules.repeated_blocks.linearize import Linearization

# Places in the order in which the blocks correspond: the n-th of one is to it what the n-th of another is to that.
Block = tuple[int, ...]
Wiring = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """Blocks that are exactly equal and disjoint."""

    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        return len(self.blocks[0])

    @property
    def covered(self) -> int:
        return len(self.blocks) * self.length

    @property
    def saved(self) -> int:
        """What need not be said again if the blocks share one body."""
        return (len(self.blocks) - 1) * self.length

    @property
    def first(self) -> int:
        return min(min(block) for block in self.blocks)


def wiring(line: Linearization, block: Block) -> Wiring:
    """Who reads what in a block: equal for blocks of equal labels exactly if they are the same computation.

    Values from outside count by what they are and where they are the same one, not by who makes them.
    """
    inside = {q: k for k, q in enumerate(block)}
    place, part, reads = line.place, line.part, line.reads
    rows: list[int] = []
    outside: dict[int, int] = {}
    for q in block:
        for value in reads[q]:
            k = inside.get(place[value], -1)
            if k >= 0:
                rows += (k, part[value])
            else:
                rows.append(-2 - outside.setdefault(value, len(outside)))
    return tuple(rows), tuple([line.described(v) for v in outside])


def block_results(line: Linearization, block: Block) -> tuple[tuple[int, int], ...]:
    """The values of a block that are read outside of it, as index in the block and part."""
    inside = set(block)
    found = {(k, part) for k, q in enumerate(block) for part, user, _ in line.uses[q] if user not in inside}
    return tuple(sorted(found))


def boundary_size(line: Linearization, family: Family) -> int:
    """How many computed values go into a block and out of it, without those that go into all of them alike."""
    read: list[set[int]] = []
    for block in family.blocks[:2]:
        inside = set(block)
        values = {v for q in block for v in line.reads[q]}
        read.append({v for v in values if line.place[v] >= 0 and line.place[v] not in inside})
    first, second = read
    return max(len(first - second), len(second - first)) + len(block_results(line, family.blocks[0]))


def group_equal(line: Linearization, blocks: Iterable[Block]) -> list[list[Block]]:
    """Blocks of equal labels sorted into those that are exactly equal and return the same; most blocks first."""
    groups: dict[tuple[Wiring, tuple[tuple[int, int], ...]], list[Block]] = {}
    for block in blocks:
        groups.setdefault((wiring(line, block), block_results(line, block)), []).append(block)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def disjoint(starts: Iterable[int], length: int) -> list[Block]:
    """Stretches of the line from each of the ascending starts on, leaving out those that overlap an earlier one."""
    made: list[Block] = []
    end = 0
    for start in starts:
        if start >= end:
            end = start + length
            made.append(tuple(range(start, end)))
    return made


@dataclass(frozen=True, slots=True)
class DataflowStep:
    """How to get from one operation of a block to another: to the maker of an operand, or to a reader."""

    known: int
    found: int
    slot: int
    part: int
    forward: bool


def match_plan(line: Linearization, block: Block) -> list[DataflowStep]:
    """Steps from the last operation of a block to all others that are connected with it inside."""
    inside = {q: k for k, q in enumerate(block)}
    root = inside[max(block)]
    steps: list[DataflowStep] = []
    seen = {root}
    queue = [root]

    def step(known: int, place: int, slot: int, part: int, forward: bool) -> None:
        other = inside.get(place)
        if other is not None and other not in seen:
            seen.add(other)
            queue.append(other)
            steps.append(DataflowStep(known, other, slot, part, forward))

    backward = forward = 0
    while forward < len(queue):
        # Operands first: what only reads the block is reached from where they led.
        if backward < len(queue):
            known, backward = queue[backward], backward + 1
            for slot, value in enumerate(line.reads[block[known]]):
                step(known, line.place[value], slot, line.part[value], False)
        else:
            known, forward = queue[forward], forward + 1
            for part, user, slot in line.uses[block[known]]:
                step(known, user, slot, part, True)
    return steps


def follow_plan(
    line: Linearization, model: Block, steps: Sequence[DataflowStep], root: int, *, to_the_end: bool = False
) -> tuple[dict[int, int], DataflowStep | None]:
    """Places that correspond to those of `model` if `root` is its last operation, by index in it.

    Returns also the first step that led nowhere, and stops there if it need not go `to_the_end`.
    """
    found = {model.index(max(model)) if not steps else steps[0].known: root}
    taken = {root}
    failed: DataflowStep | None = None
    for step in steps:
        at = found.get(step.known)
        if at is None:
            continue
        other = _step_target(line, line.labels[model[step.found]], step, at, taken)
        if other >= 0:
            found[step.found] = other
            taken.add(other)
            continue
        failed = failed or step
        if not to_the_end:
            break
    return found, failed


def _step_target(line: Linearization, label: int, step: DataflowStep, at: int, taken: Set[int]) -> int:
    if step.forward:
        for part, q, slot in line.uses[at]:
            is_it = (part, slot) == (step.part, step.slot) and q < len(line) and line.labels[q] == label
            if is_it and q not in taken:
                return q
        return -1
    value = line.reads[at][step.slot]
    other = line.place[value]
    return other if other >= 0 and line.labels[other] == label and line.part[value] == step.part else -1


def block_windows(line: Linearization, blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """Return the disjoint windows that blocks span; the whole line if it is out of order."""
    if not line.ascending:
        return [(0, len(line) - 1)]
    return merge_windows((min(block), max(block)) for block in blocks)


def acyclic(line: Linearization, blocks: Sequence[Block]) -> bool:
    """Whether the graph stays acyclic when each block is contracted, all of them at once."""
    owner = {q: b for b, block in enumerate(blocks) for q in block}

    def needs(unit: int) -> Iterable[int]:
        places = (unit,) if unit >= 0 else blocks[-1 - unit]
        return (j for q in places for j in line.before[q])

    for low, high in block_windows(line, blocks):
        first = owner.get(low)
        if first is None or len(blocks[first]) < high - low + 1:
            units, before = contract_window(low, high, owner, needs)
            if len(topological_order(before)) < len(units):
                return False
    return True


# A value with more readers than this is shared far and wide: none of them is the block's own.
_MAX_READERS = 64


class BlockGrowth:
    """Blocks that take in what is `free` around them, as far as it is alike for all of them.

    First towards operands, so that a block has what its results need; then towards readers. Where the surroundings
    differ, or are one and the same operation for several blocks, or belong to another block, the border stays.
    """

    def __init__(self, line: Linearization, blocks: Sequence[Block], free: Set[int]) -> None:
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
        if len(uses) > _MAX_READERS:
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
