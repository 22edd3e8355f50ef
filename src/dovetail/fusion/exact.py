"""The best choice among a few candidates that exclude one another."""

from __future__ import annotations

from collections.abc import Sequence

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
