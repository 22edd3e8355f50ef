"""One capture of a model: the guard key it holds for, its lowered graph, and what runs the calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.frontend.trace_dependencies import TraceRecord
from dovetail.ir.graph_module import Program, attribute
from dovetail.ir.weight_fetch import TensorGuard
from dovetail.lowering.guards import disable_autocast
from dovetail.runtime.cuda_graph_replay import CudaGraphReplay
from dovetail.runtime.presets import ALL_CALLS, CompiledGraph, Execution, GradientGuard

GuardKey = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class CaptureOrigin:
    """How a graph was captured: what its trace depended on and the context it was in, or why the former is not known.

    `captured` returns the graph as it was captured, without weights; None if it is not in the disk cache any more.
    """

    record: TraceRecord | None = None
    reason: str = ""
    context: list[Any] = field(default_factory=list[Any])
    captured: Callable[[], bytes | None] = lambda: None


_UNKNOWN = CaptureOrigin()


@dataclass(frozen=True, eq=False)
class CaptureEntry:
    """One capture of the model: the key of the module guard at that time, the lowered graph, and what runs calls.

    `cuda_graphs` is what a plan has decided about recording its calls, `gradients` for which calls its passes are.
    """

    key: GuardKey
    program: GraphModule
    run: Callable[..., Any]
    execution: Execution = "regions"
    origin: CaptureOrigin = _UNKNOWN
    cuda_graphs: bool | None = None
    gradients: GradientGuard = ALL_CALLS

    def covers_gradients(self) -> bool:
        """Return whether the graph is for calls that record gradients as this one does."""
        if not self.gradients:
            return True
        if not torch.is_grad_enabled():
            return not self.gradients.attached
        detached, attached = self._guarded_weights
        if any(weight.requires_grad for weight in detached):
            return False
        return not attached or any(weight.requires_grad for weight in attached)

    @functools.cached_property
    def _guarded_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights of the gradient guard; `requires_grad` may be set at any time."""
        names = self.gradients.detached, self.gradients.attached
        detached, attached = ([cast("Tensor", attribute(self.program, n)) for n in each] for each in names)
        return detached, attached

    def trust_weights(self, guard: TensorGuard | None) -> None:
        """Let the graph not compare, in the next call on this thread, what a guard that was checked just now covers."""
        if self._fetches_weights:
            cast("Program", self.program).trust_weights(guard)

    @functools.cached_property
    def _fetches_weights(self) -> bool:
        """Whether every call runs the graph: a replay and the model's own forward do not fetch its weights."""
        is_graph = self.execution in ("regions", "graph") and not isinstance(self.run, CudaGraphReplay)
        return is_graph and isinstance(self.program, Program)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[bool], Any] | None:
        """Start the call on a GPU while the guards are checked; None where that cannot be."""
        return self.run.begin(args, kwargs) if isinstance(self.run, CudaGraphReplay) else None


def without_autocast(run: Callable[..., Any], key: GuardKey) -> Callable[..., Any]:
    """Return a callable that runs with autocast disabled if the graph was captured with it and has the casts."""
    if not key[1]:
        return run

    def run_without_autocast(*args: Any, **kwargs: Any) -> Any:
        with disable_autocast():
            return run(*args, **kwargs)

    return run_without_autocast


@dataclass(frozen=True, eq=False)
class BundledCapture:
    """A lowered graph of another process, and how it was captured there."""

    compiled: CompiledGraph
    origin: CaptureOrigin


class CaptureSource(Protocol):
    """Graphs that were captured and lowered by another process."""

    path: Any

    def matching(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reasons: list[str],
        *,
        check_capture: bool,
    ) -> Iterator[BundledCapture]:
        """Yield those, not yielded before, that hold for the model as it is now; append why others do not."""
        ...
