"""The kind "attention", its attributes and guards, and the sub-patterns of attention that is written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.graph_module import attribute
from dovetail.ir.schema import named_arguments, op_name, static_size, value_of
from dovetail.rules.library.library_rule import bundle_arguments, has_op, kind, meta_tensor, shapes_differ
from dovetail.rules.patterns.alternatives import either, optional
from dovetail.rules.patterns.match_state import Match, Value
from dovetail.rules.patterns.template import NotProvable
from dovetail.rules.rule import Decline

Product = Callable[[Tensor, Tensor], Tensor]
Q, KV, GROUPED_KV = meta_tensor(2, 4, 8, 16), meta_tensor(2, 4, 8, 16), meta_tensor(2, 2, 8, 16)
MASK = meta_tensor(2, 1, 8, 8, dtype=torch.bool)

# Of one element, so that it broadcasts at every rank that is tried.
BIAS, SCALAR = meta_tensor(1, 1), meta_tensor()
Scores = Annotated[Tensor | None, "broadcast to the scores [..., queries, keys]"]
_DROPOUT_DRAWS = "one dropout mask of the shape of the scores, as one random operation"


@kind("attention", version=4, draws=_DROPOUT_DRAWS, rounds_to="v")
def attention_kind(
    q: Annotated[Tensor, "[..., heads, queries, width]"],
    k: Annotated[Tensor | None, "[..., heads / groups, keys, width]"] = None,
    v: Annotated[Tensor | None, "[..., heads / groups, keys, value width]"] = None,
    mask: Scores = None,
    bias: Scores = None,
    columns: Annotated[Tensor | None, "[..., width, keys], instead of k"] = None,
    mask_4d: Annotated[
        Tensor | None, "[batch, heads or 1, queries, keys], q being [batch * heads, ...]"
    ] = None,
    filler: Annotated[Tensor | None, "[]: a tensor instead of mask_value"] = None,
    second_bias: Annotated[Tensor | None, "as bias, added after it"] = None,
    sinks: Annotated[Tensor | None, "[heads]: scores of one more key without a value"] = None,
    sink_column: Annotated[Tensor | None, "[..., queries, 1], instead of sinks"] = None,
    factor: Annotated[Tensor | None, "[]: a tensor that multiplies the scaled scores"] = None,
    divisor: Annotated[Tensor | None, "[]: a tensor that divides the scaled scores"] = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    mask_type: str = "none",
    mask_value: float | None = None,
    bias_after_mask: bool = False,
    bias_before_scale: bool = False,
    softcap: float | None = None,
    groups: int = 1,
    equations: list[str] | None = None,
    safe_softmax: bool = False,
) -> Tensor:
    """dropout(softmax(scale * QKᵀ + mask)) V; `scale` None is one over the root of the width.

    A mask is "additive", "subtracted", or boolean: scores where a "keep" mask is False, or a "hide" mask True, become
    `mask_value`, None for -inf. `causal` hides keys after the query's own position, counted from the first: their
    scores become `mask_value`, or have it added if the mask is "additive". `softcap` c replaces scores s by
    c * tanh(s / c) before bias and mask. With `bias_before_scale` the biases are added to the product and scaled with it.
    `sinks` take part in the softmax as the scores of one more key, whose weights are dropped. `equations` are the
    einsums of the two products where q, k, v and the result have other layouts: i, j, d, e are the letters of queries,
    keys, width and value width. With `safe_softmax` a row of scores that are all -inf gives zeros, otherwise NaN; without
    a mask, where only infinite scores lead to it, the result is unspecified. Weights are rounded to the dtype of the
    values.
    """
    keys = cast("Tensor", k) if columns is None else columns.transpose(-1, -2)
    values = cast("Tensor", v)
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=-3) for x in (keys, values))
    biases = [x for x in (bias, second_bias) if x is not None]
    scores = torch.einsum(equations[0], q, keys) if equations else q @ keys.transpose(-1, -2)
    if bias_before_scale:
        scores = sum(biases, scores)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if factor is None else scores * factor
    scores = scores if divisor is None else scores / divisor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if not bias_after_mask and not bias_before_scale:
        scores = sum(biases, scores)
    shape = scores.shape
    if mask_4d is not None:
        scores, mask = scores.reshape(mask_4d.shape[0], -1, *shape[1:]), mask_4d
    fill: Any = -math.inf if mask_value is None else mask_value
    if mask is not None:
        if mask_type in ("keep", "hide"):
            keep = mask if mask_type == "keep" else ~mask
            scores = torch.where(keep, scores, fill if filler is None else filler)
        else:
            scores = scores + (-mask if mask_type == "subtracted" else mask)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = torch.where(later, scores + fill if mask_type == "additive" else fill, scores)
    scores = scores.reshape(shape) if mask_4d is not None else scores
    if bias_after_mask:
        scores = sum(biases, scores)
    if sinks is not None:
        sink_column = sinks.reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
    if sink_column is not None:
        weights = torch.softmax(torch.cat([scores, sink_column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if safe_softmax:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    weights = F.dropout(weights.to(values.dtype), dropout)
    return torch.einsum(equations[1], weights, values) if equations else weights @ values


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as they are, or with each head repeated for its group of query heads."""

    def group_size() -> int:
        groups = q.shape[1] // k.shape[1] if q.dim() == k.dim() == 4 else 1
        if groups < 2:
            raise ValueError("heads are not grouped")
        return groups

    def expand(x: Tensor) -> Tensor:
        groups = group_size()
        batch, heads, length, width = x.shape
        expanded = x[:, :, None].expand(batch, heads, groups, length, width)
        return expanded.reshape(batch, heads * groups, length, width)

    return either(
        lambda: (k, v),
        lambda: (expand(k), expand(v)),
        lambda: (k.repeat_interleave(group_size(), dim=1), v.repeat_interleave(group_size(), dim=1)),
    )


