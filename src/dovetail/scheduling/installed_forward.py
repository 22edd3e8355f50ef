"""A module whose forward runs graphs: what is installed on a part when a schedule is built."""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules import module as torch_modules

from dovetail.errors import CallMismatch, CaptureError, DovetailError, ScheduleError
from dovetail.ir.graph_module import Program
from dovetail.lowering.dispatch import is_watched
from dovetail.runtime.capture_cache import CaptureCache, CaptureEntry, Modes
from dovetail.runtime.module_guard import has_hooks_on_all_modules, with_signature

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hook_on(module: nn.Module) -> str | None:
    """The kind of a hook that a module has, in words."""
    kind = next((kind for kind in _KINDS if module.__dict__.get(kind)), None)
    return None if kind is None else kind.strip("_").removesuffix("s").replace("_", " ")


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise where a hook would become part of a graph, or be lost: one on a module inside of a part, or on all."""
    where = f"'{path}'" if path else "the model"
    for name, inner in module.named_modules():
        what = hook_on(inner) if name else None
        if what is not None:
            raise ScheduleError(
                f"module '{name}' within {where} has a {what}; tracing would bake it into the graph. "
                f"Remove it, or schedule smaller parts that do not hold the module"
            )
    for kind in _KINDS:
        if getattr(torch_modules, f"_global{kind}"):
            raise ScheduleError(
                f"a hook is set on all modules (torch.nn.modules.module._global{kind}); tracing {where} would bake it into "
                f"the graph. Remove it, and set it again when the model is built"
            )


def plain(module: nn.Module) -> nn.Module:
    """A module that is the given one in everything, attributes set on either included, but runs its own forward.

    What a schedule installs as `forward` on the instance does not show on it.
    """
    cls = type(module)
    own = own_forward(module)

    def forward(self: Any) -> Callable[..., Any]:
        return own if own is not None else cls.forward.__get__(self)

    # Only a data descriptor comes before what an instance has.
    made = type(cls.__name__, (cls,), {"forward": property(forward, _refuse), "__module__": cls.__module__})
    made.__qualname__ = cls.__qualname__
    twin = object.__new__(made)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _refuse(self: Any, value: Any) -> None:
    raise AttributeError("forward of a part that is being traced cannot be set")


def own_forward(module: nn.Module) -> Any:
    """What a module's user set as its forward; None where it has that of its class."""
    found = module.__dict__.get("forward")
    while isinstance(at := getattr(found, "__self__", None), Installed):
        found = at.own
    return found


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a list of modules cannot."""
    return type(module).forward is not nn.Module.forward or own_forward(module) is not None


@dataclass(frozen=True)
class ReplayedSteps:
    """What is done to a new capture of a part: all of its steps again.

    `replaces` tells that the module's own forward computes something else than they do.
    """

    redo: Callable[[GraphModule], GraphModule]
    strict: bool = False
    replaces: bool = False

    def __call__(self, gm: GraphModule) -> GraphModule:
        try:
            return self.redo(gm)
        except CaptureError:
            raise
        except DovetailError as error:
            raise CaptureError(f"steps of the schedule cannot be done for this call: {error}") from error


class Installed(ABC):
    """Something that stands in for a module's forward; `own` is what the module's user had there."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = own_forward(module)

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        """The graphs that it runs; `dovetail.refresh` looks for them."""
        return ()

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What is called as the module's forward; hooks of the module run around it."""

    def install(self) -> None:
        own = own_forward(self.module) or types.MethodType(type(self.module).forward, self.module)
        function = with_signature(type(self).run, own)
        self.module.__dict__["forward"] = types.MethodType(function, self)

    def remove(self) -> None:
        if self.own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.own


def _is_in_mode(program: GraphModule, module: nn.Module) -> bool:
    """Whether a graph was captured with a module and those in it in the modes they are in now."""
    modes = {name: part.training for name, part in module.named_modules()}
    return all(
        modes.get(name, part.training) == part.training for name, part in program.named_modules() if name
    )


@contextmanager
def _own_forwards_within(module: nn.Module) -> Generator[None]:
    """Modules in a part with the forwards they had: one that is in another part too may be traced there."""
    taken: list[Installed] = []
    for inner in module.modules():
        at = getattr(inner.__dict__.get("forward"), "__self__", None)
        if isinstance(at, Installed) and inner is not module:
            taken.append(at)
            at.remove()
    try:
        yield
    finally:
        for at in taken:
            at.install()


