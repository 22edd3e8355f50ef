"""Selection: which candidates become regions.

The problem is weighted set packing: plans that share an operation exclude each other, and a selection of greatest weight
is sought, compared lexicographically (requirements met, then by priority the score and the operations). It is NP-hard,
but plans that exclude each other, directly or through others, form small clusters. A cluster of up to 24 plans is solved
exactly by branch and bound over bit masks, as a maximum weight independent set; the bound is a greedy clique cover, of
each clique only the heaviest plan counts. The number of steps is limited, and the best selection by then is used. Larger
clusters are selected greedily by a heap, O(n log n). What loses is cut where its rule allows, and selected again. At
last the regions are checked for cycles (`acyclicity`), and the weakest on a cycle are withdrawn.

Reference: Babel, "A fast algorithm for the maximum weight clique problem", Computing 52, 1994.
"""

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
from dovetail.ir.quotient_graph import UnionFind
from dovetail.ir.text_tables import quoted
from dovetail.outlining.escapes import dead_originals, readers_among

Weight = tuple[int, ...]


def best_choice(weights: Sequence[Weight], clashes: Sequence[int], most_steps: int = 5_000) -> list[int]:
    """Return a set of greatest total weight in which no two clash, weights compared lexicographically.

    All weights have the same length. `clashes[i]` has a bit for each that excludes `i`. Of equal sets the first found
    is returned, and elements are tried in order. After `most_steps` steps the best set so far is returned, which is
    never worse than the greedy one in order.
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
    """Return a greedy clique cover of the clashes: of each clique at most one can be chosen; the heaviest is first."""
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
    """Return an upper bound of the total: the heaviest that is available of each clique."""
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
    """The plans accepted so far, by their members and by what they clone."""

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

    def withdraw(self, plan: PlannedRegion) -> None:
        del self.plans[plan]
        for i in plan.members:
            del self._owner[i]
        for c in plan.draft.clones:
            del self._cloned[c][plan]
            if not self._cloned[c]:
                del self._cloned[c]

    def winners(self, plan: PlannedRegion) -> list[PlannedRegion]:
        """Return the accepted plans that exclude a plan."""
        winners: dict[PlannedRegion, None] = {}
        for i in plan.members:
            if i in self._owner:
                winners[self._owner[i]] = None
            if i in self._cloned:
                winners.update(self._cloned[i])
        for i in plan.draft.clones:
            if i in self._owner:
                winners[self._owner[i]] = None
        return list(winners)

    def recost(self, plan: PlannedRegion) -> bool:
        """Update a plan's bonus for the clones that accepted plans have; return whether it changed."""
        bonus = NOTHING
        for c in plan.draft.clones:
            if c in dead_originals(self._index, [p.draft for p in (*self._cloned.get(c, ()), plan)]):
                bonus = _sum(bonus, self._cost.freed(self._figures, c))
        changed = plan.bonus != bonus
        if changed:
            plan.bonus = bonus
        return changed

    def in_order(self) -> list[PlannedRegion]:
        """Return the plans in structural order, required ones first, each with its final bonus."""
        plans = sorted(self.plans, key=lambda p: (not p.required, p.places))
        credited: dict[int, PlannedRegion] = {}
        for plan in plans:
            plan.bonus = NOTHING
            credited.update(dict.fromkeys(plan.draft.clones, plan))
        for c in dead_originals(self._index, [plan.draft for plan in plans]):
            plan = credited[c]
            plan.bonus = _sum(plan.bonus, self._cost.freed(self._figures, c))
        return plans


def clusters(plans: Sequence[PlannedRegion]) -> list[list[PlannedRegion]]:
    """Return the plans in groups that exclude one another, directly or through others."""
    sets = UnionFind(len(plans))
    claimed: dict[int, int] = {}
    for n, plan in enumerate(plans):
        for i in plan.members:
            sets.union(n, claimed.setdefault(i, n))
    for n, plan in enumerate(plans):
        for c in plan.draft.clones:
            if c in claimed:
                sets.union(n, claimed[c])
    groups: dict[int, list[PlannedRegion]] = {}
    for n, plan in enumerate(plans):
        groups.setdefault(sets.find(n), []).append(plan)
    return list(groups.values())


def _sum(a: Gain, b: Gain) -> Gain:
    return replace(
        a,
        bytes_saved=a.bytes_saved + b.bytes_saved,
        launches_saved=a.launches_saved + b.launches_saved,
        score=a.score + b.score,
    )


# The largest cluster that is solved exactly.
_MOST_EXACT = 24

# The steps of a search for a cycle before candidates that overlap are compared; longer cycles are found afterwards.
_CYCLE_STEPS = 256

# With so few readers left that have no clone of an operation, bonuses are updated.
_LAST_READERS = 4

