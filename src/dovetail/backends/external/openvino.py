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
    input_names,
    require_in_range,
)
from dovetail.errors import checked_init
from dovetail.formats.onnx.writer import Layout
from dovetail.formats.op_support import WHOLE
from dovetail.lowering.backend_protocol import package_version, values_of


@checked_init()
class OpenVino(OnnxBackend):
    """Runs regions in OpenVINO on the CPU, with as many threads as torch has.

    In float32 throughout: what it would do by itself is to take bfloat16 where the processor has it.
    `precision="bf16"` asks for that, and then results may be off by a per cent. `options` are properties of OpenVINO's.
    """

    name = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "openvino")
    flushes_denormals: ClassVar[bool] = True

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
        return f"2 {package_version('openvino')}"

    def why_not_operation(self, node: Node) -> str | None:
        return _why_whole(node) or _why_wrong(node) or super().why_not_operation(node)

    def session(
        self, program: Any, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _OpenVinoSession(program, constants, results, self.precision, self._options)


_POSITIONS = {"embedding": 1, "index_select": 2, "gather": 2, "index": 1, "scatter": 2, "scatter_add": 2}
_SMALL = frozenset({"arange", "argmax", "argmin", "topk"})
"""Operators whose whole numbers are positions."""
_ROUNDED = frozenset({"remainder", "fmod", "floor_divide"})
_MOVES = """
    view reshape _unsafe_view flatten unflatten view_as reshape_as transpose t mT numpy_T permute unsqueeze squeeze
    expand broadcast_to expand_as repeat cat stack split split_with_sizes chunk tensor_split unbind slice select narrow
    flip roll pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle clone contiguous alias detach
    lift_fresh_copy movedim swapaxes getitem embedding index_select gather index scatter
"""
_MOVING = frozenset(_MOVES.split())
"""Operators that put elements elsewhere and leave them as they are."""


def _why_whole(node: Node) -> str | None:
    """Why whole numbers would come out wrong.

    OpenVINO stops at the largest number where torch starts again, and takes some for fractions of 24 bits. Moving them,
    making fractions of them, and taking them for positions is right, as long as they have no more than 32 bits, which is
    looked at in every call.
    """
    name, results = _name(node), list(values_of(node))
    if name in _MOVING:
        return None
    if name not in _SMALL and any(map(_is_whole, results)):
        return "it computes whole numbers, and OpenVINO does not do that as torch does"
    at = _POSITIONS.get(name)
    read = [one for i, one in _operands(node) if i != at and any(map(_is_whole, values_of(one)))]
    if read and not all(v.is_floating_point() for v in results):
        return f"'{read[0].name}' holds whole numbers, and OpenVINO does not compute with them as torch does"
    return None


def _why_wrong(node: Node) -> str | None:
    name = _name(node)
    if name in _ROUNDED or node.kwargs.get("rounding_mode") == "floor":
        return "OpenVINO finds what is left over of a division by a quotient that is rounded"
    if name == "gather":
        (source, *_), (index, *_) = ([*values_of(cast("Node", node.args[i]))] for i in (0, 2))
        axis = cast("int", node.args[1]) % max(source.dim(), 1)
        if any(n != m for d, (n, m) in enumerate(zip(source.shape, index.shape, strict=False)) if d != axis):
            return "OpenVINO gathers only where all other dimensions are as long"
    return None


def _operands(node: Node) -> list[tuple[int, Node]]:
    """The nodes among the arguments, each with the number of its argument."""
    found: list[tuple[int, Node]] = []
    for i, given in enumerate(node.args):
        listed = given if isinstance(given, (list, tuple)) else (given,)
        found.extend((i, one) for one in listed if isinstance(one, Node))
    return found


def _name(node: Node) -> str:
    return (
        "getitem" if node.target is operator.getitem else str(node.target).partition(".")[2].partition(".")[0]
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in WHOLE and value.dtype != torch.bool


class _OpenVinoSession(CompiledSession):
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
        self._compiled = _compiled(model, settings)
        # An input that nothing reads is not there any more, and one may have further names, of values that it became.
        left = {name: at for at, i in enumerate(self._compiled.inputs) for name in i.get_names()}
        self._places = [left.get(n) for i, n in enumerate(names) if i not in constants]
        self._results = list(results)
        self._guarded = len(self._compiled.outputs) > len(results)
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
                _require_narrow(value)
                request.set_input_tensor(i, tensor(value.numpy(), shared_memory=True))
        if not self._fixed:
            request.infer()
            count = len(self._compiled.outputs)
            made = [torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(count)]
            if self._guarded:
                require_in_range(made.pop())
            return tuple(layout.result(value) for layout, value in zip(self._results, made, strict=True))
        places = [layout.place() for layout in self._results]
        for i, (_, place) in enumerate(places):
            request.set_output_tensor(i, tensor(place.numpy(), shared_memory=True))
        flag: Tensor | None = None
        if self._guarded:
            flag = torch.empty((), dtype=torch.bool)
            request.set_output_tensor(len(places), tensor(flag.numpy(), shared_memory=True))
        request.infer()
        if flag is not None:
            require_in_range(flag)
        return tuple(
            made if layout.order is not None else layout.result(made)
            for layout, (made, _) in zip(self._results, places, strict=True)
        )


def _require_narrow(value: Tensor) -> None:
    """Raise where a number needs 64 bits: cut to 32 it would be another."""
    if value.dtype == torch.int64 and value.numel():
        least, most = torch.aminmax(value)
        if least < -(2**31) or most >= 2**31:
            raise OverflowError("a whole number needs 64 bits, and OpenVINO has 32")


def _compiled(model: Any, settings: dict[str, Any]) -> Any:
    try:
        return _core().compile_model(model, "CPU", settings)
    except RuntimeError:
        if "SNIPPETS_MODE" in settings:
            raise
        # Its own fusion of chains does not take every graph that it finds; without it more is taken.
        return _core().compile_model(model, "CPU", settings | {"SNIPPETS_MODE": "DISABLE"})


@functools.cache
def _module() -> Any:
    import openvino

    return openvino


@functools.cache
def _core() -> Any:
    return _module().Core()
