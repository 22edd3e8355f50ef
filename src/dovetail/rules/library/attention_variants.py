"""Attention: the operator, and softmax(QKᵀ)V by hand in its usual forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    Product,
    Q,
    ScorePattern,
    attention_attrs,
    attention_kind,
    einsum_terms,
    is_supported_attention,
    meta_tensor,
    repeat_kv,
    row_max,
    row_softmax,
    transposed_keys,
    with_score_pattern,
    with_unbiased_pattern,
    with_unshifted_pattern,
)
from dovetail.rules.library.library_rule import LibraryRule, library_rule, nearest_consumer
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Decline, Proposal, Refusal, Rule, RuleContext, RuleSet

_SCORE_OPS = frozenset({"mul", "div", "add", "masked_fill", "where", "_to_copy"})
_SOFTMAX_OPS = frozenset({"softmax", "amax", "max"})
_COLUMNS = meta_tensor(2, 4, 16, 8)
_BATCHED, _BATCHED_MASK = meta_tensor(8, 8, 16), meta_tensor(8, 8, 8, dtype=torch.bool)
_BATCHED_EXAMPLES = (
    _BATCHED,
    _BATCHED,
    _BATCHED,
    _BATCHED_MASK,
    meta_tensor(8, 8, 8),
    meta_tensor(8, 16, 8),
    MASK,
    SCALAR,
    SCALAR,
)


def _is_transposed(node: Any) -> bool:
    """Whether a node swaps the last two dimensions of what it reads."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return op_name(node.target) == "transpose" and list(node.args[1:]) == [value.dim() - 2, value.dim() - 1]


def _has_untransposed_keys(context: RuleContext) -> bool:
    """Whether there is a softmax of a product with something that was not turned for it."""
    products = [n for n in context.analysis(normalized_graph_of).nodes if op_name(n.target) == "matmul"]
    return any(
        not _is_transposed(n.args[1]) and nearest_consumer([n], _SOFTMAX_OPS, _SCORE_OPS) is not None
        for n in products
    )


def _biased_scores(
    steps: ScorePattern,
    q: Tensor,
    columns: Tensor,
    added: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    multiply: Product = torch.matmul,
) -> Tensor:
    """A product with its scale, its mask and its two biases; `scales` are a factor and a divisor."""
    plain = steps.scaled(q, columns, *scales, multiply)
    return steps.laid(multiply(q, columns), plain, *added)


