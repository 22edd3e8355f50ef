"""The ledger as a short table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail import rules

if TYPE_CHECKING:
    from dovetail.fusion.ledger import Declined, Ledger, Lowered

_MOST_KINDS = 20
_MOST_REASONS = 15
_MOST_PLACES = 2
_MOST_UNMATCHED = 8
_WIDTH = 100

# Outcomes of code that is used nevertheless.
_STILL_USED = ("untried", "calibration", "settle")


_QUOTED = re.compile(r"'[^']*'")
_CHAIN = re.compile(r"\S+( -> \S+)+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?![\w])")
_ENUMERATION = re.compile(r"'…'((,| and) ('…'|N more))+")


def generic(reason: str) -> str:
    """Return a reason without names and numbers, so that reasons of one sort are equal."""
    text = _NUMBER.sub("N", _CHAIN.sub("…", _QUOTED.sub("'…'", reason)))
    return _ENUMERATION.sub("'…'", text)


def table(ledger: Ledger) -> str:
    """Return a table of what was accepted by kind, what was declined by rule and reason with places, and what failed."""
    unmatched = _unmatched(ledger)
    if not (ledger.saved or ledger.refused or ledger.folded or ledger.errors or ledger.lowered):
        return "\n".join(["nothing was fused, and nothing was declined", *unmatched, *ledger.diagnostics])
    lines = _accepted(ledger)
    lines += _declined(ledger)
    for failure in ledger.errors:
        lines.append(f"rule '{failure.rule}' failed in round {failure.round}: {_cut(failure.error, _WIDTH)}")
    return "\n".join([*lines, *unmatched, *_lowered(ledger), *ledger.diagnostics])


def _unmatched(ledger: Ledger) -> list[str]:
    """Return the rules that matched nothing; of many, only the user's: most library rules match nothing in one graph."""
    names = list(ledger.unmatched)
    if len(names) > _MOST_UNMATCHED:
        library = {rule.name for rule in rules.DEFAULT}
        names = [name for name in names if name not in library]
    if not names:
        return []
    more = f" and {len(names) - _MOST_UNMATCHED} more" if len(names) > _MOST_UNMATCHED else ""
    return [f"matched nothing: {', '.join(names[:_MOST_UNMATCHED])}{more}"]


def _lowered(ledger: Ledger) -> list[str]:
    """Return a line for each backend with the bodies it compiled and their calls, then what could not be used."""
    compiled: dict[str, list[Lowered]] = {}
    failed: dict[tuple[str, str, str], list[Lowered]] = {}
    for entry in ledger.lowered:
        if entry.outcome in ("compiled", "disk"):
            compiled.setdefault(entry.backend, []).append(entry)
        else:
            failed.setdefault((entry.backend, entry.outcome, generic(entry.reason)), []).append(entry)
    lines: list[str] = []
    for backend, entries in compiled.items():
        calls = sum({e.region: e.calls for e in entries}.values())
        read = sum(e.outcome == "disk" for e in entries)
        from_disk = f", {read} from disk" if read else ""
        seconds = sum(e.seconds for e in entries)
        bodies = _counted(len(entries), "piece")
        lines.append(
            f"{backend}: {bodies} of code for {_counted(calls, 'region')} in {seconds:.1f} s{from_disk}"
        )
    for (backend, outcome, _), alike in list(failed.items())[:_MOST_REASONS]:
        first = alike[0]
        more = f" and {_counted(len(alike) - 1, 'other')}" if len(alike) > 1 else ""
        where = f"'{first.region}'{more}, " if first.region else ""
        used = "" if outcome in _STILL_USED else "not "
        lines.append(f"  {used}{backend}: {where}{outcome}: {_cut(first.reason, _WIDTH)}")
    return lines


def _accepted(ledger: Ledger) -> list[str]:
    regions = sum(s.regions for s in ledger.saved)
    if not regions:
        return ["no regions were made"]
    head = f"{_counted(regions, 'region')} in {_counted(ledger.rounds, 'round')}"
    rows = [("kind", "rule", "regions", "launches saved", "bytes saved", "recomputed")]
    ranked = sorted(ledger.saved, key=lambda s: (-s.launches_saved, -s.bytes_saved, s.kind, s.rule))
    for s in ranked[:_MOST_KINDS]:
        again = amount(s.bytes_recomputed) if s.bytes_recomputed else ""
        rows.append((s.kind, s.rule, str(s.regions), str(s.launches_saved), amount(s.bytes_saved), again))
    if len(ranked) > 1:
        rest = ranked[_MOST_KINDS:]
        if rest:
            count = str(sum(s.regions for s in rest))
            rows.append((f"({_counted(len(rest), 'other kind')})", "", count, "", "", ""))
        launches = str(sum(s.launches_saved for s in ledger.saved))
        again = sum(s.bytes_recomputed for s in ledger.saved)
        total = amount(sum(s.bytes_saved for s in ledger.saved))
        rows.append(("all", "", str(regions), launches, total, amount(again) if again else ""))
    if not any(row[5] for row in rows[1:]):
        rows = [row[:5] for row in rows]
    return [head, *_aligned(rows)]


def _declined(ledger: Ledger) -> list[str]:
    total = sum(r.count for r in ledger.refused) + ledger.folded
    if not total:
        return []
    places = _places(ledger.declined)
    lines = [f"{_counted(total, 'time')} declined"]
    # Near-misses of patterns come first: they are the ones to act on.
    near = {key: max(d.matched for d in alike) for key, alike in places.items()}
    ranked = sorted(
        ledger.refused, key=lambda r: (-near.get((r.rule, r.reason), 0), -r.count, r.rule, r.reason)
    )
    for row in ranked[:_MOST_REASONS]:
        lines.append(f"  {row.count:>5}  {row.rule}: {_cut(row.reason, _WIDTH)}")
        alike = places.get((row.rule, row.reason), [])
        lines += [f"         {_place(entry, row.reason)}" for entry in alike[:_MOST_PLACES]]
    if len(ranked) > _MOST_REASONS:
        rest = sum(r.count for r in ranked[_MOST_REASONS:])
        lines.append(f"  {rest:>5}  for {_counted(len(ranked) - _MOST_REASONS, 'other reason')}")
    if ledger.folded:
        what = "part of regions that were made, or less near than another near-miss at the same place"
        lines.append(f"  {ledger.folded:>5}  {what}")
    return lines


def _places(declined: Sequence[Declined]) -> dict[tuple[str, str], list[Declined]]:
    """Return the entries by rule and reason, the nearest misses first."""
    places: dict[tuple[str, str], list[Declined]] = {}
    for entry in sorted(declined, key=lambda d: (-d.matched, d.round)):
        if not entry.folded:
            places.setdefault((entry.rule, generic(entry.reason)), []).append(entry)
    return places


def _place(entry: Declined, reason: str) -> str:
    nodes = ", ".join(entry.nodes[:4]) + (", ..." if entry.size > 4 else "")
    near = f" ({entry.matched} of {entry.wanted} matched)" if entry.wanted else ""
    words = f": {_cut(entry.reason, _WIDTH)}" if entry.reason != reason else ""
    at = f" at {entry.place}" if entry.place and entry.place not in entry.nodes[:1] else ""
    return f"{nodes or '-'}{at}{near}{words}"


def amount(count: int) -> str:
    """Return a number of bytes in a readable unit."""
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