def transposed_keys(k: Tensor) -> Tensor:
    """Kᵀ."""
    rank = k.dim()
    return either(lambda: k.transpose(-1, -2), lambda: k.permute(*range(rank - 2), rank - 1, rank - 2))


def _require_scalar(x: Tensor) -> Tensor:
    if x.dim():
        raise NotProvable("its scores are scaled by a tensor with dimensions, not by a literal or a scalar")
    return x


@dataclass(frozen=True)
class ScorePattern:
    """Sub-patterns for the operations on scores between the two products, with their operands and literals."""

    scale: Any
    scale_divisor: Any
    fill: Any
    dropout: Any
    late_scale: Any = None
    late_divisor: Any = None
    relax: Any = None
    mask: Any = None
    bias: Any = None
    filler: Any = None
    second_bias: Any = None
    factor: Any = None
    divisor: Any = None

    def scaled_product(self, q: Tensor, columns: Tensor, multiply: Product = torch.matmul) -> Tensor:
        """A product with a scale of its own, with one on a factor, or without."""
        return either(
            lambda: multiply(q, columns) * self.scale,
            lambda: multiply(q, columns) / self.scale_divisor,
            lambda: multiply(q * self.scale, columns),
            lambda: multiply(q / self.scale_divisor, columns),
            lambda: multiply(q, columns * self.scale),
            lambda: multiply(q, columns) * _require_scalar(self.factor),
            lambda: multiply(q, columns) / _require_scalar(self.divisor),
            lambda: multiply(q * _require_scalar(self.factor), columns),
            lambda: multiply(q / _require_scalar(self.divisor), columns),
            lambda: multiply(q, columns / _require_scalar(self.divisor)),
            lambda: multiply(q, columns),
        )

    def biased_product(self, q: Tensor, columns: Tensor, multiply: Product = torch.matmul) -> Tensor:
        """A product with its scale, its mask and its biases."""
        scaled = self.scaled_product(q, columns, multiply)
        return self.with_bias_and_mask(multiply(q, columns), scaled)

    def with_bias_and_mask(self, product: Tensor, scaled: Tensor) -> Tensor:
        """Scores with their biases and their mask; a bias may be scaled along with the `product` it is added to."""

        def biased(x: Tensor) -> Tensor:
            total = x + self.bias
            return either(lambda: total + self.second_bias, lambda: total + 0, lambda: total)

        def late(x: Tensor) -> Tensor:
            return either(lambda: x * self.late_scale, lambda: x / self.late_divisor)

        # Where the last `either` takes another alternative this one takes its first, which needs no bias.
        scores = either(
            lambda: scaled,
            lambda: scaled + 0,
            lambda: biased(scaled),
            lambda: late(biased(product)),
        )
        return either(
            lambda: self.masked(scores, self.mask),
            lambda: self.masked(scaled, self.mask) + self.bias,
            lambda: late(self.filled(product, self.mask)),
            lambda: scores,
        )

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Scores with a mask added, subtracted, or filled in where it is set."""
        return either(lambda: x + mask, lambda: x - mask, lambda: self.filled(x, mask))

    def filled(self, x: Tensor, mask: Tensor) -> Tensor:
        """Scores replaced by a value where a boolean mask is set, or where it is not."""
        return either(
            lambda: x.masked_fill(mask, self.fill),
            lambda: torch.where(mask, x, self.fill),
            lambda: torch.where(mask, self.fill, x),
            lambda: torch.where(mask, x, torch.full([], self.fill, dtype=x.dtype, device=x.device)),
        )

    def weights(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The softmax of scores, in float32 or not, with dropout or without."""

        def by_hand() -> Tensor:
            powers = torch.exp(x - row_max(x))
            return powers / powers.sum(-1, keepdim=True)

        def relaxed() -> Tensor:
            # CogView's: the same scores, which cannot overflow in float16.
            small = x / self.relax
            return (small - row_max(small)) * self.relax

        # A shift by the row maximum is tried before a mask that is subtracted.
        shifted = either(lambda: x - row_max(x), relaxed, lambda: x)
        return self.dropped(either(lambda: row_softmax(shifted, dtype), by_hand))

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights with dropout or without."""
        return optional(weights, lambda w: F.dropout(w, self.dropout))


def row_max(x: Tensor) -> Tensor:
    """The maximum of each row, as a column."""
    return either(
        lambda: x.amax(-1, keepdim=True),
        lambda: x.max(-1, keepdim=True).values,
        lambda: x.amax(-1).unsqueeze(-1),
        lambda: x.max(-1).values.unsqueeze(-1),
    )


def row_softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax of each row, in float32 or not."""
    return either(
        lambda: torch.softmax(x, -1),
        lambda: torch.softmax(x, -1, dtype=torch.float32).to(dtype),
        lambda: torch.softmax(x.float(), -1).to(dtype),
    )


