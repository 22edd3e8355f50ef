"""Groups that effects would tie into a circle, taken apart until they are not."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.rules.scene import Scene


def untangle(scene: Scene, group: list[int]) -> list[int]:
    """Groups by position, split where effect edges would make some of them depend on each other in a circle.

    `group[i]` is any number for the group of position `i`; numbers of parts that were split off are new. Along data
    edges alone the groups must be free of circles, with all readers of all but one member inside. Only groups on a
    circle are split, by how many effects of other groups they come after.
    """
    effects = scene.index.dependencies.before
    if not effects:
        return group
    before = scene.index.before
    numbers = {g: k for k, g in enumerate(dict.fromkeys(group))}
    of = [numbers[g] for g in group]
    needs: list[set[int]] = [set() for _ in numbers]
    for i, earlier in enumerate(before):
        needs[of[i]].update(of[j] for j in earlier if of[j] != of[i])
    circle = _circles(needs)
    if not circle:
        return group
    data = scene.index.data
    phase = [0] * len(group)
    fresh: dict[tuple[int, int], int] = {}
    split = list(group)
    for i, earlier in enumerate(before):
        own = circle.get(of[i])
        if own is None:
            continue
        reads = data[i]
        for j in earlier:
            if circle.get(of[j]) == own:
                # An effect of another group: whatever comes after it is a part of its own.
                step = of[j] != of[i] and j not in reads
                phase[i] = max(phase[i], phase[j] + step)
        if phase[i]:
            split[i] = fresh.setdefault((of[i], phase[i]), len(group) + len(fresh))
    return split


def _circles(needs: Sequence[set[int]]) -> dict[int, int]:
    """For each vertex that is on a circle the number of its circle (a strongly connected component)."""
    count = len(needs)
    seen, low = [-1] * count, [0] * count
    on_stack = [False] * count
    stack: list[int] = []
    found: dict[int, int] = {}
    clock = 0
    for start in range(count):
        if seen[start] >= 0:
            continue
        walk = [(start, iter(needs[start]))]
        seen[start] = low[start] = clock
        clock += 1
        stack.append(start)
        on_stack[start] = True
        while walk:
            at, rest = walk[-1]
            for other in rest:
                if seen[other] < 0:
                    seen[other] = low[other] = clock
                    clock += 1
                    stack.append(other)
                    on_stack[other] = True
                    walk.append((other, iter(needs[other])))
                    break
                if on_stack[other]:
                    low[at] = min(low[at], seen[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[at])
                if low[at] == seen[at]:
                    members = [stack.pop()]
                    while members[-1] != at:
                        members.append(stack.pop())
                    for m in members:
                        on_stack[m] = False
                    if len(members) > 1:
                        found.update(dict.fromkeys(members, at))
    return found
