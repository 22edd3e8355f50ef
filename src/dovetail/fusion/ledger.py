"""The ledger: what was fused, what was not and why, carried by the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch.fx import GraphModule, Node

from dovetail.errors import DovetailError, InvalidArgument, checked_call
from dovetail.fusion.candidates import RuleFailure
from dovetail.fusion.coverage import Coverage, coverage
from dovetail.fusion.ledger_entries import (
    Accepted,
    Declined,
    DeclinedEntries,
    EntryScope,
    Lowered,
    Measured,
    Saved,
    Tally,
    read_entry,
    read_never,
    read_texts,
)
from dovetail.fusion.ledger_report import first_page
from dovetail.fusion.operation_locations import FusionRecord, Reasons
from dovetail.fusion.outside import OutsideOperations, outside_operations
from dovetail.fusion.why_not_parts import why_not
from dovetail.fusion.why_not_rule import why_not_rule
from dovetail.ir.graph_module import GraphOwner, GraphParts, graphs_of, pause_gc
from dovetail.ir.html_repr import html_box, html_details, html_text
from dovetail.ir.meta_keys import LEDGER
from dovetail.outlining.bodies import with_module_prefix
from dovetail.outlining.region import lowering_view
from dovetail.rules.rule import UNLIMITED, Limits, Rule, RuleSet

# How many entries are stored in full; beyond that only sums grow.
MOST = 1000
_VERSION = 2
_READABLE = (1, 2)


@dataclass(frozen=True)
class Ledger:
    """The history of fusing a graph, which passes, copies and pickles preserve.

    `accepted`, `declined` and `errors` have the entries in order, up to a bound; `saved` and `refused` are sums over
    all of them, including those beyond the bound; refusals that add no information are only counted, in `folded`.
    `declined(rule=, module=, kind=)` selects refusals, and `outside()` has the operations in no region.
    `rounds` counts the rounds that changed something. A region that was inlined stays in the history. `never` has the
    operations that the user excluded, and why; `limits` are those of the last call of `fuse`. `lowered` is what
    backends did since the graph was last lowered, later specializations included. `unmatched` are the rules that
    never proposed or declined anything; `diagnostics` are the recompilations, fallbacks and limits of a compiled
    model; `measured` are the times that an applied plan has. `str()` is a page of at most 40 lines.
    """

    accepted: tuple[Accepted, ...] = ()
    declined: DeclinedEntries = field(default_factory=DeclinedEntries)
    errors: tuple[RuleFailure, ...] = ()
    saved: tuple[Saved, ...] = ()
    refused: tuple[Tally, ...] = ()
    folded: int = 0
    rounds: int = 0
    limits: Limits = UNLIMITED
    never: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    lowered: tuple[Lowered, ...] = ()
    unmatched: tuple[str, ...] = ()
    diagnostics: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    _rules: RuleSet | None = field(default=None, repr=False, compare=False)
    _graphs: tuple[GraphModule, ...] = field(default=(), repr=False, compare=False)
    _counted: frozenset[int] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = self._rules or RuleSet()
        names = {*(r.name for r in rules), *(s.rule for s in self.saved), *(t.rule for t in self.refused)}
        kinds = {*(r.kind for r in rules), *(s.kind for s in self.saved)}
        scope = EntryScope(self._graphs, frozenset({*names, *self.unmatched}), frozenset(kinds))
        object.__setattr__(self, "declined", DeclinedEntries(self.declined, scope))

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic saved, less the bytes read for recomputation."""
        return sum(s.bytes_saved - s.bytes_recomputed for s in self.saved)

    @property
    def launches_saved(self) -> int:
        """Launches saved."""
        return sum(s.launches_saved for s in self.saved)

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs that this ledger is of; none if it was read from JSON."""
        return self._graphs

    def coverage(self) -> Coverage:
        """Return what share of the operations, bytes and flops is inside regions, summed over the graphs."""
        self._require_graphs()
        return Coverage.of(coverage(graph) for graph in self._graphs)

    def outside(self) -> OutsideOperations:
        """Return the operations in no region, each with its module, its bytes and flops, and the reason."""
        self._require_graphs()
        parts = [coverage(graph) for graph in self._graphs]
        return outside_operations(parts, self.declined, self.never, is_fused=self.was_fused)

    @property
    def was_fused(self) -> bool:
        """Whether rules were applied to the graph."""
        return bool(self.rounds or self.refused or self.folded or self.unmatched or self._rules)

    def _require_graphs(self) -> None:
        if not self._graphs:
            raise InvalidArgument("this ledger has no graph; use the one that `explain(gm)` returns.")

    def why_not(
        self,
        first: str | Node | None = None,
        second: str | Node | None = None,
        *,
        rule: str | Rule | None = None,
    ) -> Reasons:
        """Return every known reason why operations are not in one region, one is in none, or a rule matched nothing.

        `first` and `second` are operations by node or name, also if they are inside regions now, modules by path
        ("layers.3.mlp"), or source lines ("model.py:42"). One alone asks why it is in no region, or why a module or a
        line is not one region. `rule`, given alone, asks how far a rule got and on what it stopped.
        """
        self._require_graphs()
        record = record_of(self)
        with pause_gc():
            if rule is not None:
                if first is not None:
                    raise InvalidArgument("why_not takes operations or a rule, not both.")
                return why_not_rule(self._graphs, rule, record, {s.rule: s.regions for s in self.saved})
            if first is None:
                raise InvalidArgument("why_not takes operations, modules or source lines, or `rule=`.")
            return why_not(self._graphs, first, second, record)

    def to_json(self) -> str:
        """Return the ledger as JSON text; `from_json` reads it back."""
        return json.dumps({"version": _VERSION, **{name: _to_json(getattr(self, name)) for name in _FIELDS}})

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Return the ledger that `to_json` wrote."""
        try:
            data = json.loads(text)
            if data["version"] not in _READABLE:
                raise InvalidArgument(f"a ledger of version {data['version']}; this is version {_VERSION}.")
            return cls(
                accepted=tuple(read_entry(Accepted, row) for row in data["accepted"]),
                declined=DeclinedEntries(read_entry(Declined, row) for row in data["declined"]),
                errors=tuple(read_entry(RuleFailure, row) for row in data["errors"]),
                saved=tuple(read_entry(Saved, row) for row in data["saved"]),
                refused=tuple(read_entry(Tally, row) for row in data["refused"]),
                folded=int(data["folded"]),
                rounds=int(data["rounds"]),
                limits=Limits(**data["limits"]),
                never=read_never(data["never"]),
                lowered=tuple(read_entry(Lowered, row) for row in data.get("lowered", ())),
                unmatched=read_texts(data.get("unmatched", ())),
                diagnostics=read_texts(data.get("diagnostics", ())),
                measured=tuple(read_entry(Measured, row) for row in data.get("measured", ())),
            )
        except DovetailError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"not the text of a ledger: {type(error).__name__}: {error}.") from error

    def __str__(self) -> str:
        return first_page(self)

    def _repr_html_(self) -> str:
        parts = [html_text(str(self))]
        if self._graphs:
            parts.append(html_details("operations in no region", str(self.outside())))
        parts.append(html_details("declined", str(self.declined)))
        return html_box("what was fused, and what was not", *parts)

    # It is immutable, so a copy is the same object; rules and graphs are not pickled.

    def __copy__(self) -> Ledger:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Ledger.from_json, (self.to_json(),))


