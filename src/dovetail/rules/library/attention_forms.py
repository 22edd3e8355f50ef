"""Less usual forms of attention: keys as columns, heads among the batch, a causal mask of its own, by einsum,
with sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import op_name
from dovetail.rules.library.attention_steps import (
    BIAS,
    KV,
    MASK,
    SCALAR,
    SHARED,
    Product,
    Q,
    Steps,
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
from dovetail.rules.library.known import ahead_of, known
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Decline
from dovetail.rules.scene import Scene

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


def _has_columns(scene: Scene) -> bool:
    """Whether there is a softmax of a product with something that was not turned for it."""
    products = [n for n in scene.fact(shadow_of).nodes if op_name(n.target) == "matmul"]
    return any(
        not _is_turned(n.args[1]) and ahead_of([n], _SOFTMAX, _TO_SOFTMAX) is not None for n in products
    )


def _scores(
    steps: Steps,
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
    steps: Steps,
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
    steps: Steps,
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
    steps: Steps,
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
    steps: Steps,
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


def _has_sinks(scene: Scene) -> bool:
    """Whether there is a softmax of what was joined from several parts."""
    joined = [n for n in scene.fact(shadow_of).nodes if op_name(n.target) == "cat"]
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
    steps: Steps,
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
