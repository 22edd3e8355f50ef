"""The passes that plans name: they come before the boundaries, and what does not exist is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
import dovetail.zoo
from dovetail import InvalidArgument, PlanMismatch
from dovetail.tuning.decisions import (
    GraphDecision,
    PassChoice,
)
from dovetail.tuning.plan_passes import make_pass
from tests.tuning.plans import (
    Layers,
    X,
    kinds,
    messages,
    plan_for,
)


def test_passes_of_the_plan_come_first() -> None:
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    model = Siblings().eval()
    merge = PassChoice(
        "MergeParallel", {"materialise": True, "groups": ["aten.linear.default 3x8 to [4, 4]"]}
    )
    plan = plan_for(model, X, decision=GraphDecision("siblings", pipeline=(merge,)))
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert len(linears(fast)) == 1
    torch.testing.assert_close(fast(X), model(X))
    others = replace(merge, options={"groups": ["aten.linear.default 3x8 to [4, 5]"]})
    plan = plan_for(model, X, decision=GraphDecision("siblings", pipeline=(others,)))
    assert len(linears(dovetail.compile(model, (X,), backends="eager", plan=plan))) == 2


def linears(compiled: Any) -> list[Any]:
    nodes = [node for region in dovetail.regions(compiled) for node in region.body.graph.nodes]
    return [node for node in nodes if node.target is torch.ops.aten.linear.default]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (PassChoice("MergeSiblings"), "it names the pass 'MergeSiblings'; there are MergeParallel, "),
        (
            PassChoice("Fuse", {"rules": "mine"}),
            "it names the rules 'mine'; there are default, library, groups, siblings, repeats.",
        ),
        (PassChoice("Fuse", {"rules": ["library"]}), "it names the rules ['library']; there are default, "),
        (PassChoice("Fuse", {"round": 1}), "Fuse has no argument 'round'. Did you mean 'rounds'?"),
        (PassChoice("MergeParallel", {"groups": "all"}), "groups 'all' of MergeParallel is not a list"),
        (PassChoice("FoldConstants", {"x": 1}), "FoldConstants has no argument 'x'."),
    ],
)
def test_passes_that_do_not_exist_here(choice: PassChoice, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_pass(choice)
    assert str(caught.value).startswith(message)
    model = Layers().eval()
    plan = plan_for(model, X, decision=GraphDecision("layers", pipeline=(choice,)))
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["block"] * 3, "rest"]
    (problem,) = messages(fast, "stale")
    assert problem.startswith("a decision of the plan is not applied: 'layers' for the graph ")
    assert message in problem
    with pytest.raises(PlanMismatch, match="'layers' for the graph"):
        dovetail.compile(model, (X,), backends="eager", plan=plan, on_error="raise")


@pytest.mark.parametrize("name", ["Cleanup", "FoldConvBatchNorm", "FoldConstants", "ChannelsLast", "Fuse"])
def test_every_pass_can_be_named(name: str) -> None:
    assert type(make_pass(PassChoice(name))).__name__ == name
