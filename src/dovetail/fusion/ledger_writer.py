"""Writing a ledger: entries for what was decided in a round, within bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from torch.fx import GraphModule

from dovetail.fusion.candidates import PlannedRegion, Refused, RuleFailure
from dovetail.fusion.coverage import is_operation
from dovetail.fusion.ledger import MOST, Ledger
from dovetail.fusion.ledger_entries import Accepted, Declined, DeclinedEntries, Saved, Tally
from dovetail.ir.text_tables import generic
from dovetail.outlining.region import call_of, walk
from dovetail.rules.rule import Limits, Refusal, RuleContext, RuleSet

_MOST_ALIKE = 100
_MOST_SUMS = 200
_MOST_NODES = 64
_MOST_LETTERS = 1000

# A refusal is counted once over all calls on a graph; so many are remembered in this process.
_MOST_COUNTED = 100_000
_OTHER = "other reasons"


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
            DeclinedEntries(self.declined),
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


def near_miss(context: RuleContext, refusal: Refusal, kind: str) -> Declined:
    """Return the entry for what a rule of a kind itself refused."""
    return Declined(
        refusal.rule,
        _names(context, refusal.members)[:_MOST_NODES],
        refusal.reason.rstrip("."),
        _name(context, refusal.at),
        refusal.matched,
        refusal.wanted,
        context.round,
        len(refusal.members),
        kind=kind,
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
        kind=refused.proposed.candidate.kind,
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


def names_in_regions(gm: GraphModule) -> set[str]:
    """Return the names of the regions of a graph, and of the operations that are nowhere but in regions."""
    inside: set[str] = set()
    outside: set[str] = set()
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is None and is_operation(node):
            outside.add(node.name)
        elif call is not None:
            inside.update((node.name, *(member.original for member in walk(call))))
    return inside - outside


def fold_fused(entries: Iterable[Declined], inside: Set[str]) -> list[Declined]:
    """Return refusals, near-misses folded whose operations are all among those `inside` regions, of whatever kind."""
    return [
        replace(entry, folded=True)
        if entry.wanted and entry.nodes and entry.size <= len(entry.nodes) and set(entry.nodes) <= inside
        else entry
        for entry in entries
    ]


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


def _names(context: RuleContext, positions: Iterable[int]) -> tuple[str, ...]:
    return tuple(context.nodes[i].name for i in positions)


def _name(context: RuleContext, position: int | None) -> str | None:
    return None if position is None else context.nodes[position].name
