"""The search space of a graph: its states by pass order, the options of its blocks, and what is pruned."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import Backend, Decline, InvalidGraph
from dovetail.lowering import backend_protocol
from dovetail.lowering.backend_protocol import by_name
from dovetail.outlining.region import graph_key
from dovetail.passes.pass_manager import Pipeline
from dovetail.tuning import search_space
from dovetail.tuning.decisions import BackendChoice, PassChoice
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.plan_passes import make_pass
from dovetail.tuning.preparation import prepare
from dovetail.tuning.region_candidates import Pruned, region_of
from dovetail.tuning.search_space import SearchSpace, backend_choices, explore, merge_groups, next_passes
from dovetail.tuning.store import Store
from dovetail.tuning.tune import _search_subject
from tests.tuning.plans import Layers, X
from tests.tuning.synthetic import Chain, Costs, Normalized, Planted, Siblings, SyntheticDevice

PLANTED = (Planted("a"), Planted("b"))
QKV, GATES = "aten.linear.default 4x8 to [8, 8, 8]", "aten.linear.default 4x8 to [16, 16]"
X_CHAIN = torch.randn(4, 8)
MERGE = {"materialise": True}


class Attending(nn.Module):
    """Two groups of sibling products, and a table that depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.up, self.gate = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(self.q(x) @ self.k(x).t(), -1) @ self.v(x) + torch.arange(8).cos()
        return torch.tanh(self.up(x)) * self.gate(x)


class Picky(Backend):
    """Takes products alone and raises for softmax."""

    name = "picky"

    def supports(self, region: Any) -> Any:
        targets = [str(n.target) for n in region.body.graph.nodes if n.op == "call_function"]
        if any("softmax" in target for target in targets):
            raise RuntimeError("no softmax here")
        others = [target for target in targets if "linear" not in target]
        return Decline(f"'{others[0]}' is not a product") if others else True


class Tiled(Backend):
    """Has an option that is worth trying."""

    name = "tiled"
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({"tile": 8}, {"tile": 16, "order": ["n", "m"]})

    def __init__(self, tile: int = 4, order: Sequence[str] = ("m", "n")) -> None:
        self.tile, self.order = tile, list(order)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"tile": self.tile, "order": self.order}

    def supports(self, region: Any) -> Any:
        return True


def space_of(
    model: nn.Module, *inputs: Tensor, backends: Sequence[Backend] = PLANTED, **options: Any
) -> SearchSpace:
    mode = "training" if model.training else "inference"
    args = inputs or (torch.randn(4, 8),)
    return explore(dovetail.capture(model, args), args, {}, mode, backends, **options)


@cache
def attending() -> SearchSpace:
    return space_of(Attending().eval())


def pipelines(space: SearchSpace) -> list[tuple[str, ...]]:
    return [tuple(choice.name for choice in state.pipeline) for state in space.states]


def test_a_graph_without_passes_that_change_it_has_one_state() -> None:
    space = space_of(Chain().eval())
    assert pipelines(space) == [()]
    assert space.states[0].key == space.key
    assert space.states[0].label == "no passes"
    assert space.is_complete


def test_training_steps_with_other_gradients_share_no_measurement() -> None:
    def subjects(*, frozen: bool = False, grad: bool = False, training: bool = True) -> set[str]:
        model, x = Chain().train(training), X_CHAIN.clone().requires_grad_(grad)
        model.first.weight.requires_grad_(not frozen)
        ready = prepare(model, (x,), None, PLANTED)
        with Store("sqlite://") as store:
            measurer = Measurer(store, ready.environment, SyntheticDevice(ready.space, Costs()), budget=1.0)
            blocks = DivisionSearch(ready.space, ready.tuned.mode, measurer)
            (key,) = ready.space.blocks
            regions = blocks.region_trials(key, blocks.whole(key))
            trials = [blocks.operations_trial(key), *regions]
        return {*(trial.subject.digest for trial in trials), _search_subject(ready, 1.0, None, 0).digest}

    full, frozen, whole = subjects(), subjects(frozen=True), subjects(grad=True)
    assert not full & (frozen | whole)
    assert not frozen & whole
    assert subjects() == full
    # Inference computes no gradients.
    assert subjects(training=False, frozen=True) == subjects(training=False)


