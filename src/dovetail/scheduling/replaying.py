"""The steps of a history done again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from dovetail.errors import DovetailError, ScheduleError
from dovetail.scheduling import actions, substituting
from dovetail.scheduling.found import Found, PartRegion
from dovetail.scheduling.history import finder_from, made_up, restored
from dovetail.scheduling.paths import require_path
from dovetail.scheduling.recording import Example
from dovetail.scheduling.targets import grouped, keys_of
from dovetail.scheduling.workspace import Workspace

if TYPE_CHECKING:
    from dovetail.scheduling.schedule import Schedule


def replay(schedule: Schedule, work: Workspace, steps: Iterable[Mapping[str, Any]]) -> None:
    """Do steps again, all of them or none."""
    state, done, example = work.state, list(work.done), work.example
    try:
        for number, step in enumerate(steps):
            if not isinstance(step, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ScheduleError(f"step {number} of the history is a {type(step).__name__}, not a dict")
            entry = _Entry(step)
            try:
                entry = _Entry(cast("dict[str, Any]", restored(dict(step))))
                _again(schedule, work, entry)
            except DovetailError as error:
                raise ScheduleError(
                    f"step {number} ({entry.get('do')}) cannot be replayed: {error}"
                ) from error
    except BaseException:
        work.restore(state, done, example)
        raise


class _Entry(dict[str, Any]):
    """A step as it was read, which may lack something."""

    def __missing__(self, key: str) -> Any:
        raise ScheduleError(f"the step '{self.get('do', 'to find something')}' does not tell its '{key}'")


def _again(schedule: Schedule, work: Workspace, entry: dict[str, Any]) -> None:
    do = entry.get("do")
    if do == "schedule":
        if work.example is None and entry.get("inputs") is not None:
            device = next((p.device for p in work.model.parameters()), torch.device("cpu"))
            try:
                args, kwargs = made_up(entry["inputs"], device)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ScheduleError(f"it does not tell what the inputs were: {entry['inputs']!r}") from error
            work.example = Example(args, kwargs)
        return
    if do == "apply":
        work.step(
            lambda _: {"do": "apply", "primitive": entry["primitive"]},
            lambda: [_again(schedule, work, _Entry(step)) for step in entry.get("steps", [])],
        )
        return
    if "at" in entry:
        items = _targets(work, entry["at"])
        _on_targets(work, entry, items)
        return
    _on_paths(work, entry)


def _targets(work: Workspace, spelled: list[dict[str, Any]]) -> list[Any]:
    """What a step was about, in this model."""
    if not isinstance(spelled, list) or not all(isinstance(at, Mapping) for at in spelled):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"it does not tell what it is about, but {spelled!r}")
    paths = [_Entry(at)["path"] for at in spelled]
    with work.exchanged() as model:
        for path in dict.fromkeys(paths):
            require_path(model, path)
    work.prospect(work.looked_into(paths))  # one run of the model for all of them
    known: dict[Any, list[Found]] = {}
    matches: list[Found] = []
    for at in map(_Entry, spelled):
        finder = finder_from(at["find"])
        asked = (at["path"], finder.identity)
        if asked not in known:
            known[asked] = work.find([at["path"]], finder)
        found = [m for m in known[asked] if m.form == at.get("form", 0)]
        if not isinstance(at["occurrence"], int) or at["occurrence"] >= len(found):
            raise ScheduleError(
                f"'{at['path'] or 'the model'}' has {len(found)} matches of {finder.name}, and number {at['occurrence']} was meant"
            )
        matches.append(found[at["occurrence"]])
    groups = grouped(work, matches, "replay")
    order = [number for group in groups for number in group.numbers]
    for number, key in zip(order, keys_of(work, groups), strict=True):
        at = spelled[number]
        if at.get("key") not in (None, key):
            raise ScheduleError(
                f"match {at['occurrence']} of {matches[number].rule} in '{at['path'] or 'the model'}' computes something "
                f"else than in the model that the history is of (its body is {key[:12]}, not {str(at['key'])[:12]})"
            )
    return [
        _as_region(work, match) if "region" in at["find"] else match
        for at, match in zip(spelled, matches, strict=True)
    ]


def _as_region(work: Workspace, match: Found) -> PartRegion:
    name = match.nodes[0].name
    return work.regions_named(match.root, match.form, {name: match.path})[0]


def _on_targets(work: Workspace, entry: dict[str, Any], items: list[Any]) -> None:
    do = entry["do"]
    if do == "fuse":
        options = {k: entry.get(k) for k in ("kind", "version", "attrs", "escapes")}
        target = items if entry.get("list", True) else items[0]
        actions.fuse(work, target, bool(entry.get("together")), _backend(entry.get("backend")), **options)
    elif do == "replace":
        many = entry.get("siblings", len(items))
        for i in range(0, len(items), many):
            substituting.replace_target(
                work,
                entry["new"],
                items[i : i + many],
                params=entry.get("params"),
                concrete_args=entry.get("concrete_args"),
                check=False,
                name=entry.get("name"),
            )
    elif do == "replace_all":
        _replace_all(work, (), items, entry)
    elif do == "decompose":
        actions.decompose(work, items)
    elif do == "annotate":
        actions.annotate(work, items, entry["attrs"])
    elif do == "checkpoint":
        actions.checkpoint(work, items)
    elif do == "lower":
        actions.lower(work, items, _backend(entry["backend"]))
    else:
        raise ScheduleError(f"the step '{do}' is unknown here")


def _on_paths(work: Workspace, entry: dict[str, Any]) -> None:
    do, paths = entry.get("do"), entry.get("paths")
    if not paths:
        raise ScheduleError(f"the step '{do}' is unknown here, or says not where")
    if do == "replace":
        substituting.replace_target(
            work,
            entry["new"],
            paths,
            params=entry.get("params"),
            concrete_args=entry.get("concrete_args"),
            check=False,
            name=entry.get("name"),
        )
    elif do == "replace_all":
        _replace_all(work, tuple(paths), entry["class"], entry)
    elif do == "annotate":
        actions.annotate(work, paths, entry["attrs"])
    elif do == "checkpoint":
        actions.checkpoint(work, paths)
    else:
        raise ScheduleError(f"the step '{do}' is unknown here")


def _replace_all(work: Workspace, paths: tuple[str, ...], what: Any, entry: dict[str, Any]) -> None:
    substituting.replace_all(
        work,
        paths,
        what,
        entry["factory"],
        params=entry.get("params"),
        concrete_args=entry.get("concrete_args"),
        check=False,
    )


def _backend(value: Any) -> Any:
    return value() if isinstance(value, type) else value
