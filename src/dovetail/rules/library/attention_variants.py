"""Rules for attention: the operator, and softmax(QKᵀ)V written out in its usual variants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, op_name
from dovetail.rules.library.attention import (
    BIAS,
    GROUPED_KV,
    KV,
    MASK,
    SCALAR,
    Q,
    ScorePattern,
    attention_attrs,
    attention_kind,
    einsum_terms,
    is_supported_attention,
    repeat_kv,
    row_max,
    row_softmax,
    transposed_keys,
    with_scores,
)
from dovetail.rules.library.library_rule import (
    LibraryRule,
    library_rule,
    meta_tensor,
    nearest_consumer,
    nodes_of,
)
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Decline, Proposal, Refusal, Rule, RuleContext, RuleSet

_SCORE_OPS = frozenset({"mul", "div", "add", "masked_fill", "where", "_to_copy"})
_SOFTMAX_OPS = frozenset({"softmax", "amax", "max"})
_COLUMNS = meta_tensor(2, 4, 16, 8)
_attention_rule = partial(library_rule, attention_kind, attrs_of=attention_attrs)
_BATCHED, _BATCHED_SCORES = meta_tensor(8, 8, 16), meta_tensor(8, 8, 8)
_BATCHED_MASK, _BATCHED_COLUMNS = meta_tensor(8, 8, 8, dtype=torch.bool), meta_tensor(8, 16, 8)


@_attention_rule(
    needs=(
        "scaled_dot_product_attention|_scaled_dot_product_flash_attention_for_cpu"
        "|_scaled_dot_product_flash_attention|_scaled_dot_product_efficient_attention"
        "|_scaled_dot_product_cudnn_attention|_scaled_dot_product_fused_attention_overrideable|_softmax"
    ),
    examples=[(Q, GROUPED_KV, GROUPED_KV, MASK), (Q, KV, KV, MASK)],
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
    """The attention operator, with the repetition of key and value heads for it."""
    keys, values = repeat_kv(q, k, v)
    attend = F.scaled_dot_product_attention
    return either(
        lambda: attend(q, keys, values, mask, dropout, False, scale=scale, enable_gqa=grouped),
        lambda: attend(q, keys, values, None, dropout, causal, scale=scale, enable_gqa=grouped),
    )


@_attention_rule(
    needs="softmax|_softmax|exp matmul|bmm|mm",
    examples=[(Q, keys, keys, MASK, BIAS, SCALAR, BIAS, SCALAR, SCALAR) for keys in (GROUPED_KV, KV)],
)
@with_scores("mask bias filler second_bias factor divisor")
def attention_by_hand(
    q: Tensor, k: Tensor, v: Tensor, scores: ScorePattern, cap: Any = Const(30.5)
) -> Tensor:
    """softmax(QKᵀ)V from its steps; scores may be capped, biased and masked."""
    keys, values = repeat_kv(q, k, v)
    columns = transposed_keys(keys)
    scaled = optional(scores.scaled_product(q, columns), lambda x: torch.tanh(x / cap) * cap)
    masked = either(
        lambda: torch.where(scores.mask, scaled, scores.filler) + scores.bias,
        lambda: torch.where(scores.mask, scaled, scores.filler),
        lambda: scores.with_bias_and_mask(q @ columns, scaled),
    )
    return scores.weights(masked, v.dtype) @ values


def _is_transposed(node: Any) -> bool:
    """Return whether a node swaps the last two dimensions of its operand."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return op_name(node.target) == "transpose" and list(node.args[1:]) == [value.dim() - 2, value.dim() - 1]


def _has_untransposed_keys(context: RuleContext) -> bool:
    """Return whether there is a softmax of a product whose second operand is not transposed for it."""
    return any(
        not _is_transposed(n.args[1]) and nearest_consumer([n], _SOFTMAX_OPS, _SCORE_OPS) is not None
        for n in nodes_of(context, "matmul")
    )