class PartForms(CaptureCache):
    """Captures of a part: no hook becomes part of one, and stand-ins for parameters reach them."""

    def captured(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[Modes, GraphModule]:
        try:
            refuse_hooks(type(self.model).__name__, self.model)
        except ScheduleError as error:
            raise CaptureError(str(error)) from error
        with _own_forwards_within(self.model):
            return super().captured(args, kwargs, cause)

    def specialise(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> CaptureEntry | None:
        if has_hooks_on_all_modules() and getattr(self.recipe, "replaces", False):
            raise ScheduleError(
                f"hooks are registered for all modules, and a {type(self.model).__name__} in which something was replaced "
                f"has no modules inside to run them. Remove them, or register them on single modules"
            )
        return super().specialise(args, kwargs, cause)

    def with_stand_ins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call while other tensors than its own stand for parameters of the part, or another tracer looks on."""
        for form in self.made:
            if _is_in_mode(form.program, self.model):
                try:
                    return _on_present(form.program, self.model, args, kwargs)
                except CallMismatch:
                    continue
        if getattr(self.recipe, "replaces", False):
            raise ScheduleError(
                f"a {type(self.model).__name__} in which something was replaced is called in a way that nothing was done "
                f"for yet, by a tracer or with stand-ins for its parameters. Call it with such inputs first"
            )
        return self.model.forward(*args, **kwargs)


def _on_present(
    program: GraphModule, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """A graph run on the tensors that a module has now under the names of those that the graph has."""
    known = {**dict(_tensors(program)), **dict(program.named_buffers(remove_duplicate=False))}
    now = {**dict(_tensors(module)), **dict(module.named_buffers(remove_duplicate=False))}
    others = {name: value for name, value in now.items() if known.get(name, value) is not value}
    if not others:
        return program.forward(*args, **kwargs)
    try:
        return torch.func.functional_call(program, others, args, dict(kwargs), tie_weights=False)
    finally:
        if isinstance(program, Program):
            program.refresh_bodies()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return module.named_parameters(remove_duplicate=False)


class Running(Installed):
    """Calls of one part: its graphs, one for each call signature, and for other calls new ones made alike.

    Where its steps cannot be done for a call, the module's own forward runs, with a warning.
    """

    def __init__(self, module: nn.Module, steps: ReplayedSteps) -> None:
        super().__init__(module)
        self.steps = steps
        self._forms: PartForms | None = None

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        return tuple(form.program for form in self.forms.made)

    @property
    def forms(self) -> PartForms:
        """Made when first asked for: a module that is being unpickled has nothing in it yet."""
        if self._forms is None:
            self._forms = PartForms(plain(self.module), self.steps, cuda_graphs=False)
            # The steps were done once, also where this is of a copy that has no graphs yet.
            self._forms.had_forms = not self.steps.replaces
        return self._forms

    def adopt(self, programs: list[tuple[Modes | None, GraphModule]]) -> None:
        """Run graphs that were made already, each with the modes it is for; None is the module as it is now."""
        now = self.forms.modes()
        self.forms.adopt([(now or ((), ()) if modes is None else modes, gm) for modes, gm in programs])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)
        if torch.compiler.is_compiling() or is_watched():
            return self.forms.with_stand_ins(args, kwargs)
        return self.forms.call(args, kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """A call that torch.compile looks at: a graph that fits, whose operations it sees."""
        for form in self.forms.made:
            if _is_in_mode(form.program, self.module):
                try:
                    return form.program.forward(*args, **kwargs)
                except CallMismatch:
                    continue
        if self.steps.replaces:
            return _aside(self, args, kwargs)  # pyright: ignore[reportCallIssue]  # its decorator is not typed
        return self.forms.model.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        # The copy's parameters are others: it captures anew, and calls what was copied with it.
        return Running(copy.deepcopy(self.module, memo), copy.deepcopy(self.steps, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Running, (self.module, self.steps)


@torch.compiler.disable
def _aside(run: Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call outside of what is being compiled: it is captured first."""
    return run.forms.call(args, kwargs)
