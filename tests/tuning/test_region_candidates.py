"""Candidates of a block: what the rules propose, the keys of their bodies, and what is pruned."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import Backend, Decline
from dovetail.outlining.region import Region, regions
from dovetail.passes.pass_manager import Pipeline
from dovetail.tuning.block import Block, blocks_of
from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.plan_passes import make_pass
from dovetail.tuning.region_candidates import (
    EXISTING,
    MAX_CANDIDATES,
    Pruned,
    RegionCandidate,
    candidate_operands,
    candidates_of,
    outlined_with,
    region_of,
    why_unsupported,
)
from tests.tuning.plans import Layers, X
from tests.tuning.synthetic import Chain, Planted, Siblings
from tests.zoo_graphs import zoo_graph

ZOO = ("llama", "bert")


class Without(Backend):
    """Takes regions without one operator."""

    def __init__(self, operator: str) -> None:
        self.name, self.operator = f"without_{operator}", operator

    def supports(self, region: Region) -> Any:
        targets = [str(node.target) for node in region.body.graph.nodes if node.op == "call_function"]
        return Decline(f"it has no {self.operator}") if any(self.operator in t for t in targets) else True


class Unable(Backend):
    name = "unable"

    def supports(self, region: Region) -> Any:
        raise KeyError(region.kind)


def block_of(model: nn.Module, *inputs: Tensor) -> Block:
    """The largest block of a model."""
    return largest(dovetail.capture(model.eval(), inputs or (torch.randn(4, 8),)))


def largest(gm: GraphModule) -> Block:
    return max(blocks_of(gm)[0].values(), key=lambda block: len(block.units))


@cache
def llama() -> tuple[Block, list[RegionCandidate]]:
    block = largest(zoo_graph("llama"))
    candidates, pruned = candidates_of(block, [])
    assert pruned == []
    return block, candidates


def operations(block: Block, candidate: RegionCandidate) -> list[str]:
    return [block.operation(k).split(".")[1] for k in sorted(candidate.units)]


def by_rule(block: Block, candidates: list[RegionCandidate], rule: str) -> list[list[str]]:
    return [operations(block, c) for c in candidates if rule in c.rules]


def test_every_kind_of_rule_proposes() -> None:
    block = block_of(Chain())
    candidates, pruned = candidates_of(block, [])
    assert pruned == []
    names = ["linear", "relu", "mul", "linear", "gelu", "linear", "tanh", "add"]
    assert [block.operation(k).split(".")[1] for k in range(len(block.units))] == names
    proposed = {rule: by_rule(block, candidates, rule) for c in candidates for rule in c.rules}
    assert proposed == {
        "whole": [names],
        "modules": [names],
        "linear_relu": [["linear", "relu"]],
        "linear_gelu": [["linear", "gelu"]],
        "linear_tanh": [["linear", "tanh"]],
        "groups": [["linear", "relu", "mul"], ["linear", "tanh", "add"], ["linear", "gelu"]],
        "fuse_default": [["linear", "relu"], ["linear", "gelu"], ["linear", "tanh"]],
        "fuse_groups": [["linear", "relu", "mul"], ["linear", "tanh", "add"], ["linear", "gelu"]],
        "anchors": [["linear"]] * 3,
    }


def test_a_set_that_rules_agree_on_is_one_candidate_of_the_library_kind() -> None:
    block = block_of(Chain())
    candidates, _ = candidates_of(block, [])
    assert len({(c.units, c.key) for c in candidates}) == len(candidates)
    (gelu,) = [c for c in candidates if "linear_gelu" in c.rules]
    assert gelu.rules == ("linear_gelu", "groups", "fuse_default", "fuse_groups")
    choice = gelu.choice
    assert (choice.kind, choice.rule, choice.version) == ("linear_activation", "linear_gelu", 2)
    assert choice.attrs["activation"] == "gelu"
    nodes = block.context.nodes
    assert {name: nodes[i].name for name, i in choice.arguments.items()} == {
        "x": "mul",
        "weight": "middle_weight",
        "bias": "middle_bias",
    }
    assert [nodes[i].name for i in choice.results if i is not None] == ["gelu"]
    assert gelu.label == "linear_activation of 2 operations"


def test_candidates_overlap_and_those_of_most_operations_come_first() -> None:
    block, candidates = llama()
    sizes = [len(c.units) for c in candidates]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == len(block.units)
    units = {c.choice.kind: c.units for c in reversed(candidates)}
    # The residual is in the norm that reads it and in the product that it is added to; neither has the other.
    norm, product = units["add_rms_norm"], units["linear_residual"]
    assert norm & product
    assert norm - product
    assert product - norm
    assert [c for c in candidates if c.choice.kind == "rms_norm" and c.units < norm]


def test_a_transformer_block_has_candidates_of_every_kind() -> None:
    block, candidates = llama()
    kinds = {c.choice.kind for c in candidates}
    library = {"attention", "rotary", "rms_norm", "add_rms_norm", "swiglu", "linear_residual"}
    assert library | {"module", "group", "siblings", "anchor"} <= kinds
    siblings = by_rule(block, candidates, "siblings")
    assert ["linear"] * 3 in siblings
    assert ["linear"] * 2 in siblings
    modules = [c for c in candidates if "modules" in c.rules]
    # The layer, its attention, its norms and its MLP; a product alone is an anchor.
    assert len(modules[0].units) == len(block.units)
    assert [operations(block, c) for c in modules if len(c.units) == 5] == [
        ["linear", "silu", "linear", "mul", "linear"]
    ]
    assert all(len(c.units) > 1 for c in modules)
    anchors = by_rule(block, candidates, "anchors")
    assert anchors == [*[["linear"]] * 3, ["scaled_dot_product_attention"], *[["linear"]] * 4]


def test_a_single_operation_that_is_no_anchor_is_no_candidate() -> None:
    _, candidates = llama()
    alone = [c for c in candidates if len(c.units) == 1]
    assert alone
    assert {c.rules for c in alone} == {("anchors",)}
    (pointwise,), _ = candidates_of(block_of(Layers(depth=0), X), [])
    assert len(pointwise.units) == 4


@pytest.mark.parametrize("name", ZOO)
def test_the_key_of_a_candidate_is_that_of_its_region(name: str) -> None:
    for block in blocks_of(zoo_graph(name))[0].values():
        for candidate in candidates_of(block, [])[0]:
            region = region_of(block, candidate.choice)
            assert region.key == candidate.key
            assert region.kind == candidate.choice.kind
            own = {block.context.nodes[i].name for k in candidate.units for i in block.units[k]}
            assert own <= set(region.nodes) | {region.name}


def test_equal_bodies_have_equal_keys_and_others_do_not() -> None:
    block, candidates = llama()
    norms = [c for c in candidates if "rms_norm" in c.rules and len(c.units) == 6]
    assert len(norms) == 2
    assert norms[0].units.isdisjoint(norms[1].units)
    assert norms[0].key == norms[1].key
    rotaries = [c for c in candidates if c.choice.rule == "rotary"]
    # The same operations of queries and keys, which have another number of heads.
    assert operations(block, rotaries[0]) == operations(block, rotaries[1])
    assert rotaries[0].key != rotaries[1].key
    by_key: dict[str, set[tuple[str, ...]]] = {}
    for candidate in candidates:
        by_key.setdefault(candidate.key, set()).add(tuple(operations(block, candidate)))
    assert {len(each) for each in by_key.values()} == {1}


def test_outlining_disjoint_candidates_gives_the_values_of_the_block() -> None:
    block = block_of(Chain())
    x = torch.randn(4, 8)
    groups = [c.choice for c in candidates_of(block, [])[0] if c.choice.kind == "group"]
    outlined = outlined_with(block, groups)
    assert [r.kind for r in regions(outlined)] == ["group", "group"]
    assert torch.equal(outlined(x)[0], block.program(x)[0])
    assert outlined_with(block, []) is block.program
    assert regions(block.program) == []


def test_a_backend_that_takes_a_part_has_its_partition() -> None:
    block = block_of(Chain())
    candidates, pruned = candidates_of(block, [Without("gelu"), Without("linear")])
    assert pruned == []
    assert by_rule(block, candidates, "partition_without_gelu") == [
        ["linear", "relu", "mul", "linear"],
        ["linear", "tanh", "add"],
    ]
    assert by_rule(block, candidates, "partition_without_linear") == [["relu", "mul"], ["tanh", "add"]]


@pytest.mark.parametrize("backend", [Planted("all"), Unable()], ids=["all", "none"])
def test_a_backend_that_takes_all_or_nothing_has_none(backend: Backend) -> None:
    block = block_of(Chain())
    candidates, _ = candidates_of(block, [backend])
    assert [c.key for c in candidates] == [c.key for c in candidates_of(block, [])[0]]
    assert not [c for c in candidates if any(rule.startswith("partition") for rule in c.rules)]


def test_the_reason_why_a_backend_does_not_take_a_region() -> None:
    block = block_of(Chain())
    whole = region_of(block, candidates_of(block, [])[0][0].choice)
    assert why_unsupported(whole, Planted("all")) is None
    assert why_unsupported(whole, Without("gelu")) == "it has no gelu"
    assert why_unsupported(whole, Unable()) == "`supports` raised KeyError: 'whole'"


def test_a_set_that_is_not_convex_is_pruned_with_the_node_between() -> None:
    block = block_of(Chain())
    nodes = {node.name: node for node in block.program.graph.nodes}
    # As if one module had computed both, and another one the activation between them.
    around = {"around": ("around", "Around")}
    for name in ("linear", "mul"):
        nodes[name].meta["nn_module_stack"] = nodes[name].meta["nn_module_stack"] | around
    candidates, pruned = candidates_of(block, [])
    reason = "it is not convex: 'relu' is between its operations"
    assert pruned == [Pruned("module by 'modules'", reason)]
    assert frozenset([0, 2]) not in {c.units for c in candidates}
    nodes["relu"].meta["nn_module_stack"] = nodes["relu"].meta["nn_module_stack"] | around
    candidates, pruned = candidates_of(block, [])
    assert pruned == []
    (whole,) = [c for c in candidates if c.units == frozenset([0, 1, 2])]
    assert "modules" in whole.rules


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_keeps_the_largest_and_the_smallest_bodies(limit: int) -> None:
    block = block_of(Chain())
    everything, _ = candidates_of(block, [])
    assert len({c.key for c in everything}) == len(everything) == 9 < MAX_CANDIDATES
    kept, pruned = candidates_of(block, [], limit=limit)
    largest, smallest = limit - limit // 2, limit // 2
    assert kept == [*everything[:largest], *everything[9 - smallest :]]
    reason = f"more than {limit} distinct candidates in the block"
    assert {p.reason for p in pruned} == {reason}
    labels = [c.label for c in everything[largest : 9 - smallest]]
    expected = {
        label if labels.count(label) == 1 else f"{label} ({labels.count(label)} times)" for label in labels
    }
    assert {p.what for p in pruned} == expected


def test_within_the_limit_nothing_is_pruned() -> None:
    block = block_of(Chain())
    everything, _ = candidates_of(block, [])
    for limit in (9, 10, 48):
        assert candidates_of(block, [], limit=limit) == (everything, [])


def test_the_limit_is_on_distinct_bodies() -> None:
    block, everything = llama()
    keys = list(dict.fromkeys(c.key for c in everything))
    assert len(keys) < len(everything)
    kept, pruned = candidates_of(block, [], limit=len(keys))
    assert (kept, pruned) == (everything, [])
    fewer, pruned = candidates_of(block, [], limit=4)
    assert {c.key for c in fewer} == {*keys[:2], *keys[-2:]}
    assert pruned


def test_regions_that_a_block_has_are_candidates() -> None:
    fuse = make_pass(PassChoice("Fuse", {"rules": "library"}))
    gm = Pipeline([fuse])(dovetail.capture(Siblings().eval(), (torch.randn(4, 8),)))
    block = next(b for b in blocks_of(gm)[0].values() if regions(b.program))
    candidates, _ = candidates_of(block, [])
    (existing,) = [c for c in candidates if c.choice.rule == EXISTING]
    (region,) = regions(block.program)
    assert (existing.choice.kind, existing.key) == (region.kind, region.key)
    assert existing.rules == (EXISTING,)
    assert region_of(block, existing.choice).key == existing.key
    # It is there already: nothing is outlined for it.
    assert outlined_with(block, [existing.choice]) is block.program


def test_operands_distinguish_weights_from_values_of_the_same_type() -> None:
    block = block_of(Chain())
    candidates, _ = candidates_of(block, [])
    (relu,) = [c for c in candidates if "linear_relu" in c.rules]
    operands = candidate_operands(block, relu.choice).split(", f")
    assert [text.endswith("weight") for text in operands] == [False, True, True]


def test_clones_of_operations_of_another_block_are_in_no_candidate() -> None:
    block = block_of(Chain())
    candidates, _ = candidates_of(block, [])
    copied = Block(block.key, block.label, block.program, copies=frozenset([1]))
    expected = [c for c in candidates if 1 not in c.units]
    assert candidates_of(copied, [])[0] == expected
    assert len(expected) < len(candidates)


class ChangesSizes(nn.Module):
    """Reads a value after its sizes were changed in place."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(x) * y
        wider = z.unsqueeze_(0)
        return torch.sigmoid(torch.exp(z) + 1) * 2, wider


def test_the_key_of_a_candidate_is_of_the_values_that_its_operations_read() -> None:
    gm = dovetail.capture(torch.fx.symbolic_trace(ChangesSizes()), (torch.randn(4, 8), torch.randn(4, 8)))
    by_name = {node.name: node for node in gm.graph.nodes}
    # As tracers that do not run the graph record it: what the operation has returned.
    by_name["mul"].meta["val"] = by_name["tanh"].meta["val"]
    block = largest(gm)
    candidates, _ = candidates_of(block, [])
    assert len(candidates) > 2
    assert [c.key for c in candidates] == [region_of(block, c.choice).key for c in candidates]
