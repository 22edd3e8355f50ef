"""Everything that can be captured: functions, methods, exported programs and FX graphs of any origin."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.errors import CaptureError
from dovetail.frontend.capture import capture
from dovetail.ir.graph_module import Program
from dovetail.ir.process_state import suppress_torch_warnings

X = torch.randn(3, 4)
LAYER = nn.Linear(4, 4)
SCALE = nn.Parameter(torch.randn(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def encode(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.linear(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.drop(self.norm(self.encode(x)))


def of_globals(x: Tensor) -> Tensor:
    return LAYER(x) * SCALE


class Callable:
    def __init__(self) -> None:
        self.model = Model().eval()

    def __call__(self, x: Tensor) -> Tensor:
        return self.model.encode(x)


def functions() -> dict[str, tuple[Any, set[str]]]:
    inner = nn.Linear(4, 4)
    weight = nn.Parameter(torch.randn(4, 4))
    model = Model()
    layers = [nn.Linear(4, 4)]
    linear = {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
    return {
        "closure": (lambda x: inner(x) @ weight, {"weight", "inner.weight", "inner.bias"}),
        "globals": (of_globals, {"SCALE", "LAYER.weight", "LAYER.bias"}),
        "list": (lambda x: layers[0](x), {"layers_0.weight", "layers_0.bias"}),
        "method": (model.encode, linear),
        "partial": (functools.partial(model.encode, scale=3.0), {f"owner.{name}" for name in linear}),
        "object": (Callable(), {f"model.{name}" for name in linear}),
        "builtin": (torch.relu, set()),
    }


@pytest.mark.parametrize("name", functions())
def test_functions_keep_the_parameters_they_reach(name: str) -> None:
    function, names = functions()[name]
    graph = capture(function, (X,))
    assert {n for n, _ in graph.named_parameters()} == names
    assert torch.equal(graph(X), function(X))
    if names:
        graph(X).sum().backward()
        assert any(p.grad is not None for p in graph.parameters())
    again = functions()[name][0]
    assert "val" in next(iter(capture(again, (X,)).graph.nodes)).meta


def test_parameters_of_a_closure_are_the_very_ones() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    graph = capture(lambda x: LAYER(x) @ weight, (X,))
    assert graph.weight is weight
    assert graph.LAYER.weight is LAYER.weight


def test_functions_take_dynamic_sizes_by_name() -> None:
    def double(x: Tensor, by: int = 2) -> Tensor:
        return x * by

    graph = capture(double, (X,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    assert torch.equal(graph(torch.ones(7, 4)), torch.full((7, 4), 2.0))


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_program(decomposed: bool) -> None:
    model = Model()
    original = copy.deepcopy(model)
    with suppress_torch_warnings():
        program = torch.export.export(model, (X,))
        program = program.run_decompositions({}) if decomposed else program
    before = str(program.graph)
    graph = capture(program)
    assert str(program.graph) == before
    assert graph.linear.weight is model.linear.weight
    assert list(graph.state_dict()) == list(model.state_dict())
    for seed in range(2):
        torch.manual_seed(seed)
        mine = graph(x=X)
        torch.manual_seed(seed)
        assert torch.equal(mine, original(X))
    assert graph.seen == original.seen


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(Model())


def from_make_fx() -> torch.fx.GraphModule:
    return make_fx(lambda x: torch.softmax(x @ x.T, -1).clone().add_(1))(X)


def from_dynamo() -> torch.fx.GraphModule:
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    torch.compile(lambda x: x.sin() + 1, backend=backend)(X)
    return seen[0]


@pytest.mark.parametrize("make", [traced, from_make_fx, from_dynamo], ids=lambda f: f.__name__)
def test_a_graph_is_kept_and_given_values(make: Any) -> None:
    original = make()
    source, metas = str(original.graph), [dict(n.meta) for n in original.graph.nodes]
    state = copy.deepcopy(original.state_dict())
    random_state = torch.get_rng_state()
    graph = capture(original, (X,))
    assert isinstance(graph, Program)
    assert str(graph.graph) == source == str(original.graph)
    assert [dict(n.meta) for n in original.graph.nodes] == metas
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), original.state_dict().values(), strict=True))
    assert all(a is b for a, b in zip(original.parameters(), graph.parameters(), strict=True))
    for node in graph.graph.nodes:
        value = node.meta["val"]
        assert value is None if node.op == "output" else isinstance(value, FakeTensor)
    torch.manual_seed(0)
    mine = graph(X)
    torch.manual_seed(0)
    assert torch.equal(
        mine[0] if isinstance(mine, tuple) else mine, _first(make()(X)) if make is not traced else mine
    )


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def test_values_reach_graphs_inside_a_graph() -> None:
    inner = torch.fx.symbolic_trace(lambda y: y.relu() + 1)
    outer = torch.fx.Graph()
    x = outer.placeholder("x")
    outer.output(outer.call_module("inner", (outer.call_function(torch.neg, (x,)),)))
    module = torch.fx.GraphModule({"inner": inner}, outer)
    graph = capture(module, (X,))
    values = [n.meta["val"] for n in graph.inner.graph.nodes]
    assert [tuple(v.shape) for v in values if v is not None] == [(3, 4)] * 3
    assert all("val" not in n.meta for n in inner.graph.nodes)


def test_without_example_inputs_a_graph_is_kept_as_it_is() -> None:
    graph = capture(traced())
    assert all("val" not in n.meta for n in graph.graph.nodes)
    again = capture(capture(traced(), (X,)))
    assert all("val" in n.meta for n in again.graph.nodes)


def test_keyword_examples_for_a_graph() -> None:
    module = torch.fx.symbolic_trace(lambda a, b: a + b)
    graph = capture(module, (X,), {"b": X})
    assert all("val" in n.meta for n in graph.graph.nodes)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X, X), "takes 1 inputs \\(x\\) and got 2"),
        ((X[:, :2],), "'linear'"),
        ((X.to(torch.int64),), "'linear'"),
    ],
)
def test_wrong_example_inputs_name_the_node(args: tuple[Any, ...], words: str, capfd: Any) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(traced(), args)
    assert capfd.readouterr() == ("", "")


def test_wrong_example_inputs_name_the_users_line() -> None:
    module = traced()
    linear = next(n for n in module.graph.nodes if n.name == "linear")
    linear.meta["stack_trace"] = f'  File "{__file__}", line 3, in forward\n    y = linear(x)\n'
    with pytest.raises(CaptureError, match=r"test_capture_kinds\.py:3 in forward"):
        capture(module, (X[:, :2],))


def test_a_captured_graph_can_be_captured_again() -> None:
    model = Model().eval()
    graph = capture(model, (X,))
    again = capture(graph, (X,))
    assert str(again.graph) == str(graph.graph)
    assert torch.equal(again(X), graph(X))
