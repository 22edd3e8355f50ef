"""The document of a report: programs with their hierarchy, decisions, costs and findings, and what differs between two."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument
from dovetail.fusion.coverage import coverage
from dovetail.fusion.ledger import Ledger, explain, ledger_of
from dovetail.ir.graph_module import pause_gc
from dovetail.ir.text_tables import amount, counted, percent
from dovetail.outlining.inline import inline
from dovetail.outlining.region import regions
from dovetail.reporting.candidate_rows import CandidateRows
from dovetail.reporting.comparison import compare_programs
from dovetail.reporting.findings import fallbacks, findings
from dovetail.reporting.hierarchy import HierarchyBuilder
from dovetail.reporting.level_templates import Box, Totals
from dovetail.reporting.measured_times import (
    Ranges,
    plan_times,
    profile_times,
    shared_labels,
    whole_graph_time,
)
from dovetail.tuning.plan import Plan

_LOG = logging.getLogger(__name__)
_MOST_LINES = 50


@dataclass(frozen=True)
class ReportSide:
    """Graphs of one side of a report by name, with the plan and the profile that have measured times of their regions."""

    label: str
    graphs: Sequence[GraphModule]
    names: Sequence[str]
    diagnostics: Sequence[str] = ()
    plan: Plan | None = None
    profile: Ranges | None = None

    @property
    def is_fused(self) -> bool:
        """Whether the program has regions, or rules were applied to it."""
        return any(regions(gm) or ledger_of(gm).was_fused for gm in self.graphs)

    def labelled(self, label: str) -> ReportSide:
        """Return the side under another label."""
        names = [label if name == self.label else name for name in self.names]
        return replace(self, label=label, names=names)


def make_document(title: str, side: ReportSide, other: ReportSide | None, version: str) -> dict[str, Any]:
    """Return the document for one program, or for two that are compared."""
    if other is not None and side.is_fused != other.is_fused:
        labels = ("before fusing", "after fusing")
        side, other = side.labelled(labels[side.is_fused]), other.labelled(labels[other.is_fused])
    builder = HierarchyBuilder()
    with pause_gc():
        pages = [_graph_page(builder, gm, side, k) for k, gm in enumerate(side.graphs)]
        others = [_graph_page(builder, gm, other, k) for k, gm in enumerate(other.graphs)] if other else []
        comparisons: list[dict[str, Any]] = []
        if other is not None:
            boxes = [box for _, box in pages], [box for _, box in others]
            comparisons = list(_comparisons(builder, side, other, *boxes))
    if side.profile is not None and not any(page["measured"] for page, _ in pages):
        raise InvalidArgument(
            "the profile has ranges of other regions only: none is a region of this program."
        )
    return {
        "title": title,
        "about": f"dovetail {version}, torch {torch.__version__}",
        "templates": builder.templates.records,
        "types": list(builder.texts.types),
        "typeBytes": builder.texts.type_bytes,
        "sources": builder.texts.sources.as_document(),
        "graphs": [page for page, _ in pages],
        "other": [page for page, _ in others],
        "comparisons": comparisons,
    }


def _comparisons(
    builder: HierarchyBuilder, side: ReportSide, other: ReportSide, left: Sequence[Box], right: Sequence[Box]
) -> Iterable[dict[str, Any]]:
    """Yield what differs between each graph of one side and its counterpart: that of its name, or at its position."""
    names = list(other.names)
    counterparts = [
        names.index(name) if name in names else min(k, len(names) - 1) for k, name in enumerate(side.names)
    ]
    operations = [builder.templates.totals[box.template].operations for box in right]
    unpaired = [
        {
            "sort": "right",
            "text": f"only on the right: {name} ({counted(count, 'operation')})",
            "left": None,
            "right": None,
            "times": 1,
        }
        for k, (name, count) in enumerate(zip(names, operations, strict=True))
        if k not in counterparts
    ]
    plans = _plan_differences(side, other)
    for k, number in enumerate(counterparts):
        comparison = compare_programs(
            builder.templates, left[k], right[number], left_is_later=side.is_fused and not other.is_fused
        )
        yield {
            "other": number,
            "left": _title(side, k),
            "right": _title(other, number),
            "plans": plans,
            "same": comparison["same"],
            "differences": [*unpaired, *comparison["differences"]],
        }


def _title(side: ReportSide, number: int) -> str:
    return side.label if len(side.names) == 1 else f"{side.label}, {side.names[number]}"


def _graph_page(
    builder: HierarchyBuilder, gm: GraphModule, side: ReportSide, number: int
) -> tuple[dict[str, Any], Box]:
    ledger = explain(gm)
    box = builder.build(gm)
    _LOG.info("report: %d boxes, %d of them distinct", len(box.names), len(builder.templates.records))
    opened = inline(gm) if regions(gm) else gm
    candidates = CandidateRows(opened, ledger, builder.templates, builder.placed)
    rows = candidates.rows()
    apart = candidates.apart(gm)
    _LOG.info("report: %d candidates, %d pairs of neighbors examined", len(rows), len(apart))
    measured = {row["region"]: row for row in _measured(gm, side, ledger)}
    seconds = {name: row["seconds"] for name, row in measured.items()}
    fell_back = fallbacks(ledger)
    page = {
        "label": side.names[number],
        "root": box.template,
        "names": "\n".join(name.replace("\n", " ") for name in box.names),
        "figures": _figures(gm, ledger, builder.templates.totals[box.template], fell_back),
        "findings": findings(gm, box, builder.templates, ledger, seconds),
        "decisions": rows,
        "left_out": candidates.left_out,
        "near": candidates.near.rows,
        "apart": apart,
        "measured": list(measured.values()),
        "planned": [asdict(entry) for entry in ledger.measured if entry.seconds is not None][:_MOST_LINES],
        "fell_back": fell_back[:_MOST_LINES],
        "diagnostics": list(side.diagnostics[:_MOST_LINES]),
    }
    return page, box


def _measured(gm: GraphModule, side: ReportSide, ledger: Ledger) -> Iterable[Mapping[str, Any]]:
    yield from whole_graph_time(gm, ledger.measured)
    if side.plan is not None:
        yield from plan_times(gm, side.plan)
    if side.profile is not None:
        yield from profile_times(gm, side.profile, shared_labels(side.graphs))


def _figures(
    gm: GraphModule, ledger: Ledger, totals: Totals, fell_back: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return the key figures: label, value, and what to know about it."""
    outermost = regions(gm)
    bodies = len({id(region.body) for region in outermost})
    backends = sorted({region.backend for region in regions(gm, nested=True) if region.backend})
    saved = totals.bytes_before - totals.bytes_after
    covered = coverage(gm)
    inside, total = covered.inside, covered.total
    shares = f"{percent(inside.bytes, total.bytes)} of the bytes, {percent(inside.flops, total.flops)} of the flops"
    rows = [
        (
            "region" if len(outermost) == 1 else "regions",
            f"{len(outermost):,}",
            f"{bodies:,} distinct" if bodies != len(outermost) else "",
        ),
        ("of the operations in regions", percent(inside.operations, total.operations), shares),
        ("saved", amount(saved), f"of {amount(totals.bytes_before)}, modelled"),
        (
            "launches saved",
            f"{totals.launches_before - totals.launches_after:,}",
            f"of {totals.launches_before:,}",
        ),
    ]
    if ledger.lowered or backends:
        lowered = sum(region.backend is not None for region in outermost)
        rows.append(
            (
                "region lowered" if lowered == 1 else "regions lowered",
                f"{lowered:,}",
                f"by {', '.join(backends)}" if backends else "",
            )
        )
        rows.append(("fell back", f"{len(fell_back):,}", ""))
    return rows


def _plan_differences(side: ReportSide, other: ReportSide) -> list[str]:
    if side.plan is None and other.plan is None:
        return []
    return (side.plan or Plan()).diff(other.plan or Plan()).splitlines()[:_MOST_LINES]
