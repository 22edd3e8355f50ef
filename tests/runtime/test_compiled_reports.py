"""Functions that report on a graph take a compiled model, and `compile` takes graphs that were fused or lowered."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(F.gelu(self.first(x))))


def compiled(*args: Any) -> Any:
    return dovetail.compile(Small().eval(), args or None, backends="eager")


@pytest.mark.parametrize("steps", ["capture", "fuse", "lower", "outline", "load"])
def test_a_graph_of_any_step_can_be_compiled(steps: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(2, 8)
    expected = model(x)
    gm = dovetail.capture(model, (x,))
    if steps == "outline":
        gm = dovetail.outline(gm, ["gelu"], kind="act")
    elif steps != "capture":
        gm = dovetail.fuse(gm)
    if steps == "lower":
        gm = dovetail.lower(gm, "eager")
    if steps == "load":
        dovetail.save(gm, tmp_path / "gm.pt2")
        gm = dovetail.load(tmp_path / "gm.pt2")
    before = dovetail.text(gm)
    fast = dovetail.compile(gm, (x,), backends="eager")
    assert torch.equal(fast(x), expected)
    assert dovetail.regions(fast)
    assert dovetail.text(gm) == before
    fast(x).sum().backward()
    grads = [p.grad for p in gm.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, theirs in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad)


def test_a_fused_graph_with_borrowed_modules_is_compiled() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = nn.Sequential(nn.Linear(4, 4), Inner()).eval()
    traced = torch.fx.GraphModule(model, Leaves().trace(model))
    x = torch.randn(3, 4)
    gm = dovetail.outline(dovetail.capture(traced, (x,)), ["_0", "_1"], kind="both")
    fast = dovetail.compile(gm, (x,), backends="eager")
    assert torch.equal(fast(x), model(x))


def test_reports_of_a_compiled_model_are_those_of_its_graph() -> None:
    x = torch.randn(2, 8)
    fast = compiled(x)
    (graph,) = fast.graphs
    assert [r.name for r in dovetail.regions(fast)] == [r.name for r in dovetail.regions(graph)] != []
    assert dovetail.text(fast) == dovetail.text(graph)
    assert dovetail.explain(fast) == dovetail.explain(graph)
    assert str(dovetail.explain(fast))
    assert dovetail.diff(fast, graph) == ""
    dovetail.check(fast)


def test_a_compiled_model_is_saved_as_its_graph(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    fast = dovetail.compile(Small().eval(), backends="eager", rules=dovetail.rules.DEFAULT)
    expected = fast(x)
    dovetail.save(fast, tmp_path / "fast.pt2")
    loaded = dovetail.load(tmp_path / "fast.pt2")
    assert torch.equal(loaded(x), expected)
    assert [r.kind for r in dovetail.regions(loaded)] == [r.kind for r in dovetail.regions(fast)]


def test_many_captures_are_reported_together_and_not_saved_as_one(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    fast = compiled(x)
    one = dovetail.explain(fast)
    fast.train()(x)
    assert len(fast.graphs) == 2
    both = dovetail.explain(fast)
    assert len(both.accepted) > len(one.accepted)
    assert both.launches_saved == sum(dovetail.explain(g).launches_saved for g in fast.graphs)
    assert len(dovetail.regions(fast)) == sum(len(dovetail.regions(g)) for g in fast.graphs)
    assert dovetail.text(fast) == "\n".join(dovetail.text(g) for g in fast.graphs)
    with pytest.raises(dovetail.InvalidArgument, match=r"2 graphs.*give one of its `graphs`"):
        dovetail.save(fast, tmp_path / "fast.pt2")


@pytest.mark.parametrize("report", ["explain", "regions", "text", "check", "save", "to_onnx", "to_stablehlo"])
def test_a_model_that_was_not_called_has_nothing_to_report(report: str, tmp_path: Path) -> None:
    place = (tmp_path / "file",) if report in ("save", "to_onnx") else ()
    with pytest.raises(dovetail.InvalidArgument, match="call it, or give example inputs"):
        getattr(dovetail, report)(compiled(), *place)


@pytest.mark.parametrize("step", ["fuse", "lower", "inline"])
def test_steps_are_refused_on_a_compiled_model(step: str) -> None:
    with pytest.raises(dovetail.InvalidArgument, match="give one of its `graphs`"):
        getattr(dovetail, step)(compiled(torch.randn(2, 8)))


def test_bodies_stay_shared_in_a_copy_with_values() -> None:
    x = torch.randn(2, 8)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]).eval()
    gm = dovetail.fuse(dovetail.capture(model, (x,)))
    again = dovetail.capture(gm, (x,))
    assert len({id(r.body) for r in dovetail.regions(again)}) == len(
        {id(r.body) for r in dovetail.regions(gm)}
    )
    assert dovetail.text(dovetail.inline(again)) == dovetail.text(dovetail.inline(gm))
    assert torch.equal(copy.deepcopy(again)(x), model(x))
