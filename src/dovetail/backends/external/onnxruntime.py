"""ONNX Runtime on the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.backends.external.external_base import (
    CompiledSession,
    OnnxBackend,
    PlacedResults,
    checked_results,
)
from dovetail.errors import checked_init
from dovetail.formats.onnx.writer import ELEMENT_TYPES, Dialect
from dovetail.ir.tensor_spec import Layout
from dovetail.lowering.backend_protocol import package_version


@checked_init()
class OnnxRuntime(OnnxBackend):
    """Runs regions in ONNX Runtime, in float32, with as many threads as torch has.

    `options` are entries of its session configuration, such as {"session.intra_op.allow_spinning": "0"}.
    """

    name = "onnxruntime"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    dialect: ClassVar[Dialect] = Dialect(attention=True, powers=True, runs=True)

    # Threads of a session spin for a while after a call, and take the cores from the next region's.
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({"options": {"session.force_spinning_stop": "1"}},)

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"4 {package_version('onnxruntime')}"

    def session(
        self, program: bytes, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _OnnxRuntimeSession(program, constants, results, self._options)


_BOUND_BYTES = 2**16
"""The bytes that are copied in the time that it takes to bind the memory of one operand or result."""


class _OnnxRuntimeSession(CompiledSession):
    def __init__(
        self,
        data: bytes,
        constants: Mapping[int, Tensor],
        results: Sequence[Layout],
        options: Mapping[str, str],
    ) -> None:
        import onnxruntime as ort

        model, held = _with_initializers(data, constants)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        for name, value in options.items():
            settings.add_session_config_entry(name, value)
        # Its code reads the memory of these tensors, unless it packs them itself.
        self._held = held
        values = {name: ort.OrtValue.ortvalue_from_numpy(value.numpy()) for name, value in held.items()}
        if values:
            settings.add_external_initializers(list(values), list(values.values()))
        self._session = ort.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        self._inputs = [i.name for i in self._session.get_inputs()]
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._results = list(results)
        self._guarded = len(self._outputs) > len(results)
        # An empty result has no memory that could be bound.
        known = all(r.sizes is not None and 0 not in r.sizes for r in results)
        bound = len(self._inputs) + len(self._outputs)
        self._binds = known and sum(map(_nbytes, results)) >= _BOUND_BYTES * bound

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        if not self._binds or not all(map(Tensor.numel, rows)):
            feeds = {name: value.numpy() for name, value in zip(self._inputs, rows, strict=True)}
            values = [torch.from_numpy(value) for value in self._session.run(self._outputs, feeds)]
            return checked_results(values, self._results, self._guarded)
        binding = self._session.io_binding()
        for name, value in zip(self._inputs, rows, strict=True):
            binding.bind_input(name, *_buffer(value))
        placed = PlacedResults(self._results, self._guarded)
        for name, value in zip(self._outputs, placed.buffers, strict=True):
            binding.bind_output(name, *_buffer(value))
        self._session.run_with_iobinding(binding)
        return placed.results()


def _nbytes(layout: Layout) -> int:
    return math.prod(layout.sizes or ()) * layout.dtype.itemsize


def _buffer(value: Tensor) -> tuple[Any, ...]:
    return "cpu", 0, ELEMENT_TYPES[value.dtype], tuple(value.shape), value.data_ptr()


def _with_initializers(data: bytes, constants: Mapping[int, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return a model with external initializers in place of some inputs, and their values by name."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    inputs = list(model.graph.input)
    held: dict[str, Tensor] = {}
    for i, value in constants.items():
        name = inputs[i].name
        proto = model.graph.initializer.add()
        proto.name, proto.data_type = name, inputs[i].type.tensor_type.elem_type
        proto.dims.extend(value.shape)
        if not value.numel():
            # An empty tensor has no external data.
            proto.raw_data = b""
            continue
        proto.data_location = onnx.TensorProto.EXTERNAL
        entry = proto.external_data.add()
        entry.key, entry.value = "location", "memory"
        held[name] = value
    del model.graph.input[:]
    model.graph.input.extend(d for i, d in enumerate(inputs) if i not in constants)
    return model, held
