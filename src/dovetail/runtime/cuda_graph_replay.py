"""A whole lowered graph recorded as one CUDA graph: one launch in place of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from dovetail.ir.effects import summary
from dovetail.ir.graph_module import Program
from dovetail.ir.process_state import released_by_fork
from dovetail.ir.weight_guard import write_state
from dovetail.lowering.guards import Unguardable, specialization_of

_WARM_UP = 3
NO_GPU = "nothing of it is on a CUDA device"


def why_not_recorded(program: GraphModule, example: Sequence[Any]) -> str | None:
    """Why calls of a graph cannot be recorded, as far as the graph and example inputs tell; None if they can."""
    tensors = [v for v in example if isinstance(v, Tensor)]
    held = [*program.parameters(), *program.buffers()]
    devices = {t.device for t in (*tensors, *held) if t.numel()}
    if not any(d.type == "cuda" for d in devices):
        return NO_GPU
    if len(devices) > 1:
        return f"it has tensors on {', '.join(sorted(map(str, devices)))}"
    told = summary(program)
    if told.writes:
        return "it writes its inputs"
    if told.state_written:
        return "it writes parameters or buffers"
    if told.world:
        return f"it has an effect on the host ({told.world})"
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


class Replay:
    """A callable like `run`, recorded in its first call without gradients and replayed in others like that one.

    Results are copies unless `reuse_outputs` is set: then the next call overwrites them. What is recorded reads
    parameters where they lie; if one was moved, it is recorded again. If code has copies of some, it is recorded again
    when one was written.
    """

    def __init__(self, run: Callable[..., Any], program: GraphModule, *, reuse_outputs: bool = False) -> None:
        self.run, self.program, self.reuse_outputs = run, program, reuse_outputs
        self.held = [*program.parameters(), *program.buffers()]
        self._weights = program.runtime_weights if isinstance(program, Program) else None
        self.problem: str | None = None
        self._draws = bool(summary(program).random)
        self._lock = released_by_fork(threading.Lock())
        self._graph: Any = None
        self._spec: Any = None
        self._situation: Any = None
        self._static: list[Any] = []
        self._made: tuple[list[Any], Any] = ([], None)
        self._places: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self.problem is not None or self.needs_gradients(leaves):
            return self.run(*args, **kwargs)
        with self._lock:
            if not self._fits(leaves, spec):
                # The plain call comes first: it refuses what the graph was not captured for.
                made = self.run(*args, **kwargs)
                if self._graph is None or self._moved():
                    self._record(leaves, spec)
                return made
            self._launch(leaves)
            return self._results()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[bool], Any] | None:
        """Start a call before it is known whether its results are wanted; None where that cannot be.

        What is returned must be called once: it gives the results, or with False throws them away. A replay writes
        nothing but results of its own, and what it reads is held; one that draws random numbers is not begun.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._draws or self.problem is not None or self.needs_gradients(leaves):
            return None
        self._lock.acquire()
        try:
            if self._fits(leaves, spec):
                self._launch(leaves)
                return self._end
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()
        return None

    def _end(self, wanted: bool) -> Any:
        try:
            return self._results() if wanted else None
        finally:
            self._lock.release()

    def _launch(self, leaves: list[Any]) -> None:
        for static, given in zip(self._static, leaves, strict=True):
            if isinstance(given, Tensor):
                static.copy_(given)
        self._graph.replay()

    def _results(self) -> Any:
        flat, out = self._made
        if not self.reuse_outputs:
            flat = [v.clone() if isinstance(v, Tensor) else v for v in flat]
        return pytree.tree_unflatten(flat, out)

    def needs_gradients(self, leaves: Sequence[Any]) -> bool:
        """Whether autograd records the call: what is replayed has no history."""
        tensors = (t for t in (*leaves, *self.held) if isinstance(t, Tensor))
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _fits(self, leaves: list[Any], spec: Any) -> bool:
        if self._graph is None or spec != self._spec or torch.is_autocast_enabled("cuda") or self._moved():
            return False
        try:
            return specialization_of(leaves).operands == self._situation
        except Unguardable:
            return False

    def _moved(self) -> bool:
        return self._held_state() != self._places

    def _held_state(self) -> Any:
        if self._weights is None:
            return [t.data_ptr() for t in self.held]
        # What a replay runs does not look at the weights.
        self._weights(self.program)
        if self._weights.has_copies:
            return self._weights.contents.generation, write_state(self.held)
        return [t.data_ptr() for t in self.held]

    def _record(self, leaves: list[Any], spec: Any) -> None:
        self._graph = None
        if torch.is_autocast_enabled("cuda") or any(
            isinstance(v, Tensor) and v.device.type != "cuda" for v in leaves
        ):
            return
        try:
            situation = specialization_of(leaves).operands
            static = [v.detach().clone() if isinstance(v, Tensor) else v for v in leaves]
            args, kwargs = pytree.tree_unflatten(static, spec)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(stream), torch.random.fork_rng():
                for _ in range(_WARM_UP):
                    self.run(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                made = self.run(*args, **kwargs)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            torch.cuda.synchronize()
            return
        self._spec, self._situation, self._static = spec, situation, static
        self._made = pytree.tree_flatten(made)
        self._places = self._held_state()
        self._graph = graph
