"""Attention: the operator, and softmax(QKᵀ)V by hand in its usual forms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.attention_forms import (
    attention_causal,
    attention_einsum,
    attention_of_batches,
    attention_of_columns,
    attention_with_sinks,
)
from dovetail.rules.library.attention_misses import AttentionUnusual
from dovetail.rules.library.attention_steps import (
    BIAS,
    KV,
    MASK,
    SCALAR,
    SHARED,
    Q,
    Steps,
    attention_attrs,
    attention_kind,
    can_be_said,
    columns_of,
    shared,
    with_steps,
)
from dovetail.rules.library.known import known
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.rule import RuleSet


@known(
    attention_kind,
    needs=(
        "scaled_dot_product_attention|_scaled_dot_product_flash_attention_for_cpu"
        "|_scaled_dot_product_flash_attention|_scaled_dot_product_efficient_attention"
        "|_scaled_dot_product_cudnn_attention|_scaled_dot_product_fused_attention_overrideable|_softmax"
    ),
    attrs_of=attention_attrs,
    examples=[(Q, SHARED, SHARED, MASK), (Q, KV, KV, MASK)],
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: Any = Const(0.1202),
    causal: Any = Const(False),
    scale: Any = Const(0.2503),
    grouped: Any = Const(False),
) -> Tensor:
    """The attention operator; where heads of keys and values are repeated for it, that too."""
    keys, values = shared(q, k, v)
    attend = F.scaled_dot_product_attention
    return either(
        lambda: attend(q, keys, values, mask, dropout, False, scale=scale, enable_gqa=grouped),
        lambda: attend(q, keys, values, None, dropout, causal, scale=scale, enable_gqa=grouped),
    )


@known(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm",
    attrs_of=attention_attrs,
    examples=[(Q, keys, keys, MASK, BIAS, SCALAR, BIAS, SCALAR, SCALAR) for keys in (SHARED, KV)],
)
@with_steps
def attention_by_hand(
    steps: Steps,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    filler: Tensor,
    second_bias: Tensor,
    factor: Tensor,
    divisor: Tensor,
    cap: Any = Const(30.5),
) -> Tensor:
    """softmax(QKᵀ)V from its steps; scores may be capped, a bias added to them, and a mask laid over them."""
    keys, values = shared(q, k, v)
    columns = columns_of(keys)
    plain = optional(steps.scaled(q, columns, factor, divisor), lambda x: torch.tanh(x / cap) * cap)
    hiding = either(
        lambda: torch.where(mask, plain, filler) + bias,
        lambda: torch.where(mask, plain, filler),
        lambda: steps.laid(q @ columns, plain, mask, bias, second_bias),
    )
    return steps.weights(hiding, v.dtype) @ values


attention.guard(can_be_said)
attention_by_hand.guard(can_be_said)

_PATTERNS = (
    attention,
    attention_by_hand,
    attention_of_columns,
    attention_of_batches,
    attention_causal,
    attention_einsum,
    attention_with_sinks,
)
ATTENTION = RuleSet(*_PATTERNS, AttentionUnusual(_PATTERNS))
