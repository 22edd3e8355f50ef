"""Blocks that occur again and again, found from the dataflow alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from dovetail.errors import RuleError, checked_call
from dovetail.ir.graph_module import pause_gc
from dovetail.ir.nodes import format_type
from dovetail.ir.op_traits import target_name, traits_of
from dovetail.outlining.region import literal, make_identity
from dovetail.rules.repeated_blocks.block_search import BlockExtractor, BlockLimits, BlockSearch
from dovetail.rules.repeated_blocks.blocks import (
    Block,
    DataflowStep,
    Family,
    block_results,
    follow_plan,
    match_plan,
    wiring,
)
from dovetail.rules.repeated_blocks.linearize import Linearization, WindowNumbering
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext

# Refusals are for people to read.
_MAX_REFUSALS = 8
_MAX_COMPARED = 64


@dataclass(frozen=True, slots=True)
class BlockMiss:
    """Operations that are a block but for one difference: `matched` of `wanted` are as in the others."""

    places: tuple[int, ...]
    reason: str
    at: int
    matched: int
    wanted: int


def near_blocks(line: Linearization, family: Family, taken: Set[int]) -> list[BlockMiss]:
    """Places that end like a block of the family and are at least half of one."""
    model = family.blocks[0]
    last, steps = max(model), match_plan(line, model)
    found: list[BlockMiss] = []
    compared = 0
    for root, label in enumerate(line.labels):
        if label != line.labels[last] or root in taken:
            continue
        compared += 1
        if compared > _MAX_COMPARED or len(found) >= _MAX_REFUSALS:
            break
        places, failed = follow_plan(line, model, steps, root, to_the_end=True)
        there = tuple(q for q in places.values() if q not in taken)
        if 2 * len(there) < len(model):
            continue
        miss = _first_difference(line, model, places, failed, taken)
        if miss is not None:
            found.append(BlockMiss(there, *miss, len(there), len(model)))
    return found


def _first_difference(
    line: Linearization, model: Block, places: dict[int, int], failed: DataflowStep | None, taken: Set[int]
) -> tuple[str, int] | None:
    """What keeps the places from being a block like `model`, and where; None if nothing does."""
    if failed is not None:
        at = places[failed.known]
        if failed.forward:
            reader = model[failed.found]
            what = f"no {_op_name(line, reader)} reads '{_name(line, at)}', as '{_name(line, reader)}' does"
            return what, at
        other = line.place[line.reads[at][failed.slot]]
        if other < 0:
            value = line.context.nodes[line.reads[at][failed.slot]].name
            wanted = _op_name(line, model[failed.found])
            return f"'{_name(line, at)}' reads '{value}' where the others read the result of {wanted}", at
        if line.free[other] and line.rough[other] != line.rough[model[failed.found]]:
            mine, theirs = ((_name(line, q), _op_name(line, q)) for q in (other, model[failed.found]))
            read = f"reads '{mine[0]}' ({mine[1]}) where '{_name(line, model[failed.known])}' reads"
            return f"'{_name(line, at)}' {read} '{theirs[0]}' ({theirs[1]})", at
        return describe_difference(line, model[failed.found], other), other
    gone = next((q for q in places.values() if q in taken), None)
    if gone is not None:
        return f"'{_name(line, gone)}' is part of another block", gone
    block = tuple(places[k] for k in sorted(places))
    if len(set(block)) < len(model) or wiring(line, block) != wiring(line, model):
        what = "its operations are the same but read one another, or what is outside, in another way"
        return what, block[0]
    mine, theirs = block_results(line, block), block_results(line, model)
    unlike = set(mine) ^ set(theirs)
    if not unlike:
        return None
    k, _ = value = min(unlike)
    how = "is also read outside" if value in mine else "is not read outside"
    return f"'{_name(line, block[k])}' {how}, unlike '{_name(line, model[k])}' of the others", block[k]


def near_repeats(line: Linearization, taken: Set[int], min_size: int) -> Iterator[BlockMiss]:
    """Stretches that call the same operations as earlier ones, in the same order, but not in the same way."""
    top = max(line.rough, default=0) + 1
    names = WindowNumbering([top + q if q in taken else rough for q, rough in enumerate(line.rough)])
    told: set[int] = set()
    found = 0
    for stretch in names.stretches(min_size):
        length = min(stretch.length, stretch.distance)
        mine = range(stretch.start, stretch.start + length)
        if sum(line.size(q) for q in mine) < min_size or not told.isdisjoint(mine):
            continue
        unlike = [q for q in mine if line.labels[q] != line.labels[q - stretch.distance]]
        if not unlike or 2 * len(unlike) > length:
            continue
        told.update(mine)
        reason = describe_difference(line, unlike[0] - stretch.distance, unlike[0])
        yield BlockMiss(tuple(mine), reason, unlike[0], length - len(unlike), length)
        found += 1
        if found >= _MAX_REFUSALS:
            return


def describe_difference(line: Linearization, model: int, place: int) -> str:
    """In which way an operation is not called like another."""
    theirs, mine = (line.context.nodes[line.heads[q]] for q in (model, place))
    name, other = f"'{mine.name}'", f"'{theirs.name}'"
    if not line.free[place]:
        barred = line.context.barred.get(line.heads[place])
        return f"{name} may not be part of a block{f' ({barred})' if barred else ''}"
    if line.rough[model] != line.rough[place]:
        if target_name(mine) == target_name(theirs):
            return f"{name} calls another module, sub-graph or number of operands than {other}"
        return f"{name} is {_op_name(line, place)} where {other} is {_op_name(line, model)}"
    for argument, here, there in _arguments(mine, theirs):
        if literal(here, _blank) != literal(there, _blank):
            return f"{name} has {argument}={_short_repr(here)} where {other} has {_short_repr(there)}"
    for reads, what in ((False, "makes"), (True, "reads")):
        here, there = (_value_types(line, q, reads=reads) for q in (place, model))
        if here != there:
            return f"{name} {what} {here} where {other} {what} {there}"
    return f"{name} is used in another way than {other}"


def _value_types(line: Linearization, place: int, *, reads: bool) -> str:
    values = line.reads[place] if reads else [line.heads[place]]
    return ", ".join(format_type(line.context.value(v)) or "?" for v in values)


def _arguments(mine: Node, theirs: Node) -> Iterator[tuple[str, Any, Any]]:
    parameters = traits_of(mine).parameters if mine.op != "call_module" else ()
    for i in range(max(len(mine.args), len(theirs.args))):
        name = parameters[i] if i < len(parameters) else f"argument {i}"
        here, there = (node.args[i] if i < len(node.args) else None for node in (mine, theirs))
        yield name, here, there
    for key in sorted({*mine.kwargs, *theirs.kwargs}):
        yield key, mine.kwargs.get(key), theirs.kwargs.get(key)


def _blank(node: Node) -> str:
    return "%"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _name(line: Linearization, place: int) -> str:
    return line.context.nodes[line.heads[place]].name


def _op_name(line: Linearization, place: int) -> str:
    return target_name(line.context.nodes[line.heads[place]])


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

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        with pause_gc():
            return list(self._propose(context))

    def _propose(self, context: RuleContext) -> Iterator[Proposal]:
        line = self._line(context)
        search = BlockSearch(line, BlockLimits(self.min_size, self.min_repeats, context.limits.nodes))
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

    def _line(self, context: RuleContext) -> Linearization:
        free = [
            i
            for i, node in enumerate(context.nodes)
            if node.op.startswith("call")
            and i not in context.barred
            and (self.nests or context.kind_of(i) != self.kind)
        ]
        return Linearization(context, free)

    def _levels(self, line: Linearization, families: list[Family]) -> list[tuple[Family, int]]:
        """Families, and with `nests` those inside of their blocks, each with how many levels it has below it."""
        if not self.nests:
            return [(family, 0) for family in families]
        found: list[tuple[Family, int | None]] = [(family, None) for family in families]
        wanted = BlockLimits(self.min_size, self.min_repeats, line.context.limits.nodes)
        for n, (family, _) in enumerate(found):  # grows while it is walked
            found.extend((inner, n) for inner in BlockSearch(line, wanted).inside(family))
        heights = [0] * len(found)
        for n in range(len(found) - 1, -1, -1):
            around = found[n][1]
            if around is not None:
                heights[around] = max(heights[around], heights[n] + 1)
        taken = {q for q, free in enumerate(line.free) if not free}
        taken.update(q for family in families for block in family.blocks for q in block)
        outside = BlockExtractor(line, taken)
        levels: list[tuple[Family, int]] = []
        for (family, around), height in zip(found, heights, strict=True):
            if around is not None:
                family = outside.extended(family)
                outside.open.difference_update(q for block in family.blocks for q in block)
            levels.append((family, height))
        return levels

    def _refusals(
        self, line: Linearization, search: BlockSearch, families: list[Family]
    ) -> Iterator[Refusal]:
        taken = {q for family in families for block in family.blocks for q in block}
        alone = [f for f in search.small if taken.isdisjoint(q for block in f.blocks for q in block)]
        for family in alone[:_MAX_REFUSALS]:
            count, size = len(family.blocks), sum(line.size(q) for q in family.blocks[0])
            what = f"min_size={self.min_size}" if size < self.min_size else f"min_repeats={self.min_repeats}"
            reason = f"{count} equal blocks of {size} operations, less than {what} asks for"
            yield Refusal(self.name, line.positions(family.blocks[0]), reason)
        for family in families[:_MAX_REFUSALS]:
            for miss in near_blocks(line, family, taken):
                reason = f"almost equal to {len(family.blocks)} blocks: {miss.reason}"
                yield self._refusal(line, miss.places, reason, miss.at, miss.matched, miss.wanted)
        for miss in near_repeats(
            line, taken | {q for q, free in enumerate(line.free) if not free}, self.min_size
        ):
            reason = f"almost a repetition: {miss.reason}"
            yield self._refusal(line, miss.places, reason, miss.at, miss.matched, miss.wanted)

    def _refusal(
        self, line: Linearization, places: tuple[int, ...], reason: str, at: int, matched: int, wanted: int
    ) -> Refusal:
        return Refusal(self.name, line.positions(places), reason, line.heads[at], matched, wanted)

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        line = self._line(context)
        counts: dict[int, int] = {}
        for label in line.labels:
            counts[label] = counts.get(label, 0) + 1
        found: list[str] = []
        for i in (first, second):
            place = line.place[i]
            if place >= 0 and counts[line.labels[place]] < self.min_repeats:
                times = "once" if counts[line.labels[place]] == 1 else f"{counts[line.labels[place]]} times"
                found.append(f"'{context.nodes[i].name}' is called in this way only {times}")
        return found
