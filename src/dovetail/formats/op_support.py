"""Which operations a compiler knows, found out by giving it some: many at once, and each that is alike only once."""

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

from dovetail.formats.reexport import INDEXING, alone, written_out
from dovetail.ir.nodes import is_number
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import values_of, why_denormal, why_empty, why_not_pure
from dovetail.lowering.failures import UnsupportedOp


@dataclass(frozen=True)
class OpSupport:
    """What became of an operation: the reason why it is not taken, or what to write in its place, if anything."""

    reason: str | None = None
    written: GraphModule | None = None


class _AsItIs(Exception):
    """An operator needs no mending with these arguments."""


class SupportProbe:
    """Asks a compiler about operations.

    `convert` gives a graph to the compiler and raises NoForm for what it does not know. What it does not know is tried
    again in the operations that `table` leads to, those of `foreseen` at once. `sift` says beforehand what is not even
    to be tried. `mends` write an operator that the compiler knows, but gets wrong, in operations that it gets right;
    they give NotImplemented for arguments with which it is right.
    """

    def __init__(
        self,
        convert: Callable[[Graph], Any],
        table: Callable[[], Mapping[Any, Callable[..., Any]]],
        sift: Callable[[Node], str | None],
        foreseen: frozenset[str] = frozenset(),
        mends: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.convert, self.table, self.sift, self.foreseen = convert, table, sift, foreseen
        self.mends = {target: _once(mend) for target, mend in (mends or {}).items()}
        self._known: dict[str, OpSupport] = {}
        self._lock = released_by_fork(threading.RLock())

    def verdict(self, node: Node, others: Callable[[Node], bool]) -> OpSupport:
        """What becomes of a node. Other operations of its graph are tried in the same go, if `others` says so."""
        reason = self.sift(node)
        if reason is not None:
            return OpSupport(reason)
        key = signature(node)
        with self._lock:
            if key not in self._known:
                waiting = {key: node}
                for one in node.graph.nodes:
                    if one.op == "call_function" and one.target is not operator.getitem and others(one):
                        waiting.setdefault(signature(one), one)
                self._try([n for k, n in waiting.items() if k not in self._known and self.sift(n) is None])
            return self._known[key]

    def _try(self, nodes: Sequence[Node]) -> None:
        """Try some together; where they fail, halves of them, until it is known which it is."""
        written = self._first(nodes)
        if self._why_not(nodes, written) is None:
            self._known.update({signature(n): OpSupport(written=written.get(n)) for n in nodes})
        elif len(nodes) > 1:
            half = len(nodes) // 2
            self._try(nodes[:half])
            self._try(nodes[half:])
        else:
            self._known[signature(nodes[0])] = self._second(nodes[0])

    def _first(self, nodes: Sequence[Node]) -> dict[Node, GraphModule | None]:
        """Those that are not even tried as they are, in other operations; None where there is no such way."""
        written: dict[Node, GraphModule | None] = {}
        for node in nodes:
            if str(node.target) in self.foreseen:
                written[node] = self._written(node)
            elif node.target in self.mends:
                try:
                    written[node] = written_out(node, self.mends, self._mend(node))
                except _AsItIs:
                    pass
                except Exception:  # these arguments are not mended, and must not be taken as they are
                    written[node] = None
        return written

    def _second(self, node: Node) -> OpSupport:
        """Try an operation again, written out."""
        written = self._written(node)
        if written is None:
            return OpSupport(self._why_not([node], self._first([node])))
        reason = self._why_not([node], {node: written})
        return OpSupport(reason) if reason is not None else OpSupport(written=written)

    def _written(self, node: Node) -> GraphModule | None:
        """A node in other operations; None if there is no such way to tell it."""
        try:
            table = dict(self.table())
            table.update({target: _either(mend, table.get(target)) for target, mend in self.mends.items()})
            try:
                written = written_out(node, table, self._mend(node))
            except _AsItIs:
                written = written_out(node, table)
        except Exception:  # what torch cannot write out has to be taken as it is, or not at all
            return None
        calls = [n.target for n in written.graph.nodes if n.op == "call_function"]
        held = any(n.op == "get_attr" for n in written.graph.nodes) or any(map(_needs_strides, calls))
        return None if held or calls == [node.target] else written

    def _mend(self, node: Node) -> Callable[..., Any]:
        """What mends an operator, to be written out; raises _AsItIs where nothing is to be mended."""
        mend = self.mends.get(node.target)

        # Written out by name: torch takes many operators apart before a table is asked for them.
        def run(*args: Any, **kwargs: Any) -> Any:
            made = NotImplemented if mend is None else mend(*args, **kwargs)
            if made is NotImplemented:
                raise _AsItIs
            return made

        return run

    def _why_not(self, nodes: Sequence[Node], written: Mapping[Node, GraphModule | None]) -> str | None:
        lost = next((n for n in nodes if n in written and written[n] is None), None)
        if lost is not None:
            return f"{lost.target} cannot be told in simpler operations"
        try:
            self.convert(alone(nodes, written.get))
        except UnsupportedOp as failure:
            return str(failure)
        except Exception as error:
            return f"it is not told to the compiler: {_first_line(error)}"
        return None


def signature(node: Node) -> str:
    """All that can matter of one operation: its operator, its literals, the dtypes and sizes of what it is given, and
    what of that is the same."""
    places = {one: i for i, one in enumerate(node.all_input_nodes)}
    return f"{node.target} {map_arg((node.args, node.kwargs), lambda n: _described(n, places[n]))!r}"


def reads_itself(node: Node) -> bool:
    """Whether an operation that takes indices takes one value in two places, so that it could not be replaced in one."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return str(node.target) in INDEXING and len(found) != len(set(found))


def why_risky(node: Node) -> str | None:
    """Why an operation is better not even tried, whatever the compiler: some of these make one run for ever."""
    if reads_itself(node):
        return "it takes an index from the tensor that it reads"
    if about_memory(node.target):
        return f"{node.target} is about memory, and a compiler has values"
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    named = _name(node.target) not in ("unsqueeze", "squeeze") and any(
        a.name.startswith("dim") for a in cast("Any", node.target)._schema.arguments
    )
    if named and isinstance(value, Tensor) and not value.dim():
        return f"{node.target} is along a dimension of a tensor that has none"
    return None


_STRIDED = ("as_strided", "set", "resize", "view.dtype", "is_contiguous")
_UNSET = ("empty", "new_empty")


def about_memory(target: Any) -> bool:
    """Whether an operator is about how values lie in memory, or shows memory that nobody wrote."""
    return str(target).removeprefix("aten.").startswith((*_STRIDED, *_UNSET))


def _name(target: Any) -> str:
    """The name of an operator without its overload."""
    return str(target).removeprefix("aten.").partition(".")[0]


def _needs_strides(target: Any) -> bool:
    return str(target).removeprefix("aten.").startswith(_STRIDED)


def _once(mend: Callable[..., Any]) -> Callable[..., Any]:
    """A mend that leaves the operator alone where it is used by the mend itself."""
    inside = threading.local()

    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "here", False):
            return NotImplemented
        inside.here = True
        try:
            return mend(*args, **kwargs)
        finally:
            inside.here = False

    return run


def _either(mend: Callable[..., Any], otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    """A mend, and what is in a table where it has nothing to mend."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = mend(*args, **kwargs)
        return made if made is not NotImplemented or otherwise is None else otherwise(*args, **kwargs)

    return run


def _described(node: Node, place: int) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _Text(f"<{place} {value.dtype} {tuple(value.shape)}>")
    return _Text(f"<{place} {type(cast('object', value)).__name__}>")


class _Text(str):
    """Stands for a value in a signature, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()[
        :200
    ]


_BOTH = """
    __and__.Tensor __or__.Tensor _native_batch_norm_legit_no_training.default _to_copy.default abs.default
    acos.default acosh.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
    adaptive_avg_pool3d.default add.Tensor addcdiv.default addcmul.default addmm.default all.default
    arange.default arange.start arange.start_step asin.default asinh.default atan.default atanh.default
    baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bitwise_xor.Tensor bmm.default
    cat.default ceil.default celu.default channel_shuffle.default clamp.default clamp_min.default clone.default
    constant_pad_nd.default conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.padding
    cos.default cosh.default cumsum.default detach.default diff.default div.Tensor dot.default einsum.default
    elu.default embedding.default eq.Scalar eq.Tensor erf.default exp.default expand.default expm1.default
    fill.Scalar flip.default floor.default frac.default full.default full_like.default gather.default ge.Scalar
    ge.Tensor gelu.default glu.default group_norm.default gt.Scalar gt.Tensor hardsigmoid.default
    hardswish.default hardtanh.default hstack.default index.Tensor index_select.default inner.default
    isfinite.default isinf.default isnan.default isneginf.default isposinf.default layer_norm.default le.Scalar
    le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor linalg_vector_norm.default linear.default log.default
    log10.default log2.default log_softmax.int logaddexp.default logical_and.default logical_not.default
    logical_or.default logical_xor.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor
    matmul.default max.default max_pool2d.default maximum.default mean.default mean.dim min.default
    minimum.default mm.default mul.Tensor mv.default nansum.default ne.Scalar ne.Tensor neg.default
    new_full.default new_ones.default new_zeros.default ones.default ones_like.default outer.default pad.default
    permute.default pixel_shuffle.default pixel_unshuffle.default pow.Tensor_Scalar pow.Tensor_Tensor
    prelu.default prod.default reciprocal.default relu.default relu6.default repeat.default reshape.default
    rms_norm.default roll.default round.default rsqrt.default rsub.Scalar rsub.Tensor scalar_tensor.default
    scaled_dot_product_attention.default scatter.src scatter.value select.int selu.default sigmoid.default
    sign.default silu.default sin.default sinh.default slice.Tensor softmax.int softplus.default split.Tensor
    split_with_sizes.default sqrt.default square.default squeeze.default squeeze.dim squeeze.dims stack.default
    sub.Tensor sum.default sum.dim_IntList tan.default tanh.default topk.default transpose.int tril.default
    triu.default trunc.default unbind.int unsqueeze.default vstack.default where.ScalarSelf where.self
    zeros.default zeros_like.default
"""
_XLA = """
    _native_batch_norm_legit_functional.default _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
    _upsample_nearest_exact3d.vec addbmm.default addr.default all.dim amax.default amin.default any.default
    any.dim any.dims argmax.default argmin.default argsort.default atan2.default avg_pool1d.default
    avg_pool2d.default bilinear.default clamp.Tensor clamp_max.Tensor clamp_max.default clamp_min.Tensor
    conv3d.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input copysign.Tensor
    cosine_similarity.default cross.default deg2rad.default diag.default diag_embed.default exp2.default
    fmax.default fmin.default kron.default log1p.default log_sigmoid.default logsumexp.default max.other
    meshgrid.indexing min.other mish.default nan_to_num.default
    native_group_norm.default native_layer_norm.default prod.dim_int round.decimals scatter_add.default
    slice_scatter.default sort.default std.correction std.default std_mean.correction std_mean.default
    std_mean.dim sum_to_size.default tensordot.default true_divide.Tensor upsample_linear1d.vec
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec var.correction var.default var.dim
    var_mean.correction var_mean.default var_mean.dim vdot.default
"""
_TVM = """
    diagonal.default
"""
XLA, TVM = frozenset((_BOTH + _XLA).split()), frozenset((_BOTH + _TVM).split())
_OF_BOOL = frozenset(
    [
        "__and__",
        "__or__",
        "_to_copy",
        "all",
        "any",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "cat",
        "clone",
        "cumsum",
        "detach",
        "expand",
        "flip",
        "full_like",
        "gather",
        "index",
        "index_select",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "permute",
        "repeat",
        "reshape",
        "roll",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "sum",
        "transpose",
        "unbind",
        "unsqueeze",
        "where",
        "zeros_like",
    ]
)
"""What is done with truth values; arithmetic with them is torch's own."""
_OF_FLOATS = frozenset(("pow", "reciprocal"))
"""What raises in torch for some whole numbers."""
_OF_ONE_DTYPE = frozenset(
    [
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "addbmm",
        "addmm",
        "baddbmm",
        "bilinear",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "cross",
        "dot",
        "einsum",
        "group_norm",
        "inner",
        "layer_norm",
        "linear",
        "matmul",
        "mm",
        "mv",
        "native_group_norm",
        "native_layer_norm",
        "slice_scatter",
        "tensordot",
        "vdot",
    ]
)
"""What raises in torch for operands of different dtypes, although what traces it may let them pass."""


def why_untried(tried: frozenset[str], node: Node) -> str | None:
    """Why nobody knows what a compiler makes of an operation; None if that is known."""
    spelled = str(node.target).removeprefix("aten.")
    if spelled not in tried:
        return f"{node.target} was never compared with what torch gives"
    name = spelled.partition(".")[0]
    dtype = _dtype(node.args[0] if node.args else None)
    if dtype is torch.bool and name not in _OF_BOOL:
        return f"{node.target} of truth values is torch's own"
    if name in _OF_FLOATS and dtype is not None and not dtype.is_floating_point:
        return f"{node.target} of whole numbers may raise"
    if name in _OF_ONE_DTYPE and len({_dtype(one) for one in node.all_input_nodes}) > 1:
        return f"{node.target} of operands of different dtypes raises"
    if name in ("addmm", "baddbmm") and argument(node, "alpha") == 0:
        return f"{node.target} leaves out a product that is taken zero times"
    if name == "eq" and len(node.all_input_nodes) != len([a for a in node.args if isinstance(a, Node)]):
        return f"{node.target} of a value and itself is not true of what is no number"
    return None


def argument(node: Node, name: str) -> Any:
    """An argument of an operation, found by its name; its default where it is not given."""
    for i, one in enumerate(cast("Any", node.target)._schema.arguments):
        if one.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, one.default_value)
    return None


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, (list, tuple)):
        return next((_dtype(one) for one in value if isinstance(one, Node)), None)
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found.dtype if isinstance(found, Tensor) else None


WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OperationSupport:
    """Which operations a compiler takes, decided node by node from dtypes, sizes, devices and the operator.

    With `open_sizes` sizes may vary. A compiler that `flushes_denormals` is given no literals that it would take for zero.
    """

    name: str
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, *WHOLE})
    open_sizes: ClassVar[bool] = False
    flushes_denormals: ClassVar[bool] = False

    @abstractmethod
    def why_not_operation(self, node: Node) -> str | None:
        """Why the compiler does not know a plain operation on tensors that it has dtypes for; None if it does."""

    def why_not(self, node: Node) -> str | None:
        """Why it cannot run an operation; None if it can."""
        if node.target is operator.getitem:
            return None
        return self.why_not_plainly(node) or self.why_not_operation(node)

    def why_not_plainly(self, node: Node) -> str | None:
        """Why an operation is out of the question before the compiler is asked."""
        if self.open_sizes and not isinstance(node.target, OpOverload):
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
        """Why it has no such tensors."""
        if self.open_sizes and isinstance(value, (int, torch.SymInt)):
            return None
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} is computed, and '{self.name}' has tensors only"
        if value.dtype not in self.dtypes:
            return f"'{self.name}' does not take {str(value.dtype).removeprefix('torch.')}"
        if value.device.type != "cpu":
            return f"it is on {value.device}, and '{self.name}' runs on the CPU here"
        if not self.open_sizes and not all(map(is_number, value.shape)):
            return f"its sizes may vary, and '{self.name}' takes fixed ones"
        return None


class ProbedSupport(OperationSupport):
    """Support that is probed: the compiler is given operations and reports which it does not convert."""

    @abstractmethod
    def judge(self) -> SupportProbe:
        """What is known of the compiler; all backends of a class have the same one."""

    def why_not_operation(self, node: Node) -> str | None:
        return self._verdict(node).reason

    def spelling(self, node: Node) -> GraphModule | None:
        """What is written in place of an operation; None where it is written as it is. Raises NoForm."""
        found = self._verdict(node)
        if found.reason is not None:
            raise UnsupportedOp(found.reason)
        return found.written

    def _verdict(self, node: Node) -> OpSupport:
        return self.judge().verdict(node, lambda one: self.why_not_plainly(one) is None)
