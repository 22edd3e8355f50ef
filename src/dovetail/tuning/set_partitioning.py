"""Boundaries of least measured cost: which candidates, each with a backend, divide a block.

The problem is set partitioning with pairwise costs: every operation is in exactly one option (a candidate region or the
operation alone, with a backend and its measured time), and where a value passes from one backend to another the measured
cost of that boundary is added. It is a binary linear program, solved by HiGHS's branch and cut (`scipy.optimize.milp`).

A variable is one option. Pairwise terms need none for each pair of options: for an edge from u to v and a pair of
backends, z >= (options with the first backend that contain u but not v) + (options with the second that contain v but not
u) - 1, so that their number grows with the edges, not with pairs of options. Options that are not convex have no
variable. Regions that would depend on one another in a circle are excluded as they appear: the cycle's options cannot
all be chosen, and the program is solved again. Each solution is a relaxation of the next, so the last bound is valid for
all. The search is limited by its nodes and not by time, so that it gives the same result on every machine; what was not
proven is reported as the gap.

Reference: Hu et al., "Korch: Optimal Kernel Orchestration for Tensor Programs", ASPLOS 2024, for fusion as a binary
linear program over measured kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from dovetail.errors import InvalidArgument

MAX_SEARCH_NODES = 20_000
_MAX_CUTS = 200
AS_IT_IS = "as it is"
"""The backend of an operation that is in no region."""


@dataclass(frozen=True)
class Option:
    """A set of operations that can run as one, the backend that runs them, and the measured seconds of a call.

    Operations that it `clones` run beside it too: as they are, for none of them may be in another region.
    """

    members: frozenset[int]
    backend: str
    seconds: float
    clones: frozenset[int] = frozenset()

    @property
    def is_region(self) -> bool:
        return len(self.members) > 1 or self.backend != AS_IT_IS


@dataclass(frozen=True)
class Division:
    """Options that contain every operation once, in the order given; their cost, and the bound that is proven.

    `gap` is how much less another division could cost, relative to this one: 0 if it is optimal.
    """

    chosen: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        return 0.0 if self.seconds <= 0 else max(0.0, (self.seconds - self.bound) / self.seconds)


def divide(
    count: int,
    edges: Sequence[tuple[int, int]],
    options: Sequence[Option],
    boundaries: Mapping[tuple[str, str], float] | None = None,
    *,
    max_nodes: int = MAX_SEARCH_NODES,
) -> Division:
    """Return the division of `count` operations of least cost.

    `edges` are pairs of a producer and a reader; `boundaries` maps pairs of backends to the seconds that a value costs
    that passes from the first to the second, between two regions of one backend too; pairs that are missing are free.
    """
    costs = {pair: seconds for pair, seconds in (boundaries or {}).items() if seconds > 0}
    _require_options(count, options)
    program = _Program(count, list(dict.fromkeys(edges)), options, costs)
    best: tuple[float, list[int]] | None = None
    bound = -math.inf
    for _ in range(_MAX_CUTS):
        chosen, bound, is_optimal = program.solve(max_nodes)
        cycle = _cycle(edges, [options[i].members for i in chosen])
        repaired = chosen if cycle is None else program.acyclic(chosen)
        seconds = program.cost(repaired)
        if best is None or seconds < best[0]:
            best = (seconds, repaired)
        if cycle is None:
            return Division(tuple(sorted(repaired)), seconds, seconds if is_optimal else bound)
        program.exclude([chosen[i] for i in cycle])
    if best is None:
        raise InvalidArgument("no division was tried; give max_nodes of 1 or more.")
    return Division(tuple(sorted(best[1])), best[0], bound)


def _require_options(count: int, options: Sequence[Option]) -> None:
    alone = {next(iter(o.members)) for o in options if len(o.members) == 1}
    missing = sorted(set(range(count)) - alone)
    if missing:
        raise InvalidArgument(f"operation {missing[0]} has no option alone, which every operation needs.")
    for option in options:
        if not option.members or not all(0 <= i < count for i in option.members):
            raise InvalidArgument(f"an option has members {sorted(option.members)} of {count} operations.")
        if not math.isfinite(option.seconds) or option.seconds < 0:
            raise InvalidArgument(f"an option costs {option.seconds!r} seconds.")


class _Program:
    """The binary linear program; what is excluded makes it grow."""

    def __init__(
        self,
        count: int,
        edges: Sequence[tuple[int, int]],
        options: Sequence[Option],
        boundaries: Mapping[tuple[str, str], float],
    ) -> None:
        self.count, self.edges, self.options, self.boundaries = count, edges, options, boundaries
        self._scale = max((o.seconds for o in options), default=0.0) or 1.0
        self._cuts: list[Sequence[int]] = []
        self._by_member: list[list[int]] = [[] for _ in range(count)]
        for i in _convex(count, edges, options):
            for member in options[i].members:
                self._by_member[member].append(i)
        self._crossings = list(self._pairs())

    def _pairs(self) -> Iterator[tuple[list[int], float]]:
        """Yield, for each edge and pair of backends, the options on its two sides and the cost if both are chosen."""
        for producer, reader in self.edges:
            sides: list[dict[str, list[int]]] = []
            for inside, outside in ((producer, reader), (reader, producer)):
                by_backend: dict[str, list[int]] = {}
                for i in self._by_member[inside]:
                    if outside not in self.options[i].members:
                        by_backend.setdefault(self.options[i].backend, []).append(i)
                sides.append(by_backend)
            for (first, second), seconds in self.boundaries.items():
                if first in sides[0] and second in sides[1]:
                    yield sides[0][first] + sides[1][second], seconds

    def _conflicts(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a region and another that contains what the first one clones."""
        for i in sorted({i for options in self._by_member for i in options if self.options[i].clones}):
            regions = (j for k in self.options[i].clones for j in self._by_member[k])
            yield from ((i, j) for j in dict.fromkeys(regions) if self.options[j].is_region)

    def exclude(self, options: Sequence[int]) -> None:
        """Let no solution have all of these options."""
        self._cuts.append(options)

    def solve(self, max_nodes: int) -> tuple[list[int], float, bool]:
        """Return a solution's options, a lower bound of the cost, and whether the solution is proven optimal."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        size, extra = len(self.options), len(self._crossings)
        cost = np.array([o.seconds for o in self.options] + [s for _, s in self._crossings]) / self._scale
        rows: list[tuple[Sequence[int], int | None, float, float]] = [
            (members, None, 1.0, 1.0) for members in self._by_member
        ]
        # The sum of both sides, less z, is at most one.
        rows += [(sides, size + k, -np.inf, 1.0) for k, (sides, _) in enumerate(self._crossings)]
        rows += [(cut, None, -np.inf, len(cut) - 1.0) for cut in self._cuts]
        rows += [(pair, None, -np.inf, 1.0) for pair in self._conflicts()]
        columns, starts, values = [], [0], []
        for options, z, _, _ in rows:
            columns += [*options, *([] if z is None else [z])]
            values += [1.0] * len(options) + ([] if z is None else [-1.0])
            starts.append(len(columns))
        matrix: Any = csr_matrix((values, columns, starts), shape=(len(rows), size + extra))
        is_possible = {i for options in self._by_member for i in options}
        upper = [float(i in is_possible) for i in range(size)] + [np.inf] * extra
        result: Any = milp(
            cost,
            integrality=np.array([1] * size + [0] * extra),
            bounds=Bounds(0, cast("Any", np.array(upper))),
            constraints=LinearConstraint(
                matrix, cast("Any", [r[2] for r in rows]), cast("Any", [r[3] for r in rows])
            ),
            options={"node_limit": max_nodes, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            # Options of one operation each are always possible.
            alone = [min(self._alone(i), key=lambda o: self.options[o].seconds) for i in range(self.count)]
            return alone, 0.0, False
        chosen = [i for i in range(size) if result.x[i] > 0.5]
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return chosen, float(bound) * self._scale, result.status == 0

    def cost(self, chosen: Sequence[int]) -> float:
        """Return the seconds of a division, boundaries included."""
        taken = set(chosen)
        crossed = sum(s for sides, s in self._crossings if len(taken.intersection(sides)) == 2)
        return sum(self.options[i].seconds for i in chosen) + crossed

    def acyclic(self, chosen: Sequence[int]) -> list[int]:
        """Return a division without cycles: the largest region on each cycle is replaced by its operations alone."""
        division = list(chosen)
        while (cycle := _cycle(self.edges, [self.options[i].members for i in division])) is not None:
            largest = max((division[k] for k in cycle), key=lambda i: (len(self.options[i].members), i))
            division.remove(largest)
            for member in sorted(self.options[largest].members):
                as_it_is = [i for i in self._alone(member) if not self.options[i].is_region]
                choices = as_it_is or self._alone(member)
                division.append(min(choices, key=lambda o: self.options[o].seconds))
        return division

    def _alone(self, member: int) -> list[int]:
        return [i for i in self._by_member[member] if len(self.options[i].members) == 1]


def _convex(count: int, edges: Sequence[tuple[int, int]], options: Sequence[Option]) -> list[int]:
    """Return the options that no path leaves and enters again: what is between two members is a member."""
    before: dict[int, list[int]] = {i: [] for i in range(count)}
    after: dict[int, list[int]] = {i: [] for i in range(count)}
    for producer, reader in edges:
        before[reader].append(producer)
        after[producer].append(reader)
    order = list(TopologicalSorter(before).static_order())
    above, below = [0] * count, [0] * count
    for near, far, nodes in ((before, above, order), (after, below, reversed(order))):
        for i in nodes:
            for j in near[i]:
                far[i] |= far[j] | 1 << j
    convex: list[int] = []
    for k, option in enumerate(options):
        inside = ancestors = descendants = 0
        for i in option.members:
            inside |= 1 << i
            ancestors |= above[i]
            descendants |= below[i]
        if not ancestors & descendants & ~inside:
            convex.append(k)
    return convex


def _cycle(edges: Sequence[tuple[int, int]], parts: Sequence[frozenset[int]]) -> list[int] | None:
    """Return the parts on a cycle of the quotient graph, or None if it has none."""
    part_of = {member: k for k, members in enumerate(parts) for member in members}
    before: dict[int, set[int]] = {k: set() for k in range(len(parts))}
    for producer, reader in edges:
        if part_of[producer] != part_of[reader]:
            before[part_of[reader]].add(part_of[producer])
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return list(dict.fromkeys(error.args[1]))
    return None
