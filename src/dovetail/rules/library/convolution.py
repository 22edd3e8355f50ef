"""Convolutions with the operations that follow them, their gradients, and the mix-FFN.

A mix-FFN (SegFormer's) is a linear layer, a depthwise convolution over the tokens as an image, and a second linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.schema import named_arguments, op_name, static_size, value_of
from dovetail.rules.library.library_rule import (
    SIMPLE_ACTIVATIONS,
    Activation,
    LibraryRule,
    activate,
    activation_name,
    gelu_approximation,
    has_op,
    is_floating_point,
    is_gelu,
    kind,
    library_rule,
    meta_tensor,
    nodes_of,
    required_result,
    results_by_position,
    shapes_differ,
    with_gelu,
)
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Candidate, Decline, Proposal, Refusal, Rule, RuleContext, RuleSet

_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_ACTIVATIONS = "|".join(["gelu", "leaky_relu", *(operators for operators, _ in SIMPLE_ACTIVATIONS.values())])
Images = Annotated[Tensor, "[batch, in, *spatial], the batch perhaps absent"]
Kernel = Annotated[Tensor, "[out, in / groups, *window]"]
Channels = Annotated[Tensor | None, "[out]"]


@kind("conv_bn_act", version=2)
def conv_bn_act_kind(
    x: Images,
    weight: Kernel,
    bias: Channels = None,
    mean: Channels = None,
    variance: Channels = None,
    scale: Channels = None,
    shift: Channels = None,
    residual: Annotated[Tensor | None, "[batch, out, *spatial]"] = None,
    *,
    stride: list[int],
    padding: list[int] | str,
    dilation: list[int],
    groups: int = 1,
    batch_norm: bool = False,
    training: bool = False,
    eps: float | None = None,
    activation: str | None = None,
    slope: float | None = None,
) -> Tensor:
    """A convolution, then a batch norm, a residual sum and an activation, each optional.

    With `training` the batch norm uses the statistics of the batch; updates of the running ones are results of the body
    alone. `padding` may be "same" or "valid".
    """
    convolve = _CONVOLUTIONS[weight.dim() - 3]
    y = convolve(x, weight, bias, stride, padding, dilation, groups)
    if batch_norm:
        running = (None, None) if training else (mean, variance)
        y = F.batch_norm(y, *running, scale, shift, training, eps=cast("float", eps))
    return activate(y if residual is None else y + residual, activation, slope)


@kind("conv_grad", version=3)
def conv_grad_kind(
    grad: Annotated[Tensor, "[batch, out, *spatial]"],
    x: Annotated[Tensor, "[batch, in, *spatial]"],
    weight: Annotated[Tensor, "[out, in / groups, *window]; [in, out / groups, *window] if transposed"],
    activated: Annotated[Tensor | None, "the shape of grad"] = None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
    transposed: bool = False,
    output_padding: list[int],
    bias_sizes: list[int] | None,
    output_mask: list[bool],
    activation: str | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias of a convolution; None where `output_mask` is False.

    With activation "relu", `activated` is the result of a ReLU after the convolution; where it is NaN the gradient passes.
    """
    if activation == "relu":
        grad = torch.where(cast("Tensor", activated) <= 0, 0.0, grad)
    options = (stride, padding, dilation, transposed, output_padding, groups)
    return torch.ops.aten.convolution_backward.default(grad, x, weight, bias_sizes, *options, output_mask)


def _apply_activation(x: Tensor, slope: Any) -> Tensor:
    return either(
        *(partial(activation, x) for _, activation in SIMPLE_ACTIVATIONS.values()),
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.leaky_relu(x, slope),
    )


def _activation_of(match: Match) -> str | None:
    if has_op(match, "sigmoid"):
        return "silu" if has_op(match, "mul") else "sigmoid"
    if has_op(match, "gelu"):
        return "gelu" if gelu_approximation(match) == "none" else "gelu_tanh"
    if has_op(match, "leaky_relu"):
        return "leaky_relu"
    return next(
        (name for name, (operators, _) in SIMPLE_ACTIVATIONS.items() if has_op(match, *operators.split("|"))),
        None,
    )


