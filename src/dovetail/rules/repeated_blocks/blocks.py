"""Equal blocks: sets of operations that compute the same, compared operand by operand, and how they grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from dovetail.ir.quotient_graph import contract_window, merge_windows, topological_order
from dovetail.rules.repeated_blocks.linearize import Linearization

Block = tuple[int, ...]
"""Places of operations; the n-th places of equal blocks correspond."""
Wiring = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """Blocks that are equal and disjoint."""

    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        return len(self.blocks[0])

    @property
    def covered(self) -> int:
        return len(self.blocks) * self.length

    @property
    def saved(self) -> int:
        """How many operations sharing one body removes."""
        return (len(self.blocks) - 1) * self.length

    @property
    def first(self) -> int:
        return min(min(block) for block in self.blocks)


def wiring(line: Linearization, block: Block) -> Wiring:
    """Return the dataflow of a block; blocks of equal labels compute the same if and only if it is equal.

    Values from outside count by their metadata and by which of them are the same, not by their producers.
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
    return tuple(rows), tuple([line.metadata_id(v) for v in outside])


def block_results(line: Linearization, block: Block) -> tuple[tuple[int, int], ...]:
    """Return the values of a block that are read outside it, as index in the block and part."""
    inside = set(block)
    values = {(k, part) for k, q in enumerate(block) for part, user, _ in line.uses[q] if user not in inside}
    return tuple(sorted(values))


def boundary_size(line: Linearization, family: Family) -> int:
    """Return how many computed values enter and leave a block, without those that all blocks share."""
    read: list[set[int]] = []
    for block in family.blocks[:2]:
        inside = set(block)
        values = {v for q in block for v in line.reads[q]}
        read.append({v for v in values if line.place[v] >= 0 and line.place[v] not in inside})
    first, second = read
    return max(len(first - second), len(second - first)) + len(block_results(line, family.blocks[0]))


def group_equal(line: Linearization, blocks: Iterable[Block]) -> list[list[Block]]:
    """Return blocks of equal labels grouped by wiring and results, the largest group first."""
    groups: dict[tuple[Wiring, tuple[tuple[int, int], ...]], list[Block]] = {}
    for block in blocks:
        groups.setdefault((wiring(line, block), block_results(line, block)), []).append(block)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def disjoint(starts: Iterable[int], length: int) -> list[Block]:
    """Return the windows at each of the ascending starts, without those that overlap an earlier one."""
    blocks: list[Block] = []
    end = 0
    for start in starts:
        if start >= end:
            end = start + length
            blocks.append(tuple(range(start, end)))
    return blocks


@dataclass(frozen=True, slots=True)
class DataflowStep:
    """A step from one operation of a block to another, by index: to the producer of an operand, or to a reader."""

    source: int
    target: int
    slot: int
    part: int
    forward: bool


def match_plan(line: Linearization, block: Block) -> list[DataflowStep]:
    """Return steps from the last operation of a block to all others connected with it inside the block."""
    inside = {q: k for k, q in enumerate(block)}
    root = inside[max(block)]
    steps: list[DataflowStep] = []
    visited = {root}
    queue = [root]

    def visit(source: int, place: int, slot: int, part: int, forward: bool) -> None:
        target = inside.get(place)
        if target is not None and target not in visited:
            visited.add(target)
            queue.append(target)
            steps.append(DataflowStep(source, target, slot, part, forward))

    backward = forward = 0
    while forward < len(queue):
        # Operands first; operations that only read the block are reached from these.
        if backward < len(queue):
            source, backward = queue[backward], backward + 1
            for slot, value in enumerate(line.reads[block[source]]):
                visit(source, line.place[value], slot, line.part[value], False)
        else:
            source, forward = queue[forward], forward + 1
            for part, user, slot in line.uses[block[source]]:
                visit(source, user, slot, part, True)
    return steps


