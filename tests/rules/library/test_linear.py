"""Products with an activation, a residual sum or a gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.rules.library import GATES, LINEAR
from dovetail.rules.library.linear import (
    geglu,
    geglu_gate,
    geglu_packed,
    linear_gelu,
    linear_leaky_relu,
    linear_residual,
    swiglu,
    swiglu_gate,
    swiglu_packed,
)
from tests.rules.library.helpers import (
    assert_references,
    candidates,
    graph_of,
    match_attrs,
    match_attrs_each,
    refused_each,
    why,
)

W, N = 16, 24
X, R = torch.randn(2, 3, W), torch.randn(2, 3, N)
LAYER, BARE = (nn.Linear(W, N, bias=bias).requires_grad_(False) for bias in (True, False))
MATRIX, BIAS = torch.randn(W, N), torch.randn(N)
Step = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, tuple[Step, ...]] = {
    "relu": (F.relu, torch.relu, nn.ReLU(), lambda x: x.relu(), lambda x: F.relu(x, inplace=True)),
    "relu6": (F.relu6, lambda x: x.clamp(0, 6)),
    "squared_relu": (lambda x: F.relu(x).square(), lambda x: F.relu(x) ** 2),
    "silu": (F.silu, nn.SiLU(), lambda x: x * torch.sigmoid(x)),
    "tanh": (torch.tanh, nn.Tanh()),
    "sigmoid": (torch.sigmoid, lambda x: x.sigmoid()),
    "hardswish": (F.hardswish,),
    "softplus": (F.softplus,),
    "elu": (F.elu,),
    "mish": (F.mish,),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_and_an_activation(name: str) -> None:
    models = [nn.Sequential(nn.Linear(W, N), _Calls(step)) for step in ACTIVATIONS[name]]
    match = match_attrs_each(LINEAR[f"linear_{name}"], models, X)
    assert match == [{"activation": name, "weight_layout": "out_in", "slope": None}] * len(models)


class _Calls(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product as GPT-2 has it."""
    flat = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return flat.view((*x.size()[:-1], weight.shape[1]))


PRODUCTS: list[Step] = [
    LAYER,
    BARE,
    lambda x: conv1d(x, MATRIX, BIAS),
    lambda x: x @ MATRIX + BIAS,
    lambda x: torch.matmul(x, MATRIX),
]


@pytest.mark.parametrize("x", [X, X[0], torch.randn(2, 3, 4, W)], ids=lambda x: f"{x.dim()}-D")
def test_any_product(x: Tensor) -> None:
    def then_relu(product: Step) -> Step:
        return lambda x: torch.relu(product(x))

    match_attrs_each(LINEAR["linear_relu"], [then_relu(product) for product in PRODUCTS], x)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def test_linear_and_gelu() -> None:
    def after_a_product(step: Step) -> Step:
        return lambda x: step(x @ MATRIX + BIAS)

    steps: dict[Step, str] = {
        F.gelu: "gelu",
        erf_gelu: "gelu",
        nn.GELU(approximate="tanh"): "gelu_tanh",
        new_gelu: "gelu_tanh",
        quick_gelu: "gelu_quick",
    }
    matches = match_attrs_each(linear_gelu, [after_a_product(step) for step in steps], X)
    assert [attrs["activation"] for attrs in matches] == list(steps.values())


def test_linear_and_leaky_relu() -> None:
    match = match_attrs(linear_leaky_relu, lambda x: F.leaky_relu(x @ MATRIX, 0.2), X)
    assert match == {"activation": "leaky_relu", "weight_layout": "in_out", "slope": 0.2}


def test_another_activation_is_not_taken_for_this_one() -> None:
    assert not candidates(LINEAR["linear_relu"], graph_of(lambda x: F.silu(x @ MATRIX), (X,)))
    assert "the constant is 0.9, not 0.7978846" in why(
        linear_gelu, lambda x: 0.5 * (y := x @ MATRIX) * (1 + torch.tanh(0.9 * (y + 0.044715 * y**3))), X
    )


