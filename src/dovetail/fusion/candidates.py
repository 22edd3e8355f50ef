"""Candidates: collecting them from the rules, and planning a region for each.

A plan is a draft with resolved escapes, checked against the limits, with the gain that the cost model estimates. A
divisible candidate that cannot be one region is planned in convex parts.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import DovetailError, InvalidArgument, RegionError, RuleError
from dovetail.fusion.constraints import Requirements
from dovetail.fusion.cost import NOTHING, CostModel, Figures, Gain
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection
from dovetail.outlining.escapes import POLICIES, RegionDraft, readers_among, resolve_escapes
from dovetail.outlining.outline import MAX_DEPTH, complete_members
from dovetail.outlining.region import Identity, call_of, clone_of, make_identity, walk
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext, RuleSet


def over_limits(context: RuleContext, figures: Figures, draft: RegionDraft) -> str:
    """Return which limit a draft with resolved escapes exceeds, in words; empty if none."""
    limits, index = context.limits, context.index
    if limits.unlimited:
        return ""
    if limits.nodes is not None:
        count = _originals(context, draft)
        if count > limits.nodes:
            return too_many(count, limits.nodes)
    if limits.outputs is not None and len(draft.outputs) > limits.outputs:
        return f"it returns {len(draft.outputs)} values, and the limit is {limits.outputs}"
    operands = draft.operands(index)
    if limits.operands is not None and len(operands) > limits.operands:
        return f"it reads {len(operands)} values, and the limit is {limits.operands}"
    if limits.bytes is not None:
        ends = [*sorted(operands), *draft.outputs]
        unknown = next((i for i in ends if not figures.known(i)), None)
        if unknown is not None:
            name = index.nodes[unknown].name
            return f"the size of '{name}' is not known, so the limit on bytes could not be kept"
        total = sum(figures.bytes(i) for i in ends)
        if total > limits.bytes:
            return f"it reads and returns {total} bytes, and the limit is {limits.bytes}"
    return ""


def too_many(count: int, most: int) -> str:
    return f"it computes {count} operations, and the limit is {most}"


def _originals(context: RuleContext, draft: RegionDraft) -> int:
    """Return the number of operations a draft computes, counted as `Region.nodes` has them."""
    calls, nodes = context.calls, context.nodes
    inner = [i for i in draft.inside if i in calls] if calls else []
    if not inner:
        return len(draft.members) + len(draft.clones)
    names = {clone_of(nodes[i]) or nodes[i].name for i in draft.inside if i not in calls}
    for i in inner:
        names.update(m.original for m in walk(calls[i]) if call_of(m.meta) is None)
    return len(names)


def nesting_obstacle(context: RuleContext, draft: RegionDraft, operations: int) -> str:
    """Return why a draft cannot contain the regions it does, "" if it can. `operations` is its number of operations."""
    calls, kind = context.calls, draft.identity.kind
    inner = [i for i in draft.inside if i in calls]
    if any(calls[i].depth >= MAX_DEPTH for i in inner):
        return f"it would nest more than {MAX_DEPTH} deep"
    for i in draft.outputs:
        if i in calls:
            name = context.nodes[i].name
            return f"the results of '{name}' are used as one, so they cannot leave a region"
    if len(inner) == operations == 1 and kind in _wrapped_kinds(context.gm, context.nodes[inner[0]]):
        return f"it is a region of kind '{kind}' already"
    return ""


def _wrapped_kinds(root: nn.Module, node: Node) -> set[str]:
    """Return the kind of a call and, while its body is a single call, the kinds of what it wraps."""
    kinds: set[str] = set()
    call = call_of(node.meta)
    while call is not None:
        kinds.add(call.identity.kind)
        body = attribute(root, cast("str", node.target))
        if not isinstance(body, GraphModule):
            break
        inside = [
            n for n in body.graph.nodes if n.op not in ("placeholder", "output") and not is_projection(n)
        ]
        if len(inside) != 1:
            break
        root, node = body, inside[0]
        call = call_of(node.meta)
    return kinds


def stages(context: RuleContext, members: Collection[int], missing: Collection[int]) -> list[list[int]]:
    """Return what remains of a convex set without some operations, as sets that are convex again.

    An operation that depends on another through a missing one is in a later set.
    """
    whole, gone = set(members), set(missing)
    before = context.index.before
    reached: dict[int, int] = {}
    groups: list[list[int]] = []
    for i in sorted(whole):
        stage = -1 if i in gone else 0
        for j in before[i]:
            if j in whole:
                passed = reached[j] + (1 if j in gone and i not in gone else 0)
                stage = max(stage, passed)
        reached[i] = stage
        if i not in gone:
            while len(groups) <= stage:
                groups.append([])
            groups[stage].append(i)
    return [group for group in groups if group]


def connected(context: RuleContext, members: Iterable[int]) -> list[list[int]]:
    """Return the components of a set that data edges connect; a constant is in each component that reads it."""
    index = context.index
    inside = set(members)
    constants = {i for i in inside if index.nodes[i].op == "get_attr"}
    waiting = inside - constants
    near: dict[int, list[int]] = {i: [] for i in waiting}
    for i in waiting:
        for j in index.data[i]:
            if j in waiting:
                near[i].append(j)
                near[j].append(i)
    pieces: list[list[int]] = []
    for start in sorted(waiting, key=context.order.__getitem__):
        if start not in waiting:
            continue
        waiting.discard(start)
        piece = [start]
        for i in piece:
            for j in near[i]:
                if j in waiting:
                    waiting.discard(j)
                    piece.append(j)
        read = {j for i in piece for j in index.data[i] if j in constants}
        pieces.append(sorted([*piece, *read]))
    return pieces


def halves(context: RuleContext, members: Collection[int]) -> list[list[int]]:
    """Split a convex set in two in structural order; both halves are convex."""
    nodes = context.nodes
    constants = [i for i in members if nodes[i].op == "get_attr"]
    rest = sorted((i for i in members if nodes[i].op != "get_attr"), key=context.order.__getitem__)
    middle = (len(rest) + 1) // 2
    return [[*constants, *half] for half in (rest[:middle], rest[middle:]) if half]


def split_at(context: RuleContext, members: Collection[int], reached: Collection[int]) -> list[list[int]]:
    """Split a set into what does not depend on `reached` inside the set, and what does."""
    inside, later = set(members), set(reached)
    before = context.index.before
    for i in sorted(inside):
        if i not in later and any(j in later and j in inside for j in before[i]):
            later.add(i)
    return [part for part in (sorted(inside - later), sorted(inside & later)) if part]


@dataclass(frozen=True)
class Proposed:
    """A candidate with its rule and its priority, which the user may have changed."""

    candidate: Candidate
    rule: Rule
    priority: int


@dataclass(eq=False)
class PlannedRegion:
    """A region that could be outlined: a draft with resolved escapes and its gain.

    `required` are the requirements of `must` that it meets. `bonus` is what it saves in addition, given the regions
    that were chosen before.
    """

    proposed: Proposed
    draft: RegionDraft
    gain: Gain
    operations: int
    places: tuple[int, ...]
    cloned: tuple[int, ...] = ()
    required: frozenset[int] = frozenset()
    bonus: Gain = NOTHING

    @property
    def members(self) -> set[int]:
        return self.draft.members

    @property
    def score(self) -> int:
        return self.gain.score + self.bonus.score

    @property
    def weight(self) -> tuple[int, int, int]:
        """What a selection maximizes: requirements met, then the score, then the number of operations."""
        return (len(self.required), self.score, self.operations)

    @property
    def strength(self) -> tuple[Any, ...]:
        """Sort key, the strongest first. It depends neither on names nor on the order of nodes."""
        required, score, operations = self.weight
        draft = self.draft
        tie = (draft.identity.kind, self.proposed.candidate.rule, draft.identity.attrs, draft.default_policy)
        rank = (-required, -self.proposed.priority, -score, -operations)
        return (*rank, self.places, self.cloned, tie)

    def conflicts(self, other: PlannedRegion) -> bool:
        """Whether both cannot be chosen: one has a member that the other has or clones."""
        mine, theirs = self.draft, other.draft
        return not (
            mine.members.isdisjoint(theirs.members)
            and mine.clones.isdisjoint(theirs.members)
            and mine.members.isdisjoint(theirs.clones)
        )


@dataclass(frozen=True, eq=False)
class Refused:
    """A candidate, or a part of one, that does not become a region; `others` are the regions that conflict with it."""

    proposed: Proposed
    members: tuple[int, ...]
    reason: str
    at: int | None = None
    others: tuple[PlannedRegion, ...] = ()
    plan: PlannedRegion | None = None
    limited: bool = False


class Planner:
    """Plans regions for the candidates of one context."""

    def __init__(
        self, context: RuleContext, cost: CostModel, requirements: Requirements | None = None
    ) -> None:
        self.context, self.cost = context, cost
        self.requirements = requirements or Requirements()
        self.figures = Figures(context.index)
        self._identities: dict[tuple[str, int], Identity] = {}

    def plans(self, proposed: Proposed) -> Iterator[PlannedRegion | Refused]:
        """Yield the plan of a candidate or its refusal; for a divisible one those of its parts, if necessary."""
        members, order = proposed.candidate.members, self.context.order
        if not proposed.candidate.divisible:
            yield self.plan(proposed, members)
            return
        excluded = [i for i in members if self._obstacle(proposed, i)]
        if len(excluded) == len(members):
            at = min(excluded, key=order.__getitem__)
            yield Refused(proposed, members, self._obstacle(proposed, at), at)
        elif excluded:
            yield from self.parts(proposed, stages(self.context, members, excluded))
        else:
            plan = self._too_many(proposed, members) or self.plan(proposed, members)
            if isinstance(plan, Refused) and plan.limited:
                yield from self.parts(proposed, halves(self.context, members), plan)
            else:
                yield plan

    def parts(
        self, proposed: Proposed, groups: Iterable[Iterable[int]], over: Refused | None = None
    ) -> Iterator[PlannedRegion | Refused]:
        """Yield plans for parts of a divisible candidate, split further where they exceed limits.

        Parts are connected if the candidate was. `over` is the refusal of the whole, yielded if no part is possible.
        """
        least = getattr(proposed.rule, "min_size", 2)
        least = least if isinstance(least, int) else 2
        loose = len(connected(self.context, proposed.candidate.members)) > 1

        def pieces(group: Iterable[int]) -> list[list[int]]:
            return [list(group)] if loose else connected(self.context, group)

        waiting = [piece for group in groups for piece in pieces(group)]
        any_part = False
        while waiting:
            part = waiting.pop()
            if self.count(part) < least:
                continue
            plan = self._too_many(proposed, part) or self.plan(proposed, part)
            if isinstance(plan, Refused) and plan.limited:
                over = over or plan
                waiting.extend(piece for half in halves(self.context, part) for piece in pieces(half))
            else:
                any_part = True
                yield plan
        if over is not None and not any_part:
            yield over

    def _too_many(self, proposed: Proposed, members: Collection[int]) -> Refused | None:
        """Return the refusal of a set that exceeds the limit on nodes whatever becomes of its escapes."""
        most, escapes = self.context.limits.nodes, proposed.candidate.escapes
        policies = escapes.values() if isinstance(escapes, Mapping) else (escapes,)
        if most is None or len(members) <= most or "leave" in policies or self.context.calls:
            return None
        return Refused(proposed, tuple(members), too_many(len(members), most), limited=True)

    def count(self, members: Iterable[int]) -> int:
        """Return the number of operations among positions, the elements of a tuple counted with it."""
        nodes = self.context.nodes
        return sum(nodes[i].op != "get_attr" and not is_projection(nodes[i]) for i in members)

    def plan(self, proposed: Proposed, members: Collection[int]) -> PlannedRegion | Refused:
        """Return the plan for a set of operations, or the reason why they cannot be a region."""
        context, candidate = self.context, proposed.candidate

        def refused(reason: str, at: int | None = None, *, limited: bool = False) -> Refused:
            return Refused(proposed, tuple(members), reason, at, limited=limited)

        try:
            inside = complete_members(context.index, self._used(members), candidate.kind)
            if context.barred or context.calls:
                for i in sorted(inside, key=context.order.__getitem__):
                    if reason := self._obstacle(proposed, i):
                        return refused(reason, i)
            draft, gain = self._draft_and_gain(proposed, inside)
        except RegionError as error:
            return refused(str(error))
        if context.calls and (reason := nesting_obstacle(context, draft, self.count(draft.inside))):
            return refused(reason)
        if reason := over_limits(context, self.figures, draft):
            return refused(reason, limited=True)
        order = context.order
        places = tuple(sorted([order[i] for i in draft.members]))
        cloned = tuple(sorted([order[i] for i in draft.clones]))
        required = self.requirements.met_by(candidate.kind, draft.members | draft.clones)
        operations = self.count(draft.members) + self.count(draft.clones)
        return PlannedRegion(proposed, draft, gain, operations, places, cloned, required)

    def _draft_and_gain(self, proposed: Proposed, inside: set[int]) -> tuple[RegionDraft, Gain]:
        draft = self._draft(proposed, inside)
        resolve_escapes(self.context.index, draft)
        gain = self.cost.gain(self.figures, draft)
        if gain.score < 0 and draft.clones and draft.default_policy == "auto":
            # Recomputing was estimated to be cheap, but costs more here: return the values instead.
            other = self._draft(proposed, inside)
            other.policies.update(dict.fromkeys(draft.clones - draft.policies.keys(), "output"))
            resolve_escapes(self.context.index, other)
            better = self.cost.gain(self.figures, other)
            if better.score > gain.score:
                return other, better
        return draft, gain

    def _draft(self, proposed: Proposed, inside: set[int]) -> RegionDraft:
        candidate = proposed.candidate
        key = (candidate.kind, candidate.version)
        identity = self._identities.get(key) if candidate.attrs is None else None
        if identity is None:
            identity = make_identity(*key, candidate.attrs)
            if candidate.attrs is None:
                self._identities[key] = identity
        nodes, escapes = self.context.nodes, candidate.escapes
        return RegionDraft(
            identity,
            candidate.kind,
            set(inside),
            dict(escapes) if isinstance(escapes, Mapping) else {},
            escapes if isinstance(escapes, str) else "auto",
            candidate.rule,
            self.context.round,
            {name: nodes[i] for name, i in (candidate.arguments or {}).items()},
            tuple(None if i is None else nodes[i] for i in candidate.results),
        )

    def _used(self, members: Collection[int]) -> set[int]:
        """Return the members without constants that none of them reads: the region would only return them."""
        index = self.context.index
        used = set(members)
        for i in [i for i in used if index.nodes[i].op == "get_attr"]:
            if not readers_among(index, i, used):
                used.discard(i)
        return used or set(members)

    def _obstacle(self, proposed: Proposed, position: int) -> str:
        """Return why an operation cannot be part of this candidate in any case, "" if it can."""
        reason = self.context.barred.get(position)
        if reason:
            return reason
        candidate = proposed.candidate
        if not proposed.rule.nests and self.context.kind_of(position) == candidate.kind:
            name = self.context.nodes[position].name
            return f"'{name}' is a region of kind '{candidate.kind}' already, and the rule does not nest them"
        return ""


@dataclass(frozen=True)
class RuleFailure:
    """A rule that raised or proposed something invalid. Nothing it proposed in that round is used."""

    rule: str
    error: str
    traceback: str
    round: int


@dataclass
class Proposals:
    """The proposals of all rules for one context."""

    candidates: list[Proposed] = field(default_factory=list[Proposed])
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    failures: list[RuleFailure] = field(default_factory=list[RuleFailure])


def collect(
    context: RuleContext,
    rules: RuleSet,
    *,
    skip: Collection[str] = (),
    priorities: Mapping[str, int] | None = None,
    strict: bool = False,
) -> Proposals:
    """Return the proposals of every rule but those in `skip`. A rule that fails does not affect the others.

    With `strict`, the first failure is raised as a RuleError.
    """
    proposals = Proposals()
    for rule in rules:
        if rule.name in skip:
            continue
        try:
            candidates, refusals = _proposals_of(context, rule)
        except Exception as error:
            if strict:
                if isinstance(error, RuleError):
                    raise
                what = f"raised {type(error).__name__} while proposing: {error}"
                raise RuleError(rule.name, what) from error
            text = "".join(traceback.format_exception(error))
            words = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
            proposals.failures.append(RuleFailure(rule.name, words, text, context.round))
            continue
        for candidate in candidates:
            proposals.candidates.append(Proposed(candidate, rule, _priority(rule, candidate, priorities)))
        proposals.refusals.extend(refusals)
    return proposals


def _priority(rule: Rule, candidate: Candidate, priorities: Mapping[str, int] | None) -> int:
    """Return a candidate's priority: its own or its rule's, shifted by what the user set for the rule or the kind."""
    own = rule.priority if candidate.priority is None else candidate.priority
    for key in (rule.name, candidate.kind):
        if priorities is not None and key in priorities:
            return priorities[key] + own - rule.priority
    return own


def _proposals_of(context: RuleContext, rule: Rule) -> tuple[list[Candidate], list[Refusal]]:
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    identities: set[tuple[str, int]] = set()
    proposed: Any = rule.propose(context)
    if proposed is None or not hasattr(proposed, "__iter__"):
        raise RuleError(
            rule.name,
            f"propose returned a {type(proposed).__name__}; it is to yield Candidate and Refusal",
        )
    for proposal in proposed:
        if isinstance(proposal, Candidate):
            _require_candidate(context, rule, proposal, identities)
            candidates.append(proposal)
        elif isinstance(proposal, Refusal):
            _require_positions(context, rule, proposal.members)
            if proposal.at is not None:
                _require_positions(context, rule, (proposal.at,))
            refusals.append(proposal)
        else:
            raise RuleError(
                rule.name, f"proposes a {type(proposal).__name__}, which is neither a Candidate nor a Refusal"
            )
    return candidates, refusals


def _require_positions(context: RuleContext, rule: Rule, members: Any) -> None:
    count = len(context.index)
    if not isinstance(members, (tuple, list, set, frozenset)):
        raise RuleError(rule.name, f"members are a {type(members).__name__}; give a tuple of positions")
    for i in cast("tuple[Any, ...]", members):
        if type(i) is not int or not 0 <= i < count:
            raise RuleError(rule.name, f"{i!r} is not a position of this graph, which has {count} nodes")


def _require_candidate(
    context: RuleContext, rule: Rule, candidate: Candidate, identities: set[tuple[str, int]]
) -> None:
    _require_positions(context, rule, candidate.members)
    if not candidate.members:
        raise RuleError(rule.name, "proposes a candidate without operations")
    nodes = context.nodes
    for i in candidate.members:
        if nodes[i].op in ("placeholder", "output"):
            raise RuleError(
                rule.name, f"proposes '{nodes[i].name}', and a graph's {nodes[i].op} is not an operation"
            )
    try:
        if candidate.attrs is not None or (candidate.kind, candidate.version) not in identities:
            make_identity(candidate.kind, candidate.version, candidate.attrs)
            identities.add((candidate.kind, candidate.version))
    except InvalidArgument as error:
        raise RuleError(rule.name, str(error).removesuffix(".")) from error
    escapes: Any = candidate.escapes
    if isinstance(escapes, Mapping):
        by_position = cast("Mapping[Any, Any]", escapes)
        _require_positions(context, rule, tuple(by_position))
        policies = list(by_position.values())
    else:
        policies = [escapes]
    for policy in policies:
        if policy not in POLICIES:
            raise RuleError(rule.name, f"escapes {policy!r} is not one of {', '.join(POLICIES)}")
    priority: Any = candidate.priority
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise RuleError(rule.name, f"priority {priority!r} is neither None nor an int")
