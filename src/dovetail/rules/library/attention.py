"""Attention: the operator, and softmax(QKᵀ)V by hand in its usual forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.graph.module import attribute
from dovetail.graph.normalform import op_name
from dovetail.rules.choices import Const, either, optional
from dovetail.rules.library.known import ahead_of, has, known
from dovetail.rules.match import Match
from dovetail.rules.rule import Decline, RuleSet
from dovetail.rules.scene import Scene
from dovetail.rules.shadow import shadow_of

_TO_SOFTMAX = frozenset({"mul", "div", "add", "masked_fill", "where", "_to_copy"})


def _example(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


_Q, _KV, _SHARED = _example(2, 4, 8, 16), _example(2, 4, 8, 16), _example(2, 2, 8, 16)
_MASK, _BIAS = _example(2, 1, 8, 8, dtype=torch.bool), _example(4, 8, 8)
_FILLER, _COLUMNS = _example(), _example(2, 4, 16, 8)
_THREE, _MASK_THREE = _example(8, 8, 16), _example(8, 8, 8, dtype=torch.bool)


def shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they are, or each head of them repeated for its group of query heads."""

    def count() -> int:
        groups = q.shape[1] // k.shape[1] if q.dim() == k.dim() == 4 else 1
        if groups < 2:
            raise ValueError("heads come in no groups")
        return groups

    def spread(x: Tensor) -> Tensor:
        groups = count()
        batch, heads, length, width = x.shape
        wide = x[:, :, None].expand(batch, heads, groups, length, width)
        return wide.reshape(batch, heads * groups, length, width)

    return either(
        lambda: (k, v),
        lambda: (spread(k), spread(v)),
        lambda: (k.repeat_interleave(count(), dim=1), v.repeat_interleave(count(), dim=1)),
    )


def scores(
    q: Tensor,
    k: Tensor,
    scale: Any,
    divisor: Any,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """QKᵀ with its scale."""
    return scaled(q, columns_of(k), scale, divisor, multiply)


def columns_of(k: Tensor) -> Tensor:
    """Kᵀ."""
    rank = k.dim()
    return either(lambda: k.transpose(-1, -2), lambda: k.permute(*range(rank - 2), rank - 1, rank - 2))


def scaled(
    q: Tensor,
    columns: Tensor,
    scale: Any,
    divisor: Any,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """A product with its scale: on itself, on one of its factors, or nowhere near."""
    return either(
        lambda: multiply(q, columns) * scale,
        lambda: multiply(q, columns) / divisor,
        lambda: multiply(q * scale, columns),
        lambda: multiply(q / divisor, columns),
        lambda: multiply(q, columns * scale),
        lambda: multiply(q, columns),
    )


def masked(x: Tensor, mask: Tensor, hidden: Any) -> Tensor:
    """Scores with a mask added, or filled in where it says so."""
    return either(
        lambda: x + mask,
        lambda: x.masked_fill(mask, hidden),
        lambda: torch.where(mask, x, hidden),
        lambda: torch.where(mask, x, torch.full([], hidden, dtype=x.dtype, device=x.device)),
    )


def weights(x: Tensor, dropout: Any, dtype: torch.dtype) -> Tensor:
    """The softmax of scores, in float32 or not, with dropout or without."""

    def by_hand() -> Tensor:
        top = either(lambda: x.amax(-1, keepdim=True), lambda: x.max(-1, keepdim=True).values)
        powers = torch.exp(x - top)
        return powers / powers.sum(-1, keepdim=True)

    spread = either(
        lambda: torch.softmax(x, -1),
        lambda: torch.softmax(x, -1, dtype=torch.float32).to(dtype),
        lambda: torch.softmax(x.float(), -1).to(dtype),
        by_hand,
    )
    return optional(spread, lambda w: F.dropout(w, dropout))


def _groups(match: Match) -> int:
    q, k = match["q"], match["k" if "k" in match else "columns"]
    heads, kept = (q.shape[1], k.shape[1]) if q.ndim == k.ndim == 4 else (1, 1)
    return heads // kept if isinstance(heads, int) and isinstance(kept, int) else 1


def _says(match: Match) -> Mapping[str, Any]:
    """What is said of any attention: the factor on the product, None for one over the root of the width."""
    literals = match.literals
    scale = literals.get("scale")
    if "divisor" in literals:
        scale = 1.0 / float(literals["divisor"])
    elif "scale" not in literals:
        scale = 1.0
    mask = match.operands.get("mask") or match.operands.get("offset")
    boolean = mask is not None and (mask.dtype == torch.bool or has(match, "masked_fill", "where"))
    return {
        "scale": scale,
        "causal": bool(literals.get("causal", match.rule == "attention_causal")),
        "dropout": literals.get("dropout", 0.0),
        "mask": "none" if mask is None else "boolean" if boolean else "additive",
        "groups": _groups(match),
    }


@known(
    kind="attention",
    needs=(
        "scaled_dot_product_attention|_scaled_dot_product_flash_attention_for_cpu"
        "|_scaled_dot_product_flash_attention|_scaled_dot_product_efficient_attention"
        "|_scaled_dot_product_cudnn_attention|_scaled_dot_product_fused_attention_overrideable|_softmax"
    ),
    says=_says,
    examples=[(_Q, _SHARED, _SHARED, _MASK), (_Q, _KV, _KV, _MASK)],
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
    kind="attention",
    needs="softmax|_softmax|exp matmul|bmm|mm",
    says=_says,
    examples=[(_Q, _SHARED, _SHARED, _MASK, _BIAS, _FILLER), (_Q, _KV, _KV, _MASK, _BIAS, _FILLER)],
)
def attention_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor,
    filler: Tensor,
    scale: Any = Const(0.2503),
    divisor: Any = Const(4.2),
    hidden: Any = Const(-1e9),
    dropout: Any = Const(0.1202),
) -> Tensor:
    """softmax(QKᵀ)V from its steps; a bias may be added to the scores, and a mask laid over them."""
    keys, values = shared(q, k, v)
    plain = scores(q, keys, scale, divisor)
    hiding = either(
        lambda: masked(plain + bias, mask, hidden),
        lambda: masked(plain, mask, hidden) + bias,
        lambda: masked(plain, mask, hidden),
        lambda: torch.where(mask, plain, filler) + bias,
        lambda: torch.where(mask, plain, filler),
        lambda: plain,
    )
    return weights(hiding, dropout, q.dtype) @ values


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
        not _is_turned(n.args[1]) and ahead_of([n], {"softmax"}, _TO_SOFTMAX) is not None for n in products
    )


