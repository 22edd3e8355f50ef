"""Candidates made definite: what is inside, what leaves, what it saves, and whether the limits hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dovetail.errors import RegionError
from dovetail.fusion.checks import nesting_obstacle, over_limits, too_many
from dovetail.fusion.cost import NOTHING, CostModel, Gain
from dovetail.fusion.figures import Figures
from dovetail.fusion.parts import connected, halves, stages
from dovetail.outlining.escapes import settle
from dovetail.outlining.record import Identity, make_identity
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
        rank = (-wished, -self.proposed.priority, -score, -operations)
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

    def plans(self, proposed: Proposed) -> Iterator[Plan | Refused]:
        """The plan of a candidate, or why there is none; for a divisible one those of its parts, if need be."""
        members, order = proposed.candidate.members, self.scene.order
        if not proposed.candidate.divisible:
            yield self.plan(proposed, members)
            return
        barred = [i for i in members if self._obstacle(proposed, i)]
        if len(barred) == len(members):
            at = min(barred, key=order.__getitem__)
            yield Refused(proposed, members, self._obstacle(proposed, at), at)
        elif barred:
            yield from self.parts(proposed, stages(self.scene, members, barred))
        else:
            found = self._too_many(proposed, members) or self.plan(proposed, members)
            if isinstance(found, Refused) and found.limited:
                yield from self.parts(proposed, halves(self.scene, members), found)
            else:
                yield found

    def parts(
        self, proposed: Proposed, groups: Iterable[Iterable[int]], over: Refused | None = None
    ) -> Iterator[Plan | Refused]:
        """Plans for parts of a divisible candidate, cut further where limits want it.

        Parts are in one piece if the candidate was. `over` is the limit that the whole broke: the reason if no part
        can be had.
        """
        least = getattr(proposed.rule, "min_size", 2)
        least = least if isinstance(least, int) else 2
        loose = len(connected(self.scene, proposed.candidate.members)) > 1

        def pieces(group: Iterable[int]) -> list[list[int]]:
            return [list(group)] if loose else connected(self.scene, group)

        waiting = [piece for group in groups for piece in pieces(group)]
        made = False
        while waiting:
            part = waiting.pop()
            if self.count(part) < least:
                continue
            found = self._too_many(proposed, part) or self.plan(proposed, part)
            if isinstance(found, Refused) and found.limited:
                over = over or found
                waiting.extend(piece for half in halves(self.scene, part) for piece in pieces(half))
            else:
                made = True
                yield found
        if over is not None and not made:
            yield over

    def _too_many(self, proposed: Proposed, members: Collection[int]) -> Refused | None:
        """The refusal of a set that is plainly over the limit on nodes, before anything is settled about it."""
        most, escapes = self.scene.limits.nodes, proposed.candidate.escapes
        policies = escapes.values() if isinstance(escapes, Mapping) else (escapes,)
        if most is None or len(members) <= most or "leave" in policies or self.scene.calls:
            return None
        return Refused(proposed, tuple(members), too_many(len(members), most), limited=True)

    def count(self, members: Iterable[int]) -> int:
        """How many operations there are among positions, the parts of a tuple counted with it."""
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
        if scene.calls and (reason := nesting_obstacle(scene, draft, self.count(draft.inside))):
            return refused(reason)
        if reason := over_limits(scene, self.figures, draft):
            return refused(reason, limited=True)
        order = scene.order
        places = tuple(sorted([order[i] for i in draft.members]))
        cloned = tuple(sorted([order[i] for i in draft.clones]))
        wished = self.wishes.met(candidate.kind, draft.members | draft.clones)
        operations = self.count(draft.members) + self.count(draft.clones)
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
        request = self._request(candidate)
        escapes = candidate.escapes
        policies = dict(escapes) if isinstance(escapes, Mapping) else {}
        default = escapes if isinstance(escapes, str) else "auto"
        return Draft(identity, candidate.kind, request, set(inside), policies, default)

    def _request(self, candidate: Candidate) -> Request:
        request = self._requests.get((candidate.rule, candidate.kind))
        if request is None:
            request = Request((), candidate.kind, rule=candidate.rule, round=self.scene.round)
            self._requests[candidate.rule, candidate.kind] = request
        if candidate.arguments is None and not candidate.results:
            return request
        nodes = self.scene.nodes
        named = {name: nodes[i] for name, i in (candidate.arguments or {}).items()}
        results = tuple(None if i is None else nodes[i] for i in candidate.results)
        return replace(request, arguments=named, results=results)

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
