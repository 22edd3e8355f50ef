"""TVM on the CPU: regions as Relax functions, compiled with LLVM."""

from __future__ import annotations

import functools
import math
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from dovetail.backends.external.external_base import CompiledSession, ExternalBackend, joined, parted
from dovetail.errors import checked_init
from dovetail.formats.onnx.writer import Layout
from dovetail.formats.op_support import TVM, ProbedSupport, SupportProbe, argument, why_risky, why_untried
from dovetail.formats.reexport import lerp, reexported, root
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import load_package, package_version, quiet
from dovetail.lowering.failures import UnsupportedOp

Loops = Callable[[Any, Any], Any]
Better = Callable[[Any, Any], Any]


@functools.cache
def loops() -> dict[str, Loops]:
    """By the name of an operator, what writes its loops."""
    topi = load_package("tvm.topi")

    def take(builder: Any, call: Any) -> Any:
        axis = call.attrs.axis
        return builder.call_te(
            topi.take, call.args[0], call.args[1], None if axis is None else int(axis), mode="clip"
        )

    return {
        "relax.take": take,
        "relax.nn.relu": lambda builder, call: builder.call_te(_relu, call.args[0]),
        "relax.clip": lambda builder, call: builder.call_te(_clip, *call.args),
        "relax.maximum": lambda builder, call: builder.call_te(_broadcast(True), *call.args),
        "relax.minimum": lambda builder, call: builder.call_te(_broadcast(False), *call.args),
        "relax.max": lambda builder, call: _reduced(builder, call, True),
        "relax.min": lambda builder, call: _reduced(builder, call, False),
        "relax.nn.max_pool2d": _pooled,
    }


def _relu(x: Any) -> Any:
    te, tirx = load_package("tvm.te"), load_package("tvm.tirx")

    def at(*i: Any) -> Any:
        return tirx.Select(x(*i) < 0, tirx.const(0, x.dtype), x(*i))

    return te.compute(x.shape, at, name="relu")


def _clip(x: Any, low: Any, high: Any) -> Any:
    te, tirx = load_package("tvm.te"), load_package("tvm.tirx")
    # A bound that is not there is infinite, which whole numbers cannot be.
    least = None if _number(low) == -math.inf else tirx.Cast(x.dtype, low)
    most = None if _number(high) == math.inf else tirx.Cast(x.dtype, high)

    def at(*i: Any) -> Any:
        value = x(*i)
        if least is not None:
            value = tirx.Select(value < least, least, value)
        # The upper bound has the last word, also where it is below the lower one.
        return value if most is None else tirx.Select(value > most, most, value)

    return te.compute(x.shape, at, name="clip")


def _number(bound: Any) -> float:
    return float(getattr(bound, "value", 0))


def _better(most: bool, dtype: Any) -> Better:
    """The larger one of two, or the smaller; what is no number is kept."""
    tirx, floats = load_package("tvm.tirx"), "float" in str(dtype)

    # A reducer looks at the code of the function, so this must be one that has two parameters.
    def better(a: Any, b: Any) -> Any:
        first = a > b if most else a < b
        # A comparison with itself would be simplified away.
        return tirx.Select(tirx.any(first, tirx.isnan(a)) if floats else first, a, b)

    return better


def _broadcast(most: bool) -> Better:
    def both(x: Any, y: Any) -> Any:
        te, topi = load_package("tvm.te"), load_package("tvm.topi")
        shape = [
            max(int(a), int(b)) if 0 not in (int(a), int(b)) else 0
            for a, b in _aligned_axes(x.shape, y.shape)
        ]
        wide = [topi.broadcast_to(one, shape) for one in (x, y)]
        better = _better(most, x.dtype)

        def at(*i: Any) -> Any:
            return better(wide[0](*i), wide[1](*i))

        return te.compute(shape, at, name="extreme")

    return both


def _aligned_axes(x: Sequence[Any], y: Sequence[Any]) -> list[tuple[Any, Any]]:
    rank = max(len(x), len(y))
    filled = [[1] * (rank - len(shape)) + list(shape) for shape in (x, y)]
    return list(zip(*filled, strict=True))


def _bound(dtype: Any, least: bool) -> Any:
    te, tirx = load_package("tvm.te"), load_package("tvm.tirx")
    text = str(dtype)
    if text.startswith("float"):
        return tirx.const(float("-inf" if least else "inf"), text)
    return te.min_value(text) if least else te.max_value(text)


def _reducer(most: bool, dtype: Any) -> Any:
    te = load_package("tvm.te")

    def identity(dtype: Any) -> Any:
        return _bound(dtype, most)

    return te.comm_reducer(_better(most, dtype), identity, name="extreme")


