"""Captures of a model, each for one way of calling it, made when a call comes that none is for."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import CallMismatch, CaptureError, CaptureMismatch, InvalidArgument
from dovetail.frontend import cache_pytrees
from dovetail.frontend.capture import CAPTURING, capture
from dovetail.ir.graph_module import HOOK_KINDS
from dovetail.ir.process_state import register_after_fork, reset_at_fork
from dovetail.lowering.dispatch import is_watched
from dovetail.lowering.failures import Diagnostics
from dovetail.lowering.guards import autocast_off, autocasting, nothing_noted
from dovetail.lowering.lowered_state import lowering_of
from dovetail.lowering.options import compilation_limit
from dovetail.runtime.automatic_dynamic import AutomaticDynamic, Dimensions, marks_kept
from dovetail.runtime.cuda_graph_replay import NO_GPU, Replay, why_not_recorded
from dovetail.runtime.module_guard import (
    Makeup,
    has_hooks_on_all_modules,
    instance_forward,
    is_overridden,
    own_forward,
)

CudaGraphs = Literal["auto"] | bool
Modes = tuple[Any, ...]
HOOKS = (
    *HOOK_KINDS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class CompilePipeline(Protocol):
    """What is done to every graph of a model."""

    def __call__(self, gm: GraphModule) -> GraphModule: ...

    @property
    def strict(self) -> bool:
        """Whether a call that cannot be captured is an error though others could be."""
        ...


@dataclass(frozen=True, eq=False)
class CaptureEntry:
    """One capture of the model: modes, numbers and autocast as they were then, and the lowered graph."""

    modes: Modes
    program: GraphModule
    run: Callable[..., Any]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[bool], Any] | None:
        """Start the call on a GPU while it is being found out whether this is the form for it."""
        return self.run.begin(args, kwargs) if isinstance(self.run, Replay) else None


class CaptureCache:
    """The captures of a model so far, and how further ones are made.

    Inputs that no capture was made for, another train or eval mode, autocast, another number or string as an attribute
    of a module, and another class or function of one capture again, up to the recompile limit; then the model's own
    forward runs. So it does while another tracer looks on, for a call that cannot be captured after others could, with
    `fallback_at_first` also for the first one, and in a child process that was forked from this one. Sizes that differ
    from those of earlier calls are symbolic in the next capture, subject to `dynamic`. Hooks of the model itself are the
    caller's to run.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: CompilePipeline,
        *,
        dynamic_shapes: Any = None,
        dynamic: bool | None = None,
        recompile_limit: int | None = None,
        cuda_graphs: CudaGraphs = "auto",
        check_capture: bool = False,
        fallback_at_first: bool = False,
        lock: threading.RLock | None = None,
    ) -> None:
        self.model, self.recipe = model, recipe
        self.dynamic_shapes, self.recompile_limit = dynamic_shapes, recompile_limit
        self.cuda_graphs: CudaGraphs = cuda_graphs
        self.check_capture = check_capture
        self.made: list[CaptureEntry] = []
        # Whether a call that cannot be captured runs the model: for the first one it may be the model's fault.
        self.had_forms = fallback_at_first
        self.diagnostics = Diagnostics()
        self.automatic = AutomaticDynamic(dynamic)
        self._last: CaptureEntry | None = None
        self._refused: list[Any] = []
        self._failures: list[tuple[Modes, bool, str]] = []
        self._busy: int | None = None
        # Threads that run a `forward` that the model's user has set.
        self._running: set[int] = set()
        self._lock = lock or reset_at_fork(threading.RLock())
        self._inherited = False
        register_after_fork(self)
        self._makeup = Makeup(model)

    @property
    def options(self) -> dict[str, Any]:
        """What forms of another model are made with to be made alike."""
        return {
            "recipe": self.recipe,
            "dynamic_shapes": self.dynamic_shapes,
            "dynamic": self.automatic.dynamic,
            "recompile_limit": self.recompile_limit,
            "cuda_graphs": self.cuda_graphs,
            "check_capture": self.check_capture,
        }

    def portable(self) -> list[tuple[Modes, GraphModule]]:
        """Captures that hold in another process, where classes and functions are what they were at first."""
        modes = self.modes()
        if modes is None or not self._makeup.is_original(modes[0]):
            return []
        return [(f.modes, f.program) for f in self.made if self._makeup.is_original(f.modes[0])]

    def adopt(self, programs: list[tuple[Modes, GraphModule]]) -> None:
        """Take graphs that were made already, each with the modes it was captured in."""
        self.made = [
            CaptureEntry(modes, program, _with_casts_made(program.forward, modes))
            for modes, program in programs
        ]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by a capture that is for it, made now if need be."""
        if (torch.compiler.is_compiling() or is_watched()) and not self.captured_elsewhere():
            return self.run_model(args, kwargs)
        last = self._last
        # A GPU can begin with the call while it is looked whether the model is what it was.
        end = last.begin(args, kwargs) if last is not None else None
        modes: Modes | None = None
        try:
            modes = self.modes()
        finally:
            # A model of other parts has no last form any more.
            fits = last is not None and last is self._last and modes == last.modes
            made = end(fits) if end is not None else None
        if modes is None:
            return self.with_stand_ins(args, kwargs)
        if last is not None and fits:
            if end is not None:
                return made
            try:
                return last.run(*args, **kwargs)
            except CallMismatch:  # raised before anything ran
                pass
        return self._called(modes, args, kwargs)

    def with_stand_ins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call while other tensors stand for the parameters of the model, as `functional_call` has it."""
        return self.run_model(args, kwargs)

    def run_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward."""
        if instance_forward(self.model) is None:
            return own_forward(self.model)(*args, **kwargs)
        thread = threading.get_ident()
        if thread in self._running or thread == self._busy:
            raise InvalidArgument(
                f"`forward` of the {type(self.model).__name__} was replaced by a function that calls the compiled model, "
                f"so that each would call the other without end. Assign `compiled.forward` itself, or call the compiled "
                f"model elsewhere."
            )
        self._running.add(thread)
        try:
            return own_forward(self.model)(*args, **kwargs)
        finally:
            self._running.discard(thread)

    def captured_elsewhere(self) -> bool:
        """Whether it is another thread's capture that is being noticed; it is over then.

        While a model is exported its parameters are fake ones, and torch says to every thread that it is compiling.
        """
        if self._busy is None or self._busy == threading.get_ident():
            return False
        with self._lock:
            return True

    def modes(self) -> Modes | None:
        """What tells captures of the model as it is from each other; None while its parameters are none.

        Captures of a model of other parts are forgotten.
        """
        found = self._makeup.settings()
        if found is None:
            with self._lock:
                # Another thread's capture may have been under way.
                found = self._makeup.settings()
                if found is None:
                    if self._makeup.has_stand_ins():
                        return None
                    self.had_forms |= bool(self.made)
                    self.made.clear()
                    self._refused.clear()
                    self._failures.clear()
                    self._last = None
                    self._makeup = Makeup(self.model)
                    found = self._makeup.settings()
                    assert found is not None
        return (found, autocasting())

    def after_fork(self) -> None:
        """Run the model's own forward from now on: this is a child, and captures are the parent's."""
        self._inherited, self._last, self._busy = True, None, None
        self._running.clear()

    def _called(self, modes: Modes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inherited:
            return self.run_model(args, kwargs)
        tried, mismatch = 0, ""
        while True:
            forms = list(self.made)
            for form in forms[tried:]:
                if form.modes != modes:
                    continue
                try:
                    made = form.run(*args, **kwargs)
                except CallMismatch as error:
                    mismatch = str(error)
                    continue
                self._last = form
                return made
            tried = len(forms)
            with self._lock:
                if len(self.made) != tried:  # another thread may have met the same call first
                    continue
                form = refused = None
                way = (modes, _seen((args, kwargs)))
                try:
                    if way not in self._refused and not self._fails_alike(modes):
                        form = self.specialise(args, kwargs, mismatch or self._other_modes(modes))
                except CaptureError as error:
                    if not (tried or self.had_forms) or self.recipe.strict:
                        raise
                    refused = error
            break
        if form is not None:
            try:
                return form.run(*args, **kwargs)
            except CallMismatch:  # it does not take what it was captured with, and another would not either
                self._refused.append(way)
        self.captured_elsewhere()
        # Where the call cannot be made at all, the model's own error tells.
        made = self.run_model(args, kwargs)
        if refused is not None:
            self._refused.append(way)
            self._failures.append((modes, torch.is_grad_enabled(), str(refused)))
            self.report_fallback(refused)
        return made

    def _fails_alike(self, modes: Modes) -> bool:
        """Whether captures in these modes failed for inputs of several kinds for one reason: other inputs do not cure it."""
        reasons = [f[2] for f in self._failures if f[:2] == (modes, torch.is_grad_enabled())]
        return len(set(reasons)) < len(reasons)

    def report_fallback(self, error: CaptureError) -> None:
        """Report that calls run the model as it is, for they cannot be captured."""
        self.diagnostics.report(
            "fallback",
            f"a call runs the model as it is, for it cannot be captured: {error}\n"
            f'  torch.compile(model, backend="dovetail") takes the pieces between what cannot be captured; '
            f'on_error="raise" raises this.',
        )

    def _other_modes(self, modes: Modes) -> str:
        """Why no capture so far is for the modes of a call, in words."""
        if not self.made:
            return ""
        if any(form.modes[0] == modes[0] for form in self.made):
            return "autocast is another one than in earlier calls"
        if all(form.program.training is not self.model.training for form in self.made):
            now, was = ("train", "eval") if self.model.training else ("eval", "train")
            return f"the model is in {now} mode, and was in {was} mode"
        return "the train or eval mode, an attribute or the code of a module is another one than in earlier calls"

    def specialise(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> CaptureEntry | None:
        """Capture and lower for calls like this one; None once there are as many as there may be.

        None, too, while hooks are registered for all modules, which a graph has none of. `cause` is why earlier
        captures are not for such calls.
        """
        if self._inherited or has_hooks_on_all_modules():
            return None
        with self._lock:
            limit = compilation_limit(self.recompile_limit)
            if len(self.made) + len(self._refused) >= limit:
                self.diagnostics.report(
                    "limit",
                    f"the recompile limit of {limit} is reached: calls that none of the captures so far is for run the model "
                    f"as it is. Mark what varies (dynamic=True, torch._dynamo.mark_dynamic or dynamic_shapes), pass numbers as "
                    f"tensors, or raise `recompile_limit`, here or as dovetail.config.recompile_limit.",
                )
                return None
            with nothing_noted():
                try:
                    modes, graph = self.captured(args, kwargs, cause)
                except CaptureMismatch as error:
                    if self.recipe.strict:
                        raise
                    self._refused.append((self.modes(), _seen((args, dict(kwargs or {})))))
                    self.diagnostics.report("fallback", f"calls run the model as it is: {error}")
                    return None
                with autocast_off():
                    program = self.recipe(graph)
                    run = self._run(program, (args, kwargs))
            form = self._last = CaptureEntry(modes, program, _with_casts_made(run, modes))
            self.made.append(form)
            return form

    def captured(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[Modes, GraphModule]:
        """A capture for calls like this one, with the modes it is for."""
        named = dict(kwargs or {})
        with self._lock:
            self.modes()  # forgets captures of what the model was
            # A thread that traces another model must not wait for this one, which waits for it.
            with CAPTURING:
                self._busy = threading.get_ident()
                try:
                    with _fresh_casts(), marks_kept((args, named)):
                        graph = self._traced(args, named, cause)
                finally:
                    self._busy = None
            # Afterwards: a model may note something on itself the first time it runs.
            return self.modes() or ((), ()), graph

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str) -> GraphModule:
        """The captured graph, with the sizes open that differ between calls, if it can be captured so."""
        model = without_hooks(self.model)
        check = self.check_capture and not self.made
        if self.dynamic_shapes is not None:
            graph = capture(model, args, kwargs, dynamic_shapes=self.dynamic_shapes, check_capture=check)
            self._report_recompilation(cause)
            return graph
        cache_pytrees.register_caches()
        dims = self.automatic.observe(model.forward, args, kwargs)
        failure: CaptureError | None = None
        if dims:
            shapes = dims.as_dynamic_shapes(model.forward, args, kwargs)
            try:
                graph = capture(model, args, kwargs, dynamic_shapes=shapes, check_capture=check)
                self._report_recompilation(cause, dims)
                return graph
            except CaptureMismatch:
                raise
            except CaptureError as error:
                failure = error
        graph = capture(model, args, kwargs, check_capture=check)
        if failure is None:
            self._report_recompilation(cause, dims)
            return graph
        self.automatic.keep_static(args, kwargs)
        self._report_recompilation(cause)
        if self.made:
            self.diagnostics.report(
                "recompiled",
                f"sizes that vary are captured one by one, for they cannot be left open: {failure}",
            )
        return graph

    def _report_recompilation(self, cause: str, dims: Dimensions | None = None) -> None:
        if not self.made:
            return
        again = "the model is captured and compiled again"
        if dims is not None and dims.changes:
            message = (
                f"{again}: {', '.join(dims.changes)}. What changed is dynamic. Mark it beforehand (dynamic=True, "
                f"torch._dynamo.mark_dynamic or dynamic_shapes) to compile once; dynamic=False compiles for each size."
            )
        elif dims is not None and dims.specialized:
            message = f"{again}: {', '.join(dims.specialized)}, and sizes 0 and 1 are always specialized."
        else:
            # Without what to do about it: it is being done.
            stated = re.split(r"\. (?=[A-Z])", cause)[0] or "a call unlike earlier ones"
            message = f"{again}: {stated}"
        self.diagnostics.report("recompiled", message)

    def _run(self, program: GraphModule, example: Any) -> Callable[..., Any]:
        """What a call of a form runs: its graph, recorded on a GPU where nothing prevents it."""
        if self.cuda_graphs is False:
            return program.forward
        reason = why_not_recorded(program, pytree.tree_leaves(example))
        if reason is None:
            return Replay(program.forward, program)
        if self.cuda_graphs is True:
            raise InvalidArgument(f"cuda_graphs=True, but {reason}.")
        lowering = lowering_of(program)
        if lowering is not None and reason != NO_GPU:
            lowering.note("", "cuda_graphs", "declined", reason)
        return program.forward


def _seen(given: Any) -> tuple[Any, ...]:
    """What tells ways of calling from each other: structure, numbers, and what is to be seen of tensors."""
    leaves, spec = pytree.tree_flatten(given)
    grad = torch.is_grad_enabled()
    described = [
        (
            leaf.shape,
            leaf.stride() if leaf.layout is torch.strided else None,
            leaf.dtype,
            leaf.device,
            grad and leaf.requires_grad,
        )
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else type(leaf)
        for leaf in leaves
    ]
    return spec, grad, [(type(value), value) for value in described]


@contextmanager
def _fresh_casts() -> Generator[None]:
    """Let autocast keep no casts of weights: those made of fake ones must not be met later."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


def _with_casts_made(run: Callable[..., Any], modes: Modes) -> Callable[..., Any]:
    """What a form runs: where it was captured under autocast the casts are in its graph, and none are to be added."""
    if not modes[1]:
        return run

    def cast_already(*args: Any, **kwargs: Any) -> Any:
        with autocast_off():
            return run(*args, **kwargs)

    return cast_already


def without_hooks(model: nn.Module) -> nn.Module:
    """The same model, with none of its own forward hooks: those run around each call, not inside the graph."""
    # Classes that FSDP makes build a module anew in their `__new__`.
    allocate: Any = GraphModule.__new__ if isinstance(model, GraphModule) else object.__new__
    made: nn.Module = allocate(type(model))
    made.__dict__.update(model.__dict__)
    made.__dict__.update({name: OrderedDict() for name in HOOKS if name in model.__dict__})
    if is_overridden(model):
        del made.__dict__["forward"]
        if (forward := instance_forward(model)) is not None:
            made.__dict__["forward"] = forward
    return made
