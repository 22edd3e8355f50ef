"""Candidates made definite: what is inside, what leaves, what it saves, and whether the limits hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import RegionError
from dovetail.fusion.cost import NOTHING, CostModel, Gain
from dovetail.fusion.figures import Figures
from dovetail.fusion.parts import connected, halves, stages
from dovetail.graph.module import attribute
from dovetail.outlining.escapes import settle
from dovetail.outlining.outline import DEEPEST
from dovetail.outlining.record import Identity, call_of, make_identity, walk
from dovetail.outlining.requests import Draft, Request, complete, is_projection, readers_among
from dovetail.rules.rule import Candidate, Rule
from dovetail.rules.scene import Scene


class Wishes(Protocol):
    """What the user asked for by `must`, each wish a number."""

    def met(self, kind: str, positions: Collection[int]) -> frozenset[int]:
        """The wishes that a region of this kind with these operations brings about."""
        ...


class _NoWishes:
    def met(self, kind: str, positions: Collection[int]) -> frozenset[int]:
        return frozenset()


NO_WISHES = _NoWishes()


@dataclass(frozen=True)
class Proposed:
    """A candidate with the rule it comes from and the priority it has after the user's word."""

    candidate: Candidate
    rule: Rule
    priority: int


@dataclass(eq=False)
class Plan:
    """A region that could be made: a settled draft and what it saves.

    `wished` is what the user asked for by `must` that it would bring about. `bonus` is what it saves besides,
    given the regions that were chosen before.
    """

    proposed: Proposed
    draft: Draft
    gain: Gain
    operations: int
    places: tuple[int, ...]
    cloned: tuple[int, ...] = ()
    wished: frozenset[int] = frozenset()
    bonus: Gain = NOTHING

    @property
    def members(self) -> set[int]:
        return self.draft.members

    @property
    def score(self) -> int:
        return self.gain.score + self.bonus.score

    @property
    def weight(self) -> tuple[int, int, int]:
        """What a choice adds up: wishes met, then the score, then the operations taken in."""
        return (len(self.wished), self.score, self.operations)

    @property
    def strength(self) -> tuple[Any, ...]:
        """Sorts the strongest first. Neither names of nodes nor any listing has a part in it."""
        wished, score, operations = self.weight
        draft = self.draft
        tie = (draft.identity.kind, self.proposed.candidate.rule, draft.identity.attrs, draft.default_policy)
        rank = (not wished, -self.proposed.priority, -wished, -score, -operations)
        return (*rank, self.places, self.cloned, tie)

    def conflicts(self, other: Plan) -> bool:
        """Whether both cannot be: one claims what the other claims or has a clone of."""
        mine, theirs = self.draft, other.draft
        return not (
            mine.members.isdisjoint(theirs.members)
            and mine.clones.isdisjoint(theirs.members)
            and mine.members.isdisjoint(theirs.clones)
        )


@dataclass(frozen=True, eq=False)
class Refused:
    """A candidate, or a part of one, that will not be made; `others` are the regions that stand in its way."""

    proposed: Proposed
    members: tuple[int, ...]
    reason: str
    at: int | None = None
    others: tuple[Plan, ...] = ()
    plan: Plan | None = None
    limited: bool = False


