"""Captured graphs on disk, so that another process does not trace the model again.

An entry is a graph without the weights, which are those of the model it is read for, and the record of what its trace
depended on (`frontend.trace_dependencies`). It is used only if all of that is the same in this process; a model that
differs, or whose dependencies cannot be described, is traced.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail import config, torch_compat
from dovetail.errors import CaptureMismatch
from dovetail.frontend import capture as frontend
from dovetail.frontend.code_recorder import CodeRecorder, recording
from dovetail.frontend.trace_dependencies import TraceRecord, describe, differences
from dovetail.frontend.value_state import Undescribable
from dovetail.ir.graph_module import pause_gc
from dovetail.ir.process_state import tracing_switches
from dovetail.lowering.cache import precision
from dovetail.lowering.guards import active_autocast
from dovetail.runtime.capture_entry import CaptureOrigin

_LOG = logging.getLogger("dovetail")
_MAX_BYTES = 256 * 2**20


class CaptureStore(Protocol):
    """Where captures are kept by key: the disk cache."""

    def read(self, key: str) -> bytes | None: ...

    def write(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True)
class StoredCapture:
    """A graph without weights, and what its trace depended on."""

    record: TraceRecord
    graph: bytes


class _GraphPickler(pickle.Pickler):
    """Writes tensors of a model as their paths."""

    def __init__(self, file: io.BytesIO, paths: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._paths = paths

    def persistent_id(self, obj: Any) -> str | None:
        return self._paths.get(id(obj)) if isinstance(obj, Tensor) else None


class _GraphUnpickler(pickle.Unpickler):
    """Reads tensors of a model from their paths."""

    def __init__(self, data: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: str) -> Tensor:
        return self._tensors[pid]


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and other tensors that are attributes of modules, each with a path."""
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield f"{path}.{name}" if path else name, value


def dump_graph(graph: GraphModule, model: nn.Module) -> bytes:
    """Return a graph as bytes, its weights by their paths in the model it was captured from."""
    paths: dict[int, str] = {}
    for path, tensor in _tensors_of(model):
        paths.setdefault(id(tensor), path)
    buffer = io.BytesIO()
    _GraphPickler(buffer, paths).dump(graph)
    return buffer.getvalue()


def load_graph(data: bytes, model: nn.Module) -> GraphModule:
    """Return the graph that `dump_graph` wrote, with the weights of a model; its bytes must be trusted."""
    with pause_gc():
        return _GraphUnpickler(data, dict(_tensors_of(model))).load()


