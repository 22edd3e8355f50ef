"""How far a rule got: the place where most of it matched, and on what it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from dovetail import rules
from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.fusion.candidates import Planner, Proposed, Refused
from dovetail.fusion.cost import Traffic
from dovetail.fusion.ledger_entries import matched_text, operation_metas
from dovetail.fusion.operation_locations import FusionRecord, Reasons, make_context
from dovetail.ir.module_paths import path_of
from dovetail.ir.source_location import of_node
from dovetail.ir.text_tables import counted, generic, quoted
from dovetail.outlining.inline import inline
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.patterns.pattern_search import nearest_attempt
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext

_MOST_REASONS = 5
_MOST_TRIED = 20


def why_not_rule(
    graphs: Sequence[GraphModule], rule: str | Rule, record: FusionRecord, region_counts: Mapping[str, int]
) -> Reasons:
    """Return what became of a rule: the number of its regions, and the nearest of what it declined.

    Where the ledger has no refusal of it, or does not know the rule, it is evaluated once more, on the last graph with
    all regions inlined.
    """
    known = _resolve(rule, record, region_counts)
    name = known.name if isinstance(known, Rule) else known
    reasons: list[str] = []
    if region_counts.get(name):
        reasons.append(f"rule '{name}' made {counted(region_counts[name], 'region')}.")
    reasons += [f"rule '{name}' failed and was left out: {e.error}." for e in record.errors if e.rule == name]
    recorded = _recorded(graphs, name, record)
    if recorded:
        return Reasons([*reasons, *recorded])
    if isinstance(known, Rule) and not region_counts.get(name):
        reasons += _evaluated(graphs[-1], known, record)
    return Reasons(reasons or [f"rule '{name}' declined nothing that was recorded."])


def _resolve(rule: str | Rule, record: FusionRecord, region_counts: Mapping[str, int]) -> Rule | str:
    """Return a rule by its name, of those that were applied or of the library; its name if only entries have it."""
    if isinstance(rule, Rule):
        return rule
    by_name = {r.name: r for r in (*rules.DEFAULT, *rules.library.ALL, *record.rules)}
    if rule in by_name:
        return by_name[rule]
    names = {*by_name, *region_counts, *(entry.rule for entry in record.declined)}
    if rule not in names:
        raise InvalidArgument(f"no rule {rule!r}. {did_you_mean(str(rule), sorted(names))}".rstrip())
    return rule


def _recorded(graphs: Sequence[GraphModule], name: str, record: FusionRecord) -> list[str]:
    """Return the refusals of a rule, the nearest first and equal ones once."""
    alike: dict[str, list[Any]] = {}
    for entry in record.declined:
        if entry.rule == name:
            alike.setdefault(generic(entry.reason), []).append(entry)
    ranked = sorted(alike.values(), key=lambda entries: max(map(_nearness, entries)), reverse=True)
    where = _paths(graphs)
    reasons: list[str] = []
    for entries in ranked[:_MOST_REASONS]:
        entry = max(entries, key=_nearness)
        times = f" ({counted(len(entries), 'time')} alike)" if len(entries) > 1 else ""
        if entry.wanted:
            module = f" in {where[entry.nodes[0]]}" if entry.nodes and where.get(entry.nodes[0]) else ""
            how = _progress(
                name, entry, f"{quoted(entry.nodes)}{module}", f"'{entry.place}'" if entry.place else ""
            )
            reasons.append(f"{how}: {entry.reason}{times}.")
        else:
            reasons.append(
                f"rule '{name}' declined {quoted(entry.nodes) or 'the graph'}: {entry.reason}{times}."
            )
    left = len(ranked) - _MOST_REASONS
    return [*reasons, *([f"... and {counted(left, 'other reason')}."] if left > 0 else [])]


def _nearness(entry: Any) -> tuple[bool, float, int]:
    return not entry.folded, entry.matched / entry.wanted if entry.wanted else 0.0, entry.matched


def _paths(graphs: Sequence[GraphModule]) -> dict[str, str]:
    return {name: path_of(meta) for graph in graphs for name, meta in operation_metas(graph)}


def _evaluated(gm: GraphModule, rule: Rule, record: FusionRecord) -> list[str]:
    """Return what the rule proposes or declines on the graph with all regions inlined."""
    context = make_context(inline(gm), record)
    try:
        if isinstance(rule, PatternRule):
            proposals: list[Proposal] = [nearest_attempt(rule, context)]
        else:
            proposals = list(rule.propose(context))[:_MOST_TRIED]
    except Exception as error:
        return [f"rule '{rule.name}' raises {type(error).__name__}: {error}."]
    candidates = [p for p in proposals if isinstance(p, Candidate)]
    if candidates:
        return [_why_unused(context, rule, candidates[0])]
    refusals = [p for p in proposals if isinstance(p, Refusal)]
    if not refusals:
        return [f"rule '{rule.name}' proposes nothing on this graph, and gives no reason."]
    return list(dict.fromkeys(_text(context, rule, refusal) for refusal in refusals))[:_MOST_REASONS]


def _why_unused(context: RuleContext, rule: Rule, candidate: Candidate) -> str:
    names = quoted([context.nodes[i].name for i in candidate.members])
    plan = Planner(context, Traffic()).plan(Proposed(candidate, rule, rule.priority), candidate.members)
    if isinstance(plan, Refused):
        return f"rule '{rule.name}' matches {names}, which cannot be a region: {plan.reason.rstrip('.')}."
    return (
        f"rule '{rule.name}' matches {names}: it was not among the rules that were applied, or other regions took "
        f"these operations first."
    )


def _text(context: RuleContext, rule: Rule, refusal: Refusal) -> str:
    """Return a refusal with where it is: the operations, their module and the line of source it stopped at."""
    names = [context.nodes[i].name for i in refusal.members]
    if not names:
        return f"rule '{rule.name}' matched nothing: {refusal.reason.rstrip('.')}."
    at = context.nodes[refusal.at if refusal.at is not None else refusal.members[-1]]
    path, line = path_of(at.meta), of_node(at)
    where = "".join((f" in {path}" if path else "", f", {line.place}" if line is not None else ""))
    how = _progress(rule.name, refusal, quoted(names), f"'{at.name}'{where}")
    return f"{how}: {refusal.reason.rstrip('.')}."


def _progress(rule: str, refusal: Any, where: str, place: str) -> str:
    """Return how many operations of a rule matched where, and the place at which it declined."""
    if not refusal.wanted:
        return f"rule '{rule}' declined {where} and stopped at {place}"
    if refusal.matched >= refusal.wanted:
        matched = matched_text(refusal.matched, refusal.wanted)
        return f"rule '{rule}': {matched} at {where}, but it declined" + (f" {place}" if place else "")
    stop = f" and stopped at {place}" if place else ""
    return f"rule '{rule}' got to {refusal.matched} of {refusal.wanted} operations at {where}{stop}"
