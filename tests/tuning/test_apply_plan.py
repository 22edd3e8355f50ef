"""Applying plans: passes, regions and backends are those of the plan, and what it does not have follows the defaults."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
import dovetail.zoo
from dovetail import InvalidArgument, Plan, PlanMismatch
from dovetail.outlining.region import graph_key
from dovetail.tuning.apply_plan import PlanApplication, environment_of
from dovetail.tuning.check_plan import capture_for_plan
from dovetail.tuning.decisions import (
    BackendChoice,
    BlockDecision,
    BodyDecision,
    GraphDecision,
    PassChoice,
    RegionChoice,
)
from dovetail.tuning.plan_passes import make_pass
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
    kinds,
    messages,
    plan_for,
    positions,
)


def test_blocks_are_divided_as_the_plan_has_it_and_others_by_default() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    plan = plan_for(model, X, decision=GraphDecision("layers"), divided={block.key: halves(block)})
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["head", "tail"] * 3, "rest"]
    assert torch.equal(fast(X), model(X))
    heads = [r for r in dovetail.regions(fast) if r.kind == "head"]
    assert len({r.key for r in heads}) == 1
    assert [len(r.nodes) for r in heads] == [2] * 3
    (unknown,) = messages(fast, "unplanned")
    assert unknown.startswith("the plan has no decision for the block ")
    assert unknown.endswith(": the defaults are used")
    # Without the plan, or if it were ignored, the blocks are whole.
    assert kinds(dovetail.compile(model, (X,), backends="eager")) == ["rest", *["block"] * 3, "rest"]


def test_positions_are_those_of_the_nodes_of_the_body_without_its_output() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    names = [node.name for node in block.body.graph.nodes]
    operands = len(block.inputs)
    assert [node.op for node in block.body.graph.nodes][:operands] == ["placeholder"] * operands
    for i in range(operands, len(names) - 1):
        one = BlockDecision("one", regions=(RegionChoice("one", (i,)),))
        applied = application(plan_for(model, X, divided={block.key: one}), model).apply(captured(model))
        ones = [r for r in dovetail.regions(applied.graph) if r.kind == "one"]
        assert [r.nodes[0].rstrip("_0123456789") for r in ones] == [names[i].rstrip("_0123456789")] * 3


def test_what_is_in_no_region_runs_as_it_is() -> None:
    model = Layers().eval()
    gm = captured(model)
    nothing = {region.key: BlockDecision("nothing") for region in blocks_of(gm)}
    fast = dovetail.compile(model, (X,), plan=plan_for(model, X, divided=nothing))
    assert kinds(fast) == []
    assert torch.equal(fast(X), model(X))
    assert not [m for m in messages(fast, "unplanned") if "block" in m]


def test_attributes_arguments_and_results_reach_the_region() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    linear, relu = positions(block, "linear", "relu")
    choice = RegionChoice("npu.act", (linear, relu), 3, {"alpha": 0.5}, {"x": 0}, (relu,), "mine")
    divided = {block.key: BlockDecision("layer", regions=(choice,))}
    applied = application(plan_for(model, X, divided=divided), model).apply(captured(model))
    region = next(r for r in dovetail.regions(applied.graph) if r.kind == "npu.act")
    assert (region.version, region.attrs, region.rule) == (3, {"alpha": 0.5}, "mine")
    assert region.arguments == {"x": 0}
    assert region.results == (0,)


class Crossing(Layers):
    """In each layer the sum is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.relu(layer(x)) + 1
            x = y * 2 + y.cos()
        return x