# Search steps per operation on a possible cycle.
_STEPS_PER_OPERATION = 32

# How often candidates that lost to one that then proved impossible are tried again in one round.
_MOST_RETRIES = 8


@dataclass(frozen=True)
class Choice:
    """The plans that become regions, and the refusals of the others."""

    accepted: tuple[PlannedRegion, ...]
    refused: tuple[Refused, ...]


def choose(planner: Planner, proposals: Iterable[Proposed]) -> Choice:
    """Select among all candidates of a round.

    What `must` requires comes first, then higher priority, then greater gain. The chosen regions share no operation,
    and each can be called at one place.
    """
    chooser = _Chooser(planner)
    required: list[Proposed] = []
    tiers: dict[int, list[Proposed]] = {}
    for proposed in proposals:
        candidate = proposed.candidate
        if planner.requirements.met_by(candidate.kind, candidate.members):
            required.append(proposed)
        else:
            tiers.setdefault(-proposed.priority, []).append(proposed)
    later: dict[int, list[PlannedRegion]] = {}
    for plan in chooser.plans(required):
        later.setdefault(-plan.proposed.priority, []).append(plan)
    chooser.decide([p for plans in later.values() for p in plans if p.required])
    later = {rank: [p for p in plans if not p.required] for rank, plans in later.items()}
    for rank in sorted(tiers.keys() | later.keys()):
        chooser.decide([*later.get(rank, ()), *chooser.plans(tiers.get(rank, ()))])
    return chooser.choice()


