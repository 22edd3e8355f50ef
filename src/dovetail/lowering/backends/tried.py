"""Operators whose values were compared with torch's, compiler by compiler: over torch's own sample inputs, in float32 and
whole numbers, with what is no number among them. Others are not given to a compiler, which may get them wrong, die of
them, or never come to an end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_COMMON = """
    __and__.Tensor _native_batch_norm_legit_no_training.default _to_copy.default abs.default acos.default acosh.default
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default add.Tensor addcdiv.default addcmul.default addmm.default
    arange.default arange.start arange.start_step asin.default asinh.default atan.default atanh.default baddbmm.default
    bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bitwise_xor.Tensor bmm.default cat.default ceil.default
    clamp.default clamp_min.default clone.default constant_pad_nd.default conv1d.default conv1d.padding conv2d.default
    conv2d.padding cos.default cosh.default cumsum.default detach.default diff.default div.Tensor einsum.default
    elu.default embedding.default eq.Scalar eq.Tensor exp.default expand.default flip.default floor.default frac.default
    full.default full_like.default gather.default ge.Scalar ge.Tensor gelu.default glu.default group_norm.default
    gt.Scalar gt.Tensor hardsigmoid.default hardswish.default hardtanh.default index.Tensor index_select.default
    layer_norm.default le.Scalar le.Tensor leaky_relu.default linear.default log.default log10.default log2.default
    log_softmax.int logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor matmul.default max.default max_pool2d.default maximum.default mean.default
    mean.dim min.default minimum.default mm.default mul.Tensor ne.Scalar ne.Tensor neg.default new_ones.default
    new_zeros.default ones_like.default outer.default pad.default permute.default pixel_shuffle.default
    pow.Tensor_Scalar pow.Tensor_Tensor prelu.default reciprocal.default relu.default relu6.default repeat.default
    reshape.default rms_norm.default roll.default round.default rsqrt.default rsub.Scalar rsub.Tensor
    scaled_dot_product_attention.default scatter.src scatter.value select.int selu.default sigmoid.default sign.default
    silu.default sin.default sinh.default slice.Tensor softmax.int softplus.default split.Tensor split_with_sizes.default
    sqrt.default square.default squeeze.default squeeze.dim squeeze.dims stack.default sub.Tensor sum.default
    sum.dim_IntList tan.default tanh.default topk.default transpose.int tril.default triu.default trunc.default
    unbind.int unsqueeze.default var.correction where.self zeros.default zeros_like.default ones.default
"""