@pytest.mark.parametrize(
    ("escapes", "outputs", "nodes"),
    [
        ({}, 1, 2),
        ({"*": "output"}, 2, 2),
        ({"add": "output"}, 2, 2),
        ({"*": "duplicate"}, 1, 2),
        ({"*": "leave"}, 1, 1),
        ({"*": "leave", "add": "output"}, 2, 2),
        ({"*": "refuse", "add": "leave"}, 1, 1),
        ({"*": "output", "add": "leave"}, 1, 1),
    ],
)
def test_policies_for_escaping_values_reach_the_region(
    escapes: dict[str, str], outputs: int, nodes: int
) -> None:
    model = Crossing().eval()
    block = block_of(captured(model))
    add, mul = (positions(block, name)[0] for name in ("add", "mul"))
    at = {"*": "*", "add": str(add)}
    choice = RegionChoice("act", (add, mul), escapes={at[name]: policy for name, policy in escapes.items()})
    divided = {block.key: BlockDecision("layer", regions=(choice,))}
    applied = application(plan_for(model, X, divided=divided), model).apply(captured(model))
    assert not applied.problems
    act = next(r for r in dovetail.regions(applied.graph) if r.kind == "act")
    assert (len(act.outputs), len(act.nodes)) == (outputs, nodes)
    assert torch.equal(applied.graph(X), model(X))


def test_the_whole_graph_may_be_one_region() -> None:
    model = Layers().eval()
    plan = plan_for(model, X, decision=GraphDecision("layers", whole=BackendChoice("fake")))
    fast = dovetail.compile(model, (X,), backends=["eager", Fake()], plan=plan)
    assert [(r.kind, r.backend) for r in dovetail.regions(fast)] == [("whole", "fake")]
    assert torch.equal(fast(X), 2 * model(X))
    assert not fast.diagnostics
    plan = plan_for(model, X, decision=GraphDecision("layers", whole=BackendChoice("npu")))
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["block"] * 3, "rest"]
    assert "there is no backend 'npu'" in messages(fast, "stale")[0]


