"""Replay of a whole lowered graph as one CUDA graph: one launch in place of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from dovetail.backends.cuda_graphs import record_graph
from dovetail.ir.effects import summarize_body
from dovetail.ir.graph_module import Program
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.weight_fetch import mutation_stamp
from dovetail.lowering.failures import one_line
from dovetail.lowering.guards import Unguardable, specialization_of

NO_GPU = "nothing of it is on a CUDA device"


def why_not_recorded(program: GraphModule, example: Sequence[Any]) -> str | None:
    """Return why calls of a graph cannot be recorded, as far as the graph and example inputs show; None if they can."""
    tensors = [v for v in example if isinstance(v, Tensor)]
    held = [*program.parameters(), *program.buffers()]
    devices = {t.device for t in (*tensors, *held) if t.numel()}
    if not any(d.type == "cuda" for d in devices):
        return NO_GPU
    if len(devices) > 1:
        return f"it has tensors on {', '.join(sorted(map(str, devices)))}"
    effects = summarize_body(program)
    if effects.writes:
        return "it writes its inputs"
    if effects.state_written:
        return "it writes parameters or buffers"
    if effects.host_effect:
        return f"it has an effect on the host ({effects.host_effect})"
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            if any(isinstance(n, torch.SymInt) for n in value.shape):
                return f"the sizes of '{node.name}' may vary"
            if value.device.type == "cpu" and node.op not in ("placeholder", "get_attr"):
                return f"'{node.name}' is computed on the CPU"
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"'{node.name}' is a number read from a tensor"
    return None


class CudaGraphReplay:
    """A callable like `run`, recorded in its first call without gradients and replayed in calls with equal specs.

    Results are copies unless `reuse_outputs` is set: then the next call overwrites them. The recording reads parameters
    where they are; if one was moved, it is recorded again. If code has copies of some, it is recorded again when one
    was written.
    """

    def __init__(self, run: Callable[..., Any], program: GraphModule, *, reuse_outputs: bool = False) -> None:
        self.run, self.program, self.reuse_outputs = run, program, reuse_outputs
        self.weights = [*program.parameters(), *program.buffers()]
        self._runtime_weights = program.runtime_weights if isinstance(program, Program) else None
        self.problem: str | None = None
        self._is_random = bool(summarize_body(program).random)
        self._lock = reset_at_fork(threading.Lock())
        self._graph: Any = None
        self._spec: Any = None
        self._specialization: Any = None
        self._static_inputs: list[Any] = []
        self._outputs: tuple[list[Any], Any] = ([], None)
        self._recorded_state: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self.problem is not None or self.needs_gradients(leaves):
            return self.run(*args, **kwargs)
        with self._lock:
            if not self._guard(leaves, spec):
                # The call comes first: it raises for inputs that the graph was not captured for.
                result = self.run(*args, **kwargs)
                if self._graph is None or self._weights_changed():
                    self._record(leaves, spec)
                return result
            self._launch(leaves)
            return self._results()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[bool], Any] | None:
        """Start a call before it is known whether its results are used; return None where that cannot be.

        The returned function must be called once: with True it returns the results, with False it discards them. A
        replay writes its own results only, and its inputs are kept alive; one that draws random numbers is not begun.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._is_random or self.problem is not None or self.needs_gradients(leaves):
            return None
        self._lock.acquire()
        try:
            if self._guard(leaves, spec):
                self._launch(leaves)
                return self._end
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()
        return None

    def _end(self, is_used: bool) -> Any:
        try:
            return self._results() if is_used else None
        finally:
            self._lock.release()

    def _launch(self, leaves: list[Any]) -> None:
        for static, value in zip(self._static_inputs, leaves, strict=True):
            if isinstance(value, Tensor):
                static.copy_(value)
        self._graph.replay()

    def _results(self) -> Any:
        flat, out = self._outputs
        if not self.reuse_outputs:
            flat = [v.clone() if isinstance(v, Tensor) else v for v in flat]
        return pytree.tree_unflatten(flat, out)

    def needs_gradients(self, leaves: Sequence[Any]) -> bool:
        """Return whether autograd records the call: a replay has no autograd graph."""
        tensors = (t for t in (*leaves, *self.weights) if isinstance(t, Tensor))
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _guard(self, leaves: list[Any], spec: Any) -> bool:
        if (
            self._graph is None
            or spec != self._spec
            or torch.is_autocast_enabled("cuda")
            or self._weights_changed()
        ):
            return False
        try:
            return specialization_of(leaves).operands == self._specialization
        except Unguardable:
            return False

    def _weights_changed(self) -> bool:
        return self._weight_state() != self._recorded_state

    def _weight_state(self) -> Any:
        weights = self._runtime_weights
        if weights is not None:
            # A replay does not run the graph's own check of the weights.
            weights(self.program)
            if weights.has_copies:
                return weights.contents.generation, mutation_stamp(self.weights)
        return [t.data_ptr() for t in self.weights]

    def _record(self, leaves: list[Any], spec: Any) -> None:
        self._graph = None
        if torch.is_autocast_enabled("cuda") or any(
            isinstance(v, Tensor) and v.device.type != "cuda" for v in leaves
        ):
            return
        try:
            specialization = specialization_of(leaves).operands
            static = [v.detach().clone() if isinstance(v, Tensor) else v for v in leaves]
            args, kwargs = pytree.tree_unflatten(static, spec)
            graph, result = record_graph(lambda: self.run(*args, **kwargs), torch.cuda.Stream())
        except Exception as error:
            self.problem = one_line(error)
            torch.cuda.synchronize()
            return
        self._spec, self._specialization, self._static_inputs = spec, specialization, static
        self._outputs = pytree.tree_flatten(result)
        self._recorded_state = self._weight_state()
        self._graph = graph
