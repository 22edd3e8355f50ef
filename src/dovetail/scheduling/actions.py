"""The steps of a schedule: each checks, then makes another state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.lowering.backend import resolve
from dovetail.outlining.record import make_identity
from dovetail.outlining.region import Region
from dovetail.scheduling.checkpointing import Checkpoint, require_repeatable
from dovetail.scheduling.decomposing import can_be_taken_apart
from dovetail.scheduling.edits import Annotate, Decompose, Edit, Fuse, Lower
from dovetail.scheduling.finders import ByNode
from dovetail.scheduling.found import Found, PartRegion
from dovetail.scheduling.history import backend_spelled
from dovetail.scheduling.targets import (
    Group,
    grouped,
    is_path,
    keys_of,
    listed,
    resolved_paths,
    spelled_targets,
)
from dovetail.scheduling.workspace import Workspace


def fuse(work: Workspace, matches: Any, together: bool, backend: Any, **options: Any) -> Any:
    """Regions of matches, in the order of the matches."""
    items, is_list = listed(matches, "fuse")
    if not all(isinstance(item, Found) for item in items):
        wrong = next(item for item in items if not isinstance(item, Found))
        raise InvalidArgument(f"fuse takes matches that `find` returned, not {wrong!r}.")
    if options.get("kind") is not None or options.get("attrs") is not None:
        make_identity(options.get("kind") or "part", options.get("version") or 1, options.get("attrs"))
    if backend is not None:
        resolve(backend)
    told = {k: v for k, v in options.items() if v is not None}
    told |= {"backend": backend_spelled(backend)} if backend is not None else {}
    told |= {"together": True} if together else {}

    def run() -> tuple[list[PartRegion], list[dict[str, Any]]]:
        groups = grouped(work, items, "fuse")
        if together and len(groups) > 1:
            raise ScheduleError(
                f"what is fused together must be in one graph; these are in "
                f"{', '.join(g.root or 'the model' for g in groups)}. Find them from a part that holds all of them"
            )
        at = spelled_targets(groups, keys_of(work, groups))
        made: dict[int, PartRegion] = {}
        for group in groups:
            edit = Fuse(
                group.root, group.form, group.addresses, together=together, backend=backend, **options
            )
            names = work.edit(edit)
            paths = [address.path for address in group.addresses]
            found = work.regions_named(group.root, group.form, dict(zip(names, paths, strict=False)))
            made.update(dict(zip(group.numbers, found, strict=False)))
        return [made[i] for i in sorted(made)], at

    made, _ = work.step(lambda result: {"do": "fuse", "at": result[1], "list": is_list, **told}, run)
    return made if is_list and not together else made[0]


def _on_groups(
    work: Workspace, do: str, items: list[Any], edit: Callable[[Group], Edit], **told: Any
) -> None:
    """One edit for each graph that the targets of a step are in."""

    def run() -> list[dict[str, Any]]:
        groups = grouped(work, items, do)
        at = spelled_targets(groups, keys_of(work, groups))
        for group in groups:
            work.edit(edit(group))
        return at

    work.step(lambda at: {"do": do, "at": at, **told}, run)


def decompose(work: Workspace, target: Any) -> None:
    """Take regions, matches, or all that can be in some modules apart."""
    if is_path(target):
        paths = resolved_paths(work, target)
        items: list[Any] = list(work.find(paths, ByNode(can_be_taken_apart)))
        if not items:
            closed = [name for path in paths for name in work.regions_holding(path)]
            more = f"; take its regions apart first: {', '.join(closed[:4])}" if closed else ""
            named = ", ".join(path or "the model" for path in paths)
            raise ScheduleError(f"no operation of {named} can be taken apart into simpler ones{more}")
    else:
        items, _ = listed(target, "decompose")
    _on_groups(work, "decompose", items, lambda g: Decompose(g.root, g.form, g.addresses))


def _regions(target: Any, what: str) -> list[Any]:
    items, _ = listed(target, what)
    wrong = [item for item in items if not isinstance(item, Region)]
    if wrong:
        also = "" if what == "lower" else " or the paths of modules"
        raise InvalidArgument(f"{what} takes regions{also}; fuse {wrong[0]!r} first.")
    return items


def annotate(work: Workspace, target: Any, attrs: Mapping[str, Any]) -> None:
    """Attributes on regions, notes on modules."""
    make_identity("annotation", 1, attrs)
    if not attrs:
        raise InvalidArgument("annotate needs attributes: annotate(region, tile=64).")
    given = dict(attrs)
    if is_path(target):
        paths = resolved_paths(work, target)

        def note() -> None:
            notes = {path: {**work.state.notes.get(path, {}), **given} for path in paths}
            work.state = replace(work.state, notes={**work.state.notes, **notes})

        work.step(lambda _: {"do": "annotate", "paths": paths, "attrs": given}, note)
        return
    items = _regions(target, "annotate")
    _on_groups(
        work, "annotate", items, lambda g: Annotate(g.root, g.form, g.addresses, attrs=given), attrs=given
    )


def checkpoint(work: Workspace, target: Any) -> None:
    """Regions or modules whose inner values are computed again in backward."""
    if is_path(target):
        paths = resolved_paths(work, target)

        def mark() -> None:
            for path in paths:
                if work.state.root_of(path) is not None:
                    raise ScheduleError(f"'{path}' is traced; make a region of it and checkpoint that")
                require_repeatable(path, work.module_at(path), ())
            calls = work.record(paths) if work.example is not None else {}
            for path, called in calls.items():
                require_repeatable(path, work.module_at(path), called)
            work.state = replace(work.state, checkpoints=work.state.checkpoints | set(paths))

        work.step(lambda _: {"do": "checkpoint", "paths": paths}, mark)
        return
    items = _regions(target, "checkpoint")
    _on_groups(work, "checkpoint", items, lambda g: Lower(g.root, g.form, g.addresses, backend=Checkpoint()))


def lower(work: Workspace, target: Any, backend: Any) -> None:
    """Regions given to a backend."""
    resolve(backend)
    items = _regions(target, "lower")
    _on_groups(
        work,
        "lower",
        items,
        lambda g: Lower(g.root, g.form, g.addresses, backend=backend),
        backend=backend_spelled(backend),
    )
