"""Backends of plans: bodies are run by the one that was measured, by their operands, and what cannot be is reported."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
import dovetail.zoo
from dovetail import LoweringError, PlanMismatch
from dovetail.lowering.backend_protocol import backend_with_options
from dovetail.tuning.apply_plan import describe_operands
from dovetail.tuning.decisions import (
    BackendChoice,
    BlockDecision,
    BodyDecision,
    GraphDecision,
    PassChoice,
)
from dovetail.tuning.plan import body_entry
from tests.lowering.helpers import Counting
from tests.tuning.plans import (
    Fake,
    Layers,
    X,
    application,
    block_of,
    blocks_of,
    captured,
    halves,
    messages,
    plan_for,
)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return left + right


def test_bodies_run_by_the_backend_of_the_plan() -> None:
    model = Layers().eval()
    gm = captured(model)
    block, entry = block_of(gm), blocks_of(gm)[0]
    head, tail = (halves(block).regions[i] for i in (0, 1))
    divided = {block.key: BlockDecision("layer", regions=(head, tail))}
    applied = application(plan_for(model, X, divided=divided), model).apply(gm)
    by_kind = {region.kind: region.key for region in dovetail.regions(applied.graph)}
    plan = plan_for(
        model,
        X,
        divided=divided,
        bodies={
            by_kind["head"]: BodyDecision("head", backend=BackendChoice("fake")),
            by_kind["tail"]: BodyDecision("tail"),
            entry.key: BodyDecision("entry", backend=BackendChoice("torchscript")),
        },
    )
    counting = Counting("rest")
    fast = dovetail.compile(model, (X,), backends=[counting, Fake()], plan=plan, verify=False)
    backends = {(r.kind, r.backend) for r in dovetail.regions(fast)}
    # "fake" is given by the caller, "torchscript" by its name, the tail runs as it is, and the exit by default.
    assert backends == {("head", "fake"), ("tail", None), ("rest", "torchscript"), ("rest", "rest")}
    expected = X.sin() + 1
    for layer in model.layers:
        expected = 2 * torch.relu(layer(expected)) * 2 + expected.cos()
    torch.testing.assert_close(fast(X), expected.exp().tanh())
    assert not messages(fast, "stale")
    (unknown,) = messages(fast, "unplanned")
    assert "the graph " in unknown


def test_a_body_may_have_a_decision_for_each_form_of_its_operands() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    here = describe_operands(block)
    assert here.count("weight") == 2

    def used(**backends: str) -> tuple[set[str | None], list[str]]:
        operands = {"here": here, "other": here.replace(" weight", "")}
        bodies = {
            block.key if name == "any" else body_entry(block.key, operands[name]): BodyDecision(
                "layer", operands=operands.get(name, ""), backend=BackendChoice(backend)
            )
            for name, backend in backends.items()
        }
        applied = application(plan_for(model, X, bodies=bodies), model).apply(captured(model))
        return {chain[0].name for chain in applied.bodies.values()}, applied.differences

    assert used(any="eager", here="torchscript", other="inductor") == ({"torchscript"}, [])
    assert used(any="eager", other="inductor") == ({"eager"}, [])
    chosen, differences = used(other="inductor")
    assert chosen == {"inductor"}
    assert differences == [f"operands of 'block_0' are {here}, were {here.replace(' weight', '')}"]


def test_equal_bodies_with_other_decisions_for_other_operands_are_reported() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return torch.relu(F.linear(x, self.weight)) + torch.relu(F.linear(x.sin(), other))

    model, args = Two().eval(), (X, torch.ones(8, 8))
    passes = (PassChoice("Fuse", {"rules": "library"}),)
    first, second = dovetail.regions(
        dovetail.fuse(dovetail.capture(model, args), dovetail.rules.library.LINEAR)
    )
    assert first.key == second.key
    bodies = {
        body_entry(region.key, describe_operands(region)): BodyDecision(
            "product", operands=describe_operands(region), backend=BackendChoice(backend)
        )
        for region, backend in ((first, "eager"), (second, "torchscript"))
    }
    plan = plan_for(model, *args, decision=GraphDecision("two", pipeline=passes), bodies=bodies)
    (problem,) = messages(dovetail.compile(model, args, plan=plan), "stale")
    assert "'torchscript' for the body" in problem
    assert f"that of '{first.name}', which has an equal body, is eager" in problem
    with pytest.raises(PlanMismatch, match="a body has one backend"):
        dovetail.compile(model, args, plan=plan, on_error="raise")


def test_operands_that_share_memory_are_described_as_such() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(x) + y, torch.relu(x) + x.view(3, 8)

    gm = dovetail.capture(Shared(), (X, X.clone()))
    adds = [node.name for node in gm.graph.nodes if "add" in node.name]
    fused = dovetail.outline(dovetail.outline(gm, adds[:1], kind="sum"), adds[1:], kind="sum")
    texts = [describe_operands(region) for region in dovetail.regions(fused)]
    assert texts == ["f32[3, 8], f32[3, 8]"] * 2
    views = dovetail.outline(dovetail.capture(Halves(), (X,)), ["add"], kind="sum")
    (text,) = [describe_operands(region) for region in dovetail.regions(views)]
    assert text.endswith("=0")


def test_a_backend_of_the_plan_that_is_not_used_is_reported() -> None:
    model = Layers().eval()
    block = block_of(captured(model))

    class Declining(Counting):
        def supports(self, region: Any) -> Any:
            return dovetail.Decline("no such kernel here")

    class Failing(Counting):
        def compile(self, region: Any, examples: Sequence[Any]) -> Any:
            raise RuntimeError("no compiler here")

    for backend, reason in (
        (Declining("mine"), "no such kernel here"),
        (Failing("mine"), "no compiler here"),
    ):
        bodies = {block.key: BodyDecision("layer", backend=BackendChoice("mine"))}
        plan = plan_for(model, X, bodies=bodies)
        fast = dovetail.compile(model, (X,), backends=["eager", backend], plan=plan)
        (problem,) = messages(fast, "stale")
        assert problem.startswith(
            f"the plan runs the body {block.key[:12]} of 'block_0' by 'mine', which is not"
        )
        assert reason in problem
        assert {r.backend for r in dovetail.regions(fast) if r.kind == "block"} == {"eager"}
        with pytest.raises(LoweringError, match=reason):
            dovetail.compile(model, (X,), backends=["eager", backend], plan=plan, on_error="raise")


def test_backends_that_do_not_exist_here_or_do_not_take_the_options() -> None:
    pytest.importorskip("onnxruntime")
    model = Layers().eval()
    block = block_of(captured(model))
    for choice, message in (
        (BackendChoice("npu"), "'npu' for the body .* of 'block_0': there is no backend 'npu'"),
        (BackendChoice("eager", {"x": 1}), "the backend 'eager' has no option 'x'"),
        (BackendChoice("inductor", {"options": "fast"}), "the backend 'inductor' cannot be constructed: "),
        (
            BackendChoice("onnxruntime", {"options": True}),
            "the backend 'onnxruntime' cannot be constructed: ",
        ),
    ):
        plan = plan_for(model, X, bodies={block.key: BodyDecision("layer", backend=choice)})
        fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
        assert {r.backend for r in dovetail.regions(fast)} == {"eager"}
        (problem,) = messages(fast, "stale")
        assert re.search(message, problem)
        with pytest.raises(PlanMismatch, match=message):
            dovetail.compile(model, (X,), backends="eager", plan=plan, on_error="raise")


def test_options_of_a_backend_are_those_of_the_plan() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    choice = BackendChoice("openvino", {"precision": "bf16"})
    plan = plan_for(model, X, bodies={block.key: BodyDecision("layer", backend=choice)})
    applied = application(plan, model).apply(captured(model), "eager")
    (chain,) = applied.bodies.values()
    assert [b.name for b in chain] == ["openvino", "eager"]
    assert chain[0] is backend_with_options("openvino", {"precision": "bf16"})