def _reduced(builder: Any, call: Any, most: bool) -> Any:
    te = load_package("tvm.te")
    given = [int(n) for n in call.args[0].ty.shape.values]
    axes = range(len(given)) if call.attrs.axis is None else [int(a) % len(given) for a in call.attrs.axis]
    sizes = [int(n) for n in call.ty.shape.values]
    kept, reducer = bool(call.attrs.keepdims), _reducer(most, call.args[0].ty.dtype)

    def run(x: Any) -> Any:
        along = {a: te.reduce_axis((0, given[a]), name=f"k{a}") for a in axes}

        def at(*i: Any) -> Any:
            free = iter(i)
            place = [along[d] if d in along and not kept else next(free) for d in range(len(given))]
            value = x(*[along.get(d, p) for d, p in enumerate(place)])
            return reducer(value, axis=list(along.values())) if along else value

        return te.compute(sizes, at, name="extreme")

    return builder.call_te(run, call.args[0])


def _pooled(builder: Any, call: Any) -> Any:
    te, tirx = load_package("tvm.te"), load_package("tvm.tirx")
    attrs = call.attrs
    if str(attrs.layout) != "NCHW" or str(attrs.out_layout) != "NCHW":
        raise NotImplementedError(f"max_pool2d in the layout {attrs.layout}")
    sizes = [int(n) for n in call.ty.shape.values]
    height, width = (int(n) for n in call.args[0].ty.shape.values[2:])
    kernel, step, wide = ([int(n) for n in a] for a in (attrs.pool_size, attrs.strides, attrs.dilation))
    top, left = (int(n) for n in list(attrs.padding)[:2])
    reducer = _reducer(True, call.args[0].ty.dtype)

    def run(x: Any) -> Any:
        down, across = (
            te.reduce_axis((0, k), name=name) for k, name in zip(kernel, ("kh", "kw"), strict=True)
        )

        def at(n: Any, c: Any, i: Any, j: Any) -> Any:
            row = i * step[0] + down * wide[0] - top
            column = j * step[1] + across * wide[1] - left
            inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
            value = tirx.if_then_else(inside, x(n, c, row, column), _bound(x.dtype, True))
            return reducer(value, axis=[down, across])

        return te.compute(sizes, at, name="max_pool2d")

    return builder.call_te(run, call.args[0])


INEXACT: Mapping[str, str] = {
    "aten.log1p.default": "TVM takes log(1 + x) for log1p, which is off where x is small",
}
"""Operators whose form in TVM is not what they are."""
_CONVERTING = released_by_fork(threading.Lock())


def converted(graph: Graph) -> Any:
    """A Relax module whose function "main" does what a graph does, down to loops; raises NoForm."""
    relax = load_package("tvm.relax")
    convert = load_package("tvm.relax.frontend.torch").from_exported_program
    with _CONVERTING, quiet():
        try:
            module = relax.transform.LegalizeOps(loops())(
                convert(_exported(graph), run_ep_decomposition=False)
            )
        except Exception as error:
            raise UnsupportedOp(f"TVM does not convert it: {_reason(error)}") from error
    _check_types(module, graph)
    return module


def _check_types(module: Any, graph: Graph) -> None:
    """Whether results are what they must be: of some dtypes the converter makes others."""
    made = list(module["main"].ret_ty.fields)
    for kind, node in zip(made, cast("Sequence[Node]", graph.output_node().args[0]), strict=True):
        value = node.meta["val"]
        got, wanted = str(kind.dtype), str(value.dtype).removeprefix("torch.")
        if got != wanted or [int(n) for n in kind.shape.values] != list(value.shape):
            raise UnsupportedOp(f"TVM makes {got} of what is {wanted} ('{node.name}')")


