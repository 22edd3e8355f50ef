"""What a caller points at, as addresses in the graphs as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.outlining.region import Region, regions
from dovetail.outlining.region_call import call_of, walk
from dovetail.scheduling.edits import Address, Look, outlined
from dovetail.scheduling.finders import ByRegion, PartMatch, PartRegion, matching
from dovetail.scheduling.session import ScheduleSession
from dovetail.scheduling.state import ScheduleState


@dataclass(frozen=True)
class AddressGroup:
    """Addresses in one graph; `numbers` are the places of the targets in what was given."""

    root: str
    form: int
    addresses: tuple[Address, ...]
    found: tuple[PartMatch, ...]
    numbers: tuple[int, ...]


def listed(target: Any, what: str) -> tuple[list[Any], bool]:
    """A target as a list, and whether it was one."""
    if isinstance(target, (PartMatch, Region, str)):
        return [target], False
    if isinstance(target, Iterable):
        items = list(cast("Iterable[Any]", target))
        if items:
            return items, True
        why = getattr(target, "why", "")
        raise ScheduleError(f"nothing to {what}: the list is empty{f' ({why})' if why else ''}")
    raise InvalidArgument(f"{what} takes matches or regions of this schedule, not a {type(target).__name__}.")


def grouped(work: ScheduleSession, items: Sequence[Any], what: str) -> list[AddressGroup]:
    """Matches and regions by the graph they are in, in the order given; those graphs are scheduled from now on."""
    work.adopt(items)
    state, look = work.state, work.look
    groups: dict[tuple[str, int], list[tuple[Address, PartMatch, int]]] = {}
    known: dict[Any, dict[Any, tuple[int, PartMatch]]] = {}
    for number, item in enumerate(items):
        if not isinstance(item, (PartMatch, PartRegion)):
            raise InvalidArgument(f"{what} takes matches or regions of this schedule, not {item!r}.")
        root = state.root_of(item.path)
        if root is None or root != item.root:
            raise ScheduleError(
                f"{_label(item)} was found in a graph that is no longer there: its part was "
                f"{'traced as a piece of a larger one' if root is not None else 'taken back'}. Find it again"
            )
        place = _address(state, root, item, look, known)
        groups.setdefault((root, item.form), []).append((*place, number))
    return [
        AddressGroup(
            root, form, tuple(f[0] for f in found), tuple(f[1] for f in found), tuple(f[2] for f in found)
        )
        for (root, form), found in groups.items()
    ]


def _address(
    state: ScheduleState,
    root: str,
    item: PartMatch | PartRegion,
    look: Look,
    known: dict[Any, dict[Any, tuple[int, PartMatch]]],
) -> tuple[Address, PartMatch]:
    """Where an item is now; `known` remembers what finders find, by the names of operations or regions."""
    if isinstance(item, PartMatch):
        assert item.finder is not None
        finder, name = item.finder, item.names
    else:
        finder, name = ByRegion(item.kind), item.name
    asked = (root, item.form, item.path, finder.identity, isinstance(item, PartMatch))
    if asked not in known:
        matches = Address(item.path, finder, 0).all(look(state.graphs[root, item.form].gm), root)
        known[asked] = {
            m.names if isinstance(item, PartMatch) else m.nodes[0].name: (i, m) for i, m in enumerate(matches)
        }
    if name not in known[asked]:
        raise ScheduleError(f"{_label(item)} is not there any more: {_fate(state, root, item)}")
    occurrence, match = known[asked][name]
    return Address(item.path, finder, occurrence), match


def _label(item: PartMatch | PartRegion) -> str:
    return f"region '{item.name}'" if isinstance(item, PartRegion) else repr(item)


def _fate(state: ScheduleState, root: str, item: PartMatch | PartRegion) -> str:
    graph = state.graphs[root, item.form].gm.graph
    names = item.names if isinstance(item, PartMatch) else {item.name}
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None and not names.isdisjoint(m.name for m in walk(call)):
            return f"region '{node.name}' has it, or a piece of it"
    return "a later step changed it"


def spelled_targets(groups: Iterable[AddressGroup], keys: list[str] | None = None) -> list[dict[str, Any]]:
    """Addresses as history keeps them; keys are of the bodies, in the order of the addresses."""
    told: list[dict[str, Any]] = []
    for group in groups:
        for address in group.addresses:
            at = {
                "path": address.path,
                "form": group.form,
                "find": address.finder.spelled(),
                "occurrence": address.occurrence,
            }
            if keys is not None:
                at["key"] = keys[len(told)]
            told.append(at)
    return told


def keys_of(work: ScheduleSession, groups: Iterable[AddressGroup]) -> list[str]:
    """The key of what each address computes, in their order."""
    found: list[str] = []
    for group in groups:
        gm = work.state.graphs[group.root, group.form].gm
        known: dict[str | int, str] = {region.name: region.key for region in regions(gm)}
        fresh = [m for m in group.found if not isinstance(m.finder, ByRegion)]
        if fresh:
            requests = [m.request for m in fresh if m.request is not None]
            made, names = outlined(gm, requests)
            keys = {region.name: region.key for region in regions(made)}
            known.update({id(m): keys[name] for m, name in zip(fresh, names, strict=True)})
        found += [known[m.nodes[0].name if isinstance(m.finder, ByRegion) else id(m)] for m in group.found]
    return found


def is_path(target: Any) -> bool:
    return isinstance(target, str) or (
        isinstance(target, (list, tuple))
        and bool(target)
        and all(isinstance(t, str) for t in cast("list[Any]", target))
    )


def resolved_paths(work: ScheduleSession, target: Any) -> list[str]:
    """Paths as they were given: whole ones of the model, globs allowed."""
    given = [target] if isinstance(target, str) else list(cast("Iterable[str]", target))
    with work.exchanged() as model:
        return list(dict.fromkeys(found for pattern in given for found in matching(model, pattern)))
