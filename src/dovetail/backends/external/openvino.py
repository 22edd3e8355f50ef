"""OpenVINO on the CPU."""

from __future__ import annotations

import functools
import operator
import queue
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.backends.external.external_base import (
    CompiledSession,
    OnnxBackend,
    PlacedResults,
    checked_results,
)
from dovetail.errors import InvalidArgument, checked_init
from dovetail.formats.op_support import INTEGRAL
from dovetail.ir.schema import op_name
from dovetail.ir.tensor_spec import Layout
from dovetail.lowering.backend_protocol import package_version
from dovetail.lowering.region_support import values_of


@checked_init()
class OpenVino(OnnxBackend):
    """Runs regions in OpenVINO on the CPU, with as many threads as torch has.

    In float32 throughout, although OpenVINO's default is bfloat16 on processors that have it. With `precision="bf16"`
    results may be off by a per cent. `options` are OpenVINO properties.
    """

    name = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "openvino")
    flushes_denormals: ClassVar[bool] = True

    def __init__(self, precision: str = "f32", options: Mapping[str, Any] | None = None) -> None:
        if precision not in ("f32", "bf16", "f16"):
            raise InvalidArgument(f"precision {precision!r}; give 'f32', 'bf16' or 'f16'.")
        self.precision, self._options = precision, dict(options or {})
        self.bound = None if precision == "f32" else 0.02

    @property
    def options(self) -> Mapping[str, Any]:
        return {"precision": self.precision, **self._options}

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"3 {package_version('openvino')}"

    def why_not_operation(self, node: Node) -> str | None:
        return _why_not_integers(node) or _why_wrong(node) or super().why_not_operation(node)

    def session(
        self, program: bytes, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _OpenVinoSession(program, constants, results, self.precision, self._options)


_INDEX_ARGUMENTS = {
    "embedding": 1,
    "index_select": 2,
    "gather": 2,
    "index": 1,
    "scatter": 2,
    "scatter_add": 2,
}
_POSITION_RESULTS = frozenset({"arange", "argmax", "argmin", "topk"})
"""Operators whose integer results are positions."""
_ROUNDED = frozenset({"remainder", "fmod", "floor_divide"})
_MOVING_NAMES = """
    view reshape _unsafe_view flatten unflatten view_as reshape_as transpose t mT numpy_T permute unsqueeze squeeze
    expand broadcast_to expand_as repeat cat stack split split_with_sizes chunk tensor_split unbind slice select narrow
    flip roll pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle clone contiguous alias detach
    lift_fresh_copy movedim swapaxes getitem embedding index_select gather index scatter
"""
_MOVING = frozenset(_MOVING_NAMES.split())
"""Operators that move elements without changing them."""


def _why_not_integers(node: Node) -> str | None:
    """Return why integers would come out wrong, or None.

    OpenVINO saturates where torch wraps around, and computes some integers as floats of 24 bits. Moving integers,
    converting them to floats and using them as positions is right as long as they fit 32 bits, which each call checks.
    """
    name, results = _name(node), list(values_of(node))
    if name in _MOVING:
        return None
    if name not in _POSITION_RESULTS and any(map(_is_integral, results)):
        return "it computes integers, which OpenVINO does not compute as torch does"
    at = _INDEX_ARGUMENTS.get(name)
    read = [one for i, one in _operands(node) if i != at and any(map(_is_integral, values_of(one)))]
    # A size says nothing about the elements, and no tensor holds it.
    if read and not all(v.is_floating_point() for v in results if isinstance(v, Tensor)):
        return f"'{read[0].name}' holds integers, with which OpenVINO does not compute as torch does"
    return None


def _why_wrong(node: Node) -> str | None:
    name = _name(node)
    if name in _ROUNDED or node.kwargs.get("rounding_mode") == "floor":
        return "OpenVINO computes the remainder from a rounded quotient"
    if name == "gather":
        (source, *_), (index, *_) = ([*values_of(cast("Node", node.args[i]))] for i in (0, 2))
        axis = cast("int", node.args[1]) % max(source.dim(), 1)
        if any(n != m for d, (n, m) in enumerate(zip(source.shape, index.shape, strict=False)) if d != axis):
            return "OpenVINO gathers only where all other dimensions are equal"
    return None


def _operands(node: Node) -> list[tuple[int, Node]]:
    """Return the nodes among the arguments, each with the position of its argument."""
    operands: list[tuple[int, Node]] = []
    for i, argument in enumerate(node.args):
        items = argument if isinstance(argument, (list, tuple)) else (argument,)
        operands.extend((i, one) for one in items if isinstance(one, Node))
    return operands


def _name(node: Node) -> str:
    return "getitem" if node.target is operator.getitem else op_name(node.target)


def _is_integral(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in INTEGRAL and value.dtype != torch.bool


class _OpenVinoSession(CompiledSession):
    def __init__(
        self,
        data: bytes,
        constants: Mapping[int, Tensor],
        results: Sequence[Layout],
        precision: str,
        options: Mapping[str, Any],
    ) -> None:
        import onnx
        import openvino as ov

        model = _core().read_model(data, b"")
        named = {p.get_friendly_name(): p for p in model.get_parameters()}
        names = [i.name for i in onnx.ModelProto.FromString(data).graph.input]
        self._held = dict(constants)
        for i, value in constants.items():
            parameter = named.get(names[i])
            if parameter is None:
                continue
            # The constant shares torch's memory.
            constant = ov.opset13.constant(value.numpy(), shared_memory=True).output(0)
            for target in parameter.output(0).get_target_inputs():
                target.replace_source_output(constant)
            model.remove_parameter(parameter)
        threads = torch.get_num_threads()
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
            # Its fusion of chains (snippets) crashes the process when it compiles float32 for a single thread.
            **({"SNIPPETS_MODE": "DISABLE"} if threads == 1 else {}),
            **options,
        }
        self._compiled, self._tensor = _compiled(model, settings), ov.Tensor
        # An unused input is removed, and an input may have further names, of values it was merged with.
        remaining = {name: at for at, i in enumerate(self._compiled.inputs) for name in i.get_names()}
        self._places = [remaining.get(n) for i, n in enumerate(names) if i not in constants]
        self._results = list(results)
        self._guarded = len(self._compiled.outputs) > len(results)
        self._fixed = all(r.sizes is not None for r in results)
        # A request serves one call at a time, and threads may call concurrently.
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
        for i, value in zip(self._places, rows, strict=True):
            if i is not None:
                _require_narrow(value)
                request.set_input_tensor(i, self._tensor(value.numpy(), shared_memory=True))
        if not self._fixed:
            request.infer(share_outputs=True)
            count = len(self._compiled.outputs)
            values = [torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(count)]
            return checked_results(values, self._results, self._guarded)
        placed = PlacedResults(self._results, self._guarded)
        for i, value in enumerate(placed.buffers):
            request.set_output_tensor(i, self._tensor(value.numpy(), shared_memory=True))
        # Otherwise it returns copies of the results.
        request.infer(share_outputs=True)
        return placed.results()


def _require_narrow(value: Tensor) -> None:
    """Raise OverflowError for a number that does not fit 32 bits."""
    if value.dtype == torch.int64 and value.numel():
        least, most = torch.aminmax(value)
        if least.item() < -(2**31) or most.item() >= 2**31:
            raise OverflowError("an integer needs 64 bits, and OpenVINO has 32")


def _compiled(model: Any, settings: dict[str, Any]) -> Any:
    try:
        return _core().compile_model(model, "CPU", settings)
    except RuntimeError:
        if "SNIPPETS_MODE" in settings:
            raise
        # Its fusion of chains (snippets) fails for some graphs that compile without it.
        return _core().compile_model(model, "CPU", settings | {"SNIPPETS_MODE": "DISABLE"})


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()
