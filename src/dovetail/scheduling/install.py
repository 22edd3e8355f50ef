"""Forwards that run graphs, set on the modules of a model as its schedule states, and their removal."""

from __future__ import annotations

import copy
import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dovetail.errors import CallMismatch, CaptureError, DovetailError, ScheduleError
from dovetail.ir.graph_module import HOOK_KINDS, Program
from dovetail.ir.profiler_ranges import is_traced
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.runtime.capture_entry import CaptureEntry, GuardKey
from dovetail.runtime.module_guard import has_global_hooks, with_signature
from dovetail.runtime.presets import CompiledGraph
from dovetail.scheduling.edits import OPTIONAL, Edit, PartGraph, ReplaceEdit
from dovetail.scheduling.state import ContextCache, ScheduleState


def hook_kind(module: nn.Module) -> str | None:
    """Return the kind of a hook that a module has, such as "forward hook"; None if it has none."""
    kind = next((kind for kind in HOOK_KINDS if module.__dict__.get(kind)), None)
    return None if kind is None else kind.strip("_").removesuffix("s").replace("_", " ")


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise where a hook would become part of a graph: one on a module inside a part, or on all modules."""
    where = f"'{path}'" if path else "the model"
    for name, inner in module.named_modules():
        what = hook_kind(inner) if name else None
        if what is not None:
            raise ScheduleError(
                f"module '{name}' within {where} has a {what}; tracing would bake it into the graph. "
                f"Remove it, or schedule smaller parts that do not hold the module"
            )
    for kind in HOOK_KINDS:
        if getattr(torch_modules, f"_global{kind}"):
            raise ScheduleError(
                f"a hook is set on all modules (torch.nn.modules.module._global{kind}); tracing {where} would bake it into "
                f"the graph. Remove it, and set it again when the model is built"
            )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module that shares the attributes of another, but runs its forward without what a schedule installed."""
    cls = type(module)
    own = user_forward(module)

    def forward(self: Any) -> Callable[..., Any]:
        return own if own is not None else cls.forward.__get__(self)

    # Only a data descriptor takes precedence over the attributes of an instance.
    subclass = type(
        cls.__name__, (cls,), {"forward": property(forward, _refuse), "__module__": cls.__module__}
    )
    subclass.__qualname__ = cls.__qualname__
    twin = object.__new__(subclass)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _refuse(self: Any, value: Any) -> None:
    raise AttributeError("forward of a part that is being traced cannot be set")


def user_forward(module: nn.Module) -> Any:
    """Return what the user set as the forward of a module; None where it has that of its class."""
    forward = module.__dict__.get("forward")
    while isinstance(at := getattr(forward, "__self__", None), InstalledForward):
        forward = at.own
    return forward


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, which a ModuleList cannot."""
    return type(module).forward is not nn.Module.forward or user_forward(module) is not None


@dataclass(frozen=True)
class ReplayedSteps:
    """The pipeline of a new capture of a part: all of its steps again.

    `replaces` is set where the module's own forward computes something else.
    """

    replay: Callable[[GraphModule], GraphModule]
    strict: bool = False
    replaces: bool = False

    def __call__(self, gm: GraphModule) -> CompiledGraph:
        try:
            return CompiledGraph(self.replay(gm))
        except CaptureError:
            raise
        except DovetailError as error:
            raise CaptureError(f"steps of the schedule cannot be done for this call: {error}") from error


@dataclass(frozen=True, eq=False)
class ReplayEdits:
    """Applies the edits for the first call signature to a capture for another."""

    edits: tuple[Edit, ...]
    root: str

    def __call__(self, gm: GraphModule) -> GraphModule:
        contexts = ContextCache()
        part = PartGraph(gm)
        for edit in self.edits:
            if edit.form == 0:
                part, _ = edit.apply(part, self.root, contexts, OPTIONAL)
        return part.gm

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayEdits:
        return ReplayEdits(tuple(edit.copied_with(memo) for edit in self.edits), self.root)


class InstalledForward(ABC):
    """A forward set on a module in place of its own; `own` is what the user had set there."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = user_forward(module)

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        """The graphs that it runs, for `dovetail.refresh`."""
        return ()

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call; hooks of the module run around it."""

    def install(self) -> None:
        own = user_forward(self.module) or types.MethodType(type(self.module).forward, self.module)
        function = with_signature(type(self).run, own)
        self.module.__dict__["forward"] = types.MethodType(function, self)

    def remove(self) -> None:
        if self.own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.own


def _is_in_mode(program: GraphModule, module: nn.Module) -> bool:
    """Return whether a graph was captured with a module and its submodules in their present modes."""
    modes = {name: part.training for name, part in module.named_modules()}
    return all(
        modes.get(name, part.training) == part.training for name, part in program.named_modules() if name
    )


@contextmanager
def _own_forwards_within(module: nn.Module) -> Generator[None]:
    """Give submodules their own forwards: one that another part shares may be traced there."""
    removed: list[InstalledForward] = []
    for inner in module.modules():
        at = getattr(inner.__dict__.get("forward"), "__self__", None)
        if isinstance(at, InstalledForward) and inner is not module:
            removed.append(at)
            at.remove()
    try:
        yield
    finally:
        for at in removed:
            at.install()


class HookFreeCache(CaptureCache):
    """Captures of a module that refuse hooks on its submodules; `label` names the module in errors."""

    def __init__(self, module: nn.Module, steps: ReplayedSteps, label: str, **options: Any) -> None:
        super().__init__(module, steps, cuda_graphs=False, **options)
        self._label = label

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[GuardKey, GraphModule]:
        try:
            refuse_hooks(self._label, self.model)
        except ScheduleError as error:
            raise CaptureError(str(error)) from error
        return super().capture(args, kwargs, cause)


class PartCaptureCache(HookFreeCache):
    """Captures of a part; parameters that `functional_call` swaps reach them."""

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[GuardKey, GraphModule]:
        with _own_forwards_within(self.model):
            return super().capture(args, kwargs, cause)

    def specialize(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> CaptureEntry | None:
        if has_global_hooks() and getattr(self.preset, "replaces", False):
            raise ScheduleError(
                f"hooks are registered for all modules, and a {type(self.model).__name__} in which something was replaced "
                f"has no modules inside to run them. Remove them, or register them on single modules"
            )
        return super().specialize(args, kwargs, cause)

    def call_with_swapped_parameters(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a capture with the present parameters while they are swapped, or while another tracer is active."""
        for entry in self.captures:
            if _is_in_mode(entry.program, self.model):
                try:
                    return _run_on_current_state(entry.program, self.model, args, kwargs)
                except CallMismatch:
                    continue
        if getattr(self.preset, "replaces", False):
            raise ScheduleError(
                f"a {type(self.model).__name__} in which something was replaced is called in a way that nothing was done "
                f"for yet, by a tracer or with its parameters swapped. Call it with such inputs first"
            )
        return self.model.forward(*args, **kwargs)


