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

from dovetail.backends.external.external_base import (
    CompiledSession,
    ExternalBackend,
    checked_results,
    join_parts,
    split_parts,
    with_bound,
)
from dovetail.errors import checked_init
from dovetail.formats.op_support import COMMON_VALIDATED, ProbedSupport, SupportProbe
from dovetail.formats.reexport import lerp, pow_as_root, reexport_body
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.schema import argument_of
from dovetail.ir.tensor_spec import Layout
from dovetail.lowering.backend_protocol import load_package, package_version
from dovetail.lowering.failures import UnsupportedOp
from dovetail.lowering.region_support import suppress_warnings

Legalization = Callable[[Any, Any], Any]
Comparison = Callable[[Any, Any], Any]


@functools.cache
def legalizations() -> dict[str, Legalization]:
    """Return our legalizations of Relax operators, by name, where TVM's own differ from torch."""
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
    # An absent bound is infinite, which integers cannot represent.
    least = None if getattr(low, "value", 0) == -math.inf else tirx.Cast(x.dtype, low)
    most = None if getattr(high, "value", 0) == math.inf else tirx.Cast(x.dtype, high)

    def at(*i: Any) -> Any:
        value = x(*i)
        if least is not None:
            value = tirx.Select(value < least, least, value)
        # The upper bound wins where it is below the lower one.
        return value if most is None else tirx.Select(value > most, most, value)

    return te.compute(x.shape, at, name="clip")


def _extremum(most: bool, dtype: Any) -> Comparison:
    """Return a function of the larger of two numbers, or the smaller, that propagates NaN."""
    tirx, floats = load_package("tvm.tirx"), "float" in str(dtype)

    # A reducer inspects the function, which must have two parameters.
    def extremum(a: Any, b: Any) -> Any:
        first = a > b if most else a < b
        # TVM would simplify a comparison with itself.
        return tirx.Select(tirx.any(first, tirx.isnan(a)) if floats else first, a, b)

    return extremum


def _broadcast(most: bool) -> Comparison:
    def both(x: Any, y: Any) -> Any:
        te, topi = load_package("tvm.te"), load_package("tvm.topi")
        shape = list(torch.broadcast_shapes(*([int(n) for n in one.shape] for one in (x, y))))
        wide = [topi.broadcast_to(one, shape) for one in (x, y)]
        extremum = _extremum(most, x.dtype)

        def at(*i: Any) -> Any:
            return extremum(wide[0](*i), wide[1](*i))

        return te.compute(shape, at, name="extreme")

    return both


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

    return te.comm_reducer(_extremum(most, dtype), identity, name="extreme")


def _reduced(builder: Any, call: Any, most: bool) -> Any:
    te = load_package("tvm.te")
    shape = [int(n) for n in call.args[0].ty.shape.values]
    axes = range(len(shape)) if call.attrs.axis is None else [int(a) % len(shape) for a in call.attrs.axis]
    sizes = [int(n) for n in call.ty.shape.values]
    keepdims, reducer = bool(call.attrs.keepdims), _reducer(most, call.args[0].ty.dtype)

    def run(x: Any) -> Any:
        along = {a: te.reduce_axis((0, shape[a]), name=f"k{a}") for a in axes}

        def at(*i: Any) -> Any:
            free = iter(i)
            place = [along[d] if d in along and not keepdims else next(free) for d in range(len(shape))]
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
    "aten.log1p.default": "TVM computes log1p as log(1 + x), which is inexact for small x"
}
"""Operators that TVM computes inexactly."""
_CONVERTING = reset_at_fork(threading.Lock())


def to_relax(graph: Graph) -> Any:
    """Return a graph as a Relax module with the function "main", legalized; raise UnsupportedOp."""
    relax = load_package("tvm.relax")
    convert = load_package("tvm.relax.frontend.torch").from_exported_program
    with _CONVERTING, suppress_warnings():
        try:
            module = relax.transform.LegalizeOps(legalizations())(
                convert(_exported(graph), run_ep_decomposition=False)
            )
        except Exception as error:
            raise UnsupportedOp(f"TVM does not convert it: {_reason(error)}") from error
    _check_types(module, graph)
    return module


def _check_types(module: Any, graph: Graph) -> None:
    """Raise UnsupportedOp if the converter changed the dtype or shape of a result."""
    types = list(module["main"].ret_ty.fields)
    for kind, node in zip(types, cast("Sequence[Node]", graph.output_node().args[0]), strict=True):
        value = node.meta["val"]
        got, expected = str(kind.dtype), str(value.dtype).removeprefix("torch.")
        if got != expected or [int(n) for n in kind.shape.values] != list(value.shape):
            raise UnsupportedOp(f"TVM returns {got} in place of {expected} ('{node.name}')")