class Planner:
    """Makes plans of candidates for one scene."""

    def __init__(self, scene: Scene, cost: CostModel, wishes: Wishes = NO_WISHES) -> None:
        self.scene, self.cost, self.wishes = scene, cost, wishes
        self.figures = Figures(scene.index)
        self._identities: dict[tuple[str, int], Identity] = {}
        self._requests: dict[tuple[str, str], Request] = {}

    def plans(self, proposed: Proposed, gone: Collection[int] = ()) -> Iterator[Plan | Refused]:
        """The plan of a candidate, or why there is none; for a divisible one those of its parts.

        `gone` are operations that it cannot have; only a divisible one can do without.
        """
        candidate = proposed.candidate
        if not candidate.divisible:
            yield self.plan(proposed, candidate.members)
            return
        barred = {i for i in candidate.members if self._obstacle(proposed, i)}
        missing = barred.union(gone)
        if not missing:
            found = self.plan(proposed, candidate.members)
            if isinstance(found, Plan) or not found.limited:
                yield found
            else:
                yield from self._divided(proposed, [candidate.members], found)
            return
        if barred.issuperset(candidate.members):
            i = min(barred, key=self.scene.order.__getitem__)
            yield Refused(proposed, candidate.members, self._obstacle(proposed, i), i)
            return
        yield from self._divided(proposed, stages(self.scene, candidate.members, missing), None)

    def parts(self, plan: Plan, groups: Iterable[Iterable[int]]) -> Iterator[Plan | Refused]:
        """Plans for parts of a divisible plan."""
        yield from self._divided(plan.proposed, groups, None)

    def _divided(
        self, proposed: Proposed, groups: Iterable[Iterable[int]], refused: Refused | None
    ) -> Iterator[Plan | Refused]:
        least = getattr(proposed.rule, "min_size", 2)
        least = least if isinstance(least, int) else 2
        stack = [part for group in groups for part in connected(self.scene, group)]
        made = refused is None
        while stack:
            part = stack.pop()
            if self._count(part) < least:
                continue
            found = (
                self.plan(proposed, part) if refused is None or len(part) < len(refused.members) else refused
            )
            if isinstance(found, Refused) and found.limited:
                stack.extend(p for half in halves(self.scene, part) for p in connected(self.scene, half))
                refused = refused or found
                continue
            made = True
            yield found
        if not made and refused is not None:
            yield refused

    def _count(self, members: Iterable[int]) -> int:
        nodes = self.scene.nodes
        return sum(nodes[i].op != "get_attr" and not is_projection(nodes[i]) for i in members)

    def plan(self, proposed: Proposed, members: Collection[int]) -> Plan | Refused:
        """The plan for a set of operations, or the reason why no region can be made of them alone."""
        scene, candidate = self.scene, proposed.candidate

        def refused(reason: str, at: int | None = None, *, limited: bool = False) -> Refused:
            return Refused(proposed, tuple(members), reason, at, limited=limited)

        try:
            inside = complete(scene.index, self._used(members), candidate.kind)
            if scene.barred or scene.calls:
                for i in sorted(inside, key=scene.order.__getitem__):
                    if reason := self._obstacle(proposed, i):
                        return refused(reason, i)
            draft, gain = self._settled(proposed, inside)
        except RegionError as error:
            return refused(str(error))
        if scene.calls and (reason := self._nesting(candidate, draft)):
            return refused(reason)
        if reason := self._over_limits(draft):
            return refused(reason, limited=True)
        order = scene.order
        places = tuple(sorted([order[i] for i in draft.members]))
        cloned = tuple(sorted([order[i] for i in draft.clones]))
        wished = self.wishes.met(candidate.kind, draft.members | draft.clones)
        operations = self._count(draft.members) + self._count(draft.clones)
        return Plan(proposed, draft, gain, operations, places, cloned, wished)

    def _settled(self, proposed: Proposed, inside: set[int]) -> tuple[Draft, Gain]:
        draft = self._draft(proposed, inside)
        settle(self.scene.index, draft)
        gain = self.cost.gain(self.figures, draft)
        if gain.score < 0 and draft.clones and draft.default_policy == "auto":
            # Redoing them was thought cheap, but does not pay here: return them instead.
            other = self._draft(proposed, inside)
            other.policies.update(dict.fromkeys(draft.clones - draft.policies.keys(), "output"))
            settle(self.scene.index, other)
            better = self.cost.gain(self.figures, other)
            if better.score > gain.score:
                return other, better
        return draft, gain

    def _draft(self, proposed: Proposed, inside: set[int]) -> Draft:
        candidate = proposed.candidate
        plain = candidate.attrs is None
        identity = self._identities.get((candidate.kind, candidate.version)) if plain else None
        if identity is None:
            identity = make_identity(candidate.kind, candidate.version, candidate.attrs)
            if plain:
                self._identities[candidate.kind, candidate.version] = identity
        request = self._requests.get((candidate.rule, candidate.kind))
        if request is None:
            request = Request((), candidate.kind, rule=candidate.rule, round=self.scene.round)
            self._requests[candidate.rule, candidate.kind] = request
        escapes = candidate.escapes
        policies = dict(escapes) if isinstance(escapes, Mapping) else {}
        default = escapes if isinstance(escapes, str) else "auto"
        return Draft(identity, candidate.kind, request, set(inside), policies, default)

    def _used(self, members: Collection[int]) -> set[int]:
        """The members without constants that none of them reads: a region would only hand them through."""
        index = self.scene.index
        listed = set(members)
        constants = [i for i in listed if index.nodes[i].op == "get_attr"]
        for i in constants:
            if not readers_among(index, i, listed):
                listed.discard(i)
        return listed or set(members)

    def _obstacle(self, proposed: Proposed, position: int) -> str:
        """Why an operation cannot be part of this candidate, whatever else is."""
        reason = self.scene.barred.get(position)
        if reason:
            return reason
        candidate = proposed.candidate
        if not proposed.rule.nests and self.scene.kind_of(position) == candidate.kind:
            name = self.scene.nodes[position].name
            return f"'{name}' is a region of kind '{candidate.kind}' already, and the rule does not nest them"
        return ""

    def _nesting(self, candidate: Candidate, draft: Draft) -> str:
        scene, calls = self.scene, self.scene.calls
        inner = [calls[i] for i in draft.inside if i in calls]
        if any(call.depth >= DEEPEST for call in inner):
            return f"it would nest more than {DEEPEST} deep"
        whole = [i for i in draft.outputs if i in calls]
        if whole:
            return f"the results of '{scene.nodes[whole[0]].name}' are used as one, so they cannot leave a region"
        if len(inner) == 1 and self._count(draft.inside) == 1:
            at = next(i for i in draft.inside if i in calls)
            if candidate.kind in _wrapped_kinds(scene.gm, scene.nodes[at]):
                return f"it is a region of kind '{candidate.kind}' already"
        return ""

    def _over_limits(self, draft: Draft) -> str:
        """Which limit a draft breaks, in words; empty if it keeps to all."""
        limits, index, figures = self.scene.limits, self.scene.index, self.figures
        if limits.unlimited:
            return ""
        if limits.nodes is not None:
            count = self._originals(draft)
            if count > limits.nodes:
                return f"it computes {count} operations, and the limit is {limits.nodes}"
        if limits.outputs is not None and len(draft.outputs) > limits.outputs:
            return f"it returns {len(draft.outputs)} values, and the limit is {limits.outputs}"
        inside = draft.members | draft.clones
        operands = {j for i in inside for j in index.data[i] if j not in inside}
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

    def _originals(self, draft: Draft) -> int:
        """How many operations it computes, counted as `Region.nodes` lists them."""
        calls, nodes = self.scene.calls, self.scene.nodes
        inner = [i for i in draft.inside if i in calls]
        if not inner:
            return len(draft.members) + len(draft.clones)
        names = {nodes[i].name for i in draft.inside if i not in calls}
        for i in inner:
            names.update(m.name for m in walk(calls[i]) if call_of(m.meta) is None)
        return len(names)


def _wrapped_kinds(root: nn.Module, node: Node) -> set[str]:
    """The kinds of a call and of what it does nothing but wrap."""
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
