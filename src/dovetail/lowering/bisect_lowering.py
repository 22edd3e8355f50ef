"""Bisection of a lowered graph: which regions break it when they are lowered.

Minimal failing subsets are found one at a time (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing
Input, 2002): a binary search for the shortest failing prefix gives one region of the subset, so that a subset of k out
of n regions takes O(k log n) evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_call
from dovetail.ir.graph_module import require_graph
from dovetail.lowering.lowered_state import LoweredState, lowered_state_of, with_lowering
from dovetail.outlining.region import Region, local_name, regions
from dovetail.passes.bisect_passes import GraphCheck, first_bad


@dataclass(frozen=True)
class Breakage:
    """Regions that break a graph when they alone are lowered, and do not when any one of them is left as it is.

    `backends` are those that run them, in the same order. `same_code` are further regions that run the code of one of
    them; they were not evaluated one by one.
    """

    regions: tuple[str, ...]
    backends: tuple[str, ...]
    same_code: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = " and ".join(
            f"region '{name}', lowered by '{backend}'"
            for name, backend in zip(self.regions, self.backends, strict=True)
        )
        more = f"; so may {', '.join(self.same_code)}, which run the same code" if self.same_code else ""
        return f"{named}: {'together they break' if len(self.regions) > 1 else 'breaks'} it{more}"


@dataclass(frozen=True, eq=False)
class LoweringVerdict:
    """What breaks a lowered graph: without the lowering of `breakages` it is good.

    `before` has everything lowered except the regions of the first breakage and those that run their code, which is good
    unless there are more; `after` has the regions of the first breakage lowered alone, and is bad. `error` is what
    `still_good` raised for the latter, if it did.
    """

    breakages: tuple[Breakage, ...]
    evaluations: int
    before: GraphModule = field(repr=False)
    after: GraphModule = field(repr=False)
    error: Exception | None = field(default=None, repr=False)

    @property
    def regions(self) -> tuple[str, ...]:
        """The names of all regions that break it."""
        return tuple(name for breakage in self.breakages for name in breakage.regions)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that run them, in the same order."""
        return tuple(name for breakage in self.breakages for name in breakage.backends)

    def __str__(self) -> str:
        lines = [str(breakage) for breakage in self.breakages]
        if self.error is not None:
            lines.append(f"  {type(self.error).__name__}: {self.error}")
        return "\n".join([*lines, f"({self.evaluations} evaluations)"])


@checked_call()
def bisect_lowering(
    gm: GraphModule, still_good: Callable[[GraphModule], bool], *, errors: str = "bad"
) -> LoweringVerdict:
    """Find the regions of a lowered graph whose lowering makes `still_good(graph)` false.

    Graphs with only some of the regions lowered are evaluated, with the code that exists; nothing is compiled. A
    region that breaks it is found in logarithmically many evaluations, then evaluated alone; if it takes several
    together, a minimal set of them is found; then the search goes on until the rest is good. A `still_good` that
    raises counts as bad, or with `errors="raise"` the error is raised.
    """
    require_graph(gm)
    lowering = lowered_state_of(gm)
    if lowering is None:
        raise InvalidArgument("bisect_lowering takes a lowered graph, and this one is not: `lower` it first.")
    search = _RegionBisection(gm, lowering, GraphCheck(still_good, errors))
    if not search.is_bad(search.names):
        raise InvalidArgument("the lowered graph is good, so no lowering breaks it.")
    if search.is_bad(()):
        raise InvalidArgument(
            "the graph is bad with nothing lowered too, so no lowering has broken it; look at `still_good`."
        ) from search.raised
    return search.verdict()


class _RegionBisection:
    def __init__(self, gm: GraphModule, lowering: LoweredState, is_good: GraphCheck) -> None:
        self.gm, self.lowering, self.is_good = gm, lowering, is_good
        candidates = regions(gm, nested=True)
        self.regions = {r.name: r for r in candidates if local_name(r.name) in lowering.assigned}
        self.names = tuple(self.regions)
        self.raised: Exception | None = None

    def graph(self, names: Sequence[str]) -> GraphModule:
        """Return the graph with only these regions lowered."""
        if not names:
            return with_lowering(self.gm, None)
        backends = {local_name(n): self.regions[n].backend for n in names}
        return with_lowering(self.gm, self.lowering.restricted(backends), backends)

    def is_bad(self, names: Sequence[str]) -> bool:
        graph = self.graph(names)
        is_bad = not self.is_good(graph)
        self.raised = self.is_good.raised.pop(graph, None)
        return is_bad

    def verdict(self) -> LoweringVerdict:
        breakages: list[Breakage] = []
        rest = self.names
        first: Exception | None = None
        while True:
            guilty, raised = self._smallest(rest)
            first = raised if not breakages else first
            alike = self._same_code(guilty, rest)
            breakages.append(self._breakage(guilty, alike))
            rest = tuple(n for n in rest if n not in guilty and n not in alike)
            if not rest or not self.is_bad(rest):
                break
        leading = breakages[0]
        spared = tuple(n for n in self.names if n not in (*leading.regions, *leading.same_code))
        return LoweringVerdict(
            tuple(breakages), self.is_good.count, self.graph(spared), self.graph(leading.regions), first
        )

    def _smallest(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], Exception | None]:
        """Return a minimal bad subset of a bad set of regions, and what was raised for it."""
        needed: tuple[str, ...] = ()
        while True:
            # The shortest prefix that is bad together with what is needed: its last region is needed too.
            last = first_bad(0, len(names), partial(self._is_bad_with, names, needed)) - 1
            needed, names = (names[last], *needed), names[:last]
            if self.is_bad(needed) or not names:
                return needed, self.raised

    def _is_bad_with(self, names: tuple[str, ...], needed: tuple[str, ...], count: int) -> bool:
        return self.is_bad((*names[:count], *needed))

    def _same_code(self, guilty: Sequence[str], rest: Sequence[str]) -> tuple[str, ...]:
        codes = {self._code(self.regions[n]) for n in guilty}
        return tuple(n for n in rest if n not in guilty and self._code(self.regions[n]) in codes)

    def _code(self, region: Region) -> int:
        return id(self.lowering.dispatcher(region, self.lowering.assigned[local_name(region.name)]))

    def _breakage(self, guilty: tuple[str, ...], alike: tuple[str, ...]) -> Breakage:
        chains = [self.lowering.assigned[local_name(n)] for n in guilty]
        named = [self.regions[n].backend or chain[0].name for n, chain in zip(guilty, chains, strict=True)]
        return Breakage(guilty, tuple(named), alike)
