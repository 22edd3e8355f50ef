"""Resolution of the targets of a step, matches, regions or paths, to addresses in the present graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.outlining.region import Region, call_of, regions, walk
from dovetail.scheduling.edits import Address, ContextProvider, outline_named
from dovetail.scheduling.finders import ByRegion, PartMatch, PartRegion, match_paths, relative_path
from dovetail.scheduling.session import ScheduleSession
from dovetail.scheduling.state import ScheduleState


@dataclass(frozen=True)
class AddressGroup:
    """Addresses in one graph; `indices` are those of the targets in the list of the caller."""

    root: str
    form: int
    addresses: tuple[Address, ...]
    matches: tuple[PartMatch, ...]
    indices: tuple[int, ...]


Target: TypeAlias = PartMatch | Region | str | Iterable[PartMatch | Region | str]
"""What a step is about: matches and regions of the schedule, or paths of modules."""


def target_list(target: Any, what: str) -> tuple[list[Any], bool]:
    """Return a target as a list, and whether it was one."""
    if isinstance(target, (PartMatch, Region, str)):
        return [target], False
    if isinstance(target, Iterable):
        items = list(cast("Iterable[Any]", target))
        if items:
            return items, True
        why = getattr(target, "why", "")
        raise ScheduleError(f"nothing to {what}: the list is empty{f' ({why})' if why else ''}")
    raise InvalidArgument(f"{what} takes matches or regions of this schedule, not a {type(target).__name__}.")


def group_by_graph(session: ScheduleSession, items: Sequence[Any], what: str) -> list[AddressGroup]:
    """Group matches and regions by their graph, in order; their parts become traced parts of the schedule."""
    session.adopt(items)
    state, contexts = session.state, session.contexts
    groups: dict[tuple[str, int], list[tuple[Address, PartMatch, int]]] = {}
    cache: dict[Any, dict[Any, tuple[int, PartMatch]]] = {}
    for number, item in enumerate(items):
        if not isinstance(item, (PartMatch, PartRegion)):
            raise InvalidArgument(f"{what} takes matches or regions of this schedule, not {item!r}.")
        root = state.root_of(item.path)
        if root is None or root != item.root:
            raise ScheduleError(
                f"{_label(item)} was found in a graph that is no longer there: its part was "
                f"{'traced as a piece of a larger one' if root is not None else 'taken back'}. Find it again"
            )
        place = _address(state, root, item, contexts, cache)
        groups.setdefault((root, item.form), []).append((*place, number))
    return [
        AddressGroup(
            root,
            form,
            tuple(f[0] for f in members),
            tuple(f[1] for f in members),
            tuple(f[2] for f in members),
        )
        for (root, form), members in groups.items()
    ]


def _address(
    state: ScheduleState,
    root: str,
    item: PartMatch | PartRegion,
    contexts: ContextProvider,
    cache: dict[Any, dict[Any, tuple[int, PartMatch]]],
) -> tuple[Address, PartMatch]:
    """Return the present address of an item; `cache` holds matches by the names of operations or regions."""
    if isinstance(item, PartMatch):
        assert item.finder is not None
        finder, name = item.finder, item.names
    else:
        finder, name = ByRegion(item.kind), item.name
    key = (root, item.form, item.path, finder.identity, isinstance(item, PartMatch))
    if key not in cache:
        context = contexts(state.graphs[root, item.form].gm)
        matches, _ = finder.find(context, relative_path(item.path, root))
        cache[key] = {
            m.names if isinstance(item, PartMatch) else m.nodes[0].name: (i, m) for i, m in enumerate(matches)
        }
    if name not in cache[key]:
        raise ScheduleError(f"{_label(item)} is not there any more: {_why_missing(state, root, item)}")
    occurrence, match = cache[key][name]
    return Address(item.path, finder, occurrence), match


def _label(item: PartMatch | PartRegion) -> str:
    return f"region '{item.name}'" if isinstance(item, PartRegion) else repr(item)


def _why_missing(state: ScheduleState, root: str, item: PartMatch | PartRegion) -> str:
    graph = state.graphs[root, item.form].gm.graph
    names = item.names if isinstance(item, PartMatch) else {item.name}
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None and not names.isdisjoint(m.name for m in walk(call)):
            return f"region '{node.name}' has it, or a piece of it"
    return "a later step changed it"


def target_entries(session: ScheduleSession, groups: Sequence[AddressGroup]) -> list[dict[str, Any]]:
    """Return addresses as entries of a history, each with the structural key of its operations."""
    addresses = [(group.form, address) for group in groups for address in group.addresses]
    return [
        {
            "path": address.path,
            "form": form,
            "find": address.finder.serialized(),
            "occurrence": address.occurrence,
            "key": key,
        }
        for (form, address), key in zip(addresses, body_keys(session, groups), strict=True)
    ]


def body_keys(session: ScheduleSession, groups: Iterable[AddressGroup]) -> list[str]:
    """Return the structural key of the operations at each address."""
    keys_in_order: list[str] = []
    for group in groups:
        gm = session.state.graphs[group.root, group.form].gm
        by_match: dict[str | int, str] = {region.name: region.key for region in regions(gm)}
        fresh = [m for m in group.matches if not isinstance(m.finder, ByRegion)]
        if fresh:
            requests = [m.request for m in fresh if m.request is not None]
            outlined, names = outline_named(gm, requests)
            keys = {region.name: region.key for region in regions(outlined)}
            by_match.update({id(m): keys[name] for m, name in zip(fresh, names, strict=True)})
        keys_in_order += [
            by_match[m.nodes[0].name if isinstance(m.finder, ByRegion) else id(m)] for m in group.matches
        ]
    return keys_in_order


def is_path_target(target: Any) -> bool:
    return isinstance(target, str) or (
        isinstance(target, (list, tuple))
        and bool(target)
        and all(isinstance(t, str) for t in cast("list[Any]", target))
    )


def resolve_paths(session: ScheduleSession, target: Any) -> list[str]:
    """Return the paths of the model that globs match."""
    patterns = [target] if isinstance(target, str) else list(cast("Iterable[str]", target))
    with session.with_replacements() as model:
        return list(dict.fromkeys(path for pattern in patterns for path in match_paths(model, pattern)))
