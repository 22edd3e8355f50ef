"""The captures of a model, and the guards that choose one for a call.

A call of a compiled model passes three guards in a row, each of which checks what the next ones rely on:

1. The module guard (`module_guard.ModuleGuard`): the model has the same modules, tensors, code, hooks and baked-in
   numbers as when it was captured, and autocast is the same. It compares dict versions, and looks closer only where
   one has changed. A model with other parts drops all captures.
2. The input guard (`frontend.input_guards`), at the head of the captured graph's `forward`: structure, dtypes, devices,
   sizes, strides, constants and aliasing of the inputs. It raises CallMismatch before anything runs; the next capture
   is tried, and then a new one is made. Nothing checks the inputs before, so that no input is checked twice.
3. The specialization guard (`lowering.guards`), once per lowered region: operands, gradient flags and grad mode, for
   regions may see sizes that the inputs do not determine.

The graph then fetches its weights (`ir.weight_fetch`): those that 1 has checked are not compared again, and regions
compare them only if the fetch gives another tuple than before. Writes to them are followed by version counters and
contents (`ir.weight_guard`). A recorded CUDA graph (`cuda_graph_replay`) replaces 2 and 3 by one
comparison with the call that it recorded, and 1 is checked while the GPU is busy. Where a plan has the model's own forward
run a capture's calls (`own_forward`), 1 and 2 are checked before it.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import (
    BundleMismatch,
    CallMismatch,
    CaptureError,
    CaptureMismatch,
    InvalidArgument,
    PlanMismatch,
)
from dovetail.frontend import cache_pytrees
from dovetail.frontend.capture import CAPTURING
from dovetail.ir.process_state import register_after_fork, reset_at_fork
from dovetail.ir.profiler_ranges import is_traced
from dovetail.lowering.cache import open_cache
from dovetail.lowering.failures import Diagnostics
from dovetail.lowering.guards import active_autocast, disable_autocast, suspend_saved_tensor_hooks
from dovetail.lowering.lowered_state import lowered_state_of
from dovetail.lowering.options import recompile_limit_of
from dovetail.runtime.automatic_dynamic import AutomaticDynamic, Dimensions, preserve_dynamic_marks
from dovetail.runtime.capture_entry import CaptureEntry, CaptureSource, GuardKey, without_autocast
from dovetail.runtime.cuda_graph_replay import NO_GPU, CudaGraphReplay, why_not_recorded
from dovetail.runtime.module_guard import (
    ModuleGuard,
    has_global_hooks,
    instance_forward,
    own_forward,
    without_hooks,
)
from dovetail.runtime.own_forward import GuardedForward, TorchCompiledForward, covers
from dovetail.runtime.presets import CompiledGraph
from dovetail.runtime.stored_captures import StoredCaptures

CudaGraphs = Literal["auto"] | bool


class CompilePipeline(Protocol):
    """What is done to every captured graph of a model."""

    def __call__(self, gm: GraphModule) -> CompiledGraph: ...

    @property
    def strict(self) -> bool:
        """Whether a call that cannot be captured is an error although others could be."""
        ...


class CaptureCache:
    """The captures of a model so far, and how further ones are made.

    Inputs that no capture covers, another train or eval mode, autocast, another number or string as an attribute of a
    module, and another class or function of one capture again, up to the recompile limit; then the model's own forward
    runs. It also runs while another tracer is active, for a call that cannot be captured after others could, with
    `fallback_at_first` also for the first one, and in a forked child process. Sizes that differ from those of earlier
    calls are symbolic in the next capture, subject to `dynamic`. Hooks of the model itself are run by the caller.
    """

    def __init__(
        self,
        model: nn.Module,
        preset: CompilePipeline,
        *,
        dynamic_shapes: Any = None,
        dynamic: bool | None = None,
        recompile_limit: int | None = None,
        cuda_graphs: CudaGraphs = "auto",
        check_capture: bool = False,
        fallback_at_first: bool = False,
        cache: bool | str | Path = False,
        bundle: CaptureSource | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.model, self.preset, self.cache = model, preset, cache
        self.stored = StoredCaptures(open_cache(cache))
        self.bundle = bundle
        self.dynamic_shapes, self.recompile_limit = dynamic_shapes, recompile_limit
        self.cuda_graphs: CudaGraphs = cuda_graphs
        self.check_capture = check_capture
        self.captures: list[CaptureEntry] = []
        # Whether a call that cannot be captured runs the model: for the first one it may be the model's fault.
        self.has_captured = fallback_at_first
        self.diagnostics = Diagnostics()
        self.automatic = AutomaticDynamic(dynamic)
        self._last: CaptureEntry | None = None
        self._refused: list[Any] = []
        self._raising: deque[Any] = deque(maxlen=64)
        self._failures: list[tuple[GuardKey, bool, str]] = []
        self._capturing_thread: int | None = None
        # Threads that run a `forward` that the user has set.
        self._running: set[int] = set()
        self._lock = lock or reset_at_fork(threading.RLock())
        self._is_forked = False
        register_after_fork(self)
        self._guard = ModuleGuard(model)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for a cache of another model that captures alike."""
        return {
            "preset": self.preset,
            "dynamic_shapes": self.dynamic_shapes,
            "dynamic": self.automatic.dynamic,
            "recompile_limit": self.recompile_limit,
            "cuda_graphs": self.cuda_graphs,
            "check_capture": self.check_capture,
            "cache": self.cache,
        }

    def portable(self) -> list[tuple[GuardKey, CompiledGraph]]:
        """Return the captures that hold in another process, where classes and functions are the original ones."""
        key = self.guard_key()
        if key is None or not self._guard.is_original(key[0]):
            return []
        kept = [entry for entry in self.captures if self._guard.is_original(entry.key[0])]
        return [(e.key, CompiledGraph(e.program, e.execution, gradients=e.gradients)) for e in kept]

    def adopt(self, captures: list[tuple[GuardKey, CompiledGraph]]) -> None:
        """Take over compiled graphs, each with the guard key it was captured with."""
        self.captures = [self._entry(key, compiled) for key, compiled in captures]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with the capture that covers it; capture now if no capture does."""
        if (torch.compiler.is_compiling() or is_traced()) and not self.captured_elsewhere():
            return self.run_model(args, kwargs)
        last = self._last
        # A GPU can begin with the call while the module guard is checked.
        end = last.begin(args, kwargs) if last is not None else None
        key: GuardKey | None = None
        try:
            key = self.guard_key()
        finally:
            # A model with other parts has dropped its captures.
            is_covered = (
                last is not None and last is self._last and key == last.key and last.covers_gradients()
            )
            replayed = end(is_covered) if end is not None else None
        if key is None:
            return self.call_with_swapped_parameters(args, kwargs)
        if last is not None and is_covered:
            if end is not None:
                return replayed
            last.trust_weights(self._guard.tensor_guard)
            try:
                return last.run(*args, **kwargs)
            except CallMismatch:  # raised before anything ran
                last.trust_weights(None)
            except BaseException:
                last.trust_weights(None)
                raise
        return self._find_or_capture(key, args, kwargs)

    def call_with_swapped_parameters(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call while other tensors replace the parameters of the model, as in `functional_call`."""
        return self.run_model(args, kwargs)

    def run_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward."""
        if instance_forward(self.model) is None:
            return own_forward(self.model)(*args, **kwargs)
        thread = threading.get_ident()
        if thread in self._running or thread == self._capturing_thread:
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
        """Return whether another thread is capturing the model, after waiting for the end of that.

        While a model is exported its parameters are fake, and `is_compiling` is true on every thread.
        """
        if self._capturing_thread is None or self._capturing_thread == threading.get_ident():
            return False
        with self._lock:
            return True

    def guard_key(self) -> GuardKey | None:
        """Return the key of the model's state and of autocast; None while `functional_call` has swapped parameters.

        If the model has other parts than when it was captured, all captures are dropped.
        """
        key = self._guard.key()
        if key is None:
            with self._lock:
                # Another thread's capture may have been under way.
                key = self._guard.key()
                if key is None:
                    if self._guard.has_swapped_parameters():
                        return None
                    self.has_captured |= bool(self.captures)
                    self.captures.clear()
                    self._refused.clear()
                    self._raising.clear()
                    self._failures.clear()
                    self._last = None
                    self._guard = ModuleGuard(self.model)
                    key = self._guard.key()
                    assert key is not None
        return (key, active_autocast())

    def after_fork(self) -> None:
        """Run the model's own forward from now on: captures belong to the parent process."""
        self._is_forked, self._last, self._capturing_thread = True, None, None
        self._running.clear()

    def _find_or_capture(self, key: GuardKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_forked:
            return self.run_model(args, kwargs)
        tried, mismatch = 0, ""
        while True:
            captures = list(self.captures)
            for entry in captures[tried:]:
                if entry.key != key:
                    continue
                if not entry.covers_gradients():
                    mismatch = "passes of the plan differ for calls with gradients and without"
                    continue
                try:
                    result = entry.run(*args, **kwargs)
                except CallMismatch as error:
                    mismatch = str(error)
                    continue
                self._last = entry
                return result
            tried = len(captures)
            with self._lock:
                if len(self.captures) != tried:  # another thread may have met the same call first
                    continue
                if self._adopt_bundled(args, kwargs):
                    continue
                entry = refused = None
                signature = (key, _call_signature((args, kwargs)))
                try:
                    is_refused = signature in self._refused or signature in self._raising
                    if not is_refused and not self._fails_alike(key):
                        entry = self.specialize(args, kwargs, mismatch or self._key_difference(key))
                except CaptureError as error:
                    if not (tried or self.has_captured) or self.preset.strict:
                        raise
                    refused = error
            break
        if entry is not None:
            try:
                return entry.run(*args, **kwargs)
            except CallMismatch:  # it rejects what it was captured with, and another would too
                self._refused.append(signature)
            except Exception:
                self._discard(entry, signature)
                raise
        self.captured_elsewhere()
        # If the call is invalid, the model's own error is raised.
        result = self.run_model(args, kwargs)
        if signature in self._raising:
            # What made it raise is gone, such as a lack of memory: it is captured the next time.
            self._raising.remove(signature)
        if refused is not None:
            self._refused.append(signature)
            self._failures.append((key, torch.is_grad_enabled(), str(refused)))
            self.report_fallback(refused)
        return result

    def _discard(self, entry: CaptureEntry, signature: Any) -> None:
        """Drop a capture whose first call raised: the call is invalid, and must not use up the recompile limit.

        Calls like it run the model, whose own error is raised.
        """
        with self._lock:
            self.captures[:] = [each for each in self.captures if each is not entry]
            if self._last is entry:
                self._last = None
            self._raising.append(signature)

    def _fails_alike(self, key: GuardKey) -> bool:
        """Return whether captures with this key failed twice for one reason, so that other inputs would fail too."""
        reasons = [f[2] for f in self._failures if f[:2] == (key, torch.is_grad_enabled())]
        return len(set(reasons)) < len(reasons)

    def report_fallback(self, error: CaptureError) -> None:
        """Report that a call runs the model as it is because it cannot be captured."""
        self.diagnostics.report(
            "fallback",
            f"a call runs the model as it is, for it cannot be captured: {error}\n"
            f'  torch.compile(model, backend="dovetail") takes the pieces between what cannot be captured; '
            f'on_error="raise" raises this.',
        )

    def _key_difference(self, key: GuardKey) -> str:
        """Return why no capture so far has the key of a call."""
        if not self.captures:
            return ""
        if any(entry.key[0] == key[0] for entry in self.captures):
            return "autocast differs from earlier calls"
        if all(entry.program.training is not self.model.training for entry in self.captures):
            now, was = ("train", "eval") if self.model.training else ("eval", "train")
            return f"the model is in {now} mode, and was in {was} mode"
        return "the train or eval mode, an attribute or the code of a module differs from earlier calls"

    def specialize(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> CaptureEntry | None:
        """Capture and lower for calls like this one; return None once the recompile limit is reached.

        None, too, while global module hooks are registered, which a graph does not run. `cause` is why earlier
        captures do not cover such calls.
        """
        if self._is_forked or has_global_hooks():
            return None
        with self._lock:
            limit = recompile_limit_of(self.recompile_limit)
            if len(self.captures) + len(self._refused) >= limit:
                self.diagnostics.report(
                    "limit",
                    f"the recompile limit of {limit} is reached: calls that no capture so far covers run the model "
                    f"as it is. Mark what varies (dynamic=True, torch._dynamo.mark_dynamic or dynamic_shapes), pass numbers as "
                    f"tensors, or raise `recompile_limit`, here or as dovetail.config.recompile_limit.",
                )
                return None
            with suspend_saved_tensor_hooks():
                try:
                    key, graph = self.capture(args, kwargs, cause)
                except CaptureMismatch as error:
                    if self.preset.strict:
                        raise
                    self._refused.append((self.guard_key(), _call_signature((args, dict(kwargs or {})))))
                    self.diagnostics.report("fallback", f"calls run the model as it is: {error}")
                    return None
            entry = self.install(key, graph, args, kwargs)
            recorded = replace(entry, origin=self.stored.origin)
            self.captures[self.captures.index(entry)] = self._last = recorded
            return recorded

    def _adopt_bundled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take over captures of the bundle that hold for the model as it is now; return whether there were any."""
        if self.bundle is None or self._is_forked or has_global_hooks():
            return False
        key, reasons, before = self.guard_key(), list[str](), len(self.captures)
        if key is None:
            return False
        for bundled in self.bundle.matching(
            without_hooks(self.model), args, dict(kwargs), reasons, check_capture=self.check_capture
        ):
            run = self._run(bundled.compiled, (args, kwargs))
            entry = self._entry(key, bundled.compiled, run)
            self.captures.append(replace(entry, origin=bundled.origin))
        if not self.captures and reasons:
            mismatch = BundleMismatch(self.bundle.path, reasons)
            self.bundle = None
            if self.preset.strict:
                raise mismatch
            self.diagnostics.report("stale", f"the model is captured again: {mismatch}")
        return len(self.captures) > before

    def adopt_bundle(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureEntry | None:
        """Take over captures of the bundle, and return the one that covers a call; None without any."""
        with self._lock:
            self._adopt_bundled(args, kwargs)
            for entry in self.captures:
                if entry.covers_gradients() and covers(entry.program, args, kwargs):
                    self._last = entry
                    return entry
        return None

    def install(
        self,
        key: GuardKey,
        graph: GraphModule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> CaptureEntry:
        """Compile a graph that was captured for calls like this one, with the guard key it holds for."""
        with self._lock, suspend_saved_tensor_hooks():
            with disable_autocast():
                compiled = self.preset(graph)
                run = self._run(compiled, (args, kwargs))
            entry = self._entry(key, compiled, run)
            if isinstance(entry.run, TorchCompiledForward):
                entry.run.warm(self.model, args, kwargs or {})
            for event in compiled.diagnostics:
                self.diagnostics.report(event.kind, event.message)
            self._last = entry
            self.captures.append(entry)
            return entry

    def _entry(
        self, key: GuardKey, compiled: CompiledGraph, run: Callable[..., Any] | None = None
    ) -> CaptureEntry:
        """Return a capture whose calls `run` runs, by default the graph, unless the execution is the model's forward."""
        program, execution = compiled.program, compiled.execution
        if execution == "model":
            called = GuardedForward(program, self.run_model)
        elif execution == "torch.compile":
            called = TorchCompiledForward(
                program,
                self.run_model,
                own_forward(self.model),
                lambda message: self.diagnostics.report("failed", message),
                self.preset.strict,
            )
        else:
            called = without_autocast(run or program.forward, key)
        return CaptureEntry(
            key, program, called, execution, cuda_graphs=compiled.cuda_graphs, gradients=compiled.gradients
        )

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[GuardKey, GraphModule]:
        """Return a captured graph for calls like this one, with the guard key it holds for."""
        named = dict(kwargs or {})
        with self._lock:
            self.guard_key()  # drops captures of what the model was
            # A thread that traces another model must not wait for this one, which waits for it.
            with CAPTURING:
                self._capturing_thread = threading.get_ident()
                try:
                    with _autocast_cache_disabled(), preserve_dynamic_marks((args, named)):
                        graph = self._capture_graph(args, named, cause)
                finally:
                    self._capturing_thread = None
            # Afterwards: a model may set attributes of itself the first time it runs.
            return self.guard_key() or ((), ()), graph

    def _capture_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str) -> GraphModule:
        """Return the captured graph, with sizes that differ between calls symbolic if it can be captured so."""
        model = without_hooks(self.model)
        check = self.check_capture
        if callable(self.dynamic_shapes):
            graph = self._capture_in_range(model, args, kwargs, cause, check)
            if graph is not None:
                return graph
        elif self.dynamic_shapes is not None:
            graph = self._capture_or_read(model, args, kwargs, self.dynamic_shapes, check)
            self._report_recompilation(cause)
            return graph
        cache_pytrees.register_caches()
        dims = self.automatic.observe(model.forward, args, kwargs)
        failure: CaptureError | None = None
        if dims:
            shapes = dims.as_dynamic_shapes(model.forward, args, kwargs)
            try:
                graph = self._capture_or_read(model, args, kwargs, shapes, check)
                self._report_recompilation(cause, dims)
                return graph
            except CaptureMismatch:
                raise
            except CaptureError as error:
                failure = error
        graph = self._capture_or_read(model, args, kwargs, None, check)
        if failure is None:
            self._report_recompilation(cause, dims)
            return graph
        self.automatic.keep_static(args, kwargs)
        self._report_recompilation(cause)
        if self.captures:
            self.diagnostics.report(
                "recompiled",
                f"sizes that vary are captured one by one, for they cannot be symbolic: {failure}",
            )
        return graph

    def _capture_or_read(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, check: bool
    ) -> GraphModule:
        """Return the graph for calls like this one, read from disk if it was captured before."""
        state = self._guard.key()
        return self.stored.capture(
            model, args, kwargs, state=state, dynamic_shapes=shapes, check_capture=check
        )

    def _capture_in_range(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str, check: bool
    ) -> GraphModule | None:
        """Return the graph for the range of sizes that a call is in; None if it is in none, or cannot be symbolic."""
        shapes = self.dynamic_shapes(model.forward, args, kwargs)
        if shapes is None:
            return None
        try:
            graph = self._capture_or_read(model, args, kwargs, shapes, check)
        except CaptureMismatch:
            raise
        except CaptureError as error:
            reason = f"the ranges of sizes in the plan are not used, for these cannot be symbolic: {error}"
            self.diagnostics.report("stale", reason)
            return None
        self._report_recompilation(cause)
        return graph

    def _report_recompilation(self, cause: str, dims: Dimensions | None = None) -> None:
        if not self.captures:
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
            # Without the advice at its end, which is to capture again.
            stated = re.split(r"\. (?=[A-Z])", cause)[0] or "a call unlike earlier ones"
            message = f"{again}: {stated}"
        self.diagnostics.report("recompiled", message)

    def _run(self, compiled: CompiledGraph, example: Any) -> Callable[..., Any] | None:
        """Return what runs the graph of a capture if it is recorded on a GPU; None where something prevents it.

        What a plan has decided holds if the caller leaves it to `compile`.
        """
        program, planned = compiled.program, compiled.cuda_graphs
        if self.cuda_graphs is False or (self.cuda_graphs == "auto" and planned is False):
            return None
        reason: str | None = f"the plan has '{compiled.execution}' run its calls"
        if compiled.execution in ("regions", "graph"):
            reason = why_not_recorded(program, pytree.tree_leaves(example))
        if reason is None:
            return CudaGraphReplay(program.forward, program)
        if self.cuda_graphs is True:
            raise InvalidArgument(f"cuda_graphs=True, but {reason}.")
        if planned is True:
            problem = f"the plan has its calls recorded as a CUDA graph, but {reason}"
            if self.preset.strict:
                raise PlanMismatch([problem])
            self.diagnostics.report("stale", problem)
        state = lowered_state_of(program)
        if state is not None and reason != NO_GPU:
            state.note("", "cuda_graphs", "declined", reason)
        return None


def _call_signature(inputs: Any) -> tuple[Any, ...]:
    """Return the structure, numbers and tensor specs of a call's inputs."""
    leaves, spec = pytree.tree_flatten(inputs)
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
def _autocast_cache_disabled() -> Generator[None]:
    """Disable autocast's cache of casted weights: casts of fake ones must not be used later."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
