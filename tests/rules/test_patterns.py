"""Patterns: what is found, however it was spelled, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.pattern_rule import rule
from tests.rules.helpers import declined, matches, outlined, proposals


@rule(kind="conv_relu_one")
def conv_relu_one(x, weight, bias):
    return F.relu(F.conv2d(x, weight, bias)) + 1


class Modules(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.relu(self.conv(x)) + 1


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.conv2d(x, self.weight, self.bias).relu().add(1)


class Functions(Methods):
    def forward(self, x):
        return torch.add(1, torch.relu(F.conv2d(input=x, weight=self.weight, bias=self.bias)))


class Deeper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


IMAGE = torch.randn(2, 3, 8, 8)
SPELLINGS = [Modules(), Modules(inplace=True), Methods(), Functions(), Deeper(Deeper(Modules()))]


@pytest.mark.parametrize("model", SPELLINGS, ids=lambda m: type(m).__name__)
def test_whatever_the_spelling_one_match_of_three_operations(model: nn.Module) -> None:
    gm = dovetail.capture(model, (IMAGE,))
    (members,) = matches(conv_relu_one, gm)
    assert len(members) == 3
    new = outlined(conv_relu_one, gm, IMAGE)
    assert [r.kind for r in dovetail.regions(new)] == ["conv_relu_one"]


@pytest.mark.parametrize("model", [SPELLINGS[i] for i in (0, 1, 2, 4)], ids=lambda m: type(m).__name__)
def test_a_graph_that_was_never_captured_has_it_too(model: nn.Module) -> None:
    gm = dovetail.capture(symbolic_trace(model), (IMAGE,))
    (members,) = matches(conv_relu_one, gm)
    assert len(members) == 3
    outlined(conv_relu_one, gm, IMAGE)


def test_a_graph_without_values_names_what_is_missing() -> None:
    (reason,) = declined(conv_relu_one, symbolic_trace(Modules()))
    assert "capture(gm, args)" in reason


@pytest.mark.parametrize("inplace", [False, True])
def test_in_the_dialect_of_autograd_too(inplace: bool) -> None:
    gm = make_fx(Modules(inplace))(IMAGE)
    (members,) = matches(conv_relu_one, gm)
    assert members[0] == "convolution"
    outlined(conv_relu_one, gm, IMAGE)


def test_a_write_to_an_operand_is_more_than_the_pattern() -> None:
    @rule(kind="relu_one")
    def relu_one(x):
        return F.relu(x) + 1

    def writes(x):
        return torch.relu_(x) + 1

    gm = dovetail.capture(symbolic_trace(writes), (torch.randn(3),))
    assert any("writes to memory outside" in reason for reason in declined(relu_one, gm))


def test_a_leaf_module_of_the_users_own_is_not_looked_into() -> None:
    @rule(kind="tanh_linear")
    def tanh_linear(x, weight, bias):
        return torch.tanh(F.linear(x, weight, bias))

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.linear(x)) * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x):
            return self.leaf(x) + 1

    class KeepsLeaf(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Leaf)

    outer = Outer()
    graph = KeepsLeaf().trace(outer)
    gm = dovetail.capture(GraphModule(outer, graph), (torch.randn(2, 4),))
    assert matches(tanh_linear, gm) == []


def test_what_may_have_host_effects_is_never_run_to_be_matched() -> None:
    calls: list[str] = []

    def noisy(x):
        calls.append("ran")
        return x * 2

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    middle = graph.call_function(noisy, (first,))
    graph.output(graph.call_function(torch.relu, (graph.call_function(torch.add, (middle, 1)),)))
    gm = dovetail.capture(GraphModule(nn.Module(), graph), (torch.randn(3),))
    calls.clear()

    @rule(kind="add_relu")
    def add_relu(x):
        return torch.relu(x + 1)

    assert matches(add_relu, gm) == [["add", "relu_1"]]
    assert calls == []


@rule(kind="twice")
def softmax_twice(x):
    return torch.softmax(x, 1) * 2


@rule(kind="times")
def softmax_times(x, factor=Const()):
    return torch.softmax(x, 1) * factor


@rule(kind="along")
def softmax_along(x, dim=Const()):
    return torch.softmax(x, dim) * 2


SQUARE = torch.randn(4, 4)


def square(function: Any) -> GraphModule:
    return dovetail.capture(function, (SQUARE,))


def test_literals_count() -> None:
    assert matches(softmax_twice, square(lambda x: x.softmax(-1) * 2)) == [["softmax", "mul"]]
    (reason,) = declined(softmax_twice, square(lambda x: x.softmax(0) * 2))
    assert reason == "its dim is 0 where the pattern has 1"
    (reason,) = declined(softmax_twice, square(lambda x: x.softmax(1) * 5))
    assert reason == "its other is 5 where the pattern has 2"


def test_a_captured_literal_is_in_the_attributes() -> None:
    (candidate,), _, _ = proposals(softmax_times, square(lambda x: 5 * x.softmax(1)))
    assert candidate.attrs == {"factor": 5}
    (candidate,), _, _ = proposals(softmax_along, square(lambda x: x.softmax(0) * 2))
    assert candidate.attrs == {"dim": 0}
    (reason,) = declined(softmax_times, square(lambda x: x.softmax(0) * 5))
    assert "dim is 0" in reason


def test_a_captured_literal_is_one_value_everywhere() -> None:
    @rule(kind="both")
    def both(x, k=Const()):
        return (x + k) * k

    (candidate,), _, _ = proposals(both, square(lambda x: (x + 3.0) * 3.0))
    assert candidate.attrs == {"k": 3.0}
    assert declined(both, square(lambda x: (x + 3.0) * 4.0))


def test_operand_order_is_free_where_it_commutes() -> None:
    @rule(kind="shared")
    def shared(x, y, z):
        return (x + y) * (y - z)

    inputs = tuple(torch.randn(3) for _ in range(3))
    for function in (
        lambda x, y, z: (x + y) * (y - z),
        lambda x, y, z: (y - z) * (x + y),
        lambda x, y, z: (y - z) * (y + x),
    ):
        gm = dovetail.capture(function, inputs)
        (members,) = matches(shared, gm)
        assert len(members) == 3
        outlined(shared, gm, *inputs)
    assert declined(shared, dovetail.capture(lambda x, y, z: (x + y) * (z - y), inputs))


def test_an_operand_used_twice_is_one_value() -> None:
    @rule(kind="squared")
    def squared(x):
        return torch.exp(x) * x

    assert matches(squared, square(lambda x: x * x.exp())) == [["exp", "mul"]]
    inputs = (torch.randn(3), torch.randn(3))
    (reason,) = declined(squared, dovetail.capture(lambda x, y: x.exp() * y, inputs))
    assert reason == "the pattern's operand 'x' is 'y' elsewhere" or "'x' elsewhere" in reason


def test_an_operand_may_not_be_computed_inside_the_match() -> None:
    @rule(kind="relu_plus")
    def relu_plus(x, y):
        return F.relu(x) + y

    def doubled(x):
        r = F.relu(x)
        return r + r

    (reason,) = declined(relu_plus, square(doubled))
    assert "computed inside the match" in reason


def test_many_results() -> None:
    @rule(kind="qkv")
    def qkv(x, a, b, c):
        return x @ a, x @ b, x @ c

    inputs = tuple(torch.randn(4, 4) for _ in range(4))
    gm = dovetail.capture(lambda x, a, b, c: (x @ a + x @ b, x @ c), inputs)
    assert matches(qkv, gm) == [["matmul", "matmul_1", "matmul_2"]]
    outlined(qkv, gm, *inputs)
    assert matches(qkv, dovetail.capture(lambda x, a, b, c: (x @ a + x @ b, c), inputs)) == []


def test_constants_in_the_pattern_are_compared() -> None:
    @rule(kind="table")
    def table(x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    assert len(matches(table, square(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0])))) == 1
    assert declined(table, square(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 5.0]))) == []


def test_alternatives() -> None:
    @rule(kind="norm")
    def norm(x, eps=Const()):
        squared = either(lambda: x * x, lambda: x.pow(2), lambda: torch.square(x))
        return x * torch.rsqrt(squared.mean(-1, keepdim=True) + eps)

    for spelled in (lambda x: x * x, lambda x: x**2, torch.square):
        gm = square(lambda x, s=spelled: x * (s(x).mean(-1, keepdim=True) + 1e-6).rsqrt())
        (candidate,), _, _ = proposals(norm, gm)
        assert candidate.attrs == {"eps": 1e-6}
        assert len(candidate.members) == 5
    assert declined(norm, square(lambda x: x * ((x**3).mean(-1, keepdim=True) + 1e-6).rsqrt()))


def test_optional_parts_and_operands() -> None:
    @rule(kind="dense")
    def dense(x, weight, bias=None):
        return optional(F.relu(F.linear(x, weight, bias)), lambda y: y * 2)

    inputs = (torch.randn(2, 4), torch.randn(4, 4), torch.randn(4))
    longest = {}
    for name, function in {
        "plain": lambda x, w, b: F.relu(F.linear(x, w)),
        "bias": lambda x, w, b: F.relu(F.linear(x, w, b)),
        "doubled": lambda x, w, b: F.relu(F.linear(x, w)) * 2,
        "all": lambda x, w, b: F.relu(F.linear(x, w, b)) * 2,
    }.items():
        longest[name] = max(len(m) for m in matches(dense, dovetail.capture(function, inputs)))
    assert longest == {"plain": 2, "bias": 2, "doubled": 3, "all": 3}


def test_one_pattern_serves_every_rank() -> None:
    @rule(kind="swiglu")
    def swiglu(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    weights = (torch.randn(6, 4), torch.randn(6, 4))
    for shape in ((4,), (2, 4), (2, 3, 4), (2, 3, 5, 4)):
        gm = dovetail.capture(
            lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), (torch.randn(shape), *weights)
        )
        assert matches(swiglu, gm) == [["linear", "silu", "linear_1", "mul"]]
        traced = make_fx(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u))(
            torch.randn(shape), *weights
        )
        if len(shape) > 1:
            assert len(matches(swiglu, traced)) == 1


def test_sizes_that_are_symbols() -> None:
    @rule(kind="flat")
    def flat(x, weight):
        return F.linear(x, weight).reshape(x.shape[0], -1).relu()

    def model(x, weight):
        y = F.linear(x, weight)
        return y.reshape(y.shape[0], -1).relu()

    inputs = (torch.randn(5, 3, 4), torch.randn(6, 4))
    gm = dovetail.capture(model, inputs, dynamic_shapes=({0: torch.export.Dim("batch")}, None))
    new = outlined(flat, gm, *inputs)
    assert len(dovetail.regions(new)) == 1
    other = (torch.randn(7, 3, 4), inputs[1])
    assert torch.equal(new(*other), model(*other))

    def wrong(x, weight):
        y = F.linear(x, weight)
        return y.reshape(y.shape[0] * 3, -1).relu()

    gm = dovetail.capture(wrong, inputs, dynamic_shapes=({0: torch.export.Dim("batch")}, None))
    assert declined(flat, gm)


def test_precision_changes_the_form() -> None:
    @rule(kind="rms_norm")
    def rms_norm(x, weight, eps=Const()):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        return weight * y.to(x.dtype)

    def model(x, weight):
        y = x.to(torch.float32)
        return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def careless(x, weight):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    for dtype, size in ((torch.float32, 6), (torch.bfloat16, 8), (torch.float16, 8)):
        inputs = (torch.randn(2, 4).to(dtype), torch.randn(4).to(dtype))
        (members,) = matches(rms_norm, dovetail.capture(model, inputs))
        assert len(members) == size
        assert bool(matches(rms_norm, dovetail.capture(careless, inputs))) == (dtype == torch.float32)


def test_the_same_form_with_a_permute_of_the_wrong_axes_is_refused() -> None:
    @rule(kind="scores")
    def scores(q, k):
        return torch.softmax(q @ k.transpose(-2, -1), -1)

    inputs = (torch.randn(2, 4, 4), torch.randn(2, 4, 4))
    assert (
        len(matches(scores, dovetail.capture(lambda q, k: (q @ k.transpose(1, 2)).softmax(-1), inputs))) == 1
    )
    inputs = (torch.randn(4, 4, 4), torch.randn(4, 4, 4))
    reasons = declined(scores, dovetail.capture(lambda q, k: (q @ k.transpose(0, 1)).softmax(-1), inputs))
    assert any("dim" in reason for reason in reasons)


def test_patterns_are_taken_apart_as_captured_graphs_are() -> None:
    from torch._export.utils import _collect_all_valid_cia_ops

    from dovetail.rules.patterns.trace import capture_decompositions

    kept = _collect_all_valid_cia_ops()
    assert not kept & capture_decompositions().keys()
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for base in ("to", "reshape", "dropout", "flatten", "chunk", "batch_norm", "linear", "native_batch_norm"):
        packet = getattr(torch.ops.aten, base)
        for name in packet.overloads():
            if not torch._C._dispatch_has_kernel(f"aten::{base}.{name}".removesuffix(".default")):
                continue
            op = getattr(packet, name)
            if op.has_kernel_for_dispatch_key(composite):
                assert (op in capture_decompositions()) == (op not in kept), op
