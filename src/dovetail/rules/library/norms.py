"""Norms: RMS norm and layer norm, alone, after a residual sum and after embeddings, and group norm."""

from __future__ import annotations

import functools
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, op_name, value_of
from dovetail.rules.library.library_rule import (
    Activation,
    activate,
    activation_name,
    inherit_parameters,
    is_floating_point,
    is_gelu,
    kind,
    library_rule,
    meta_tensor,
    same_sizes,
    shapes_differ,
    silu,
    square,
    with_gelu,
)
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

_RMS = "rms_norm|_fused_rms_norm|rsqrt|sqrt|pow"
_LAYER = "layer_norm|native_layer_norm|rsqrt|sqrt|pow layer_norm|native_layer_norm|sub"
_X, _WEIGHT, _CHANNELS = meta_tensor(2, 8, 16), meta_tensor(16), meta_tensor(8)
NormInput = Annotated[Tensor, "[..., *normalized]"]
Summand = Annotated[
    Tensor, "[..., *normalized]; the leading sizes of one of x and residual are those of the sum"
]
Affine = Annotated[Tensor | None, "[*normalized]: the sizes of the last `dims` dimensions"]


@kind("rms_norm", version=2)
def rms_norm_kind(
    x: NormInput,
    weight: Affine = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    dims: int = 1,
    out_dtype: str = "promoted",
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + offset) over the last `dims` dimensions; eps None is the dtype's own.

    The result has the dtype that x and weight promote to, or with `out_dtype` "input" that of x.
    """
    scaled = F.rms_norm(x, x.shape[x.dim() - dims :], None, eps)
    result = scaled if weight is None else scaled * (weight + offset)
    return result if out_dtype == "promoted" else result.to(x.dtype)


@kind("add_rms_norm", version=2)
@inherit_parameters(rms_norm_kind.reference)
def add_rms_norm_kind(
    x: Summand, residual: Summand, weight: Affine = None, **attrs: Any
) -> tuple[Tensor, Tensor]:
    """The `rms_norm` of a sum, and the sum."""
    total = x + residual
    return rms_norm_kind(total, weight, **attrs), total


@kind("layer_norm", version=2)
def layer_norm_kind(
    x: NormInput,
    weight: Affine = None,
    bias: Affine = None,
    *,
    eps: float = 1e-5,
    dims: int = 1,
    out_dtype: str = "promoted",
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last `dims` dimensions; `out_dtype` as in `rms_norm`."""
    result = F.layer_norm(x, x.shape[x.dim() - dims :], None, None, eps)
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return result if out_dtype == "promoted" else result.to(x.dtype)


@kind("add_layer_norm", version=2)
@inherit_parameters(layer_norm_kind.reference)
def add_layer_norm_kind(
    x: Summand, residual: Summand, weight: Affine = None, bias: Affine = None, **attrs: Any
) -> tuple[Tensor, Tensor]:
    """The `layer_norm` of a sum, and the sum."""
    total = x + residual
    return layer_norm_kind(total, weight, bias, **attrs), total


@kind("dropout_add_layer_norm", version=2, draws="one dropout mask of the shape of x")
@inherit_parameters(layer_norm_kind.reference)
def dropout_add_layer_norm_kind(
    x: Summand,
    residual: Summand,
    bias: Annotated[Tensor | None, "[width], width the last size of x"] = None,
    weight: Affine = None,
    shift: Affine = None,
    *,
    dropout: float = 0.0,
    **attrs: Any,
) -> Tensor:
    """The `layer_norm` of dropout(x + bias) + residual, with the affine bias as `shift`."""
    total = F.dropout(x if bias is None else x + bias, dropout) + residual
    return layer_norm_kind(total, weight, shift, **attrs)


