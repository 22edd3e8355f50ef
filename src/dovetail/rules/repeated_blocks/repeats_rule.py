"""The `repeats` rule: blocks of operations that occur repeatedly, detected from the dataflow alone; and near-misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from dovetail.errors import checked_call
from dovetail.ir.graph_module import pause_gc
from dovetail.ir.nodes import format_type
from dovetail.ir.op_traits import target_name, traits_of
from dovetail.outlining.region import literal, make_identity
from dovetail.rules.repeated_blocks.block_search import BlockExtractor, BlockSearch
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
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext, require_int

# Bounds on the refusals reported, which are for people to read.
_MAX_REFUSALS = 8
_MAX_COMPARED = 64


def near_blocks(rule: str, line: Linearization, family: Family, taken: Set[int]) -> list[Refusal]:
    """Return refusals of operations that end like a block of the family and match at least half of one."""
    model = family.blocks[0]
    last, steps = max(model), match_plan(line, model)
    misses: list[Refusal] = []
    compared = 0
    for root, label in enumerate(line.labels):
        if label != line.labels[last] or root in taken:
            continue
        compared += 1
        if compared > _MAX_COMPARED or len(misses) >= _MAX_REFUSALS:
            break
        places, failed = follow_plan(line, model, steps, root, to_the_end=True)
        matched = tuple(q for q in places.values() if q not in taken)
        if 2 * len(matched) < len(model):
            continue
        difference = _first_difference(line, model, places, failed, taken)
        if difference is not None:
            reason = f"almost equal to {len(family.blocks)} blocks: {difference[0]}"
            at = line.heads[difference[1]]
            misses.append(Refusal(rule, line.positions(matched), reason, at, len(matched), len(model)))
    return misses


def _first_difference(
    line: Linearization, model: Block, places: dict[int, int], failed: DataflowStep | None, taken: Set[int]
) -> tuple[str, int] | None:
    """Return why the places are not a block equal to `model`, and where; None if they are."""
    if failed is not None:
        at = places[failed.source]
        if failed.forward:
            reader = model[failed.target]
            what = f"no {_op_name(line, reader)} reads '{_name(line, at)}', as '{_name(line, reader)}' does"
            return what, at
        other = line.place[line.reads[at][failed.slot]]
        if other < 0:
            value = line.context.nodes[line.reads[at][failed.slot]].name
            expected = _op_name(line, model[failed.target])
            return f"'{_name(line, at)}' reads '{value}' where the others read the result of {expected}", at
        if line.free[other] and line.op_labels[other] != line.op_labels[model[failed.target]]:
            mine, theirs = ((_name(line, q), _op_name(line, q)) for q in (other, model[failed.target]))
            read = f"reads '{mine[0]}' ({mine[1]}) where '{_name(line, model[failed.source])}' reads"
            return f"'{_name(line, at)}' {read} '{theirs[0]}' ({theirs[1]})", at
        return describe_difference(line, model[failed.target], other), other
    shared = next((q for q in places.values() if q in taken), None)
    if shared is not None:
        return f"'{_name(line, shared)}' is part of another block", shared
    block = tuple(places[k] for k in sorted(places))
    if len(set(block)) < len(model) or wiring(line, block) != wiring(line, model):
        return "its operations are the same but read one another, or values outside, differently", block[0]
    mine, theirs = block_results(line, block), block_results(line, model)
    unlike = set(mine) ^ set(theirs)
    if not unlike:
        return None
    k, _ = value = min(unlike)
    how = "is also read outside" if value in mine else "is not read outside"
    return f"'{_name(line, block[k])}' {how}, unlike '{_name(line, model[k])}' of the others", block[k]


def near_repeats(rule: str, line: Linearization, taken: Set[int], min_size: int) -> Iterator[Refusal]:
    """Yield refusals of windows that call the same operators as earlier ones, in order, with different arguments."""
    unique = max(line.op_labels, default=0) + 1
    windows = WindowNumbering([unique + q if q in taken else op for q, op in enumerate(line.op_labels)])
    reported: set[int] = set()
    count = 0
    for repeat in windows.maximal_repeats(min_size):
        length = min(repeat.length, repeat.distance)
        places = range(repeat.start, repeat.start + length)
        if sum(line.size(q) for q in places) < min_size or not reported.isdisjoint(places):
            continue
        unlike = [q for q in places if line.labels[q] != line.labels[q - repeat.distance]]
        if not unlike or 2 * len(unlike) > length:
            continue
        reported.update(places)
        reason = f"almost a repetition: {describe_difference(line, unlike[0] - repeat.distance, unlike[0])}"
        at, matched = line.heads[unlike[0]], length - len(unlike)
        yield Refusal(rule, line.positions(places), reason, at, matched, length)
        count += 1
        if count >= _MAX_REFUSALS:
            return


def describe_difference(line: Linearization, model: int, place: int) -> str:
    """Describe how the call of an operation differs from that of another."""
    theirs, mine = (line.context.nodes[line.heads[q]] for q in (model, place))
    name, other = f"'{mine.name}'", f"'{theirs.name}'"
    if not line.free[place]:
        reason = line.context.barred.get(line.heads[place])
        return f"{name} may not be part of a block{f' ({reason})' if reason else ''}"
    if line.op_labels[model] != line.op_labels[place]:
        if target_name(mine) == target_name(theirs):
            return f"{name} calls another module, subgraph or number of operands than {other}"
        return f"{name} is {_op_name(line, place)} where {other} is {_op_name(line, model)}"
    for argument, here, there in _arguments(mine, theirs):
        if literal(here, lambda _: "%") != literal(there, lambda _: "%"):
            return f"{name} has {argument}={_short_repr(here)} where {other} has {_short_repr(there)}"
    for reads, what in ((False, "returns"), (True, "reads")):
        here, there = (_value_types(line, q, reads=reads) for q in (place, model))
        if here != there:
            return f"{name} {what} {here} where {other} {what} {there}"
    return f"{name} is used differently from {other}"


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
    """Propose blocks of operations that occur repeatedly: the layers of a model, without knowing their names.

    Blocks are equal if they can share one body: same operators, literals and wiring, and same dtype, sizes and strides
    of what they read. Parameters and values shared by blocks are operands. Rows of blocks are cut where fewest values
    cross. The largest blocks are proposed; `min_size` counts their operations, views excepted. With `nested`, blocks
    that repeat inside a block become regions first, and the next round's blocks take them in.
    """
    make_identity(kind, version, None)
    require_int(name, "min_repeats", min_repeats, least=2)
    require_int(name, "min_size", min_size, least=2)
    require_int(name, "priority", priority)
    return Repeats(name, kind, priority, nested, min_repeats, min_size, version)


@dataclass(frozen=True)
class Repeats(Rule):
    """The rule that `repeats` returns."""

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
        line = self._linearize(context)
        search = BlockSearch(line, self.min_size, self.min_repeats)
        families = search.families()
        for family, height in self._levels(line, families):
            for block in family.blocks:
                # Escaping values are outputs: a block with a clone would leave the original outside.
                yield Candidate(
                    self.name,
                    self.kind,
                    line.positions(block),
                    None,
                    self.version,
                    "output",
                    # Nested blocks come first; where one is not a legal region, the block around it is proposed.
                    self.priority - height,
                )
        yield from self._refusals(line, search, families)

    def _linearize(self, context: RuleContext) -> Linearization:
        free = [
            i
            for i, node in enumerate(context.nodes)
            if node.op.startswith("call")
            and i not in context.barred
            and (self.nests or context.kind_of(i) != self.kind)
        ]
        return Linearization(context, free)

    def _levels(self, line: Linearization, families: list[Family]) -> list[tuple[Family, int]]:
        """Return families, and with `nests` those inside their blocks, each with how many levels are nested in it."""
        if not self.nests:
            return [(family, 0) for family in families]
        nested: list[tuple[Family, int | None]] = [(family, None) for family in families]
        search = BlockSearch(line, self.min_size, self.min_repeats)
        for n, (family, _) in enumerate(nested):  # grows during the iteration
            nested.extend((inner, n) for inner in search.inside(family))
        heights = [0] * len(nested)
        for n in range(len(nested) - 1, -1, -1):
            around = nested[n][1]
            if around is not None:
                heights[around] = max(heights[around], heights[n] + 1)
        taken = {q for q, free in enumerate(line.free) if not free}
        taken.update(q for family in families for block in family.blocks for q in block)
        outside = BlockExtractor(line, taken)
        levels: list[tuple[Family, int]] = []
        for (family, around), height in zip(nested, heights, strict=True):
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
            reason = f"{count} equal blocks of {size} operations, less than {what} requires"
            yield Refusal(self.name, line.positions(family.blocks[0]), reason)
        for family in families[:_MAX_REFUSALS]:
            yield from near_blocks(self.name, line, family, taken)
        taken.update(q for q, free in enumerate(line.free) if not free)
        yield from near_repeats(self.name, line, taken, self.min_size)

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        line = self._linearize(context)
        counts = Counter(line.labels)
        reasons: list[str] = []
        for i in (first, second):
            place = line.place[i]
            if place >= 0 and counts[line.labels[place]] < self.min_repeats:
                times = "once" if counts[line.labels[place]] == 1 else f"{counts[line.labels[place]]} times"
                reasons.append(f"'{context.nodes[i].name}' is called in this way only {times}")
        return reasons