def test_states_whose_blocks_are_not_derived_by_the_deadline_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = space_of(Attending().eval())
    now, derived = 0.0, list[str]()
    derive = search_space.block_space

    def late_after_the_first_state(block: Any, *args: Any, **options: Any) -> Any:
        nonlocal now
        derived.append(block.key)
        now = 10.0 * (len(derived) >= len(whole.states[0].blocks))
        return derive(block, *args, **options)

    monkeypatch.setattr(search_space, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(search_space, "block_space", late_after_the_first_state)
    space = space_of(Attending().eval(), deadline=5.0)
    assert derived == list(whole.states[0].blocks)
    assert [state.key for state in space.states] == [whole.states[0].key]
    late = {state.label for state in whole.states[1:]}
    assert late <= {one.what for one in space.pruned if one.reason == "not derived within the budget"}


def test_after_its_deadline_nothing_more_is_derived() -> None:
    space = space_of(Attending().eval(), deadline=0.0)
    assert pipelines(space) == [()]
    assert "further pass orders: not derived within the budget" in str(space)
    assert not any(block.is_expanded for block in space.blocks.values())
    assert "the parts of the block: not derived within the budget" in str(space)
    # Blocks as wholes can be measured, and their parts later if there is time.
    assert all(block.candidates for block in space.blocks.values())
    whole = {key: len(block.candidates) for key, block in space.blocks.items()}
    space.expand(space.blocks, deadline=0.0)
    assert {key: len(block.candidates) for key, block in space.blocks.items()} == whole
    space.expand(space.blocks)
    assert all(block.is_expanded for block in space.blocks.values())
    assert sum(len(block.candidates) for block in space.blocks.values()) > sum(whole.values())


def test_siblings_have_a_state_for_each_choice_of_merge_groups() -> None:
    space = attending()
    assert pipelines(space)[:5] == [(), ("FoldConstants",), *[("MergeParallel",)] * 3]
    merged = space.states[2:5]
    assert [s.pipeline[0].options for s in merged] == [
        {"groups": [QKV, GATES], **MERGE},
        {"groups": [QKV], **MERGE},
        {"groups": [GATES], **MERGE},
    ]
    # Merged groups are siblings no more.
    assert merge_groups(space.states[0].graph) == [QKV, GATES]
    assert [merge_groups(s.graph) for s in merged] == [[], [GATES], [QKV]]


def test_of_many_groups_all_and_each_alone_are_merged() -> None:
    three = search_space._subsets(["a", "b", "c"])
    assert list(three) == [("a", "b", "c"), ("a", "b"), ("a", "c"), ("b", "c"), ("a",), ("b",), ("c",)]
    four = search_space._subsets(["a", "b", "c", "d"])
    assert list(four) == [("a", "b", "c", "d"), ("a",), ("b",), ("c",), ("d",)]
    assert list(search_space._subsets([])) == []


def test_orders_that_lead_to_equal_graphs_are_one_state() -> None:
    space = attending()
    fold, merge = PassChoice("FoldConstants"), PassChoice("MergeParallel", {"groups": [QKV], **MERGE})
    first, second = (
        graph_key(Pipeline([make_pass(choice) for choice in order])(space.states[0].graph))
        for order in ([fold, merge], [merge, fold])
    )
    assert first == second
    (state,) = [s for s in space.states if s.key == first]
    assert state.pipeline == (fold, merge)
    assert len({s.key for s in space.states}) == len(space.states)
    # Breadth first, each pass once: no shorter pipeline leads to a state.
    assert [*map(len, pipelines(space))] == sorted(map(len, pipelines(space)))
    assert all(len(set(pipeline)) == len(pipeline) for pipeline in pipelines(space))


def test_orders_that_do_not_are_two() -> None:
    # Fusing the product with its activation leaves two siblings; merging first leaves nothing to fuse with.
    space = space_of(Siblings().eval())
    assert pipelines(space) == [(), ("MergeParallel",), ("Fuse", "MergeParallel")]
    assert [s.pipeline[-1].options["groups"] for s in space.states[1:]] == [
        ["aten.linear.default 4x8 to [32, 16, 4]"],
        ["aten.linear.default 4x8 to [16, 4]"],
    ]


def rounds_after(*rules: str) -> list[str]:
    earlier = [PassChoice("Fuse", {"rules": name}) for name in rules]
    graph = attending().states[0].graph
    return [c.options["rules"] for c in next_passes(graph, earlier, "inference") if c.name == "Fuse"]


def test_rounds_of_fusing_each_have_other_rules() -> None:
    assert rounds_after() == ["library", "groups"]
    assert rounds_after("library") == ["groups", "siblings"]
    assert rounds_after("groups") == ["library", "siblings"]
    assert rounds_after("library", "groups") == []


def test_what_another_round_takes_in_is_a_candidate_and_no_state() -> None:
    space = space_of(Normalized().eval(), torch.randn(4, 8), torch.randn(4, 8))
    assert pipelines(space) == [()]
    rounds = 'Fuse(rules="library") -> Fuse(rules="groups")'
    assert Pruned(rounds, "its regions are candidates without it") in space.pruned
    (block,) = space.blocks.values()
    (taken_in,) = [c for c in block.candidates if c.rules == ("fuse_library_groups",)]
    operations = [block.block.operation(k).removeprefix("aten.").split(".")[0] for k in taken_in.units]
    assert operations[:2] == ["tanh", "mul"]
    assert len(operations) == 8
    # Its body is that of the region which the pipeline makes, without the one inside.
    fused = Pipeline([make_pass(PassChoice("Fuse", {"rules": r})) for r in ("library", "groups")])(
        space.states[0].graph
    )
    (region,) = [r for r in dovetail.regions(fused) if len(r.nodes) == 8]
    assert region_of(block.block, taken_in.choice).nodes == region.nodes


def test_graphs_that_differ_by_regions_that_are_candidates_are_one_state() -> None:
    space = space_of(Siblings().eval())
    merge = str(space.states[2].pipeline[-1])
    # Groups leave the same two products to merge as the library does.
    assert str(space.states[2].pipeline[0]) == 'Fuse(rules="library")'
    same = Pruned(f'Fuse(rules="groups") -> {merge}', "its regions are candidates without it")
    assert same in space.pruned


def test_fusing_alone_is_pruned_with_its_reason() -> None:
    space = space_of(Siblings().eval())
    fused = Pruned('Fuse(rules="library")', "its regions are candidates without it")
    assert fused in space.pruned
    assert ("Fuse",) not in pipelines(space)
    assert 'pruned: Fuse(rules="library"): its regions are candidates without it' in str(space).splitlines()


def test_a_pass_that_refuses_a_graph_is_pruned_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(choice: PassChoice) -> Any:
        def refuse(gm: Any) -> Any:
            raise InvalidGraph("'cos' has no constant operands")

        return refuse if choice.name == "FoldConstants" else make_pass(choice)

    monkeypatch.setattr(search_space, "make_pass", make)
    space = space_of(Siblings().eval())
    assert pipelines(space) == [(), ("MergeParallel",), ("Fuse", "MergeParallel")]
    assert Pruned("FoldConstants() after 0 passes", "'cos' has no constant operands") in space.pruned
    assert "pruned: FoldConstants() after 0 passes: 'cos' has no constant operands" in str(space)


def test_more_states_than_the_limit_are_sampled() -> None:
    complete = attending()
    assert complete.is_complete
    assert "sampled" not in str(complete)
    count = len(complete.states)
    assert count > 5
    limited = space_of(Attending().eval(), max_states=5)
    assert not limited.is_complete
    assert [s.key for s in limited.states] == [s.key for s in complete.states[:5]]
    reason = "more than 5 distinct graphs; they are sampled"
    assert limited.pruned[-1] == Pruned("further pass orders", reason)
    assert f"pruned: further pass orders: {reason}" in str(limited).splitlines()


def test_as_many_states_as_the_limit_are_complete() -> None:
    assert space_of(Siblings().eval(), max_states=3).is_complete
    assert not space_of(Siblings().eval(), max_states=2).is_complete


def test_training_has_no_passes_that_fold_weights_or_keep_copies_of_them() -> None:
    space = space_of(Attending().train(), torch.randn(4, 8, requires_grad=True))
    names = {name for pipeline in pipelines(space) for name in pipeline}
    assert "MergeParallel" in names
    assert not names & {"FoldConstants", "FoldConvBatchNorm"}
    options = [c.options for s in space.states for c in s.pipeline if c.name == "MergeParallel"]
    assert {"groups": [QKV, GATES]} in options
    assert not any("materialise" in each for each in options)
    inference = {name for pipeline in pipelines(attending()) for name in pipeline}
    assert "FoldConstants" in inference


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))