@kind("group_norm")
def group_norm_kind(
    x: Annotated[Tensor, "[batch, channels, ...]"],
    weight: Annotated[Tensor | None, "[channels]"] = None,
    bias: Annotated[Tensor | None, "[channels]"] = None,
    *,
    groups: int,
    eps: float = 1e-5,
    activation: str | None = None,
) -> Tensor:
    """The activation of (x - mean) / sqrt(variance + eps) * weight + bias, over each of `groups` groups of channels."""
    return activate(F.group_norm(x, groups, weight, bias, eps), activation)


_NORM_OPS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})


def normalized_dims(match: Match) -> int:
    """Return the number of dimensions a norm is over: those of its operator, one where it is written out."""
    for node in match.aten:
        if op_name(node.target) in _NORM_OPS:
            return len(cast("list[Any]", named_arguments(node)["normalized_shape"]))
    return 1


def norm_attrs(match: Match) -> dict[str, Any]:
    """Return the attributes of a norm: literals of its pattern, `dims` and `out_dtype`."""
    names = ("eps", "offset", "dropout")
    literals = {name: match.literals[name] for name in names if name in match.literals}
    dtypes = [v.dtype for v in match.operands.values() if v is not None and v.dtype.is_floating_point]
    promoted = functools.reduce(torch.promote_types, dtypes)
    out_dtype = "promoted" if match.outputs[0].meta["val"].dtype == promoted else "input"
    return {**literals, "dims": normalized_dims(match), "out_dtype": out_dtype}


def _norm_and_sum(match: Match) -> list[Node | None]:
    """Return the norm and the sum it is applied to."""
    summed = {match["x"].aten, match["residual"].aten}
    sums = (n for n in match.aten if op_name(n.target) == "add" and {*n.all_input_nodes} == summed)
    total = next(sums, None)
    return [match.outputs[0], None if total is None else match.aten[total]]


def _rsqrt(x: Tensor) -> Tensor:
    return either(lambda: torch.rsqrt(x), lambda: x.pow(-0.5), lambda: 1 / torch.sqrt(x))


def rms_norm_pattern(x: Tensor, weight: Tensor, eps: Any, offset: Any) -> Tensor:
    """x / rms(x) with or without a weight: the operator, or its steps, in float32 or not."""

    def by_hand() -> Tensor:
        wide = either(lambda: x.float(), lambda: x)
        spread = square(wide).mean(-1, keepdim=True) + eps
        scaled = either(
            lambda: wide * _rsqrt(spread),
            lambda: wide / torch.sqrt(spread),
            # As in T5, only the statistics are in float32.
            lambda: x * torch.rsqrt(spread),
        )
        return either(
            # Gemma's weights are differences from one.
            lambda: ((weight.to(scaled.dtype) + offset) * scaled).to(x.dtype),
            lambda: weight * scaled.to(x.dtype),
            lambda: (weight * scaled).to(x.dtype),
            lambda: scaled.to(x.dtype),
        )

    return either(
        by_hand,
        lambda: F.rms_norm(x, weight.shape, weight, eps),
        lambda: F.rms_norm(x, x.shape[-1:], None, eps),
    )


def layer_norm_pattern(x: Tensor, weight: Tensor, bias: Tensor, eps: Any) -> Tensor:
    """(x - mean) / sqrt(variance + eps) with or without weight and bias: the operator, or its steps."""

    def by_hand() -> Tensor:
        wide = either(lambda: x.float(), lambda: x)
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        variance = either(
            lambda: square(centred).mean(-1, keepdim=True),
            lambda: square(wide - mean).mean(-1, keepdim=True),
            lambda: wide.var(-1, unbiased=False, keepdim=True),
            lambda: wide.var(-1, correction=0, keepdim=True),
            lambda: square(wide).mean(-1, keepdim=True) - square(mean),
        )
        scaled = either(
            lambda: centred / torch.sqrt(variance + eps), lambda: centred * _rsqrt(variance + eps)
        )
        return either(lambda: affine(scaled.to(x.dtype)), lambda: affine(scaled).to(x.dtype))

    def affine(y: Tensor) -> Tensor:
        return either(lambda: weight * y + bias, lambda: weight * y, lambda: y)

    return either(lambda: layer_norm_op_pattern(x, weight, bias, eps), by_hand)


