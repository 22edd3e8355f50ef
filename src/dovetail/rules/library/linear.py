"""Linear layers with the operations that follow them: an activation, a residual sum, a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, op_name
from dovetail.rules.library.library_rule import (
    GELU_NAMES,
    SIMPLE_ACTIVATIONS,
    Activation,
    LibraryRule,
    activate,
    combine_halves,
    gelu_approximation,
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
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Decline, RuleContext, RuleSet

_PRODUCT = "linear|addmm|mm|matmul|bmm"
_X, _WEIGHT, _BIAS = meta_tensor(2, 8, 16), meta_tensor(16, 16), meta_tensor(16)
_ONE, _TWO = (_X, _WEIGHT, _BIAS), (_X, _WEIGHT, _WEIGHT, _BIAS, _BIAS)
_BIASES = {"weight": "bias", "gate_weight": "gate_bias", "up_weight": "up_bias", "packed": "bias"}

# With one dimension before the last there is nothing to flatten.
_MATRIX = (_X[0], _WEIGHT, _BIAS)


def linear_pattern(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer with or without bias: `linear`, or a product with the weight as [in, out]."""

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


# The argument by which an operator reads a weight, and in which layout.
_WEIGHT_READS = {
    "linear": ("weight", "out_in"),
    **dict.fromkeys(("t", "transpose", "permute"), ("self", "out_in")),
    "matmul": ("other", "in_out"),
    **dict.fromkeys(("mm", "addmm", "bmm"), ("mat2", "in_out")),
}
Weight = Annotated[Tensor, "[out, in], or [in, out] with weight_layout 'in_out'"]
Bias = Annotated[Tensor | None, "[out]"]
Rows = Annotated[Tensor, "[..., in]"]


def project(x: Tensor, weight: Tensor, bias: Tensor | None, weight_layout: str | None) -> Tensor:
    """x @ weight.T + bias with weight_layout "out_in", x @ weight + bias with "in_out"."""
    result = F.linear(x, weight if weight_layout == "out_in" else weight.t())
    return result if bias is None else result + bias


@kind("linear_activation", version=2)
def linear_activation_kind(
    x: Rows,
    weight: Weight,
    bias: Bias = None,
    *,
    activation: str,
    weight_layout: str = "out_in",
    slope: float | None = None,
) -> Tensor:
    """A linear layer and an activation; `slope` is that of a leaky ReLU."""
    return activate(project(x, weight, bias, weight_layout), activation, slope)


@kind("linear_residual", version=2, draws="one dropout mask of the shape of the product")
def linear_residual_kind(
    x: Rows,
    weight: Weight,
    bias: Bias = None,
    residual: Annotated[Tensor | None, "[..., out]"] = None,
    *,
    dropout: float = 0.0,
    weight_layout: str = "out_in",
) -> Tensor:
    """A linear layer, dropout, and a residual sum."""
    return F.dropout(project(x, weight, bias, weight_layout), dropout) + cast("Tensor", residual)


GateWeight = Annotated[Tensor | None, "[out, in], or [in, out] with weight_layout 'in_out'"]
PackedWeight = Annotated[Tensor | None, "[2 * out, in], or [in, 2 * out] with weight_layout 'in_out'"]
PackedBias = Annotated[Tensor | None, "[2 * out]"]
GateOperand = Annotated[Tensor | None, "[..., out]; one of gate and up has the sizes of the result"]


