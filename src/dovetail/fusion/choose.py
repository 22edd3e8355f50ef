"""The choice: of all that the rules proposed, what becomes a region."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.fusion.contracting import Contraction
from dovetail.fusion.cost import Gain
from dovetail.fusion.exact import best_choice
from dovetail.fusion.parts import split_at, stages
from dovetail.fusion.plan import Plan, Planner, Proposed, Refused
from dovetail.fusion.taken import Taken, clusters
from dovetail.fusion.tangles import Loop, describe_loop, finds_way_back, tangled
from dovetail.outlining.requests import readers_among

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

    accepted: tuple[Plan, ...]
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
    later: dict[int, list[Plan]] = {}
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
        self.planner, self.scene, self.index = planner, planner.scene, planner.scene.index
        self.taken = Taken(planner.cost, planner.figures)
        self.refused: list[Refused] = []

    def weighed(self, proposals: Sequence[Proposed]) -> list[Plan]:
        """The plans of candidates; what cannot be a region by itself is refused."""
        return self._sorted_in(found for proposed in proposals for found in self.planner.plans(proposed))

    def _sorted_in(self, found: Iterable[Plan | Refused]) -> list[Plan]:
        plans: list[Plan] = []
        for one in found:
            if isinstance(one, Plan):
                plans.append(one)
            else:
                self.refused.append(one)
        return plans

    def settle(self, plans: Sequence[Plan]) -> None:
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

    def _select(self, pending: list[Plan]) -> tuple[list[Plan], list[Refused]]:
        chosen: list[Plan] = []
        lost: list[Refused] = []
        work = pending
        while work:
            free: list[Plan] = []
            again: list[Plan] = []
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

    def _pays(self, plan: Plan) -> bool:
        # A part that saves nothing is no loss: where the rule wants it all the same, it proposes it as a whole.
        is_part = len(plan.draft.inside) < len(plan.proposed.candidate.members)
        if plan.score > 0 or plan.wished or (plan.score == 0 and not is_part):
            return True
        reason = "costs more than it saves" if plan.score else "what is left of it saves nothing"
        self.refused.append(Refused(plan.proposed, tuple(sorted(plan.members)), reason, plan=plan))
        return False

    def _possible(self, plan: Plan) -> bool:
        """Whether no way back to it is near; one that can be cut is left for later."""
        if plan.proposed.candidate.divisible:
            return True
        loop = finds_way_back(self.scene, plan, _NEAR)
        if loop is not None:
            self._refuse_loop(plan, loop)
        return loop is None

    def _exactly(self, cluster: list[Plan], chosen: list[Plan], lost: list[Refused]) -> list[Plan]:
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
        again: list[Plan] = []
        for i, plan in enumerate(cluster):
            if plan in self.taken:
                continue
            winners = [cluster[j] for j in taken if clashes[i] >> j & 1]
            again.extend(self._lose(plan, winners, lost))
        return again

    def _greedily(self, cluster: list[Plan], chosen: list[Plan], lost: list[Refused]) -> None:
        queue: list[tuple[tuple[Any, ...], int, Plan, Gain]] = []
        sharing: dict[int, list[Plan]] = {}
        served: dict[int, int] = {}
        numbers = itertools.count()

        def push(plan: Plan) -> None:
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

    def _lose(self, plan: Plan, winners: list[Plan], lost: list[Refused]) -> list[Plan]:
        """What is left of a plan beside the regions that won some of its operations."""
        inside = plan.draft.inside
        gone = {i for i in inside if any(i in w.members or i in w.draft.clones for w in winners)}
        gone -= {i for i in plan.draft.clones if not any(i in w.members for w in winners)}
        if plan.proposed.candidate.divisible:
            parts = self._sorted_in(self.planner.parts(plan.proposed, stages(self.scene, inside, gone)))
            if parts:
                return parts
        order = self.scene.order
        names = [f"'{self.scene.nodes[i].name}'" for i in sorted(gone, key=order.__getitem__)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reason = f"{shown} went to"
        at = min(gone, key=order.__getitem__)
        lost.append(Refused(plan.proposed, tuple(inside), reason, at, tuple(winners), plan))
        return []

    # Whether they can all be called

    def _sort_out(self, chosen: list[Plan]) -> set[Plan]:
        """Take back what cannot be called at one place beside the rest, the weakest first."""
        new = set(chosen)
        suspects, positions = tangled(self.index, list(self.taken.plans), new)
        if not suspects:
            return set()
        graph = Contraction(self.scene, positions, budget=_PATIENCE * len(positions) + 10_000)
        for plan in suspects:
            if plan not in new:
                graph.draw_together(plan)
        dropped: set[Plan] = set()
        waiting = deque(sorted((p for p in suspects if p in new), key=lambda p: p.strength))
        while waiting:
            plan = waiting.popleft()
            winners = [] if plan in self.taken else self.taken.winners(plan)
            if winners:
                self._lose(plan, winners, self.refused)
                continue
            loop = graph.draw_together(plan)
            if loop is None:
                if plan not in self.taken:
                    self.taken.accept(plan)
                continue
            if plan in self.taken:
                self.taken.take_back(plan)
                dropped.add(plan)
            parts: list[Plan] = []
            if plan.proposed.candidate.divisible and loop.chain:
                reached = graph.draw_together(plan, whole=True)
                groups = split_at(self.scene, plan.members, reached.reached if reached else ())
                parts = self._sorted_in(self.planner.parts(plan.proposed, groups)) if len(groups) > 1 else []
            if parts:
                waiting.extendleft(reversed([p for p in parts if self._pays(p)]))
            else:
                self._refuse_loop(plan, loop)
        return dropped

    def _refuse_loop(self, plan: Plan, loop: Loop) -> None:
        reason = describe_loop(self.index, loop)
        at = loop.chain[1] if loop.chain else None
        members = tuple(sorted(plan.members))
        self.refused.append(Refused(plan.proposed, members, reason, at, loop.through, plan))

    def choice(self) -> Choice:
        return Choice(tuple(self.taken.listed()), tuple(self.refused))


def _weights(cluster: Sequence[Plan]) -> list[tuple[int, ...]]:
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
