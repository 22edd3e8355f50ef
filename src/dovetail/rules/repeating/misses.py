"""Blocks that are almost equal: how far they are, and the first thing in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from dovetail.graph.describe import short
from dovetail.graph.spellings import target_name, traits
from dovetail.outlining.bodies import literal
from dovetail.rules.repeating.blocks import Block, Family, Step, follow, plan, results, wiring
from dovetail.rules.repeating.line import Line
from dovetail.rules.repeating.runs import Names

# Refusals are for people to read.
_TOLD = 8
_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Miss:
    """Operations that are a block but for one difference: `matched` of `wanted` are as in the others."""

    places: tuple[int, ...]
    reason: str
    at: int
    matched: int
    wanted: int


def beside(line: Line, family: Family, taken: Set[int]) -> list[Miss]:
    """Places that end like a block of the family and are at least half of one."""
    model = family.blocks[0]
    last, steps = max(model), plan(line, model)
    found: list[Miss] = []
    compared = 0
    for root, label in enumerate(line.labels):
        if label != line.labels[last] or root in taken:
            continue
        compared += 1
        if compared > _COMPARED or len(found) >= _TOLD:
            break
        places, failed = follow(line, model, steps, root, to_the_end=True)
        there = tuple(q for q in places.values() if q not in taken)
        if 2 * len(there) < len(model):
            continue
        miss = _miss(line, model, places, failed, taken)
        if miss is not None:
            found.append(Miss(there, *miss, len(there), len(model)))
    return found


def _miss(
    line: Line, model: Block, places: dict[int, int], failed: Step | None, taken: Set[int]
) -> tuple[str, int] | None:
    """What keeps the places from being a block like `model`, and where; None if nothing does."""
    if failed is not None:
        at = places[failed.known]
        if failed.forward:
            reader = model[failed.found]
            what = f"no {_called(line, reader)} reads '{_name(line, at)}', as '{_name(line, reader)}' does"
            return what, at
        other = line.place[line.reads[at][failed.slot]]
        if other < 0:
            value = line.scene.nodes[line.reads[at][failed.slot]].name
            wanted = _called(line, model[failed.found])
            return f"'{_name(line, at)}' reads '{value}' where the others read the result of {wanted}", at
        if line.free[other] and line.rough[other] != line.rough[model[failed.found]]:
            mine, theirs = ((_name(line, q), _called(line, q)) for q in (other, model[failed.found]))
            read = f"reads '{mine[0]}' ({mine[1]}) where '{_name(line, model[failed.known])}' reads"
            return f"'{_name(line, at)}' {read} '{theirs[0]}' ({theirs[1]})", at
        return difference(line, model[failed.found], other), other
    gone = next((q for q in places.values() if q in taken), None)
    if gone is not None:
        return f"'{_name(line, gone)}' is part of another block", gone
    block = tuple(places[k] for k in sorted(places))
    if len(set(block)) < len(model) or wiring(line, block) != wiring(line, model):
        what = "its operations are the same but read one another, or what is outside, in another way"
        return what, block[0]
    mine, theirs = results(line, block), results(line, model)
    unlike = set(mine) ^ set(theirs)
    if not unlike:
        return None
    k, _ = value = min(unlike)
    how = "is also read outside" if value in mine else "is not read outside"
    return f"'{_name(line, block[k])}' {how}, unlike '{_name(line, model[k])}' of the others", block[k]


def apart(line: Line, taken: Set[int], min_size: int) -> Iterator[Miss]:
    """Stretches that call the same operations as earlier ones, in the same order, but not in the same way."""
    top = max(line.rough, default=0) + 1
    names = Names([top + q if q in taken else rough for q, rough in enumerate(line.rough)])
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
        reason = difference(line, unlike[0] - stretch.distance, unlike[0])
        yield Miss(tuple(mine), reason, unlike[0], length - len(unlike), length)
        found += 1
        if found >= _TOLD:
            return


def difference(line: Line, model: int, place: int) -> str:
    """In which way an operation is not called like another."""
    theirs, mine = (line.scene.nodes[line.heads[q]] for q in (model, place))
    name, other = f"'{mine.name}'", f"'{theirs.name}'"
    if not line.free[place]:
        barred = line.scene.barred.get(line.heads[place])
        return f"{name} may not be part of a block{f' ({barred})' if barred else ''}"
    if line.rough[model] != line.rough[place]:
        if target_name(mine) == target_name(theirs):
            return f"{name} calls another module, sub-graph or number of operands than {other}"
        return f"{name} is {_called(line, place)} where {other} is {_called(line, model)}"
    for argument, here, there in _arguments(mine, theirs):
        if literal(here, _blank) != literal(there, _blank):
            return f"{name} has {argument}={_shown(here)} where {other} has {_shown(there)}"
    for reads, what in ((False, "makes"), (True, "reads")):
        here, there = (_kinds(line, q, reads=reads) for q in (place, model))
        if here != there:
            return f"{name} {what} {here} where {other} {what} {there}"
    return f"{name} is used in another way than {other}"


def _kinds(line: Line, place: int, *, reads: bool) -> str:
    values = line.reads[place] if reads else [line.heads[place]]
    return ", ".join(short(line.scene.value(v)) or "?" for v in values)


def _arguments(mine: Node, theirs: Node) -> Iterator[tuple[str, Any, Any]]:
    parameters = traits(mine).parameters if mine.op != "call_module" else ()
    for i in range(max(len(mine.args), len(theirs.args))):
        name = parameters[i] if i < len(parameters) else f"argument {i}"
        here, there = (node.args[i] if i < len(node.args) else None for node in (mine, theirs))
        yield name, here, there
    for key in sorted({*mine.kwargs, *theirs.kwargs}):
        yield key, mine.kwargs.get(key), theirs.kwargs.get(key)


def _blank(node: Node) -> str:
    return "%"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _name(line: Line, place: int) -> str:
    return line.scene.nodes[line.heads[place]].name


def _called(line: Line, place: int) -> str:
    return target_name(line.scene.nodes[line.heads[place]])
