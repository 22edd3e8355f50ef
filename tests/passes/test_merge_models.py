"""MergeParallel on the zoo, with symbolic sizes, on graphs of other tracers, and on random programs."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.graph_equality import same_graph
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.pass_manager import Pipeline, Repeat
from dovetail.zoo import MODELS

from .helpers import called, captured, gradients, node, run
from .models import QKV, X
from .siblings import draw


def zoo(name: str, *, training: bool = False) -> tuple[GraphModule, list[Any]]:
    inputs = MODELS[name].example_inputs()
    gm = dovetail.capture(MODELS[name].build().train(training), inputs.args, inputs.kwargs)
    return gm, [*inputs.args, *inputs.kwargs.values()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [3, 2, 3, 2]),  # q, k, v and gate, up of two layers
        ("bert", [3, 3]),
        ("inception", [3, 3]),  # the 1x1 convolutions of two blocks
        ("resnet", []),
    ],
)
def test_zoo(name: str, groups: list[int], training: bool) -> None:
    gm, inputs = zoo(name, training=training)
    merged = [f for f in MergeParallel().explain(gm) if f.taken]
    assert [len(f.nodes) for f in merged] == groups
    step = Repeat(MergeParallel())
    new = Pipeline([step])(gm, check=True)
    assert called(new).count("split_with_sizes") == len(groups)
    torch.testing.assert_close(run(new, *inputs), run(gm, *inputs), rtol=1e-4, atol=1e-5)
    assert list(new.state_dict()) == list(gm.state_dict())
    assert same_graph(step(new), new)


@pytest.mark.parametrize("name", ["llama", "inception"])
def test_materialised(name: str) -> None:
    gm, inputs = zoo(name)
    new = MergeParallel(materialise=True)(gm)
    dovetail.check(new)
    joined = [n for n in new.graph.nodes if n.op == "get_attr" and str(n.target).startswith("merged_")]
    assert joined
    assert called(new).count("cat") == called(gm).count("cat")
    torch.testing.assert_close(run(new, *inputs), run(gm, *inputs), rtol=1e-4, atol=1e-5)
    assert list(new.state_dict()) == list(gm.state_dict())


def test_gradients_of_a_trained_model() -> None:
    gm, inputs = zoo("llama", training=True)
    new = MergeParallel()(gm)
    torch.testing.assert_close(gradients(new, inputs), gradients(gm, inputs), rtol=1e-4, atol=1e-5)


def test_a_merged_graph_survives_copy_and_pickle() -> None:
    gm, inputs = zoo("bert")
    for step in (MergeParallel(), MergeParallel(materialise=True)):
        new = step(gm)
        for other in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
            dovetail.check(other)
            assert dovetail.text(other) == dovetail.text(new)
            torch.testing.assert_close(run(other, *inputs), run(new, *inputs))


def test_symbolic_sizes_stay_symbolic_and_are_not_settled() -> None:
    auto = torch.export.Dim.AUTO
    gm = captured(QKV(), X, dynamic_shapes={"x": {0: auto, 1: auto}})
    env = node(gm, "x").meta["val"].fake_mode.shape_env
    known = len(env.guards), dict(env.replacements), dict(env.var_to_range)
    new = MergeParallel()(gm)
    dovetail.check(new)
    assert (len(env.guards), dict(env.replacements), dict(env.var_to_range)) == known
    assert "%merged_linear_0: f32[s0, s1, 16]" in dovetail.text(new)
    for rows in (X, torch.randn(5, 7, 4)):
        torch.testing.assert_close(new(rows), gm(rows))


def test_nested_branches() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.ModuleList(nn.Linear(4, 4 + i) for i in range(2))
            self.inner = nn.ModuleList(nn.Linear(4, 3 + i) for i in range(2))
            self.deep = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            a, b = (layer(x).relu() for layer in self.outer)
            c, d = (layer(a).tanh() for layer in self.inner)
            e, f = (layer(c) for layer in self.deep)
            return torch.cat((b.sum(1), d.sum(1), (e * f).sum(1)), -1)

    gm = captured(Nested(), X)
    record = Pipeline([Repeat(MergeParallel())]).trace(gm, check=True)
    assert [s.changed for s in record.steps] == [True, False]
    assert [c for c in called(record.graph) if c in ("linear", "relu", "tanh")] == [
        "linear",
        "relu",
        "linear",
        "tanh",
        "linear",
    ]
    torch.testing.assert_close(record.graph(X), gm(X))
    torch.testing.assert_close(gradients(record.graph, [X]), gradients(gm, [X]))


def test_siblings_that_only_show_after_cleaning_up() -> None:
    class Twice(QKV):
        def forward(self, x: Tensor) -> Tensor:
            return self.q(x.sin()).relu().sum() + self.k(x.sin()).tanh().sum() + self.v(x.sin()).cos().sum()

    gm = captured(Twice(), X)
    assert MergeParallel()(gm) is gm
    new = Pipeline([Cleanup(), MergeParallel()])(gm, check=True)
    assert called(new).count("linear") == 1
    torch.testing.assert_close(new(X), gm(X))


def test_the_dialect_of_training_graphs() -> None:
    """Parameters are inputs, and a linear is a transpose and an addmm."""
    model, x = QKV(), torch.randn(6, 4)
    names = [n for n, _ in model.named_parameters()]

    def step(weights: list[Tensor], x: Tensor) -> list[Tensor]:
        state = dict(zip(names, weights, strict=True))
        out = [torch.addmm(state[f"{p}.bias"], x, state[f"{p}.weight"].t()) for p in "qkv"]
        return [out[0].relu(), out[1].relu() * out[2].relu()]

    weights = [p.detach() for p in model.parameters()]
    gm = make_fx(step, tracing_mode="fake")(weights, x)
    new = MergeParallel()(gm)
    dovetail.check(new)
    assert [c for c in called(new) if c != "getitem"] == [
        "cat",
        "t",
        "cat",
        "addmm",
        "split_with_sizes",
        "relu",
        "relu",
        "relu",
        "mul",
    ]
    torch.testing.assert_close(new(weights, x), gm(weights, x))


@pytest.mark.parametrize("start", range(0, 90, 30))
def test_random_siblings(start: int) -> None:
    merged = 0
    for seed in range(start, start + 30):
        gm, inputs = draw(Random(seed))
        before = dovetail.text(gm)
        step = MergeParallel(materialise=seed % 3 == 0)
        new = step(gm)
        assert dovetail.text(gm) == before
        assert any(f.taken for f in step.explain(gm)) == (new is not gm)
        if new is gm:
            continue
        merged += 1
        dovetail.check(new)
        want, got = run(gm, *inputs), run(new, *inputs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda m, s=seed: f"seed {s}: {m}")
        assert [(t.stride(), t.shape) for t in got[0]] == [(t.stride(), t.shape) for t in want[0]]
        assert _sharing(got[0]) == _sharing(want[0])
        assert same_graph(step(new), new)
        _expect_true_values(new, inputs)
    assert merged > 15


def _sharing(results: tuple[Tensor, ...]) -> list[int]:
    storages: dict[int, int] = {}
    return [storages.setdefault(t.untyped_storage()._cdata, len(storages)) for t in results]


def _expect_true_values(gm: GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Sizes, strides and shared memory of every value are what running the graph on fake inputs gives."""
    fresh = dovetail.capture(copy.copy(gm), inputs)
    storages: list[dict[int, int]] = [{}, {}]
    for mine, theirs in zip(gm.graph.nodes, fresh.graph.nodes, strict=True):
        for a, b in zip(_tensors(mine.meta.get("val")), _tensors(theirs.meta.get("val")), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.storage_offset()) == (
                b.shape,
                b.stride(),
                b.dtype,
                b.storage_offset(),
            ), mine.name
            keys = [t.untyped_storage()._cdata for t in (a, b)]
            places = [s.setdefault(k, len(s)) for s, k in zip(storages, keys, strict=True)]
            assert places[0] == places[1], mine.name


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, Tensor)]
