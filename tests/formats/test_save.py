"""A graph in a file: everything comes back, and torch.export opens the same file."""

from __future__ import annotations

import inspect
import io
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import dovetail
from dovetail import zoo
from dovetail.errors import CallMismatch, SaveError
from dovetail.formats.archive.load import load
from dovetail.formats.archive.save import save
from tests.fuzz.generate import FLAVOURS
from tests.fuzz.observe import Snapshot, difference, observe
from tests.fuzz.plan import carry_out, draw_case
from tests.fuzz.program import NotAProgram, build, make_inputs

from .saved import again, description, survives

RULES = dovetail.rules.DEFAULT + dovetail.RuleSet(dovetail.rules.repeats())


def of_zoo(name: str, train: bool, is_open: bool) -> tuple[GraphModule, zoo.Inputs]:
    row = zoo.get(name)
    model, inputs = row.build().train(train), row.example_inputs()
    sizes = None
    if is_open:
        given: Any = pytree.tree_map(
            lambda v: {0: Dim.AUTO} if isinstance(v, Tensor) and v.dim() else None,
            (inputs.args, inputs.kwargs),
        )
        sizes = dict(inspect.signature(model.forward).bind(*given[0], **given[1]).arguments)
    return dovetail.capture(model, inputs.args, inputs.kwargs, dynamic_shapes=sizes), inputs


@pytest.mark.parametrize("name", ["mlp", "llama", "resnet", "moe"])
def test_models_of_the_zoo(name: str) -> None:
    graph, inputs = of_zoo(name, train=True, is_open=True)
    survives(dovetail.fuse(graph, rules=RULES), inputs.args, inputs.kwargs)


@pytest.mark.long
@pytest.mark.parametrize("rules", [dovetail.rules.DEFAULT, RULES], ids=["default", "repeats"])
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo_in_every_way(name: str, train: bool, is_open: bool, rules: Any) -> None:
    graph, inputs = of_zoo(name, train, is_open)
    survives(dovetail.fuse(graph, rules=rules), inputs.args, inputs.kwargs)