@pytest.mark.parametrize("name", ["resnet", "moe"])
def test_the_whole_of_a_model_that_writes_its_state(name: str) -> None:
    zoo = dovetail.zoo.get(name)
    model, inputs = zoo.build("tiny").train(), zoo.example_inputs("tiny")
    expected = copy.deepcopy(model)
    gm = capture_for_plan(model, inputs.args, inputs.kwargs)
    plan = Plan().with_decisions(
        "training",
        environment_of(gm),
        graphs={graph_key(gm): GraphDecision(name, whole=BackendChoice("eager"))},
    )
    fast = dovetail.compile(model, inputs.args, inputs.kwargs, plan=plan)
    assert kinds(fast) == ["whole"]
    assert not messages(fast, "stale")
    with torch.random.fork_rng():
        results = fast(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(results, expected(*inputs.args, **inputs.kwargs))
    torch.testing.assert_close(dict(fast.state_dict()), dict(expected.state_dict()))


def test_a_graph_of_one_operation_may_be_one_region() -> None:
    """No estimate of what it saves refuses what was measured."""
    model = nn.Linear(8, 8).eval()
    plan = plan_for(model, X, decision=GraphDecision("one", whole=BackendChoice("fake")))
    compiled = dovetail.compile(model, (X,), plan=plan, backends=[Fake()], on_error="raise")
    assert torch.equal(compiled(X), 2 * model(X))


def test_a_graph_without_operations_is_not_a_region() -> None:
    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = Identity().eval()
    plan = plan_for(model, X, decision=GraphDecision("identity", whole=BackendChoice("eager")))
    fast = dovetail.compile(model, (X,), plan=plan)
    assert torch.equal(fast(X), X)
    assert "the graph cannot be one region" in messages(fast, "stale")[0]


def test_a_second_model_with_the_same_block_uses_its_entries() -> None:
    model, deeper = Layers(3).eval(), Layers(5).eval()
    block = block_of(captured(model))
    plan = plan_for(model, X, decision=GraphDecision("three"), divided={block.key: halves(block)})
    fast = dovetail.compile(deeper, (X,), backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["head", "tail"] * 5, "rest"]
    assert torch.equal(fast(X), deeper(X))
    (unknown,) = messages(fast, "unplanned")
    assert unknown.startswith("the plan has no decision for the graph ")
    other_weights = dovetail.compile(Layers(3).eval(), (X,), backends="eager", plan=plan)
    assert "the graph" not in messages(other_weights, "unplanned")[0]


def test_a_graph_of_which_nothing_is_known_follows_the_defaults_exactly() -> None:
    model, other = Layers().eval(), dovetail.zoo.get("llama")
    block = block_of(captured(model))
    plan = plan_for(model, X, decision=GraphDecision("layers"), divided={block.key: halves(block)})

    class Norms(Counting):
        kernels: Any = {"rms_norm": lambda x, weight, eps: x}  # noqa: RUF012

        def supports(self, region: Any) -> Any:
            return True

    inputs = other.example_inputs("tiny")
    llama = other.build("tiny").eval()
    for backends in ("eager", Norms()):
        default = dovetail.compile(llama, inputs.args, backends=backends)
        fast = dovetail.compile(llama, inputs.args, backends=backends, plan=plan)
        assert dovetail.text(fast.graphs[0]) == dovetail.text(default.graphs[0])
        assert messages(fast, "unplanned")


def test_times_of_another_device_and_mode_are_not_used_and_of_another_torch_are_reported() -> None:
    model = Layers().eval()
    gm = captured(model)
    block, here = block_of(gm), environment_of(gm)
    plan = plan_for(model, X, divided={block.key: halves(block)})

    def moved(environment: Any, mode: Any = "inference") -> Any:
        return Plan().with_decisions(mode, environment, blocks={block.key: halves(block)})

    elsewhere = dovetail.compile(model, (X,), backends="eager", plan=moved(replace(here, device="npu: 3")))
    assert "head" not in kinds(elsewhere)
    assert f"the block {block.key[:12]} (only for inference on npu: 3)" in messages(elsewhere, "unplanned")[0]
    trained = dovetail.compile(model, (X,), backends="eager", plan=moved(here, "training"))
    assert "head" not in kinds(trained)
    older = dovetail.compile(model, (X,), backends="eager", plan=moved(replace(here, torch="2.0")))
    assert "head" in kinds(older)
    assert messages(older, "environment") == [
        f"the plan was measured in another environment: torch {here.torch}, was 2.0"
    ]
    both = plan | moved(replace(here, torch="2.0"))
    assert not messages(dovetail.compile(model, (X,), backends="eager", plan=both), "environment")


def test_a_plan_for_training_is_for_models_in_train_mode() -> None:
    model = Layers().train()
    block = block_of(captured(model))
    plan = plan_for(model, X, decision=GraphDecision("layers"), divided={block.key: halves(block)})
    assert {scope.mode for scope in plan.blocks[block.key]} == {"training"}
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert "head" in kinds(fast)
    expected = copy.deepcopy(model)
    fast(X).sum().backward()
    expected(X).sum().backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    fast.eval()
    fast(X)
    assert "head" not in [r.kind for r in dovetail.regions(fast.graphs[1])]
    assert "(only for training on" in messages(fast, "unplanned")[-1]


def test_a_region_that_is_refused_is_reported_and_the_others_are_used() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    # `linear` and `add` without what is between them would depend on themselves.
    loop = RegionChoice("loop", positions(block, "linear", "add"))
    cos = RegionChoice("cos", positions(block, "cos"))
    plan = plan_for(model, X, divided={block.key: BlockDecision("layer", regions=(loop, cos))})
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert kinds(fast).count("cos") == 3
    assert "loop" not in kinds(fast)
    assert torch.equal(fast(X), model(X))
    (problem,) = messages(fast, "stale")
    assert f"a region 'loop' of the block {block.key[:12]} is refused" in problem
    assert "would depend on itself" in problem
    with pytest.raises(PlanMismatch, match="'loop'"):
        dovetail.compile(model, (X,), backends="eager", plan=plan, on_error="raise")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (RegionChoice("a", ()), "a region of kind 'a' has no operations"),
        (RegionChoice("a", (0,)), "position 0 is not an operation of the block, which are 3 to 7"),
        (RegionChoice("a", (99,)), "position 99 is not an operation of the block"),
        (RegionChoice("a", (-1,)), "position -1 is not an operation of the block"),
        (RegionChoice("a", (3, 3)), "position 3 is in two regions, or in one twice"),
        (RegionChoice("a b", (3,)), "kind 'a b' is not a dotted name"),
        (RegionChoice("a", (3,), escapes={"x": "output"}), "'x' in escapes is neither a position"),
        (RegionChoice("a", (3,), escapes={"9": "output"}), "'9' in escapes is neither a position"),
        (RegionChoice("a", (3,), escapes={"*": "drop"}), "escapes 'drop' is not one of auto, output"),
        (RegionChoice("a", (3,), arguments={"x": 12}), "position 12 is not in the block, which has 8"),
        (RegionChoice("a", (3,), results=(None, 8)), "position 8 is not in the block, which has 8"),
    ],
)
def test_a_decision_that_does_not_describe_the_block_is_not_used(choice: RegionChoice, message: str) -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    plan = plan_for(model, X, divided={block.key: BlockDecision("layer", regions=(choice,))})
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["block"] * 3, "rest"]
    (problem,) = messages(fast, "stale")
    assert f"'layer' for the block {block.key[:12]}: {message}" in problem


