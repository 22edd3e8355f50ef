"""A model under a schedule: its state, how parts come to be traced, and how steps are done or not at all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.frontend.capture import outside_inference_mode
from dovetail.outlining.region import Region, regions
from dovetail.outlining.region_call import call_of, walk
from dovetail.rules.by_module import frame
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.scheduling.call_recording import ModelInputs, RecordedCall, record
from dovetail.scheduling.edits import Edit
from dovetail.scheduling.finders import (
    Finder,
    Matches,
    PartMatch,
    PartRegion,
    around,
    below,
    frames_of,
    is_within,
    joined,
    outermost,
)
from dovetail.scheduling.history import History
from dovetail.scheduling.install import Installation
from dovetail.scheduling.installed_forward import ReplayedSteps, has_forward, plain, refuse_hooks
from dovetail.scheduling.state import Scenes, ScheduleState, Trace, trace_part

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Done:
    """A step that was done: what history keeps of it, and the state it was done to."""

    entry: dict[str, Any]
    before: ScheduleState


class ScheduleSession:
    """Everything a schedule works with."""

    def __init__(self, model: nn.Module, example: ModelInputs | None) -> None:
        self.model, self.example = model, example
        self.state = ScheduleState()
        self.done: list[Done] = []
        self.look = Scenes()
        self.installation = Installation(model)
        self.after: list[Callable[[Done], None]] = []
        self.origin = object()
        self._inner: list[dict[str, Any]] | None = None
        self._traces: dict[str, tuple[Any, Trace]] = {}
        self._prospect: tuple[ScheduleState, list[str], ScheduleState] = (self.state, [], self.state)

    @property
    def history(self) -> History:
        return History(done.entry for done in self.done)

    @contextmanager
    def exchanged(self) -> Generator[nn.Module]:
        """The model with its replaced modules in place, and no forwards but its own."""
        with self.installation.instead(self.state, forwards=False) as model:
            yield model

    def module_at(self, path: str) -> nn.Module:
        """The module at a path as it is now: a replaced one, or what is within it, or the model's own."""
        outer = next((p for p in around(path) if p in self.state.swaps), None)
        if outer is None:
            return self.model.get_submodule(path)
        return self.state.swaps[outer].get_submodule(below(path, outer))

    def require_example(self) -> ModelInputs:
        if self.example is None:
            raise InvalidArgument(
                "tracing needs example inputs: schedule(model, args, kwargs), or set them with `example(...)`."
            )
        return self.example

    def step(
        self, entry: Callable[[Result], dict[str, Any]], work: Callable[[], Result], *, is_own: bool = True
    ) -> Result:
        """Do a step wholly or not at all. A step within another is a part of that one.

        A step that is not one of ours, but a function of the user's, sees the model as it was built.
        """
        before, outer = self.state, self._inner
        self._inner = []
        try:
            # Taken off once: looking at modules would do so again and again.
            with outside_inference_mode(), self.installation.suspended() if is_own else nullcontext():
                result = work()
            told = entry(result)
            if self._inner:
                told = {**told, "steps": self._inner}
            if outer is None:
                for check in self.after:
                    check(Done(told, before))
        except BaseException:
            self.state, self._inner = before, outer
            if self.installation.state is not before:
                self._refreshed()
            raise
        self._inner = outer
        if outer is not None:
            outer.append(told)
        else:
            self.done.append(Done(told, before))
        self._refreshed()
        return result

    def undo(self, count: int) -> list[dict[str, Any]]:
        if self._inner is not None:
            raise ScheduleError("a step that is being done cannot undo others; raise, and none of it is done")
        undone = self.done[len(self.done) - count :]
        self.state = undone[0].before
        del self.done[len(self.done) - count :]
        self._refreshed()
        return [done.entry for done in undone]

    def restore(self, state: ScheduleState, done: list[Done], example: ModelInputs | None) -> None:
        """Be again what it was before several steps."""
        self.state, self.done, self.example = state, done, example
        self._refreshed()

    def _refreshed(self) -> None:
        """A model that was built runs what the schedule is now."""
        if self.installation.state is not None and self._inner is None:
            self.installation.put(self.state)

    def edit(self, edit: Edit) -> list[str]:
        self.state, names = self.state.edited(edit, self.look)
        return names

    def record(self, paths: Iterable[str]) -> dict[str, list[RecordedCall]]:
        """How some parts are called in one run of the model as it is now."""
        example = self.require_example()
        with outside_inference_mode(), self.installation.instead(self.state) as model:
            return record(model, paths, example)

    def prospect(self, paths: Iterable[str]) -> ScheduleState:
        """The state with some parts traced that were not; looking into them does not change what is scheduled."""
        missing = outermost(path for path in paths if self.state.root_of(path) is None)
        if not missing:
            return self.state
        stale = self._stale(missing)
        seen, wanted, made = self._prospect
        if seen is self.state and wanted == missing and not stale:
            return made
        if stale:
            self._capture(stale)
        with self.exchanged() as model:
            state = self.state.traced([self._traces[path][1] for path in missing], self.look, model)
        self._prospect = (self.state, missing, state)
        return state

    def adopt(self, items: Sequence[Any]) -> None:
        """Let the parts that matches were found in be traced ones from now on."""
        roots = [item.root for item in items if isinstance(item, (PartMatch, PartRegion))]
        for item in items:
            if isinstance(item, (PartMatch, PartRegion)) and item.origin is not self.origin:
                raise InvalidArgument(f"{item!r} is of another schedule; find it in this one.")
        self.state = self.prospect(roots)

    def _stale(self, paths: Iterable[str]) -> list[str]:
        """Those of some parts that were not traced as they are now: in the same modes, of the same modules."""
        found: list[str] = []
        with self.exchanged() as model:
            for path in paths:
                module = model.get_submodule(path)
                self._refuse_untraceable(path, module)
                refuse_hooks(path, module)
                if path not in self._traces or self._told(module) != self._traces[path][0]:
                    found.append(path)
        return found

    def _told(self, module: nn.Module) -> Any:
        return (
            list(module.modules()),
            self.example,
            CaptureCache(plain(module), ReplayedSteps(_as_it_is)).modes(),
        )

    def _capture(self, paths: list[str]) -> None:
        """Trace parts, with one run of the model for all of them."""
        calls = self.record(paths)
        with self.exchanged() as model:
            for path in paths:
                module = model.get_submodule(path)
                trace = trace_part(path, module, calls[path])
                self._traces[path] = (self._told(module), trace)

    def _refuse_untraceable(self, path: str, module: nn.Module) -> None:
        import torch

        for inside, child in module.named_modules():
            if isinstance(child, torch.jit.ScriptModule):
                where = _named(joined(path, inside) if inside else path)
                raise ScheduleError(
                    f"{where} is a TorchScript module, which cannot be traced. Take the parts beside it, or put the Python "
                    f"module that it was scripted from in its place"
                )
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise ScheduleError(
                f"{_named(path)} is compiled by torch.compile. Schedule the module in it, and compile what `build` gives"
            )
        inside = [c for c in self.state.checkpoints if is_within(c, path)]
        if inside:
            raise ScheduleError(
                f"{_named(path)} cannot be traced: '{inside[0]}' is checkpointed as a module, which tracing would "
                f"lose. Checkpoint regions of the traced part instead"
            )
        if not has_forward(module):
            raise ScheduleError(
                f"{_named(path)} is a {type(module).__name__} and has no forward of its own; take the modules in it: "
                f"'{joined(path, '*')}'"
            )

    def find(self, paths: Iterable[str], finder: Finder) -> Matches:
        listed = self.looked_into(paths)
        state = self.prospect(listed)
        found: list[PartMatch] = []
        why: dict[str, None] = {}
        for path in listed:
            root = state.root_of(path)
            assert root is not None
            for form in range(len(state.traces[root].calls)):
                here, reason = finder.find(self.look(state.graphs[root, form].gm), below(path, root))
                found += [self._placed(match, path, root, form) for match in here]
                if not here:
                    why[f"{path}: {reason}" if path else reason] = None
        return Matches(found, "" if found else "; ".join(why))

    def looked_into(self, paths: Iterable[str]) -> list[str]:
        """The parts to look into for some paths: none within another, each module under one name.

        A container that is never called stands for the modules in it where these are among the paths.
        """
        known = dict.fromkeys(self._one_name(paths))
        inner = {outer for path in known for outer in around(path) if outer != path}
        return outermost(p for p in known if p not in inner or has_forward(self.module_at(p)))

    def _one_name(self, paths: Iterable[str]) -> list[str]:
        """Paths with the name under which a module was traced, or that it has first, if it has several."""
        listed = list(paths)
        with self.exchanged() as model:
            every = list(model.named_modules(remove_duplicate=False))
        first: dict[nn.Module, str] = {}
        for path, module in every:
            first.setdefault(module, path)
        if len(first) == len(every):
            return listed
        modules = dict(every)
        traced = {trace.module: root for root, trace in self.state.traces.items()}

        def name(path: str) -> str:
            if path not in modules or self.state.root_of(path) is not None:
                return path
            for outer in around(path):
                if modules[outer] in traced:
                    return joined(traced[modules[outer]], below(path, outer))
            known = first[modules[path]]
            return known if self.state.root_of(known) is None else path

        return [name(path) for path in listed]

    def _placed(self, match: PartMatch, path: str, root: str, form: int) -> PartMatch:
        inner = joined(root, match.module_path)
        return replace(match, path=path, root=root, form=form, module_path=inner, origin=self.origin)

    def graphs_of(self, paths: Iterable[str]) -> list[GraphModule]:
        listed = self.looked_into(paths)
        state = self.prospect(listed)
        roots = dict.fromkeys(state.root_of(path) for path in listed)
        return [part.gm for (root, _), part in state.graphs.items() if root in roots]

    def regions_of(self, paths: Iterable[str]) -> list[PartRegion]:
        """The regions in some parts, of those that are traced."""
        known = dict.fromkeys(self._one_name(paths))
        inside: dict[str, list[str]] = {}
        for path in known:
            inside.setdefault(self.state.root_of(path) or "", []).append(path)
        found: list[PartRegion] = []
        for (root, form), part in self.state.graphs.items():
            whole = any(outer in known for outer in around(root))
            scopes = [root] if whole else inside.get(root, [])
            for region in regions(part.gm) if scopes else ():
                path = next((p for p in scopes if _is_from(region.node, below(p, root))), None)
                if path is not None:
                    found.append(self.placed(region, path, root, form))
        return found

    def regions_holding(self, path: str) -> list[str]:
        """The names of regions that operations of the module at `path` are in."""
        root = self.state.root_of(path)
        if root is None:
            return []
        gm, scope = self.state.graphs[root, 0].gm, below(path, root)
        calls = [(node.name, call) for node in gm.graph.nodes if (call := call_of(node.meta)) is not None]
        return [
            name
            for name, call in calls
            if any(
                is_within(frame(key, entry).path, scope)
                for member in walk(call)
                for key, entry in (member.meta.get("nn_module_stack") or {}).items()
            )
        ]

    def regions_named(self, root: str, form: int, names: Mapping[str, str]) -> list[PartRegion]:
        """Regions by name, each with the path of the part it was made in."""
        known = {region.name: region for region in regions(self.state.graphs[root, form].gm)}
        return [self.placed(known[name], path, root, form) for name, path in names.items()]

    def placed(self, region: Region, path: str, root: str, form: int) -> PartRegion:
        return PartRegion(**vars(region), path=path, root=root, form=form, origin=self.origin)


def _is_from(node: Any, scope: str) -> bool:
    return scope == "" or any(is_within(frame.path, scope) for frame in frames_of(node))


def _named(path: str) -> str:
    return f"'{path}'" if path else "the model"


def _as_it_is(gm: GraphModule) -> GraphModule:
    return gm