class Odd(nn.Module):
    """Tied, unused and empty weights, a buffer that is not saved and one that is written, constants, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.across = nn.Parameter(torch.randn(4, 4).t())
        self.unused = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        whole = torch.arange(8.0)
        self.register_buffer("low", whole[:4])
        self.register_buffer("high", whole[4:])
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, gain: float = 2.0) -> dict[str, Any]:
        self.calls.add_(1)
        y = self.second(torch.relu(self.first(x))) @ self.across * self.scale + self.low - self.high
        y = nn.functional.dropout(y, 0.5, self.training) * torch.tensor([1.0, -2.0, 3.0, float("inf")])
        return {
            "out": (y * gain, None),
            "mask": None if mask is None else [mask + 1],
            "calls": self.calls + 0,
        }


@pytest.mark.parametrize("train", [True, False])
def test_weights_of_every_kind_and_trees_of_arguments(train: bool) -> None:
    x, mask = torch.randn(3, 4), torch.ones(2)
    graph = dovetail.capture(
        Odd().train(train),
        (x,),
        {"mask": mask},
        dynamic_shapes={"x": {0: Dim("b", min=2, max=9)}, "mask": None},
    )
    fused = dovetail.fuse(graph)
    loaded = survives(fused, (x,), {"mask": mask})
    assert loaded.first.weight is loaded.second.weight
    assert loaded.across.stride() == (1, 4)
    assert not loaded.unused.requires_grad
    assert isinstance(loaded.unused, nn.Parameter)
    assert loaded.none is None
    assert "scale" in dict(loaded.named_buffers())
    assert loaded.low.untyped_storage().data_ptr() == loaded.high.untyped_storage().data_ptr()
    assert loaded.training is train
    assert [n for n, m in loaded.named_modules() if m.training is not train] == []


def test_calls_are_checked_as_before() -> None:
    x, mask = torch.randn(3, 4), torch.ones(2)
    sizes = {"x": {0: Dim("b", min=2, max=9)}, "mask": None}
    loaded, file = again(dovetail.fuse(dovetail.capture(Odd(), (x,), {"mask": mask}, dynamic_shapes=sizes)))
    assert loaded(torch.randn(7, 4), mask=mask)["out"][0].shape == (7, 4)
    file.seek(0)
    assert torch.export.load(file).module()(torch.randn(7, 4), mask=mask)["out"][0].shape == (7, 4)
    with pytest.raises(CallMismatch, match="outside the captured range 2 to 9"):
        loaded(torch.randn(10, 4), mask=mask)
    with pytest.raises(CallMismatch, match="float64"):
        loaded(torch.randn(3, 4).double(), mask=mask)
    with pytest.raises(CallMismatch, match="left out"):
        loaded(x, mask=mask, gain=3.0)
    with pytest.raises(CallMismatch, match="train mode"):
        loaded.eval()(x, mask=mask)
    with pytest.raises(CallMismatch, match="unexpected"):
        loaded.train()(x, musk=mask)


def test_a_condition_between_sizes_survives() -> None:
    def halves(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]).reshape(2, -1)

    batch = Dim("batch", min=2, max=20)
    graph = dovetail.capture(
        halves, (torch.ones(4), torch.ones(4)), dynamic_shapes={"x": {0: 2 * batch}, "y": {0: 2 * batch}}
    )
    loaded = survives(dovetail.fuse(graph), (torch.ones(6), torch.ones(6)))
    with pytest.raises(CallMismatch):
        loaded(torch.ones(5), torch.ones(5))


def test_inputs_that_are_written_nested_or_numbers() -> None:
    def step(
        x: Tensor, more: dict[str, tuple[Tensor, int]], *rest: Tensor, **named: Tensor
    ) -> OrderedDict[str, Any]:
        x.add_(more["pair"][0] * more["pair"][1])
        return OrderedDict(sum=sum(rest) + named["last"], x=x * 2)

    args = (torch.ones(3), {"pair": (torch.arange(3.0), 4)}, torch.ones(3), torch.ones(3))
    graph = dovetail.capture(step, args, {"last": torch.ones(3)})
    survives(dovetail.fuse(graph), args, {"last": torch.ones(3)})


def test_regions_nested_shared_and_with_attributes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.b(torch.sigmoid(self.a(x) * 3) + x) * 3)

    graph = dovetail.capture(Twice(), (torch.randn(2, 4),))
    requests = [
        dovetail.Request([f"linear{n}", f"mul{n}"], "npu.scaled", 3, {"by": 3, "names": ["x", "é"]})
        for n in ("", "_1")
    ]
    graph = dovetail.outline(graph, requests)
    graph = dovetail.outline(graph, ["npu_scaled_0", "sigmoid"], kind="block", escapes={"sigmoid": "output"})
    loaded = survives(graph, (torch.randn(2, 4),))
    inner, outer = [r for r in dovetail.regions(loaded, nested=True) if r.kind == "npu.scaled"]
    assert inner.body is outer.body
    again_outlined = dovetail.outline(loaded, ["add"], kind="sum")
    assert dovetail.text(again_outlined) == dovetail.text(dovetail.outline(graph, ["add"], kind="sum"))
    assert (
        description(dovetail.inline(loaded, kind="block"))[0]
        == description(dovetail.inline(graph, kind="block"))[0]
    )


def test_torch_export_finds_the_regions_in_custom(tmp_path: Path) -> None:
    def add_relu(x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(torch.relu(x + y))

    graph = dovetail.capture(add_relu, (torch.ones(3), torch.ones(3)))
    graph = dovetail.outline(graph, ["add", "relu"], kind="add_relu", version=2, attrs={"n": 1})
    graph = dovetail.outline(graph, ["add_relu_0", "sigmoid"], kind="outer")
    save(graph, tmp_path / "fused.pt2")
    program = torch.export.load(tmp_path / "fused.pt2")
    marks = {
        n.name: n.meta.get("custom", {}).get("dovetail")
        for n in program.graph.nodes
        if n.op == "call_function"
    }
    outer = {"region": "outer_0", "kind": "outer", "version": 1, "attrs": {}}
    inner = {"region": "outer_0/add_relu_0", "kind": "add_relu", "version": 2, "attrs": {"n": 1}}
    assert marks == {"add": [outer, inner], "relu": [outer, inner], "sigmoid": [outer]}
    assert dovetail.text(dovetail.capture(program)) == dovetail.text(dovetail.inline(graph))


def test_higher_order_operators_and_constants_inside_bodies() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
            return (y + torch.tensor([1.0, 2.0, 3.0])) * self.w

    graph = dovetail.capture(Choice(), (torch.ones(3),))
    names = [n.name for n in graph.graph.nodes if n.op == "call_function" or n.name.startswith("lifted")]
    outlined = dovetail.outline(graph, names, kind="all")
    survives(graph, (torch.ones(3),))
    survives(outlined, (-torch.ones(3),))


def test_a_lowered_graph_is_saved_with_its_regions_and_without_its_code() -> None:
    graph = dovetail.fuse(
        dovetail.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.ones(2, 4),))
    )
    lowered = dovetail.lower(graph, ["eager"])
    assert any(r.backend for r in dovetail.regions(lowered))
    loaded, _ = again(lowered)
    assert dovetail.text(loaded) == dovetail.text(graph)
    assert not any(r.backend for r in dovetail.regions(loaded, nested=True))


def test_graphs_that_were_never_captured() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = nn.functional.linear(x, self.w).relu()
            return torch.softmax(y + x, dim=-1), y[0]

    x = torch.randn(4, 4)
    traced = dovetail.capture(torch.fx.symbolic_trace(Sums()), (x,))
    traced = dovetail.outline(traced, ["add", "softmax"], kind="soft")
    loaded, file = again(traced)
    assert description(loaded) == description(traced)
    file.seek(0)
    program = torch.export.load(file)
    for was, now in zip(traced(x), program.module()(x), strict=True):
        assert torch.equal(was, now)
    assert any("dovetail" in n.meta.get("custom", {}) for n in program.graph.nodes)


@pytest.mark.parametrize("kind", ["str", "path", "file"])
def test_paths_and_files(tmp_path: Path, kind: str) -> None:
    graph = dovetail.capture(torch.relu, (torch.ones(3),))
    path: Any = tmp_path / "graph.pt2"
    if kind == "file":
        with open(path, "wb") as file:
            save(graph, file)
        with open(path, "rb") as file:
            loaded = load(file)
    else:
        path = str(path) if kind == "str" else path
        save(graph, path)
        save(graph, path)
        loaded = load(path)
    assert dovetail.text(loaded) == dovetail.text(graph)
    assert [p.name for p in tmp_path.iterdir()] == ["graph.pt2"]


def test_gradients_flow_as_before() -> None:
    x = torch.randn(3, 4)
    fused = dovetail.fuse(dovetail.capture(Odd().eval(), (x,)))
    loaded, _ = again(fused)
    for graph in (fused, loaded):
        graph(x)["out"][0][:, :3].sum().backward()
    for (name, was), (_, now) in zip(fused.named_parameters(), loaded.named_parameters(), strict=True):
        assert (was.grad is None) == (now.grad is None), name
        torch.testing.assert_close(now.grad, was.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("flavour", ["pure", "memory", "world", "everything", "nested", "traced", "fused"])
def test_random_programs(flavour: str) -> None:
    counts: Counter[str] = Counter()
    for number in range(12):
        try:
            case, gm = draw_case(Random(number), FLAVOURS[flavour])
            gm = gm or build(case.program)
        except NotAProgram:
            continue
        for stage in case.stages:
            try:
                gm = carry_out(gm, stage)
            except dovetail.DovetailError:
                counts["stage refused"] += 1
        file = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "node meta that cannot be saved")
                save(gm, file)
        except SaveError:
            counts["refused"] += 1
            continue
        file.seek(0)
        loaded = load(file, trust={"dovetail_fuzz"})
        assert description(loaded) == description(gm)
        inputs = make_inputs(case.program)
        expected, observed = (observe(g, Snapshot(g), inputs, runs=2, gradients=False) for g in (gm, loaded))
        assert difference(expected, observed) == ("", "")
        counts["saved"] += 1
    assert counts["saved"]


def test_a_capture_that_was_compared_with_its_model(tmp_path: Path) -> None:
    """Digests of what the model ran are not part of a file, which is for graphs without their model."""
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    gm = dovetail.capture(model, (x,), check_capture=True)
    dovetail.save(gm, tmp_path / "compared.pt2")
    loaded = dovetail.load(tmp_path / "compared.pt2")
    assert torch.equal(loaded(x), model(x))
    assert "dovetail.operators" not in loaded.meta