STREAMS: dict[str, tuple[Step, str]] = {
    "a product for each of a batch": (
        lambda x: F.relu(x @ torch.ones(2, W, N)),
        "3 dimensions: not a weight",
    ),
    "a product of the stream with itself": (lambda x: F.relu(x @ x.mT), "3 dimensions: not a weight"),
    "a stream that is added": (lambda x: F.relu(x @ MATRIX + R), "3 dimensions: not a bias"),
    "a matrix that is added": (
        lambda x: F.relu(torch.addmm(R.view(-1, N), x.view(-1, W), MATRIX)),
        "2 dimensions: not a bias",
    ),
}


def test_streams_are_neither_weights_nor_biases() -> None:
    refused = refused_each(LINEAR["linear_relu"], [spelled for spelled, _ in STREAMS.values()], X)
    for name, reasons in zip(STREAMS, refused, strict=True):
        assert STREAMS[name][1] in reasons, name
    assert "not a weight" in why(linear_residual, lambda x, r: x @ torch.ones(2, W, N) + r, X, R)
    assert "not a weight" in why(swiglu, lambda x: F.silu(x @ x.mT) * (x @ x.mT), X)


def test_linear_and_a_residual() -> None:
    spelled: list[Callable[..., Tensor]] = [
        lambda x, r: r + LAYER(x),
        lambda x, r: x @ MATRIX + r,
        lambda x, r: conv1d(x, MATRIX, BIAS) + r,
    ]
    assert match_attrs_each(linear_residual, spelled, X, R) == [
        {"dropout": 0.0, "weight_layout": layout} for layout in ("out_in", "in_out", "in_out")
    ]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_linear_dropout_and_a_residual(mode: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(W, N), nn.Dropout(0.25))

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return residual + self.inner(x)

    match = match_attrs(linear_residual, Block().train(mode == "train"), X, R)
    assert match == {"dropout": 0.25 if mode == "train" else 0.0, "weight_layout": "out_in"}


def test_what_is_added_to_every_row_is_a_bias() -> None:
    assert "broadcast over the rows: a bias, not a residual" in why(
        linear_residual, lambda x, b: BARE(x) + b, X, BIAS
    )