def layer_norm_op_pattern(x: Tensor, weight: Tensor, bias: Tensor, eps: Any) -> Tensor:
    """The operator with weight and bias, with one of them, or with neither."""
    return either(
        lambda: F.layer_norm(x, weight.shape, weight, bias, eps),
        lambda: F.layer_norm(x, weight.shape, weight, None, eps),
        lambda: F.layer_norm(x, bias.shape, None, bias, eps),
        lambda: F.layer_norm(x, x.shape[-1:], None, None, eps),
    )


def _normalized_sizes(match: Match) -> list[Any]:
    """Return the sizes of the value that is normalized."""
    node = next(n for n in match.aten if op_name(n.target) in {"mean", "var", *_NORM_OPS})
    arguments = named_arguments(node)
    return list(value_of(arguments.get("input", arguments.get("self"))).shape)


def affine_has_normalized_shape(match: Match) -> Decline | None:
    """Refuse a weight or bias that does not have the normalized sizes: broadcast, it is another operation."""
    sizes, dims = _normalized_sizes(match), normalized_dims(match)
    for name in ("weight", "bias", "shift"):
        value = match.operands.get(name)
        width = 1 if name == "bias" and "shift" in match else dims
        expected = sizes[len(sizes) - width :]
        if value is not None and not same_sizes(value.shape, expected):
            shape, other = (", ".join(map(str, s)) for s in (value.shape, expected))
            return Decline(f"'{value.name}' has shape [{shape}], not [{other}]", at=value)
    return None


def summands_have_one_rank(match: Match) -> Decline | None:
    x, residual = match["x"], match["residual"]
    if x.ndim != residual.ndim:
        return Decline(f"'{residual.name}' and '{x.name}' differ in rank: not a residual sum", at=residual)
    total, dims = _normalized_sizes(match), normalized_dims(match)
    inner = [v.shape[v.ndim - dims :] for v in (x, residual)]
    enlarged = [shapes_differ(v.shape, total) for v in (x, residual)]
    if not any(shapes_differ(sizes, total[x.ndim - dims :]) for sizes in inner) and not all(enlarged):
        return None
    return Decline(f"'{residual.name}' and '{x.name}' broadcast over each other", at=residual)


_EPS, _OFFSET, _DROPOUT = Const(0.0303), Const(1.0404), Const(0.1202)
_NORM_GUARDS = (affine_has_normalized_shape, is_floating_point)
_norm_rule = partial(library_rule, attrs_of=norm_attrs, guards=_NORM_GUARDS)
_sum_norm_rule = partial(_norm_rule, escapes="output", guards=(summands_have_one_rank, *_NORM_GUARDS))


@_norm_rule(rms_norm_kind, needs=_RMS, examples=[(_X, _WEIGHT)])
def rms_norm(x: Tensor, weight: Tensor, eps: Any = _EPS, offset: Any = _OFFSET) -> Tensor:
    """An RMS norm over the last dimension, or over those of its weight."""
    return rms_norm_pattern(x, weight, eps, offset)


@_sum_norm_rule(
    add_rms_norm_kind, needs=f"add {_RMS}", results_of=_norm_and_sum, examples=[(_X, _X, _WEIGHT)]
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: Any = _EPS, offset: Any = _OFFSET
) -> Tensor:
    """A residual sum and its RMS norm; the sum is returned too where it is used again."""
    return rms_norm_pattern(x + residual, weight, eps, offset)


@_norm_rule(layer_norm_kind, needs=_LAYER, examples=[(_X, _WEIGHT, _WEIGHT)])
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Any = _EPS) -> Tensor:
    """A layer norm over the last dimension, or over those of its weight."""
    return layer_norm_pattern(x, weight, bias, eps)