@_attention_rule(
    needs="softmax|_softmax|exp matmul|bmm|mm",
    when=_has_untransposed_keys,
    examples=[(Q, _COLUMNS, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_scores("mask bias second_bias factor divisor")
def attention_of_columns(q: Tensor, columns: Tensor, v: Tensor, scores: ScorePattern) -> Tensor:
    """Attention whose keys are columns, so that there is no transpose."""
    return scores.weights(scores.biased_product(q, columns), v.dtype) @ v


@attention_of_columns.guard
def keys_are_not_transposed(match: Match) -> Decline | None:
    node = match["columns"].node
    if _is_transposed(node):
        return Decline(f"its keys are transposed by '{node.name}', which is part of the attention", at=node)
    return None


@_attention_rule(
    needs="softmax|_softmax|exp bmm|baddbmm",
    examples=[
        (*[_BATCHED] * 3, _BATCHED_MASK, _BATCHED_SCORES, _BATCHED_COLUMNS, MASK, SCALAR, SCALAR),
    ],
)
@with_scores("factor divisor", biased=False)
def attention_of_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    columns: Tensor,
    mask_4d: Tensor,
    scores: ScorePattern,
) -> Tensor:
    """Attention with the heads in the batch dimension, as in `torch.nn.MultiheadAttention`.

    BLOOM, BART and DeBERTa separate them again to apply a mask to the scores.
    """
    keys = k.transpose(-1, -2)
    scaled = either(
        lambda: scores.scaled_product(q, keys, torch.bmm),
        lambda: torch.baddbmm(bias, q * scores.scale, keys),
        lambda: torch.baddbmm(bias, q, keys, alpha=scores.scale),
        lambda: torch.bmm(q, columns),
    )

    def masked_by_head() -> Tensor:
        total = optional(scaled, lambda x: x + bias)
        return scores.masked(total.reshape(mask_4d.shape[0], -1, *total.shape[1:]), mask_4d)

    def batched() -> Tensor:
        masked = either(
            lambda: scores.masked(scaled, mask),
            lambda: masked_by_head().reshape(scaled.shape),
            lambda: scaled,
        )
        return scores.weights(masked, v.dtype)

    def by_head() -> Tensor:
        return scores.weights(masked_by_head(), v.dtype).reshape(scaled.shape)

    return torch.bmm(either(batched, by_head), v)


@_attention_rule(
    needs="softmax|_softmax|exp matmul|bmm|mm triu|tril",
    examples=[(Q, GROUPED_KV, GROUPED_KV, SCALAR, SCALAR), (Q, KV, KV, SCALAR, SCALAR)],
)
@with_scores("factor divisor", biased=False)
def attention_causal(q: Tensor, k: Tensor, v: Tensor, scores: ScorePattern) -> Tensor:
    """softmax(QKᵀ)V from its steps, with a causal mask that is computed for it."""
    k, v = repeat_kv(q, k, v)
    scaled = scores.scaled_product(q, transposed_keys(k))
    size = scaled.shape[-2:]

    def ones(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(size, dtype=dtype, device=q.device)

    later = either(
        lambda: ones(torch.bool).triu(1),
        lambda: ones(torch.bool).tril().logical_not(),
        lambda: ~ones(torch.bool).tril(),
        lambda: ones().tril() == 0,
        lambda: ones().triu(1) == 1,
        lambda: ones().triu(1).bool(),
    )
    masked = either(
        lambda: scaled.masked_fill(later, scores.fill),
        lambda: scaled + torch.full(size, scores.fill, dtype=scaled.dtype, device=q.device).triu(1),
    )
    return scores.weights(masked, v.dtype) @ v


@attention_causal.guard
def mask_is_not_shared(match: Match) -> Decline | None:
    inside, mask = set(match.nodes), set[Node]()
    for node in match.nodes:
        if not mask.issuperset(node.all_input_nodes):
            continue
        mask.add(node)
        outside = [user for user in node.users if user not in inside]
        if outside:
            return Decline(f"its mask is also used by '{outside[0].name}'", at=node)
    return None


@_attention_rule(
    needs="softmax|_softmax|exp einsum",
    examples=[(Q, KV, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_scores("mask bias second_bias factor divisor")
def attention_einsum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScorePattern,
    score_equation: Any = Const("bhid,bhjd->bhij"),
    value_equation: Any = Const("bhij,bhjd->bhid"),
) -> Tensor:
    """softmax(QKᵀ)V by einsum, with any letters and heads in any dimension."""
    masked = scores.biased_product(q, k, partial(torch.einsum, score_equation))
    return torch.einsum(value_equation, scores.weights(masked, v.dtype), v)


@attention_einsum.guard
def equations_are_attention(match: Match) -> Decline | None:
    equations = match["score_equation"], match["value_equation"]
    if _is_attention(*equations):
        return None
    return Decline(
        f"'{equations[0]}' and '{equations[1]}' are not an attention over the last dimension of the scores"
    )


def _is_attention(score_equation: str, value_equation: str) -> bool:
    """Return whether equations multiply queries and keys, and weights over the keys and values."""
    first, second = einsum_terms(score_equation), einsum_terms(value_equation)
    if len(first) != 3 or len(second) != 3 or len(second[0]) != len(first[2]):
        return False
    q, k, scores = first
    # The second equation in the letters of the first; letters that only the values have stay apart.
    renamed = dict(zip(second[0], scores, strict=True))
    v, result = ("".join(renamed.get(letter, letter.upper()) for letter in term) for term in second[1:])
    query, key = set(q) - set(k), set(k) - set(q)
    if len(query) != 1 or len(key) != 1 or len((set(q) & set(k)) - set(scores)) != 1:
        return False
    batch = set(q) & set(k) & set(scores)
    if set(scores) != batch | query | key or scores[-1] not in key:
        return False
    return set(v) >= batch | key and set(result) == batch | query | (set(v) - set(scores))


def _has_sinks(context: RuleContext) -> bool:
    """Return whether there is a softmax of a concatenation."""
    joined = nodes_of(context, "cat")
    return nearest_consumer(joined, _SOFTMAX_OPS, frozenset({"sub", "_to_copy"})) is not None


@_attention_rule(
    needs="softmax|_softmax matmul|bmm|mm cat slice",
    when=_has_sinks,
    examples=[
        (Q, keys, keys, MASK, BIAS, BIAS, SCALAR, SCALAR, meta_tensor(4), meta_tensor(2, 4, 8, 1))
        for keys in (GROUPED_KV, KV)
    ],
)
@with_scores("mask bias second_bias factor divisor", shifted=False)
def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, scores: ScorePattern, sinks: Tensor, sink_column: Tensor
) -> Tensor:
    """softmax(QKᵀ)V with one more column of scores in the softmax, as gpt-oss has it for each head."""
    keys, values = repeat_kv(q, k, v)
    masked = scores.biased_product(q, transposed_keys(keys))

    def of_heads() -> Tensor:
        column = either(lambda: sinks.reshape(1, -1, 1, 1), lambda: sinks[None, :, None, None])
        return column.expand(*masked.shape[:-1], 1)

    column = either(of_heads, lambda: sink_column)

    def weights(joined: Tensor) -> Tensor:
        return row_softmax(either(lambda: joined - row_max(joined), lambda: joined), v.dtype)

    without_sink = either(
        lambda: weights(torch.cat([masked, column], -1))[..., :-1],
        lambda: weights(torch.cat([column, masked], -1))[..., 1:],
    )
    return scores.dropped(without_sink) @ values


_PRODUCT_OPS = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum"})
_VIEW_OPS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "expand", "clone"})
_OPS_BEFORE = _SCORE_OPS | {"sub"}
_OPS_AFTER = frozenset({"_to_copy", "native_dropout", "dropout"})
_SCALE_OPS = frozenset({"mul", "div"})
_MAX_PATH = 8


class UnmatchedAttention(Rule):
    """Proposes nothing: refuses each softmax between two products for which no rule for attention has a proposal."""

    name, kind, reference = "attention_unusual", "attention", attention_kind

    def __init__(self, rules: Sequence[LibraryRule]) -> None:
        self.rules = tuple(rules)

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        origins = context.analysis(normalized_graph_of).origins
        softmaxes = nodes_of(context, "softmax", "_softmax")
        if not softmaxes:
            return
        covered = {i for rule in self.rules for p in rule.propose(context) for i in p.members}
        for softmax in softmaxes:
            before, after = _path_to_product(softmax, back=True), _path_to_product(softmax, back=False)
            if not before or not after or covered.intersection(origins.get(softmax, ())):
                continue
            path = [n for n in (*before[::-1], softmax, *after) if not is_projection(n)]
            members = sorted({i for n in path for i in origins.get(n, ())})
            op, reason = _unexpected_op(softmax, before, after)
            at, matched = origins.get(op, ()), len(path) - (op is not softmax)
            reason = f"{reason}: {', '.join(op_name(node.target) for node in path)}"
            yield Refusal(self.name, tuple(members), reason, at[-1] if at else None, matched, len(path))


def _path_to_product(softmax: Node, *, back: bool) -> list[Node]:
    """Return the operations from a softmax to the nearest product, the product last; empty if none is near."""
    visited, paths = {softmax}, [[softmax]]
    for _ in range(_MAX_PATH):
        longer: list[list[Node]] = []
        for path in paths:
            for other in path[-1].all_input_nodes if back else path[-1].users:
                if other in visited or other.op != "call_function":
                    continue
                visited.add(other)
                longer.append([*path, other])
                if op_name(other.target) in _PRODUCT_OPS:
                    return longer[-1][1:]
        paths = longer
    return []


def _unexpected_op(softmax: Node, before: Sequence[Node], after: Sequence[Node]) -> tuple[Node, str]:
    """Return the operation that an attention does not have in this place, and the reason."""
    value = softmax.meta.get("val")
    if isinstance(value, Tensor) and named_arguments(softmax).get("dim") != value.dim() - 1:
        return softmax, "its softmax is not over the keys"
    for nodes, expected in ((before, _OPS_BEFORE), (after, _OPS_AFTER)):
        for node in nodes[:-1]:
            if is_projection(node):
                continue
            name = op_name(node.target)
            if name not in expected | _VIEW_OPS:
                return node, f"attention has no '{name}' there"
            if name in _SCALE_OPS and len(node.all_input_nodes) > 1:
                return node, "its scores are scaled by a tensor, not by a literal"
    return softmax, "its operations are in an order that no rule for attention has"


_PATTERNS = (
    attention,
    attention_by_hand,
    attention_of_columns,
    attention_of_batches,
    attention_causal,
    attention_einsum,
    attention_with_sinks,
)
for _rule in _PATTERNS:
    _rule.guard(is_supported_attention)
ATTENTION = RuleSet(*_PATTERNS, UnmatchedAttention(_PATTERNS))
