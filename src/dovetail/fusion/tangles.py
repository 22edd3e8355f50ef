"""Which regions can be together: each called at one place, and no two waiting for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dovetail.fusion.plan import Plan
from dovetail.graph.index import Index
from dovetail.rules.scene import Scene


@dataclass(frozen=True)
class Loop:
    """Why a region cannot be called at one place: a chain that leaves it and comes back, and who is on it.

    `reached` are the members that depend on other members through the outside. An empty chain: the search was given
    up before it came to an end.
    """

    chain: tuple[int, ...]
    through: tuple[Plan, ...] = ()
    reached: frozenset[int] = frozenset()


def describe_loop(index: Index, loop: Loop) -> str:
    """The reason in words, with the names on the chain."""
    if not loop.chain:
        return "it is entangled with so many other candidates that no place was found for it"
    names = [index.nodes[i].name for i in loop.chain]
    shown = " -> ".join(names if len(names) <= 12 else [*names[:8], f"({len(names) - 10} more)", *names[-2:]])
    effects = index.dependencies.before
    why = ""
    for a, b in pairwise(loop.chain):
        if a not in index.data[b] and a in effects.get(b, ()):
            first, second = index.nodes[a].name, index.nodes[b].name
            why = f" ('{first}' must stay before '{second}': {index.dependencies.why(a, b)})"
            break
    if loop.through:
        return f"they would depend on each other, {shown}{why}: it and"
    return f"it would depend on itself: {shown}{why}"


def tangled(index: Index, plans: Sequence[Plan], new: Collection[Plan]) -> tuple[list[Plan], set[int]]:
    """The regions that may be on a cycle, with all the positions that may be, in linear time.

    Those that are not new can be together. Only the stretches that a new region spans are looked at. Empty: all
    of them can be together.
    """
    owner: dict[int, int] = {}
    for r, plan in enumerate(plans):
        owner.update(dict.fromkeys(plan.members, r))
    suspects: list[Plan] = []
    positions: set[int] = set()
    for low, high in _windows(plans, new):
        first = owner.get(low)
        if first is not None and len(plans[first].members) == high - low + 1:
            continue
        left = _core(index, plans, owner, low, high)
        regions = {-1 - unit for unit in left if unit < 0}
        suspects.extend(plans[r] for r in sorted(regions))
        positions.update(unit for unit in left if unit >= 0)
        for r in regions:
            # Originals of clones too: until a region is drawn together, ways to it lead through them.
            positions |= plans[r].members | plans[r].draft.clones
    return suspects, positions


def _windows(plans: Sequence[Plan], new: Collection[Plan]) -> list[tuple[int, int]]:
    """The stretches that regions span, disjoint and in order, those without a new region left out."""
    merged: list[tuple[int, int, bool]] = []
    for low, high, fresh in sorted((min(p.members), max(p.members), p in new) for p in plans):
        if merged and low <= merged[-1][1]:
            start, end, known = merged[-1]
            merged[-1] = (start, max(high, end), known or fresh)
        else:
            merged.append((low, high, fresh))
    return [(low, high) for low, high, fresh in merged if fresh]


def _core(index: Index, plans: Sequence[Plan], owner: dict[int, int], low: int, high: int) -> set[int]:
    """The units of a stretch that are left when what is first or last is taken away again and again."""
    units: dict[int, None] = {}
    for i in range(low, high + 1):
        r = owner.get(i)
        units[i if r is None else -1 - r] = None
    wants: dict[int, set[int]] = {}
    for unit in units:
        found: set[int] = set()
        for j in needs(index, plans[-1 - unit]) if unit < 0 else index.before[unit]:
            r = owner.get(j)
            other = j if r is None else -1 - r
            if other != unit and other in units:
                found.add(other)
        wants[unit] = found
    left = _peeled(wants, set(units))
    if not left:
        return left
    wanted_by: dict[int, set[int]] = {unit: set() for unit in left}
    for unit in left:
        for other in wants[unit] & left:
            wanted_by[other].add(unit)
    return _peeled(wanted_by, left)


def needs(index: Index, plan: Plan) -> Iterator[int]:
    """What must come before a region is called."""
    draft, effects = plan.draft, index.dependencies.before
    for i in draft.members:
        for j in index.data[i]:
            if j not in draft.clones:
                yield j
        yield from effects.get(i, ())
    for i in draft.clones:
        for j in index.data[i]:
            if j not in draft.clones:
                yield j


def _peeled(wants: dict[int, set[int]], units: set[int]) -> set[int]:
    waiting = {unit: len(wants[unit] & units) for unit in units}
    after: dict[int, list[int]] = {unit: [] for unit in units}
    for unit in units:
        for other in wants[unit]:
            if other in units:
                after[other].append(unit)
    ready = [unit for unit, count in waiting.items() if not count]
    for unit in ready:
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return units.difference(ready)


def finds_way_back(scene: Scene, plan: Plan, most: int) -> Loop | None:
    """A chain that leaves a set and comes back, if one is found within so many steps."""
    index, order = scene.index, scene.order
    members, clones = plan.members, plan.draft.clones
    high = plan.places[-1]
    came: dict[int, int] = {}
    queue = deque(sorted(members, key=order.__getitem__))
    steps = -len(queue)
    while queue and steps < most:
        steps += 1
        i = queue.popleft()
        # In an order that no listing can change, or what is found in time would depend on it.
        for j in sorted(index.after[i], key=order.__getitem__):
            back = j in members and i not in clones
            if i not in members and (back or (j in clones and i not in clones)):
                chain = [j, i]
                while chain[-1] in came:
                    chain.append(came[chain[-1]])
                return Loop(tuple(reversed(chain)), reached=frozenset({j} & members))
            if order[j] < high and j not in members and j not in came:
                came[j] = i
                queue.append(j)
    return None
