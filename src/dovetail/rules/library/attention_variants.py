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
    KV,
    MASK,
    SCALAR,
    SHARED,
    Product,
    Q,
    ScoreSteps,
    attention_attrs,
    attention_kind,
    can_be_said,
    columns_of,
    einsum_terms,
    example,
    largest,
    shared,
    softmax_of,
    with_steps,
    with_steps_as_they_are,
    with_steps_scaled_first,
)
from dovetail.rules.library.library_rule import LibraryRule, ahead_of, known
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Decline, Proposal, Refusal, Rule, RuleContext, RuleSet

_TO_SOFTMAX = frozenset({"mul", "div", "add", "masked_fill", "where", "_to_copy"})
_SOFTMAX = frozenset({"softmax", "amax", "max"})
_COLUMNS = example(2, 4, 16, 8)
_THREE, _THREE_MASK = example(8, 8, 16), example(8, 8, 8, dtype=torch.bool)
_BATCHES = (_THREE, _THREE, _THREE, _THREE_MASK, example(8, 8, 8), example(8, 16, 8), MASK, SCALAR, SCALAR)


def _is_turned(node: Any) -> bool:
    """Whether a node swaps the last two dimensions of what it reads."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return op_name(node.target) == "transpose" and list(node.args[1:]) == [value.dim() - 2, value.dim() - 1]


def _has_columns(context: RuleContext) -> bool:
    """Whether there is a softmax of a product with something that was not turned for it."""
    products = [n for n in context.analysis(normalized_graph_of).nodes if op_name(n.target) == "matmul"]
    return any(
        not _is_turned(n.args[1]) and ahead_of([n], _SOFTMAX, _TO_SOFTMAX) is not None for n in products
    )


def _scores(
    steps: ScoreSteps,
    q: Tensor,
    columns: Tensor,
    added: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    multiply: Product = torch.matmul,
) -> Tensor:
    """A product with its scale, its mask and its two biases; `scales` are a factor and a divisor."""
    plain = steps.scaled(q, columns, *scales, multiply)
    return steps.laid(multiply(q, columns), plain, *added)


@known(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm",
    when=_has_columns,
    attrs_of=attention_attrs,
    examples=[(Q, _COLUMNS, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_steps
def attention_of_columns(
    steps: ScoreSteps,
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
    hiding = _scores(steps, q, columns, (mask, bias, second_bias), (factor, divisor))
    return steps.weights(hiding, v.dtype) @ v


@attention_of_columns.guard
def columns_are_as_they_come(match: Match) -> Decline | None:
    node = match["columns"].node
    if _is_turned(node):
        return Decline(f"its keys are turned by '{node.name}', which belongs to it", at=node)
    return None


@known(
    attention_kind,
    needs="softmax|_softmax|exp bmm|baddbmm",
    attrs_of=attention_attrs,
    examples=[_BATCHES],
)
@with_steps_scaled_first
def attention_of_batches(
    steps: ScoreSteps,
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


@known(
    attention_kind,
    needs="softmax|_softmax|exp matmul|bmm|mm triu|tril",
    attrs_of=attention_attrs,
    examples=[(Q, SHARED, SHARED, SCALAR, SCALAR), (Q, KV, KV, SCALAR, SCALAR)],
)
@with_steps_scaled_first
def attention_causal(
    steps: ScoreSteps,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor,
    divisor: Tensor,
) -> Tensor:
    """softmax(QKᵀ)V from its steps, with a mask of its own that hides what comes later."""
    k, v = shared(q, k, v)
    spread = steps.scaled(q, columns_of(k), factor, divisor)
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
def mask_is_its_own(match: Match) -> Decline | None:
    inner, mask = set(match.nodes), set[Node]()
    for node in match.nodes:
        if not mask.issuperset(node.all_input_nodes):
            continue
        mask.add(node)
        outside = [user for user in node.users if user not in inner]
        if outside:
            return Decline(f"its mask is also used by '{outside[0].name}'", at=node)
    return None


@known(
    attention_kind,
    needs="softmax|_softmax|exp einsum",
    attrs_of=attention_attrs,
    examples=[(Q, KV, KV, MASK, BIAS, BIAS, SCALAR, SCALAR)],
)
@with_steps
def attention_einsum(
    steps: ScoreSteps,
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

    hiding = _scores(steps, q, k, (mask, bias, second_bias), (factor, divisor), multiply)
    return torch.einsum(outward, steps.weights(hiding, v.dtype), v)


@attention_einsum.guard
def equations_are_of_an_attention(match: Match) -> Decline | None:
    inward, outward = match["inward"], match["outward"]
    if _attends(inward, outward):
        return None
    return Decline(f"'{inward}' and '{outward}' are no attention over the last dimension of the scores")


def _attends(inward: str, outward: str) -> bool:
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
    return ahead_of(joined, _SOFTMAX, frozenset({"sub", "_to_copy"})) is not None


@known(
    attention_kind,
    needs="softmax|_softmax matmul|bmm|mm cat slice",
    when=_has_sinks,
    attrs_of=attention_attrs,
    examples=[
        (Q, keys, keys, MASK, BIAS, BIAS, SCALAR, SCALAR, example(4), example(2, 4, 8, 1))
        for keys in (SHARED, KV)
    ],
)
@with_steps_as_they_are
def attention_with_sinks(
    steps: ScoreSteps,
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
    keys, values = shared(q, k, v)
    scores = _scores(steps, q, columns_of(keys), (mask, bias, second_bias), (factor, divisor))

    def of_heads() -> Tensor:
        column = either(lambda: sinks.reshape(1, -1, 1, 1), lambda: sinks[None, :, None, None])
        return column.expand(*scores.shape[:-1], 1)

    column = either(of_heads, lambda: sink_column)

    def weights(joined: Tensor) -> Tensor:
        shifted = either(lambda: joined - largest(joined), lambda: joined)
        return softmax_of(shifted, v.dtype)

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
    _rule.guard(can_be_said)
_PRODUCTS = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum"})
_VIEWS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "expand", "clone"})
_BEFORE = frozenset({"mul", "div", "add", "sub", "masked_fill", "where", "_to_copy"})
_AFTER = frozenset({"_to_copy", "native_dropout", "dropout"})
_SCALES = frozenset({"mul", "div"})
_MOST_STEPS = 8


class AttentionUnusual(Rule):
    """Proposes nothing: tells of each softmax between two products of which no rule for attention has a word to say."""

    def __init__(self, known: Sequence[LibraryRule]) -> None:
        self.name, self.kind, self.reference = "attention_unusual", "attention", attention_kind
        self.known = tuple(known)

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        shadow = context.analysis(normalized_graph_of)
        found = [n for n in shadow.nodes if op_name(n.target) in ("softmax", "_softmax")]
        if not found:
            return
        told = [p for rule in self.known for p in rule.propose(context)]
        covered = {i for p in told for i in p.members}
        for softmax in found:
            before, after = _way(softmax, back=True), _way(softmax, back=False)
            steps = [n for n in (*before[::-1], softmax, *after) if not is_projection(n)]
            members = sorted({i for n in steps for i in shadow.origins.get(n, ())})
            if not before or not after or covered.intersection(shadow.origins.get(softmax, ())):
                continue
            odd, reason = _odd(softmax, before, after)
            place, usual = shadow.origins.get(odd, ()), len(steps) - (odd is not softmax)
            reason = f"{reason}: {', '.join(op_name(node.target) for node in steps)}"
            yield Refusal(self.name, tuple(members), reason, place[-1] if place else None, usual, len(steps))


def _way(softmax: Node, *, back: bool) -> list[Node]:
    """The operations from a softmax to the nearest product, that one last; none if there is none within reach."""
    reached: dict[Node, Node | None] = {softmax: None}
    edge = [softmax]
    for _ in range(_MOST_STEPS):
        following: list[Node] = []
        for node in edge:
            for other in node.all_input_nodes if back else node.users:
                if other in reached or other.op != "call_function":
                    continue
                reached[other] = node
                if op_name(other.target) in _PRODUCTS:
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


def _odd(softmax: Node, before: Sequence[Node], after: Sequence[Node]) -> tuple[Node, str]:
    """The operation that an attention does not have there, and what is odd about it."""
    value = softmax.meta.get("val")
    if isinstance(value, Tensor) and named_arguments(softmax).get("dim") != value.dim() - 1:
        return softmax, "its softmax is not over the keys"
    for nodes, usual in ((before, _BEFORE), (after, _AFTER)):
        for node in nodes[:-1]:
            if is_projection(node):
                continue
            name = op_name(node.target)
            if name not in usual | _VIEWS:
                return node, f"attention has no '{name}' there"
            if name in _SCALES and len(node.all_input_nodes) > 1:
                return node, "its scores are scaled by a tensor, not by a literal"
    return softmax, "its steps come in no order that is known of attention"


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
    steps: ScoreSteps,
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
