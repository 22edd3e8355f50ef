"""Passes that compute constants from weights are for calls without gradients: plans apply them to no others."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import Plan, PlanMismatch
from dovetail.tuning.decisions import GraphDecision, PassChoice
from tests.tuning.plans import messages, plan_for

MERGE = PassChoice("MergeParallel", {"materialise": True})
FOLD, LAYOUT = PassChoice("FoldConvBatchNorm"), PassChoice("ChannelsLast")
PASSES = [(FOLD,), (MERGE,), (LAYOUT,), (FOLD, LAYOUT, MERGE, PassChoice("FoldConstants"))]
IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    """A convolution with its norm, and two products of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.query(y) * self.key(y)


def planned(model: nn.Module, *passes: PassChoice) -> Plan:
    with torch.no_grad():
        return plan_for(model, IMAGE, decision=GraphDecision("net", pipeline=passes))


def compiled(model: nn.Module, *passes: PassChoice, **options: Any) -> Any:
    return dovetail.compile(model, (IMAGE,), plan=planned(model, *passes), backends=["eager"], **options)


def gradients(run: Any, model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    run(IMAGE).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def constants(fast: Any) -> list[list[str]]:
    return [
        [n for n, _ in graph.named_buffers() if "_weight_" in n or "merged" in n] for graph in fast.graphs
    ]


@pytest.mark.parametrize("passes", PASSES, ids=lambda passes: " ".join(each.name for each in passes))
def test_all_weights_have_their_gradients_in_eval_mode(passes: tuple[PassChoice, ...]) -> None:
    model = Net().eval()
    expected = gradients(model, model)
    fast = compiled(model, *passes)
    actual = gradients(fast, model)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)
    reports = messages(fast, "stale")
    assert [report.partition("the pass ")[2].partition(" ")[0] for report in reports] == [
        each.name for each in passes if each.name != "FoldConstants"
    ]
    assert "no gradient would reach '" in reports[0]
    with pytest.raises(PlanMismatch, match=f"the pass {passes[0].name} of 'net': no gradient would reach"):
        compiled(model, *passes, on_error="raise")


@pytest.mark.parametrize("is_first", [True, False])
def test_calls_with_and_without_gradients_have_graphs_of_their_own(is_first: bool) -> None:
    model = Net().eval()
    expected = gradients(model, model)
    with torch.set_grad_enabled(is_first):
        fast = compiled(model, FOLD)
    for grad in (not is_first, is_first, not is_first):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(fast(IMAGE), model(IMAGE))
    assert [bool(names) for names in constants(fast)] == [not is_first, is_first]
    torch.testing.assert_close(gradients(fast, model), expected)
    assert len(fast.graphs) == 2
    twin = copy.deepcopy(fast)
    twin(IMAGE).sum().backward()
    assert twin.conv.weight.grad is not None


def test_frozen_weights_are_folded_until_they_are_trained() -> None:
    model = Net().eval()
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    fast = compiled(model, FOLD)
    assert not messages(fast, "stale")
    assert gradients(fast, model)["query.weight"] is not None
    model.conv.requires_grad_(True)
    assert gradients(fast, model)["conv.weight"] is not None
    assert [bool(names) for names in constants(fast)] == [True, False]


def test_plans_for_training_compute_no_constants_from_weights() -> None:
    model = Net().train()
    fast = compiled(model, MERGE)
    with torch.no_grad():
        fast(IMAGE)
    assert gradients(fast, model)["query.weight"] is not None
    assert len(fast.graphs) == 1
    assert "the pass MergeParallel of 'net'" in messages(fast, "stale")[0]


def test_a_check_is_for_the_calls_that_were_measured() -> None:
    model = Net().eval()
    plan = planned(model, FOLD)
    with pytest.raises(PlanMismatch) as caught:
        plan.check(model, (IMAGE,))
    assert "no gradient" not in str(caught.value)


def test_a_bundle_keeps_which_calls_its_graphs_are_for(tmp_path: Path) -> None:
    model = Net().eval()
    with torch.no_grad():
        fast = compiled(model, FOLD, cache=tmp_path / "cache")
    path = dovetail.bundle(fast, tmp_path / "net.bundle")
    opened = dovetail.compile(model, bundle=path, cache=tmp_path / "cache")
    with torch.no_grad():
        opened(IMAGE)
    assert len(opened.graphs) == 1
    assert gradients(opened, model)["conv.weight"] is not None
