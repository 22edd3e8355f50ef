"""However an operation was spelled, its canonical form is one; and nothing but the spelling changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail import zoo
from dovetail.frontend.capture import capture
from dovetail.ir.canonicalize import canonicalize
from dovetail.ir.op_traits import is_removable
from dovetail.ir.schema import SLICE_END
from tests.texts import assert_text
from tests.zoo_graphs import zoo_graph

X = torch.randn(2, 3, 4)
aten = torch.ops.aten


def form(graph: torch.fx.GraphModule) -> list[Any]:
    """The operations of a graph, nodes as positions: what is left when names are taken away."""
    position = {node: f"%{i}" for i, node in enumerate(graph.graph.nodes)}

    def shown(value: Any) -> Any:
        return torch.fx.node.map_aggregate(
            value, lambda v: position[v] if isinstance(v, torch.fx.Node) else v
        )

    return [
        (n.op, str(n.target), shown(n.args), shown(n.kwargs))
        for n in graph.graph.nodes
        if n.op != "placeholder"
    ]


def captured(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    return capture(function, args or (X,))


SPELLINGS: dict[str, tuple[Callable[..., Any], ...]] = {
    "softmax": (
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(dim=2),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    ),
    "sum": (lambda x: x.sum(-1), lambda x: torch.sum(x, dim=(2,), keepdim=False)),
    "mean": (lambda x: x.mean((-1, -2)), lambda x: x.mean(dim=[2, 1], keepdim=False, dtype=torch.float32)),
    "transpose": (
        lambda x: x.transpose(-1, -2) + 1,
        lambda x: x.transpose(2, 1) + 1,
        lambda x: x.swapaxes(2, 1) + 1,
    ),
    "view": (lambda x: x.view(6, -1) + 1, lambda x: x.reshape(6, 4) + 1, lambda x: x.flatten(0, 1) + 1),
    "reshape after transpose": (
        lambda x: x.transpose(1, 2).reshape(2, 12) + 1,
        lambda x: x.transpose(1, 2).contiguous().view(2, -1) + 1,
        lambda x: x.transpose(-1, -2).flatten(-2) + 1,
    ),
    "slice": (
        lambda x: x[:, 1:] + 1,
        lambda x: x[:, 1:3] + 1,
        lambda x: x[:, -2 : sys.maxsize] + 1,
        lambda x: x.narrow(1, 1, 2) + 1,
    ),
    "select": (lambda x: x[-1] + 1, lambda x: x[1] + 1, lambda x: x.select(0, -1) + 1),
    "nothing": (
        lambda x: x + 1,
        lambda x: x.view(2, 3, 4)[:].expand(2, -1, -1).permute(0, 1, 2).transpose(1, 1) + 1,
        lambda x: x.clone().to(torch.float32).contiguous() + 1,
        lambda x: torch.add(x, 1, alpha=1),
        lambda x: F.dropout(x, 0.5, training=False) + 1,
        lambda x: torch.cat([torch.tensor([]), x], -1) + 1,
        lambda x: nn.Identity()(x).unsqueeze(0).squeeze(0) + 1 if False else x + 1,
    ),
    "zeros": (
        lambda x: x + torch.zeros(4),
        lambda x: x + torch.zeros([4], dtype=torch.float32, device="cpu", pin_memory=False),
    ),
    "zeros like": (
        lambda x: x + torch.zeros_like(x),
        lambda x: (
            x + torch.zeros_like(x, dtype=torch.float32, device="cpu", memory_format=torch.preserve_format)
        ),
    ),
    "layer norm": (
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.layer_norm(x, [4], weight=None, bias=None, eps=1e-5),
    ),
    "concatenation": (lambda x: torch.cat([x, x], -1), lambda x: torch.cat((x, x), dim=2)),
    "stack": (lambda x: torch.stack([x, x], -1), lambda x: torch.stack([x, x], 3)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_meet(name: str) -> None:
    first, *others = SPELLINGS[name]
    expected = form(captured(first))
    for other in others:
        graph = captured(other)
        assert form(graph) == expected
        assert torch.equal(graph(X), other(X))
        assert graph(X).stride() == other(X).stride()


def test_different_operations_stay_different() -> None:
    assert form(captured(lambda x: x.softmax(0))) != form(captured(lambda x: x.softmax(1)))
    assert form(captured(lambda x: x[:, 1:])) != form(captured(lambda x: x[:, :1]))
    assert form(captured(lambda x: x.view(6, 4) + 1)) != form(captured(lambda x: x.view(4, 6) + 1))


def test_the_report_has_what_went() -> None:
    traced = make_fx(lambda x: x.view(2, -1, 4).clone().softmax(-1))(X)
    assert_text(
        traced,
        """
        graph:
          %x_1: f32[2, 3, 4] = input
          %view: f32[2, 3, 4] = aten.view.default(%x_1, [2, -1, 4])
          %clone: f32[2, 3, 4] = aten.clone.default(%view)
          %_softmax: f32[2, 3, 4] = aten._softmax.default(%clone, -1, False)
          return %_softmax
    """,
    )
    graph, report = canonicalize(traced)
    assert_text(
        graph,
        """
        graph:
          %x_1: f32[2, 3, 4] = input
          %_softmax: f32[2, 3, 4] = aten._softmax.default(%x_1, 2, False)
          return %_softmax
    """,
    )
    assert torch.equal(graph(X), traced(X))
    assert report["copies that change nothing removed"] == 1
    assert "respelled" in str(report)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_once_is_enough_and_the_input_is_untouched(name: str, mode: str) -> None:
    graph = zoo_graph(name, training=mode == "train")
    before = form(graph), [dict(n.meta) for n in graph.graph.nodes]
    again, report = canonicalize(graph)
    assert report.total == 0
    assert form(again) == form(graph) == before[0]
    assert [dict(n.meta) for n in graph.graph.nodes] == before[1]
    assert again.meta == graph.meta


def test_dropout_that_drops_stays_whole() -> None:
    assert_text(
        capture(nn.Dropout(0.5).train(), (X,)),
        """
        graph:
          %input_1: f32[2, 3, 4] = input
          %native_dropout: (f32[2, 3, 4], bool[2, 3, 4]) = aten.native_dropout.default(%input_1, 0.5, True)
          %getitem: f32[2, 3, 4] = operator.getitem(%native_dropout, 0)
          return (%getitem,)
    """,
    )
    assert_text(
        capture(nn.Dropout(0.5).eval(), (X,)),
        """
        graph:
          %input_1: f32[2, 3, 4] = input
          return (%input_1,)
    """,
    )


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.clone(),
        lambda x: (x.clone(), x),
        lambda x: x.clone().view(6, 4),
        lambda x: x.view(2, 3, 4),
        lambda x: (x + 1).clone(),
        lambda x: (lambda y: (y, y.clone()))(x + 1),
        lambda x: (lambda y: (y.view(6, 4), y.clone().view(6, 4)))(x + 1),
        lambda x: x.detach(),
    ],
)
def test_results_share_memory_as_the_model_has_it(forward: Callable[[Tensor], Any]) -> None:
    def memory(result: Any, x: Tensor) -> list[bool]:
        results = [x, *(result if isinstance(result, tuple) else (result,))]
        where = [r.untyped_storage().data_ptr() for r in results]
        return [a == b for a in where for b in where]

    graph = captured(forward)
    x = X.clone()
    assert memory(graph(x), x) == memory(forward(x), x)
    assert all((g is x) == (f is x) for g, f in [(graph(x), forward(x))] if isinstance(f, Tensor))


def test_a_copy_of_what_is_written_later_stays() -> None:
    def forward(x: Tensor) -> Tensor:
        old = x.clone()
        x.add_(1)
        return old * x

    graph = captured(forward)
    assert torch.equal(graph(X.clone()), forward(X.clone()))


def test_detach_and_unused_random_numbers_stay() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.rand(3)
        return x.exp().detach() * x

    assert_text(
        captured(forward),
        """
        graph:
          %x: f32[2, 3, 4] = input
          %rand: f32[3] = aten.rand.default([3], dtype=float32, layout=strided, device=cpu, pin_memory=None)
          %exp: f32[2, 3, 4] = aten.exp.default(%x)
          %detach: f32[2, 3, 4] = aten.detach.default(%exp)
          %mul: f32[2, 3, 4] = aten.mul.Tensor(%detach, %x)
          return (%mul,)
    """,
    )


def test_a_graph_with_writes_in_between_keeps_its_copies() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        x.add_(1)
        return y * 2

    graph = make_fx(forward)(X.clone())
    canonical, report = canonicalize(graph)
    assert_text(
        graph,
        """
        graph:
          %x_1: f32[2, 3, 4] = input
          %clone: f32[2, 3, 4] = aten.clone.default(%x_1)
          %add_: f32[2, 3, 4] = aten.add_.Tensor(%x_1, 1)
          %mul: f32[2, 3, 4] = aten.mul.Tensor(%clone, 2)
          return %mul
    """,
    )
    assert_text(
        canonical,
        """
        graph:
          %x_1: f32[2, 3, 4] = input
          %clone: f32[2, 3, 4] = aten.clone.default(%x_1, memory_format=None)
          %add_: f32[2, 3, 4] = aten.add_.Tensor(%x_1, 1, alpha=1)
          %mul: f32[2, 3, 4] = aten.mul.Tensor(%clone, 2)
          return %mul
    """,
    )
    assert report["copies that change nothing removed"] == 0
    assert torch.equal(canonical(X.clone()), X * 2)


def test_unknown_things_are_left_alone() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    canonical, report = canonicalize(graph)
    assert report.total == 0
    assert str(canonical.graph) == str(graph.graph)


def test_gradients_are_the_same_bit_for_bit() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().view(2, 12).clone().softmax(-1)[:, 1:]

    a, b = (X.clone().requires_grad_() for _ in range(2))
    captured(forward)(a).square().sum().backward()
    forward(b).square().sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_symbolic_sizes_stay_and_no_guard_is_added() -> None:
    auto = torch.export.Dim.AUTO

    def forward(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1)[1:, 2:]

    graph = capture(forward, (torch.randn(4, 3, 5),), dynamic_shapes={"x": {0: auto}})
    shape_env = next(iter(graph.graph.nodes)).meta["val"].fake_mode.shape_env
    before = (len(shape_env.guards), dict(shape_env.var_to_range))
    again, report = canonicalize(graph)
    assert report.total == 0
    assert (len(shape_env.guards), dict(shape_env.var_to_range)) == before
    reshapes = [n for n in again.graph.nodes if n.target is aten.reshape.default]
    assert reshapes
    assert not any(n.target in (aten.view.default, aten.clone.default) for n in again.graph.nodes)
    ends = [n.args[3] for n in again.graph.nodes if n.target is aten.slice.Tensor]
    assert SLICE_END in ends
    for size in (3, 7):
        x = torch.randn(size, 3, 5)
        assert torch.equal(again(x), forward(x))


def chain(length: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value = torch.empty(2, 3, device="meta")
    for _ in range(length):
        node = graph.call_function(aten.view.default, (node, [2, -1]))
        node.meta["val"] = value
        node = graph.call_function(aten.softmax.int, (node, -1))
        node.meta["val"] = torch.empty(2, 3, device="meta")
    graph.output((node,)).meta["val"] = None
    return torch.fx.GraphModule(nn.Module(), graph)


def test_time_grows_with_the_graph_and_not_faster() -> None:
    def seconds(length: int) -> float:
        module = chain(length)
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            canonicalize(module)
            best = min(best, time.thread_time() - start)
        return best

    small = seconds(500)
    assert seconds(4000) < 8 * small * 3


def test_a_conversion_to_the_dtype_of_another_tensor_names_the_dtype() -> None:
    def normed(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 2).type_as(x) + 1

    x = torch.randn(3).to(torch.bfloat16)
    gm = dovetail.capture(normed, (x,))
    assert "type_as" not in dovetail.text(gm)
    assert dovetail.text(gm).count("aten._to_copy") == 2
    assert torch.equal(gm(x), normed(x))
    static = dovetail.capture(normed, (torch.randn(3),))
    assert "_to_copy" not in dovetail.text(static)
    assert "type_as" not in dovetail.text(static)


def test_views_there_and_back_change_nothing() -> None:
    ways = [
        lambda x: x.softmax(-1).view(6, 4).view(2, 3, 4) + 1,
        lambda x: x.softmax(-1).unsqueeze(0).view(1, 24).reshape(2, 3, 4) + 1,
        lambda x: x.softmax(-1).unsqueeze(1).squeeze(1) + 1,
    ]
    for way in ways:
        graph = captured(way)
        assert form(graph) == form(captured(lambda x: x.softmax(-1) + 1))
        assert torch.equal(graph(X), way(X))
    # What is seen in between, and what comes back laid out otherwise, stays.
    assert "reshape" in str(captured(lambda x: x.softmax(-1).view(6, 4).sum(0) + 1).graph)
    turned = captured(lambda x: x.transpose(1, 2).reshape(6, 4).reshape(2, 4, 3) + 1)
    assert str(turned.graph).count("reshape.default") == 2
    both = captured(lambda x: (x.view(6, 4), x.view(6, 4).view(2, 3, 4)))
    _, second = both(X)
    assert torch.equal(second, X)
    assert second._base is X


def test_an_out_variant_is_never_dead() -> None:
    graph = torch.fx.Graph()
    operands = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    outputs = {name: graph.placeholder(name) for name in ("out", "save_mean", "save_invstd")}
    target = torch.ops.aten.native_batch_norm.out
    node = graph.call_function(target, (*operands, False, 0.1, 1e-5), outputs)
    graph.output(outputs["out"])
    assert not is_removable(node)
