"""The session of a schedule: the model, its state, tracing of parts on demand, and steps as transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.frontend.capture import outside_inference_mode
from dovetail.ir.module_paths import frames_of, is_within
from dovetail.outlining.region import Region, call_of, regions, walk
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.scheduling.call_recording import ModelInputs, RecordedCall, record_calls
from dovetail.scheduling.edits import Edit
from dovetail.scheduling.finders import (
    Finder,
    Matches,
    PartMatch,
    PartRegion,
    enclosing_paths,
    is_from,
    join_path,
    outermost_paths,
    relative_path,
)
from dovetail.scheduling.history import History
from dovetail.scheduling.install import Installation, ReplayedSteps, has_forward, refuse_hooks, unwrapped
from dovetail.scheduling.state import ContextCache, ScheduleState, Trace

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class CompletedStep:
    """A step that was done: its entry in the history, and the state before it."""

    entry: dict[str, Any]
    before: ScheduleState


class ScheduleSession:
    def __init__(self, model: nn.Module, example: ModelInputs | None) -> None:
        self.model, self.example = model, example
        self.state = ScheduleState()
        self.completed: list[CompletedStep] = []
        self.contexts = ContextCache()
        self.installation = Installation(model)
        self.step_checks: list[Callable[[CompletedStep], None]] = []
        self.origin = object()
        self._inner: list[dict[str, Any]] | None = None
        self._traces: dict[str, tuple[Any, Trace]] = {}
        self._traced_state: tuple[ScheduleState, list[str], ScheduleState] = (self.state, [], self.state)

    @property
    def history(self) -> History:
        return History(done.entry for done in self.completed)

    def with_replacements(self) -> AbstractContextManager[nn.Module]:
        """Put the replaced modules into the model, which runs its own forwards."""
        return self.installation.temporarily(self.state, forwards=False)

    def module_at(self, path: str) -> nn.Module:
        """Return the module at a path: a replacement, a module within one, or the model's own."""
        outer = next((p for p in enclosing_paths(path) if p in self.state.swaps), None)
        if outer is None:
            return self.model.get_submodule(path)
        return self.state.swaps[outer].get_submodule(relative_path(path, outer))

    def require_example(self) -> ModelInputs:
        if self.example is None:
            raise InvalidArgument(
                "tracing needs example inputs: schedule(model, args, kwargs), or set them with `example(...)`."
            )
        return self.example

    def step(
        self, entry: Callable[[Result], dict[str, Any]], action: Callable[[], Result], *, is_own: bool = True
    ) -> Result:
        """Run a step as a transaction; a step within another is part of that one.

        `is_own` is false for a function of the user, which sees the model as it was built.
        """
        before, outer = self.state, self._inner
        self._inner = []
        try:
            # Once for the step: each access to modules would suspend it again.
            with outside_inference_mode(), self.installation.suspended() if is_own else nullcontext():
                result = action()
            record = entry(result)
            if self._inner:
                record = {**record, "steps": self._inner}
            if outer is None:
                for check in self.step_checks:
                    check(CompletedStep(record, before))
        except BaseException:
            self.state, self._inner = before, outer
            if self.installation.state is not before:
                self._reinstall()
            raise
        self._inner = outer
        if outer is not None:
            outer.append(record)
        else:
            self.completed.append(CompletedStep(record, before))
        self._reinstall()
        return result

    def undo(self, count: int) -> list[dict[str, Any]]:
        if self._inner is not None:
            raise ScheduleError("a step that is being done cannot undo others; raise, and none of it is done")
        undone = self.completed[len(self.completed) - count :]
        self.state = undone[0].before
        del self.completed[len(self.completed) - count :]
        self._reinstall()
        return [done.entry for done in undone]

    def restore(self, state: ScheduleState, done: list[CompletedStep], example: ModelInputs | None) -> None:
        """Return to an earlier state."""
        self.state, self.completed, self.example = state, done, example
        self._reinstall()

    def _reinstall(self) -> None:
        if self.installation.state is not None and self._inner is None:
            self.installation.install(self.state)

    def edit(self, edit: Edit) -> list[str]:
        self.state, names = self.state.with_edit(edit, self.contexts)
        return names

    def record(self, paths: Iterable[str]) -> dict[str, list[RecordedCall]]:
        """Return the calls of some parts in one run of the model in its present state."""
        example = self.require_example()
        with outside_inference_mode(), self.installation.temporarily(self.state) as model:
            return record_calls(model, paths, example)

    def traced_state(self, paths: Iterable[str]) -> ScheduleState:
        """Return the state with further parts traced; the schedule itself stays as it is."""
        missing = outermost_paths(path for path in paths if self.state.root_of(path) is None)
        if not missing:
            return self.state
        stale = self._stale(missing)
        base, paths_traced, traced = self._traced_state
        if base is self.state and paths_traced == missing and not stale:
            return traced
        if stale:
            self._capture(stale)
        with self.with_replacements() as model:
            state = self.state.with_traces([self._traces[path][1] for path in missing], self.contexts, model)
        self._traced_state = (self.state, missing, state)
        return state

    def adopt(self, items: Sequence[Any]) -> None:
        """Make the parts that matches are in traced parts of the schedule."""
        roots = [item.root for item in items if isinstance(item, (PartMatch, PartRegion))]
        for item in items:
            if isinstance(item, (PartMatch, PartRegion)) and item.origin is not self.origin:
                raise InvalidArgument(f"{item!r} is of another schedule; find it in this one.")
        self.state = self.traced_state(roots)

    def _stale(self, paths: Iterable[str]) -> list[str]:
        """Return the parts without a trace of their present modules, modes and example inputs."""
        stale: list[str] = []
        with self.with_replacements() as model:
            for path in paths:
                module = model.get_submodule(path)
                self._refuse_untraceable(path, module)
                refuse_hooks(path, module)
                if path not in self._traces or self._trace_key(module) != self._traces[path][0]:
                    stale.append(path)
        return stale

    def _trace_key(self, module: nn.Module) -> Any:
        return list(module.modules()), self.example, _capture_cache(module).guard_key()

    def _capture(self, paths: list[str]) -> None:
        """Trace parts from one run of the model."""
        calls = self.record(paths)
        with self.with_replacements() as model:
            for path in paths:
                module = model.get_submodule(path)
                refuse_hooks(path, module)
                cache = _capture_cache(module)
                captures = [cache.capture(call.example.args, call.example.kwargs) for call in calls[path]]
                trace = Trace(path, module, tuple(calls[path]), tuple(captures))
                self._traces[path] = (self._trace_key(module), trace)

    def _refuse_untraceable(self, path: str, module: nn.Module) -> None:
        import torch

        for inside, child in module.named_modules():
            if isinstance(child, torch.jit.ScriptModule):
                where = _quoted(join_path(path, inside) if inside else path)
                raise ScheduleError(
                    f"{where} is a TorchScript module, which cannot be traced. Take the parts beside it, or put the Python "
                    f"module that it was scripted from in its place"
                )
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise ScheduleError(
                f"{_quoted(path)} is compiled by torch.compile. Schedule the module in it, and compile what `build` gives"
            )
        inside = [c for c in self.state.checkpoints if is_within(c, path)]
        if inside:
            raise ScheduleError(
                f"{_quoted(path)} cannot be traced: '{inside[0]}' is checkpointed as a module, which tracing would "
                f"lose. Checkpoint regions of the traced part instead"
            )
        if not has_forward(module):
            raise ScheduleError(
                f"{_quoted(path)} is a {type(module).__name__} and has no forward of its own; take the modules in it: "
                f"'{join_path(path, '*')}'"
            )

    def find(self, paths: Iterable[str], finder: Finder) -> Matches:
        roots = self.search_roots(paths)
        state = self.traced_state(roots)
        matches: list[PartMatch] = []
        why: dict[str, None] = {}
        for path in roots:
            root = state.root_of(path)
            assert root is not None
            for form in range(len(state.traces[root].calls)):
                part_matches, reason = finder.find(
                    self.contexts(state.graphs[root, form].gm), relative_path(path, root)
                )
                matches += [self._located_match(match, path, root, form) for match in part_matches]
                if not part_matches:
                    why[f"{path}: {reason}" if path else reason] = None
        return Matches(matches, "" if matches else "; ".join(why))

    def search_roots(self, paths: Iterable[str]) -> list[str]:
        """Return the parts to search for some paths: none within another, each module under one path.

        A container without a forward is left out where modules within it are among the paths.
        """
        canonical = dict.fromkeys(self._canonical_paths(paths))
        inner = {outer for path in canonical for outer in enclosing_paths(path) if outer != path}
        return outermost_paths(p for p in canonical if p not in inner or has_forward(self.module_at(p)))

    def _canonical_paths(self, paths: Iterable[str]) -> list[str]:
        """Return for each path that under which its module was traced, or else the first path of the module."""
        requested = list(paths)
        with self.with_replacements() as model:
            every = list(model.named_modules(remove_duplicate=False))
        first: dict[nn.Module, str] = {}
        for path, module in every:
            first.setdefault(module, path)
        if len(first) == len(every):
            return requested
        modules = dict(every)
        traced = {trace.module: root for root, trace in self.state.traces.items()}

        def name(path: str) -> str:
            if path not in modules or self.state.root_of(path) is not None:
                return path
            for outer in enclosing_paths(path):
                if modules[outer] in traced:
                    return join_path(traced[modules[outer]], relative_path(path, outer))
            first_path = first[modules[path]]
            return first_path if self.state.root_of(first_path) is None else path

        return [name(path) for path in requested]

    def _located_match(self, match: PartMatch, path: str, root: str, form: int) -> PartMatch:
        inner = join_path(root, match.module_path)
        return replace(match, path=path, root=root, form=form, module_path=inner, origin=self.origin)

    def graphs_of(self, paths: Iterable[str]) -> list[GraphModule]:
        scopes = self.search_roots(paths)
        state = self.traced_state(scopes)
        roots = dict.fromkeys(state.root_of(path) for path in scopes)
        return [part.gm for (root, _), part in state.graphs.items() if root in roots]

    def regions_of(self, paths: Iterable[str]) -> list[PartRegion]:
        """Return the regions of some parts, as far as they are traced."""
        canonical = dict.fromkeys(self._canonical_paths(paths))
        inside: dict[str, list[str]] = {}
        for path in canonical:
            inside.setdefault(self.state.root_of(path) or "", []).append(path)
        result: list[PartRegion] = []
        for (root, form), part in self.state.graphs.items():
            whole = any(outer in canonical for outer in enclosing_paths(root))
            scopes = [root] if whole else inside.get(root, [])
            for region in regions(part.gm) if scopes else ():
                path = next((p for p in scopes if is_from(region.node, relative_path(p, root))), None)
                if path is not None:
                    result.append(self._located_region(region, path, root, form))
        return result

    def regions_holding(self, path: str) -> list[str]:
        """Return the names of regions with operations of the module at `path`."""
        root = self.state.root_of(path)
        if root is None:
            return []
        gm, scope = self.state.graphs[root, 0].gm, relative_path(path, root)
        calls = [(node.name, call) for node in gm.graph.nodes if (call := call_of(node.meta)) is not None]
        return [
            name
            for name, call in calls
            if any(is_within(frame.path, scope) for member in walk(call) for frame in frames_of(member.meta))
        ]

    def regions_named(self, root: str, form: int, names: Mapping[str, str]) -> list[PartRegion]:
        """Return regions by name, each with the path of its part."""
        by_name = {region.name: region for region in regions(self.state.graphs[root, form].gm)}
        return [self._located_region(by_name[name], path, root, form) for name, path in names.items()]

    def _located_region(self, region: Region, path: str, root: str, form: int) -> PartRegion:
        return PartRegion(**vars(region), path=path, root=root, form=form, origin=self.origin)


def _quoted(path: str) -> str:
    return f"'{path}'" if path else "the model"


def _capture_cache(module: nn.Module) -> CaptureCache:
    """Return an empty cache for captures of a part, on which no steps are done."""
    return CaptureCache(unwrapped(module), ReplayedSteps(lambda gm: gm), cuda_graphs=False)
