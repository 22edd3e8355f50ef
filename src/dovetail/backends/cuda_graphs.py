"""CUDA graphs around another backend: one launch for all the kernels of a region. Also the recorder of all graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail import torch_compat
from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.nodes import storage_key
from dovetail.ir.process_state import preserve_rng_state, reset_at_fork
from dovetail.lowering.backend_protocol import (
    Answer,
    Backend,
    CallSite,
    Compiled,
    identity,
    resolve,
    why_unusable,
)
from dovetail.lowering.failures import LoweringFailure
from dovetail.lowering.region_support import operand_devices, why_effectful, why_not_static
from dovetail.numerics.sample_inputs import clone_span, storage_span
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_WARM_UPS = 3


@checked_init()
class CudaGraphs(Backend):
    """Compiles with another backend, records the code in the first call of each region, and replays it.

    Parameters, buffers and constants are read where they are; other operands are copied into static memory. Results
    are copies, unless `reuse_outputs` is set: then the next call of the same region overwrites them. For inference, on
    one CUDA device, with static sizes. Random numbers come from the default generator, whose state replays advance.
    """

    def __init__(self, inner: Any = "inductor", *, reuse_outputs: bool = False) -> None:
        backends = resolve(inner)
        if len(backends) != 1:
            raise InvalidArgument(f"CUDA graphs wrap one backend, and {len(backends)} were given.")
        self.inner, self.reuse_outputs = backends[0], bool(reuse_outputs)
        self.name = f"cuda_graphs({self.inner.name})"
        self.version = f"1 {torch.__version__}"
        self.isolation = self.inner.isolation
        self.timeout = self.inner.timeout
        self.bound, self.rules = self.inner.bound, self.inner.rules
        self.must_verify = self.inner.must_verify
        self.smallest = self.inner.smallest

    @property
    def kernels(self) -> Mapping[str, Callable[..., Any]]:  # type: ignore[override]  # pyright: ignore
        return self.inner.kernels

    @property
    def options(self) -> Mapping[str, Any]:
        return {"inner": identity(self.inner), "reuse_outputs": self.reuse_outputs}

    @property
    def can_save(self) -> bool:
        return self.inner.can_save

    def missing(self) -> str | None:
        """Return why no region can be recorded here; None if one can."""
        return why_unusable(self.inner) if torch.cuda.is_available() else "torch has no CUDA device here"

    def save(self, compiled: Any) -> bytes:
        """Save what the inner backend compiled; a call is recorded again."""
        return self.inner.save(compiled)

    def load(self, data: bytes, region: Region) -> Compiled:
        return self.inner.load(data, region)

    def supports(self, region: Region) -> Answer:
        devices = set(operand_devices(region))
        elsewhere = sorted(str(d) for d in devices if d.type != "cuda")
        reason: str | None = None
        if elsewhere or not devices:
            reason = f"CUDA graphs need all operands on a CUDA device, and some are on {', '.join(elsewhere) or 'none'}"
        elif len(devices) > 1:
            reason = "its operands are on different devices"
        reason = reason or why_not_static(region) or why_effectful(region, "random")
        return Decline(reason) if reason is not None else self.inner.supports(region)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return self.inner.compile(region, examples)

    def prepare(self, site: CallSite) -> Compiled:
        run = self.inner.prepare(site)
        recorded = RecordedGraph(run, site.operands, site.constants, reuse_outputs=self.reuse_outputs)
        if run is not site.compiled:
            recorded.reads_in_place = getattr(run, "reads_in_place", frozenset())
        return recorded


class _DevicePool:
    """The memory pool that recordings on a device share for intermediate values, and the order in which they use it."""

    def __init__(self, device: torch.device) -> None:
        self.lock = reset_at_fork(threading.RLock())
        self.stream = torch.cuda.Stream(device)
        self.handle = torch.cuda.graph_pool_handle()
        self.event = torch.cuda.Event()
        self.last: Any = None

    def acquire(self, stream: Any) -> None:
        """Let a stream wait until another one has finished with the shared memory."""
        if self.last is not None and self.last != stream:
            stream.wait_event(self.event)

    def release(self, stream: Any) -> None:
        self.event.record(stream)
        self.last = stream


_POOLS: dict[torch.device, _DevicePool] = {}


def _shared_pool(device: torch.device) -> _DevicePool:
    pool = _POOLS.get(device)
    return _POOLS.setdefault(device, _DevicePool(device)) if pool is None else pool


def record_graph(run: Callable[[], Any], stream: Any, pool: Any = None) -> tuple[Any, Any]:
    """Record a call on a side stream, after calls that let lazy initialization happen; return graph and result."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.no_grad(), torch.cuda.stream(stream), preserve_rng_state():
        for _ in range(_WARM_UPS):
            run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace for each stream. Without one, the recording allocates it in its own memory pool, where no
    # other recording uses it at the same time, and which is released with the recording.
    clear_workspaces: Callable[[], None] = torch_compat.CLEAR_WORKSPACES.value or _keep_workspaces
    clear_workspaces()
    # Calls of other threads do not belong to the recording, and must not make it fail.
    try:
        with (
            torch.no_grad(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            return graph, run()
    finally:
        clear_workspaces()


def _keep_workspaces() -> None:
    """Do nothing, in a torch that cannot release workspaces."""


class RecordedGraph:
    """One call of a region as a CUDA graph, recorded when it is created, with the operands of a real call."""

    def __init__(
        self,
        run: Compiled,
        operands: Sequence[Any],
        constants: frozenset[int],
        *,
        reuse_outputs: bool = False,
    ) -> None:
        self.run, self.reuse_outputs = run, reuse_outputs
        self.reads_in_place = constants
        self.device = next(a.device for a in operands if isinstance(a, Tensor))
        # Results that are not copied must not be in memory that another recording writes.
        self.pool = _DevicePool(self.device) if reuse_outputs else _shared_pool(self.device)
        with self.pool.lock, torch.cuda.device(self.device), torch.inference_mode(False), torch.no_grad():
            # The recording has the addresses of constants: they must live as long as it does.
            self.static = [_clone(a) if i not in constants else a for i, a in enumerate(operands)]
            self.copied = tuple(
                (i, _span_view(s))
                for i, s in enumerate(self.static)
                if isinstance(s, Tensor) and i not in constants
            )
            self.graph, self.results = self._record()
            self.views = tuple(_viewed_static(v, self.static) for v in self.results)
            _check_copies(self.results, self.views)

    def _record(self) -> tuple[Any, tuple[Any, ...]]:
        self.pool.acquire(torch.cuda.current_stream())
        try:
            graph, results = record_graph(
                lambda: tuple(self.run(*self.static)), self.pool.stream, self.pool.handle
            )
        except Exception:
            # torch considers a pool in use for ever after a recording into it failed: others need a new one.
            if _POOLS.get(self.device) is self.pool:
                del _POOLS[self.device]
            raise
        return graph, results

    def __call__(self, *operands: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self.run(*operands)
        with self.pool.lock, torch.cuda.device(self.device), torch.no_grad():
            stream = torch.cuda.current_stream()
            self.pool.acquire(stream)
            for i, static in self.copied:
                static.copy_(_span_view(operands[i]))
            self.graph.replay()
            returned = tuple(
                self._returned(value, view, operands)
                for value, view in zip(self.results, self.views, strict=True)
            )
            self.pool.release(stream)
        return returned

    def _returned(self, value: Any, view: tuple[int, int] | None, operands: Sequence[Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if view is not None:
            position, offset = view
            operand = operands[position].detach()
            return operand.as_strided(value.shape, value.stride(), operand.storage_offset() + offset)
        return value if self.reuse_outputs else value.clone()


def _clone(value: Any) -> Any:
    return clone_span(value).as_strided(value.shape, value.stride()) if isinstance(value, Tensor) else value


def _span_view(value: Tensor) -> Tensor:
    """Return the memory that a tensor spans as a vector, so that one with overlapping elements can be copied."""
    return value.detach().as_strided(
        (storage_span(value.shape, value.stride()),), (1,), value.storage_offset()
    )


def _viewed_static(value: Any, static: Sequence[Any]) -> tuple[int, int] | None:
    """Return the operand that a result is a view of, and the offset; None if it has memory of its own."""
    if not isinstance(value, Tensor) or not value.numel():
        return None
    at = storage_key(value)
    for i, operand in enumerate(static):
        if isinstance(operand, Tensor) and storage_key(operand) == at:
            return i, int(value.storage_offset() - operand.storage_offset())
    return None


def _check_copies(results: Sequence[Any], views: Sequence[tuple[int, int] | None]) -> None:
    own = [
        v
        for v, view in zip(results, views, strict=True)
        if view is None and isinstance(v, Tensor) and v.numel()
    ]
    if len({storage_key(v) for v in own}) < len(own):
        raise LoweringFailure("two of its results share memory, which copies of them would not")
    for i, value in enumerate(own):
        if value.clone().stride() != value.stride():
            raise LoweringFailure(f"result {i} has strides that a copy of it would not have")
