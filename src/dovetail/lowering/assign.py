"""Which region goes to which backends: preferences of the caller, answers of the backends, sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.lowering.backend_protocol import near_kind, resolve, setting
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.failures import LoweringFailure, LoweringFault, fault_of
from dovetail.outlining.region import Region, regions
from dovetail.rules.rule import Decline

Granularity = Literal["outer", "inner"]
Preferences = Mapping[str, tuple[Any, ...]]
ALL = "*"


def preferences(backends: Any, found: Iterable[Region]) -> Preferences:
    """An ordered preference, or one by region, key or kind, as checked backends; `*` stands for all the others."""
    if not isinstance(backends, Mapping):
        return {ALL: resolve(backends)}
    known = {name for r in found for name in (r.name, r.name.rpartition("/")[2], r.kind, r.key)} | {ALL}
    made: dict[str, tuple[Any, ...]] = {}
    same: dict[str, Any] = {}
    for key, value in cast("Mapping[Any, Any]", backends).items():
        if not isinstance(key, str) or key not in known:
            kinds = ", ".join(sorted({r.kind for r in found})) or "none"
            there = f"Kinds here: {kinds}; '*' is for all others."
            hint = did_you_mean(str(key), sorted(known), otherwise=there)
            raise InvalidArgument(f"backends for {key!r}: no region has this name, kind or key. {hint}")
        chain = resolve(value)
        # One backend given by name in two places is one backend.
        made[key] = tuple(
            same.setdefault(b.name, b) if isinstance(value, (str, list, tuple)) else b for b in chain
        )
    return made


def chain_for(region: Region, wanted: Preferences) -> tuple[Any, ...]:
    """The backends for a region: by its name, else its body's key, else its kind, else those for all."""
    for key in (region.name, region.name.rpartition("/")[2], region.key, region.kind, ALL):
        if key in wanted:
            return wanted[key]
    return ()


@dataclass
class Assignment:
    """Regions by name with the backends that will be tried in turn, and the answers of those that will not."""

    chains: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    declined: list[LoweringFault] = field(default_factory=list[LoweringFault])


class Assigner:
    """Asks each backend, in the order of preference, about each region that nobody before it has taken.

    With "outer" a region is asked for before those inside it; with "inner" those inside come first. Who takes a
    region takes all inside it; a region in which something is taken cannot be taken as a whole any more.
    """

    def __init__(self, gm: GraphModule, wanted: Preferences, granularity: Granularity, smallest: int) -> None:
        self.wanted, self.granularity, self.smallest = wanted, granularity, smallest
        self.regions = regions(gm, nested=True)
        self.made = Assignment()
        self._answers: dict[tuple[Any, ...], bool] = {}
        self._taken: set[str] = set()
        self._holding: set[str] = set()

    def assign(self) -> Assignment:
        chains = {r.name: chain_for(r, self.wanted) for r in self.regions}
        order = (
            self.regions
            if self.granularity == "outer"
            else sorted(self.regions, key=lambda r: -r.name.count("/"))
        )
        # Rank by rank: everybody's first choice is asked before anybody's second.
        for rank in range(max(map(len, chains.values()), default=0)):
            for region in order:
                chain = chains[region.name]
                if rank < len(chain) and self._free(region.name):
                    self._offer(region, chain, rank)
        return self.made

    def _free(self, name: str) -> bool:
        above = name.split("/")
        return name not in self._holding and not any(
            "/".join(above[:n]) in self._taken for n in range(1, len(above) + 1)
        )

    def _offer(self, region: Region, chain: tuple[Any, ...], rank: int) -> None:
        backend = chain[rank]
        if not self._takes(backend, region):
            return
        others = tuple(b for b in chain[rank + 1 :] if self._takes(b, region))
        self.made.chains[region.name.rpartition("/")[2]] = (backend, *others)
        self._taken.add(region.name)
        above = region.name.split("/")
        self._holding.update("/".join(above[:n]) for n in range(1, len(above)))

    def _takes(self, backend: Any, region: Region) -> bool:
        unit = unit_of(region)
        key = (id(backend), unit.key, region.kind, unit.roles, region.version, repr(region.attrs))
        found = self._answers.get(key)
        if found is None:
            reason = unit.obstacle or self._too_small(backend, region) or _answer(backend, unit.region)
            found = self._answers[key] = reason is None
            if reason is not None:
                fault = (
                    reason
                    if isinstance(reason, LoweringFault)
                    else LoweringFault(region.name, backend.name, "supports", reason)
                )
                self.made.declined.append(fault)
        return found

    def _too_small(self, backend: Any, region: Region) -> str | None:
        least = self.smallest if setting(backend, "smallest") is None else setting(backend, "smallest")
        if region.kind in setting(backend, "kernels") or len(region.nodes) >= least:
            return None
        hint = near_kind(setting(backend, "kernels"), region.kind)
        return f"{len(region.nodes)} operation(s); a call costs more than it saves below {least}{hint}"


def _answer(backend: Any, region: Region) -> str | LoweringFault | None:
    """Why a backend will not take a region; None if it will."""
    try:
        answer = backend.supports(region)
    except Exception as error:
        return fault_of(region.name, backend.name, "supports", error)
    if answer is True:
        return None
    if isinstance(answer, Decline):
        return answer.reason
    error = LoweringFailure(f"it answered {answer!r}, neither True nor a Decline")
    return fault_of(region.name, backend.name, "supports", error)
