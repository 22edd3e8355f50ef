"""The state of a schedule as an immutable value: traced parts, edits, replaced modules, checkpoints and notes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import ScheduleError
from dovetail.rules.rule import RuleContext
from dovetail.runtime.capture_entry import GuardKey
from dovetail.scheduling.call_recording import RecordedCall
from dovetail.scheduling.edits import ContextProvider, Edit, PartGraph
from dovetail.scheduling.finders import enclosing_paths, relative_path


class ContextCache:
    """Rule contexts of the graphs used last, which cache the matches in them."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._contexts: dict[GraphModule, RuleContext] = {}

    def __call__(self, gm: GraphModule) -> RuleContext:
        context = self._contexts.pop(gm, None) or RuleContext(gm)
        self._contexts[gm] = context
        while len(self._contexts) > self._most:
            del self._contexts[next(iter(self._contexts))]
        return context


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced part: its recorded calls, and the capture for each."""

    path: str
    module: nn.Module
    calls: tuple[RecordedCall, ...]
    captures: tuple[tuple[GuardKey, GraphModule], ...]


@dataclass(frozen=True, eq=False)
class ScheduleState:
    """The result of all steps so far; each step creates another state, and undo returns to an earlier one."""

    traces: Mapping[str, Trace] = field(default_factory=dict[str, Trace])
    graphs: Mapping[tuple[str, int], PartGraph] = field(default_factory=dict[tuple[str, int], PartGraph])
    edits: tuple[Edit, ...] = ()
    swaps: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    checkpoints: frozenset[str] = frozenset()
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def root_of(self, path: str) -> str | None:
        """Return the traced part that a path is in; None without one."""
        return next((outer for outer in enclosing_paths(path) if outer in self.traces), None)

    def with_edit(self, edit: Edit, contexts: ContextProvider) -> tuple[ScheduleState, list[str]]:
        """Return the state after an edit, and the names of the regions it created."""
        root = self.root_of(edit.root)
        assert root is not None
        place = (root, edit.form)
        part, names = edit.apply(self.graphs[place], root, contexts)
        return replace(self, graphs={**self.graphs, place: part}, edits=(*self.edits, edit)), names

    def with_traces(
        self, traces: Iterable[Trace], contexts: ContextProvider, model: nn.Module
    ) -> ScheduleState:
        """Return the state with more parts traced, none within another; edits of parts within them are applied there."""
        new = {trace.path: trace for trace in traces}
        inner = {path: outer for path in self.traces if (outer := _outermost_in(path, new)) is not None}
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
            edits=tuple(e for e in self.edits if _outermost_in(e.root, new) is None),
        )
        for edit in self.edits:
            outer = _outermost_in(edit.root, new)
            if outer is not None:
                try:
                    state, _ = state.with_edit(edit, contexts)
                except ScheduleError as error:
                    raise ScheduleError(
                        f"'{outer or 'the model'}' cannot be traced as a whole: a step on '{edit.root}' "
                        f"cannot be done there: {error}"
                    ) from error
        return state

    def _refuse_shared(self, new: Mapping[str, Trace], inner: Mapping[str, str], model: nn.Module) -> None:
        """Raise where a traced module has another path at which its steps would be lost.

        Steps of a part within a newly traced one are applied there under one path only.
        """
        traced = {trace.module: path for path, trace in self.traces.items()}
        places = dict(model.named_modules(remove_duplicate=False)) if traced else {}
        for place, module in places.items():
            path = traced.get(module, place)
            outer = inner[path] if path in inner else _outermost_in(place, new)
            if path == place or outer is None:
                continue
            # A part with more than one path runs its trace under all of them.
            tail = relative_path(path, outer) if path in inner else None
            if any(
                places[at] is new[outer].module and relative_path(place, at) == tail
                for at in enclosing_paths(place)
            ):
                continue
            raise ScheduleError(
                f"'{place}' is the module that was traced as '{path}'; with '{outer or 'the model'}' traced as a whole "
                f"its steps would be lost there. Undo them first"
            )

    @cached_property
    def edits_by_root(self) -> Mapping[str | None, Sequence[Edit]]:
        """The edits in order, by the path of the traced part that they are in."""
        by_root: dict[str | None, list[Edit]] = {}
        for edit in self.edits:
            by_root.setdefault(self.root_of(edit.root), []).append(edit)
        return by_root

    def programs(self, root: str) -> list[tuple[GuardKey, GraphModule]]:
        """Return the present graphs of a traced part with the guard keys of their captures."""
        trace = self.traces[root]
        return [(modes, self.graphs[root, i].gm) for i, (modes, _) in enumerate(trace.captures)]


def _outermost_in(path: str, known: Container[str]) -> str | None:
    """Return the outermost of some paths that a path is within."""
    return next((outer for outer in reversed(enclosing_paths(path)) if outer in known), None)
