"""CUDA graphs around another backend: one launch for all the kernels of a region."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import (
    Answer,
    Backend,
    Compiled,
    identity,
    operand_devices,
    resolve,
    saves,
    setting,
    why_not_fixed,
    why_not_plain,
)
from dovetail.lowering.dispatch import CallSite
from dovetail.lowering.failures import LoweringFailure
from dovetail.numerics.sample_inputs import memory, random_state_kept, span
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_WARM_UPS = 3


@checked_init()
class CudaGraphs(Backend):
    """Compiles with another backend, and records what it made in the first call of each region, to be replayed.

    Parameters, buffers and constants are read where they lie; other operands are copied into memory of its own.
    Results are copies, unless `reuse_outputs` is set: then the next call of the same region overwrites them. For
    inference, on one CUDA device, with sizes that do not vary. Random numbers come from the default generator, which
    a recording goes on with.
    """

    def __init__(self, inner: Any = "inductor", *, reuse_outputs: bool = False) -> None:
        found = resolve(inner)
        if len(found) != 1:
            raise InvalidArgument(f"CUDA graphs go around one backend, and {len(found)} were given.")
        self.inner, self.reuse_outputs = found[0], bool(reuse_outputs)
        self.name = f"cuda_graphs({self.inner.name})"
        self.version = f"1 {torch.__version__}"
        self.isolation = setting(self.inner, "isolation")
        self.timeout = setting(self.inner, "timeout")
        self.bound, self.rules = setting(self.inner, "bound"), setting(self.inner, "rules")
        self.smallest = setting(self.inner, "smallest")

    @property
    def kernels(self) -> Mapping[str, Callable[..., Any]]:  # type: ignore[override]  # pyright: ignore
        return setting(self.inner, "kernels")

    @property
    def options(self) -> Mapping[str, Any]:
        return {"inner": identity(self.inner), "reuse_outputs": self.reuse_outputs}

    @property
    def save(self) -> Callable[..., bytes] | None:
        """How the other backend saves what it compiles, if it does; recordings are made anew."""
        return self.inner.save if saves(self.inner) else None

    @property
    def load(self) -> Callable[..., Compiled] | None:
        return self.inner.load if saves(self.inner) else None

    def supports(self, region: Region) -> Answer:
        devices = set(operand_devices(region))
        elsewhere = sorted(str(d) for d in devices if d.type != "cuda")
        reason: str | None = None
        if elsewhere or not devices:
            reason = f"CUDA graphs need all operands on a CUDA device, and some are on {', '.join(elsewhere) or 'none'}"
        elif len(devices) > 1:
            reason = "its operands are on several devices"
        reason = reason or why_not_fixed(region) or why_not_plain(region, "random")
        return Decline(reason) if reason is not None else self.inner.supports(region)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return self.inner.compile(region, examples)

    def prepare(self, site: CallSite) -> Compiled:
        prepare = getattr(self.inner, "prepare", None)
        run = site.compiled if prepare is None else prepare(site)
        made = RecordedGraph(run, site.operands, site.constants, reuse_outputs=self.reuse_outputs)
        copies = run is not site.compiled
        made.reads_in_place = getattr(run, "reads_in_place", frozenset()) if copies else site.constants
        return made


class _DevicePool:
    """What recordings on a device share: memory for what lies between operands and results, and whose turn it is."""

    def __init__(self, device: torch.device) -> None:
        self.lock = released_by_fork(threading.RLock())
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.event = torch.cuda.Event()
        self.last: Any = None

    def turn(self, stream: Any) -> None:
        """Let a stream wait for what another one still does with the shared memory."""
        if self.last is not None and self.last != stream:
            stream.wait_event(self.event)

    def done(self, stream: Any) -> None:
        self.event.record(stream)
        self.last = stream


_PLACES: dict[torch.device, _DevicePool] = {}


def _shared(device: torch.device) -> _DevicePool:
    found = _PLACES.get(device)
    return _PLACES.setdefault(device, _DevicePool(device)) if found is None else found


class RecordedGraph:
    """One call of a region as a CUDA graph; recorded now, with the operands of a real call."""

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
        # Results that stay where they are must not lie in what another recording writes.
        self.place = _DevicePool(self.device) if reuse_outputs else _shared(self.device)
        with self.place.lock, torch.cuda.device(self.device), torch.inference_mode(False), torch.no_grad():
            # The recording knows constants by their place: they must not be freed before it is.
            self.static = [_static(a) if i not in constants else a for i, a in enumerate(operands)]
            self.copied = tuple(
                (i, _flat(s))
                for i, s in enumerate(self.static)
                if isinstance(s, Tensor) and i not in constants
            )
            self.graph, self.made = self._record()
            self.results = tuple(_result(v, self.static) for v in self.made)
            _check(self.made, self.results)

    def _record(self) -> tuple[Any, tuple[Any, ...]]:
        here, side = torch.cuda.current_stream(), self.place.stream
        self.place.turn(here)
        side.wait_stream(here)
        with torch.cuda.stream(side), random_state_kept():
            for _ in range(_WARM_UPS):
                self.run(*self.static)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self.place.pool, stream=side, capture_error_mode="thread_local"
            ):
                made = tuple(self.run(*self.static))
        except Exception:
            # torch takes memory for being recorded into for ever after a recording that failed: others need a new one.
            if _PLACES.get(self.device) is self.place:
                del _PLACES[self.device]
            raise
        return graph, made

    def __call__(self, *operands: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self.run(*operands)
        with self.place.lock, torch.cuda.device(self.device), torch.no_grad():
            stream = torch.cuda.current_stream()
            self.place.turn(stream)
            for i, static in self.copied:
                static.copy_(_flat(operands[i]))
            self.graph.replay()
            given = tuple(
                self._given(value, how, operands) for value, how in zip(self.made, self.results, strict=True)
            )
            self.place.done(stream)
        return given

    def _given(self, value: Any, how: tuple[int, int] | None, operands: Sequence[Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if how is not None:
            number, offset = how
            operand = operands[number].detach()
            return operand.as_strided(value.shape, value.stride(), operand.storage_offset() + offset)
        return value if self.reuse_outputs else value.clone()


def _static(value: Any) -> Any:
    return memory(value).as_strided(value.shape, value.stride()) if isinstance(value, Tensor) else value


def _flat(value: Tensor) -> Tensor:
    """All the memory a tensor reaches over, so that one that lies over itself can be copied into another."""
    return value.detach().as_strided((span(value.shape, value.stride()),), (1,), value.storage_offset())


def _result(value: Any, static: Sequence[Any]) -> tuple[int, int] | None:
    """Of which operand a result is a view, and how far from its beginning; None if it has memory of its own."""
    if not isinstance(value, Tensor) or not value.numel():
        return None
    at = value.untyped_storage()._cdata
    for i, operand in enumerate(static):
        if isinstance(operand, Tensor) and operand.untyped_storage()._cdata == at:
            return i, int(value.storage_offset() - operand.storage_offset())
    return None


def _check(made: Sequence[Any], results: Sequence[tuple[int, int] | None]) -> None:
    own = [
        v for v, how in zip(made, results, strict=True) if how is None and isinstance(v, Tensor) and v.numel()
    ]
    places = [v.untyped_storage()._cdata for v in own]
    if len(set(places)) < len(places):
        raise LoweringFailure("two of its results share memory, which copies of them would not")
    for i, value in enumerate(own):
        if value.clone().stride() != value.stride():
            raise LoweringFailure(f"result {i} lies in memory as no copy of it would")
