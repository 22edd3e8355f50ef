"""The first page of a ledger: at most 40 lines for any model, so that one look answers what was fused and what was not.

Every section has a bound of its own. Where the page would be longer than 40 lines, tighter ones hold, which add up to 40.
Blank lines separate the sections where they fit. A section without content has no heading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from dovetail import rules
from dovetail.fusion.coverage import Coverage, Extent, coverage
from dovetail.fusion.ledger_entries import Accepted, Declined, Lowered, Saved, matched_text
from dovetail.fusion.outside import OutsideGroup, outside_operations
from dovetail.ir.meta_keys import LEDGER
from dovetail.ir.module_paths import join_path_list, path_of
from dovetail.ir.text_tables import align, amount, counted, cut, format_seconds, generic, percent, quoted
from dovetail.outlining.region import call_of, lowering_view, walk

if TYPE_CHECKING:
    from dovetail.fusion.ledger import Ledger

MOST_LINES = 40
_FEW_LINES = 12
GLOSSARY = "docs/glossary.md"

_WIDTH = 140
_WHERE = 60
_MOST_UNMATCHED = 8

# Outcomes of code that is used nevertheless.
_STILL_USED = ("untried", "calibration", "settle")


@dataclass(frozen=True)
class _Bounds:
    """How many rows of each sort are shown."""

    kinds: int = 12
    nested: int = 4
    groups: int = 6
    near: int = 3
    errors: int = 3
    backends: int = 3
    faults: int = 4
    diagnostics: int = 5
    times: int = 4
    near_lines: int = 2


_TIGHT = _Bounds(5, 1, 3, 1, 1, 2, 1, 2, 1, 1)


def first_page(ledger: Ledger) -> str:
    """Return the page: regions and coverage, what is in none and why, lowering, recompilations, measured times."""
    parts = [coverage(graph) for graph in ledger.graphs]
    whole = Coverage.of(parts)
    is_shown = _has_decisions(ledger) or whole.regions
    outside = outside_operations(
        parts if is_shown else (), ledger.declined, ledger.never, is_fused=ledger.was_fused
    )
    groups = outside.grouped()
    sections = _sections(ledger, whole, groups, _Bounds())
    if sum(map(len, sections)) > MOST_LINES:
        sections = _sections(ledger, whole, groups, _TIGHT)
    lines = [line for section in sections for line in section]
    has_room = _FEW_LINES < len(lines) <= MOST_LINES + 1 - len(sections)
    return "\n\n".join("\n".join(section) for section in sections) if has_room else "\n".join(lines)


def _sections(
    ledger: Ledger, whole: Coverage, groups: list[OutsideGroup], bounds: _Bounds
) -> list[list[str]]:
    sections = [
        _regions(ledger, whole, bounds),
        _outside(whole, groups, bounds) if ledger.graphs else _reasons(ledger, bounds),
        _uncounted(whole),
        _near_misses(ledger, bounds),
        _rules(ledger, bounds),
        _lowering(ledger, bounds),
        _diagnostics(ledger, bounds),
        _times(ledger, bounds),
        _pointer(ledger),
    ]
    return [section for section in sections if section]


@dataclass(frozen=True)
class _KindRow:
    """A row of the table of regions."""

    kind: str
    regions: int
    extent: Extent
    saved: Saved | None
    where: str = ""


def _regions(ledger: Ledger, whole: Coverage, bounds: _Bounds) -> list[str]:
    """Return what became regions by kind: how many, what share of the graph they are, what they save, and where."""
    if not ledger.graphs:
        history = [_KindRow(kind, s.regions, Extent(), s) for kind, s in _by_kind(ledger.saved).items()]
        return _table(ledger, _ranked(history), [], whole, bounds) if history else _nothing(ledger)
    where = _modules_by_kind(ledger.graphs)
    saved, saved_within = _savings(ledger)
    rows = [
        _KindRow(k.kind, k.regions, k.extent, saved.get(k.kind), where.get(k.kind, "")) for k in whole.kinds
    ]
    nested = [_KindRow(k.kind, k.regions, k.extent, saved_within.get(k.kind)) for k in whole.nested]
    return _table(ledger, _ranked(rows), _ranked(nested), whole, bounds) if rows else _nothing(ledger)


def _by_kind(entries: Iterable[Saved]) -> dict[str, Saved]:
    sums: dict[str, Saved] = {}
    for entry in entries:
        sums[entry.kind] = entry.plus(sums.get(entry.kind))
    return sums


def _savings(ledger: Ledger) -> tuple[dict[str, Saved], dict[str, Saved]]:
    """Return by kind what regions save: the outermost ones with all inside them, and those inside others alone.

    Only regions that are there count. Where the ledger has not kept the entry of each, the sums over its history are shown,
    which do not distinguish the two.
    """
    outermost: list[Saved] = []
    within: list[Saved] = []
    for graph in ledger.graphs:
        history: Any = graph.meta.get(LEDGER)
        entries: dict[str, Accepted] = {a.region: a for a in history.accepted} if history is not None else {}
        for node in graph.graph.nodes:
            call = call_of(node.meta)
            if call is None:
                continue
            inner = [(m.name, c) for m in walk(call) if (c := call_of(m.meta)) is not None]
            for name, own in ((node.name, call), *inner):
                entry = entries.get(name)
                if entry is None:
                    if own.rule is not None:
                        return _by_kind(ledger.saved), {}
                    continue
                part = Saved(
                    "", own.identity.kind, 1, entry.bytes_saved, entry.launches_saved, entry.bytes_recomputed
                )
                outermost.append(replace(part, kind=call.identity.kind))
                if own is not call:
                    within.append(part)
    return _by_kind(outermost), _by_kind(within)


def _nothing(ledger: Ledger) -> list[str]:
    graphs = f"{counted(len(ledger.graphs), 'graph')}: " if len(ledger.graphs) > 1 else ""
    once = sum(s.regions for s in ledger.saved)
    if once:
        return [
            f"{graphs}no regions: {counted(once, 'region')} of before {'is' if once == 1 else 'are'} inlined"
        ]
    if not (
        ledger.rounds
        or ledger.refused
        or ledger.folded
        or ledger.errors
        or ledger.lowered
        or ledger.unmatched
    ):
        return [f"{graphs}nothing was fused, and nothing was declined"]
    return [f"{graphs}no regions were made"]


def _ranked(rows: list[_KindRow]) -> list[_KindRow]:
    def weight(row: _KindRow) -> tuple[int, int, int, int, str]:
        launches, moved = (row.saved.launches_saved, row.saved.bytes_saved) if row.saved else (0, 0)
        return -launches, -moved, -row.extent.flops, -row.regions, row.kind

    return sorted(rows, key=weight)


def _table(
    ledger: Ledger, rows: list[_KindRow], nested: list[_KindRow], whole: Coverage, bounds: _Bounds
) -> list[str]:
    total = whole.total
    regions = sum(row.regions for row in rows)
    rounds = f" in {counted(ledger.rounds, 'round')}" if ledger.rounds else ""
    graphs = f" of {counted(len(ledger.graphs), 'graph')}" if len(ledger.graphs) > 1 else ""
    head = f"{counted(regions, 'region')}{graphs}{rounds}"
    if nested:
        head += f", with {counted(sum(row.regions for row in nested), 'region')} inside them"
    if total.operations:
        shares = [f"{whole.inside.operations:,} of {counted(total.operations, 'operation')}"]
        shares += [f"{percent(whole.inside.bytes, total.bytes)} of bytes"] if total.bytes else []
        shares += [f"{percent(whole.inside.flops, total.flops)} of flops"] if total.flops else []
        head += f": {', '.join(shares)}"

    def cells(row: _KindRow, indent: str = "") -> tuple[str, ...]:
        s, extent = row.saved, row.extent
        return (
            f"{indent}{row.kind}",
            str(row.regions),
            percent(extent.operations, total.operations) if total.operations else "",
            percent(extent.bytes, total.bytes) if total.bytes else "",
            percent(extent.flops, total.flops) if total.flops else "",
            str(s.launches_saved) if s else "",
            amount(s.bytes_saved) if s else "",
            amount(s.bytes_recomputed) if s and s.bytes_recomputed else "",
            row.where,
        )

    titles = (
        "kind",
        "regions",
        "operations",
        "bytes",
        "flops",
        "launches saved",
        "bytes saved",
        "recomputed",
    )
    lines = [cells(row) for row in rows[: bounds.kinds]]
    rest = rows[bounds.kinds :]
    if rest:
        other = _KindRow(f"({counted(len(rest), 'other kind')})", *_sum(rest))
        lines.append(cells(other))
    if len(rows) > 1:
        lines.append(cells(_KindRow("all", *_sum(rows))))
    for row in nested[: bounds.nested]:
        lines.append(cells(row, "within: "))
    left = nested[bounds.nested :]
    if left:
        lines.append(cells(_KindRow(f"within: ({counted(len(left), 'other kind')})", *_sum(left))))
    columns = [k for k in range(9) if k < 2 or any(line[k] for line in lines)]
    header = (*titles, "where")
    table = [[line[k] for k in columns] for line in (header, *lines)]
    is_left = {columns.index(k) for k in (0, 8) if k in columns}
    right = [k for k in range(len(columns)) if k not in is_left]
    return [head, *(cut(line, _WIDTH) for line in align(table, right=right))]


def _sum(rows: Sequence[_KindRow]) -> tuple[int, Extent, Saved | None]:
    saved: Saved | None = None
    extent = Extent()
    for row in rows:
        extent += row.extent
        saved = row.saved.plus(saved) if row.saved else saved
    return sum(row.regions for row in rows), extent, saved


def _modules_by_kind(graphs: Sequence[GraphModule]) -> dict[str, str]:
    """Return in which modules the regions of each kind are; "" where all are at the top level."""
    paths: dict[str, dict[str, None]] = {}
    for graph in graphs:
        for node in graph.graph.nodes:
            call = call_of(node.meta)
            if call is not None:
                paths.setdefault(call.identity.kind, {})[path_of(node.meta)] = None
    return {
        kind: join_path_list(own, most=2, width=_WHERE) if set(own) != {""} else ""
        for kind, own in paths.items()
    }


def _outside(whole: Coverage, groups: list[OutsideGroup], bounds: _Bounds) -> list[str]:
    """Return what is in no region, by reason, with one example of each."""
    if not groups:
        return []
    total, inside = whole.total, whole.inside
    shares = [counted(total.operations - inside.operations, "operation")]
    shares += [f"{percent(total.bytes - inside.bytes, total.bytes)} of bytes"] if total.bytes else []
    shares += [f"{percent(total.flops - inside.flops, total.flops)} of flops"] if total.flops else []
    lines = [f"in no region: {', '.join(shares)}"]
    views = [group for group in groups if group.is_free]
    shown = [group for group in groups if not group.is_free]
    for group in (*shown[: bounds.groups], *views):
        lines += group.lines(whole)
    others = shown[bounds.groups :]
    if others:
        count = sum(len(group.operations) for group in others)
        lines.append(f"  {count:>5}  for {counted(len(others), 'other reason')}: see `.outside()`")
    return lines


def _uncounted(whole: Coverage) -> list[str]:
    """Return the operators whose flops are not known, if there are any."""
    if not whole.uncounted:
        return []
    shown = [f"{name} ({counted(count, 'time')})" for name, count in whole.uncounted[:3]]
    more = f" and {counted(len(whole.uncounted) - 3, 'other operator')}" if len(whole.uncounted) > 3 else ""
    return [cut(f"flops not known, one counted for each element: {', '.join(shown)}{more}", _WIDTH)]


def _has_decisions(ledger: Ledger) -> bool:
    return bool(ledger.refused or ledger.folded or ledger.never or ledger.errors or ledger.unmatched)


def _reasons(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return why candidates were declined, for a ledger without a graph."""
    ranked = sorted(ledger.refused, key=lambda r: (-r.count, r.rule, r.reason))
    lines = [f"  {row.count:>5}  {row.rule}: {cut(row.reason, _WIDTH)}" for row in ranked[: bounds.groups]]
    if len(ranked) > bounds.groups:
        rest = sum(r.count for r in ranked[bounds.groups :])
        lines.append(f"  {rest:>5}  for {counted(len(ranked) - bounds.groups, 'other reason')}")
    return ["declined:", *lines] if lines else []