_FIELDS = tuple(f.name for f in fields(Ledger) if f.compare)


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [row if isinstance(row, str) else asdict(row) for row in value]
    if isinstance(value, Limits):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


@checked_call()
def explain(gm: GraphModule | GraphOwner | GraphParts) -> Ledger:
    """Return what was fused in a graph, what was not and why, and what backends did with it.

    For a compiled model and for a schedule, the entries of all graphs.
    """
    diagnostics = tuple(map(str, gm.diagnostics)) if isinstance(gm, GraphOwner) else ()
    if isinstance(gm, GraphParts):
        graphs = [with_module_prefix(graph, root) if root else graph for root, graph in gm.part_graphs]
        if not graphs:
            raise InvalidArgument("no part of the schedule is traced yet: `find`, `fuse` or `verify` first.")
    else:
        # A model that could not be captured has no graph, only the diagnostic of why.
        graphs = () if isinstance(gm, GraphOwner) and diagnostics and not gm.graphs else graphs_of(gm)
    ledgers = [replace(ledger_of(graph), lowered=_lowered(graph), _graphs=(graph,)) for graph in graphs]
    ledger = ledgers[0] if len(ledgers) == 1 else _joined(ledgers)
    return replace(ledger, diagnostics=diagnostics) if diagnostics else ledger


def _joined(ledgers: Sequence[Ledger]) -> Ledger:
    saved: dict[tuple[str, str], Saved] = {}
    refused: dict[tuple[str, str], int] = {}
    for ledger in ledgers:
        for s in ledger.saved:
            saved[s.rule, s.kind] = s.plus(saved.get((s.rule, s.kind)))
        for tally in ledger.refused:
            key = (tally.rule, tally.reason)
            refused[key] = refused.get(key, 0) + tally.count
    last = ledgers[-1] if ledgers else Ledger()
    entries = ("accepted", "errors", "lowered", "measured")
    return replace(
        last,
        **{name: tuple(e for ledger in ledgers for e in getattr(ledger, name)) for name in entries},
        declined=DeclinedEntries(e for ledger in ledgers for e in ledger.declined),
        saved=tuple(saved.values()),
        refused=tuple(Tally(*key, count) for key, count in refused.items()),
        folded=sum(ledger.folded for ledger in ledgers),
        rounds=sum(ledger.rounds for ledger in ledgers),
        never={name: why for ledger in ledgers for name, why in ledger.never.items()},
        unmatched=tuple(dict.fromkeys(name for ledger in ledgers for name in ledger.unmatched)),
        _graphs=tuple(graph for ledger in ledgers for graph in ledger.graphs),
    )


def _lowered(gm: GraphModule) -> tuple[Lowered, ...]:
    lowering = lowering_view(gm)
    if lowering is None:
        return ()
    calls = lowering.calls(gm)
    return tuple(
        Lowered(e.region, e.backend, e.outcome, calls.get(e.key, 1), round(e.seconds, 3), e.reason)
        for e in lowering.events
    )


def ledger_of(gm: GraphModule) -> Ledger:
    """Return the ledger that a graph carries, an empty one if it has none."""
    ledger = gm.meta.get(LEDGER)
    return ledger if isinstance(ledger, Ledger) else Ledger()


def write_ledger(gm: GraphModule, ledger: Ledger) -> None:
    gm.meta[LEDGER] = replace(ledger, _graphs=())


def rules_of(ledger: Ledger) -> RuleSet:
    """Return the rules that took part; none of a ledger that was pickled or read from JSON."""
    return ledger._rules or RuleSet()


def record_of(ledger: Ledger) -> FusionRecord:
    """Return what a ledger recorded about why operations are apart."""
    return FusionRecord(
        ledger.declined, ledger.never, ledger.limits, rules_of(ledger), ledger.errors, ledger.was_fused
    )