def gate_and_up(
    x: Annotated[Tensor | None, "[..., in]"] = None,
    gate_weight: GateWeight = None,
    up_weight: GateWeight = None,
    gate_bias: Bias = None,
    up_bias: Bias = None,
    packed: PackedWeight = None,
    bias: PackedBias = None,
    gate: GateOperand = None,
    up: GateOperand = None,
    *,
    projections: str,
    gate_half: str | None = None,
    weight_layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the factors of a gated unit, projected from x unless `projections` is "none"."""
    if projections == "two":
        gate = project(cast("Tensor", x), cast("Tensor", gate_weight), gate_bias, weight_layout)
        up = project(cast("Tensor", x), cast("Tensor", up_weight), up_bias, weight_layout)
    elif projections == "packed":
        halves = project(cast("Tensor", x), cast("Tensor", packed), bias, weight_layout).chunk(2, dim=-1)
        gate, up = halves if gate_half == "first" else halves[::-1]
    return cast("Tensor", gate), cast("Tensor", up)


@kind("swiglu", version=2)
@inherit_parameters(gate_and_up)
def swiglu_kind(*operands: Tensor | None, **attrs: Any) -> Tensor:
    """silu(gate) * up.

    With projections "none" gate and up are operands, with "two" each is a projection of x, with "packed" one projection
    of x holds both, the gate being its `gate_half`, "first" or "second".
    """
    gate, up = gate_and_up(*operands, **attrs)
    return F.silu(gate) * up


@kind("geglu", version=2)
@inherit_parameters(gate_and_up)
def geglu_kind(*operands: Tensor | None, approximate: str = "none", **attrs: Any) -> Tensor:
    """gelu(gate) * up, with gate and up as in `swiglu`; `approximate` is "none", "tanh" or "sigmoid"."""
    gate, up = gate_and_up(*operands, **attrs)
    return activate(gate, GELU_NAMES[approximate]) * up


def _layouts(match: Match, name: str) -> set[str]:
    """Return the layouts in which operations of the match read a weight."""
    weight = match[name].aten
    reads = [
        (node, *_WEIGHT_READS[op_name(node.target)])
        for node in match.aten
        if op_name(node.target) in _WEIGHT_READS
    ]
    return {layout for node, argument, layout in reads if named_arguments(node).get(argument) is weight}


def weight_layout(match: Match, name: str = "weight") -> str:
    # A product that reads the weight through an expansion reads it as [in, out].
    return "out_in" if "out_in" in _layouts(match, name) else "in_out"


def operands_have_weight_shapes(match: Match) -> Decline | None:
    """Refuse a product of two activations, and a bias that is not one number for each column."""
    for name, bias_name in _BIASES.items():
        weight, bias = match.operands.get(name), match.operands.get(bias_name)
        if weight is None:
            continue
        if weight.ndim != 2:
            return Decline(f"'{weight.name}' has {weight.ndim} dimensions: not a weight", at=weight)
        if bias is None:
            continue
        if bias.ndim != 1:
            return Decline(f"'{bias.name}' has {bias.ndim} dimensions: not a bias", at=bias)
        columns = weight.shape[0 if weight_layout(match, name) == "out_in" else 1]
        if not same_sizes([columns], bias.shape):
            return Decline(f"'{bias.name}' has {bias.shape[0]} numbers for {columns} columns", at=bias)
    return None


def one_weight_layout(match: Match) -> Decline | None:
    """Refuse weights of which one is read as [out, in] and the other, or the same one elsewhere, as [in, out]."""
    names = [name for name in _BIASES if match.operands.get(name) is not None]
    if len({layout for name in names for layout in _layouts(match, name)}) > 1:
        return Decline("its weights have different layouts")
    return None


def residual_has_result_shape(match: Match) -> Decline | None:
    residual = match["residual"]
    if residual.ndim != match.outputs[0].meta["val"].dim() or residual.ndim < 2:
        return Decline(f"'{residual.name}' is broadcast over the rows: a bias, not a residual", at=residual)
    if all(_inputs_of_result_shape(match)):
        return None
    return Decline(f"'{residual.name}' does not have the shape of the product", at=residual)


def _inputs_of_result_shape(match: Match) -> list[bool]:
    """Return for each input of the last operation whether it has the shape of the result."""
    last = list(match.aten)[-1]
    return [not shapes_differ(n.meta["val"].shape, last.meta["val"].shape) for n in last.all_input_nodes]


def gate_has_shape_of_up(match: Match) -> Decline | None:
    """Refuse projections of different widths, and a gate and a value that both broadcast."""
    have_result_shape = _inputs_of_result_shape(match)
    if all(have_result_shape) or ("gate" in match and any(have_result_shape)):
        return None
    return Decline("its gate and the value it multiplies differ in shape", at=match.outputs[0])


_WEIGHT_GUARDS = (is_floating_point, operands_have_weight_shapes, one_weight_layout)
_activation_rule = partial(
    library_rule, linear_activation_kind, examples=[_ONE, _MATRIX], guards=_WEIGHT_GUARDS
)
_ACTIVATIONS: dict[str, tuple[str, Activation]] = {
    **SIMPLE_ACTIVATIONS,
    "squared_relu": ("relu", lambda x: square(torch.relu(x))),
    "softplus": ("softplus", F.softplus),
}


def _linear_activation_rule(activation: str) -> LibraryRule:
    needs, activate_pattern = _ACTIVATIONS[activation]

    @_activation_rule(
        name=f"linear_{activation}",
        needs=f"{_PRODUCT} {needs}",
        attrs_of=lambda m: {"activation": activation, "weight_layout": weight_layout(m)},
    )
    def linear_activation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return activate_pattern(linear_pattern(x, weight, bias))

    return linear_activation


@_activation_rule(
    needs=f"{_PRODUCT} gelu|erf|tanh|sigmoid",
    attrs_of=lambda m: {"activation": GELU_NAMES[gelu_approximation(m)], "weight_layout": weight_layout(m)},
    guards=(is_gelu, *_WEIGHT_GUARDS),
)
@with_gelu
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, gelu: Activation) -> Tensor:
    """A linear layer and a GELU."""
    return gelu(linear_pattern(x, weight, bias))


@_activation_rule(
    needs=f"{_PRODUCT} leaky_relu",
    attrs_of=lambda m: {"activation": "leaky_relu", "slope": m["slope"], "weight_layout": weight_layout(m)},
)
def linear_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, slope: Any = Const(0.0101)) -> Tensor:
    """A linear layer and a leaky ReLU."""
    return F.leaky_relu(linear_pattern(x, weight, bias), slope)


@library_rule(
    linear_residual_kind,
    needs=f"{_PRODUCT} add",
    attrs_of=lambda m: {"dropout": m.literals.get("dropout", 0.0), "weight_layout": weight_layout(m)},
    examples=[(*_ONE, _X), (*_MATRIX, _X[0])],
    guards=(residual_has_result_shape, *_WEIGHT_GUARDS),
)
def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, dropout: Any = Const(0.1202)
) -> Tensor:
    """A linear layer, perhaps dropout, and a residual sum."""
    return optional(linear_pattern(x, weight, bias), lambda y: F.dropout(y, dropout)) + residual


def _projections(match: Match) -> dict[str, Any]:
    if "x" not in match.operands:
        return {"projections": "none"}
    if "packed" in match.operands:
        layout = weight_layout(match, "packed")
        return {"projections": "packed", "gate_half": _gate_half(match), "weight_layout": layout}
    return {"projections": "two", "weight_layout": weight_layout(match, "gate_weight")}


def _gate_half(match: Match) -> str:
    """Return the half of a packed product that goes through the activation: not the one that the last product reads."""
    read = list(match.aten)[-1].all_input_nodes
    up = next(n for n in read if is_projection(n) or op_name(n.target) == "slice")
    is_first = up.args[1] == 0 if is_projection(up) else named_arguments(up).get("start") in (0, None)
    return "second" if is_first else "first"


def _is_gated(context: RuleContext, whole: str, part: frozenset[str]) -> bool:
    """Return whether the result of an activation, an operator `whole` or steps with a `part`, is multiplied by a value."""

    def multiplied(node: Node) -> list[Node]:
        products = [user for user in node.users if op_name(user.target) == "mul"]
        return [user for user in products if sum(isinstance(a, Node) for a in user.args) == 2]

    for node in context.analysis(normalized_graph_of).nodes:
        name = op_name(node.target)
        if name == whole and multiplied(node):
            return True
        if name in part:
            reached = [node, *(user for user in node.users if op_name(user.target) in ("add", "mul"))]
            for _ in range(3):
                reached = [user for each in reached for user in multiplied(each)]
                # A GELU by hand may be halved last.
                reached += [u for each in reached for u in each.users if op_name(u.target) == "div"]
                if reached and any(multiplied(each) for each in reached):
                    return True
    return False


def _gated_halves(x: Tensor, activation: Activation) -> Tensor:
    """One half of the last dimension through an activation, times the other half."""
    return combine_halves(x, lambda a, b: either(lambda: activation(a) * b, lambda: a * activation(b)))


_SPLIT = "split|split_with_sizes|slice|chunk"
_SILU, _GELU = "silu|sigmoid mul", "gelu|erf|tanh|sigmoid mul"
_swiglu_rule = partial(
    library_rule,
    swiglu_kind,
    when=partial(_is_gated, whole="silu", part=frozenset({"sigmoid"})),
    attrs_of=_projections,
    guards=(gate_has_shape_of_up, *_WEIGHT_GUARDS),
)
_geglu_rule = partial(
    library_rule,
    geglu_kind,
    when=partial(_is_gated, whole="gelu", part=frozenset({"erf", "tanh", "sigmoid"})),
    attrs_of=lambda m: {**_projections(m), "approximate": gelu_approximation(m)},
    guards=(is_gelu, gate_has_shape_of_up, *_WEIGHT_GUARDS),
)


@_swiglu_rule(needs=f"{_PRODUCT} {_SILU}", examples=[_TWO])
def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor, up_bias: Tensor) -> Tensor:
    """silu(gate(x)) * up(x)."""
    return silu(linear_pattern(x, gate_weight, gate_bias)) * linear_pattern(x, up_weight, up_bias)


@_swiglu_rule(needs=f"{_PRODUCT} {_SPLIT} {_SILU}", examples=[_ONE, _MATRIX])
def swiglu_packed(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """The same from one product that holds gate and up."""
    return _gated_halves(linear_pattern(x, packed, bias), silu)


@_swiglu_rule(needs=_SILU, examples=[(_X, _X)])
def swiglu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, wherever the two come from."""
    return silu(gate) * up


@_geglu_rule(needs=f"{_PRODUCT} {_GELU}", examples=[_TWO])
@with_gelu
def geglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor, up_bias: Tensor, gelu: Activation
) -> Tensor:
    """gelu(gate(x)) * up(x)."""
    return gelu(linear_pattern(x, gate_weight, gate_bias)) * linear_pattern(x, up_weight, up_bias)


@_geglu_rule(needs=f"{_PRODUCT} {_SPLIT} {_GELU}", examples=[_ONE, _MATRIX])
@with_gelu
def geglu_packed(x: Tensor, packed: Tensor, bias: Tensor, gelu: Activation) -> Tensor:
    """The same from one product that holds gate and up."""
    return _gated_halves(linear_pattern(x, packed, bias), gelu)


@_geglu_rule(needs=_GELU, examples=[(_X, _X)])
@with_gelu
def geglu_gate(gate: Tensor, up: Tensor, gelu: Activation) -> Tensor:
    """gelu(gate) * up, wherever the two come from."""
    return gelu(gate) * up


LINEAR = RuleSet(
    *(_linear_activation_rule(activation) for activation in _ACTIVATIONS),
    linear_gelu,
    linear_leaky_relu,
    linear_residual,
)
GATES = RuleSet(swiglu, swiglu_packed, swiglu_gate, geglu, geglu_packed, geglu_gate)