def test_constants_may_be_in_two_regions() -> None:
    class Shifted(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                shift = torch.tensor([1.0, 2.0] * 4)
                x = (torch.relu(layer(x)) + shift) * 2 - shift
            return x

    model = Shifted().eval()
    block = block_of(captured(model))
    nodes = [node for node in block.body.graph.nodes if node.op != "output"]
    constants = tuple(i for i, node in enumerate(nodes) if node.op == "get_attr")
    regions = (
        RegionChoice("head", (*constants, *positions(block, "linear", "relu", "add"))),
        RegionChoice("tail", (*constants, *positions(block, "mul", "sub"))),
    )
    plan = plan_for(model, X, divided={block.key: BlockDecision("layer", regions=regions)})
    fast = dovetail.compile(model, (X,), backends="eager", plan=plan)
    assert [k for k in kinds(fast) if k != "rest"] == ["head", "tail"] * 3
    assert not messages(fast, "stale")
    assert torch.equal(fast(X), model(X))


def test_regions_of_the_passes_are_kept_and_may_be_inside_planned_ones() -> None:
    zoo = dovetail.zoo.get("llama")
    model, inputs = zoo.build("tiny").eval(), zoo.example_inputs("tiny")
    gm = capture_for_plan(model, inputs.args)
    fused = make_pass(PassChoice("Fuse", {"rules": "library"}))(gm)
    block = next(r for r in blocks_of(fused) if r.kind == "block")
    nodes = [node for node in block.body.graph.nodes if node.op != "output"]
    inner = [i for i, node in enumerate(nodes) if node.op == "call_module"]
    assert inner
    everything = tuple(range(len(block.inputs), len(nodes)))
    plan = plan_for(
        model,
        *inputs.args,
        decision=GraphDecision("llama", pipeline=(PassChoice("Fuse", {"rules": "library"}),)),
        divided={block.key: BlockDecision("layer", regions=(RegionChoice("layer", everything),))},
    )
    applied = PlanApplication(plan, "inference", environment_of(gm)).apply(gm, "eager")
    named = [r.name for r in dovetail.regions(applied.graph, nested=True)]
    assert "layer_0" in named
    assert [name for name in named if name.startswith("layer_0/")]
    # A body that runs as it is has nothing inside that is lowered.
    layer = next(r for r in dovetail.regions(applied.graph) if r.kind == "layer")
    plan = plan | plan_for(model, *inputs.args, bodies={layer.key: BodyDecision("layer")})
    fast = dovetail.compile(model, inputs.args, backends="eager", plan=plan)
    backends = {r.name: r.backend for r in dovetail.regions(fast, nested=True)}
    assert {b for name, b in backends.items() if name.startswith("layer_")} == {None}
    assert "eager" in backends.values()
    assert torch.equal(fast(*inputs.args), model(*inputs.args))


def test_plans_may_be_paths_and_mappings_and_nothing_else(tmp_path: Path) -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    plan = plan_for(model, X, divided={block.key: halves(block)})
    path = tmp_path / "plan.json"
    plan.save(path)
    for given in (plan, path, str(path)):
        assert "head" in kinds(dovetail.compile(model, (X,), backends="eager", plan=given))
    by_body = dovetail.compile(model, (X,), backends=[], plan={block.key: "eager"})
    assert {r.kind: r.backend for r in dovetail.regions(by_body)} == {"rest": None, "block": "eager"}
    gm = dovetail.fuse(dovetail.capture(model, (X,)), dovetail.rules.repeats())
    with pytest.raises(InvalidArgument, match=r"plan Plan\(.*a dovetail.Plan goes to `compile`"):
        dovetail.lower(gm, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="give a plan or rules"):
        dovetail.compile(model, (X,), plan=plan, rules=dovetail.rules.DEFAULT)
    with pytest.raises(InvalidArgument, match="give a plan or a pipeline"):
        dovetail.compile(model, (X,), plan=path, pipeline=[dovetail.Cleanup()])
    with pytest.raises(InvalidArgument, match=r"give a dovetail\.Plan, the path of one, or a mapping"):
        dovetail.compile(model, (X,), plan=Plan)  # type: ignore[arg-type]


def test_backends_by_kind_are_for_what_the_plan_does_not_know() -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    plan = plan_for(model, X, divided={block.key: halves(block)})
    counting = Counting("mine")
    fast = dovetail.compile(model, (X,), backends={"head": counting, "*": "eager"}, plan=plan)
    assert {(r.kind, r.backend) for r in dovetail.regions(fast)} == {
        ("head", "mine"),
        ("tail", "eager"),
        ("rest", "eager"),
    }


def test_unknown_things_are_logged_at_level_info_and_stale_ones_as_warnings(caplog: Any) -> None:
    model = Layers().eval()
    block = block_of(captured(model))
    wrong = BlockDecision("layer", regions=(RegionChoice("a", (99,)),))
    with caplog.at_level("INFO", "dovetail"):
        fast = dovetail.compile(
            model, (X,), backends="eager", plan=plan_for(model, X, divided={block.key: wrong}), cache=False
        )
    levels = {r.message.split(" ")[1]: r.levelname for r in caplog.records if r.name == "dovetail"}
    assert levels == {"decision": "WARNING", "plan": "INFO"}
    assert dovetail.explain(fast).diagnostics == tuple(map(str, fast.diagnostics))
    assert [event.kind for event in fast.diagnostics] == ["stale", "unplanned"]
    fast(X)
    assert len(fast.diagnostics) == 2


def test_models_of_others_with_random_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    tokens = {"input_ids": torch.arange(8).reshape(1, 8), "attention_mask": torch.ones(1, 8)}
    gm = capture_for_plan(model, (), tokens)
    block = next(r for r in blocks_of(gm) if r.kind == "block")
    nodes = [node for node in block.body.graph.nodes if node.op != "output"]
    cut = positions(block, "scaled_dot_product_attention")[0]
    regions = (
        RegionChoice("before", tuple(range(len(block.inputs), cut))),
        RegionChoice("after", tuple(range(cut + 1, len(nodes)))),
    )
    plan = plan_for(
        model,
        decision=GraphDecision("bert"),
        divided={block.key: BlockDecision("layer", regions=regions)},
        **tokens,
    )
    fast = dovetail.compile(model, (), tokens, backends="eager", plan=plan)
    assert kinds(fast) == ["rest", *["before", "after"] * 2, "rest"]
    with torch.no_grad():
        torch.testing.assert_close(fast(**tokens).last_hidden_state, model(**tokens).last_hidden_state)
    assert not messages(fast, "stale")
