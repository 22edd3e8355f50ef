"""Blocks that occur again and again, found from the dataflow alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dovetail.errors import RuleError, checked_call
from dovetail.graph.module import without_collector
from dovetail.outlining.record import make_identity
from dovetail.rules.repeating.blocks import Family
from dovetail.rules.repeating.line import Line
from dovetail.rules.repeating.misses import apart, beside
from dovetail.rules.repeating.search import Search, Wanted
from dovetail.rules.repeating.sight import Sight
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule
from dovetail.rules.scene import Scene

_TOLD = 8


@checked_call()
def repeats(
    kind: str = "block",
    *,
    name: str = "repeats",
    min_repeats: int = 2,
    min_size: int = 4,
    nested: bool = False,
    priority: int = 0,
    version: int = 1,
) -> Rule:
    """Propose blocks of operations that are there several times over: the layers of a model, without their names.

    Blocks are equal if they can share one body: operators, literals, wiring, and dtype, sizes and strides of what
    they read. Parameters and all that several blocks share are operands. Rows of blocks are cut where fewest values
    cross. The largest blocks are proposed; `min_size` counts their operations, views left out. With `nested`,
    blocks that repeat inside of a block become regions first, and the next round's blocks take them in.
    """
    make_identity(kind, version, None)
    for argument, value in (("min_repeats", min_repeats), ("min_size", min_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(name, f"{argument} {value!r} is not an int of at least 2")
    if not isinstance(priority, int) or isinstance(priority, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(name, f"priority {priority!r} is not an int")
    return Repeats(name, kind, priority, nested, min_repeats, min_size, version)


@dataclass(frozen=True)
class Repeats(Rule):
    """What `repeats` makes."""

    name: str
    kind: str
    priority: int = 0
    nests: bool = False
    min_repeats: int = 2
    min_size: int = 4
    version: int = 1

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        with without_collector():
            return list(self._propose(scene))

    def _propose(self, scene: Scene) -> Iterator[Proposal]:
        line = self._line(scene)
        search = Search(line, Wanted(self.min_size, self.min_repeats, scene.limits.nodes))
        families = search.families()
        for family, height in self._levels(line, families):
            for block in family.blocks:
                # Nothing is cloned: a block that kept a clone would leave the original behind.
                yield Candidate(
                    self.name,
                    self.kind,
                    line.positions(block),
                    None,
                    self.version,
                    "output",
                    # What is nested comes first; where it is no legal region the block around it stands in.
                    self.priority - height,
                )
        yield from self._refusals(line, search, families)

    def _line(self, scene: Scene) -> Line:
        free = [
            i
            for i, node in enumerate(scene.nodes)
            if node.op.startswith("call")
            and i not in scene.barred
            and (self.nests or scene.kind_of(i) != self.kind)
        ]
        return Line(scene, free)

    def _levels(self, line: Line, families: list[Family]) -> list[tuple[Family, int]]:
        """Families, and with `nests` those inside of their blocks, each with how many levels it has below it."""
        if not self.nests:
            return [(family, 0) for family in families]
        found: list[tuple[Family, int | None]] = [(family, None) for family in families]
        wanted = Wanted(self.min_size, self.min_repeats, line.scene.limits.nodes)
        for n, (family, _) in enumerate(found):  # grows while it is walked
            found.extend((inner, n) for inner in Search(line, wanted).inside(family))
        heights = [0] * len(found)
        for n in range(len(found) - 1, -1, -1):
            around = found[n][1]
            if around is not None:
                heights[around] = max(heights[around], heights[n] + 1)
        taken = {q for q, free in enumerate(line.free) if not free}
        taken.update(q for family in families for block in family.blocks for q in block)
        outside = Sight(line, taken)
        levels: list[tuple[Family, int]] = []
        for (family, around), height in zip(found, heights, strict=True):
            if around is not None:
                family = outside.extended(family)
                outside.open.difference_update(q for block in family.blocks for q in block)
            levels.append((family, height))
        return levels

    def _refusals(self, line: Line, search: Search, families: list[Family]) -> Iterator[Refusal]:
        taken = {q for family in families for block in family.blocks for q in block}
        alone = [f for f in search.small if taken.isdisjoint(q for block in f.blocks for q in block)]
        for family in alone[:_TOLD]:
            count, size = len(family.blocks), sum(line.size(q) for q in family.blocks[0])
            what = f"min_size={self.min_size}" if size < self.min_size else f"min_repeats={self.min_repeats}"
            reason = f"{count} equal blocks of {size} operations, less than {what} asks for"
            yield Refusal(self.name, line.positions(family.blocks[0]), reason)
        for family in families[:_TOLD]:
            for miss in beside(line, family, taken):
                reason = f"almost equal to {len(family.blocks)} blocks: {miss.reason}"
                yield self._refusal(line, miss.places, reason, miss.at, miss.matched, miss.wanted)
        for miss in apart(line, taken | {q for q, free in enumerate(line.free) if not free}, self.min_size):
            reason = f"almost a repetition: {miss.reason}"
            yield self._refusal(line, miss.places, reason, miss.at, miss.matched, miss.wanted)

    def _refusal(
        self, line: Line, places: tuple[int, ...], reason: str, at: int, matched: int, wanted: int
    ) -> Refusal:
        return Refusal(self.name, line.positions(places), reason, line.heads[at], matched, wanted)

    def why_not(self, scene: Scene, first: int, second: int) -> list[str]:
        line = self._line(scene)
        counts: dict[int, int] = {}
        for label in line.labels:
            counts[label] = counts.get(label, 0) + 1
        found: list[str] = []
        for i in (first, second):
            place = line.place[i]
            if place >= 0 and counts[line.labels[place]] < self.min_repeats:
                times = "once" if counts[line.labels[place]] == 1 else f"{counts[line.labels[place]]} times"
                found.append(f"'{scene.nodes[i].name}' is called in this way only {times}")
        return found