@library_rule(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm",
    when=_has_untransposed_keys,
    attrs_of=attention_attrs,
    examples=[(Q, _COLUMNS, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_score_pattern
def attention_of_columns(
    steps: ScorePattern,
    q: Tensor,
    columns: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    second_bias: Tensor,
    factor: Tensor,
    divisor: Tensor,
) -> Tensor:
    """The same where the keys come as columns, so that no transpose is left to be done."""
    hiding = _biased_scores(steps, q, columns, (mask, bias, second_bias), (factor, divisor))
    return steps.weights(hiding, v.dtype) @ v


@attention_of_columns.guard
def keys_are_not_transposed(match: Match) -> Decline | None:
    node = match["columns"].node
    if _is_transposed(node):
        return Decline(f"its keys are turned by '{node.name}', which belongs to it", at=node)
    return None


@library_rule(
    attention_kind,
    needs="softmax|_softmax|exp bmm|baddbmm",
    attrs_of=attention_attrs,
    examples=[_BATCHED_EXAMPLES],
)
@with_unbiased_pattern
def attention_of_batches(
    steps: ScorePattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    columns: Tensor,
    mask_4d: Tensor,
    factor: Tensor,
    divisor: Tensor,
) -> Tensor:
    """The same where heads are counted among the batch, as `torch.nn.MultiheadAttention` does it.

    BLOOM, BART and DeBERTa part them again to lay a mask over the scores, and for that alone.
    """
    keys = k.transpose(-1, -2)
    plain = either(
        lambda: steps.scaled(q, keys, factor, divisor, torch.bmm),
        lambda: torch.baddbmm(bias, q * steps.scale, keys),
        lambda: torch.baddbmm(bias, q, keys, alpha=steps.scale),
        lambda: torch.bmm(q, columns),
    )

    def over_heads() -> Tensor:
        total = optional(plain, lambda x: x + bias)
        return steps.masked(total.reshape(mask_4d.shape[0], -1, *total.shape[1:]), mask_4d)

    def together() -> Tensor:
        hiding = either(
            lambda: steps.masked(plain, mask),
            lambda: over_heads().reshape(plain.shape),
            lambda: plain,
        )
        return steps.weights(hiding, v.dtype)

    def parted() -> Tensor:
        return steps.weights(over_heads(), v.dtype).reshape(plain.shape)

    return torch.bmm(either(together, parted), v)


@library_rule(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm triu|tril",
    attrs_of=attention_attrs,
    examples=[(Q, GROUPED_KV, GROUPED_KV, SCALAR, SCALAR), (Q, KV, KV, SCALAR, SCALAR)],
)
@with_unbiased_pattern
def attention_causal(
    steps: ScorePattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor,
    divisor: Tensor,
) -> Tensor:
    """softmax(QKᵀ)V from its steps, with a mask of its own that hides what comes later."""
    k, v = repeat_kv(q, k, v)
    spread = steps.scaled(q, transposed_keys(k), factor, divisor)
    size = spread.shape[-2:]

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
    hiding = either(
        lambda: spread.masked_fill(later, steps.hidden),
        lambda: spread + torch.full(size, steps.hidden, dtype=spread.dtype, device=q.device).triu(1),
    )
    return steps.weights(hiding, v.dtype) @ v


@attention_causal.guard
def mask_is_not_shared(match: Match) -> Decline | None:
    inner, mask = set(match.nodes), set[Node]()
    for node in match.nodes:
        if not mask.issuperset(node.all_input_nodes):
            continue
        mask.add(node)
        outside = [user for user in node.users if user not in inner]
        if outside:
            return Decline(f"its mask is also used by '{outside[0].name}'", at=node)
    return None


@library_rule(
    attention_kind,
    needs="softmax|_softmax|exp einsum",
    attrs_of=attention_attrs,
    examples=[(Q, KV, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_score_pattern
def attention_einsum(
    steps: ScorePattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    second_bias: Tensor,
    factor: Tensor,
    divisor: Tensor,
    inward: Any = Const("bhid,bhjd->bhij"),
    outward: Any = Const("bhij,bhjd->bhid"),
) -> Tensor:
    """softmax(QKᵀ)V by einsum, whatever its letters and whichever dimension heads are."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(inward, a, b)

    hiding = _biased_scores(steps, q, k, (mask, bias, second_bias), (factor, divisor), multiply)
    return torch.einsum(outward, steps.weights(hiding, v.dtype), v)


@attention_einsum.guard
def equations_are_attention(match: Match) -> Decline | None:
    inward, outward = match["inward"], match["outward"]
    if _is_attention(inward, outward):
        return None
    return Decline(f"'{inward}' and '{outward}' are no attention over the last dimension of the scores")


def _is_attention(inward: str, outward: str) -> bool:
    """Whether equations multiply queries and keys, and weights over the keys and values."""
    first, second = einsum_terms(inward), einsum_terms(outward)
    if len(first) != 3 or len(second) != 3 or len(second[0]) != len(first[2]):
        return False
    q, k, between = first
    # The second equation in the letters of the first; what only the values have keeps another.
    renamed = dict(zip(second[0], between, strict=True))
    v, made = ("".join(renamed.get(letter, letter.upper()) for letter in term) for term in second[1:])
    query, key = set(q) - set(k), set(k) - set(q)
    if len(query) != 1 or len(key) != 1 or len((set(q) & set(k)) - set(between)) != 1:
        return False
    batch = set(q) & set(k) & set(between)
    kept = set(made) == batch | query | (set(v) - set(between))
    return set(between) == batch | query | key and between[-1] in key and set(v) >= batch | key and kept


def _has_sinks(context: RuleContext) -> bool:
    """Whether there is a softmax of what was joined from several parts."""
    joined = [n for n in context.analysis(normalized_graph_of).nodes if op_name(n.target) == "cat"]
    return nearest_consumer(joined, _SOFTMAX_OPS, frozenset({"sub", "_to_copy"})) is not None


@library_rule(
    attention_kind,
    needs="softmax|_softmax matmul|bmm|mm cat slice",
    when=_has_sinks,
    attrs_of=attention_attrs,
    examples=[
        (Q, keys, keys, MASK, BIAS, BIAS, SCALAR, SCALAR, meta_tensor(4), meta_tensor(2, 4, 8, 1))
        for keys in (GROUPED_KV, KV)
    ],
)
@with_unshifted_pattern
def attention_with_sinks(
    steps: ScorePattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    second_bias: Tensor,
    factor: Tensor,
    divisor: Tensor,
    sinks: Tensor,
    sink_column: Tensor,
) -> Tensor:
    """softmax(QKᵀ)V where one more column of scores takes part in the softmax, as gpt-oss has it for each head."""
    keys, values = repeat_kv(q, k, v)
    scores = _biased_scores(steps, q, transposed_keys(keys), (mask, bias, second_bias), (factor, divisor))

    def of_heads() -> Tensor:
        column = either(lambda: sinks.reshape(1, -1, 1, 1), lambda: sinks[None, :, None, None])
        return column.expand(*scores.shape[:-1], 1)

    column = either(of_heads, lambda: sink_column)

    def weights(joined: Tensor) -> Tensor:
        shifted = either(lambda: joined - row_max(joined), lambda: joined)
        return row_softmax(shifted, v.dtype)

    kept = either(
        lambda: weights(torch.cat([scores, column], -1))[..., :-1],
        lambda: weights(torch.cat([column, scores], -1))[..., 1:],
    )
    return steps.dropped(kept) @ values


for _rule in (
    attention_of_columns,
    attention_of_batches,
    attention_causal,
    attention_einsum,
    attention_with_sinks,
):
    _rule.guard(is_supported_attention)
_PRODUCT_OPS = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum"})
_VIEW_OPS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "expand", "clone"})
_OPS_BEFORE = frozenset({"mul", "div", "add", "sub", "masked_fill", "where", "_to_copy"})
_OPS_AFTER = frozenset({"_to_copy", "native_dropout", "dropout"})
_SCALE_OPS = frozenset({"mul", "div"})
_MAX_PATH = 8


class UnmatchedAttention(Rule):
    """Proposes nothing: tells of each softmax between two products of which no rule for attention has a word to say."""

    def __init__(self, library_rule: Sequence[LibraryRule]) -> None:
        self.name, self.kind, self.reference = "attention_unusual", "attention", attention_kind
        self.known = tuple(library_rule)

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        shadow = context.analysis(normalized_graph_of)
        found = [n for n in shadow.nodes if op_name(n.target) in ("softmax", "_softmax")]
        if not found:
            return
        told = [p for rule in self.known for p in rule.propose(context)]
        covered = {i for p in told for i in p.members}
        for softmax in found:
            before, after = _path_to_product(softmax, back=True), _path_to_product(softmax, back=False)
            steps = [n for n in (*before[::-1], softmax, *after) if not is_projection(n)]
            members = sorted({i for n in steps for i in shadow.origins.get(n, ())})
            if not before or not after or covered.intersection(shadow.origins.get(softmax, ())):
                continue
            odd, reason = _unexpected_op(softmax, before, after)
            place, usual = shadow.origins.get(odd, ()), len(steps) - (odd is not softmax)
            reason = f"{reason}: {', '.join(op_name(node.target) for node in steps)}"
            yield Refusal(self.name, tuple(members), reason, place[-1] if place else None, usual, len(steps))


def _path_to_product(softmax: Node, *, back: bool) -> list[Node]:
    """The operations from a softmax to the nearest product, that one last; none if there is none within reach."""
    reached: dict[Node, Node | None] = {softmax: None}
    edge = [softmax]
    for _ in range(_MAX_PATH):
        following: list[Node] = []
        for node in edge:
            for other in node.all_input_nodes if back else node.users:
                if other in reached or other.op != "call_function":
                    continue
                reached[other] = node
                if op_name(other.target) in _PRODUCT_OPS:
                    return _path(reached, other)
                following.append(other)
        edge = following
    return []


def _path(reached: dict[Node, Node | None], end: Node) -> list[Node]:
    path: list[Node] = []
    node: Node | None = end
    while node is not None:
        path.append(node)
        node = reached[node]
    return path[-2::-1]


def _unexpected_op(softmax: Node, before: Sequence[Node], after: Sequence[Node]) -> tuple[Node, str]:
    """The operation that an attention does not have there, and what is odd about it."""
    value = softmax.meta.get("val")
    if isinstance(value, Tensor) and named_arguments(softmax).get("dim") != value.dim() - 1:
        return softmax, "its softmax is not over the keys"
    for nodes, usual in ((before, _OPS_BEFORE), (after, _OPS_AFTER)):
        for node in nodes[:-1]:
            if is_projection(node):
                continue
            name = op_name(node.target)
            if name not in usual | _VIEW_OPS:
                return node, f"attention has no '{name}' there"
            if name in _SCALE_OPS and len(node.all_input_nodes) > 1:
                return node, "its scores are scaled by a tensor, not by a literal"
    return softmax, "its steps come in no order that is known of attention"


@library_rule(
    attention_kind,
    needs=(
        "scaled_dot_product_attention|_scaled_dot_product_flash_attention_for_cpu"
        "|_scaled_dot_product_flash_attention|_scaled_dot_product_efficient_attention"
        "|_scaled_dot_product_cudnn_attention|_scaled_dot_product_fused_attention_overrideable|_softmax"
    ),
    attrs_of=attention_attrs,
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
    """The attention operator; where heads of keys and values are repeated for it, that too."""
    keys, values = repeat_kv(q, k, v)
    attend = F.scaled_dot_product_attention
    return either(
        lambda: attend(q, keys, values, mask, dropout, False, scale=scale, enable_gqa=grouped),
        lambda: attend(q, keys, values, None, dropout, causal, scale=scale, enable_gqa=grouped),
    )


@library_rule(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm",
    attrs_of=attention_attrs,
    examples=[(Q, keys, keys, MASK, BIAS, SCALAR, BIAS, SCALAR, SCALAR) for keys in (GROUPED_KV, KV)],
)
@with_score_pattern
def attention_by_hand(
    steps: ScorePattern,
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
    keys, values = repeat_kv(q, k, v)
    columns = transposed_keys(keys)
    plain = optional(steps.scaled(q, columns, factor, divisor), lambda x: torch.tanh(x / cap) * cap)
    hiding = either(
        lambda: torch.where(mask, plain, filler) + bias,
        lambda: torch.where(mask, plain, filler),
        lambda: steps.laid(q @ columns, plain, mask, bias, second_bias),
    )
    return steps.weights(hiding, v.dtype) @ values


attention.guard(is_supported_attention)
attention_by_hand.guard(is_supported_attention)
_PATTERNS = (
    attention,
    attention_by_hand,
    attention_of_columns,
    attention_of_batches,
    attention_causal,
    attention_einsum,
    attention_with_sinks,
)
ATTENTION = RuleSet(*_PATTERNS, UnmatchedAttention(_PATTERNS))
