"""Convolutions with what follows them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.graph.normalform import by_name, op_name
from dovetail.rules.library.known import Known, broadcasts, has, kind, known, results_by_position
from dovetail.rules.library.steps import SIMPLE, activate, approximation
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Decline, RuleSet
from dovetail.rules.scene import Scene

_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_ACTIVATIONS = "|".join(["gelu", "leaky_relu", *(operators for operators, _ in SIMPLE.values())])


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
    """A convolution, then a batch norm, a residual sum and an activation, as far as they are there.

    With `training` the batch norm is by the statistics of the batch; updates of the kept ones are results of the
    body alone. `padding` may be "same" or "valid".
    """
    convolve = _CONVOLUTIONS[weight.dim() - 3]
    y = convolve(x, weight, bias, stride, padding, dilation, groups)
    if batch_norm:
        kept = (None, None) if training else (mean, variance)
        y = F.batch_norm(y, *kept, scale, shift, training, eps=cast("float", eps))
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

    With activation "relu", `activated` is what a ReLU after the convolution returned; where that is NaN the gradient
    passes.
    """
    if activation == "relu":
        grad = torch.where(cast("Tensor", activated) <= 0, 0.0, grad)
    return torch.ops.aten.convolution_backward.default(
        grad,
        x,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )


def _tensor(*sizes: int) -> Tensor:
    return torch.empty(sizes, device="meta")


def _activated(x: Tensor, slope: Any) -> Tensor:
    return either(
        *(partial(step, x) for _, step in SIMPLE.values()),
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.leaky_relu(x, slope),
    )


def _activation(match: Match) -> str | None:
    if has(match, "sigmoid"):
        return "silu" if has(match, "mul") else "sigmoid"
    if has(match, "gelu"):
        return "gelu" if approximation(match) == "none" else "gelu_tanh"
    if has(match, "leaky_relu"):
        return "leaky_relu"
    return next((name for name, (operators, _) in SIMPLE.items() if has(match, *operators.split("|"))), None)


def _conv_attrs(match: Match) -> dict[str, Any]:
    activation, rank = _activation(match), match["weight"].ndim - 2
    return {
        "stride": match["stride"],
        "padding": match["padding"],
        "dilation": match["dilation"],
        "groups": groups_of(match["x"], match["weight"], rank),
        "activation": activation,
        **({"slope": match["slope"]} if activation == "leaky_relu" else {}),
        "batch_norm": "mean" in match,
        "training": has(match, "_native_batch_norm_legit_functional", "_native_batch_norm_legit"),
        "eps": match.literals.get("eps"),
    }


def groups_of(x: Any, weight: Any, rank: int) -> int:
    """How many groups a convolution over `rank` dimensions has, as its weight tells."""
    return x.shape[x.ndim - rank - 1] // weight.shape[1]