@_sum_norm_rule(
    add_layer_norm_kind,
    needs=f"add {_LAYER}",
    results_of=_norm_and_sum,
    examples=[(_X, _X, _WEIGHT, _WEIGHT)],
)
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: Any = _EPS) -> Tensor:
    """A residual sum and its layer norm; the sum is returned too where it is used again."""
    return layer_norm_pattern(x + residual, weight, bias, eps)


@_sum_norm_rule(
    dropout_add_layer_norm_kind,
    needs="add layer_norm|native_layer_norm",
    examples=[(_X, _X, _WEIGHT, _WEIGHT, _WEIGHT)],
)
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    bias: Tensor,
    weight: Tensor,
    shift: Tensor,
    dropout: Any = _DROPOUT,
    eps: Any = _EPS,
) -> Tensor:
    """The layer norm of dropout(x + bias) + residual.

    In inference there is no dropout; in training the bias may be part of the operation that computes x.
    """
    dropped = either(
        lambda: optional(x + bias, lambda y: F.dropout(y, dropout)), lambda: F.dropout(x, dropout)
    )
    return layer_norm_op_pattern(dropped + residual, weight, shift, eps)


@library_rule(
    group_norm_kind,
    needs="group_norm|native_group_norm",
    attrs_of=lambda m: {"groups": m["groups"], "eps": m["eps"], "activation": activation_name(m)},
    examples=[(_X, _CHANNELS, _CHANNELS)],
    guards=(is_gelu, is_floating_point),
)
@with_gelu
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gelu: Activation, groups: Any = Const(4), eps: Any = _EPS
) -> Tensor:
    """A norm over groups of channels, and the activation that follows it, if any."""
    normal = either(
        lambda: F.group_norm(x, groups, weight, bias, eps),
        lambda: F.group_norm(x, groups, None, None, eps),
    )
    return either(lambda: torch.relu(normal), lambda: silu(normal), lambda: gelu(normal), lambda: normal)


NORMS = RuleSet(rms_norm, add_rms_norm, layer_norm, add_layer_norm, dropout_add_layer_norm, group_norm)
_IDS, _TABLE = meta_tensor(2, 8, dtype=torch.int64), meta_tensor(32, 16)
Ids = Annotated[Tensor | None, "of integers; rows are broadcast with those of the others"]
Table = Annotated[Tensor | None, "[rows, width]"]


@kind("embedding_norm", version=3, draws="one dropout mask of the shape of the sum")
def embedding_norm_kind(
    ids: Annotated[Tensor, "any shape, of integers"],
    table: Annotated[Tensor, "[rows, width]"],
    second_ids: Ids = None,
    second: Table = None,
    third_ids: Ids = None,
    third: Table = None,
    added: Annotated[Tensor | None, "[..., width], broadcast with the rows"] = None,
    weight: Annotated[Tensor | None, "[width]"] = None,
    bias: Annotated[Tensor | None, "[width]"] = None,
    *,
    norm: str,
    tables: int = 1,
    eps: float | None = 1e-5,
    offset: float = 0.0,
    dropout: float = 0.0,
    padding_idx: int = -1,
    dims: int = 1,
    out_dtype: str = "promoted",
) -> tuple[Tensor, Tensor]:
    """The norm, "layer_norm" or "rms_norm", of the sum of rows of `tables` tables and of `added`, and that sum.

    Dropout is applied to the sum, whose terms broadcast. The row `padding_idx` of `table` gets no gradient; -1 for none.
    """
    total = torch.embedding(table, ids, padding_idx)
    for other, positions in ((second, second_ids), (third, third_ids)):
        total = total if other is None else total + torch.embedding(other, cast("Tensor", positions))
    total = F.dropout(total if added is None else total + added, dropout)
    if norm == "rms_norm":
        result = rms_norm_kind(total, weight, eps=eps, offset=offset, dims=dims, out_dtype=out_dtype)
    else:
        result = layer_norm_kind(total, weight, bias, eps=cast("float", eps), dims=dims, out_dtype=out_dtype)
    return result, total


