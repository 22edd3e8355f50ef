"""Levels of a report: boxes grouped into levels of at most about a hundred, each distinct level stored once.

A report draws one level at a time. A level is a template: its boxes refer to further templates and to values by position,
so that equal layers, and equal bodies, are one template whatever their names (hash-consing). Names are kept apart, one
list for a whole program in the order of a walk over its boxes; a box of a template is found by its offset in that list.

Boxes in a row that repeat, alone or a few at a time, are one `fold`: tandem repeats of a short period, found by
comparing each position with the one a period later. What is still too large is cut into chunks of consecutive boxes.
Boxes are in topological order, so that each chunk and each fold is convex. Everything is linear in the number of boxes
and of the values that cross their borders, once for each level that contains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.reporting.layered_layout import lay_out

MOST_BOXES = 100
_CHUNK = 64
_LONGEST_PERIOD = 8

# Repeats of fewer operations in all than this are easier to read one by one.
_FEWEST_FOLDED = 12
_LAYER = 6

Value = int
Operand = int | str
"""A value by its number, or the path of a weight."""


@dataclass(frozen=True)
class Totals:
    """What the operations of a box move, compute and launch, one by one (`before`) and in their regions (`after`)."""

    operations: int = 0
    fused: int = 0
    flops: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    launches_before: int = 0
    launches_after: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(self.as_list(), other.as_list(), strict=True)))

    def as_list(self) -> list[int]:
        """Return the figures in the order that the page reads them."""
        return [
            self.operations,
            self.fused,
            self.flops,
            self.bytes_before,
            self.bytes_after,
            self.launches_before,
            self.launches_after,
        ]


@dataclass(slots=True)
class Box:
    """One box of a level: its template, the names in it, and the values it reads and provides.

    `reads` counts the uses of each value inside it, `provides` those that remain outside. `operands` are in the order
    that the template refers to them.
    """

    template: int
    names: list[str]
    operands: Sequence[Operand]
    reads: dict[Value, int]
    provides: dict[Value, int]
    label: str = ""


@dataclass
class Templates:
    """The distinct boxes and levels of all programs of a report, as the page reads them, and their totals.

    `kinds` counts the regions inside each by kind and backend, `rms_norm@inductor`.
    """

    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    totals: list[Totals] = field(default_factory=list[Totals])
    kinds: list[Counter[str]] = field(default_factory=list[Counter[str]])
    _known: dict[Any, int] = field(default_factory=dict[Any, int])

    def add(self, key: Any, record: dict[str, Any], totals: Totals, kinds: Counter[str]) -> int:
        """Return the number of the template with this key, adding it if it is new."""
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.records)
            self.records.append(record)
            self.totals.append(totals)
            self.kinds.append(kinds)
        return number

    def known(self, key: Any) -> int | None:
        """Return the number of the template with this key, None if there is none yet."""
        return self._known.get(key)


def level(
    templates: Templates,
    sort: str,
    boxes: Sequence[Box],
    prefix: str,
    *,
    own: Mapping[str, Any] | None = None,
    operands: Sequence[Value] | None = None,
    results: Sequence[Value] | None = None,
    names: Sequence[str] = (),
    totals: Totals | None = None,
    kinds: Iterable[str] = (),
) -> Box:
    """Return the box of a level of any number of boxes in topological order, folded and cut into chunks.

    `prefix` is the path of the module around it, from which the paths of weights are relative. `operands` and
    `results` are the values of a region in the order of its body; else they follow from the boxes. `own` is what the
    record has besides, `names` come before those of the boxes, `totals` replace their sum.
    """
    while len(boxes := _folded(templates, boxes, prefix)) > MOST_BOXES:
        pieces = -(-len(boxes) // _CHUNK)
        size = -(-len(boxes) // pieces)
        cuts = [boxes[i : i + size] for i in range(0, len(boxes), size)]
        boxes = [_group(templates, "chunk", cut, prefix, {}) for cut in cuts]
    extra = dict(own or {})
    return _group(templates, sort, boxes, prefix, extra, operands, results, names, totals, kinds)


def _group(
    templates: Templates,
    sort: str,
    boxes: Sequence[Box],
    prefix: str,
    own: Mapping[str, Any],
    operands: Sequence[Value] | None = None,
    results: Sequence[Value] | None = None,
    names: Sequence[str] = (),
    totals: Totals | None = None,
    kinds: Iterable[str] = (),
) -> Box:
    source: dict[Value, tuple[int, int]] = {}
    provides: dict[Value, int] = {}
    reads: dict[Value, int] = {}
    for i, box in enumerate(boxes):
        for k, value in enumerate(box.provides):
            source[value] = (i, k)
        provides.update(box.provides)
    for box in boxes:
        for value, count in box.reads.items():
            if value in provides:
                provides[value] -= count
            else:
                reads[value] = reads.get(value, 0) + count
    provides = {value: count for value, count in provides.items() if count > 0}
    for operand in operands or ():
        reads.setdefault(operand, 1)
    inputs = list(reads) if operands is None else list(operands)
    outputs = list(provides) if results is None else [v for v in dict.fromkeys(results) if v in source]
    number = {value: -1 - k for k, value in reversed(list(enumerate(inputs)))}
    rows: list[list[Any]] = []
    edges: list[tuple[int, int]] = []
    for i, box in enumerate(boxes):
        refs: list[Any] = []
        for operand in box.operands:
            if isinstance(operand, str):
                refs.append(_relative(operand, prefix))
            elif operand in source:
                producer, position = source[operand]
                refs.append([producer, position] if position else producer)
                edges.append((producer, i))
            else:
                refs.append(number.get(operand, "?"))
        rows.append([box.template, refs, box.label] if box.label else [box.template, refs])
    returned = [list(source[v]) if v in source else [number.get(v, 0), 0] for v in outputs]
    key = (sort, _frozen(rows), _frozen(returned), _frozen(own), len(names))
    template = templates.known(key)
    if template is None:
        template = templates.add(key, *_record(templates, sort, rows, returned, edges, own, totals, kinds))
    inner = [name for box in boxes for name in box.names]
    ordered = {v: provides.get(v, 0) for v in outputs}
    return Box(template, [*names, *inner], inputs, reads, ordered)


def _record(
    templates: Templates,
    sort: str,
    rows: list[list[Any]],
    returned: list[list[int]],
    edges: list[tuple[int, int]],
    own: Mapping[str, Any],
    totals: Totals | None,
    kinds: Iterable[str],
) -> tuple[dict[str, Any], Totals, Counter[str]]:
    layout = lay_out(len(rows), edges)
    counted: Counter[str] = Counter(kinds)
    added = Totals()
    for template, *_ in rows:
        counted += templates.kinds[template]
        added += templates.totals[template]
    totals = totals if totals is not None else added
    record: dict[str, Any] = {"t": sort, **own, "c": rows, "o": returned, "l": layout.ranks}
    if layout.bends:
        record["d"] = layout.bends
    record["m"] = totals.as_list()
    if counted:
        by_kind: Counter[str] = Counter()
        for kind, number in counted.items():
            by_kind[kind.partition("@")[0]] += number
        record["k"] = dict(by_kind)
    return record, totals, counted


def _relative(path: str, prefix: str) -> str:
    """Return the path of a weight from the module around, with a dot in front; other paths as they are."""
    if not prefix:
        return f".{path}"
    return path[len(prefix) :] if path.startswith(f"{prefix}.") else path


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        return tuple((k, _frozen(v)) for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    return value


def _folded(templates: Templates, boxes: Sequence[Box], prefix: str) -> list[Box]:
    """Return the boxes with each run of equal units as one fold."""
    numbers = [(box.template, bool(box.label) and not box.label.isdecimal() and box.label) for box in boxes]
    result: list[Box] = []
    i = 0
    while i < len(boxes):
        period, count = _repeats(templates, numbers, i)
        if count < 2:
            result.append(boxes[i])
            i += 1
            continue
        end = i + period * count
        units = [_unit(templates, boxes[at : at + period], prefix) for at in range(i, end, period)]
        # Parts of a few boxes that read weights of their own are not equal.
        equal = all(unit.template == units[0].template for unit in units)
        result += [_fold(templates, units, prefix)] if equal else boxes[i:end]
        i = end
    return result


def _repeats(templates: Templates, numbers: Sequence[Any], start: int) -> tuple[int, int]:
    """Return the period and the number of the repeats that cover the most boxes from `start` on; 1, 1 if none."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, (len(numbers) - start) // 2) + 1):
        end = start + period
        while end < len(numbers) and numbers[end] == numbers[end - period]:
            end += 1
        count = (end - start) // period
        if (
            count > 1
            and count * period > best[0] * best[1]
            and _worthwhile(templates, numbers, start, period, count)
        ):
            best = (period, count)
    return best


