"""Assignment of regions to backends, by preferences of the caller, answers of the backends and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.lowering.backend_protocol import Backend, identity, near_kind, resolve
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.failures import LoweringFailure, LoweringFault, fault_of, report_fault
from dovetail.lowering.options import Options
from dovetail.outlining.region import Region, local_name, path_prefixes
from dovetail.rules.rule import Decline

Preferences = Mapping[str, tuple[Backend, ...]]
ALL = "*"


def preferences(backends: Any, candidates: Sequence[Region]) -> Preferences:
    """Return an ordered preference, or one by region, key or kind, as checked backends; `*` is all the others."""
    if not isinstance(backends, Mapping):
        return {ALL: resolve(backends)}
    known = {name for r in candidates for name in (r.name, local_name(r.name), r.kind, r.key)} | {ALL}
    chains: dict[str, tuple[Backend, ...]] = {}
    by_name: dict[str, Backend] = {}
    for key, value in cast("Mapping[Any, Any]", backends).items():
        if not isinstance(key, str) or key not in known:
            kinds = ", ".join(sorted({r.kind for r in candidates})) or "none"
            otherwise = f"Kinds here: {kinds}; '*' is for all others."
            hint = did_you_mean(str(key), sorted(known), otherwise=otherwise)
            raise InvalidArgument(f"backends for {key!r}: no region has this name, kind or key. {hint}")
        chain = resolve(value)
        chains[key] = tuple(
            _shared(b, by_name) if isinstance(value, (str, list, tuple)) else b for b in chain
        )
    return chains


def _shared(backend: Backend, by_name: dict[str, Backend]) -> Backend:
    """Return one object for a backend that is named in two places; with other options it is another backend."""
    known = by_name.setdefault(backend.name, backend)
    return known if known is backend or identity(known) == identity(backend) else backend


def chain_for(region: Region, preferred: Preferences) -> tuple[Backend, ...]:
    """Return the backends for a region: by its name, else its body's key, else its kind, else those for all."""
    for key in (region.name, local_name(region.name), region.key, region.kind, ALL):
        if key in preferred:
            return preferred[key]
    return ()


class Assigner:
    """Asks each backend, in the order of preference, about each region that is not assigned yet.

    With "outer" a region is offered before those inside it; with "inner" after them. A region is assigned with all
    regions inside it; one that contains an assigned region cannot be assigned as a whole. `chains` are the backends
    to try in turn, by the local name of a region, and `declined` the reasons of those that do not take one. A body
    that the plan of the options names is not too small for the backends that the plan has for it.
    """

    def __init__(self, candidates: Sequence[Region], preferred: Preferences, options: Options) -> None:
        self.smallest = options.smallest
        self._planned = frozenset(options.plan or ())
        self.chains: dict[str, tuple[Backend, ...]] = {}
        self.declined: list[LoweringFault] = []
        self._answers: dict[tuple[Any, ...], bool] = {}
        self._assigned: set[str] = set()
        self._ancestors: set[str] = set()
        chains = {r.name: chain_for(r, preferred) for r in candidates}
        if options.granularity == "inner":
            candidates = sorted(candidates, key=lambda r: -r.name.count("/"))
        # Rank by rank: the first choice of every region is asked before the second of any.
        for rank in range(max(map(len, chains.values()), default=0)):
            for region in candidates:
                chain = chains[region.name]
                if rank < len(chain) and self._is_free(region.name):
                    self._offer(region, chain, rank)

    def _is_free(self, name: str) -> bool:
        return name not in self._ancestors and self._assigned.isdisjoint(path_prefixes(name))

    def _offer(self, region: Region, chain: tuple[Backend, ...], rank: int) -> None:
        backend = chain[rank]
        if not self._accepts(backend, region):
            return
        others = tuple(b for b in chain[rank + 1 :] if self._accepts(b, region))
        self.chains[local_name(region.name)] = (backend, *others)
        self._assigned.add(region.name)
        self._ancestors.update(path_prefixes(region.name))

    def _accepts(self, backend: Backend, region: Region) -> bool:
        unit = unit_of(region)
        key = (id(backend), unit.key, unit.roles)
        accepted = self._answers.get(key)
        if accepted is None:
            reason = unit.obstacle or self._too_small(backend, region) or _answer(backend, unit.region)
            accepted = self._answers[key] = reason is None
            if isinstance(reason, str):
                reason = LoweringFault(region.name, backend.name, "supports", reason)
            elif reason is not None:
                report_fault(reason)
            if reason is not None:
                self.declined.append(reason)
        return accepted

    def _too_small(self, backend: Backend, region: Region) -> str | None:
        least = self.smallest if backend.smallest is None else backend.smallest
        if region.kind in backend.kernels or len(region.nodes) >= least or region.key in self._planned:
            return None
        hint = near_kind(backend.kernels, region.kind)
        return f"{len(region.nodes)} operation(s); a call costs more than it saves below {least}{hint}"


def _answer(backend: Backend, region: Region) -> str | LoweringFault | None:
    """Return why a backend declines a region; None if it accepts it."""
    try:
        answer = backend.supports(region)
    except Exception as error:
        return fault_of(region.name, backend.name, "supports", error)
    if answer is True:
        return None
    if isinstance(answer, Decline):  # pyright: ignore[reportUnnecessaryIsInstance]
        return answer.reason
    error = LoweringFailure(f"it returned {answer!r}, neither True nor a Decline")
    return fault_of(region.name, backend.name, "supports", error)
