"""A schedule as a value: which parts are traced, what was done to them, and which modules are others now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import ScheduleError
from dovetail.lowering.forms import Forms, Modes
from dovetail.scheduling.edits import Edit, Look, PartGraph
from dovetail.scheduling.paths import is_within
from dovetail.scheduling.recording import Call
from dovetail.scheduling.running import Steps, plain
from dovetail.scheduling.scenes import Scenes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class Trace:
    """A part that was traced: how it is called, and what was captured for each of those calls."""

    path: str
    module: nn.Module
    calls: tuple[Call, ...]
    captures: tuple[tuple[Modes, GraphModule], ...]


@dataclass(frozen=True, eq=False)
class State:
    """Everything that was done so far; each step makes another one, so that taking a step back is easy."""

    traces: Mapping[str, Trace] = field(default_factory=dict[str, Trace])
    graphs: Mapping[tuple[str, int], PartGraph] = field(default_factory=dict[tuple[str, int], PartGraph])
    edits: tuple[Edit, ...] = ()
    swaps: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    checkpoints: frozenset[str] = frozenset()
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def root_of(self, path: str) -> str | None:
        """The traced part that a path lies in."""
        return next((root for root in self.traces if is_within(path, root)), None)

    def edited(self, edit: Edit, look: Look) -> tuple[State, list[str]]:
        """The state after an edit, and the names of the regions it made."""
        root = self.root_of(edit.root)
        assert root is not None
        place = (root, edit.form)
        part, names = edit.apply(self.graphs[place], root, look)
        return replace(self, graphs={**self.graphs, place: part}, edits=(*self.edits, edit)), names

    def traced(self, trace: Trace, look: Look) -> State:
        """The state with one more part traced; steps that were done on parts within it are done again there."""
        inner = [path for path in self.traces if is_within(path, trace.path)]
        if any(len(self.traces[path].calls) > 1 for path in inner) or (inner and len(trace.calls) > 1):
            raise ScheduleError(
                f"'{inner[0]}' within '{trace.path}' was traced on its own and is called in several ways; "
                f"undo its steps to trace what is around it"
            )
        gone = set(inner)
        state = replace(
            self,
            traces={**{p: t for p, t in self.traces.items() if p not in gone}, trace.path: trace},
            graphs={
                **{place: part for place, part in self.graphs.items() if place[0] not in gone},
                **{(trace.path, i): PartGraph(gm) for i, (_, gm) in enumerate(trace.captures)},
            },
            edits=tuple(e for e in self.edits if not is_within(e.root, trace.path)),
        )
        for edit in self.edits:
            if is_within(edit.root, trace.path):
                try:
                    state, _ = state.edited(edit, look)
                except ScheduleError as error:
                    raise ScheduleError(
                        f"'{trace.path or 'the model'}' cannot be traced as a whole: a step on '{edit.root}' "
                        f"cannot be done there: {error}"
                    ) from error
        return state

    def redo(self, root: str) -> Callable[[GraphModule], GraphModule]:
        """What does the steps of a traced part on another capture of it."""
        return Redo(tuple(e for e in self.edits if is_within(e.root, root)), root)

    def programs(self, root: str) -> list[tuple[Modes, GraphModule]]:
        """The graphs of a traced part as they are now, with the modes they are for."""
        trace = self.traces[root]
        return [(modes, self.graphs[root, i].gm) for i, (modes, _) in enumerate(trace.captures)]


@dataclass(frozen=True, eq=False)
class Redo:
    """The steps that were made for the first way of calling, to be done on a capture for another."""

    edits: tuple[Edit, ...]
    root: str

    def __call__(self, gm: GraphModule) -> GraphModule:
        look = Scenes()
        part = PartGraph(gm)
        for edit in self.edits:
            if edit.form == 0:
                part = edit.again(part, self.root, look)
        return part.gm

    def __deepcopy__(self, memo: dict[int, Any]) -> Redo:
        return Redo(tuple(edit.copied(memo) for edit in self.edits), self.root)


def trace_part(path: str, module: nn.Module, calls: Iterable[Call]) -> Trace:
    """Capture a part for each way it is called."""
    refuse_hooks(path, module)
    listed = tuple(calls)
    forms = Forms(plain(module), Steps(lambda gm: gm), cuda_graphs=False)
    captures = tuple(forms.captured(call.example.args, call.example.kwargs) for call in listed)
    return Trace(path, module, listed, captures)


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise where a hook would become part of the graph, or be lost: hooks on modules inside of a part."""
    for name, inner in module.named_modules():
        if inner is module:
            continue
        for kind in _HOOKS:
            if inner.__dict__.get(kind):
                what = kind.strip("_").removesuffix("s").replace("_", " ")
                raise ScheduleError(
                    f"module '{name}' within '{path or 'the model'}' has a {what}; tracing would bake it into the graph. "
                    f"Remove it, or schedule smaller parts that do not hold the module"
                )