_LITERALS = {"scale": 0.2503, "scale_divisor": 4.2, "fill": -1e9, "dropout": 0.1202}
_LATE_SCALE, _RELAX = {"late_scale": 0.3504, "late_divisor": 4.3}, {"relax": 32.6}


def with_scores(
    operands: str, *, biased: bool = True, shifted: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a pattern the argument `scores`: a `ScorePattern` with these operands.

    `attention_attrs` and `is_supported_attention` read its literals. A pattern without `with_bias_and_mask` is not
    `biased`, one without `weights` not `shifted`.
    """
    literals = {**_LITERALS, **(_LATE_SCALE if biased else {}), **(_RELAX if shifted else {})}
    return bundle_arguments("scores", ScorePattern, literals, operands.split())


_MAX_MASK_DISTANCE = 4

# Beyond it float16 scores of ordinary size become subnormal.
_MAX_RELAX = 1024
_ABSORBS_SCORES = torch.finfo(torch.bfloat16).min


def _first_operand(match: Match, *names: str) -> Value | None:
    return next((value for name in names if (value := match.operands.get(name)) is not None), None)


def _groups(match: Match) -> int:
    if "score_equation" in match:
        return 1  # the heads of an einsum may be any dimension, and cannot be grouped
    heads = _head_counts(match)
    return heads[0] // heads[1] if heads else 1


def _head_counts(match: Match) -> tuple[int, ...]:
    """The heads of queries, keys and values as [batch, heads, ...]; empty if they are equal or the rank is another."""
    operands = [match["q"], _first_operand(match, "k", "columns"), match["v"]]
    if any(value is None or value.ndim != 4 for value in operands):
        return ()
    sizes = [value.shape[1] for value in operands if value is not None]
    if len({str(n) for n in sizes}) == 1:
        return ()
    return tuple(static_size(n) or 0 for n in sizes)


def heads_are_grouped(match: Match) -> Decline | None:
    """Refuse query heads that are not known to be a multiple of the key and value heads."""
    heads = () if "score_equation" in match else _head_counts(match)
    if not heads or (heads[1] == heads[2] and heads[1] and heads[0] % heads[1] == 0):
        return None
    return Decline(f"query heads are not a multiple of the heads of keys and values ({heads})", at=match["q"])


def _mask_type(match: Match) -> str:
    mask = _first_operand(match, "mask", "mask_4d")
    if mask is None:
        # A large enough value absorbs scores of ordinary size, in rows where at least one score is not masked.
        added = match.rule == "attention_causal" and has_op(match, "add")
        return "additive" if added and match.literals["fill"] > _ABSORBS_SCORES else "none"
    if match.rule == "attention":
        return "keep" if mask.dtype == torch.bool else "additive"
    if has_op(match, "masked_fill"):
        return "hide"
    choices = [node for node in match.nodes if op_name(node.target) == "where"]
    if not choices:
        differences = [n for n in match.aten if op_name(n.target) == "sub"]
        subtracted = any(named_arguments(node).get("other") is mask.aten for node in differences)
        return "subtracted" if subtracted else "additive"
    # The fill value is a number, or a tensor without dimensions; scores have some.
    chosen = value_of(named_arguments(choices[0]).get("self"))
    return "keep" if isinstance(chosen, Tensor) and chosen.dim() else "hide"


def _bias_after_mask(match: Match) -> bool:
    """Whether a bias is added to scores that a boolean mask was applied to."""
    bias, inside = _first_operand(match, "bias"), set(match.nodes)
    sums = [user for user in bias.users if user in inside] if bias is not None else []
    read = {op_name(n.target) for node in sums for n in node.all_input_nodes if n in inside}
    return bool(read & {"masked_fill", "where"})


def _late_scale(match: Match) -> float | None:
    """The scale that is applied after a bias was added or a mask filled in."""
    if "late_divisor" in match.literals:
        return 1.0 / float(match.literals["late_divisor"])
    return match.literals.get("late_scale")


def _fill_value(match: Match) -> float | None:
    """The value that replaces masked scores, where a mask is boolean or causal."""
    filler = match.operands.get("filler")
    if filler is not None and filler.is_constant and not filler.ndim:
        return float(attribute(filler.owner, str(filler.node.target)))
    fill, late = match.literals.get("fill"), _late_scale(match)
    if fill is None or late is None or _first_operand(match, "bias") is not None:
        return fill
    return fill * late  # it is scaled along with the scores


def attention_attrs(match: Match) -> Mapping[str, Any]:
    """Return the attributes of an attention, from the literals of its pattern and the operations matched."""
    literals = match.literals
    late = _late_scale(match)
    scale = literals.get("scale", 1.0)
    if late is not None:
        scale = late
    elif "scale_divisor" in literals:
        scale = 1.0 / float(literals["scale_divisor"])
    fill = None if match.operands.get("filler") is not None else _fill_value(match)
    equations = None
    if "score_equation" in literals:
        equations = canonical_equations(literals["score_equation"], literals["value_equation"])
    return {
        "scale": scale,
        "causal": bool(literals.get("causal", match.rule == "attention_causal")),
        "dropout": literals.get("dropout", 0.0),
        "mask_type": _mask_type(match),
        "mask_value": None if fill is None or math.isinf(fill) else fill,
        "bias_after_mask": _bias_after_mask(match),
        "bias_before_scale": late is not None and _first_operand(match, "bias") is not None,
        "softcap": literals.get("cap"),
        "groups": _groups(match),
        "equations": equations,
        # Without a mask no row of scores is masked as a whole.
        "safe_softmax": match.rule == "attention" and match.operands.get("mask") is not None,
    }


def canonical_equations(score_equation: str, value_equation: str) -> list[str] | None:
    """Rename the letters of two einsums: i, j, d, e for queries, keys, width, value width, and a, b, c, ... for the rest.

    Return None where they are matrix products over the last two dimensions.
    """
    (q, k, scores), (weights, v, result) = einsum_terms(score_equation), einsum_terms(value_equation)
    canonical = {next(iter(set(q) - set(k))): "i", next(iter(set(k) - set(q))): "j"}
    canonical[next(iter((set(q) & set(k)) - set(scores)))] = "d"
    names = iter("abcfghklmnopqrstuvwxyz")
    for letter in scores:
        if letter not in canonical:
            canonical[letter] = next(names)
    second = {letter: canonical[own] for letter, own in zip(weights, scores, strict=True)}
    extra = [letter for letter in v if letter not in second]
    second.update(zip(extra, "e" if len(extra) == 1 else [next(names) for _ in extra], strict=True))
    q, k, scores = ("".join(canonical[c] for c in term) for term in (q, k, scores))
    v, result = ("".join(second[c] for c in term) for term in (v, result))
    batch = scores[:-2]
    matmul = (f"{batch}id", f"{batch}jd", f"{batch}ij", f"{batch}je", f"{batch}ie")
    return None if (q, k, scores, v, result) == matmul else [f"{q},{k}->{scores}", f"{scores},{v}->{result}"]


def einsum_terms(equation: str) -> list[str]:
    """Return the letters of each operand and of the result; an empty list for an equation with an ellipsis."""
    terms = equation.replace(" ", "")
    return [] if "." in terms else terms.replace("->", ",").split(",")


def is_supported_attention(match: Match) -> Decline | None:
    """Refuse a scale that is not a number, a mask that does not hide, and operands that the kind does not describe."""
    if 0 in (match.literals.get("scale_divisor"), match.literals.get("late_divisor")):
        return Decline("its scores are divided by zero")
    relax = match.literals.get("relax", 1)
    if not 1 <= relax <= _MAX_RELAX:
        return Decline(f"its scores are divided by {relax!r} before the softmax, and may be lost in rounding")
    for name in ("factor", "divisor"):
        value = match.operands.get(name)
        if value is not None and value.dtype.is_complex:
            return Decline(f"its scores are scaled by '{value.name}', which is {value.dtype}", at=value)
    filler = match.operands.get("filler")
    if filler is not None and (filler.ndim or not filler.is_constant):
        return Decline("the value of masked scores is not a known scalar", at=filler)
    fill = _fill_value(match)
    if fill is not None and not fill <= -1e3:
        return Decline(f"masked scores become {fill!r}: they still count")
    if fill is not None and math.isfinite(fill) and fill < torch.finfo(match["q"].dtype).min:
        return Decline(f"masked scores become {fill!r}, which overflows {match['q'].dtype}")
    return (
        _mask_is_independent(match)
        or heads_are_grouped(match)
        or _sizes_agree(match)
        or _dropout_is_contiguous(match)
    )


def _mask_is_independent(match: Match) -> Decline | None:
    """Refuse a value that is subtracted from the scores and computed from them: it is a shift, not a mask."""
    mask, inside = _first_operand(match, "mask", "mask_4d"), set(match.nodes)
    reached = [mask.node] if mask is not None and _mask_type(match) == "subtracted" else []
    for _ in range(_MAX_MASK_DISTANCE):
        if inside.intersection(reached):
            return Decline("the value subtracted from its scores is computed from them", at=mask)
        reached = [n for node in reached for n in node.all_input_nodes]
    return None


def _sizes_agree(match: Match) -> Decline | None:
    """Refuse queries, keys and values that broadcast, except over heads, and masks that enlarge the scores."""
    q, k, v = match["q"], _first_operand(match, "k", "columns"), match["v"]
    assert k is not None
    *operands, result = _dimension_names(match, k)
    sizes: dict[str, Any] = {}
    for value, names in zip((q, k, v), operands, strict=True):
        if value.ndim != len(names):
            return Decline(f"'{value.name}' has {value.ndim} dimensions, not {len(names)}", at=value)
        expected = [sizes.setdefault(c, n) for c, n in zip(names, value.shape, strict=True)]
        if shapes_differ(value.shape, expected):
            return Decline(f"the sizes of '{value.name}' are not those of the other operands", at=value)
    if shapes_differ(match.outputs[0].meta["val"].shape, [sizes[name] for name in result]):
        return Decline("its result does not have the sizes of queries and values: a mask enlarges the scores")
    return None


def _dimension_names(match: Match, k: Value) -> tuple[Sequence[str], ...]:
    """A name for each dimension of queries, keys, values and result, the same one where sizes must agree."""
    if "score_equation" in match:
        q, keys, scores = einsum_terms(match["score_equation"])
        weights, v, result = einsum_terms(match["value_equation"])
        second = dict(zip(weights, scores, strict=True))
        return q, keys, *([second.get(c, f"value {c}") for c in term] for term in (v, result))
    batch = [f"batch {i}" for i in range(max(match["q"].ndim - 2, 0))]
    kv_batch = [*batch[:-1], "kv heads"] if _head_counts(match) else batch
    keys = ["d", "j"] if "columns" in match and k is match["columns"] else ["j", "d"]
    return [*batch, "i", "d"], [*kv_batch, *keys], [*kv_batch, "j", "e"], [*batch, "i", "e"]


def _dropout_is_contiguous(match: Match) -> Decline | None:
    """Refuse a dropout of weights in another memory layout: random numbers are drawn in the order of memory."""
    for node in match.nodes:
        if op_name(node.target) in ("native_dropout", "dropout"):
            weights = value_of(named_arguments(node).get("input"))
            # A slice of a larger tensor is not contiguous, but the mask drawn for it is.
            if isinstance(weights, Tensor) and not torch.empty_like(weights).is_contiguous():
                return Decline("its dropout draws for weights that are not contiguous", at=node)
    return None
