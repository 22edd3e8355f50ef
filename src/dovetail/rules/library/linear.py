"""Products with what follows them: an activation, a residual sum, a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import op_name
from dovetail.rules.library.known import Known, known
from dovetail.rules.library.steps import (
    SIMPLE,
    Step,
    approximation,
    by_halves,
    gelu_constants,
    silu,
    square,
    with_gelu,
)
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Decline, RuleSet
from dovetail.rules.scene import Scene

_PRODUCT = "linear|addmm|mm|matmul|bmm"

_X, _WEIGHT, _BIAS = (torch.empty(s, device="meta") for s in ((2, 8, 16), (16, 16), (16,)))
_ONE, _TWO = (_X, _WEIGHT, _BIAS), (_X, _WEIGHT, _WEIGHT, _BIAS, _BIAS)
_WEIGHTS = {
    **dict.fromkeys(("weight", "gate_weight", "up_weight", "packed"), 2),
    **dict.fromkeys(("bias", "gate_bias", "up_bias"), 1),
}
# With one dimension before the last there is nothing to flatten.
_FLAT = (_X[0], _WEIGHT, _BIAS)


def projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x times a weight, perhaps plus a bias: `linear`, or a product with the weight the other way round."""

    def of_rows(multiply: Callable[[Tensor], Tensor]) -> Tensor:
        return multiply(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], weight.shape[-1])

    return either(
        lambda: F.linear(x, weight, bias),
        lambda: F.linear(x, weight),
        lambda: of_rows(lambda rows: torch.addmm(bias, rows, weight)),
        lambda: of_rows(lambda rows: torch.mm(rows, weight)),
        lambda: x @ weight + bias,
        lambda: x @ weight,
    )


_STEPS: dict[str, tuple[str, Step]] = {
    **SIMPLE,
    "squared_relu": ("relu", lambda x: square(torch.relu(x))),
    "softplus": ("softplus", F.softplus),
}


def _linear_then(activation: str) -> Known:
    needs, step = _STEPS[activation]

    @known(
        kind="linear_activation",
        name=f"linear_{activation}",
        needs=f"{_PRODUCT} {needs}",
        says=lambda m: {"activation": activation},
        examples=[_ONE, _FLAT],
    )
    def linear_then(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return step(projected(x, weight, bias))

    return linear_then


_GELUS = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}


@known(
    kind="linear_activation",
    needs=f"{_PRODUCT} gelu|erf|tanh|sigmoid",
    says=lambda m: {"activation": _GELUS[approximation(m)]},
    examples=[_ONE, _FLAT],
)
@with_gelu
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gelu: Step,
) -> Tensor:
    """A product and a GELU."""
    return gelu(projected(x, weight, bias))


@known(
    kind="linear_activation",
    needs=f"{_PRODUCT} leaky_relu",
    says=lambda m: {"activation": "leaky_relu", "slope": m["slope"]},
    examples=[_ONE, _FLAT],
)
def linear_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, slope: Any = Const(0.0101)) -> Tensor:
    """A product and a leaky ReLU."""
    return F.leaky_relu(projected(x, weight, bias), slope)


@known(
    kind="linear_residual",
    needs=f"{_PRODUCT} add",
    says=lambda m: {"dropout": m.literals.get("dropout", 0.0)},
    examples=[(*_ONE, _X), (*_FLAT, _X[0])],
)
def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, dropout: Any = Const(0.1202)
) -> Tensor:
    """A product, its bias, perhaps dropout, and the stream it is added to."""
    return optional(projected(x, weight, bias), lambda y: F.dropout(y, dropout)) + residual


@linear_residual.guard
def residual_is_a_stream(match: Match) -> Decline | None:
    residual, made = match["residual"], match.outputs[0].meta.get("val")
    if isinstance(made, Tensor) and residual.ndim == made.dim() and residual.ndim > 1:
        return None
    return Decline(f"'{residual.name}' is spread over the rows: it is a bias, not a residual", at=residual)


def _projections(match: Match) -> dict[str, Any]:
    names = match.operands
    return {"projections": "packed" if "packed" in names else "two" if "x" in names else "none"}


