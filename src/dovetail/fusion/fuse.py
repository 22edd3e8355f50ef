"""The `fuse` step: rules propose, candidates are selected, regions are outlined, round by round to a fixed point."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from torch.fx import GraphModule

from dovetail.errors import (
    InvalidArgument,
    RegionError,
    RuleError,
    checked_call,
    did_you_mean,
    user_stacklevel,
)
from dovetail.fusion.candidates import (
    PlannedRegion,
    Planner,
    Proposals,
    Proposed,
    Refused,
    RuleFailure,
    collect,
)
from dovetail.fusion.constraints import (
    Constraints,
    NodeSelector,
    locate,
    open_requirements,
    resolve_constraints,
    separated,
    unmet,
)
from dovetail.fusion.cost import CostModel, Traffic
from dovetail.fusion.ledger import explain, ledger_of, write_ledger
from dovetail.fusion.ledger_entries import Declined, refusal_text
from dovetail.fusion.ledger_writer import (
    LedgerWriter,
    accepted_entry,
    declined_entry,
    fold_fused,
    folded,
    names_in_regions,
    near_miss,
)
from dovetail.fusion.select import choose
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, as_program, pause_gc, require_graph
from dovetail.ir.nodes import is_projection
from dovetail.ir.text_tables import quoted
from dovetail.outlining.outline import outline_drafts
from dovetail.outlining.region import call_of
from dovetail.rules.rule import UNLIMITED, Limits, Rule, RuleContext, Rules, RuleSet, as_rules


def require_rules(rules: Any) -> RuleSet:
    if rules is None:
        # The library traces its patterns when it is first used.
        from dovetail.rules import DEFAULT

        rules = DEFAULT
    chosen = as_rules(rules)
    for rule in chosen:
        for name, kind in (("name", str), ("kind", str), ("priority", int)):
            if not isinstance(getattr(rule, name, None), kind):
                label = str(getattr(rule, "name", type(rule).__name__))
                raise RuleError(label, f"its {name} is not a {kind.__name__}")
    return chosen


def require_count(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name}={value!r} is neither None nor an int of {least} or more.")
    return value


def require_on_error(on_error: Any) -> Literal["fallback", "raise"]:
    if on_error not in ("fallback", "raise"):
        raise InvalidArgument(f"on_error {on_error!r}; give 'fallback' or 'raise'.")
    return on_error


def require_limits(limits: Any) -> Limits:
    if limits is None:
        return UNLIMITED
    if not isinstance(limits, Limits):
        raise InvalidArgument(f"limits is a {type(limits).__name__}; give a Limits.")
    return limits


def require_cost(cost: Any) -> CostModel:
    if cost is None:
        return Traffic()
    methods: list[Callable[..., Any] | None] = [getattr(cost, n, None) for n in ("gain", "freed")]
    if isinstance(cost, type) or not all(callable(m) for m in methods):
        raise InvalidArgument(f"cost {cost!r} is not a cost model: it needs methods `gain` and `freed`.")
    return cost


def require_priorities(priorities: Any, rules: RuleSet) -> Mapping[str, int]:
    if priorities is None:
        return {}
    if not isinstance(priorities, Mapping):
        raise InvalidArgument(
            f"priorities is a {type(priorities).__name__}; give a mapping from rule or kind."
        )
    known = dict.fromkeys([*(r.name for r in rules), *(r.kind for r in rules)])
    by_name = cast("Mapping[Any, Any]", priorities)
    for key, value in by_name.items():
        if key not in known:
            there = f"There are {quoted(list(known), 8)}."
            raise InvalidArgument(
                f"priorities: no rule or kind {key!r}. {did_you_mean(str(key), known, otherwise=there)}"
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgument(f"priorities: {value!r} for '{key}' is not an int.")
    return dict(by_name)


_LOG = logging.getLogger(__name__)
_OUT_OF_FUEL = "the fuel was used up"
_MOST_WHYS = 8


@checked_call(
    strict="on_error='raise'",
    backends="them to `lower` or `compile`",
    backend="it to `lower` or `compile` as `backends`",
)
def fuse(
    gm: GraphModule,
    rules: Rules | None = None,
    *,
    rounds: int | None = None,
    must: NodeSelector | Iterable[NodeSelector | Iterable[NodeSelector]] = (),
    never: NodeSelector | Iterable[NodeSelector] = (),
    limits: Limits | None = None,
    priorities: Mapping[str, int] | None = None,
    fuel: int | None = None,
    cost: CostModel | None = None,
    on_error: Literal["fallback", "raise"] = "fallback",
) -> GraphModule:
    """Return a graph in which the selected candidates of the rules are regions, round by round until nothing changes.

    `rounds` limits the number of rounds. `must` and `never` take a node, its name, a kind, a module path such as
    "layers.*.mlp" or a predicate on nodes, or a list of these: what must be is fused before anything else, a list in
    the list of `must` into one region, or a RegionError gives the reason why it cannot be. `limits` hold for every
    region. `priorities` override those of the rules, by name or kind. `fuel` is the largest number of regions to
    make. A rule that raises is left out, which a warning and the ledger report; with `on_error="raise"` it is an
    error. The input graph is not changed; `explain` reports what was decided and why.
    """
    require_graph(gm)
    chosen = require_rules(rules)
    fusion = _Fusion(
        gm,
        chosen,
        rounds=require_count("rounds", rounds, 0),
        limits=require_limits(limits),
        priorities=require_priorities(priorities, chosen),
        fuel=require_count("fuel", fuel, 0),
        cost=require_cost(cost),
        strict=require_on_error(on_error) == "raise",
        constraints=resolve_constraints(gm, must, never, [rule.kind for rule in chosen]),
    )
    with pause_gc():
        return fusion.run()


@dataclass
class _Fusion:
    """The options and the state of one call of `fuse`: the current graph, and what ledger and errors will report."""

    gm: GraphModule
    rules: RuleSet
    rounds: int | None
    limits: Limits
    priorities: Mapping[str, int]
    fuel: int | None
    cost: CostModel
    strict: bool
    constraints: Constraints
    region_count: int = 0
    failed: set[str] = field(default_factory=set[str])
    matched: set[str] = field(default_factory=set[str])
    declined: list[list[Declined]] = field(default_factory=list[list[Declined]])
    refusals: list[Declined] = field(default_factory=list[Declined])
    violations: dict[str, list[Declined]] = field(default_factory=dict[str, list[Declined]])

    def run(self) -> GraphModule:
        start = self.gm
        self.writer = LedgerWriter(ledger_of(start))
        idle, done, size = 0, 0, _size(start)
        while self.rounds is None or done < self.rounds:
            if self._is_out_of_fuel():
                break
            accepted = self._round()
            done += 1
            if not accepted:
                break
            self.writer.rounds += 1
            now = _size(self.gm)
            idle = 0 if now[0] < size[0] or now[1] < size[1] else idle + 1
            size = now
            if self.rounds is None and idle > len(self.rules):
                self._stop_growth(accepted)
                break
        if self.gm is start:
            self.gm = copy.copy(start) if isinstance(start, Program) else as_program(start)
        self._write_declined()
        before = ledger_of(start)
        # What a rule matched before is inside regions now, so it may not match again.
        matched = self.matched | {entry.rule for entry in (*before.saved, *before.refused)}
        names = dict.fromkeys((*before.unmatched, *(rule.name for rule in self.rules)))
        unmatched = tuple(name for name in names if name not in matched)
        ledger = self.writer.ledger(self.rules, self.limits, self.constraints.excluded)
        write_ledger(self.gm, replace(ledger, unmatched=unmatched))
        self._require_must()
        return self.gm

    def _round(self) -> tuple[PlannedRegion, ...]:
        number = self.writer.rounds + 1
        index = Index(self.gm)
        index.require_order()
        excluded = self.constraints.excluded
        barred = {i: excluded[name] for name, i in locate(index.nodes, excluded).items()}
        context = RuleContext(self.gm, index=index, limits=self.limits, barred=barred, round=number)
        proposals = collect(
            context, self.rules, skip=self.failed, priorities=self.priorities, strict=self.strict
        )
        self.failed.update(failure.rule for failure in proposals.failures)
        self.matched.update(self.failed, (p.rule.name for p in proposals.candidates))
        self.matched.update(refusal.rule for refusal in proposals.refusals)
        for failure in proposals.failures:
            _warn(self.rules[failure.rule], failure)
        allowed, excluded_by_kind = self._filter_kinds(proposals.candidates)
        planner = Planner(context, self.cost, open_requirements(self.constraints, index.nodes))
        choice = choose(planner, allowed)
        accepted, refused = choice.accepted, [*excluded_by_kind, *choice.refused]
        if self.fuel is not None:
            left = self.fuel - self.region_count
            refused += [
                Refused(plan.proposed, tuple(plan.draft.inside), _OUT_OF_FUEL) for plan in accepted[left:]
            ]
            accepted = accepted[:left]
        names: list[str] = []
        if accepted:
            self.gm, names = outline_drafts(index, [plan.draft for plan in accepted])
        self._write(context, proposals, accepted, names, refused)
        self.region_count += len(accepted)
        _LOG.info(
            "round %d: %d nodes, %d candidates, %d regions made, %d refused, %d rules failed",
            number,
            len(index),
            len(proposals.candidates),
            len(accepted),
            len(refused) + len(proposals.refusals),
            len(proposals.failures),
        )
        return accepted

    def _filter_kinds(self, candidates: list[Proposed]) -> tuple[list[Proposed], list[Refused]]:
        """Return the candidates that `never` does not exclude by their kind, and the refusals of the others."""
        kinds = self.constraints.excluded_kinds
        if not kinds:
            return candidates, []
        allowed = [p for p in candidates if p.candidate.kind not in kinds]
        return allowed, [
            Refused(p, p.candidate.members, kinds[p.candidate.kind])
            for p in candidates
            if p.candidate.kind in kinds
        ]

    def _write(
        self,
        context: RuleContext,
        proposals: Proposals,
        accepted: tuple[PlannedRegion, ...],
        names: list[str],
        refused: list[Refused],
    ) -> None:
        writer = self.writer
        regions = dict(zip(accepted, names, strict=True))
        writer.accept(accepted_entry(context, plan, name) for plan, name in regions.items())
        for failure in proposals.failures:
            writer.fail(failure)
        kinds = {rule.name: rule.kind for rule in self.rules}
        entries = folded(
            [near_miss(context, r, kinds.get(r.rule, "")) for r in proposals.refusals], kinds, writer.accepted
        )
        self.violations.clear()
        for one in refused:
            entry = declined_entry(context, one, regions)
            entries.append(entry)
            if self._is_violation(context, one):
                self.violations.setdefault(one.proposed.candidate.kind, []).append(entry)
        self.declined.append(entries)
        if self.constraints.must:
            self.refusals.extend(entries)

    def _write_declined(self) -> None:
        """Record the refusals of all rounds: what the last round fused folds near-misses of the first."""
        inside = names_in_regions(self.gm)
        for entries in self.declined:
            for entry in sorted(fold_fused(entries, inside), key=lambda e: e.folded):
                self.writer.decline(entry)

    def _is_violation(self, context: RuleContext, refused: Refused) -> bool:
        """Whether a refusal violates a `must` by kind: no conflict with another required region explains it."""
        candidate = refused.proposed.candidate
        if not any(candidate.kind in c.kinds for c in self.constraints.must) or candidate.divisible:
            return False
        if refused.reason == _OUT_OF_FUEL or any(other.required for other in refused.others):
            return False
        return not any(context.kind_of(i) == candidate.kind for i in candidate.members)

    def _require_must(self) -> None:
        if not self.constraints.must or self._is_out_of_fuel():
            return
        problems: list[str] = []
        for constraint, missing in unmet(self.constraints, list(self.gm.graph.nodes)):
            what = f"{quoted(sorted(missing))} in no region" if missing else "no region of this kind was made"
            problems.append(f"{constraint.text}: {what}. {self._why(missing, constraint.kinds)}")
        for constraint in self.constraints.must:
            for entry in [e for kind in constraint.kinds for e in self.violations.get(kind, ())]:
                problems.append(f"{constraint.text}: {refusal_text(entry)}")
        for text, first, second in separated(self.constraints, list(self.gm.graph.nodes)):
            reasons = explain(self.gm).why_not(first, second)
            why = f"Why: {_first_of(reasons, ' ', 'And')}" if reasons else "No rule proposed it."
            problems.append(f"{text}: '{first}' and '{second}' are in no common region. {why}")
        if problems:
            shown = _first_of(problems, "\n", "... and")
            raise RegionError(f"what must be fused could not be; nothing was changed.\n{shown}")

    def _is_out_of_fuel(self) -> bool:
        return self.fuel is not None and self.region_count >= self.fuel

    def _why(self, missing: frozenset[str], kinds: frozenset[str]) -> str:
        rules = {rule.name for rule in self.rules if rule.kind in kinds}
        refusals = [
            refusal_text(entry)
            for entry in self.refusals
            if entry.rule in rules or not missing.isdisjoint((*entry.nodes, entry.place))
        ]
        failed = [f"rule '{f.rule}' failed: {f.error}" for f in self.writer.errors if f.rule in self.failed]
        if not refusals and not failed:
            return "No rule proposed it."
        return f"Why: {_first_of([*refusals, *failed], '; ', 'and')}."

    def _stop_growth(self, accepted: tuple[PlannedRegion, ...]) -> None:
        """Report rules that wrap their own regions again: fusing would never terminate."""
        for name in sorted({plan.proposed.rule.name for plan in accepted}):
            what = "makes new regions round after round without taking anything more in; fusing was stopped"
            if self.strict:
                raise RuleError(name, what)
            failure = RuleFailure(name, what, "", self.writer.rounds)
            self.writer.fail(failure)
            _warn(self.rules[name], failure)


def _first_of(texts: Iterable[str], separator: str, conjunction: str) -> str:
    """Return distinct texts joined, the number of the others at the end of many."""
    distinct = list(dict.fromkeys(texts))
    more = [f"{conjunction} {len(distinct) - _MOST_WHYS} more"] if len(distinct) > _MOST_WHYS else []
    return separator.join([*distinct[:_MOST_WHYS], *more])


# The errors already warned of, by rule.
_WARNED: weakref.WeakKeyDictionary[Rule, set[str]] = weakref.WeakKeyDictionary()


def _warn(rule: Rule, failure: RuleFailure) -> None:
    """Warn of a rule that failed, once per rule and error."""
    try:
        known = _WARNED.setdefault(rule, set())
    except TypeError:  # a rule that cannot be hashed
        known = set[str]()
    if failure.error in known:
        return
    known.add(failure.error)
    trace = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    what = failure.error.removeprefix(f"rule '{failure.rule}': ").removesuffix(".")
    warnings.warn(
        f"rule '{failure.rule}' failed and was left out: {what}. Correct it, or give on_error='raise' to "
        f"stop there.{trace}",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )


def _size(gm: GraphModule) -> tuple[int, int]:
    """Return the number of operations of a graph, and how many of them are not regions."""
    operations = [
        node
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and not is_projection(node)
    ]
    return len(operations), sum(call_of(node.meta) is None for node in operations)