def test_convolutions_have_states_in_another_memory_format_and_with_their_norm_folded() -> None:
    x = torch.randn(1, 3, 8, 8)
    inference = space_of(Convolution().eval(), x)
    assert {("FoldConvBatchNorm",), ("ChannelsLast",), ("FoldConvBatchNorm", "ChannelsLast")} <= set(
        pipelines(inference)
    )
    training = space_of(Convolution().train(), x)
    assert pipelines(training) == [(), ("ChannelsLast",)]
    assert training.states[1].pipeline[0].options == {"materialise": False}


def test_options_of_a_backend_are_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend_protocol._BUILT_IN, "tiled", (__name__, "Tiled"))
    known = by_name("tiled")
    choices = backend_choices([known])
    assert list(choices) == ["tiled", "tiled(tile=8)", 'tiled(tile=16, order=["n", "m"])']
    assert [(b.tile, b.order) for _, b in choices.values() if isinstance(b, Tiled)] == [
        (4, ["m", "n"]),
        (8, ["m", "n"]),
        (16, ["n", "m"]),
    ]
    space = space_of(Chain().eval(), backends=[known])
    assert space.backends == [BackendChoice("tiled"), *(BackendChoice("tiled", v) for v in Tiled.variants)]
    (block,) = space.blocks.values()
    assert all(each == space.backends for each in block.backends.values())
    assert block.options == 3 * len(block.candidates)
    assert space.backend("tiled(tile=8)") == BackendChoice("tiled", {"tile": 8})
    identities = [space.identity_of(choice) for choice in space.backends]
    assert len(set(identities)) == 3
    # A backend that was constructed by the caller has the options that it was constructed with.
    assert list(backend_choices([Tiled(32)])) == ["tiled"]


