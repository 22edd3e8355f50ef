"""OpenVINO on the CPU."""

from __future__ import annotations

import functools
import operator
import queue
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.lowering.backends.foreign import Session, installed
from dovetail.lowering.backends.onnx_based import OnnxBackend, input_names
from dovetail.lowering.onnx.layouts import Layout


class OpenVino(OnnxBackend):
    """Runs regions in OpenVINO on the CPU, with as many threads as torch has.

    In float32 throughout: what it would do by itself is to take bfloat16 where the processor has it.
    `precision="bf16"` asks for that, and then results may be off by a per cent. `options` are properties of OpenVINO's.
    """

    name = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "openvino")

    def __init__(self, precision: str = "f32", options: Mapping[str, Any] | None = None) -> None:
        if precision not in ("f32", "bf16", "f16"):
            from dovetail.errors import InvalidArgument

            raise InvalidArgument(f"precision {precision!r}; give 'f32', 'bf16' or 'f16'.")
        self.precision, self._options = precision, dict(options or {})
        self.bound = None if precision == "f32" else 0.02

    @property
    def options(self) -> Mapping[str, Any]:
        return {"precision": self.precision, **self._options}

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"1 {installed('openvino')}"

    def why_not_operation(self, node: Node) -> str | None:
        return _why_wide(node) or super().why_not_operation(node)

    def session(self, program: Any, constants: Mapping[int, Tensor], results: Sequence[Layout]) -> Session:
        return _Running(program, constants, results, self.precision, self._options)


_POSITIONS = {"embedding": 1, "index_select": 2, "gather": 2, "index": 1, "scatter": 2}
_SMALL = frozenset({"arange", "argmax", "argmin", "topk"})
"""Operators whose whole numbers are positions, which no tensor has too many of."""


def _why_wide(node: Node) -> str | None:
    """Why whole numbers of 64 bits would be cut off: OpenVINO computes with 32, which does for positions only."""
    name = _name(node)
    for i, given in enumerate(node.args):
        for one in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(one, Node) and _is_wide(one) and _POSITIONS.get(name) != i:
                return f"'{one.name}' may hold whole numbers that need 64 bits, and OpenVINO has 32"
    return (
        "it makes whole numbers of 64 bits, and OpenVINO has 32"
        if _is_wide(node) and not any(map(_is_whole, node.all_input_nodes))
        else None
    )


def _name(node: Node) -> str:
    return str(node.target).partition(".")[2].partition(".")[0]


def _is_whole(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.int64


def _is_wide(node: Node) -> bool:
    """Whether a value may be a whole number beyond 32 bits: it comes from outside, or is computed."""
    if not _is_whole(node):
        return False
    made = node.args[0] if node.target is operator.getitem else node
    return not isinstance(made, Node) or made.op != "call_function" or _name(made) not in _SMALL


class _Running(Session):
    def __init__(
        self,
        data: bytes,
        constants: Mapping[int, Tensor],
        results: Sequence[Layout],
        precision: str,
        options: Mapping[str, Any],
    ) -> None:
        ov = _module()
        model = _core().read_model(data, b"")
        named = {p.get_friendly_name(): p for p in model.get_parameters()}
        names = input_names(data)
        self._held = dict(constants)
        for i, value in constants.items():
            parameter = named.get(names[i])
            if parameter is None:
                continue
            # The memory is torch's own: nothing is copied here.
            held = ov.opset13.constant(value.numpy(), shared_memory=True).output(0)
            for target in parameter.output(0).get_target_inputs():
                target.replace_source_output(held)
            model.remove_parameter(parameter)
        threads = torch.get_num_threads()
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
            # Its own fusion of chains crashes the process where it compiles float32 for a single thread.
            **({"SNIPPETS_MODE": "DISABLE"} if threads == 1 else {}),
            **options,
        }
        self._compiled = _core().compile_model(model, "CPU", settings)
        # An input that nothing reads is not there any more.
        left = {i.get_any_name(): at for at, i in enumerate(self._compiled.inputs)}
        self._places = [left.get(n) for i, n in enumerate(names) if i not in constants]
        self._results = list(results)
        self._fixed = all(r.sizes is not None for r in results)
        # A request is for one call at a time, and threads may call at once.
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        try:
            request = self._idle.get_nowait()
        except queue.Empty:
            request = self._compiled.create_infer_request()
        try:
            return self._run(request, rows)
        finally:
            self._idle.put(request)

    def _run(self, request: Any, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        tensor = _module().Tensor
        for i, value in zip(self._places, rows, strict=True):
            if i is not None:
                request.set_input_tensor(i, tensor(value.numpy(), shared_memory=True))
        if not self._fixed:
            request.infer()
            made = [
                torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(len(self._results))
            ]
            return tuple(layout.result(value) for layout, value in zip(self._results, made, strict=True))
        places = [layout.place() for layout in self._results]
        for i, (_, place) in enumerate(places):
            request.set_output_tensor(i, tensor(place.numpy(), shared_memory=True))
        request.infer()
        return tuple(
            made if layout.order is not None else layout.result(made)
            for layout, (made, _) in zip(self._results, places, strict=True)
        )


@functools.cache
def _module() -> Any:
    import openvino

    return openvino


@functools.cache
def _core() -> Any:
    return _module().Core()