def _exported(graph: Graph) -> ExportedProgram:
    """Wrap a graph in an ExportedProgram without tracing it again; torch checks that its operators are functional."""
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
_VALIDATED = COMMON_VALIDATED | {"diagonal.default"}
"""Operators whose results in TVM were compared with torch's."""


def _with_alpha(target: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a workaround for a sum or difference with `alpha`, which becomes a product."""

    def run(x: Tensor, y: Any, alpha: float = 1) -> Any:
        if alpha == 1:
            return NotImplemented
        return target(x, (y.to(torch.result_type(x, y)) if isinstance(y, Tensor) else y) * alpha)

    return run


def _rsub(x: Tensor, y: Any, alpha: float = 1) -> Any:
    if alpha == 1:
        return NotImplemented
    # TVM does not convert a number minus a tensor.
    return torch.add(x.to(torch.result_type(x, y)) * -alpha, y)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if scale == input_scale == 1:
        return NotImplemented
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _celu(x: Tensor, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else _elu(x, alpha, 1, 1 / alpha)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """Compute from the larger operand, so that nothing overflows; equal operands may be infinite."""
    less = torch.exp(-(x - y).abs())
    # log1p(less), which TVM computes inexactly for small `less`.
    more = torch.asinh(less * (less + 2) / ((less + 1) * 2))
    return torch.where(x == y, x + math.log(2), torch.maximum(x, y) + more)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Sort NaN as infinity; TVM would leave it anywhere."""
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
    """Decompose attention with another scale than TVM's, or with grouped queries."""
    if scale is None and not enable_gqa:
        return NotImplemented
    if attn_mask is not None or dropout_p:
        raise UnsupportedOp("TVM has a fixed scale of attention")
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


TVM_WORKAROUNDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.add.Tensor: _with_alpha(torch.add),
    ATEN.sub.Tensor: _with_alpha(torch.sub),
    ATEN.rsub.Scalar: _rsub,
    ATEN.rsub.Tensor: _rsub,
    ATEN.elu.default: _elu,
    ATEN.celu.default: _celu,
    ATEN.logaddexp.default: _logaddexp,
    ATEN.topk.default: _topk,
    ATEN.pow.Tensor_Scalar: pow_as_root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.scaled_dot_product_attention.default: _attention,
}


@checked_init()
class Tvm(ProbedSupport, ExternalBackend):
    """Compiles regions of fixed sizes with TVM for the CPU, in float32.

    Nothing is tuned: loops are TVM's defaults, in one thread except for sorts and scans. `target` is a TVM target, by
    default the processor of this machine.
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

    def probe(self) -> SupportProbe:
        return _probe()

    def program(self, body: GraphModule, operands: Sequence[Layout], results: Sequence[Layout]) -> TvmProgram:
        rewritten = reexport_body(body, operands, results, self.decomposition)
        return TvmProgram(self.target, rewritten.guarded, to_relax(rewritten.graph))

    def session(
        self, program: TvmProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _TvmSession(program, constants, results)

    def serialize(self, program: TvmProgram) -> bytes:
        with tempfile.TemporaryDirectory(prefix="dovetail-tvm-") as folder:
            path = Path(folder) / "region.so"
            # It is linked by the system's compiler; without one this raises, and nothing is cached.
            program.executable().export_library(str(path))
            return join_parts(b"g" if program.guarded else b"-", path.read_bytes())

    def deserialize(self, data: bytes) -> TvmProgram:
        guarded, library = split_parts(data)
        return TvmProgram(self.target, guarded == b"g", library=library)


@dataclass(eq=False)
class TvmProgram:
    """A Relax module or its compiled library, and whether its last result is the flag of its indices."""

    target: str | None
    guarded: bool
    module: Any = None
    library: bytes = b""
    _executable: Any = None
    _lock: threading.Lock = field(default_factory=lambda: reset_at_fork(threading.Lock()))

    def executable(self) -> Any:
        """Return the code, compiled or loaded once."""
        with self._lock:
            if self._executable is None:
                self._executable = self._loaded() if self.library else self._compiled()
            return self._executable

    def _compiled(self) -> Any:
        tvm = load_package("tvm")
        here = tvm.target.Target
        target = here.from_device(tvm.cpu()) if self.target is None else here(self.target)
        return tvm.compile(self.module, target=target)

    def _loaded(self) -> Any:
        # The loaded library outlives its file.
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
        self._from_dlpack: Callable[[Tensor], Any] = tvm.runtime.from_dlpack
        # TVM reads torch's memory, which must stay alive.
        self._held = {i: _aligned(value) for i, value in constants.items()}
        self._bound = {i: self._from_dlpack(value) for i, value in self._held.items()}
        self.shared = frozenset(i for i, value in constants.items() if self._held[i] is value)
        # A machine serves one call at a time, and threads may call concurrently.
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle.put(self._machine())

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        _set_threads(torch.get_num_threads())
        rows = tuple(map(_aligned, rows))
        operands = with_bound(self._bound, [self._from_dlpack(row) for row in rows])
        try:
            machine = self._idle.get_nowait()
        except queue.Empty:
            machine = self._machine()
        try:
            values = [torch.from_dlpack(value) for value in machine["main"](*operands)]
        finally:
            self._idle.put(machine)
        return checked_results(self._unaliased(values, rows), self._results, self._program.guarded)

    def _unaliased(self, values: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return values in memory of their own: TVM returns a reshape of an operand or of another value in place."""
        used = {t.data_ptr() for t in (*rows, *self._held.values())}
        own: list[Tensor] = []
        for value in values:
            value = value.clone() if value.data_ptr() in used else value
            used.add(value.data_ptr())
            own.append(value)
        return own


