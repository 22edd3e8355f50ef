"""ONNX Runtime on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.backends.external.external_base import CompiledSession, OnnxBackend, require_in_range
from dovetail.errors import checked_init
from dovetail.formats.onnx.writer import ELEMENTS, Dialect, Layout
from dovetail.lowering.backend_protocol import package_version


@checked_init()
class OnnxRuntime(OnnxBackend):
    """Runs regions in ONNX Runtime, in float32, with as many threads as torch has.

    `options` are entries of its session configuration, such as {"session.intra_op.allow_spinning": "0"}.
    """

    name = "onnxruntime"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    dialect: ClassVar[Dialect] = Dialect(attention=True, runs=True)

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 {package_version('onnxruntime')}"

    def session(
        self, program: Any, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _OnnxRuntimeSession(program, constants, results, self._options)


class _OnnxRuntimeSession(CompiledSession):
    def __init__(
        self,
        data: bytes,
        constants: Mapping[int, Tensor],
        results: Sequence[Layout],
        options: Mapping[str, str],
    ) -> None:
        import onnxruntime as ort

        model, held = _with_initialisers(data, constants)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        for name, value in options.items():
            settings.add_session_config_entry(name, value)
        # Its code reads these where torch keeps them; what it packs itself it copies.
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
        # Where there is nothing to write, there is no memory that could be given.
        self._fixed = all(r.sizes is not None and 0 not in r.sizes for r in results)

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        if not self._fixed or any(not value.numel() for value in rows):
            feeds = {name: value.numpy() for name, value in zip(self._inputs, rows, strict=True)}
            made = list(self._session.run(None, feeds))
            if self._guarded:
                require_in_range(made.pop())
            return tuple(
                layout.result(torch.from_numpy(value))
                for layout, value in zip(self._results, made, strict=True)
            )
        binding = self._session.io_binding()
        for name, value in zip(self._inputs, rows, strict=True):
            binding.bind_input(name, "cpu", 0, ELEMENTS[value.dtype], tuple(value.shape), value.data_ptr())
        places = [layout.place() for layout in self._results]
        for name, (_, place) in zip(self._outputs, places, strict=False):
            binding.bind_output(name, "cpu", 0, ELEMENTS[place.dtype], tuple(place.shape), place.data_ptr())
        flag: Tensor | None = None
        if self._guarded:
            flag = torch.empty((), dtype=torch.bool)
            binding.bind_output(self._outputs[-1], "cpu", 0, ELEMENTS[flag.dtype], (), flag.data_ptr())
        self._session.run_with_iobinding(binding)
        if flag is not None:
            require_in_range(flag)
        return tuple(
            made if layout.order is not None else layout.result(made)
            for layout, (made, _) in zip(self._results, places, strict=True)
        )


def _with_initialisers(data: bytes, constants: Mapping[int, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """A model some of whose inputs have values, which are given beside it, and these by name."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    given = list(model.graph.input)
    held: dict[str, Tensor] = {}
    for i, value in constants.items():
        described = given[i]
        # An empty tensor has no data that could be given beside the model.
        made = model.graph.initializer.add()
        made.name, made.data_type = described.name, described.type.tensor_type.elem_type
        made.dims.extend(value.shape)
        if not value.numel():
            made.raw_data = b""
            continue
        made.data_location = onnx.TensorProto.EXTERNAL
        place = made.external_data.add()
        place.key, place.value = "location", "memory"
        held[described.name] = value
    del model.graph.input[:]
    model.graph.input.extend(d for i, d in enumerate(given) if i not in constants)
    return model, held
