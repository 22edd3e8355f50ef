"""Which operations an external compiler supports: validated operators, checks of values, and probes of the compiler.

A probe converts many operations at once and bisects them on failure; equal operations are probed once.
"""

from __future__ import annotations

import operator
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.formats.reexport import INDEXED_OPS, decompose_node, input_nodes, isolated_calls
from dovetail.ir.nodes import is_static_size
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.schema import argument_of, op_name
from dovetail.lowering.failures import UnsupportedOp
from dovetail.lowering.region_support import values_of, why_denormal, why_empty, why_not_pure


@dataclass(frozen=True)
class OpSupport:
    """The outcome of a probe: why an operation is not supported, or the decomposition to write in its place, if any."""

    reason: str | None = None
    decomposed: GraphModule | None = None


class _NoWorkaround(Exception):
    """An operator needs no workaround for these arguments."""


class SupportProbe:
    """Asks a compiler which operations it supports.

    `convert` gives a graph to the compiler and raises UnsupportedOp. An operation that it does not convert is tried
    again decomposed by `table`, those of `decompose_first` at once. Only `validated` operators are tried, and only for
    arguments for which `why_wrong` returns None. `workarounds` write an operator that the compiler gets wrong in
    operations that it gets right; they return NotImplemented for arguments that need none.
    """

    def __init__(
        self,
        convert: Callable[[Graph], Any],
        table: Callable[[], Mapping[Any, Callable[..., Any]]],
        validated: frozenset[str],
        why_wrong: Callable[[Node], str | None],
        decompose_first: frozenset[str] = frozenset(),
        workarounds: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.convert, self.table, self.decompose_first = convert, table, decompose_first
        self.validated, self.why_wrong = validated, why_wrong
        self.workarounds = {
            target: _not_nested(workaround) for target, workaround in (workarounds or {}).items()
        }
        self._results: dict[str, OpSupport] = {}
        self._lock = reset_at_fork(threading.RLock())

    def precheck(self, node: Node) -> str | None:
        """Return why an operation must not be tried, or None."""
        return _why_not_validated(self.validated, node) or self.why_wrong(node) or _why_risky(node)

    def support(self, node: Node, eligible: Callable[[Node], bool]) -> OpSupport:
        """Return the support of a node. Other operations of its graph that are `eligible` are probed with it."""
        reason = self.precheck(node)
        if reason is not None:
            return OpSupport(reason)
        key = probe_key(node)
        with self._lock:
            if key not in self._results:
                waiting = {key: node}
                for one in node.graph.nodes:
                    if one.op == "call_function" and one.target is not operator.getitem and eligible(one):
                        waiting.setdefault(probe_key(one), one)
                self._probe(
                    [n for k, n in waiting.items() if k not in self._results and self.precheck(n) is None]
                )
            return self._results[key]

    def _probe(self, nodes: Sequence[Node]) -> None:
        """Probe operations together; if that fails, bisect them."""
        decomposed = self._decompose_known(nodes)
        if self._why_not(nodes, decomposed) is None:
            self._results.update({probe_key(n): OpSupport(decomposed=decomposed.get(n)) for n in nodes})
        elif len(nodes) > 1:
            half = len(nodes) // 2
            self._probe(nodes[:half])
            self._probe(nodes[half:])
        else:
            self._results[probe_key(nodes[0])] = self._probe_decomposed(nodes[0])

    def _decompose_known(self, nodes: Sequence[Node]) -> dict[Node, GraphModule | None]:
        """Return the operations that are never tried as they are, decomposed, or None where that fails."""
        decomposed: dict[Node, GraphModule | None] = {}
        for node in nodes:
            if str(node.target) in self.decompose_first:
                decomposed[node] = self._decompose(node)
            elif node.target in self.workarounds:
                try:
                    decomposed[node] = decompose_node(node, self.workarounds, self._workaround(node))
                except _NoWorkaround:
                    pass
                except Exception:  # without its workaround the operation must not be used
                    decomposed[node] = None
        return decomposed

    def _probe_decomposed(self, node: Node) -> OpSupport:
        """Probe an operation again, decomposed."""
        decomposed = self._decompose(node)
        if decomposed is None:
            return OpSupport(self._why_not([node], self._decompose_known([node])))
        reason = self._why_not([node], {node: decomposed})
        return OpSupport(reason) if reason is not None else OpSupport(decomposed=decomposed)

    def _decompose(self, node: Node) -> GraphModule | None:
        """Return a node in other operations, or None if that is not possible."""
        try:
            table = dict(self.table())
            for target, workaround in self.workarounds.items():
                table[target] = _with_fallback(workaround, table.get(target))
            try:
                decomposed = decompose_node(node, table, self._workaround(node))
            except _NoWorkaround:
                decomposed = decompose_node(node, table)
        except Exception:  # torch has no decomposition for these arguments
            return None
        calls = [n.target for n in decomposed.graph.nodes if n.op == "call_function"]
        held = any(n.op == "get_attr" for n in decomposed.graph.nodes)
        strided = any(_starts_with(target, *_STRIDED) for target in calls)
        return None if held or strided or calls == [node.target] else decomposed

    def _workaround(self, node: Node) -> Callable[..., Any]:
        """Return the workaround of an operator, to be traced; it raises _NoWorkaround if none is needed."""
        workaround = self.workarounds.get(node.target)

        # Called directly: torch decomposes many operators before it looks at a decomposition table.
        def run(*args: Any, **kwargs: Any) -> Any:
            result = NotImplemented if workaround is None else workaround(*args, **kwargs)
            if result is NotImplemented:
                raise _NoWorkaround
            return result

        return run

    def _why_not(self, nodes: Sequence[Node], decomposed: Mapping[Node, GraphModule | None]) -> str | None:
        failed = next((n for n in nodes if n in decomposed and decomposed[n] is None), None)
        if failed is not None:
            return f"{failed.target} cannot be decomposed"
        try:
            self.convert(isolated_calls(nodes, decomposed.get))
        except UnsupportedOp as failure:
            return str(failure)
        except Exception as error:
            return f"it cannot be converted: {_first_line(error)}"
        return None


def probe_key(node: Node) -> str:
    """Return what can matter of an operation: operator, literals, dtypes and sizes of inputs, and which are the same."""
    places = {one: i for i, one in enumerate(node.all_input_nodes)}
    return f"{node.target} {map_arg((node.args, node.kwargs), lambda n: _value_key(n, places[n]))!r}"


def _why_risky(node: Node) -> str | None:
    """Return why an operation must not be tried with any compiler (some never terminate), or None."""
    inputs = input_nodes((node.args, node.kwargs))
    # An index is replaced by one that is in range, which it cannot be while the same value is another argument.
    if str(node.target) in INDEXED_OPS and len(inputs) != len(set(inputs)):
        return "it takes an index from the tensor that it reads"
    if _starts_with(node.target, *_STRIDED, *_UNINITIALIZED):
        return f"{node.target} depends on the memory layout, and a compiler has values"
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    named = op_name(node.target) not in ("unsqueeze", "squeeze") and any(
        a.name.startswith("dim") for a in cast("Any", node.target)._schema.arguments
    )
    if named and isinstance(value, Tensor) and not value.dim():
        return f"{node.target} is along a dimension of a scalar"
    return None


_STRIDED = ("as_strided", "set", "resize", "view.dtype", "is_contiguous")
_UNINITIALIZED = ("empty", "new_empty")


def _starts_with(target: Any, *names: str) -> bool:
    return str(target).removeprefix("aten.").startswith(names)


def _not_nested(workaround: Callable[..., Any]) -> Callable[..., Any]:
    """Return a workaround that is not applied to the operators that it calls itself."""
    state = threading.local()

    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(state, "here", False):
            return NotImplemented
        state.here = True
        try:
            return workaround(*args, **kwargs)
        finally:
            state.here = False

    return run


def _with_fallback(
    workaround: Callable[..., Any], otherwise: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return a workaround that falls back to an entry of a table where it is not needed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = workaround(*args, **kwargs)
        return result if result is not NotImplemented or otherwise is None else otherwise(*args, **kwargs)

    return run


def _value_key(node: Node, place: int) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"<{place} {value.dtype} {tuple(value.shape)}>"
    return f"<{place} {type(cast('object', value)).__name__}>"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


_COMMON_VALIDATED_NAMES = """
    __and__.Tensor __or__.Tensor _native_batch_norm_legit_no_training.default _to_copy.default abs.default
    acos.default acosh.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
    add.Tensor addcdiv.default addcmul.default addmm.default all.default arange.default arange.start
    arange.start_step asin.default asinh.default atan.default atanh.default baddbmm.default bitwise_and.Tensor
    bitwise_not.default bitwise_or.Tensor bitwise_xor.Tensor bmm.default cat.default ceil.default celu.default
    channel_shuffle.default clamp.default clamp_min.default clone.default constant_pad_nd.default conv1d.default
    conv1d.padding conv2d.default conv2d.padding conv3d.padding cos.default cosh.default cumsum.default
    detach.default diff.default div.Tensor dot.default einsum.default elu.default embedding.default eq.Scalar
    eq.Tensor erf.default exp.default expand.default expm1.default fill.Scalar flip.default floor.default
    frac.default full.default full_like.default gather.default ge.Scalar ge.Tensor gelu.default glu.default
    group_norm.default gt.Scalar gt.Tensor hardsigmoid.default hardswish.default hardtanh.default hstack.default
    index.Tensor index_select.default inner.default isfinite.default isinf.default isnan.default isneginf.default
    isposinf.default layer_norm.default le.Scalar le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor
    linalg_vector_norm.default linear.default log.default log10.default log2.default log_softmax.int
    logaddexp.default logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar
    lt.Tensor masked_fill.Scalar masked_fill.Tensor matmul.default max.default max_pool2d.default maximum.default
    mean.default mean.dim min.default minimum.default mm.default mul.Tensor mv.default nansum.default ne.Scalar
    ne.Tensor neg.default new_full.default new_ones.default new_zeros.default ones.default ones_like.default
    outer.default pad.default permute.default pixel_shuffle.default pixel_unshuffle.default pow.Tensor_Scalar
    pow.Tensor_Tensor prelu.default prod.default reciprocal.default relu.default relu6.default repeat.default
    reshape.default rms_norm.default roll.default round.default rsqrt.default rsub.Scalar rsub.Tensor
    scalar_tensor.default scaled_dot_product_attention.default scatter.src scatter.value select.int selu.default
    sigmoid.default sign.default silu.default sin.default sinh.default slice.Tensor softmax.int softplus.default
    split.Tensor split_with_sizes.default sqrt.default square.default squeeze.default squeeze.dim squeeze.dims
    stack.default sub.Tensor sum.default sum.dim_IntList tan.default tanh.default topk.default transpose.int
    tril.default triu.default trunc.default unbind.int unsqueeze.default vstack.default where.ScalarSelf where.self
    zeros.default zeros_like.default
"""
COMMON_VALIDATED = frozenset(_COMMON_VALIDATED_NAMES.split())
"""Operators whose results in both XLA and TVM were compared with torch's."""
_BOOLEAN_NAMES = """
    __and__ __or__ _to_copy all any bitwise_and bitwise_not bitwise_or bitwise_xor cat clone cumsum detach expand
    flip full_like gather index index_select logical_and logical_not logical_or logical_xor new_full new_ones
    new_zeros ones_like permute repeat reshape roll select slice split split_with_sizes squeeze stack sum transpose
    unbind unsqueeze where zeros_like
"""
_BOOLEAN = frozenset(_BOOLEAN_NAMES.split())
"""Operators that are supported for booleans; torch's arithmetic with booleans is its own."""
_FLOATING_ONLY = frozenset(("pow", "reciprocal"))
"""Operators that raise in torch for some integers."""
_SAME_DTYPE_NAMES = """
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training addbmm addmm baddbmm bilinear bmm
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d cross dot einsum group_norm inner
    layer_norm linear matmul mm mv native_group_norm native_layer_norm slice_scatter tensordot vdot
"""
_SAME_DTYPE = frozenset(_SAME_DTYPE_NAMES.split())
"""Operators that raise in torch for operands of different dtypes, although tracing may accept them."""


def _why_not_validated(validated: frozenset[str], node: Node) -> str | None:
    """Return why an operation was not validated against torch, or None if it was."""
    overload = str(node.target).removeprefix("aten.")
    if overload not in validated:
        return f"{node.target} was never compared with torch"
    name = overload.partition(".")[0]
    dtype = _dtype(node.args[0] if node.args else None)
    if dtype is torch.bool and name not in _BOOLEAN:
        return f"{node.target} of booleans is specific to torch"
    if name in _FLOATING_ONLY and dtype is not None and not dtype.is_floating_point:
        return f"{node.target} of integers may raise"
    if name in _SAME_DTYPE and len({_dtype(one) for one in node.all_input_nodes}) > 1:
        return f"{node.target} of operands of different dtypes raises"
    if name in ("addmm", "baddbmm") and argument_of(node, "alpha") == 0:
        return f"{node.target} ignores a product with alpha=0"
    if name == "eq" and len(node.all_input_nodes) != len([a for a in node.args if isinstance(a, Node)]):
        return f"{node.target} of a value and itself is false for NaN"
    return None


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, (list, tuple)):
        return next((_dtype(one) for one in value if isinstance(one, Node)), None)
    fake = value.meta.get("val") if isinstance(value, Node) else None
    return fake.dtype if isinstance(fake, Tensor) else None


INTEGRAL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OperationSupport:
    """Which operations a compiler supports, decided node by node from dtypes, sizes, devices and the operator.

    With `dynamic_sizes` sizes may be symbolic. A compiler that `flushes_denormals` is given no denormal literals.
    """

    name: str
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, *INTEGRAL})
    dynamic_sizes: ClassVar[bool] = False
    flushes_denormals: ClassVar[bool] = False

    @abstractmethod
    def why_not_operation(self, node: Node) -> str | None:
        """Return why the compiler does not support an eligible operation, or None."""

    def why_not(self, node: Node) -> str | None:
        """Return why an operation is not supported, or None."""
        if node.target is operator.getitem:
            return None
        return self.why_not_eligible(node) or self.why_not_operation(node)

    def why_not_eligible(self, node: Node) -> str | None:
        """Return why an operation is excluded before the compiler is asked, or None."""
        if self.dynamic_sizes and not isinstance(node.target, OpOverload):
            return None
        reason = why_not_pure(node)
        if reason is not None:
            return reason
        for one in values_of(node, *node.all_input_nodes):
            reason = self.why_not_value(one)
            if reason is not None:
                return reason
        return why_empty(node) or (why_denormal(node, self.name) if self.flushes_denormals else None)

    def why_not_value(self, value: Any) -> str | None:
        """Return why a value is not supported, or None."""
        if self.dynamic_sizes and isinstance(value, (int, torch.SymInt)):
            return None
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} is computed, and '{self.name}' has tensors only"
        if value.dtype not in self.dtypes:
            return f"'{self.name}' does not take {str(value.dtype).removeprefix('torch.')}"
        if value.device.type != "cpu":
            return f"it is on {value.device}, and '{self.name}' runs on the CPU here"
        if not self.dynamic_sizes and not all(map(is_static_size, value.shape)):
            return f"its sizes are symbolic, and '{self.name}' takes static ones"
        return None


class ProbedSupport(OperationSupport):
    """Support that is probed: the compiler is given operations and reports which it does not convert."""

    @abstractmethod
    def probe(self) -> SupportProbe:
        """Return the probe of the compiler, which all backends of a class share."""

    def why_not_operation(self, node: Node) -> str | None:
        return self._support(node).reason

    def decomposition(self, node: Node) -> GraphModule | None:
        """Return the decomposition of an operation, or None if it is written as it is; raise UnsupportedOp."""
        support = self._support(node)
        if support.reason is not None:
            raise UnsupportedOp(support.reason)
        return support.decomposed

    def _support(self, node: Node) -> OpSupport:
        return self.probe().support(node, lambda one: self.why_not_eligible(one) is None)
