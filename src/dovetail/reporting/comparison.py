"""Comparing two programs: corresponding parts by structure, and the differences, those of equal layers once.

Both programs are made of common templates, so that equal parts have equal numbers and need not be compared. Where two
levels differ, their boxes are aligned as sequences (`ir.printer.pair_sequences`), folds and chunks opened, and what
corresponds is compared in turn. Each distinct pair of levels is compared once and counted as often as it occurs, so that
the time is that of comparing distinct levels.

A box without a counterpart in its level is not yet absent from the other program: a region may have taken its operations.
These are looked up by name, which fusing keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir.printer import pair_sequences
from dovetail.ir.text_tables import counted
from dovetail.reporting.findings import template_sizes
from dovetail.reporting.level_templates import Box, Templates
from dovetail.reporting.operation_text import OPERAND_MARK

_MOST = 500
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class _Place:
    """An occurrence of a template in one of the programs: where its names begin, and the path of its module."""

    template: int
    offset: int
    label: str
    path: str


@dataclass(slots=True)
class _PairOfLevels:
    """Two levels that correspond: what differs between them, and which pairs of levels are inside."""

    left: _Place
    right: _Place
    times: int = 0
    same: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    inner: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """An operation of a program: its template, and the slot of the outermost region around it."""

    template: int
    region: int | None


def compare_programs(
    templates: Templates, left: Box, right: Box, *, left_is_later: bool = False
) -> dict[str, Any]:
    """Return the differences of two programs, each with its place in both and how often it occurs.

    A change reads from the left program to the right one, or with `left_is_later` from the right one to the left one.
    """
    return _Comparison(templates, left, right, left_is_later).document()


class _Comparison:
    def __init__(self, templates: Templates, left: Box, right: Box, left_is_later: bool) -> None:
        self.left_is_later = left_is_later
        self.records, self.templates = templates.records, templates
        self.sizes = template_sizes(templates.records)
        self.names = left.names, right.names
        self.root = left.template, right.template
        self._by_name: dict[int, dict[str, _Occurrence]] = {}

    def document(self) -> dict[str, Any]:
        first = _PairOfLevels(*(_Place(number, 0, "", "") for number in self.root), times=1)
        pairs = {self.root: first}
        queue = [first] if self.root[0] != self.root[1] else []
        for pair in queue:
            for inner in self._compare(pair):
                key = inner.left.template, inner.right.template
                pair.inner[key] += 1
                if key not in pairs:
                    pairs[key] = inner
                    queue.append(inner)
        # A template refers to earlier ones only, so that this order has the outer pair first.
        for key in sorted(pairs, reverse=True):
            for inner_key, times in pairs[key].inner.items():
                pairs[inner_key].times += pairs[key].times * times
        rows = [row | {"times": pair.times} for pair in pairs.values() for row in pair.differences]
        return {"differences": [*self._by_kind(), *rows][:_MOST], "same": self._same(pairs.values())}

    def _same(self, pairs: Iterable[_PairOfLevels]) -> int:
        """Return the number of operations in parts that are equal."""
        if self.root[0] == self.root[1]:
            return self.templates.totals[self.root[0]].operations
        return sum(pair.same * pair.times for pair in pairs)

    def _by_kind(self) -> Iterator[dict[str, Any]]:
        counts: list[Counter[str]] = []
        for number in self.root:
            counts.append(Counter())
            for kind, count in self.templates.kinds[number].items():
                counts[-1][kind.partition("@")[0]] += count
        for kind in sorted({*counts[0], *counts[1]}):
            if counts[0][kind] != counts[1][kind]:
                text = f"regions of kind {kind}: {self._change(*(count[kind] for count in counts))}"
                yield {"sort": "kinds", "text": text, "left": None, "right": None, "times": 1}

    def _change(self, left: object, right: object) -> str:
        return f"{right} → {left}" if self.left_is_later else f"{left} → {right}"

    def _compare(self, pair: _PairOfLevels) -> Iterator[_PairOfLevels]:
        """Record what differs between two levels, and yield the pairs of levels in them to be compared."""
        sides = [self._opened(place) for place in (pair.left, pair.right)]
        keys = [[self._shape(place) for place in side] for side in sides]
        # Names are often those of the same operations, and distinguish what looks alike.
        names = [
            [(key, self._name(k, place)) for key, place in zip(keys[k], side, strict=True)]
            for k, side in enumerate(sides)
        ]
        for i1, i2, j1, j2 in pair_sequences(keys[0], keys[1], (names[0], names[1])):
            old, new = sides[0][i1:i2], sides[1][j1:j2]
            if len(old) == len(new) == 1 and keys[0][i1] == keys[1][j1]:
                yield from self._corresponding(pair, old[0], new[0])
            else:
                self._replaced(pair, old, new)

    def _opened(self, level: _Place) -> list[_Place]:
        """Return the boxes of a level, with folds, chunks and repeated parts opened."""
        boxes: list[_Place] = []
        stack = [level]
        while stack:
            place = stack.pop()
            record = self.records[place.template]
            if place is not level and record["t"] not in ("fold", "chunk", "repeat"):
                boxes.append(place)
                continue
            offset = place.offset + int(record["t"] == "region")
            inner: list[_Place] = []
            for row in record["c"]:
                label = row[2] if len(row) > 2 else ""
                # The range of indexes that a fold is labeled with is no part of a path.
                named = "" if self.records[row[0]]["t"] == "fold" else label
                inner.append(_Place(row[0], offset, label, _joined(place.path, named)))
                offset += self.sizes[row[0]]
            stack += reversed(inner)
        return boxes

    def _shape(self, place: _Place) -> tuple[Any, ...]:
        """Return what boxes have in common that correspond."""
        record = self.records[place.template]
        if record["t"] in ("op", "in", "out"):
            return ("op", record["p"], tuple(record["v"]))
        return ("module", place.path) if place.label else (record["t"], record.get("r", ""))

    def _corresponding(self, pair: _PairOfLevels, old: _Place, new: _Place) -> Iterator[_PairOfLevels]:
        count = self.templates.totals[old.template].operations
        if old.template == new.template:
            pair.same += count
            return
        before, after = self.records[old.template], self.records[new.template]
        if before["t"] == after["t"] == "op":
            if before["a"] != after["a"]:
                text = f"arguments of {self._name(0, old)}: {self._change(before['a'], after['a'])}"
                self._add(pair, "changed", text.replace(OPERAND_MARK, "%"), old.offset, new.offset)
            else:
                pair.same += 1
            return
        if before["t"] == after["t"] == "region":
            self._regions(pair, before, after, old, new)
            return
        if "region" in (before["t"], after["t"]):
            was, now = self._describe(0, old), self._describe(1, new)
            self._add(
                pair, "changed", f"{old.path or old.label}: {self._change(was, now)}", old.offset, new.offset
            )
            return
        yield _PairOfLevels(old, new)

    def _regions(
        self,
        pair: _PairOfLevels,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        old: _Place,
        new: _Place,
    ) -> None:
        changes: list[str] = []
        if before["r"] != after["r"]:
            changes.append(f"kind {self._change(before['r'], after['r'])}")
        if before.get("w") != after.get("w"):
            runs = [side.get("w") or "its operations" for side in (before, after)]
            changes.append(f"run by {self._change(*runs)}")
        if before["h"] != after["h"]:
            changes.append("attributes")
        if before["e"] != after["e"]:
            changes.append("another body")
        if changes:
            self._add(pair, "changed", f"{self._name(1, new)}: {', '.join(changes)}", old.offset, new.offset)
        else:
            pair.same += self.templates.totals[old.template].operations

    def _replaced(self, pair: _PairOfLevels, old: list[_Place], new: list[_Place]) -> None:
        where = f" in {pair.right.path}" if pair.right.path else ""
        if old and new:
            regions = [place for place in new if self.records[place.template]["t"] == "region"]
            text = f"{self._change(self._list(0, old), self._list(1, new))}{where}"
            self._add(pair, "changed", text, old[0].offset, (regions or new)[0].offset)
        else:
            self._one_sided(pair, 0 if old else 1, old or new, where)

    def _one_sided(self, pair: _PairOfLevels, side: int, places: list[_Place], where: str) -> None:
        """Record boxes that a level of one program has and the corresponding level of the other has not."""
        absent: list[_Place] = []
        elsewhere: list[_Place] = []
        fused: list[_Place] = []
        taken: dict[int, None] = {}
        for place in places:
            occurrences = self._on_the_other_side(side, place)
            slots = [o.region for o in occurrences if o is not None and o.region is not None]
            if not occurrences or None in occurrences:
                absent.append(place)
            elif len(slots) == len(occurrences):
                fused.append(place)
                taken |= dict.fromkeys(slots)
            else:
                elsewhere.append(place)
        if fused:
            around = [f"region {self.names[1 - side][slot]}" for slot in taken]
            texts = self._list(side, fused), _shortened(around)
            slots = fused[0].offset, next(iter(taken))
            before, after = reversed(texts) if side else texts
            self._add(
                pair,
                "changed",
                f"{self._change(before, after)}{where}",
                *(reversed(slots) if side else slots),
            )
        name = ("left", "right")[side]
        for text, group in (
            (f"only on the {name}", absent),
            (f"on the {name}, elsewhere on the other side", elsewhere),
        ):
            if group:
                slot = group[0].offset
                text = f"{text}: {self._list(side, group)}{where}"
                self._add(pair, name, text, None if side else slot, slot if side else None)

    def _on_the_other_side(self, side: int, place: _Place) -> list[_Occurrence | None]:
        """Return where the other program has each operation of a box: the one of the same name, operator and types."""
        others = self._occurrences(1 - side)
        occurrences: list[_Occurrence | None] = []
        for name, own in self._operations(side, place.template, place.offset):
            other = others.get(name)
            is_same = other is not None and self._callee(other.template) == self._callee(own.template)
            occurrences.append(other if is_same else None)
        return occurrences

    def _callee(self, operation: int) -> tuple[Any, ...]:
        record = self.records[operation]
        return record["p"], tuple(record["v"])

    def _occurrences(self, side: int) -> dict[str, _Occurrence]:
        if side not in self._by_name:
            self._by_name[side] = dict(self._operations(side, self.root[side], 0))
        return self._by_name[side]

    def _operations(self, side: int, template: int, offset: int) -> Iterator[tuple[str, _Occurrence]]:
        """Yield the operations in a box by name, in order."""
        stack: list[tuple[int, int, int | None]] = [(template, offset, None)]
        while stack:
            number, start, region = stack.pop()
            record = self.records[number]
            if record["t"] == "op":
                yield self.names[side][start], _Occurrence(number, region)
            if record["t"] == "region":
                region, start = (start if region is None else region), start + 1
            inner: list[tuple[int, int, int | None]] = []
            for row in record.get("c", ()):
                inner.append((row[0], start, region))
                start += self.sizes[row[0]]
            stack += reversed(inner)

    def _list(self, side: int, places: list[_Place]) -> str:
        return _shortened([self._describe(side, place) for place in places])

    def _describe(self, side: int, place: _Place) -> str:
        record = self.records[place.template]
        if record["t"] == "region":
            name = self._name(side, place)
            return f"region {name}" if name.startswith(record["r"]) else f"region {name} ({record['r']})"
        if record["t"] in ("op", "in", "out"):
            return self._name(side, place)
        operations = self.templates.totals[place.template].operations
        return f"{place.label or place.path or 'a part'} ({counted(operations, 'operation')})"

    def _name(self, side: int, place: _Place) -> str:
        return self.names[side][place.offset]

    def _add(self, pair: _PairOfLevels, sort: str, text: str, left: int | None, right: int | None) -> None:
        """Record a difference, with the slots of the first names of what it is about."""
        pair.differences.append({"sort": sort, "text": text, "left": left, "right": right})


def _shortened(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + more


def _joined(path: str, label: str) -> str:
    return f"{path}.{label}" if path and label else path or label