class Gated(nn.Module):
    """A gated MLP without its last product."""

    def __init__(self, step: Step, *, bias: bool = False, swapped: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(W, N, bias=bias), nn.Linear(W, N, bias=bias)
        self.step, self.swapped = step, swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.step(self.gate(x)), self.up(x)
        return up * gate if self.swapped else gate * up


def test_gates() -> None:
    def spelled(*steps: Step) -> list[Gated]:
        settings = [{"bias": b, "swapped": s} for b in (False, True) for s in (False, True)]
        return [Gated(step, **setting) for step in steps for setting in settings]

    matches = match_attrs_each(swiglu, spelled(F.silu, lambda x: x * x.sigmoid()), X)
    matches += match_attrs_each(geglu, spelled(F.gelu, nn.GELU("tanh"), new_gelu), X)
    assert all((attrs["projections"], attrs["gate_half"]) == ("two", None) for attrs in matches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_in_low_precision(dtype: torch.dtype) -> None:
    match_attrs(swiglu, Gated(F.silu).to(dtype), X.to(dtype))


def packed_chunks(x: Tensor) -> Tensor:
    gate, up = F.linear(x, MATRIX.mT).chunk(2, dim=-1)
    return F.silu(gate) * up


def packed_slices(x: Tensor) -> Tensor:
    both = x @ MATRIX
    return both[..., : N // 2] * F.silu(both[..., N // 2 :])


def packed_sizes(x: Tensor) -> Tensor:
    gate, up = F.linear(x, MATRIX.mT).split([N // 2, N // 2], dim=-1)
    return F.silu(gate) * up


def test_packed_gates() -> None:
    def of(half: str, layout: str) -> dict[str, str]:
        return {"projections": "packed", "gate_half": half, "weight_layout": layout}

    assert match_attrs(swiglu_packed, packed_sizes, X, leaving=["transpose"]) == of("first", "out_in")
    assert match_attrs(swiglu_packed, packed_chunks, X, leaving=["transpose"]) == of("first", "out_in")
    assert match_attrs(swiglu_packed, packed_slices, X) == of("second", "in_out")

    def diffusers(x: Tensor) -> Tensor:
        hidden, gate = (x @ MATRIX + BIAS).chunk(2, dim=-1)
        return hidden * F.gelu(gate)

    assert match_attrs(geglu_packed, diffusers, X) == {
        "projections": "packed",
        "gate_half": "second",
        "weight_layout": "in_out",
        "approximate": "none",
    }


def test_gates_of_values_from_elsewhere() -> None:
    assert match_attrs(swiglu_gate, lambda a, b: F.silu(a) * b, X, X)["projections"] == "none"
    assert match_attrs(geglu_gate, lambda a, b: b * F.gelu(a), X, X)["projections"] == "none"


def test_gates_of_two_inputs_share_no_product() -> None:
    def crossed(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(F.linear(x, MATRIX.mT)) * F.linear(y, MATRIX.mT)

    refused_each(swiglu, [crossed], X, X + 1)
    assert candidates(swiglu_gate, graph_of(crossed, (X, X + 1)))


def test_halves_cut_elsewhere_are_no_gate() -> None:
    def uneven(x: Tensor) -> Tensor:
        both = x @ MATRIX
        return F.silu(both[..., : N // 2]) * both[..., N // 2 - 1 : N - 1]

    assert "where the pattern has" in why(swiglu_packed, uneven, X)


def test_gates_and_products_are_distinguished_by_the_whole_set() -> None:
    graph = graph_of(nn.Sequential(Gated(F.silu), nn.Linear(N, W)), (X,))
    assert [c.rule for c in candidates(GATES, graph)] == ["swiglu", "swiglu_gate"]


def test_a_bias_has_a_number_for_each_column() -> None:
    assert "has 1 numbers for 24 columns" in why(
        LINEAR["linear_relu"], lambda x: F.relu(x @ MATRIX + torch.ones(1)), X
    )
    assert "has 24 numbers for 1 columns" in why(
        LINEAR["linear_relu"], lambda x: F.relu(x @ torch.ones(W, 1) + BIAS), X
    )
    match_attrs(LINEAR["linear_relu"], lambda x: F.relu(x @ MATRIX + BIAS), X)
    low = X.bfloat16()
    match_attrs(
        LINEAR["linear_relu"], lambda x: F.relu(x @ MATRIX.bfloat16() + BIAS), low, leaving=["_to_copy"]
    )


def test_one_weight_read_both_ways() -> None:
    square = torch.randn(W, W)
    assert "its weights have different layouts" in why(
        swiglu, lambda x, w: F.silu(F.linear(x, w)) * (x @ w), X, square
    )
    # A value that is both factor and weight is read as a weight once.
    assert (
        match_attrs(LINEAR["linear_relu"], lambda x: F.relu(F.linear(x, x)), square)["weight_layout"]
        == "out_in"
    )
    assert match_attrs(LINEAR["linear_relu"], lambda x: F.relu(x @ x), square)["weight_layout"] == "in_out"


class Functions(nn.Module):
    """Functions and methods, as FX traces them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = F.linear(x, self.weight).chunk(2, dim=-1)
        return F.linear(x, self.weight).relu(), x.matmul(self.weight).relu(), first * F.silu(second)


def test_graphs_of_functions_and_methods() -> None:
    graph = dovetail.capture(torch.fx.symbolic_trace(Functions()), (X,))
    layouts = [(c.attrs or {})["weight_layout"] for c in candidates(LINEAR["linear_relu"], graph)]
    assert sorted(layouts) == ["in_out", "out_in"]
    (packed,) = candidates(swiglu_packed, graph)
    assert (packed.attrs or {})["gate_half"] == "second"
    fused = dovetail.fuse(graph, LINEAR + GATES)
    assert assert_references(fused) == 3
    assert torch.allclose(fused(X)[2], graph(X)[2])


def test_a_near_miss_lists_every_matched_operation() -> None:
    # Traced, `out=` makes the addition several operations, of which the pattern covers one.
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch._C._nn.linear, (x, x))
    other = graph.call_function(torch.nn.functional.dropout, (product, 0.5, True))
    graph.output(graph.call_function(torch.add, (product, product), {"out": other}))
    for _ in range(5):
        gm = dovetail.capture(torch.fx.GraphModule({}, graph), (torch.randn(2, 3),))
        declined = dovetail.explain(dovetail.fuse(gm)).declined
        assert [r.nodes for r in declined if r.rule == "linear_residual"] == [("linear", "add")]
