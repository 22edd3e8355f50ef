"""Cutting what can be had in parts: every part stays convex, and in one piece where the whole was."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dovetail.rules.scene import Scene


def stages(scene: Scene, members: Collection[int], missing: Collection[int]) -> list[list[int]]:
    """What is left of a convex set without some operations, in sets that are convex again.

    An operation that depends on another through a missing one comes in a later set.
    """
    whole, gone = set(members), set(missing)
    before = scene.index.before
    reached: dict[int, int] = {}
    found: list[list[int]] = []
    for i in sorted(whole):
        stage = -1 if i in gone else 0
        for j in before[i]:
            if j in whole:
                passed = reached[j] + (1 if j in gone and i not in gone else 0)
                stage = max(stage, passed)
        reached[i] = stage
        if i not in gone:
            while len(found) <= stage:
                found.append([])
            found[stage].append(i)
    return [group for group in found if group]


def connected(scene: Scene, members: Iterable[int]) -> list[list[int]]:
    """The pieces of a set that values hold together; a constant is in each piece that reads it."""
    index = scene.index
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
    for start in sorted(waiting, key=scene.order.__getitem__):
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


def halves(scene: Scene, members: Collection[int]) -> list[list[int]]:
    """A convex set as two: what depends on less, and the rest."""
    nodes = scene.nodes
    constants = [i for i in members if nodes[i].op == "get_attr"]
    rest = sorted((i for i in members if nodes[i].op != "get_attr"), key=scene.order.__getitem__)
    middle = (len(rest) + 1) // 2
    return [[*constants, *half] for half in (rest[:middle], rest[middle:]) if half]


def split_at(scene: Scene, members: Collection[int], reached: Collection[int]) -> list[list[int]]:
    """A set as two: what does not depend on `reached` inside the set, and what does."""
    inside, later = set(members), set(reached)
    before = scene.index.before
    for i in sorted(inside):
        if i not in later and any(j in later and j in inside for j in before[i]):
            later.add(i)
    return [part for part in (sorted(inside - later), sorted(inside & later)) if part]