def _exported(graph: Graph) -> ExportedProgram:
    """A graph that is plain already as a program, without tracing it once more."""
    operands = graph.find_nodes(op="placeholder")
    results = cast("Sequence[Node]", graph.output_node().args[0])
    inputs = [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in operands]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results]
    called = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure(((0,) * len(inputs), {})),
        out_spec=pytree.tree_structure((0,) * len(outputs)),
    )
    return ExportedProgram(
        nn.Module(), graph, ExportGraphSignature(inputs, outputs), {}, {}, [ModuleCallEntry("", called)]
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


ATEN = torch.ops.aten


def _scaled(x: Tensor, y: Any, alpha: float) -> Any:
    return y.to(torch.result_type(x, y)) * alpha if isinstance(y, Tensor) else y * alpha


def _add(x: Tensor, y: Any, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else torch.add(x, _scaled(x, y, alpha))


def _sub(x: Tensor, y: Any, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else torch.sub(x, _scaled(x, y, alpha))


def _rsub(x: Tensor, y: Any, alpha: float = 1) -> Any:
    if alpha == 1:
        return NotImplemented
    # A number less a tensor is not converted.
    return torch.add(x.to(torch.result_type(x, y)) * -alpha, y)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if scale == input_scale == 1:
        return NotImplemented
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _celu(x: Tensor, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else _elu(x, alpha, 1, 1 / alpha)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """From the larger one, so that nothing overflows; equal ones may be infinite, and have no difference."""
    less = torch.exp(-(x - y).abs())
    # log(1 + less), which TVM has not where `less` is small.
    more = torch.asinh(less * (less + 2) / ((less + 1) * 2))
    return torch.where(x == y, x + math.log(2), torch.maximum(x, y) + more)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """What is no number is as large as what is infinite; TVM would leave it anywhere."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    places = torch.topk(torch.where(torch.isnan(x), torch.inf, x), k, dim, largest, sorted)[1]
    return torch.gather(x, dim, places), places


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with a scale that is not TVM's own, or with fewer heads of keys than of queries."""
    if scale is None and not enable_gqa:
        return NotImplemented
    if attn_mask is not None or dropout_p:
        raise UnsupportedOp("TVM has its own scale of attention")
    if enable_gqa:
        key, value = (_heads(one, query.shape[-3]) for one in (key, value))
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.mT
    if is_causal:
        rows, columns = (torch.arange(n) for n in scores.shape[-2:])
        scores = torch.where(columns <= rows.unsqueeze(1), scores, -torch.inf)
    return torch.softmax(scores, -1) @ value


def _heads(x: Tensor, count: int) -> Tensor:
    *before, heads, rows, width = x.shape
    many = x.unsqueeze(-3).expand(*before, heads, count // heads, rows, width)
    return many.reshape(*before, count, rows, width)


MENDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.add.Tensor: _add,
    ATEN.sub.Tensor: _sub,
    ATEN.rsub.Scalar: _rsub,
    ATEN.rsub.Tensor: _rsub,
    ATEN.elu.default: _elu,
    ATEN.celu.default: _celu,
    ATEN.logaddexp.default: _logaddexp,
    ATEN.topk.default: _topk,
    ATEN.pow.Tensor_Scalar: root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.scaled_dot_product_attention.default: _attention,
}


@checked_init()
class Tvm(ProbedSupport, ExternalBackend):
    """Compiles regions of fixed sizes with TVM for the CPU, in float32.

    Nothing is tuned: loops are as TVM writes them by itself, in one thread unless they are sorted or scanned. `target`
    is a target of TVM's, the processor that this runs on if it is not given.
    """

    name = "tvm"
    packages: ClassVar[tuple[str, ...]] = ("tvm",)

    def __init__(self, target: str | None = None) -> None:
        self.target = target

    @property
    def options(self) -> Mapping[str, Any]:
        return {} if self.target is None else {"target": self.target}

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 {package_version('apache-tvm')}"

    def judge(self) -> SupportProbe:
        return _judge()

    def program(self, body: GraphModule, operands: Sequence[Layout], results: Sequence[Layout]) -> TvmProgram:
        told = reexported(body, operands, results, self.spelling)
        return TvmProgram(self.target, told.guarded, converted(told.graph))

    def session(
        self, program: TvmProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _TvmSession(program, constants, results)

    def packed(self, program: TvmProgram) -> bytes:
        with tempfile.TemporaryDirectory(prefix="dovetail-tvm-") as folder:
            path = Path(folder) / "region.so"
            # It is linked by the compiler of the system; without one this raises, and nothing is kept.
            program.executable().export_library(str(path))
            return joined(b"g" if program.guarded else b"-", path.read_bytes())

    def unpacked(self, data: bytes) -> TvmProgram:
        guarded, library = parted(data)
        return TvmProgram(self.target, guarded == b"g", library=library)


@dataclass(eq=False)
class TvmProgram:
    """A Relax module or the library that was made of one, and whether its last result is the flag of its indices."""

    target: str | None
    guarded: bool
    module: Any = None
    library: bytes = b""
    _made: Any = None
    _lock: threading.Lock = field(default_factory=lambda: released_by_fork(threading.Lock()))

    def executable(self) -> Any:
        """The code."""
        with self._lock:
            if self._made is None:
                self._made = self._loaded() if self.library else self._compiled()
            return self._made

    def _compiled(self) -> Any:
        tvm = load_package("tvm")
        here = tvm.target.Target
        target = here.from_device(tvm.cpu()) if self.target is None else here(self.target)
        return tvm.compile(self.module, target=target)

    def _loaded(self) -> Any:
        # What is loaded stays when its file is gone.
        with tempfile.NamedTemporaryFile(prefix="dovetail-tvm-", suffix=".so") as file:
            file.write(self.library)
            file.flush()
            return load_package("tvm").runtime.load_module(file.name)


class _TvmSession(CompiledSession):
    def __init__(
        self, program: TvmProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> None:
        tvm = load_package("tvm")
        relax = load_package("tvm.relax")
        self._program, self._results = program, list(results)
        self._machine: Callable[[], Any] = lambda: relax.VirtualMachine(program.executable(), tvm.cpu())
        self._given: Callable[[Tensor], Any] = tvm.runtime.from_dlpack
        # The memory is torch's own, and must live as long as TVM reads it.
        self._held = {i: _aligned(value) for i, value in constants.items()}
        self._bound = {i: self._given(value) for i, value in self._held.items()}
        self.shared = frozenset(i for i, value in constants.items() if self._held[i] is value)
        # A machine is for one call at a time, and threads may call at once.
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle.put(self._machine())

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        _set_threads(torch.get_num_threads())
        rows = tuple(map(_aligned, rows))
        fresh, bound = iter(map(self._given, rows)), self._bound
        operands = [bound[i] if i in bound else next(fresh) for i in range(len(bound) + len(rows))]
        try:
            machine = self._idle.get_nowait()
        except queue.Empty:
            machine = self._machine()
        try:
            made = [torch.from_dlpack(value) for value in machine["main"](*operands)]
        finally:
            self._idle.put(machine)
        if self._program.guarded and not bool(made.pop()):
            raise IndexError("an index is out of range")
        return tuple(
            layout.result(value) for layout, value in zip(self._results, self._fresh(made, rows), strict=True)
        )

    def _fresh(self, made: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Results in memory of their own: a reshape of an operand, or of another result, is told in place."""
        seen = {t.data_ptr() for t in (*rows, *self._held.values())}
        own: list[Tensor] = []
        for value in made:
            value = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
            own.append(value)
        return own


_ALIGNMENT = 64


def _aligned(value: Tensor) -> Tensor:
    """A tensor that begins where TVM's code expects one to; torch's own memory does, a part of it may not."""
    return value.clone() if value.data_ptr() % _ALIGNMENT else value


_STATE = threading.local()


def _set_threads(count: int) -> None:
    """Tell TVM how many threads it has; each thread that calls it has threads of its own."""
    if getattr(_STATE, "count", 0) != count:
        configure = load_package("tvm").get_global_func("runtime.config_threadpool", allow_missing=True)
        if configure is not None:
            configure(0, count)
        _STATE.count = count


@functools.cache
def _judge() -> SupportProbe:
    return SupportProbe(converted, _table, _sifted, mends=MENDS)


def _table() -> Mapping[Any, Callable[..., Any]]:
    return torch.export.default_decompositions()


def _sifted(node: Node) -> str | None:
    return why_untried(TVM, node) or _why_wrong(node) or why_risky(node)


def _why_wrong(node: Node) -> str | None:
    """Why an operation would not give in TVM what it gives in torch, where that is a matter of its operands."""
    name, first = str(node.target), node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    if name.startswith("aten.ne.") and isinstance(value, Tensor) and value.dtype.is_floating_point:
        return "TVM says of what is no number that it equals itself"
    if name.endswith(".Scalar") and isinstance(value, Tensor) and not value.dtype.is_floating_point:
        other = argument(node, "other")
        if isinstance(other, float) and not other.is_integer():
            return "TVM cuts off what a number has behind its point where it meets whole numbers"
    if name == "aten.topk.default" and isinstance(value, Tensor) and value.dtype is torch.int16:
        return "TVM does not sort int16"
    if any(argument(node, factor) == 0 for factor in _FACTORS.get(node.target, ())) and _is_floating(node):
        return "TVM takes zero times a number for zero, also if that is infinite or no number"
    if name.startswith("aten.clamp") and any(bound != bound for bound in node.args[1:]):
        return "TVM does not clamp to what is no number"
    if name.startswith("aten.scatter.") and isinstance(value, Tensor):
        index, dim = argument(node, "index").meta["val"], argument(node, "dim") % value.dim()
        if any(index.shape[d] != n for d, n in enumerate(value.shape) if d != dim):
            return "TVM scatters to other places where there are fewer indices than places"
    return INEXACT.get(name)


_ATEN = torch.ops.aten
_FACTORS: Mapping[Any, tuple[str, ...]] = {
    _ATEN.mul.Tensor: ("other",),
    _ATEN.add.Tensor: ("alpha",),
    _ATEN.sub.Tensor: ("alpha",),
    _ATEN.rsub.Scalar: ("alpha",),
    _ATEN.rsub.Tensor: ("alpha",),
    _ATEN.addcmul.default: ("value",),
    _ATEN.addcdiv.default: ("value",),
    _ATEN.leaky_relu.default: ("negative_slope",),
    _ATEN.scaled_dot_product_attention.default: ("scale",),
}
"""Arguments with which operators multiply."""


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point