_ALIGNMENT = 64


def _aligned(value: Tensor) -> Tensor:
    """Return a tensor with the alignment that TVM expects, which a view of torch's memory may not have."""
    return value.clone() if value.data_ptr() % _ALIGNMENT else value


_STATE = threading.local()


def _set_threads(count: int) -> None:
    """Set TVM's number of threads, which is local to the calling thread."""
    if getattr(_STATE, "count", 0) != count:
        configure = load_package("tvm").get_global_func("runtime.config_threadpool", allow_missing=True)
        if configure is not None:
            configure(0, count)
        _STATE.count = count


@functools.cache
def _probe() -> SupportProbe:
    return SupportProbe(
        convert=to_relax,
        table=torch.export.default_decompositions,
        validated=_VALIDATED,
        why_wrong=_why_wrong,
        workarounds=TVM_WORKAROUNDS,
    )


def _why_wrong(node: Node) -> str | None:
    """Return why TVM computes something else than torch for these operands, or None."""
    name, first = str(node.target), node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    if name.startswith("aten.ne.") and isinstance(value, Tensor) and value.dtype.is_floating_point:
        return "in TVM NaN equals itself"
    if name.endswith(".Scalar") and isinstance(value, Tensor) and not value.dtype.is_floating_point:
        other = argument_of(node, "other")
        if isinstance(other, float) and not other.is_integer():
            return "TVM truncates a float that is combined with integers"
    if name == "aten.topk.default" and isinstance(value, Tensor) and value.dtype is torch.int16:
        return "TVM does not sort int16"
    result = node.meta.get("val")
    floating = isinstance(result, Tensor) and result.dtype.is_floating_point
    if floating and any(argument_of(node, factor) == 0 for factor in _FACTORS.get(node.target, ())):
        return "TVM computes zero times infinity or NaN as zero"
    if name.startswith("aten.clamp") and any(bound != bound for bound in node.args[1:]):
        return "TVM does not clamp to NaN"
    if name.startswith("aten.scatter.") and isinstance(value, Tensor):
        index, dim = argument_of(node, "index").meta["val"], argument_of(node, "dim") % value.dim()
        if any(index.shape[d] != n for d, n in enumerate(value.shape) if d != dim):
            return "TVM scatters to wrong positions if there are fewer indices than positions"
    return INEXACT.get(name)


_FACTORS: Mapping[Any, tuple[str, ...]] = {
    ATEN.mul.Tensor: ("other",),
    ATEN.add.Tensor: ("alpha",),
    ATEN.sub.Tensor: ("alpha",),
    ATEN.rsub.Scalar: ("alpha",),
    ATEN.rsub.Tensor: ("alpha",),
    ATEN.addcmul.default: ("value",),
    ATEN.addcdiv.default: ("value",),
    ATEN.leaky_relu.default: ("negative_slope",),
    ATEN.scaled_dot_product_attention.default: ("scale",),
}
"""Arguments by which operators multiply."""