def _run_on_current_state(
    program: GraphModule, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a graph on the tensors that a module has now under the names of the graph's own."""
    captured, current = _named_tensors(program), _named_tensors(module)
    others = {name: value for name, value in current.items() if captured.get(name, value) is not value}
    if not others:
        return program.forward(*args, **kwargs)
    try:
        return torch.func.functional_call(program, others, args, dict(kwargs), tie_weights=False)
    finally:
        if isinstance(program, Program):
            program.refresh_bodies()


def _named_tensors(module: nn.Module) -> dict[str, Any]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


class ScheduledForward(InstalledForward):
    """The forward of a part: its graphs, one for each call signature, and for other calls new captures.

    Where its steps cannot be done for a call, the module's own forward runs, with a warning.
    """

    def __init__(self, module: nn.Module, steps: ReplayedSteps) -> None:
        super().__init__(module)
        self.steps = steps
        self._cache: PartCaptureCache | None = None

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        return tuple(entry.program for entry in self.cache.captures)

    @property
    def cache(self) -> PartCaptureCache:
        """Created on first use: a module that is being unpickled is still empty."""
        if self._cache is None:
            self._cache = PartCaptureCache(unwrapped(self.module), self.steps, type(self.module).__name__)
            # The steps were done once, also where this is of a copy that has no graphs yet.
            self._cache.has_captured = not self.steps.replaces
        return self._cache

    def adopt(self, programs: list[tuple[GuardKey | None, GraphModule]]) -> None:
        """Take over graphs, each with its guard key; None is the key of the module as it is now."""
        now = self.cache.guard_key()
        self.cache.adopt(
            [(now or ((), ()) if key is None else key, CompiledGraph(gm)) for key, gm in programs]
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)
        if torch.compiler.is_compiling() or is_traced():
            return self.cache.call_with_swapped_parameters(args, kwargs)
        return self.cache.call(args, kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that torch.compile traces: a graph that fits, so that its operations are traced."""
        for entry in self.cache.captures:
            if _is_in_mode(entry.program, self.module):
                try:
                    return entry.program.forward(*args, **kwargs)
                except CallMismatch:
                    continue
        if self.steps.replaces:
            return _call_uncompiled(self, args, kwargs)  # pyright: ignore[reportCallIssue]  # its decorator is not typed
        return self.cache.model.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScheduledForward:
        # The copy's parameters are others: it captures anew, and calls what was copied with it.
        return ScheduledForward(copy.deepcopy(self.module, memo), copy.deepcopy(self.steps, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return ScheduledForward, (self.module, self.steps)


@torch.compiler.disable
def _call_uncompiled(forward: ScheduledForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call outside of what is being compiled: it is captured first."""
    return forward.cache.call(args, kwargs)


class CheckpointedForward(InstalledForward):
    """The forward of a module whose inner values are recomputed in backward."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own if self.own is not None else type(self.module).forward.__get__(self.module)
        # Early stop ends the recomputation by raising, which compiled code within would treat as its own error.
        with set_checkpoint_early_stop(False):
            return checkpoint(own, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self.module,)


_ABSENT = object()


class _Changes:
    """Changes of a model: its forwards, and entries of its tables of modules, parameters and buffers."""

    def __init__(self) -> None:
        self.state: ScheduleState | None = None
        self.forwards: list[InstalledForward] = []
        self.entries: list[tuple[dict[str, Any], str, Any, Any]] = []

    def install(self, forward: InstalledForward) -> None:
        forward.install()
        self.forwards.append(forward)

    def set(self, table: dict[str, Any], name: str, new: Any) -> None:
        self.entries.append((table, name, table.get(name, _ABSENT), new))
        table[name] = new

    def undo(self) -> None:
        for forward in reversed(self.forwards):
            forward.remove()
        for table, name, old, _ in reversed(self.entries):
            if old is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = old

    def redo(self) -> None:
        for table, name, _, new in self.entries:
            table[name] = new
        for forward in self.forwards:
            forward.install()


class Installation:
    """The changes of a model by its schedule, which can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changes = _Changes()
        self._cached: dict[str, tuple[tuple[object, ...], ScheduledForward]] = {}

    @property
    def state(self) -> ScheduleState | None:
        """The state that the model runs; None for the original model."""
        return self._changes.state

    def install(self, state: ScheduleState, *, forwards: bool = True) -> None:
        """Make the model run a state; without `forwards` only modules are swapped."""
        self.uninstall()
        try:
            for path, new in state.swaps.items():
                parent, _, name = path.rpartition(".")
                table = self.model.get_submodule(parent)._modules
                if table.get(name) is None:
                    raise ScheduleError(
                        f"a step replaced the module at '{path}', which was removed from the model since; put it back, or "
                        f"undo the step"
                    )
                self._changes.set(table, name, new)
            if forwards:
                self._install_forwards(state)
        except BaseException:
            self.uninstall()
            raise

    def _install_forwards(self, state: ScheduleState) -> None:
        runs = {root: self._scheduled_forward(state, root) for root in state.traces}
        # A module that replaces an operation becomes a child of its part, which changes the guard key of the part.
        before = {root: run.cache.guard_key() for root, (run, is_new) in runs.items() if is_new}
        self._register_replacements(state)
        for root, (run, _) in runs.items():
            if root in before:
                now = before[root]
                run.adopt([(None if m == now else m, gm) for m, gm in state.programs(root)])
            self._changes.install(run)
        for path in sorted(state.checkpoints):
            self._changes.install(CheckpointedForward(self.model.get_submodule(path)))
        self._changes.state = state

    def _scheduled_forward(self, state: ScheduleState, root: str) -> tuple[ScheduledForward, bool]:
        """Return the forward of a traced part, and whether it is new: with the same graphs it keeps its captures."""
        module = state.traces[root].module
        identity = (state.traces[root], user_forward(module), *(gm for _, gm in state.programs(root)))
        cached = self._cached.get(root)
        if (
            cached is not None
            and len(cached[0]) == len(identity)
            and all(map(operator.is_, cached[0], identity))
        ):
            return cached[1], False
        edits = tuple(state.edits_by_root.get(root, ()))
        replaces = any(isinstance(edit, ReplaceEdit) for edit in edits)
        run = ScheduledForward(module, ReplayedSteps(ReplayEdits(edits, root), replaces=replaces))
        self._cached[root] = (identity, run)
        return run, True

    def _register_replacements(self, state: ScheduleState) -> None:
        """Register modules that replace operations, so that they are trained, moved and saved with the model.

        Their parameters that parameters of the model replace are left out.
        """
        placed: set[nn.Module] = set()
        for edit in state.edits:
            new = edit.new if isinstance(edit, ReplaceEdit) else None
            if new is None or not isinstance(new.new, nn.Module) or new.new in placed:
                continue
            placed.add(new.new)
            owner = self.model.get_submodule(edit.root)
            name, count = new.name, 0
            while hasattr(owner, name):
                count += 1
                name = f"{new.name}_{count}"
            self._changes.set(owner._modules, name, new.new)
            for parameter in new.params:
                path, _, own = parameter.rpartition(".")
                holder = new.new.get_submodule(path)
                tables: tuple[dict[str, Any], ...] = (holder._parameters, holder._buffers)
                table = next((table for table in tables if own in table), None)
                if table is None:
                    raise ScheduleError(
                        f"a step binds the parameter '{parameter}' of '{new.name}', which was removed since"
                    )
                self._changes.set(table, own, None)

    def uninstall(self) -> None:
        """Restore the original model."""
        self._changes.undo()
        self._changes = _Changes()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Restore the original model temporarily; the same changes are applied again afterwards."""
        changes, self._changes = self._changes, _Changes()
        changes.undo()
        try:
            yield
        finally:
            self.uninstall()
            self._changes = changes
            changes.redo()

    @contextmanager
    def temporarily(self, state: ScheduleState | None, *, forwards: bool = True) -> Generator[nn.Module]:
        """Make the model run another state for a while; None is the original model."""
        with self.suspended():
            if state is not None:
                self.install(state, forwards=forwards)
            yield self.model


def is_scheduled(module: nn.Module) -> bool:
    """Return whether a schedule installed a forward on a module."""
    return user_forward(module) is not module.__dict__.get("forward")
