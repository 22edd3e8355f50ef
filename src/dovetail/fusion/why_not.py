"""Every reason why two operations are not in one region."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from dovetail.fusion.acyclicity import path_text
from dovetail.fusion.candidates import Planner, Proposed, Refused
from dovetail.fusion.cost import Traffic
from dovetail.fusion.ledger_entries import matched_text
from dovetail.fusion.operation_locations import (
    FusionRecord,
    NodeLocation,
    Reasons,
    make_context,
    region_text,
    regions_around,
)
from dovetail.ir.dependencies import shortest_path
from dovetail.ir.nodes import is_projection
from dovetail.outlining.inline import inline
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext

_MOST_RECORDED = 10
_MOST_EFFECTS = 3

# The graph of a context with all its regions inlined: the same for every pair.
_OPENED: WeakKeyDictionary[RuleContext, RuleContext] = WeakKeyDictionary()


def why_not_together(
    context: RuleContext, first: NodeLocation, second: NodeLocation, record: FusionRecord
) -> Reasons:
    """Return all reasons that are known."""
    a, b = first, second
    if a == b:
        return Reasons([f"'{a.name}' is one operation."])
    # The regions that contain both; a region contains itself.
    shared = [x for x, y in zip(regions_around(a), regions_around(b), strict=False) if x == y]
    if shared:
        deeper = [p for p in (a, b) if len(p.regions) > len(shared)]
        inner = [f"within it, '{p.name}' is in {p.region()}." for p in deeper]
        return Reasons([f"they are together already, in {region_text(*shared[-1])}.", *inner])
    never = record.never
    reasons = [*_homes(a, b)]
    reasons += [f"'{p.name}' may not be taken: {never[p.name]}." for p in (a, b) if p.name in never]
    reasons += _devices(a, b)
    reasons += _dependence(context, a, b)
    reasons += _as_one(context, a, b)
    reasons += _recorded(record.declined, a, b)
    # A rule may repeat a reason that is there already.
    by_rules = _by_rules(context, record, a, b)
    reasons += [reason for reason in by_rules if not is_given(reason, reasons)]
    if not reasons:
        reasons = [f"rule '{e.rule}' failed and was left out: {e.error}" for e in record.errors]
    if not reasons:
        reasons = ["nothing prevents it; no rule has proposed them together."]
    return Reasons(dict.fromkeys(reasons))


def is_given(reason: str, reasons: Iterable[str]) -> bool:
    """Whether what a rule answers, after its name, is what one of the reasons ends with."""
    answer = reason.partition("rule '")[2].partition(": ")[2] or reason
    return any(known.endswith(answer) for known in reasons)


def _homes(a: NodeLocation, b: NodeLocation) -> Iterator[str]:
    if a.regions and b.regions:
        yield f"they are in two regions: '{a.name}' in {a.region()}, '{b.name}' in {b.region()}."
        return
    for place, other in ((a, b), (b, a)):
        if place.regions:
            where = "is one itself" if other.call is not None else "is in none"
            yield f"'{place.name}' is in {place.region()}, and '{other.name}' {where}."


def _devices(a: NodeLocation, b: NodeLocation) -> list[str]:
    known = [_devices_of(p.meta.get("val")) for p in (a, b)]
    if not all(known) or not known[0].isdisjoint(known[1]):
        return []
    there = [f"'{p.name}' on {', '.join(sorted(devices))}" for p, devices in zip((a, b), known, strict=True)]
    return [f"they are on different devices: {' and '.join(there)}."]


def _devices_of(value: Any) -> set[str]:
    parts = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,)
    return {str(part.device) for part in parts if isinstance(part, torch.Tensor)}


def _dependence(context: RuleContext, a: NodeLocation, b: NodeLocation) -> list[str]:
    index = context.index
    early, late = sorted((a.position, b.position))
    ends = [_with_parts(context, i) for i in (early, late)]
    between = index.between(ends[0] | ends[1])
    if not between:
        return [] if index.reaches(early, late) else _unconnected(context, ends[0], ends[1])
    chain = _through(context, ends[0], ends[1], between)
    shown = path_text(index, chain)
    more = (
        f" with the {len(between)} operations between them"
        if len(between) > 1
        else f" with '{context.nodes[chain[1]].name}'"
    )
    reasons = [f"a region of the two alone would depend on itself: {shown}. It would have to be made{more}."]
    reasons += [
        f"the order of effects keeps them apart: '{context.nodes[x].name}' must stay before "
        f"'{context.nodes[y].name}' ({index.dependencies.why(x, y)})."
        for x, y in _held_apart(context, ends[0] | between | ends[1])
    ]
    return reasons


def _held_apart(context: RuleContext, positions: set[int]) -> list[tuple[int, int]]:
    """Return the first few pairs among some positions that only effects order."""
    data, effects = context.index.data, context.index.dependencies.before
    pairs = [(x, y) for y in sorted(positions & effects.keys()) for x in effects[y] if x in positions]
    return [(x, y) for x, y in pairs if x not in data[y]][:_MOST_EFFECTS]


def _as_one(context: RuleContext, a: NodeLocation, b: NodeLocation) -> list[str]:
    """Return the reasons against one region of the two and of what is between them."""
    members = _with_parts(context, a.position) | _with_parts(context, b.position)
    between = context.index.between(members)
    members |= between
    excluded = [i for i in sorted(between) if i in context.barred]
    if excluded:
        at = excluded[0]
        return [f"'{context.nodes[at].name}' between them may not be taken: {context.barred[at]}."]
    if members & context.barred.keys():
        return []
    reason = obstacle(context, members)
    return (
        [f"they cannot be one region{' with what lies between' if between else ''}: {reason}."]
        if reason
        else []
    )


def obstacle(context: RuleContext, members: Iterable[int]) -> str:
    """Return why a set of operations cannot be one region, "" if it can."""
    rule, positions = _Together(), tuple(members)
    plan = Planner(context, Traffic()).plan(
        Proposed(Candidate(rule.name, rule.kind, positions), rule, 0), positions
    )
    return plan.reason.rstrip(".") if isinstance(plan, Refused) else ""


class _Together(Rule):
    """A hypothetical rule that proposes two operations together."""

    name = kind = "together"
    nests = True

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Propose nothing."""
        return ()