def _gates(scene: Scene, whole: str, part: frozenset[str]) -> bool:
    """Whether the result of an activation, an operator or the last of its steps, is multiplied by another value."""

    def multiplied(node: Node) -> list[Node]:
        ahead = [user for user in node.users if op_name(user.target) == "mul"]
        return [user for user in ahead if sum(isinstance(a, Node) for a in user.args) == 2]

    for node in scene.fact(shadow_of).nodes:
        name = op_name(node.target)
        if name == whole and multiplied(node):
            return True
        if name in part:
            reached = [node, *(user for user in node.users if op_name(user.target) in ("add", "mul"))]
            for _ in range(3):
                reached = [user for each in reached for user in multiplied(each)]
                if reached and any(multiplied(each) for each in reached):
                    return True
    return False


def _silu_gates(scene: Scene) -> bool:
    return _gates(scene, "silu", frozenset({"sigmoid"}))


def _gelu_gates(scene: Scene) -> bool:
    return _gates(scene, "gelu", frozenset({"erf", "tanh", "sigmoid"}))


def _gated_halves(x: Tensor, step: Step) -> Tensor:
    """One half of the last dimension through an activation, times the other half."""
    return by_halves(x, lambda a, b: either(lambda: step(a) * b, lambda: a * step(b)))


_CUT = "split|split_with_sizes|slice|chunk"
_SILU, _GELU = "silu|sigmoid mul", "gelu|erf|tanh|sigmoid mul"


@known(kind="swiglu", needs=f"{_PRODUCT} {_SILU}", when=_silu_gates, says=_projections, examples=[_TWO])
def swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor,
    up_bias: Tensor,
) -> Tensor:
    """silu(gate(x)) * up(x)."""
    return silu(projected(x, gate_weight, gate_bias)) * projected(x, up_weight, up_bias)


@known(
    kind="swiglu",
    needs=f"{_PRODUCT} {_CUT} {_SILU}",
    when=_silu_gates,
    says=_projections,
    examples=[_ONE, _FLAT],
)
def swiglu_packed(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """The same from one product that holds gate and up side by side."""
    return _gated_halves(projected(x, packed, bias), silu)


@known(kind="swiglu", needs=_SILU, when=_silu_gates, says=_projections, examples=[(_X, _X)])
def swiglu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, wherever the two come from."""
    return silu(gate) * up


@known(kind="geglu", needs=f"{_PRODUCT} {_GELU}", when=_gelu_gates, says=_projections, examples=[_TWO])
@with_gelu
def geglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor,
    up_bias: Tensor,
    gelu: Step,
) -> Tensor:
    """gelu(gate(x)) * up(x)."""
    return gelu(projected(x, gate_weight, gate_bias)) * projected(x, up_weight, up_bias)


@known(
    kind="geglu",
    needs=f"{_PRODUCT} {_CUT} {_GELU}",
    when=_gelu_gates,
    says=_projections,
    examples=[_ONE, _FLAT],
)
@with_gelu
def geglu_packed(
    x: Tensor,
    packed: Tensor,
    bias: Tensor,
    gelu: Step,
) -> Tensor:
    """The same from one product that holds gate and up side by side."""
    return _gated_halves(projected(x, packed, bias), gelu)


@known(kind="geglu", needs=_GELU, when=_gelu_gates, says=_projections, examples=[(_X, _X)])
@with_gelu
def geglu_gate(
    gate: Tensor,
    up: Tensor,
    gelu: Step,
) -> Tensor:
    """gelu(gate) * up, wherever the two come from."""
    return gelu(gate) * up


def operands_are_weights(match: Match) -> Decline | None:
    """Refuse a product of two streams, and what is no bias: one number for each column."""
    for name, dims in _WEIGHTS.items():
        bound = match.operands.get(name)
        if bound is None or bound.ndim == dims:
            continue
        what = "weight" if dims == 2 else "bias"
        return Decline(f"'{bound.name}' has {bound.ndim} dimensions: it is no {what}", at=bound)
    return None


LINEAR = RuleSet(
    *(_linear_then(activation) for activation in _STEPS), linear_gelu, linear_leaky_relu, linear_residual
)
GATES = RuleSet(swiglu, swiglu_packed, swiglu_gate, geglu, geglu_packed, geglu_gate)

for _rule in (linear_gelu, geglu, geglu_packed, geglu_gate):
    _rule.guard(gelu_constants)
for _rule in (*LINEAR, *GATES):
    cast("Known", _rule).guard(operands_are_weights)
