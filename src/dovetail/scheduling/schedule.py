"""The public `Schedule`: building, undo, replay of histories, verification, and the printed tree of modules."""

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
from torch.fx import GraphModule, Node

from dovetail.errors import DovetailError, InvalidArgument, ScheduleError, checked_call
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.ir.graph_module import GraphParts, attribute
from dovetail.ir.html_repr import html_box, html_text
from dovetail.ir.module_paths import is_within, path_of
from dovetail.ir.printer import text
from dovetail.lowering.backend_protocol import resolve
from dovetail.lowering.lower import settle_parts
from dovetail.outlining.region import RegionCall, call_of
from dovetail.scheduling.call_recording import ModelInputs, example_inputs
from dovetail.scheduling.edits import Checkpoint, PartGraph
from dovetail.scheduling.finders import (
    PartMatch,
    enclosing_paths,
    join_path,
    relative_path,
    require_path,
)
from dovetail.scheduling.history import (
    History,
    describe_inputs,
    finder_from_entry,
    from_json,
    inputs_from_description,
)
from dovetail.scheduling.install import is_scheduled
from dovetail.scheduling.part import Part, annotate
from dovetail.scheduling.resolve import body_keys, group_by_graph
from dovetail.scheduling.session import CompletedStep, ScheduleSession
from dovetail.scheduling.state import ScheduleState
from dovetail.scheduling.verify_schedule import VerifyResult, verify


def module_tree(session: ScheduleSession, *, graphs: bool = False) -> str:
    """Return the tree of modules with what was done to them, equal neighbours on one line.

    Within a traced part, whose graph runs instead, only modules with notes have a line. With `graphs` the graphs of
    traced parts follow.
    """
    with session.installation.temporarily(None) as model:
        notes = _notes_by_path(session.state, model)
    with session.with_replacements() as model:
        lines = _lines(_Tree(session.state, notes), model, "", type(model).__name__)
    if graphs:
        for (root, form), part in session.state.graphs.items():
            lines += ["", f"{root or 'the model'}, call {form}:", text(part.gm)]
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Tree:
    state: ScheduleState
    notes: Mapping[str, list[str]]

    def is_shown(self, path: str) -> bool:
        """Return whether a module has a line: within a traced part only with a note on it or on a module in it."""
        root = self.state.root_of(path)
        return root in (None, path) or path in self.described

    @cached_property
    def described(self) -> set[str]:
        return {outer for path in self.notes for outer in enclosing_paths(path)}


def _lines(tree: _Tree, module: nn.Module, path: str, label: str) -> list[str]:
    """Return the lines of a module and its submodules, the first without its name."""
    notes = tree.notes.get(path)
    lines = [f"{label}  <- {', '.join(notes)}" if notes else label]
    children: list[tuple[str, list[str]]] = []
    for name, child in module._modules.items():
        inner = join_path(path, name)
        if child is not None and child is not module and tree.is_shown(inner):
            children.append((name, _lines(tree, child, inner, child._get_name())))
    for _, alike in groupby(children, key=lambda c: c[1]):
        folded = list(alike)
        first, *rest = folded[0][1]
        lines.append(f"  {_names([name for name, _ in folded])}: {first}")
        lines += [f"  {line}" for line in rest]
    return lines


