"""Divisions of a block: optimal by brute force on small ones, acyclic, with gaps where nothing is proven."""

import random
import time
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest

from dovetail import InvalidArgument
from dovetail.tuning.set_partitioning import AS_IT_IS, Option, divide

Edges = Sequence[tuple[int, int]]
Boundaries = Mapping[tuple[str, str], float]


def is_acyclic(edges: Edges, parts: Sequence[frozenset[int]]) -> bool:
    part_of = {member: k for k, members in enumerate(parts) for member in members}
    before: dict[int, set[int]] = {}
    for producer, reader in edges:
        if part_of[producer] != part_of[reader]:
            before.setdefault(part_of[reader], set()).add(part_of[producer])
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def cost_of(edges: Edges, chosen: Sequence[Option], boundaries: Boundaries) -> float:
    option_of = {member: option for option in chosen for member in option.members}
    crossed = [
        boundaries.get((option_of[u].backend, option_of[v].backend), 0.0)
        for u, v in edges
        if option_of[u] is not option_of[v]
    ]
    return sum(option.seconds for option in chosen) + sum(crossed)


def keeps_clones(chosen: Sequence[Option]) -> bool:
    """Whether what regions clone is in no other region."""
    cloned = frozenset[int]().union(*(option.clones for option in chosen))
    return not any(option.is_region and option.members & cloned for option in chosen)


def least_cost(count: int, edges: Edges, options: Sequence[Option], boundaries: Boundaries) -> float:
    best = float("inf")

    def extend(covered: frozenset[int], chosen: list[Option]) -> None:
        nonlocal best
        if len(covered) == count:
            if keeps_clones(chosen) and is_acyclic(edges, [option.members for option in chosen]):
                best = min(best, cost_of(edges, chosen, boundaries))
            return
        first = min(set(range(count)) - covered)
        for option in options:
            if first in option.members and not option.members & covered:
                extend(covered | option.members, [*chosen, option])

    extend(frozenset(), [])
    return best


@pytest.mark.parametrize("seed", range(40))
def test_small_divisions_are_optimal_and_acyclic(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(3, 7)
    edges = sorted((u, v) for u in range(count) for v in range(u + 1, count) if draw.random() < 0.4)
    options = [Option(frozenset([i]), AS_IT_IS, draw.uniform(0.5, 1)) for i in range(count)]
    for _ in range(8):
        order = draw.sample(range(count), count)
        taken = draw.randrange(1, count + 1)
        cloned = frozenset(order[taken : taken + draw.choice([0, 0, 1, 2])])
        options.append(Option(frozenset(order[:taken]), draw.choice("abc"), draw.uniform(0.3, 2), cloned))
    boundaries = {(a, b): draw.choice([0, 0.05, 0.3]) for a in "abc" for b in ("a", "b", "c", AS_IT_IS)}
    division = divide(count, edges, options, boundaries)
    chosen = [options[i] for i in division.chosen]
    assert sorted(member for option in chosen for member in option.members) == list(range(count))
    assert is_acyclic(edges, [option.members for option in chosen])
    assert keeps_clones(chosen)
    assert division.seconds == pytest.approx(cost_of(edges, chosen, boundaries))
    assert division.seconds == pytest.approx(least_cost(count, edges, options, boundaries))
    assert division.gap == pytest.approx(0, abs=1e-9)


def alone(count: int) -> list[Option]:
    return [Option(frozenset([i]), "eager", 1.0) for i in range(count)]


def test_costs_between_backends_change_the_division() -> None:
    # Two fast backends, each for half of a chain, against one slower backend for all of it.
    halves = [Option(frozenset([0, 1]), "a", 0.5), Option(frozenset([2, 3]), "b", 0.5)]
    options = [*alone(4), *halves, Option(frozenset(range(4)), "a", 1.2)]
    chain = [(0, 1), (1, 2), (2, 3)]
    assert divide(4, chain, options).chosen == (4, 5)
    assert divide(4, chain, options, {("a", "b"): 0.1}).chosen == (4, 5)
    assert divide(4, chain, options, {("a", "b"): 0.3}).chosen == (6,)


def test_a_region_that_would_depend_on_itself_is_not_chosen() -> None:
    # 0 -> 1 -> 2 and 0 -> 2: without 1, the region of 0 and 2 is on a cycle, however cheap.
    options = [*alone(3), Option(frozenset([0, 2]), "a", 0.01), Option(frozenset([1, 2]), "a", 1.5)]
    division = divide(3, [(0, 1), (1, 2), (0, 2)], options)
    assert division.chosen == (0, 4)
    assert division.gap == 0


def test_two_regions_on_one_cycle() -> None:
    # 0 -> 1 and 2 -> 3, regions of 0 and 3 and of 2 and 1 read one another.
    options = [*alone(4), Option(frozenset([0, 3]), "a", 0.1), Option(frozenset([1, 2]), "a", 0.2)]
    division = divide(4, [(0, 1), (2, 3)], options)
    assert division.seconds == pytest.approx(2.1)
    assert division.gap == 0


def test_without_a_proof_the_gap_is_reported() -> None:
    draw = random.Random(1)
    options = alone(40)
    for _ in range(300):
        start = draw.randrange(40)
        members = frozenset(range(start, min(40, start + draw.randrange(2, 9))))
        options.append(Option(members, draw.choice("ab"), len(members) * draw.uniform(0.3, 1.0)))
    boundaries = {(a, b): 0.2 for a in ("a", "b", "eager") for b in ("a", "b", "eager") if a != b}
    edges = [(i, i + 1) for i in range(39)]
    division = divide(40, edges, options, boundaries, max_nodes=1)
    assert sorted(m for i in division.chosen for m in options[i].members) == list(range(40))
    assert 0 <= division.gap < 1
    assert division.bound <= division.seconds + 1e-9


def test_a_block_of_two_hundred_operations_takes_seconds() -> None:
    draw = random.Random(2)
    options = alone(200)
    for _ in range(1000):
        start = draw.randrange(200)
        members = frozenset(range(start, min(200, start + draw.randrange(2, 12))))
        options.append(Option(members, draw.choice("ab"), len(members) * draw.uniform(0.3, 1.1)))
    start = time.monotonic()
    division = divide(200, [(i, i + 1) for i in range(199)], options, {("a", "b"): 0.2, ("b", "a"): 0.2})
    assert division.gap < 0.01
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (alone(2)[:1], "operation 1 has no option alone"),
        ([*alone(2), Option(frozenset([0, 5]), "a", 1.0)], r"members \[0, 5\] of 2"),
        ([*alone(2), Option(frozenset(), "a", 1.0)], "an option has members"),
        ([*alone(2), Option(frozenset([0, 1]), "a", float("nan"))], "costs nan seconds"),
        ([*alone(2), Option(frozenset([0, 1]), "a", -1.0)], "costs -1.0 seconds"),
    ],
)
def test_invalid_options_are_refused(options: list[Option], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        divide(2, [(0, 1)], options)