def _near_misses(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return the patterns that almost matched operations that are not all in regions: those to act on."""
    nearest: dict[tuple[str, str], Declined] = {}
    alike: dict[tuple[str, str], int] = {}
    for entry in ledger.declined:
        if entry.folded or not entry.wanted or 2 * entry.matched < entry.wanted:
            continue
        key = (entry.rule, generic(entry.reason))
        alike[key] = alike.get(key, 0) + 1
        if key not in nearest or entry.matched > nearest[key].matched:
            nearest[key] = entry
    ranked = sorted(nearest.items(), key=lambda item: (-item[1].matched / item[1].wanted, -item[1].matched))
    lines: list[str] = []
    for key, entry in ranked[: bounds.near]:
        more = f", and {counted(alike[key] - 1, 'time')} more" if alike[key] > 1 else ""
        near = f"{matched_text(entry.matched, entry.wanted)} at {quoted(entry.nodes, 2)}{more}"
        near += ", but" if entry.matched >= entry.wanted else ":"
        if bounds.near_lines == 1:
            lines.append(cut(f"  {entry.rule}: {near} {entry.reason}", _WIDTH))
        else:
            lines += [cut(f"  {entry.rule}: {near}", _WIDTH), cut(f"    {entry.reason}", _WIDTH)]
    if not lines:
        return []
    more = f" (the nearest {bounds.near} of {len(ranked)})" if len(ranked) > bounds.near else ""
    return [f"near misses{more}:", *lines]


def _rules(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return the rules that failed and those that matched nothing."""
    lines = [
        cut(f"rule '{failure.rule}' failed in round {failure.round}: {failure.error}", _WIDTH)
        for failure in ledger.errors[: bounds.errors]
    ]
    if len(ledger.errors) > bounds.errors:
        lines.append(
            f"and {counted(len(ledger.errors) - bounds.errors, 'other failure')} of rules: see `.errors`"
        )
    return lines + _unmatched(ledger)


def _unmatched(ledger: Ledger) -> list[str]:
    """Return the rules that matched nothing; of many, only the user's: most library rules match nothing in one graph."""
    names = list(ledger.unmatched)
    if len(names) > _MOST_UNMATCHED:
        library = {rule.name for rule in rules.DEFAULT}
        names = [name for name in names if name not in library]
    if not names:
        return []
    more = f" and {len(names) - _MOST_UNMATCHED} more" if len(names) > _MOST_UNMATCHED else ""
    return [cut(f"matched nothing: {', '.join(names[:_MOST_UNMATCHED])}{more}", _WIDTH)]


def _lowering(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return what backends compiled, what runs as it is, and what could not be used."""
    compiled: dict[str, list[Lowered]] = {}
    faults: dict[tuple[str, str, str], list[Lowered]] = {}
    for entry in ledger.lowered:
        if entry.outcome in ("compiled", "disk"):
            compiled.setdefault(entry.backend, []).append(entry)
        else:
            faults.setdefault((entry.backend, entry.outcome, generic(entry.reason)), []).append(entry)
    lines: list[str] = []
    for backend, entries in list(compiled.items())[: bounds.backends]:
        calls = sum({e.region: e.calls for e in entries}.values())
        read = sum(e.outcome == "disk" for e in entries)
        from_disk = f", {read} from disk" if read else ""
        seconds = sum(e.seconds for e in entries)
        pieces = counted(len(entries), "piece")
        lines.append(
            f"{backend}: {pieces} of code for {counted(calls, 'region')} in {seconds:.1f} s{from_disk}"
        )
    if len(compiled) > bounds.backends:
        others = ", ".join(list(compiled)[bounds.backends :])
        lines.append(cut(f"and code by {others}: see `.lowered`", _WIDTH))
    left = _run_as_they_are(ledger.graphs)
    if left:
        lines.append(left)
    for (backend, outcome, _), alike in list(faults.items())[: bounds.faults]:
        first = alike[0]
        regions = sum({e.region: e.calls for e in alike}.values())
        more = f" and {counted(regions - 1, 'other')}" if regions > 1 else ""
        where = f"'{first.region}'{more}, " if first.region else ""
        used = "" if outcome in _STILL_USED else "not "
        lines.append(cut(f"  {used}{backend}: {where}{outcome}: {first.reason}", _WIDTH))
    if len(faults) > bounds.faults:
        lines.append(f"  and {counted(len(faults) - bounds.faults, 'other reason')}: see `.lowered`")
    return lines


def _run_as_they_are(graphs: Sequence[GraphModule]) -> str:
    """Return which regions of lowered graphs no backend runs; "" if there are none or nothing was lowered."""
    kinds: dict[str, int] = {}
    for graph in graphs:
        lowering = lowering_view(graph)
        for node in graph.graph.nodes if lowering is not None else ():
            call = call_of(node.meta)
            if call is None or lowering is None or node.name in lowering.assigned:
                continue
            if not any(member.name in lowering.assigned for member in walk(call)):
                kinds[call.identity.kind] = kinds.get(call.identity.kind, 0) + 1
    if not kinds:
        return ""
    shown = ", ".join(f"{kind} ({count})" for kind, count in list(kinds.items())[:4])
    more = f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else ""
    return f"by no backend: {counted(sum(kinds.values()), 'region')}, which run as they are: {shown}{more}"


def _diagnostics(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return recompilations, fallbacks and limits with their causes, equal causes once."""
    alike: dict[str, list[str]] = {}
    for text in ledger.diagnostics:
        alike.setdefault(generic(text), []).append(text)
    lines: list[str] = []
    for texts in list(alike.values())[: bounds.diagnostics]:
        times = f" ({len(texts)} times alike)" if len(texts) > 1 else ""
        lines.append(cut(f"  {texts[0]}", 2 * _WIDTH - len(times)) + times)
    if len(alike) > bounds.diagnostics:
        lines.append(f"  and {counted(len(alike) - bounds.diagnostics, 'other event')}: see `.diagnostics`")
    return ["since it was compiled:", *lines] if lines else []


def _times(ledger: Ledger, bounds: _Bounds) -> list[str]:
    """Return the times that an applied plan has measured, the longest first."""
    timed = sorted((m for m in ledger.measured if m.seconds is not None), key=lambda m: -(m.seconds or 0))
    lines: list[str] = []
    for m in timed[: bounds.times]:
        second = f"; next best {m.runner_up}" if m.runner_up else ""
        if m.runner_up and m.runner_up_seconds is not None:
            second += f" {format_seconds(m.runner_up_seconds)}"
        chosen = f"{m.choice} {format_seconds(m.seconds or 0)}"
        lines.append(cut(f"  {m.scope} {m.label}: {chosen}{second}", _WIDTH))
    if len(timed) > bounds.times:
        lines.append(f"  and {counted(len(timed) - bounds.times, 'other decision')}: see `.measured`")
    return ["measured by the plan:", *lines] if lines else []


def _pointer(ledger: Ledger) -> list[str]:
    """Return where to read on, if anything was declined."""
    total = sum(r.count for r in ledger.refused) + ledger.folded
    if not total:
        return []
    # Without a graph there is nothing to look up.
    ask = (
        "`.declined(rule=, module=, kind=)`, `.outside()`, `.why_not(...)`"
        if ledger.graphs
        else "`.declined(rule=, kind=)`"
    )
    return [f"{counted(total, 'time')} declined; ask {ask}; terms: {GLOSSARY}"]