def _embedding_attrs(match: Match) -> dict[str, Any]:
    norm = match.rule.removeprefix("embedding_")
    tables = sum(match.operands.get(name) is not None for name in ("table", "second", "third"))
    return {"norm": norm, "tables": tables, "padding_idx": match["padding"], **norm_attrs(match)}


def _norm_and_embedding(match: Match) -> list[Node | None]:
    """Return the norm and its operand: the sum of rows and added values, after dropout."""
    added = match["added"]
    summed = {n for n in match.aten if op_name(n.target) == "embedding"}
    total = next(n for n in summed if named_arguments(n)["weight"] is match["table"].aten)
    if added is not None:
        summed.add(cast("Node", added.aten))
    while True:
        users = [n for n in total.users if n in match.aten]
        sums = [n for n in users if op_name(n.target) == "add" and summed.issuperset(n.all_input_nodes)]
        drops = [n for n in users if "dropout" in op_name(n.target) or is_projection(n)]
        if not (sums or drops):
            return [match.outputs[0], match.aten[total]]
        total = (sums or drops)[0]
        summed.add(total)


def added_is_independent(match: Match) -> Decline | None:
    added = match["added"]
    if added is None:
        return None
    inside, visited, stack = set(match.nodes), {added.node}, [added.node]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used in inside:
                return Decline(f"'{added.name}' is computed from the embedding: it is a residual", at=added)
            if used not in visited:
                visited.add(used)
                stack.append(used)
    return None


_embedding_rule = partial(
    library_rule,
    embedding_norm_kind,
    attrs_of=_embedding_attrs,
    results_of=_norm_and_embedding,
    escapes="output",
    guards=(added_is_independent, *_NORM_GUARDS),
)


@_embedding_rule(
    needs="embedding layer_norm|native_layer_norm",
    examples=[(_IDS, _TABLE, _IDS, _TABLE, _IDS, _TABLE, _X, _WEIGHT, _WEIGHT)],
)
def embedding_layer_norm(
    ids: Tensor,
    table: Tensor,
    second_ids: Tensor,
    second: Tensor,
    third_ids: Tensor,
    third: Tensor,
    added: Tensor,
    weight: Tensor,
    bias: Tensor,
    padding: Any = Const(1),
    dropout: Any = _DROPOUT,
    eps: Any = _EPS,
) -> Tensor:
    """The layer norm of rows of a table, plus rows of one or two more tables, or plus other values.

    The rows are returned too where they are used again.
    """
    rows = torch.embedding(table, ids, padding)
    total = either(
        lambda: rows + torch.embedding(second, second_ids) + torch.embedding(third, third_ids),
        lambda: rows + torch.embedding(second, second_ids),
        lambda: rows + added,
        lambda: rows,
    )
    total = optional(total, lambda r: F.dropout(r, dropout))
    return layer_norm_op_pattern(total, weight, bias, eps)


@_embedding_rule(needs=f"embedding {_RMS}", examples=[(_IDS, _TABLE, _X, _WEIGHT)])
def embedding_rms_norm(
    ids: Tensor,
    table: Tensor,
    added: Tensor,
    weight: Tensor,
    padding: Any = Const(1),
    dropout: Any = _DROPOUT,
    eps: Any = _EPS,
    offset: Any = _OFFSET,
) -> Tensor:
    """The RMS norm of rows of a table; the rows are returned too where they are used again."""
    rows = optional(torch.embedding(table, ids, padding), lambda r: r + added)
    return rms_norm_pattern(optional(rows, lambda r: F.dropout(r, dropout)), weight, eps, offset)


EMBEDDINGS = RuleSet(embedding_layer_norm, embedding_rms_norm)
