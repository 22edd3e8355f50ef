"""The choice: of all that the rules proposed, what becomes a region."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.fusion.acyclicity import Loop, RegionContraction, cyclic_core, describe_loop, find_cycle
from dovetail.fusion.candidates import PlannedRegion, Planner, Proposed, Refused, split_at, stages
from dovetail.fusion.cost import NOTHING, CostModel, Figures, Gain
from dovetail.ir.union_find import UnionFind
from dovetail.outlining.escapes import dead_originals, readers_among

Weight = tuple[int, ...]


def best_choice(weights: Sequence[Weight], clashes: Sequence[int], most_steps: int = 5_000) -> list[int]:
    """Which to take so that no two clash and their weights add up to the most, compared from the first entry on.

    All weights have as many entries. `clashes[i]` has a bit for each that excludes `i`. Of equal choices the one found first wins, and entries are
    tried in turn. After `most_steps` steps the best choice so far is taken, which is never worse than taking
    whatever does not clash in turn.
    """
    count = len(weights)
    cliques = _cliques(weights, clashes)
    best: Weight | None = None
    chosen = steps = 0
    nothing = (0,) * max((len(weight) for weight in weights), default=0)
    stack: list[tuple[int, int, int, Weight]] = [(0, 0, 0, nothing)]
    while stack and (steps < most_steps or best is None):
        steps += 1
        at, taken, out, total = stack.pop()
        while at < count and out >> at & 1:
            at += 1
        if best is not None and _bound(total, weights, cliques, out | ((1 << at) - 1)) <= best:
            continue
        if at == count:
            best, chosen = total, taken
            continue
        bit = 1 << at
        stack.append((at + 1, taken, out, total))
        stack.append((at + 1, taken | bit, out | clashes[at], _plus(total, weights[at])))
    return [i for i in range(count) if chosen >> i & 1]


def _cliques(weights: Sequence[Weight], clashes: Sequence[int]) -> list[list[int]]:
    """Groups of entries of which at most one can be taken, the heaviest first in each."""
    groups: list[list[int]] = []
    for i in sorted(range(len(weights)), key=lambda i: weights[i], reverse=True):
        for group in groups:
            if all(clashes[i] >> j & 1 for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _bound(total: Weight, weights: Sequence[Weight], cliques: list[list[int]], out: int) -> Weight:
    """No choice can come to more than this: the heaviest of each group that is still to be had."""
    nothing = (0,) * len(total)
    for group in cliques:
        for i in group:
            if not out >> i & 1:
                if weights[i] > nothing:
                    total = _plus(total, weights[i])
                break
    return total


def _plus(a: Weight, b: Weight) -> Weight:
    return tuple([x + y for x, y in zip(a, b, strict=True)])


class Selection:
    """The plans that were accepted, by the operations they have and those they have clones of."""

    def __init__(self, cost: CostModel, figures: Figures) -> None:
        self._cost, self._figures, self._index = cost, figures, figures.index
        self.plans: dict[PlannedRegion, None] = {}
        self._owner: dict[int, PlannedRegion] = {}
        self._cloned: dict[int, dict[PlannedRegion, None]] = {}

    def __contains__(self, plan: object) -> bool:
        return plan in self.plans

    def accept(self, plan: PlannedRegion) -> None:
        self.plans[plan] = None
        self._owner.update(dict.fromkeys(plan.members, plan))
        for c in plan.draft.clones:
            self._cloned.setdefault(c, {})[plan] = None

    def take_back(self, plan: PlannedRegion) -> None:
        del self.plans[plan]
        for i in plan.members:
            del self._owner[i]
        for c in plan.draft.clones:
            del self._cloned[c][plan]
            if not self._cloned[c]:
                del self._cloned[c]

    def winners(self, plan: PlannedRegion) -> list[PlannedRegion]:
        """What was taken before and excludes a plan."""
        found: dict[PlannedRegion, None] = {}
        for i in plan.members:
            if i in self._owner:
                found[self._owner[i]] = None
            if i in self._cloned:
                found.update(self._cloned[i])
        for i in plan.draft.clones:
            if i in self._owner:
                found[self._owner[i]] = None
        return list(found)

    def recost(self, plan: PlannedRegion) -> bool:
        """Count in what a plan saves now that others have clones of what it clones; whether that changed it."""
        bonus = NOTHING
        for c in plan.draft.clones:
            if c in dead_originals(self._index, [p.draft for p in (*self._cloned.get(c, ()), plan)]):
                bonus = _sum(bonus, self._cost.freed(self._figures, c))
        changed = plan.bonus != bonus
        if changed:
            plan.bonus = bonus
        return changed

    def listed(self) -> list[PlannedRegion]:
        """The plans in an order that no listing can change, what must be first, each with all that it saves."""
        plans = sorted(self.plans, key=lambda p: (not p.wished, p.places))
        credited: dict[int, PlannedRegion] = {}
        for plan in plans:
            plan.bonus = NOTHING
            credited.update(dict.fromkeys(plan.draft.clones, plan))
        for c in dead_originals(self._index, [plan.draft for plan in plans]):
            plan = credited[c]
            plan.bonus = _sum(plan.bonus, self._cost.freed(self._figures, c))
        return plans


def clusters(plans: Sequence[PlannedRegion]) -> list[list[PlannedRegion]]:
    """Plans that exclude one another, directly or by way of others, together."""
    sets = UnionFind(len(plans))
    claimed: dict[int, int] = {}
    for n, plan in enumerate(plans):
        for i in plan.members:
            other = claimed.setdefault(i, n)
            sets.union(n, other)
    for n, plan in enumerate(plans):
        for c in plan.draft.clones:
            if c in claimed:
                sets.union(n, claimed[c])
    found: dict[int, list[PlannedRegion]] = {}
    for n, plan in enumerate(plans):
        found.setdefault(sets.find(n), []).append(plan)
    return list(found.values())


def _sum(a: Gain, b: Gain) -> Gain:
    return replace(
        a,
        bytes_saved=a.bytes_saved + b.bytes_saved,
        launches_saved=a.launches_saved + b.launches_saved,
        score=a.score + b.score,
    )


# How many candidates of one cluster are weighed against each other exactly.
_FEW = 24

# How far to look for a way back before candidates that overlap are weighed; what is farther is found afterwards.
_NEAR = 256

# With so few readers left that have no clone of an operation, what goes with it is counted in.
_LAST = 4

# How many steps, for each operation concerned, go into untangling regions that wait for each other.
_PATIENCE = 32

# How often candidates that lost to one that then proved impossible get another chance in one round.
_CHANCES = 8


@dataclass(frozen=True)
class Choice:
    """What becomes a region, and what does not and why."""

    accepted: tuple[PlannedRegion, ...]
    refused: tuple[Refused, ...]


def choose(planner: Planner, proposals: Iterable[Proposed]) -> Choice:
    """Decide among all candidates of a round.

    What the user must have comes first, then higher priority, then what saves more. The regions chosen share no
    operation and can all be called, each at one place.
    """
    chooser = _Chooser(planner)
    wished = planner.wishes
    tiers: dict[tuple[bool, int], list[Proposed]] = {}
    for proposed in proposals:
        candidate = proposed.candidate
        plain = not wished.met(candidate.kind, candidate.members)
        tiers.setdefault((plain, -proposed.priority if plain else 0), []).append(proposed)
    later: dict[int, list[PlannedRegion]] = {}
    for plain, rank in sorted(tiers):
        if plain:
            continue
        for plan in chooser.weighed(tiers[plain, rank]):
            later.setdefault(-plan.proposed.priority, []).append(plan)
        chooser.settle([p for plans in later.values() for p in plans if p.wished])
        later = {k: [p for p in plans if not p.wished] for k, plans in later.items()}
    for rank in sorted({rank for plain, rank in tiers if plain} | later.keys()):
        chooser.settle([*later.get(rank, ()), *chooser.weighed(tiers.get((True, rank), ()))])
    return chooser.choice()


class _Chooser:
    """What was taken so far. Whatever is accepted stays, unless it is found to be impossible right away."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.context, self.index = planner, planner.context, planner.context.index
        self.taken = Selection(planner.cost, planner.figures)
        self.refused: list[Refused] = []

    def weighed(self, proposals: Sequence[Proposed]) -> list[PlannedRegion]:
        """The plans of candidates; what cannot be a region by itself is refused."""
        return self._sorted_in(found for proposed in proposals for found in self.planner.plans(proposed))

    def _sorted_in(self, found: Iterable[PlannedRegion | Refused]) -> list[PlannedRegion]:
        plans: list[PlannedRegion] = []
        for one in found:
            if isinstance(one, PlannedRegion):
                plans.append(one)
            else:
                self.refused.append(one)
        return plans

    def settle(self, plans: Sequence[PlannedRegion]) -> None:
        """Take the best of some plans that can be together, beside what was taken before."""
        pending = list(plans)
        for _ in range(_CHANCES):
            chosen, lost = self._select(pending)
            dropped = self._sort_out(chosen)
            pending = []
            for loser in lost:
                if loser.plan is not None and not dropped.isdisjoint(loser.others):
                    pending.append(loser.plan)
                else:
                    self.refused.append(loser)
            if not pending:
                return
        self.refused.extend(
            Refused(p.proposed, tuple(sorted(p.members)), "too many candidates before it proved impossible")
            for p in pending
        )

    # Choosing by overlap

    def _select(self, pending: list[PlannedRegion]) -> tuple[list[PlannedRegion], list[Refused]]:
        chosen: list[PlannedRegion] = []
        lost: list[Refused] = []
        work = pending
        while work:
            free: list[PlannedRegion] = []
            again: list[PlannedRegion] = []
            for plan in work:
                winners = self.taken.winners(plan)
                if winners:
                    again.extend(self._lose(plan, winners, lost))
                elif self._pays(plan):
                    free.append(plan)
            for cluster in clusters(free):
                if len(cluster) == 1:
                    self.taken.accept(cluster[0])
                    chosen.extend(cluster)
                elif len(cluster) <= _FEW:
                    again.extend(self._exactly(cluster, chosen, lost))
                else:
                    self._greedily(cluster, chosen, lost)
            work = again
        return chosen, lost

    def _pays(self, plan: PlannedRegion) -> bool:
        # A part that saves nothing is no loss: where the rule wants it all the same, it proposes it as a whole.
        is_part = len(plan.draft.inside) < len(plan.proposed.candidate.members)
        if plan.score > 0 or plan.wished or (plan.score == 0 and not is_part):
            return True
        reason = "costs more than it saves" if plan.score else "what is left of it saves nothing"
        self.refused.append(Refused(plan.proposed, tuple(sorted(plan.members)), reason, plan=plan))
        return False

    def _possible(self, plan: PlannedRegion) -> bool:
        """Whether no way back to it is near; one that can be cut is left for later."""
        if plan.proposed.candidate.divisible:
            return True
        loop = find_cycle(self.context, plan, _NEAR)
        if loop is not None:
            self._refuse_loop(plan, loop)
        return loop is None

    def _exactly(
        self, cluster: list[PlannedRegion], chosen: list[PlannedRegion], lost: list[Refused]
    ) -> list[PlannedRegion]:
        cluster = sorted((p for p in cluster if self._possible(p)), key=lambda p: p.strength)
        clashes = [0] * len(cluster)
        for i, plan in enumerate(cluster):
            for j in range(i):
                if plan.conflicts(cluster[j]):
                    clashes[i] |= 1 << j
                    clashes[j] |= 1 << i
        taken = best_choice(_weights(cluster), clashes)
        for i in taken:
            self.taken.accept(cluster[i])
            chosen.append(cluster[i])
        again: list[PlannedRegion] = []
        for i, plan in enumerate(cluster):
            if plan in self.taken:
                continue
            winners = [cluster[j] for j in taken if clashes[i] >> j & 1]
            again.extend(self._lose(plan, winners, lost))
        return again

    def _greedily(
        self, cluster: list[PlannedRegion], chosen: list[PlannedRegion], lost: list[Refused]
    ) -> None:
        queue: list[tuple[tuple[Any, ...], int, PlannedRegion, Gain]] = []
        sharing: dict[int, list[PlannedRegion]] = {}
        served: dict[int, int] = {}
        numbers = itertools.count()

        def push(plan: PlannedRegion) -> None:
            heapq.heappush(queue, (plan.strength, next(numbers), plan, plan.bonus))

        for plan in cluster:
            push(plan)
            for c in plan.draft.clones:
                if not self.planner.figures.free(c):
                    sharing.setdefault(c, []).append(plan)
        while queue:
            _, _, plan, bonus = heapq.heappop(queue)
            if plan in self.taken or bonus is not plan.bonus:
                continue  # it was weighed again since
            winners = self.taken.winners(plan)
            if winners:
                for part in self._lose(plan, winners, lost):
                    if self._pays(part):
                        push(part)
                continue
            if not self._possible(plan):
                continue
            self.taken.accept(plan)
            chosen.append(plan)
            for c in plan.draft.clones & sharing.keys():
                # Only the last readers of an original are worth more than the others.
                served[c] = served.get(c, 0) + len(readers_among(self.index, c, plan.members))
                if len(self.index.nodes[c].users) - served[c] > _LAST:
                    continue
                for other in sharing[c]:
                    if other not in self.taken and self.taken.recost(other):
                        push(other)

    def _lose(
        self, plan: PlannedRegion, winners: list[PlannedRegion], lost: list[Refused]
    ) -> list[PlannedRegion]:
        """What is left of a plan beside the regions that won some of its operations."""
        inside = plan.draft.inside
        gone = {i for i in inside if any(i in w.members or i in w.draft.clones for w in winners)}
        gone -= {i for i in plan.draft.clones if not any(i in w.members for w in winners)}
        if plan.proposed.candidate.divisible:
            parts = self._sorted_in(self.planner.parts(plan.proposed, stages(self.context, inside, gone)))
            if parts:
                return parts
        order = self.context.order
        names = [f"'{self.context.nodes[i].name}'" for i in sorted(gone, key=order.__getitem__)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reason = f"{shown} went to"
        at = min(gone, key=order.__getitem__)
        lost.append(Refused(plan.proposed, tuple(inside), reason, at, tuple(winners), plan))
        return []

    # Whether they can all be called

    def _sort_out(self, chosen: list[PlannedRegion]) -> set[PlannedRegion]:
        """Take back what cannot be called at one place beside the rest, the weakest first."""
        new = set(chosen)
        suspects, positions = cyclic_core(self.index, list(self.taken.plans), new)
        if not suspects:
            return set()
        graph = RegionContraction(self.context, positions, budget=_PATIENCE * len(positions) + 10_000)
        for plan in suspects:
            if plan not in new:
                graph.contract(plan)
        dropped: set[PlannedRegion] = set()
        waiting = deque(sorted((p for p in suspects if p in new), key=lambda p: p.strength))
        while waiting:
            plan = waiting.popleft()
            winners = [] if plan in self.taken else self.taken.winners(plan)
            if winners:
                self._lose(plan, winners, self.refused)
                continue
            loop = graph.contract(plan)
            if loop is None:
                if plan not in self.taken:
                    self.taken.accept(plan)
                continue
            if plan in self.taken:
                self.taken.take_back(plan)
                dropped.add(plan)
            parts: list[PlannedRegion] = []
            if plan.proposed.candidate.divisible and loop.chain:
                reached = graph.contract(plan, whole=True)
                groups = split_at(self.context, plan.members, reached.reached if reached else ())
                parts = self._sorted_in(self.planner.parts(plan.proposed, groups)) if len(groups) > 1 else []
            if parts:
                waiting.extendleft(reversed([p for p in parts if self._pays(p)]))
            else:
                self._refuse_loop(plan, loop)
        return dropped

    def _refuse_loop(self, plan: PlannedRegion, loop: Loop) -> None:
        reason = describe_loop(self.index, loop)
        at = loop.chain[1] if loop.chain else None
        members = tuple(sorted(plan.members))
        self.refused.append(Refused(plan.proposed, members, reason, at, loop.through, plan))

    def choice(self) -> Choice:
        return Choice(tuple(self.taken.listed()), tuple(self.refused))


def _weights(cluster: Sequence[PlannedRegion]) -> list[tuple[int, ...]]:
    """What a choice among some plans is to have most of: wishes, then by priority the score and the operations."""
    ranks = sorted({plan.proposed.priority for plan in cluster}, reverse=True)
    found: list[tuple[int, ...]] = []
    for plan in cluster:
        wished, score, operations = plan.weight
        weight = [wished]
        for rank in ranks:
            weight += (score, operations) if rank == plan.proposed.priority else (0, 0)
        found.append(tuple(weight))
    return found
