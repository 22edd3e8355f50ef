"""The ledger as a short table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from dovetail import rules

_MOST_KINDS = 20
_MOST_REASONS = 15
_MOST_PLACES = 2
_MOST_UNMATCHED = 8
_WIDTH = 100

# What is told of code that runs nevertheless.
_USED_ALL_THE_SAME = ("untried", "calibration", "settle")


class LedgerView(Protocol):
    """What a table is made from."""

    @property
    def accepted(self) -> Sequence[Any]: ...
    @property
    def declined(self) -> Sequence[Any]: ...
    @property
    def errors(self) -> Sequence[Any]: ...
    @property
    def saved(self) -> Sequence[Any]: ...
    @property
    def refused(self) -> Sequence[Any]: ...
    @property
    def folded(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def lowered(self) -> Sequence[Any]: ...
    @property
    def unmatched(self) -> Sequence[str]: ...
    @property
    def diagnostics(self) -> Sequence[str]: ...


_QUOTED = re.compile(r"'[^']*'")
_CHAIN = re.compile(r"\S+( -> \S+)+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?![\w])")
_SEVERAL = re.compile(r"'…'((,| and) ('…'|N more))+")


def generic(reason: str) -> str:
    """A reason without names and numbers, so that reasons of one sort are one."""
    text = _NUMBER.sub("N", _CHAIN.sub("…", _QUOTED.sub("'…'", reason)))
    return _SEVERAL.sub("'…'", text)


def table(told: LedgerView) -> str:
    """What was accepted by kind, then what was declined by rule and reason with places, then what failed."""
    unmatched = _unmatched(told)
    if not (told.saved or told.refused or told.folded or told.errors or told.lowered):
        return "\n".join(["nothing was fused, and nothing was declined", *unmatched, *told.diagnostics])
    lines = _accepted(told)
    lines += _declined(told)
    for failure in told.errors:
        lines.append(f"rule '{failure.rule}' failed in round {failure.round}: {_cut(failure.error, _WIDTH)}")
    return "\n".join([*lines, *unmatched, *_lowered(told), *told.diagnostics])


def _unmatched(told: LedgerView) -> list[str]:
    """The rules that matched nothing; of many, those of the user: most of a library match nothing in any one graph."""
    names = list(told.unmatched)
    if len(names) > _MOST_UNMATCHED:
        library = {rule.name for rule in rules.DEFAULT}
        names = [name for name in names if name not in library]
    if not names:
        return []
    more = f" and {len(names) - _MOST_UNMATCHED} more" if len(names) > _MOST_UNMATCHED else ""
    return [f"matched nothing: {', '.join(names[:_MOST_UNMATCHED])}{more}"]


def _lowered(told: LedgerView) -> list[str]:
    """Backends with the bodies they made code for and the calls of those, then what was not to be used."""
    made: dict[str, list[Any]] = {}
    wrong: dict[tuple[str, str, str], list[Any]] = {}
    for entry in told.lowered:
        if entry.outcome in ("compiled", "disk"):
            made.setdefault(entry.backend, []).append(entry)
        else:
            wrong.setdefault((entry.backend, entry.outcome, generic(entry.reason)), []).append(entry)
    lines: list[str] = []
    for backend, entries in made.items():
        calls = sum({e.region: e.calls for e in entries}.values())
        read = sum(e.outcome == "disk" for e in entries)
        kept = f", {read} from disk" if read else ""
        seconds = sum(e.seconds for e in entries)
        bodies = _counted(len(entries), "piece")
        lines.append(f"{backend}: {bodies} of code for {_counted(calls, 'region')} in {seconds:.1f} s{kept}")
    for (backend, outcome, _), alike in list(wrong.items())[:_MOST_REASONS]:
        first = alike[0]
        more = f" and {_counted(len(alike) - 1, 'other')}" if len(alike) > 1 else ""
        where = f"'{first.region}'{more}, " if first.region else ""
        used = "" if outcome in _USED_ALL_THE_SAME else "not "
        lines.append(f"  {used}{backend}: {where}{outcome}: {_cut(first.reason, _WIDTH)}")
    return lines


def _accepted(told: LedgerView) -> list[str]:
    regions = sum(s.regions for s in told.saved)
    if not regions:
        return ["no regions were made"]
    head = f"{_counted(regions, 'region')} in {_counted(told.rounds, 'round')}"
    rows = [("kind", "rule", "regions", "launches saved", "bytes saved", "recomputed")]
    ranked = sorted(told.saved, key=lambda s: (-s.launches_saved, -s.bytes_saved, s.kind, s.rule))
    for s in ranked[:_MOST_KINDS]:
        again = amount(s.bytes_recomputed) if s.bytes_recomputed else ""
        rows.append((s.kind, s.rule, str(s.regions), str(s.launches_saved), amount(s.bytes_saved), again))
    if len(ranked) > 1:
        rest = ranked[_MOST_KINDS:]
        if rest:
            count = str(sum(s.regions for s in rest))
            rows.append((f"({_counted(len(rest), 'other kind')})", "", count, "", "", ""))
        launches = str(sum(s.launches_saved for s in told.saved))
        again = sum(s.bytes_recomputed for s in told.saved)
        total = amount(sum(s.bytes_saved for s in told.saved))
        rows.append(("all", "", str(regions), launches, total, amount(again) if again else ""))
    if not any(row[5] for row in rows[1:]):
        rows = [row[:5] for row in rows]
    return [head, *_aligned(rows)]


def _declined(told: LedgerView) -> list[str]:
    total = sum(r.count for r in told.refused) + told.folded
    if not total:
        return []
    places = _places(told.declined)
    lines = [f"{_counted(total, 'time')} declined"]
    # What a pattern almost matched comes first: that is what one wants to mend.
    near = {key: max(d.matched for d in alike) for key, alike in places.items()}
    ranked = sorted(
        told.refused, key=lambda r: (-near.get((r.rule, r.reason), 0), -r.count, r.rule, r.reason)
    )
    for row in ranked[:_MOST_REASONS]:
        lines.append(f"  {row.count:>5}  {row.rule}: {_cut(row.reason, _WIDTH)}")
        alike = places.get((row.rule, row.reason), [])
        lines += [f"         {_place(entry, row.reason)}" for entry in alike[:_MOST_PLACES]]
    if len(ranked) > _MOST_REASONS:
        rest = sum(r.count for r in ranked[_MOST_REASONS:])
        lines.append(f"  {rest:>5}  for {_counted(len(ranked) - _MOST_REASONS, 'other reason')}")
    if told.folded:
        what = "part of regions that were made, or less near than another near-miss at the same place"
        lines.append(f"  {told.folded:>5}  {what}")
    return lines


def _places(declined: Sequence[Any]) -> dict[tuple[str, str], list[Any]]:
    """Entries by rule and reason, the nearest misses first."""
    found: dict[tuple[str, str], list[Any]] = {}
    for entry in sorted(declined, key=lambda d: (-d.matched, d.round)):
        if not entry.folded:
            found.setdefault((entry.rule, generic(entry.reason)), []).append(entry)
    return found


def _place(entry: Any, reason: str) -> str:
    nodes = ", ".join(entry.nodes[:4]) + (", ..." if entry.size > 4 else "")
    near = f" ({entry.matched} of {entry.wanted} matched)" if entry.wanted else ""
    words = f": {_cut(entry.reason, _WIDTH)}" if entry.reason != reason else ""
    at = f" at {entry.place}" if entry.place and entry.place not in entry.nodes[:1] else ""
    return f"{nodes or '-'}{at}{near}{words}"


def amount(count: int) -> str:
    """Bytes in a unit that keeps the number short."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cut(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
