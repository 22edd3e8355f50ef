"""A model under a schedule: its state, how parts come to be traced, and how steps are done or not at all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.lowering.forms import Forms
from dovetail.outlining.record import call_of, walk
from dovetail.outlining.region import regions
from dovetail.rules.modulestack import frame
from dovetail.scheduling.edits import Edit
from dovetail.scheduling.finders import Finder, frames_of
from dovetail.scheduling.found import Found, Matches, PartRegion
from dovetail.scheduling.history import History
from dovetail.scheduling.installing import Installation
from dovetail.scheduling.paths import below, is_within, joined
from dovetail.scheduling.recording import Call, Example, record
from dovetail.scheduling.running import Steps, plain
from dovetail.scheduling.scenes import Scenes
from dovetail.scheduling.state import State, Trace, refuse_hooks, trace_part

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Done:
    """A step that was done: what history keeps of it, and the state it was done to."""

    entry: dict[str, Any]
    before: State


class Workspace:
    """Everything a schedule works with."""

    def __init__(self, model: nn.Module, example: Example | None) -> None:
        self.model, self.example = model, example
        self.state = State()
        self.done: list[Done] = []
        self.look = Scenes()
        self.installation = Installation(model)
        self.after: list[Callable[[Done], None]] = []
        self._inner: list[dict[str, Any]] | None = None
        self._traces: dict[str, tuple[Any, Trace]] = {}
        self._prospect: tuple[State, list[str], State] = (self.state, [], self.state)

    @property
    def history(self) -> History:
        return History(done.entry for done in self.done)

    @contextmanager
    def exchanged(self) -> Generator[nn.Module]:
        """The model with its replaced modules in place, and no forwards but its own."""
        with self.installation.instead(self.state, forwards=False) as model:
            yield model

    def module_at(self, path: str) -> nn.Module:
        with self.exchanged() as model:
            return model.get_submodule(path)

    def require_example(self) -> Example:
        if self.example is None:
            raise InvalidArgument(
                "tracing needs example inputs: schedule(model, args, kwargs), or set them with `example(...)`."
            )
        return self.example

    def step(self, entry: Callable[[Result], dict[str, Any]], work: Callable[[], Result]) -> Result:
        """Do a step wholly or not at all. A step within another is a part of that one."""
        before, outer = self.state, self._inner
        self._inner = []
        try:
            result = work()
            told = entry(result)
            if self._inner:
                told = {**told, "steps": self._inner}
            if outer is None:
                for check in self.after:
                    check(Done(told, before))
        except BaseException:
            self.state, self._inner = before, outer
            raise
        self._inner = outer
        if outer is not None:
            outer.append(told)
        else:
            self.done.append(Done(told, before))
        self._refreshed()
        return result

    def undo(self, count: int) -> list[dict[str, Any]]:
        undone = self.done[len(self.done) - count :]
        self.state = undone[0].before
        del self.done[len(self.done) - count :]
        self._refreshed()
        return [done.entry for done in undone]

    def restore(self, state: State, done: list[Done], example: Example | None) -> None:
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

    def record(self, paths: Iterable[str]) -> dict[str, list[Call]]:
        """How some parts are called in one run of the model as it is now."""
        example = self.require_example()
        with self.installation.instead(self.state) as model:
            return record(model, paths, example)

    def prospect(self, paths: Iterable[str]) -> State:
        """The state with some parts traced that were not; looking into them does not change what is scheduled."""
        missing = [path for path in dict.fromkeys(paths) if self.state.root_of(path) is None]
        missing = [p for p in missing if not any(q != p and is_within(p, q) for q in missing)]
        if not missing:
            return self.state
        seen, wanted, made = self._prospect
        if seen is self.state and wanted == missing and self._are_good(missing):
            return made
        self._capture([path for path in missing if not self._are_good([path])])
        state = self.state
        for path in missing:
            state = state.traced(self._traces[path][1], self.look)
        self._prospect = (self.state, missing, state)
        return state

    def adopt(self, items: Iterable[Any]) -> None:
        """Let the parts that matches were found in be traced ones from now on."""
        roots = [item.root for item in items if isinstance(item, (Found, PartRegion))]
        self.state = self.prospect(roots)

    def _are_good(self, paths: Iterable[str]) -> bool:
        """Whether parts were traced as they are now: in the same modes, of the same modules."""
        return all(path in self._traces and self._told(path) == self._traces[path][0] for path in paths)

    def _told(self, path: str) -> Any:
        swaps = [(p, m) for p, m in self.state.swaps.items() if is_within(p, path) or is_within(path, p)]
        module = self.module_at(path)
        return swaps, module, self.example, Forms(plain(module), Steps(_as_it_is)).modes()

    def _capture(self, paths: list[str]) -> None:
        """Trace parts, with one run of the model for all of them."""
        with self.exchanged() as model:
            for path in paths:
                module = model.get_submodule(path)
                self._refuse_untraceable(path, module)
                refuse_hooks(path, module)
        calls = self.record(paths)
        with self.exchanged() as model:
            for path in paths:
                trace = trace_part(path, model.get_submodule(path), calls[path])
                self._traces[path] = (self._told(path), trace)

    def _refuse_untraceable(self, path: str, module: nn.Module) -> None:
        import torch

        if isinstance(module, torch.jit.ScriptModule):
            raise ScheduleError(f"'{path}' is a TorchScript module, which cannot be traced")
        inside = [c for c in self.state.checkpoints if is_within(c, path)]
        if inside:
            raise ScheduleError(
                f"'{path or 'the model'}' cannot be traced: '{inside[0]}' is checkpointed as a module, which tracing would "
                f"lose. Checkpoint regions of the traced part instead"
            )
        if type(module).forward is nn.Module.forward:
            raise ScheduleError(
                f"'{path}' is a {type(module).__name__} and has no forward of its own; take the modules in it: "
                f"'{joined(path, '*')}'"
            )

    def find(self, paths: Iterable[str], finder: Finder) -> Matches:
        listed = list(dict.fromkeys(paths))
        state = self.prospect(listed)
        found: list[Found] = []
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

    @staticmethod
    def _placed(match: Found, path: str, root: str, form: int) -> Found:
        return replace(match, path=path, root=root, form=form, module_path=joined(root, match.module_path))

    def graphs_of(self, paths: Iterable[str]) -> list[GraphModule]:
        listed = list(paths)
        state = self.prospect(listed)
        roots = dict.fromkeys(state.root_of(path) for path in listed)
        return [part.gm for (root, _), part in state.graphs.items() if root in roots]

    def regions_of(self, paths: Iterable[str]) -> list[PartRegion]:
        """The regions in some parts, of those that are traced."""
        found: list[PartRegion] = []
        for (root, form), part in self.state.graphs.items():
            inside = [p for p in paths if is_within(p, root) or is_within(root, p)]
            for region in regions(part.gm):
                scopes = [below(p, root) if is_within(p, root) else "" for p in inside]
                here = [p for p, s in zip(inside, scopes, strict=True) if _is_from(region.node, s)]
                if here:
                    path = here[0] if is_within(here[0], root) else root
                    found.append(placed(region, path, root, form))
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
        return [placed(known[name], path, root, form) for name, path in names.items()]


def _is_from(node: Any, scope: str) -> bool:
    return scope == "" or any(is_within(frame.path, scope) for frame in frames_of(node))


def placed(region: Any, path: str, root: str, form: int) -> PartRegion:
    return PartRegion(**vars(region), path=path, root=root, form=form)


def _as_it_is(gm: GraphModule) -> GraphModule:
    return gm