def capture_key(
    model: nn.Module,
    state: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> str:
    """Return a key of a capture. Equal keys do not suffice to use it: its record is compared besides.

    `state` is the key of the module guard.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    facts = (
        f"{type(model).__module__}.{type(model).__qualname__}",
        _without_hooks(state),
        [(name, tuple(t.shape), t.dtype, t.device) for name, t in _tensors_of(model)],
        spec,
        [_leaf_spec(leaf) for leaf in leaves],
        dynamic_shapes,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        sorted(precision().items()),
        tracing_context(),
        (torch.__version__, version("sympy"), sys.version, version("dovetail"), _source_digest()),
    )
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()


def _without_hooks(state: Any) -> Any:
    """Return the key of a module guard with the number of hooks in place of these, which the record describes."""
    has_hooks = isinstance(state, tuple) and state and isinstance(state[0], tuple)
    return (state[0], tuple(map(len, state[1]))) if has_hooks else state


_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch._export.config",
)
_VARIABLES = ("TORCHDYNAMO", "TORCH_COMPILE", "TORCH_FX", "TORCH_EXPORT", "FUNCTORCH")


def tracing_context() -> list[Any]:
    """Return what is set for the thread and the process that decides how torch traces a model and which operators it records."""
    return [
        active_autocast(),
        [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        *tracing_switches(),
        config.replay_layers,
        torch_compat.changed_settings(_CONFIGS, _VARIABLES),
    ]


def _why_not_stored() -> str:
    """Return why a trace in the present state of the process may not be repeated in another; "" if it may."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a torch function mode or dispatch mode is active"
    return ""


def _leaf_spec(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf).__qualname__, leaf if isinstance(leaf, (bool, int, float, str)) else None
    strides = leaf.stride() if leaf.layout is torch.strided else None
    marks = sorted((name, repr(value)) for name, value in vars(leaf).items())
    return tuple(leaf.shape), strides, leaf.dtype, leaf.device, leaf.requires_grad, marks


@functools.cache
def _source_digest() -> str:
    """Return a hash of the sources that make graphs of models, which may be edited without another release."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for folder in ("frontend", "ir"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class StoredCaptures:
    """Captures models as `frontend.capture` does, and keeps the graphs in a store."""

    def __init__(self, store: CaptureStore | None) -> None:
        self.store = store
        self.origin = CaptureOrigin()
        """That of the last capture."""

    def capture(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        state: Any,
        dynamic_shapes: Any = None,
        check_capture: bool = False,
    ) -> GraphModule:
        """Return the graph of a model for calls like this one, from the store or traced now.

        A graph from the store is used only with `check_capture`, after it was compared with the model: what a trace reads
        is described as far as that is possible, and the comparison covers the rest.
        """
        reason = _why_not_stored()
        self.origin = CaptureOrigin(reason=reason, context=tracing_context())
        if self.store is None or reason or isinstance(model, GraphModule):
            return frontend.capture(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, check_capture=check_capture
            )
        key = capture_key(model, state, args, kwargs, dynamic_shapes)
        graph = self._read(key, model, args, kwargs) if check_capture else None
        return graph or self._trace(key, model, args, kwargs, dynamic_shapes, check_capture)

    def _stored(self, key: str) -> StoredCapture | None:
        data = None if self.store is None else self.store.read(key)
        return None if data is None else pickle.loads(data)

    def _keep_origin(self, key: str, record: TraceRecord) -> None:
        def captured() -> bytes | None:
            stored = self._stored(key)
            return None if stored is None else stored.graph

        self.origin = replace(self.origin, record=record, captured=captured)

    def _not_kept(self, model: nn.Module, reason: str) -> None:
        self.origin = replace(self.origin, reason=reason)
        _LOG.info("the capture of the %s is not kept: %s", type(model).__name__, reason)

    def _read(
        self, key: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GraphModule | None:
        try:
            stored = self._stored(key)
            if stored is None:
                return None
            now = stored.record.current(model, (args, kwargs))
            if now != stored.record.facts:
                changed = differences(stored.record.facts, now)
                _LOG.info("the model is traced again, for it differs from the stored one: %s", changed[0])
                return None
            graph = load_graph(stored.graph, model)
            if not frontend.compare_with_model(model, graph, args, kwargs):
                _LOG.info("the model is traced again, for it cannot be compared with the stored graph")
                return None
        except CaptureMismatch as mismatch:
            _LOG.warning("the model is traced again, for the stored graph differs from it: %s", mismatch)
            return None
        except Exception as error:  # of another release, or of a class that is not there: traced again
            _LOG.info("a stored capture is not used: %s: %s", type(error).__name__, error)
            return None
        self._keep_origin(key, stored.record)
        _LOG.info("the graph of the %s is read from disk", type(model).__name__)
        return graph

    def _trace(
        self,
        key: str,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
        check_capture: bool,
    ) -> GraphModule:
        assert self.store is not None
        with recording() as recorder:
            graph = frontend.trace(model, args, kwargs, dynamic_shapes, is_compared=check_capture)
        reason, record = "", None
        try:
            record = _record(model, (args, kwargs), recorder)
        except Undescribable as error:
            reason = str(error)
        if check_capture:
            traced, graph = graph, frontend.checked(model, graph, args, kwargs, dynamic_shapes)
            if graph is not traced:
                reason = (
                    reason
                    or "a graph with replayed layers differs from the model, or cannot be compared with it"
                )
            elif record is not None and (changed := _changed_by_run(record, model, (args, kwargs))):
                reason = f"forward changes what it may read: {changed}"
        if record is None or reason:
            self._not_kept(model, reason)
            return graph
        try:
            data = pickle.dumps(StoredCapture(record, dump_graph(graph, model)))
        except Exception as error:  # a constant or a class that cannot be pickled
            self._not_kept(model, f"{type(error).__name__}: {error}")
            return graph
        if len(data) > _MAX_BYTES:
            self._not_kept(model, f"it takes {len(data)} bytes, and the limit is {_MAX_BYTES}")
            return graph
        self.store.write(key, data)
        self._keep_origin(key, record)
        return graph


def _record(model: nn.Module, inputs: Any, recorder: CodeRecorder) -> TraceRecord:
    if recorder.obstacle:
        raise Undescribable(recorder.obstacle)
    if not recorder.codes:
        raise Undescribable("no code was seen to run")
    return describe(model, inputs, recorder.codes)


def _changed_by_run(record: TraceRecord, model: nn.Module, inputs: Any) -> str:
    """Return what differs now that the model has run once more, "" if nothing does."""
    try:
        changed = differences(record.facts, record.current(model, inputs, is_traced=True))
    except Undescribable as error:
        return str(error)
    return changed[0] if changed else ""