class _Chooser:
    """The selection so far. What is accepted stays, unless it proves to be on a cycle in the same step."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.context, self.index = planner, planner.context, planner.context.index
        self.selection = Selection(planner.cost, planner.figures)
        self.refused: list[Refused] = []

    def plans(self, proposals: Sequence[Proposed]) -> list[PlannedRegion]:
        """Return the plans of candidates; what cannot be a region by itself is refused."""
        return self._possible_plans(plan for proposed in proposals for plan in self.planner.plans(proposed))

    def _possible_plans(self, results: Iterable[PlannedRegion | Refused]) -> list[PlannedRegion]:
        plans: list[PlannedRegion] = []
        for result in results:
            if isinstance(result, PlannedRegion):
                plans.append(result)
            else:
                self.refused.append(result)
        return plans

    def decide(self, plans: Sequence[PlannedRegion]) -> None:
        """Accept the best of some plans that are possible together, beside those accepted before."""
        pending = list(plans)
        for _ in range(_MOST_RETRIES):
            chosen, lost = self._select(pending)
            dropped = self._withdraw_cyclic(chosen)
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

    def _select(self, pending: list[PlannedRegion]) -> tuple[list[PlannedRegion], list[Refused]]:
        chosen: list[PlannedRegion] = []
        lost: list[Refused] = []
        work = pending
        while work:
            free: list[PlannedRegion] = []
            again: list[PlannedRegion] = []
            for plan in work:
                winners = self.selection.winners(plan)
                if winners:
                    again.extend(self._lose(plan, winners, lost))
                elif self._pays(plan):
                    free.append(plan)
            for cluster in clusters(free):
                if len(cluster) == 1:
                    self.selection.accept(cluster[0])
                    chosen.extend(cluster)
                elif len(cluster) <= _MOST_EXACT:
                    again.extend(self._select_exactly(cluster, chosen, lost))
                else:
                    self._select_greedily(cluster, chosen, lost)
            work = again
        return chosen, lost

    def _pays(self, plan: PlannedRegion) -> bool:
        candidate = plan.proposed.candidate
        # A part of a candidate must save something; a rule that wants it anyway proposes it as a whole.
        is_part = len(plan.draft.inside) < len(candidate.members)
        if plan.score > 0 or plan.required:
            return True
        if plan.score == 0 and not is_part and (not candidate.must_save or _saves(plan)):
            return True
        if plan.score:
            reason = "costs more than it saves"
        elif candidate.must_save and not _saves(plan):
            reason = "it saves neither bytes nor launches"
        else:
            reason = "what is left of it saves nothing"
        self.refused.append(Refused(plan.proposed, tuple(sorted(plan.members)), reason, plan=plan))
        return False

    def _possible(self, plan: PlannedRegion) -> bool:
        """Whether a short search finds no cycle through it; a divisible one is cut later instead."""
        if plan.proposed.candidate.divisible:
            return True
        loop = find_cycle(self.context, plan, _CYCLE_STEPS)
        if loop is not None:
            self._refuse_cyclic(plan, loop)
        return loop is None

    def _select_exactly(
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
            self.selection.accept(cluster[i])
            chosen.append(cluster[i])
        again: list[PlannedRegion] = []
        for i, plan in enumerate(cluster):
            if plan in self.selection:
                continue
            winners = [cluster[j] for j in taken if clashes[i] >> j & 1]
            again.extend(self._lose(plan, winners, lost))
        return again

    def _select_greedily(
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
            if plan in self.selection or bonus is not plan.bonus:
                continue  # its bonus has changed since
            winners = self.selection.winners(plan)
            if winners:
                for part in self._lose(plan, winners, lost):
                    if self._pays(part):
                        push(part)
                continue
            if not self._possible(plan):
                continue
            self.selection.accept(plan)
            chosen.append(plan)
            for c in plan.draft.clones & sharing.keys():
                # Only the last readers of an original have a greater bonus.
                served[c] = served.get(c, 0) + len(readers_among(self.index, c, plan.members))
                if len(self.index.nodes[c].users) - served[c] > _LAST_READERS:
                    continue
                for other in sharing[c]:
                    if other not in self.selection and self.selection.recost(other):
                        push(other)

    def _lose(
        self, plan: PlannedRegion, winners: list[PlannedRegion], lost: list[Refused]
    ) -> list[PlannedRegion]:
        """Return the parts that remain of a plan beside the regions that won some of its operations."""
        inside = plan.draft.inside
        gone = {i for i in inside if any(i in w.members or i in w.draft.clones for w in winners)}
        gone -= {i for i in plan.draft.clones if not any(i in w.members for w in winners)}
        if plan.proposed.candidate.divisible:
            parts = self._possible_plans(
                self.planner.parts(plan.proposed, stages(self.context, inside, gone))
            )
            if parts:
                return parts
        order = self.context.order
        ordered = sorted(gone, key=order.__getitem__)
        reason = f"{quoted([self.context.nodes[i].name for i in ordered])} went to"
        lost.append(Refused(plan.proposed, tuple(inside), reason, ordered[0], tuple(winners), plan))
        return []

    def _withdraw_cyclic(self, chosen: list[PlannedRegion]) -> set[PlannedRegion]:
        """Withdraw the plans that would close a cycle with the rest, the weakest first."""
        new = set(chosen)
        suspects, positions = cyclic_core(self.index, list(self.selection.plans), new)
        if not suspects:
            return set()
        graph = RegionContraction(
            self.context, positions, budget=_STEPS_PER_OPERATION * len(positions) + 10_000
        )
        for plan in suspects:
            if plan not in new:
                graph.contract(plan)
        dropped: set[PlannedRegion] = set()
        waiting = deque(sorted((p for p in suspects if p in new), key=lambda p: p.strength))
        while waiting:
            plan = waiting.popleft()
            winners = [] if plan in self.selection else self.selection.winners(plan)
            if winners:
                self._lose(plan, winners, self.refused)
                continue
            loop = graph.contract(plan)
            if loop is None:
                if plan not in self.selection:
                    self.selection.accept(plan)
                continue
            if plan in self.selection:
                self.selection.withdraw(plan)
                dropped.add(plan)
            parts: list[PlannedRegion] = []
            if plan.proposed.candidate.divisible and loop.chain:
                reached = graph.contract(plan, whole=True)
                groups = split_at(self.context, plan.members, reached.reached if reached else ())
                parts = (
                    self._possible_plans(self.planner.parts(plan.proposed, groups)) if len(groups) > 1 else []
                )
            if parts:
                waiting.extendleft(reversed([p for p in parts if self._pays(p)]))
            else:
                self._refuse_cyclic(plan, loop)
        return dropped

    def _refuse_cyclic(self, plan: PlannedRegion, loop: Loop) -> None:
        reason = describe_loop(self.index, loop)
        at = loop.chain[1] if loop.chain else None
        members = tuple(sorted(plan.members))
        self.refused.append(Refused(plan.proposed, members, reason, at, loop.through, plan))

    def choice(self) -> Choice:
        return Choice(tuple(self.selection.in_order()), tuple(self.refused))


def _saves(plan: PlannedRegion) -> bool:
    gain, bonus = plan.gain, plan.bonus
    return gain.bytes_saved + bonus.bytes_saved > 0 or gain.launches_saved + bonus.launches_saved > 0


def _weights(cluster: Sequence[PlannedRegion]) -> list[tuple[int, ...]]:
    """Return the weight of each plan: requirements met, then by priority the score and the operations."""
    ranks = sorted({plan.proposed.priority for plan in cluster}, reverse=True)
    weights: list[tuple[int, ...]] = []
    for plan in cluster:
        required, score, operations = plan.weight
        weight = [required]
        for rank in ranks:
            weight += (score, operations) if rank == plan.proposed.priority else (0, 0)
        weights.append(tuple(weight))
    return weights