def convolved(
    rank: int, x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """A convolution over `rank` dimensions."""
    groups, convolve = groups_of(x, weight, rank), _CONVOLUTIONS[rank - 1]
    return either(
        lambda: convolve(x, weight, bias, stride, padding, dilation, groups),
        lambda: convolve(x, weight, None, stride, padding, dilation, groups),
    )


def normalised(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor,
    shift: Tensor,
    momentum: Any,
    eps: Any,
) -> Tensor:
    """A batch norm by kept statistics, or by those of the batch, which are then kept."""
    training = torch.ops.aten._native_batch_norm_legit_functional.default
    return either(
        lambda: F.batch_norm(x, mean, variance, scale, shift, False, momentum, eps),
        lambda: F.batch_norm(x, mean, variance, None, None, False, momentum, eps),
        lambda: training(x, scale, shift, mean, variance, True, momentum, eps)[0],
    )


def _examples(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, a kernel, a vector over the channels, and what can be added whatever stride and padding."""
    image, kernel = (2, 8, *[8] * rank), (8, 8, *[3] * rank)
    return _tensor(*image), _tensor(*kernel), _tensor(8), _tensor(2, 8, *[1] * rank)


def _pads_by_word(scene: Scene) -> bool:
    """Whether there is a convolution whose padding is a word, "same" or "valid": an operator of its own."""
    targets = scene.fact(shadow_of).by_target
    return any(getattr(target, "_overloadname", "") == "padding" for target in targets)


def _convolution_rules(rank: int, *, word: bool) -> list[Known]:
    x, kernel, vector, stream = _examples(rank)
    ones: list[int] = [1] * rank
    shown: Any = "valid" if word else [0] * rank
    name, when = f"conv{rank}d{'_padded' if word else ''}", _pads_by_word if word else None
    operators = f"conv{rank}d|convolution"
    norms = "_native_batch_norm_legit_no_training|_native_batch_norm_legit_functional|native_batch_norm|batch_norm"

    @known(
        conv_bn_act_kind,
        name=f"{name}_bn_act",
        when=when,
        needs=f"{operators} {norms}",
        attrs_of=_conv_attrs,
        examples=[(x, kernel, vector, vector, vector, vector, vector, stream)],
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
        padding: Any = Const(shown),
        dilation: Any = Const(ones),
        momentum: Any = Const(0.1303),
        eps: Any = Const(0.0404),
        slope: Any = Const(0.0101),
    ) -> Tensor:
        y = convolved(rank, x, weight, bias, stride, padding, dilation)
        y = normalised(y, mean, variance, scale, shift, momentum, eps)
        return optional(optional(y, lambda y: y + residual), lambda y: _activated(y, slope))

    @known(
        conv_bn_act_kind,
        name=f"{name}_act",
        when=when,
        needs=f"{operators} {_ACTIVATIONS}",
        attrs_of=_conv_attrs,
        examples=[(x, kernel, vector)],
    )
    def conv_act(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        stride: Any = Const(ones),
        padding: Any = Const(shown),
        dilation: Any = Const(ones),
        slope: Any = Const(0.0101),
    ) -> Tensor:
        return _activated(convolved(rank, x, weight, bias, stride, padding, dilation), slope)

    @conv_bn_act.guard
    def residual_has_its_shape(match: Match) -> Decline | None:
        residual = match["residual"]
        if residual is None:
            return None
        added = next(
            n for n in match.aten if op_name(n.target) == "add" and residual.aten in n.all_input_nodes
        )
        shapes = [n.meta["val"].shape for n in (added, *added.all_input_nodes)]
        if residual.ndim == rank + 2 and not any(broadcasts(shape, shapes[0]) for shape in shapes):
            return None
        return Decline(f"'{residual.name}' is not of the shape of what it is added to", at=residual)

    return [conv_bn_act, conv_act]


_GRAD_X, _GRAD_KERNEL, _, _ = _examples(2)
_GRAD = _tensor(2, 8, 6, 6)


def _grad_attrs(match: Match) -> dict[str, Any]:
    backward = next(n for n in match.nodes if op_name(n.target) == "convolution_backward")
    given = by_name(backward)
    return {
        "stride": match["stride"],
        "padding": match["padding"],
        "dilation": match["dilation"],
        "output_mask": match["wanted"],
        "output_padding": match["output_padding"],
        "bias_sizes": match.literals.get("sizes"),
        "transposed": bool(given["transposed"]),
        "groups": given["groups"],
        "activation": "relu" if has(match, "threshold_backward") else None,
    }


@known(
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
    wanted: Any = Const([True, True, False]),
) -> Tensor:
    """The gradients of a convolution; where a ReLU followed it, of both."""
    grad = optional(grad, lambda g: torch.ops.aten.threshold_backward.default(g, activated, 0))

    def gradients(transposed: bool) -> tuple[Tensor | None, ...]:
        channels = grad.shape[1] if transposed else x.shape[1]
        groups = channels // weight.shape[1]
        return torch.ops.aten.convolution_backward.default(
            grad, x, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
        )

    def one(which: int) -> Tensor:
        made = either(lambda: gradients(False), lambda: gradients(True))[which]
        if made is None:
            raise ValueError("this gradient is not asked for")
        return made

    return either(lambda: one(1), lambda: one(0))


@conv_grad.guard
def activated_has_the_shape_of_grad(match: Match) -> Decline | None:
    activated = match["activated"]
    if activated is None or not broadcasts(activated.shape, match["grad"].shape):
        return None
    return Decline(f"'{activated.name}' is not of the shape of '{match['grad'].name}'", at=activated)


CONVOLUTION = RuleSet(
    *(rule for word in (False, True) for rank in (1, 2, 3) for rule in _convolution_rules(rank, word=word)),
    conv_grad,
)