def follow_plan(
    line: Linearization, model: Block, steps: Sequence[DataflowStep], root: int, *, to_the_end: bool = False
) -> tuple[dict[int, int], DataflowStep | None]:
    """Return the places that correspond to those of `model` if `root` is its last operation, by index in it.

    Also return the first step that failed; the others are only tried `to_the_end`.
    """
    places = {model.index(max(model)) if not steps else steps[0].source: root}
    taken = {root}
    failed: DataflowStep | None = None
    for step in steps:
        at = places.get(step.source)
        if at is None:
            continue
        target = _step_target(line, line.labels[model[step.target]], step, at, taken)
        if target >= 0:
            places[step.target] = target
            taken.add(target)
            continue
        failed = failed or step
        if not to_the_end:
            break
    return places, failed


def _step_target(line: Linearization, label: int, step: DataflowStep, at: int, taken: Set[int]) -> int:
    if step.forward:
        for part, q, slot in line.uses[at]:
            same = (part, slot) == (step.part, step.slot) and q < len(line) and line.labels[q] == label
            if same and q not in taken:
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


# A value with more readers than this is shared by many blocks, and none of its readers belongs to one.
_MAX_READERS = 64


class BlockGrowth:
    """Grows equal blocks by the `free` operations around them, as long as these are equal for all blocks.

    They grow towards operands first, so that a block has what its results need, then towards readers. Growth stops where
    the neighbours differ, are one operation shared by blocks, or belong to another block.
    """

    def __init__(self, line: Linearization, blocks: Sequence[Block], free: Set[int]) -> None:
        self.line, self.free = line, free
        self.blocks = [list(block) for block in blocks]
        self.owner = {q: (b, k) for b, block in enumerate(self.blocks) for k, q in enumerate(block)}
        self.lowest = [min(block) for block in self.blocks]

    def backward(self) -> list[Block]:
        """Grow by the producers of operands, transitively."""
        first = self.blocks[0]
        for k, q in enumerate(first):  # grows during the iteration
            for slot in range(len(self.line.reads[q])):
                if self._is_open(self._producer(q, slot)):
                    self._take([self._producer(block[k], slot) for block in self.blocks])
        return self._as_blocks()

    def forward(self) -> list[Block]:
        """Grow by readers that need nothing else which may depend on the blocks."""
        for k, _ in enumerate(self.blocks[0]):
            readers = self._readers(0, k)
            if not any(self._is_open(q) for places in readers.values() for q in places):
                continue
            others = [self._readers(b, k) for b in range(1, len(self.blocks))]
            for label, places in readers.items():
                for nth, q in enumerate(places):
                    same = [other[label][nth] for other in others if len(other.get(label, ())) > nth]
                    if len(same) == len(others):
                        self._take([q, *same], reader=True)
        return self._as_blocks()

    def _as_blocks(self) -> list[Block]:
        return [tuple(block) for block in self.blocks]

    def _producer(self, place: int, slot: int) -> int:
        return self.line.place[self.line.reads[place][slot]]

    def _is_open(self, place: int) -> bool:
        return place in self.free and place not in self.owner

    def _readers(self, b: int, k: int) -> dict[int, list[int]]:
        """Return the operations outside a block that read one inside, by label, in the order of the line."""
        readers: dict[int, list[int]] = {}
        uses = self.line.uses[self.blocks[b][k]]
        if len(uses) > _MAX_READERS:
            return readers
        for q in sorted({q for _, q, _ in uses if q < len(self.line)}):
            if self.owner.get(q, (-1, 0))[0] != b:
                readers.setdefault(self.line.labels[q], []).append(q)
        return readers

    def _take(self, places: list[int], *, reader: bool = False) -> None:
        """Add one place to each block, if they are free, distinct, and equal in label and wiring."""
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
        """Return the index in the block of the operand's producer, -1 for a value from outside."""
        block, k = self.owner.get(self._producer(place, slot), (-1, -1))
        return k if block == b else -1

    def _is_late(self, b: int, place: int) -> bool:
        """Whether all other dependencies of an operation are before the block, and so cannot depend on it."""
        before = self.line.before[place]
        return all(q < self.lowest[b] or self.owner.get(q, (-1, 0))[0] == b for q in before)