@known(
    kind="attention",
    needs="softmax|_softmax|exp matmul|bmm|mm",
    when=_has_columns,
    says=_says,
    examples=[(_Q, _COLUMNS, _KV, _MASK)],
)
def attention_of_columns(
    q: Tensor,
    columns: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: Any = Const(0.2503),
    divisor: Any = Const(4.2),
    hidden: Any = Const(-1e9),
    dropout: Any = Const(0.1202),
) -> Tensor:
    """The same where the keys come as columns, so that no transpose is left to be done."""
    hiding = optional(scaled(q, columns, scale, divisor), lambda x: masked(x, mask, hidden))
    return weights(hiding, dropout, q.dtype) @ v


@attention_of_columns.guard
def columns_are_as_they_come(match: Match) -> Decline | None:
    node = match["columns"].node
    if _is_turned(node):
        return Decline(f"its keys are turned by '{node.name}', which belongs to it", at=node)
    return None


@known(
    kind="attention",
    needs="softmax|_softmax|exp bmm|baddbmm",
    says=_says,
    examples=[(_THREE, _THREE, _THREE, _MASK_THREE, _example(8, 8, 8))],
)
def attention_of_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    offset: Tensor,
    scale: Any = Const(0.2503),
    divisor: Any = Const(4.2),
    hidden: Any = Const(-1e9),
    dropout: Any = Const(0.1202),
) -> Tensor:
    """The same where heads are counted among the batch, as `torch.nn.MultiheadAttention` does it."""
    keys = k.transpose(-1, -2)
    hiding = either(
        lambda: masked(scores(q, k, scale, divisor, torch.bmm), mask, hidden),
        lambda: scores(q, k, scale, divisor, torch.bmm),
        lambda: torch.baddbmm(offset, q * scale, keys),
    )
    return torch.bmm(weights(hiding, dropout, q.dtype), v)


@known(
    kind="attention",
    needs="softmax|_softmax matmul|bmm|mm triu|tril",
    says=_says,
    examples=[(_Q, _SHARED, _SHARED), (_Q, _KV, _KV)],
)
def attention_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Any = Const(0.2503),
    divisor: Any = Const(4.2),
    hidden: Any = Const(-1e9),
    dropout: Any = Const(0.1202),
) -> Tensor:
    """softmax(QKᵀ)V from its steps, with a mask of its own that hides what comes later."""
    k, v = shared(q, k, v)
    spread = scores(q, k, scale, divisor)
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
        lambda: spread.masked_fill(later, hidden),
        lambda: spread + torch.full(size, hidden, device=q.device).triu(1),
    )
    return weights(hiding, dropout, q.dtype) @ v


@attention_causal.guard
def mask_is_its_own(match: Match) -> Decline | None:
    inner = set(match.nodes)
    for node in match.nodes:
        outside = [user for user in node.users if user not in inner]
        value = node.meta.get("val")
        if outside and isinstance(value, Tensor) and value.dim() == 2:
            return Decline(f"its mask is also used by '{outside[0].name}'", at=node)
    return None


@attention_of_batches.guard
@attention_of_columns.guard
@attention_causal.guard
@attention_by_hand.guard
def hides_what_is_masked(match: Match) -> Decline | None:
    hidden, filler = match.literals.get("hidden"), match.operands.get("filler")
    if filler is not None:
        if filler.ndim or not filler.is_constant:
            return Decline("what masked scores become is not known", at=filler)
        hidden = float(attribute(filler.owner, str(filler.node.target)))
    if hidden is None or hidden <= -1e3:
        return None
    return Decline(f"masked scores become {hidden!r}: they still count")


ATTENTION = RuleSet(
    attention, attention_by_hand, attention_of_columns, attention_of_batches, attention_causal
)