def _names(names: list[str]) -> str:
    """Join the names of neighbours, consecutive numbers as a range."""
    if len(names) > 2 and all(name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{names[0]}-{names[-1]}"
    return ", ".join(names)


def _notes_by_path(state: ScheduleState, model: nn.Module) -> dict[str, list[str]]:
    """Return what was done by the path of the module; `model` is the original one."""
    notes: dict[str, list[str]] = {}
    for path in state.swaps:
        notes.setdefault(path, []).append(f"in place of {_module_before(state, model, path)._get_name()}")
    for path, trace in state.traces.items():
        count = len(trace.calls)
        notes.setdefault(path, []).append("traced" if count == 1 else f"traced, {count} ways of calling")
        for owner, lines in _graph_notes(state, path, count).items():
            notes.setdefault(owner, []).extend(lines)
    for path in sorted(state.checkpoints):
        notes.setdefault(path, []).append("checkpointed")
    for path, attrs in state.notes.items():
        notes.setdefault(path, []).extend(f"{key}={value!r}" for key, value in attrs.items())
    return notes


def _module_before(state: ScheduleState, model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path before it was replaced, which may be within another replacement."""
    around = [outer for outer in state.swaps if outer != path and is_within(path, outer)]
    if not around:
        return model.get_submodule(path)
    outer = max(around, key=len)
    return state.swaps[outer].get_submodule(relative_path(path, outer))


def _graph_notes(state: ScheduleState, root: str, count: int) -> dict[str, list[str]]:
    """Return notes on the regions and replaced operations of a traced part by the module they came from."""
    paths = {
        join_path(root, path) for path, _ in state.traces[root].module.named_modules(remove_duplicate=False)
    }
    forms = [_count_by_module(state.graphs[root, form], root, paths) for form in range(count)]
    notes: dict[str, list[str]] = {}
    for owner in dict.fromkeys(owner for form in forms for owner in form):
        lines = [
            [what if n == 1 else f"{n} {what}" for what, n in form.get(owner, Counter[str]()).items()]
            for form in forms
        ]
        if all(words == lines[0] for words in lines):
            notes[owner] = lines[0]
        else:
            notes[owner] = [f"{word} in call {i}" for i, words in enumerate(lines) for word in words]
    return notes


def _count_by_module(part: PartGraph, root: str, paths: Set[str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for node in part.gm.graph.nodes:
        if node.op != "call_module":
            continue
        call, called = call_of(node.meta), attribute(part.gm, cast("str", node.target))
        note = f"calls {called._get_name()}" if call is None else _region_note(part, node, call)
        owner = join_path(root, path_of(node.meta))
        counts.setdefault(owner if owner in paths else root, Counter())[note] += 1
    return counts


def _region_note(part: PartGraph, node: Node, call: RegionCall) -> str:
    """Describe a region: its backend, or the requested ones if none of them runs it in the present mode."""
    kind, requested = call.identity.kind, part.backends.get(node.name)
    if requested is None:
        return kind
    backends = resolve(requested)
    if any(isinstance(backend, Checkpoint) for backend in backends):
        return f"{kind} checkpointed"
    return (
        f"{kind} by {call.backend}" if call.backend else f"{kind} for {' or '.join(b.name for b in backends)}"
    )


def replay(schedule: Schedule, session: ScheduleSession, steps: Iterable[Mapping[str, Any]]) -> None:
    """Do steps again, all or none."""
    state, done, example = session.state, list(session.completed), session.example
    try:
        for number, step in enumerate(steps):
            if not isinstance(step, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ScheduleError(f"step {number} of the history is a {type(step).__name__}, not a dict")
            entry = _HistoryEntry(step)
            try:
                entry = _HistoryEntry(cast("dict[str, Any]", from_json(dict(step))))
                _replay_entry(schedule, session, entry)
            except DovetailError as error:
                raise ScheduleError(
                    f"step {number} ({entry.get('do')}) cannot be replayed: {error}"
                ) from error
    except BaseException:
        session.restore(state, done, example)
        raise


class _HistoryEntry(dict[str, Any]):
    """An entry of a history that was read, which may lack keys."""

    def __missing__(self, key: str) -> Any:
        raise ScheduleError(f"the step '{self.get('do', 'to find something')}' has no '{key}'")


def _replay_entry(schedule: Schedule, session: ScheduleSession, entry: dict[str, Any]) -> None:
    do = entry.get("do")
    if do == "schedule":
        if session.example is None and entry.get("inputs") is not None:
            device = next((p.device for p in session.model.parameters()), torch.device("cpu"))
            try:
                args, kwargs = inputs_from_description(entry["inputs"], device)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ScheduleError(f"its inputs cannot be read: {entry['inputs']!r}") from error
            session.example = ModelInputs(args, kwargs)
        return
    if do == "apply":
        session.step(
            lambda _: {"do": "apply", "primitive": entry["primitive"]},
            lambda: [
                _replay_entry(schedule, session, _HistoryEntry(step)) for step in entry.get("steps", [])
            ],
        )
        return
    _replay_step(schedule, session, entry)


def _targets(session: ScheduleSession, entries: list[dict[str, Any]]) -> list[Any]:
    """Return the targets of a step in this model."""
    if not isinstance(entries, list) or not all(isinstance(at, Mapping) for at in entries):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"its targets cannot be read: {entries!r}")
    paths = [_HistoryEntry(at)["path"] for at in entries]
    with session.with_replacements() as model:
        for path in dict.fromkeys(paths):
            require_path(model, path)
    session.traced_state(session.search_roots(paths))  # one run of the model for all of them
    cache: dict[Any, list[PartMatch]] = {}
    matches: list[PartMatch] = []
    for at in map(_HistoryEntry, entries):
        finder = finder_from_entry(at["find"])
        lookup = (at["path"], finder.identity)
        if lookup not in cache:
            cache[lookup] = session.find([at["path"]], finder)
        matched = [m for m in cache[lookup] if m.form == at.get("form", 0)]
        if not isinstance(at["occurrence"], int) or at["occurrence"] >= len(matched):
            raise ScheduleError(
                f"'{at['path'] or 'the model'}' has {len(matched)} matches of {finder.name}, and the step needs number {at['occurrence']}"
            )
        matches.append(matched[at["occurrence"]])
    groups = group_by_graph(session, matches, "replay")
    order = [number for group in groups for number in group.indices]
    for number, key in zip(order, body_keys(session, groups), strict=True):
        at = entries[number]
        if at.get("key") not in (None, key):
            raise ScheduleError(
                f"match {at['occurrence']} of {matches[number].rule} in '{at['path'] or 'the model'}' computes something "
                f"else than in the model that the history is of (its body is {key[:12]}, not {str(at['key'])[:12]})"
            )
    return [
        session.regions_named(match.root, match.form, {match.nodes[0].name: match.path})[0]
        if "region" in at["find"]
        else match
        for at, match in zip(entries, matches, strict=True)
    ]


def _replay_step(schedule: Schedule, session: ScheduleSession, entry: dict[str, Any]) -> None:
    """Do one step of the history on its targets in this model: matches and regions, or the modules at some paths."""
    do, by_path = _HistoryEntry(entry)["do"], "at" not in entry
    if by_path and (not entry.get("paths") or do in ("fuse", "decompose", "lower")):
        raise ScheduleError(f"the step '{do}' is unknown here, or has no paths")
    target = entry["paths"] if by_path else _targets(session, entry["at"])
    replace_options: dict[str, Any] = {name: entry.get(name) for name in ("params", "concrete_args")}
    if do == "fuse":
        options: dict[str, Any] = {k: entry.get(k) for k in ("kind", "version", "attrs", "escapes")}
        options |= {"backends": () if entry.get("backend") is None else _backend(entry["backend"])}
        matches = target if entry.get("list", True) else target[0]
        schedule.fuse(matches, together=bool(entry.get("together")), **options)
    elif do == "replace":
        many = len(target) if by_path else entry.get("siblings", len(target))
        for i in range(0, len(target), many):
            siblings = target[i : i + many]
            schedule.replace(entry["new"], siblings, name=entry.get("name"), **replace_options)
    elif do == "replace_all":
        part = Part(session, tuple(target)) if by_path else schedule
        what = entry["class"] if by_path else cast("Any", target)
        part.replace_all(what, entry["factory"], **replace_options)
    elif do == "decompose":
        schedule.decompose(target)
    elif do == "annotate":
        annotate(session, target, entry["attrs"])
    elif do == "checkpoint":
        schedule.checkpoint(target)
    elif do == "lower":
        if entry["backend"] is None:
            raise ScheduleError("the step 'lower' names no backend")
        schedule.lower(target, _backend(entry["backend"]))
    else:
        raise ScheduleError(f"the step '{do}' is unknown here")


def _backend(value: Any) -> Any:
    return value() if isinstance(value, type) else value


Result = TypeVar("Result")


class Schedule(Part, GraphParts):
    """A model and the steps done to it. The model itself changes only when `build` is called."""

    def __init__(self, model: nn.Module, example: ModelInputs | None) -> None:
        super().__init__(ScheduleSession(model, example), ("",))

    @property
    def history(self) -> History:
        """The steps in order, which can be saved, and replayed on another model."""
        session, example = self._session, self._session.example
        inputs = None if example is None else describe_inputs((tuple(example.args), dict(example.kwargs)))
        return History([{"do": "schedule", "inputs": inputs}, *session.history] if session.completed else [])

    @property
    def part_graphs(self) -> tuple[tuple[str, GraphModule], ...]:
        """The present graph of each traced part, one for each way it is called, by the path of the part."""
        return tuple((root, part.gm) for (root, _), part in self._session.state.graphs.items())

    def example(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Schedule:
        """Set the inputs that parts are traced with from now on."""
        if args is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise InvalidArgument("args must be a tuple of example inputs, not a NoneType.")
        self._session.example = example_inputs(args, kwargs)
        return self

    def undo(self, steps: int = 1) -> list[dict[str, Any]]:
        """Undo the last steps and return them."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"undo takes a number of steps, not {steps!r}.")
        if steps > len(self._session.completed):
            raise ScheduleError(f"cannot undo {steps} steps: there are {len(self._session.completed)}")
        return self._session.undo(steps)

    def replay(self, history: Iterable[Mapping[str, Any]] | str | Path) -> Schedule:
        """Do the steps of another schedule here, all of them or none; a path or text is loaded first."""
        if not isinstance(history, (Iterable, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"replay takes a history, or the path or text of one, not a {type(history).__name__}."
            )
        steps = History.load(history) if isinstance(history, (str, Path)) else list(history)
        replay(self, self._session, steps)
        return self

    def apply(self, primitive: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a function of the schedule as one step: `primitive(schedule, *args, **kwargs)`."""
        if not callable(primitive):
            raise InvalidArgument(
                f"apply takes a function of the schedule, not a {type(primitive).__name__}."
            )
        label = getattr(primitive, "__qualname__", repr(primitive))
        return self._session.step(
            lambda _: {"do": "apply", "primitive": label},
            lambda: primitive(self, *args, **kwargs),
            is_own=False,
        )

    def build(self) -> nn.Module:
        """Make the model run as scheduled and return it: traced modules get another forward.

        `state_dict`, hooks, parameters and their order stay the same. Later steps take effect at once; `release`
        restores the original model.
        """
        self._session.installation.install(self._session.state)
        model = self._session.model
        if not model.training:
            settle_parts(
                model, [b for part in self._session.state.graphs.values() for b in part.backends.values()]
            )
        return model

    def release(self) -> nn.Module:
        """Restore the original model and return it."""
        self._session.installation.uninstall()
        return self._session.model

    def verify(self, *, fresh: int = 1, train: bool | None = None) -> VerifyResult:
        """Compare with the original model: results, gradients, buffers and random numbers.

        The example inputs and `fresh` others like them are run. VerificationError names a step that changed a value.
        """
        return verify(self._session, fresh=fresh, train=train)

    @contextmanager
    def verifying(self, **options: Any) -> Generator[Schedule]:
        """Verify after each step within; a step that fails is undone."""

        def check(doing: CompletedStep) -> None:
            verify(self._session, doing=doing, **options)

        self._session.step_checks.append(check)
        try:
            yield self
        finally:
            self._session.step_checks.remove(check)

    def text(self) -> str:
        """Return the tree of modules with what was done where, and the graphs of traced parts."""
        return module_tree(self._session, graphs=True)

    def print(self) -> None:
        """Print the tree of modules with what was done where."""
        print(module_tree(self._session))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ScheduleError(
            "a schedule belongs to its model and is not copied or pickled. Copy the model, built or not, and replay the "
            "history on it: schedule(copy).replay(s.history)"
        )

    def __str__(self) -> str:
        return module_tree(self._session)

    def _repr_html_(self) -> str:
        return html_box("schedule", html_text(str(self)))

    def __repr__(self) -> str:
        return f"Schedule({type(self._session.model).__name__}, {len(self._session.completed)} steps)"


@checked_call()
def schedule(
    model: nn.Module, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Schedule:
    """Return a schedule of a model, to find, fuse or replace its parts and leave the rest as it is.

    `args` and `kwargs` are example inputs of the model; parts are traced from a run on them when they are first
    searched. They may be left out until then.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"schedule takes a module, not a {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        refuse_scripted(model)
    if any(is_scheduled(module) for module in model.modules()):
        raise InvalidArgument("the model is built by a schedule; go on with that one, or `release` it first.")
    return Schedule(model, example_inputs(args, kwargs))
