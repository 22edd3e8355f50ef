"""A schedule as a value: which parts are traced, what was done to them, and which modules are others now."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import ScheduleError
from dovetail.rules.rule import RuleContext
from dovetail.runtime.capture_cache import CaptureCache, Modes
from dovetail.scheduling.call_recording import RecordedCall
from dovetail.scheduling.edits import Edit, Look, PartGraph, ReplaceEdit
from dovetail.scheduling.finders import around, below
from dovetail.scheduling.installed_forward import ReplayedSteps, plain, refuse_hooks


class Scenes:
    """Graphs as finders see them; what was found in one is remembered as long as it is among the last looked at."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._made: dict[GraphModule, RuleContext] = {}

    def __call__(self, gm: GraphModule) -> RuleContext:
        context = self._made.pop(gm, None) or RuleContext(gm)
        self._made[gm] = context
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return context


@dataclass(frozen=True, eq=False)
class Trace:
    """A part that was traced: how it is called, and what was captured for each of those calls."""

    path: str
    module: nn.Module
    calls: tuple[RecordedCall, ...]
    captures: tuple[tuple[Modes, GraphModule], ...]


@dataclass(frozen=True, eq=False)
class ScheduleState:
    """Everything that was done so far; each step makes another one, so that taking a step back is easy."""

    traces: Mapping[str, Trace] = field(default_factory=dict[str, Trace])
    graphs: Mapping[tuple[str, int], PartGraph] = field(default_factory=dict[tuple[str, int], PartGraph])
    edits: tuple[Edit, ...] = ()
    swaps: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    checkpoints: frozenset[str] = frozenset()
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def root_of(self, path: str) -> str | None:
        """The traced part that a path lies in."""
        return next((outer for outer in around(path) if outer in self.traces), None)

    def edited(self, edit: Edit, look: Look) -> tuple[ScheduleState, list[str]]:
        """The state after an edit, and the names of the regions it made."""
        root = self.root_of(edit.root)
        assert root is not None
        place = (root, edit.form)
        part, names = edit.apply(self.graphs[place], root, look)
        return replace(self, graphs={**self.graphs, place: part}, edits=(*self.edits, edit)), names

    def traced(self, traces: Iterable[Trace], look: Look, model: nn.Module) -> ScheduleState:
        """The state with more parts traced, none within another; steps on parts within them are done again there."""
        new = {trace.path: trace for trace in traces}
        inner = {path: outer for path in self.traces if (outer := _among(path, new)) is not None}
        for path, outer in inner.items():
            if len(self.traces[path].calls) > 1 or len(new[outer].calls) > 1:
                raise ScheduleError(
                    f"'{path}' within '{outer or 'the model'}' was traced on its own and is called in several ways; "
                    f"undo its steps to trace what is around it"
                )
        self._refuse_shared(new, inner, model)
        state = replace(
            self,
            traces={**{p: t for p, t in self.traces.items() if p not in inner}, **new},
            graphs={
                **{place: part for place, part in self.graphs.items() if place[0] not in inner},
                **{(p, i): PartGraph(gm) for p, t in new.items() for i, (_, gm) in enumerate(t.captures)},
            },
            edits=tuple(e for e in self.edits if _among(e.root, new) is None),
        )
        for edit in self.edits:
            outer = _among(edit.root, new)
            if outer is not None:
                try:
                    state, _ = state.edited(edit, look)
                except ScheduleError as error:
                    raise ScheduleError(
                        f"'{outer or 'the model'}' cannot be traced as a whole: a step on '{edit.root}' "
                        f"cannot be done there: {error}"
                    ) from error
        return state

    def _refuse_shared(self, new: Mapping[str, Trace], inner: Mapping[str, str], model: nn.Module) -> None:
        """Raise where a module that was traced has a name at which its steps would be lost.

        Those of a part within one that is traced now are done again in that one, under that name only.
        """
        known = {trace.module: path for path, trace in self.traces.items()}
        places = dict(model.named_modules(remove_duplicate=False)) if known else {}
        for place, module in places.items():
            path = known.get(module, place)
            outer = inner[path] if path in inner else _among(place, new)
            if path == place or outer is None:
                continue
            # A part that has several names itself runs what was traced under all of them.
            tail = below(path, outer) if path in inner else None
            if any(places[at] is new[outer].module and below(place, at) == tail for at in around(place)):
                continue
            raise ScheduleError(
                f"'{place}' is the module that was traced as '{path}'; with '{outer or 'the model'}' traced as a whole "
                f"its steps would be lost there. Undo them first"
            )

    def steps(self, root: str) -> ReplayedSteps:
        """What does the steps of a traced part on another capture of it."""
        edits = self._by_root.get(root, ())
        return ReplayedSteps(
            Redo(tuple(edits), root), replaces=any(isinstance(e, ReplaceEdit) for e in edits)
        )

    @cached_property
    def _by_root(self) -> dict[str, list[Edit]]:
        found: dict[str, list[Edit]] = {}
        for edit in self.edits:
            root = self.root_of(edit.root)
            if root is not None:
                found.setdefault(root, []).append(edit)
        return found

    def programs(self, root: str) -> list[tuple[Modes, GraphModule]]:
        """The graphs of a traced part as they are now, with the modes they are for."""
        trace = self.traces[root]
        return [(modes, self.graphs[root, i].gm) for i, (modes, _) in enumerate(trace.captures)]


def _among(path: str, known: Container[str]) -> str | None:
    """The outermost of some paths that a path lies in."""
    return next((outer for outer in reversed(around(path)) if outer in known), None)


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


def trace_part(path: str, module: nn.Module, calls: Iterable[RecordedCall]) -> Trace:
    """Capture a part for each way it is called."""
    refuse_hooks(path, module)
    listed = tuple(calls)
    forms = CaptureCache(plain(module), ReplayedSteps(lambda gm: gm), cuda_graphs=False)
    captures = tuple(forms.captured(call.example.args, call.example.kwargs) for call in listed)
    return Trace(path, module, listed, captures)
