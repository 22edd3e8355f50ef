"""The ledger: what was fused, what was not and why, carried by the graph."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch.fx import GraphModule, Node

from dovetail.errors import DovetailError, InvalidArgument, checked_call
from dovetail.fusion.candidates import PlannedRegion, Refused, RuleFailure, quoted
from dovetail.fusion.ledger_report import generic, table
from dovetail.fusion.why_not import FusionRecord, Reasons, why_not
from dovetail.ir.graph_module import GraphOwner, graphs_of, pause_gc
from dovetail.ir.meta_keys import LEDGER
from dovetail.outlining.region import lowering_view
from dovetail.rules.rule import UNLIMITED, Limits, Refusal, RuleContext, RuleSet

# How many entries are stored in full; beyond that only sums grow.
MOST = 1000
_MOST_ALIKE = 100
_MOST_SUMS = 200
_MOST_NODES = 64
_MOST_LETTERS = 1000

# A refusal is counted once over all calls on a graph; so many are remembered in this process.
_MOST_COUNTED = 100_000
_OTHER = "other reasons"
_VERSION = 1


@dataclass(frozen=True)
class Accepted:
    """A region that was outlined, its rule and round, and what it saves.

    `nodes` are the names of its operations, the first of them if there are many; `size` is their number.
    """

    region: str
    kind: str
    rule: str
    round: int
    nodes: tuple[str, ...]
    size: int
    bytes_saved: int
    launches_saved: int
    bytes_recomputed: int = 0


@dataclass(frozen=True)
class Declined:
    """Operations that did not become a region and why; a near-miss of a pattern has the number of matched operations.

    One that is `folded` adds no information: it is part of a region, or a near-miss of a kind of which another near-miss
    at the same place matched more.
    """

    rule: str
    nodes: tuple[str, ...]
    reason: str
    place: str | None = None
    matched: int = 0
    wanted: int = 0
    round: int = 1
    size: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Saved:
    """The sum of what all regions of one kind and rule save."""

    rule: str
    kind: str
    regions: int = 0
    bytes_saved: int = 0
    launches_saved: int = 0
    bytes_recomputed: int = 0

    def plus(self, other: Saved | None) -> Saved:
        """Return the sum of both."""
        if other is None:
            return self
        return replace(
            self,
            regions=self.regions + other.regions,
            bytes_saved=self.bytes_saved + other.bytes_saved,
            launches_saved=self.launches_saved + other.launches_saved,
            bytes_recomputed=self.bytes_recomputed + other.bytes_recomputed,
        )


@dataclass(frozen=True)
class Tally:
    """How often a rule was declined for one reason, names and numbers left out."""

    rule: str
    reason: str
    count: int = 0


@dataclass(frozen=True)
class Lowered:
    """What a backend did with the body of a region: `outcome` is "compiled", "disk", or the step that failed.

    "untried" marks code that is used without a check on sample operands, with the reason. `calls` is the number of
    regions of the graph with this body.
    """

    region: str
    backend: str
    outcome: str
    calls: int = 1
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Ledger:
    """The history of fusing a graph, which passes, copies and pickles preserve.

    `accepted`, `declined` and `errors` have the entries in order, up to a bound; `saved` and `refused` are sums over
    all of them, including those beyond the bound; refusals that add no information are only counted, in `folded`.
    `rounds` counts the rounds that changed something. A region that was inlined stays in the history. `never` has the
    operations that the user excluded, and why; `limits` are those of the last call of `fuse`. `lowered` is what
    backends did since the graph was last lowered, later specializations included. `unmatched` are the rules that
    never proposed or declined anything; `diagnostics` are the recompilations, fallbacks and limits of a compiled
    model.
    """

    accepted: tuple[Accepted, ...] = ()
    declined: tuple[Declined, ...] = ()
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
    _rules: RuleSet | None = field(default=None, repr=False, compare=False)
    _graph: GraphModule | None = field(default=None, repr=False, compare=False)
    _counted: frozenset[int] = field(default=frozenset(), repr=False, compare=False)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic saved, less the bytes read for recomputation."""
        return sum(s.bytes_saved - s.bytes_recomputed for s in self.saved)

    @property
    def launches_saved(self) -> int:
        """Launches saved."""
        return sum(s.launches_saved for s in self.saved)

    def why_not(self, first: str | Node, second: str | Node) -> Reasons:
        """Return every known reason why two operations are not in one region.

        They are given by node or name, also if they are inside regions now. A ledger read from JSON has no graph and
        raises InvalidArgument.
        """
        if self._graph is None:
            raise InvalidArgument("this ledger has no graph; use the one that `explain(gm)` returns.")
        record = FusionRecord(self.declined, self.never, self.limits, self._rules or RuleSet(), self.errors)
        with pause_gc():
            return why_not(self._graph, first, second, record)

    def to_json(self) -> str:
        """Return the ledger as JSON text; `from_json` reads it back."""
        return json.dumps({"version": _VERSION, **{name: _to_json(getattr(self, name)) for name in _FIELDS}})

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Return the ledger that `to_json` wrote."""
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise InvalidArgument(f"a ledger of version {data['version']}; this is version {_VERSION}.")
            return cls(
                accepted=tuple(_read(Accepted, row) for row in data["accepted"]),
                declined=tuple(_read(Declined, row) for row in data["declined"]),
                errors=tuple(_read(RuleFailure, row) for row in data["errors"]),
                saved=tuple(_read(Saved, row) for row in data["saved"]),
                refused=tuple(_read(Tally, row) for row in data["refused"]),
                folded=int(data["folded"]),
                rounds=int(data["rounds"]),
                limits=Limits(**data["limits"]),
                never=_read_never(data["never"]),
                lowered=tuple(_read(Lowered, row) for row in data.get("lowered", ())),
                unmatched=_read_texts(data.get("unmatched", ())),
                diagnostics=_read_texts(data.get("diagnostics", ())),
            )
        except DovetailError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"not the text of a ledger: {type(error).__name__}: {error}.") from error

    def __str__(self) -> str:
        return table(self)

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


_FIELD_TYPES: Mapping[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "str | None": (str, type(None)),
    "tuple[str, ...]": tuple,
}


def _read(cls: type[Any], row: Mapping[str, Any]) -> Any:
    """Return an entry, its fields checked against their declared types."""
    entry = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    for declared in fields(cls):
        value = getattr(entry, declared.name)
        names: Any = value if isinstance(value, tuple) else ()
        if not isinstance(value, _FIELD_TYPES[str(declared.type)]) or not all(
            isinstance(n, str) for n in names
        ):
            raise TypeError(f"{declared.name} of {cls.__name__} is a {type(value).__name__}")
    return entry


def _read_texts(rows: Any) -> tuple[str, ...]:
    if not all(isinstance(row, str) for row in rows):
        raise TypeError("a rule or a diagnostic that is not a text")
    return tuple(rows)


def _read_never(rows: Any) -> dict[str, str]:
    never = dict(rows)
    if not all(isinstance(text, str) for row in never.items() for text in row):
        raise TypeError("an excluded operation has no reason")
    return never


@checked_call()
def explain(gm: GraphModule | GraphOwner) -> Ledger:
    """Return what was fused in a graph, what was not and why, and what backends did with it.

    For a compiled model, the entries of all its graphs; `why_not` is then about the last of them.
    """
    diagnostics = tuple(map(str, gm.diagnostics)) if isinstance(gm, GraphOwner) else ()
    # A model that could not be captured has no graph, only the diagnostic of why.
    graphs = () if isinstance(gm, GraphOwner) and diagnostics and not gm.graphs else graphs_of(gm)
    ledgers = [replace(ledger_of(graph), lowered=_lowered(graph), _graph=graph) for graph in graphs]
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
    entries = ("accepted", "declined", "errors", "lowered")
    return replace(
        last,
        **{name: tuple(e for ledger in ledgers for e in getattr(ledger, name)) for name in entries},
        saved=tuple(saved.values()),
        refused=tuple(Tally(*key, count) for key, count in refused.items()),
        folded=sum(ledger.folded for ledger in ledgers),
        rounds=sum(ledger.rounds for ledger in ledgers),
        never={name: why for ledger in ledgers for name, why in ledger.never.items()},
        unmatched=tuple(dict.fromkeys(name for ledger in ledgers for name in ledger.unmatched)),
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
    gm.meta[LEDGER] = replace(ledger, _graph=None)


class LedgerWriter:
    """Adds entries to a ledger, within its bounds."""

    def __init__(self, ledger: Ledger) -> None:
        self._before = ledger
        self.accepted = list(ledger.accepted)
        self.declined = list(ledger.declined)
        self.errors = list(ledger.errors)
        self.folded = ledger.folded
        self.rounds = ledger.rounds
        self._saved = {(s.rule, s.kind): s for s in ledger.saved}
        self._refused = {(s.rule, s.reason): s.count for s in ledger.refused}
        self._alike: dict[tuple[str, str], int] = {}
        self._known = set(ledger._counted)
        for entry in ledger.declined:
            self._count(entry)
        self._failed = {(f.rule, f.error) for f in ledger.errors}

    def accept(self, entries: Iterable[Accepted]) -> None:
        """Record new regions."""
        for entry in entries:
            if len(self.accepted) < MOST:
                self.accepted.append(entry)
            key = (entry.rule, entry.kind)
            one = Saved(*key, 1, entry.bytes_saved, entry.launches_saved, entry.bytes_recomputed)
            self._saved[key] = one.plus(self._saved.get(key))

    def decline(self, entry: Declined) -> None:
        """Record a refusal, once per operations and reason."""
        if hash((entry.rule, entry.nodes, entry.reason)) in self._known:
            return
        key = self._count(entry)
        if entry.folded:
            self.folded += 1
        else:
            if len(self._refused) >= _MOST_SUMS and key not in self._refused:
                key = (entry.rule, _OTHER)
            self._refused[key] = self._refused.get(key, 0) + 1
        if len(self.declined) < MOST and self._alike[entry.rule, generic(entry.reason)] <= _MOST_ALIKE:
            self.declined.append(replace(entry, reason=entry.reason[:_MOST_LETTERS]))

    def _count(self, entry: Declined) -> tuple[str, str]:
        if len(self._known) < _MOST_COUNTED:
            self._known.add(hash((entry.rule, entry.nodes, entry.reason)))
        key = (entry.rule, generic(entry.reason))
        self._alike[key] = self._alike.get(key, 0) + 1
        return key

    def fail(self, failure: RuleFailure) -> None:
        """Record a rule that failed, once per error."""
        if (failure.rule, failure.error) not in self._failed and len(self.errors) < _MOST_ALIKE:
            self._failed.add((failure.rule, failure.error))
            trace = failure.traceback[-8 * _MOST_LETTERS :]
            self.errors.append(replace(failure, error=failure.error[:_MOST_LETTERS], traceback=trace))

    def ledger(self, rules: RuleSet, limits: Limits, never: Mapping[str, str]) -> Ledger:
        """Return the ledger with everything that was added."""
        before = self._before
        excluded = dict(list({**before.never, **never}.items())[:MOST])
        known = {rule.name: rule for rule in (*(before._rules or ()), *rules)}
        return Ledger(
            tuple(self.accepted),
            tuple(self.declined),
            tuple(self.errors),
            tuple(self._saved.values()),
            tuple(Tally(*key, count) for key, count in self._refused.items()),
            self.folded,
            self.rounds,
            limits,
            excluded,
            _rules=RuleSet(*known.values()),
            _counted=frozenset(self._known),
        )


# How many near-misses at one operation another is compared with.
_MOST_NEAR = 16


def accepted_entry(context: RuleContext, plan: PlannedRegion, region: str) -> Accepted:
    """Return the entry for a plan that became a region of this name."""
    candidate, gain, bonus = plan.proposed.candidate, plan.gain, plan.bonus
    names = _names(context, plan.draft.inside)
    return Accepted(
        region,
        candidate.kind,
        candidate.rule,
        context.round,
        names[:_MOST_NODES],
        len(names),
        gain.bytes_saved + bonus.bytes_saved,
        gain.launches_saved + bonus.launches_saved,
        gain.bytes_recomputed,
    )


def near_miss(context: RuleContext, refusal: Refusal) -> Declined:
    """Return the entry for what a rule itself refused."""
    return Declined(
        refusal.rule,
        _names(context, refusal.members)[:_MOST_NODES],
        refusal.reason.rstrip("."),
        _name(context, refusal.at),
        refusal.matched,
        refusal.wanted,
        context.round,
        len(refusal.members),
    )


def declined_entry(context: RuleContext, refused: Refused, regions: Mapping[PlannedRegion, str]) -> Declined:
    """Return the entry for a candidate that was not chosen. `regions` are the names of those that were."""
    return Declined(
        refused.proposed.candidate.rule,
        _names(context, refused.members)[:_MOST_NODES],
        _reason(refused, regions),
        _name(context, refused.at),
        round=context.round,
        size=len(refused.members),
        folded=any(_holds(plan, refused) for plan in refused.others if plan in regions),
    )


def _holds(plan: PlannedRegion, refused: Refused) -> bool:
    """Whether a region contains all of a candidate, and more or as the same kind."""
    inside = plan.draft.members | plan.draft.clones
    if not inside.issuperset(refused.members):
        return False
    return len(inside) > len(refused.members) or plan.draft.identity.kind == refused.proposed.candidate.kind


def folded(
    entries: Iterable[Declined], kinds: Mapping[str, str], accepted: Iterable[Accepted]
) -> list[Declined]:
    """Return near-misses, folded where they add no information. `kinds` has the kind of each rule by name.

    Where one of a kind matched more, those on the same operations or on some of them are folded; where a region of
    the kind was made, all on its operations are.
    """
    known: dict[tuple[str, str], list[set[str]]] = {}

    def note(kind: str, nodes: Iterable[str]) -> None:
        inside = set(nodes)
        for name in inside:
            known.setdefault((kind, name), []).append(inside)

    def is_known(kind: str, nodes: tuple[str, ...]) -> bool:
        return bool(nodes) and any(s.issuperset(nodes) for s in known.get((kind, nodes[0]), ())[:_MOST_NEAR])

    for region in accepted:
        note(region.kind, region.nodes)
    misses = list(entries)
    nearest = sorted(range(len(misses)), key=lambda k: (-misses[k].matched, misses[k].wanted, k))
    for k in nearest:
        entry = misses[k]
        if not entry.wanted:
            continue
        kind = kinds.get(entry.rule, entry.rule)
        if is_known(kind, entry.nodes):
            misses[k] = replace(entry, folded=True)
        else:
            note(kind, entry.nodes)
    return misses


def _reason(refused: Refused, regions: Mapping[PlannedRegion, str]) -> str:
    if not refused.others:
        return refused.reason.rstrip(".")
    others = [
        f"region '{regions[p]}' (rule '{p.proposed.candidate.rule}')"
        if p in regions
        else f"another candidate (kind '{p.draft.identity.kind}', rule '{p.proposed.candidate.rule}')"
        for p in sorted(refused.others, key=lambda p: p.places)
    ]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{refused.reason} {', '.join(others[:3])}{more}"


def refusal_text(entry: Declined) -> str:
    """Return a refusal as one line."""
    near = f" ({entry.matched} of {entry.wanted} matched)" if entry.wanted else ""
    return f"rule '{entry.rule}' on {quoted(entry.nodes)}: {entry.reason}{near}"


def _names(context: RuleContext, positions: Iterable[int]) -> tuple[str, ...]:
    return tuple(context.nodes[i].name for i in positions)


def _name(context: RuleContext, position: int | None) -> str | None:
    return None if position is None else context.nodes[position].name