def _worthwhile(templates: Templates, numbers: Sequence[Any], start: int, period: int, count: int) -> bool:
    unit = numbers[start : start + period]
    operations = sum(templates.totals[template].operations for template, _ in unit)
    if operations >= _LAYER:
        return not (count < 4 and any(templates.records[t]["t"] == "region" for t, _ in unit) and period == 1)
    return count >= 3 and count * operations >= _FEWEST_FOLDED


def _unit(templates: Templates, boxes: Sequence[Box], prefix: str) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    labels = [box.label for box in boxes if box.label.isdecimal()]
    if len(labels) != 1:
        return _group(templates, "repeat", boxes, prefix, {})
    # The index of a layer is that of the repeat, and no part of what repeats.
    inner = [replace(box, label="") if box.label.isdecimal() else box for box in boxes]
    unit = _group(templates, "repeat", inner, f"{prefix}.{labels[0]}" if prefix else labels[0], {})
    unit.label = labels[0]
    return unit


def _fold(templates: Templates, units: Sequence[Box], prefix: str) -> Box:
    """Return one box for equal units; those of many are folds of folds."""
    first, size = units[0].template, len(units[0].names)
    counted = [(unit, 1) for unit in units]
    while True:
        cuts = [counted[i : i + MOST_BOXES] for i in range(0, len(counted), MOST_BOXES)]
        counted = [(_one_fold(templates, cut, prefix, first, size), sum(n for _, n in cut)) for cut in cuts]
        if len(counted) == 1:
            return counted[0][0]


def _one_fold(
    templates: Templates, counted: Sequence[tuple[Box, int]], prefix: str, first: int, size: int
) -> Box:
    boxes = [box for box, _ in counted]
    fold = _group(templates, "fold", boxes, prefix, {"u": first, "n": sum(n for _, n in counted), "z": size})
    ends = [text for box in (boxes[0], boxes[-1]) for text in box.label.split("–")]
    fold.label = f"{ends[0]}–{ends[-1]}" if ends[0] and ends[-1] else ""
    return fold
