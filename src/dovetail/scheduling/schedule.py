"""Schedules: a model taken apart and changed step by step, each step checked and each one undoable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx import Node

from dovetail.errors import DovetailError, InvalidArgument, ScheduleError, checked_call
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.ir.graph_module import attribute
from dovetail.ir.printer import text
from dovetail.lowering.backend_protocol import resolve
from dovetail.lowering.lower import settle_parts
from dovetail.outlining.region_call import RegionCall, call_of
from dovetail.scheduling import part
from dovetail.scheduling import replace as replacement_steps
from dovetail.scheduling.call_recording import ModelInputs
from dovetail.scheduling.edits import Checkpoint, PartGraph
from dovetail.scheduling.finders import (
    PartMatch,
    PartRegion,
    around,
    below,
    is_within,
    joined,
    path_of,
    require_path,
)
from dovetail.scheduling.history import History, described, finder_from, made_up, restored
from dovetail.scheduling.install import is_scheduled
from dovetail.scheduling.part import Part
from dovetail.scheduling.resolve import grouped, keys_of
from dovetail.scheduling.session import Done, ScheduleSession
from dovetail.scheduling.state import ScheduleState
from dovetail.scheduling.verify_schedule import VerifyResult, verify


def tree(work: ScheduleSession, *, graphs: bool = False) -> str:
    """The modules of a model with what was done to them, neighbours that are equal on one line.

    Within a traced part only modules with something to tell are shown: its graph runs in their place. With `graphs`
    the graphs of traced parts follow.
    """
    with work.installation.instead(None) as model:
        news = _news(work.state, model)
    with work.exchanged() as model:
        lines = _lines(_Tree(work.state, news), model, "", type(model).__name__)
    if graphs:
        for (root, form), part in work.state.graphs.items():
            lines += ["", f"{root or 'the model'}, call {form}:", text(part.gm)]
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Tree:
    state: ScheduleState
    news: Mapping[str, list[str]]

    def is_shown(self, path: str) -> bool:
        """Whether a module has a line: not if it is in a traced part and nothing is to be told of it."""
        root = self.state.root_of(path)
        return root in (None, path) or path in self.told

    @cached_property
    def told(self) -> set[str]:
        """The modules that there is something to tell of, and those around them."""
        return {outer for path in self.news for outer in around(path)}


def _lines(tree: _Tree, module: nn.Module, path: str, label: str) -> list[str]:
    """A module and those in it; the first line has no name yet unless it is the model."""
    said = tree.news.get(path)
    lines = [f"{label}  <- {', '.join(said)}" if said else label]
    children: list[tuple[str, list[str]]] = []
    for name, child in module._modules.items():
        inner = joined(path, name)
        if child is not None and child is not module and tree.is_shown(inner):
            children.append((name, _lines(tree, child, inner, _class_name(child))))
    for _, alike in groupby(children, key=lambda c: c[1]):
        folded = list(alike)
        first, *rest = folded[0][1]
        lines.append(f"  {_names([name for name, _ in folded])}: {first}")
        lines += [f"  {line}" for line in rest]
    return lines


def _names(names: list[str]) -> str:
    """Names of neighbours: numbers in a row as their first and last."""
    if len(names) > 2 and all(name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{names[0]}-{names[-1]}"
    return ", ".join(names)


def _class_name(module: nn.Module) -> str:
    return module._get_name()


def _news(state: ScheduleState, model: nn.Module) -> dict[str, list[str]]:
    """What was done, by the path of the module that it was done to; the model is as it was given."""
    news: dict[str, list[str]] = {}
    for path in state.swaps:
        news.setdefault(path, []).append(f"in place of {_class_name(_old(state, model, path))}")
    for path, trace in state.traces.items():
        ways = len(trace.calls)
        news.setdefault(path, []).append("traced" if ways == 1 else f"traced, {ways} ways of calling")
        for place, told in _by_place(state, path, ways).items():
            news.setdefault(place, []).extend(told)
    for path in sorted(state.checkpoints):
        news.setdefault(path, []).append("checkpointed")
    for path, notes in state.notes.items():
        news.setdefault(path, []).extend(f"{key}={value!r}" for key, value in notes.items())
    return news


def _old(state: ScheduleState, model: nn.Module, path: str) -> nn.Module:
    """What stood at a path before it was replaced, which may be a piece of something that was replaced too."""
    around = [outer for outer in state.swaps if outer != path and is_within(path, outer)]
    if not around:
        return model.get_submodule(path)
    outer = max(around, key=len)
    return state.swaps[outer].get_submodule(below(path, outer))


def _by_place(state: ScheduleState, root: str, ways: int) -> dict[str, list[str]]:
    """Regions and replaced operations of a traced part, by the module that all their operations came from."""
    known = {
        joined(root, path) for path, _ in state.traces[root].module.named_modules(remove_duplicate=False)
    }
    forms = [_counted(state.graphs[root, form], root, known) for form in range(ways)]
    news: dict[str, list[str]] = {}
    for place in dict.fromkeys(place for form in forms for place in form):
        told = [_listed(form.get(place, Counter())) for form in forms]
        if all(words == told[0] for words in told):
            news[place] = told[0]
        else:
            news[place] = [f"{word} in call {i}" for i, words in enumerate(told) for word in words]
    return news


def _listed(counts: Counter[str]) -> list[str]:
    return [what if count == 1 else f"{count} {what}" for what, count in counts.items()]


def _counted(part: PartGraph, root: str, known: Set[str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for node in part.gm.graph.nodes:
        if node.op != "call_module":
            continue
        call = call_of(node.meta)
        told = _replaced(part, node) if call is None else _region(part, node, call)
        place = joined(root, path_of(node))
        counts.setdefault(place if place in known else root, Counter())[told] += 1
    return counts


def _replaced(part: PartGraph, node: Node) -> str:
    called = attribute(part.gm, cast("str", node.target))
    return f"calls {called._get_name()}"


def _region(part: PartGraph, node: Node, call: RegionCall) -> str:
    """A region: who runs it, or for whom it was made who does not run it as it is called now."""
    kind, asked = call.identity.kind, part.backends.get(node.name)
    if asked is None:
        return kind
    backends = resolve(asked)
    if any(isinstance(backend, Checkpoint) for backend in backends):
        return f"{kind} checkpointed"
    return (
        f"{kind} by {call.backend}" if call.backend else f"{kind} for {' or '.join(b.name for b in backends)}"
    )


def replay(schedule: Schedule, work: ScheduleSession, steps: Iterable[Mapping[str, Any]]) -> None:
    """Do steps again, all of them or none."""
    state, done, example = work.state, list(work.done), work.example
    try:
        for number, step in enumerate(steps):
            if not isinstance(step, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ScheduleError(f"step {number} of the history is a {type(step).__name__}, not a dict")
            entry = _HistoryEntry(step)
            try:
                entry = _HistoryEntry(cast("dict[str, Any]", restored(dict(step))))
                _again(schedule, work, entry)
            except DovetailError as error:
                raise ScheduleError(
                    f"step {number} ({entry.get('do')}) cannot be replayed: {error}"
                ) from error
    except BaseException:
        work.restore(state, done, example)
        raise


class _HistoryEntry(dict[str, Any]):
    """A step as it was read, which may lack something."""

    def __missing__(self, key: str) -> Any:
        raise ScheduleError(f"the step '{self.get('do', 'to find something')}' does not tell its '{key}'")


def _again(schedule: Schedule, work: ScheduleSession, entry: dict[str, Any]) -> None:
    do = entry.get("do")
    if do == "schedule":
        if work.example is None and entry.get("inputs") is not None:
            device = next((p.device for p in work.model.parameters()), torch.device("cpu"))
            try:
                args, kwargs = made_up(entry["inputs"], device)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ScheduleError(f"it does not tell what the inputs were: {entry['inputs']!r}") from error
            work.example = ModelInputs(args, kwargs)
        return
    if do == "apply":
        work.step(
            lambda _: {"do": "apply", "primitive": entry["primitive"]},
            lambda: [_again(schedule, work, _HistoryEntry(step)) for step in entry.get("steps", [])],
        )
        return
    if "at" in entry:
        items = _targets(work, entry["at"])
        _on_targets(work, entry, items)
        return
    _on_paths(work, entry)


def _targets(work: ScheduleSession, spelled: list[dict[str, Any]]) -> list[Any]:
    """What a step was about, in this model."""
    if not isinstance(spelled, list) or not all(isinstance(at, Mapping) for at in spelled):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"it does not tell what it is about, but {spelled!r}")
    paths = [_HistoryEntry(at)["path"] for at in spelled]
    with work.exchanged() as model:
        for path in dict.fromkeys(paths):
            require_path(model, path)
    work.prospect(work.looked_into(paths))  # one run of the model for all of them
    known: dict[Any, list[PartMatch]] = {}
    matches: list[PartMatch] = []
    for at in map(_HistoryEntry, spelled):
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


def _as_region(work: ScheduleSession, match: PartMatch) -> PartRegion:
    name = match.nodes[0].name
    return work.regions_named(match.root, match.form, {name: match.path})[0]


def _on_targets(work: ScheduleSession, entry: dict[str, Any], items: list[Any]) -> None:
    do = entry["do"]
    if do == "fuse":
        options = {k: entry.get(k) for k in ("kind", "version", "attrs", "escapes")}
        target = items if entry.get("list", True) else items[0]
        part.fuse(work, target, bool(entry.get("together")), _backend(entry.get("backend")), **options)
    elif do == "replace":
        many = entry.get("siblings", len(items))
        for i in range(0, len(items), many):
            replacement_steps.replace_target(
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
        part.decompose(work, items)
    elif do == "annotate":
        part.annotate(work, items, entry["attrs"])
    elif do == "checkpoint":
        part.checkpoint(work, items)
    elif do == "lower":
        part.lower(work, items, _backend(entry["backend"]))
    else:
        raise ScheduleError(f"the step '{do}' is unknown here")


def _on_paths(work: ScheduleSession, entry: dict[str, Any]) -> None:
    do, paths = entry.get("do"), entry.get("paths")
    if not paths:
        raise ScheduleError(f"the step '{do}' is unknown here, or says not where")
    if do == "replace":
        replacement_steps.replace_target(
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
        part.annotate(work, paths, entry["attrs"])
    elif do == "checkpoint":
        part.checkpoint(work, paths)
    else:
        raise ScheduleError(f"the step '{do}' is unknown here")


def _replace_all(work: ScheduleSession, paths: tuple[str, ...], what: Any, entry: dict[str, Any]) -> None:
    replacement_steps.replace_all(
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


Result = TypeVar("Result")


class Schedule(Part):
    """A model and what was done to it. The model itself changes when `build` is called, and not before."""

    def __init__(self, model: nn.Module, example: ModelInputs | None) -> None:
        super().__init__(ScheduleSession(model, example), ("",))

    @property
    def history(self) -> History:
        """What was done, in order; it can be saved, and replayed on another model."""
        work = self._work
        inputs = (
            None if work.example is None else described((tuple(work.example.args), dict(work.example.kwargs)))
        )
        return History([{"do": "schedule", "inputs": inputs}, *work.history] if work.done else [])

    def example(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Schedule:
        """Set the inputs that parts are traced with from now on."""
        self._work.example = _example(args, kwargs)
        return self

    def undo(self, steps: int = 1) -> list[dict[str, Any]]:
        """Take the last steps back and return them."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"undo takes a number of steps, not {steps!r}.")
        if steps > len(self._work.done):
            raise ScheduleError(f"there are {len(self._work.done)} steps, and {steps} are to be undone")
        return self._work.undo(steps)

    def replay(self, history: Iterable[Mapping[str, Any]] | str | Path) -> Schedule:
        """Do the steps of another schedule here, all of them or none; a path or text is loaded first."""
        if not isinstance(history, (Iterable, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"replay takes a history, or the path or text of one, not a {type(history).__name__}."
            )
        steps = History.load(history) if isinstance(history, (str, Path)) else list(history)
        replay(self, self._work, steps)
        return self

    def apply(self, primitive: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a function of the schedule as one step: `primitive(schedule, *args, **kwargs)`."""
        if not callable(primitive):
            raise InvalidArgument(
                f"apply takes a function of the schedule, not a {type(primitive).__name__}."
            )
        label = getattr(primitive, "__qualname__", repr(primitive))
        return self._work.step(
            lambda _: {"do": "apply", "primitive": label},
            lambda: primitive(self, *args, **kwargs),
            is_own=False,
        )

    def build(self) -> nn.Module:
        """The model, run as scheduled: the very modules, of which traced ones have another forward.

        `state_dict`, hooks, parameters and their order are as they were. Steps done later take effect at once;
        `release` gives the model back as it was.
        """
        self._work.installation.put(self._work.state)
        model = self._work.model
        if not model.training:
            settle_parts(
                model, [b for part in self._work.state.graphs.values() for b in part.backends.values()]
            )
        return model

    def release(self) -> nn.Module:
        """The model as it was before it was scheduled."""
        self._work.installation.take()
        return self._work.model

    def verify(self, *, fresh: int = 1, train: bool | None = None) -> VerifyResult:
        """Compare with the model as it was: results, gradients, buffers and random numbers.

        On the example inputs and on `fresh` others like them. Where something differs, VerificationError names the
        first step that made it so.
        """
        return verify(self._work, fresh=fresh, train=train)

    @contextmanager
    def verifying(self, **options: Any) -> Generator[Schedule]:
        """Verify after each step within; a step that fails is not done."""

        def check(doing: Done) -> None:
            verify(self._work, doing=doing, **options)

        self._work.after.append(check)
        try:
            yield self
        finally:
            self._work.after.remove(check)

    def text(self) -> str:
        """The tree of modules with what was done where, and the graphs of traced parts."""
        return tree(self._work, graphs=True)

    def print(self) -> None:
        """Show the tree of modules with what was done where."""
        print(tree(self._work))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ScheduleError(
            "a schedule belongs to its model and is not copied or pickled. Copy the model, built or not, and replay the "
            "history on it: schedule(copy).replay(s.history)"
        )

    def __str__(self) -> str:
        return tree(self._work)

    def __repr__(self) -> str:
        return f"Schedule({type(self._work.model).__name__}, {len(self._work.done)} steps)"


@checked_call()
def schedule(
    model: nn.Module, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Schedule:
    """A schedule of a model: find its parts, fuse or replace them, and leave the rest as it is.

    `args` and `kwargs` are what the model is called with; parts are traced from a run on them when they are first
    looked into. They may be left out until then.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"schedule takes a module, not a {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        refuse_scripted(model)
    if any(is_scheduled(module) for module in model.modules()):
        raise InvalidArgument("the model is built by a schedule; go on with that one, or `release` it first.")
    return Schedule(
        model, None if args is None and kwargs is None else _example(() if args is None else args, kwargs)
    )


def _example(args: Any, kwargs: Any) -> ModelInputs:
    if not isinstance(args, (tuple, list)):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    return ModelInputs(tuple(args), dict(kwargs or {}))