def _conv_attrs(match: Match) -> dict[str, Any]:
    activation, rank = _activation_of(match), match["weight"].ndim - 2
    return {
        "stride": match["stride"],
        "padding": match["padding"],
        "dilation": match["dilation"],
        "groups": group_count(match["x"], match["weight"], rank),
        "activation": activation,
        **({"slope": match["slope"]} if activation == "leaky_relu" else {}),
        "batch_norm": "mean" in match,
        "training": has_op(match, "_native_batch_norm_legit_functional", "_native_batch_norm_legit"),
        "eps": match.literals.get("eps"),
    }


def group_count(x: Any, weight: Any, rank: int) -> int:
    """Return the number of groups of a convolution over `rank` dimensions, from the shape of its weight."""
    return x.shape[x.ndim - rank - 1] // weight.shape[1]


def conv_pattern(
    rank: int, x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """A convolution over `rank` dimensions."""
    groups, convolve = group_count(x, weight, rank), _CONVOLUTIONS[rank - 1]
    return either(
        lambda: convolve(x, weight, bias, stride, padding, dilation, groups),
        lambda: convolve(x, weight, None, stride, padding, dilation, groups),
    )


def batch_norm_pattern(
    x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor, momentum: Any, eps: Any
) -> Tensor:
    """A batch norm by running statistics, or by those of the batch, which then update the running ones."""
    training = torch.ops.aten._native_batch_norm_legit_functional.default
    return either(
        lambda: F.batch_norm(x, mean, variance, scale, shift, False, momentum, eps),
        lambda: F.batch_norm(x, mean, variance, None, None, False, momentum, eps),
        lambda: training(x, scale, shift, mean, variance, True, momentum, eps)[0],
    )


def _examples(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, a kernel, a vector over the channels, and a residual for any stride and padding."""
    image, kernel = (2, 8, *[8] * rank), (8, 8, *[3] * rank)
    return meta_tensor(*image), meta_tensor(*kernel), meta_tensor(8), meta_tensor(2, 8, *[1] * rank)


def _has_string_padding(context: RuleContext) -> bool:
    """Return whether there is a convolution with the padding "same" or "valid": an overload of its own."""
    targets = context.analysis(normalized_graph_of).by_target
    return any(getattr(target, "_overloadname", "") == "padding" for target in targets)


def residual_has_sum_shape(match: Match) -> Decline | None:
    """Refuse a residual that is broadcast, or that broadcasts the value it is added to."""
    residual = match["residual"]
    if residual is None:
        return None
    sums = (n for n in match.aten if op_name(n.target) == "add" and residual.aten in n.all_input_nodes)
    total = next(sums)
    shapes = [n.meta["val"].shape for n in (total, *total.all_input_nodes)]
    if residual.ndim == match["weight"].ndim and not any(shapes_differ(s, shapes[0]) for s in shapes):
        return None
    return Decline(f"'{residual.name}' does not have the shape of the value it is added to", at=residual)


def _convolution_rules(rank: int, *, string_padding: bool) -> list[LibraryRule]:
    x, kernel, vector, residual = _examples(rank)
    ones: list[int] = [1] * rank
    padding_example: Any = "valid" if string_padding else [0] * rank
    name = f"conv{rank}d_padded" if string_padding else f"conv{rank}d"
    when = _has_string_padding if string_padding else None
    conv_rule = partial(library_rule, conv_bn_act_kind, attrs_of=_conv_attrs, when=when)
    operators = f"conv{rank}d|convolution"
    norms = "_native_batch_norm_legit_no_training|_native_batch_norm_legit_functional|native_batch_norm|batch_norm"

    @conv_rule(
        name=f"{name}_bn_act",
        needs=f"{operators} {norms}",
        examples=[(x, kernel, *[vector] * 5, residual)],
        guards=[residual_has_sum_shape],
    )
    def conv_bn_act(
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        variance: Tensor,
        bias: Tensor,
        scale: Tensor,
        shift: Tensor,
        residual: Tensor,
        stride: Any = Const(ones),
        padding: Any = Const(padding_example),
        dilation: Any = Const(ones),
        momentum: Any = Const(0.1303),
        eps: Any = Const(0.0404),
        slope: Any = Const(0.0101),
    ) -> Tensor:
        y = conv_pattern(rank, x, weight, bias, stride, padding, dilation)
        y = batch_norm_pattern(y, mean, variance, scale, shift, momentum, eps)
        return optional(optional(y, lambda y: y + residual), lambda y: _apply_activation(y, slope))

    @conv_rule(name=f"{name}_act", needs=f"{operators} {_ACTIVATIONS}", examples=[(x, kernel, vector)])
    def conv_act(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        stride: Any = Const(ones),
        padding: Any = Const(padding_example),
        dilation: Any = Const(ones),
        slope: Any = Const(0.0101),
    ) -> Tensor:
        return _apply_activation(conv_pattern(rank, x, weight, bias, stride, padding, dilation), slope)

    return [conv_bn_act, conv_act]


_GRAD, (_GRAD_X, _GRAD_KERNEL, *_) = meta_tensor(2, 8, 6, 6), _examples(2)


def _grad_attrs(match: Match) -> dict[str, Any]:
    arguments = named_arguments(next(n for n in match.nodes if op_name(n.target) == "convolution_backward"))
    return {
        "stride": match["stride"],
        "padding": match["padding"],
        "dilation": match["dilation"],
        "output_mask": match["output_mask"],
        "output_padding": match["output_padding"],
        "bias_sizes": match.literals.get("sizes"),
        "transposed": bool(arguments["transposed"]),
        "groups": arguments["groups"],
        "activation": "relu" if has_op(match, "threshold_backward") else None,
    }


@library_rule(
    conv_grad_kind,
    results_of=results_by_position,
    needs="convolution_backward",
    attrs_of=_grad_attrs,
    examples=[(_GRAD, _GRAD_X, _GRAD_KERNEL, _GRAD)],
)
def conv_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    activated: Tensor,
    sizes: Any = Const([8]),
    stride: Any = Const([1, 1]),
    padding: Any = Const([0, 0]),
    dilation: Any = Const([1, 1]),
    output_padding: Any = Const([0, 0]),
    output_mask: Any = Const([True, True, False]),
) -> Tensor:
    """The gradients of a convolution; where a ReLU followed it, of both."""
    grad = optional(grad, lambda g: torch.ops.aten.threshold_backward.default(g, activated, 0))

    def gradients(transposed: bool) -> tuple[Tensor | None, ...]:
        channels = grad.shape[1] if transposed else x.shape[1]
        groups = channels // weight.shape[1]
        return torch.ops.aten.convolution_backward.default(
            grad, x, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
        )

    def gradient(i: int) -> Tensor:
        return required_result(either(lambda: gradients(False), lambda: gradients(True)), i)

    return either(lambda: gradient(1), lambda: gradient(0))


@conv_grad.guard
def activated_has_shape_of_grad(match: Match) -> Decline | None:
    activated = match["activated"]
    if activated is None or not shapes_differ(activated.shape, match["grad"].shape):
        return None
    return Decline(f"'{activated.name}' does not have the shape of '{match['grad'].name}'", at=activated)


_STATIC_PADDING, _STRING_PADDING = (
    [rule for rank in (1, 2, 3) for rule in _convolution_rules(rank, string_padding=padding)]
    for padding in (False, True)
)
CONVOLUTION = RuleSet(*_STATIC_PADDING, *_STRING_PADDING, conv_grad)
Grid = tuple[int, int]
_TRANSPOSES = frozenset({"transpose", "permute"})


@kind("mix_ffn")
def mix_ffn_kind(
    x: Annotated[Tensor, "[batch, height * width, in]"],
    weight: Annotated[Tensor, "[hidden, in]"],
    conv_weight: Annotated[Tensor, "[hidden, 1, rows, columns]"],
    out_weight: Annotated[Tensor, "[out, hidden]"],
    bias: Annotated[Tensor | None, "[hidden]"] = None,
    conv_bias: Annotated[Tensor | None, "[hidden]"] = None,
    out_bias: Annotated[Tensor | None, "[out]"] = None,
    *,
    grid: list[int],
    activation: str | None,
) -> Tensor:
    """A linear layer, a depthwise convolution over the tokens as an image of `grid` sizes, and a second linear layer.

    The convolution is padded by half its kernel, and the `activation` precedes the second layer.
    """
    hidden = F.linear(x, weight, bias)
    image = hidden.transpose(1, 2).reshape(x.shape[0], -1, *grid)
    padding = [size // 2 for size in conv_weight.shape[2:]]
    mixed = F.conv2d(image, conv_weight, conv_bias, padding=padding, groups=conv_weight.shape[0])
    return F.linear(activate(mixed.flatten(2).transpose(1, 2), activation), out_weight, out_bias)


@functools.cache
def _rule_for_grid(height: int, width: int) -> LibraryRule:
    """Return the rule for one grid: the sizes of a reshape are literals."""
    tokens, square, vector = meta_tensor(2, height * width, 16), meta_tensor(16, 16), meta_tensor(16)

    @library_rule(
        mix_ffn_kind,
        name="mix_ffn",
        needs="linear conv2d transpose|permute",
        attrs_of=lambda m: {"grid": [height, width], "activation": activation_name(m)},
        examples=[(tokens, square, vector, meta_tensor(16, 1, 3, 3), vector, square, vector)],
        guards=[is_gelu, is_floating_point],
    )
    @with_gelu
    def mix_ffn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        gelu: Activation,
    ) -> Tensor:
        batch, channels = x.shape[0], weight.shape[0]
        hidden = either(lambda: F.linear(x, weight, bias), lambda: F.linear(x, weight))
        transposed = either(lambda: hidden.transpose(1, 2), lambda: hidden.permute(0, 2, 1))
        image = transposed.reshape(batch, channels, height, width)
        padding = [size // 2 for size in conv_weight.shape[2:]]
        mixed = either(
            lambda: F.conv2d(image, conv_weight, conv_bias, 1, padding, 1, channels),
            lambda: F.conv2d(image, conv_weight, None, 1, padding, 1, channels),
        )
        flat = mixed.flatten(2)
        rows = either(lambda: flat.transpose(1, 2), lambda: flat.permute(0, 2, 1))
        active = either(lambda: gelu(rows), lambda: torch.relu(rows))
        return either(lambda: F.linear(active, out_weight, out_bias), lambda: F.linear(active, out_weight))

    return mix_ffn


class MixFFN(Rule):
    """Proposes every mix-FFN, for all sizes of grids that are static."""

    name, kind, reference = "mix_ffn", "mix_ffn", mix_ffn_kind

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        grids = context.analysis(_grids)
        static = sorted({grid for grid in grids.values() if grid is not None})
        proposals = [p for grid in static for p in _rule_for_grid(*grid).propose(context)]
        origins = context.analysis(normalized_graph_of).origins
        for node, grid in grids.items():
            if grid is None and origins.get(node):
                reason = "the sizes of its grid are dynamic, and attributes of the kind are static"
                proposals.append(Refusal(self.name, tuple(origins[node]), reason, origins[node][-1]))
        matched = {p.members for p in proposals if isinstance(p, Candidate)}
        # A refusal by the rule for one grid may be a match of the rule for another.
        return [p for p in proposals if isinstance(p, Candidate) or p.members not in matched]


def _grids(context: RuleContext) -> dict[Node, Grid | None]:
    """Return the sizes of images that depthwise convolutions read from a reshape of tokens; None for dynamic ones."""
    grids: dict[Node, Grid | None] = {}
    for node in nodes_of(context, "conv2d"):
        arguments = named_arguments(node)
        image = value_of(arguments.get("input"))
        if not isinstance(image, Tensor) or arguments.get("groups") in (None, 1):
            continue
        source = arguments["input"]
        if op_name(source.target) != "reshape":
            continue
        height, width = (static_size(n) for n in image.shape[-2:])
        if height is not None and width is not None:
            grids[node] = (height, width)
        elif op_name(source.args[0].target) in _TRANSPOSES:
            grids[node] = None
    return grids


MIX_FFN = RuleSet(MixFFN())