def _with_parts(context: RuleContext, position: int) -> set[int]:
    """Return an operation with the elements of the tuple it makes, which are always in the same region."""
    parts = {context.index.position[u] for u in context.nodes[position].users if is_projection(u)}
    return {position, *parts}


def _through(context: RuleContext, early: set[int], late: set[int], between: set[int]) -> list[int]:
    """Return a path from one to the other through something else, even where they are direct neighbours."""
    after = context.index.after

    def edges(i: int) -> Iterable[int]:
        return (j for j in after[i] if j in between or (j in late and i not in early))

    return shortest_path(sorted(early), edges, lambda i, j: j in late) or [min(early), min(late)]


def _unconnected(context: RuleContext, early: set[int], late: set[int]) -> list[str]:
    index = context.index
    read = {j for i in late for j in index.data[i]}
    common = [j for i in sorted(early) for j in index.data[i] if j in read]
    if common:
        names = ", ".join(f"'{context.nodes[j].name}'" for j in common[:4])
        return [f"neither reads the other's result; both read {names}: only a rule for siblings joins such."]
    return ["neither depends on the other, and they read nothing in common."]


def _recorded(declined: Sequence[Any], a: NodeLocation, b: NodeLocation) -> list[str]:
    names = [{p.name, *(name for name, _ in p.regions)} for p in (a, b)]
    both: list[str] = []
    one: list[str] = []
    for entry in sorted(declined, key=lambda e: e.folded):
        hits = [bool(mine & {*entry.nodes, entry.place}) for mine in names]
        if not any(hits):
            continue
        near = near_text(entry)
        if all(hits):
            both.append(f"rule '{entry.rule}' declined both in round {entry.round}{near}: {entry.reason}.")
        else:
            name = a.name if hits[0] else b.name
            one.append(f"rule '{entry.rule}' declined '{name}' in round {entry.round}{near}: {entry.reason}.")
    refusals = [*both, *one]
    left = len(refusals) - _MOST_RECORDED
    return [*refusals[:_MOST_RECORDED], *([f"... and {left} more refusals."] if left > 0 else [])]


def _by_rules(context: RuleContext, record: FusionRecord, a: NodeLocation, b: NodeLocation) -> list[str]:
    """Return the reasons of the rules; for operations inside regions, on the graph with all regions inlined."""
    at = (a.position, b.position)
    if record.rules and (a.regions or b.regions) and a.call is None and b.call is None:
        opened = _OPENED.get(context)
        if opened is None:
            opened = _OPENED[context] = make_context(inline(context.gm), record)
        names = opened.index.names
        if a.name in names and b.name in names:
            context, at = opened, (names[a.name], names[b.name])
    return rule_reasons(context, record, *at)


def near_text(entry: Any) -> str:
    """Return how near a refusal was to a match, as an addition to "declined"; "" if it is no near-miss."""
    if not entry.wanted:
        return ""
    though = "though " if entry.matched >= entry.wanted else ""
    return f", {though}{matched_text(entry.matched, entry.wanted)}"


def rule_reasons(context: RuleContext, record: FusionRecord, first: int, second: int) -> list[str]:
    """Return what each rule answers to why two positions are not in one region of its own."""
    reasons: list[str] = []
    for rule in record.rules:
        try:
            answers = list(rule.why_not(context, first, second))
        except Exception as error:
            answers = [f"why_not raised {type(error).__name__}: {error}"]
        reasons += [f"rule '{rule.name}': {reason.rstrip('.')}." for reason in answers]
    return reasons
