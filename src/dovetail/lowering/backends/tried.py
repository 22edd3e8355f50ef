"""Operators whose values were compared with torch's, compiler by compiler.

That was done over torch's own sample inputs, in float32 and whole numbers, with infinite numbers and what is no number
among them. Others are not given to a compiler: it may get them wrong, die of them, or never come to an end.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

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
