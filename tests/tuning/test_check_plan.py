"""`Plan.check`: silent for a model that the plan covers, and otherwise what changed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail import DovetailError, InvalidArgument, Plan, PlanMismatch
from dovetail.outlining.region import graph_key
from dovetail.tuning.apply_plan import PlanApplication, environment_of
from dovetail.tuning.decisions import BackendChoice, BlockDecision, BodyDecision, GraphDecision, RegionChoice
from tests.tuning.plans import Layers, X, block_of, blocks_of, captured, halves, plan_for, positions


def whole_plan(model: nn.Module, backend: str = "eager", **changes: Any) -> Plan:
    """A plan that decides everything of a model of layers."""
    gm = captured(model)
    block = block_of(gm)
    decisions: dict[str, Any] = {
        "decision": GraphDecision("the model"),
        "divided": {
            region.key: halves(block)
            if region.key == block.key
            else BlockDecision(
                region.name,
                regions=(
                    RegionChoice(
                        region.name,
                        tuple(range(len(region.inputs), len(region.inputs) + len(region.nodes))),
                    ),
                ),
            )
            for region in blocks_of(gm)
        },
        **changes,
    }
    plan = plan_for(model, X, **decisions)
    applied = PlanApplication(plan, "inference", environment_of(gm)).apply(gm)
    bodies = {
        region.key: BodyDecision(region.name, backend=BackendChoice(backend))
        for region in dovetail.regions(applied.graph)
    }
    return plan | plan_for(model, X, bodies=bodies)


def problems(plan: Plan, model: nn.Module, **options: Any) -> str:
    with pytest.raises(PlanMismatch) as caught:
        plan.check(model, (X,), **options)
    assert isinstance(caught.value, DovetailError)
    return "\n".join(caught.value.problems)


def test_a_plan_that_covers_a_model_is_silent() -> None:
    model = Layers().eval()
    plan = whole_plan(model)
    plan.check(model, (X,))
    plan.check(model, kwargs={"x": X})
    plan.check(Layers().eval(), (X,), environment=False)
    only = plan_for(model, X, decision=GraphDecision("the model", execution="model"))
    only.check(model, (X,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan.check(model, (X,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_the_plan_does_not_know_is_reported_with_what_the_model_no_longer_has() -> None:
    plan = whole_plan(Layers().eval())
    wider = Layers(width=16).eval()
    with pytest.raises(PlanMismatch) as caught:
        plan.check(wider, (torch.ones(3, 16),))
    text = str(caught.value)
    assert text.startswith("the plan does not fit the model:\n- there is no decision for the graph ")
    assert "; the model has nothing that fits 'the model'" in text
    assert "there is no decision for the block " in text
    assert "'layer'" in text
    assert text.endswith("Tune the model again, or give environment=False to check its structure only.")
    deeper = problems(plan, Layers(4).eval())
    assert "there is no decision for the graph" in deeper
    assert "block" not in deeper


def test_bodies_without_a_decision_are_reported() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    plan = whole_plan(model)
    merged = BlockDecision("layer", regions=(RegionChoice("act", positions(block, "mul", "add")),))
    text = problems(plan | plan_for(model, X, divided={block.key: merged}), model)
    assert "there is no decision for the body " in text
    assert "of 'act_0'" in text
    assert "the model has nothing that fits 'head" in text


def test_regions_and_backends_that_are_refused_are_reported() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    loop = BlockDecision("layer", regions=(RegionChoice("loop", positions(block, "linear", "add")),))
    text = problems(whole_plan(model) | plan_for(model, X, divided={block.key: loop}), model)
    assert "a region 'loop' of the block" in text
    assert "would depend on itself" in text
    assert "there is no backend 'npu'" in problems(whole_plan(model, backend="npu"), model)
    text = problems(whole_plan(model, backend="cuda_graphs(eager)"), model)
    assert "'cuda_graphs(eager)' does not run the body " in text
    # Whether a backend can be used is a matter of the machine.
    whole_plan(model, backend="cuda_graphs(eager)").check(model, (X,), environment=False)


def test_the_environment_counts_unless_only_the_structure_is_checked() -> None:
    model = Layers().eval()
    gm = captured(model)
    here, key = environment_of(gm), graph_key(gm)
    plan = whole_plan(model)

    def moved(**changes: Any) -> Plan:
        environment = replace(here, **changes)
        sections = {
            name: {k: next(iter(v.values())) for k, v in getattr(plan, name).items()}
            for name in ("graphs", "blocks", "bodies")
        }
        return Plan().with_decisions("inference", environment, **sections)

    text = problems(moved(torch="2.0"), model)
    assert text == f"the environment is another one: torch {here.torch}, was 2.0"
    moved(torch="2.0").check(model, (X,), environment=False)
    text = problems(moved(device="npu: 3"), model)
    assert f"there is no decision for the graph {key[:12]} (only for inference on npu: 3)" in text
    moved(device="npu: 3").check(model, (X,), environment=False)
    # Decisions of each environment are checked.
    block = block_of(gm)
    wrong = BlockDecision("layer", regions=(RegionChoice("a", (99,)),))
    both = plan | moved(device="npu: 3").with_decisions(
        "inference", replace(here, device="npu: 3"), blocks={block.key: wrong}
    )
    both.check(model, (X,))
    assert "position 99 is not an operation" in problems(both, model, environment=False)


def test_modes_and_wrong_calls() -> None:
    model = Layers().eval()
    plan = whole_plan(model)
    assert "(only for inference on" in problems(plan, model.train())
    with pytest.raises(InvalidArgument, match="a plan is for a module, not for a function"):
        plan.check(lambda x: x, (X,))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="environment 1; give True or False"):
        plan.check(model, (X,), environment=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="has no argument 'strict'"):
        plan.check(model, (X,), strict=True)  # type: ignore[call-arg]
    with pytest.raises(dovetail.CaptureError):
        plan.check(model, ())