def test_a_backend_that_does_not_support_a_region_is_pruned_with_its_reason() -> None:
    space = space_of(Attending().eval(), backends=[Planted("a"), Picky()], max_states=1)
    (block,) = space.blocks.values()
    names = [[b.name for b in block.backends[n]] for n in range(len(block.candidates))]
    products = [all("linear" in block.block.operation(k) for k in c.units) for c in block.candidates]
    assert names == [["a", "picky"] if is_product else ["a"] for is_product in products]
    assert sum(products) == 7
    whole = block.candidates[0]
    assert (
        Pruned(f"{whole.label} by picky", "`supports` raised RuntimeError: no softmax here") in block.pruned
    )
    declined = [p for p in block.pruned if p.what == "linear_activation of 2 operations by picky"]
    assert [p.reason for p in declined] == ["'aten.tanh.default' is not a product"]
    text = str(space)
    for pruned in block.pruned:
        assert f"  pruned: {pruned.what}: {pruned.reason}" in text.splitlines()
    assert not [p for p in block.pruned if p.what.endswith("by a")]


def test_equal_bodies_are_refused_once() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x)).sort().values))

    space = space_of(Twins().eval(), backends=[Picky()])
    (block,) = space.blocks.values()
    twins = [c for c in block.candidates if c.choice.kind == "linear_activation"]
    assert len(twins) == 2
    assert len({c.key for c in twins}) == 1
    assert [p.what for p in block.pruned].count("linear_activation of 2 operations by picky") == 1


def test_without_backends_there_is_nothing_to_choose() -> None:
    space = space_of(Chain().eval(), backends=())
    assert (space.options, space.log10_programs) == (0, 0.0)
    assert str(space).splitlines()[:2] == [
        "at least 10^0 programs: 1 state of the graph, 1 distinct block, 0 pairs of region and backend",
        "backends: none",
    ]


def test_the_number_of_programs_is_a_lower_bound() -> None:
    space = space_of(Chain().eval())
    (block,) = space.blocks.values()
    # Three products alone and nothing else: each as it is, by `a` or by `b`.
    assert block.log10_divisions == pytest.approx(3 * math.log10(3))
    assert space.log10_programs == pytest.approx(3 * math.log10(3))
    assert space.options == 2 * len(block.candidates)


def test_equal_layers_are_one_block_and_its_calls_are_counted() -> None:
    space = space_of(Layers(depth=4).eval(), X)
    (key,) = [k for k, b in space.states[0].blocks.items() if b.calls > 1]
    assert space.calls(key) == 4
    assert space.calls("another key") == 0
    assert len(space.blocks) == 3
    assert f"state {space.key[:12]}: no passes (6 calls of 3 blocks)" in str(space).splitlines()
    assert [len(s.blocks) for s in space.states] == [3] * len(space.states)


def test_what_is_pruned_twice_is_recorded_once() -> None:
    (block,) = space_of(Chain().eval()).blocks.values()
    count = len(block.pruned)
    for _ in range(2):
        block.prune(Pruned("parts of the block by a", "it is slow"))
    assert block.pruned[count:] == [Pruned("parts of the block by a", "it is slow")]


def test_states_share_the_blocks_that_they_have_in_common() -> None:
    space = attending()
    keys = {key for state in space.states for key in state.blocks}
    assert set(space.blocks) == keys
    assert all(space.blocks[key].block.inputs or not space.blocks[key].operands for key in keys)
