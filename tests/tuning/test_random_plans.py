"""Plans of random divisions: whatever candidates of the search are chosen, the plan applies and computes the same."""

from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import dovetail
from dovetail import Plan
from dovetail.outlining.region import graph_key
from dovetail.tuning.apply_plan import AppliedPlan, PlanApplication, environment_of
from dovetail.tuning.block import Block, blocks_of
from dovetail.tuning.decisions import BackendChoice, BlockDecision, BodyDecision, GraphDecision
from dovetail.tuning.plan import body_entry
from dovetail.tuning.region_candidates import (
    EXISTING,
    RegionCandidate,
    candidate_operands,
    candidates_of,
    cloned_units,
)
from dovetail.tuning.set_partitioning import AS_IT_IS, Option, divide
from tests.fuzz.generate import FLAVOURS, draw_program
from tests.fuzz.observe import Snapshot, difference, observe
from tests.fuzz.program import NotAProgram, build, make_inputs
from tests.zoo_graphs import zoo_graph, zoo_inputs

CASES, MANY = 16, 400
ZOO = ("bert", "inception", "llama", "lstm", "mamba", "moe", "resnet", "vit")


def random_division(block: Block, candidates: list[RegionCandidate], rng: Random) -> list[RegionCandidate]:
    """The best division for random costs: disjoint regions that do not depend on each other."""
    alone = [Option(frozenset([k]), AS_IT_IS, 1.0) for k in range(len(block.units))]
    regions = [
        Option(c.units, "eager", len(c.units) * 1.5 * rng.random(), cloned_units(block, c))
        for c in candidates
    ]
    chosen = divide(len(block.units), block.edges, [*alone, *regions]).chosen
    return [candidates[i - len(alone)] for i in chosen if i >= len(alone)]


def random_plan(gm: GraphModule, rng: Random) -> tuple[Plan, int]:
    """A plan that divides the blocks of a graph at random, and how many kinds of region it has."""
    blocks: dict[str, BlockDecision] = {}
    bodies: dict[str, BodyDecision] = {}
    for key, block in blocks_of(gm)[0].items():
        candidates, _ = candidates_of(block, [])
        chosen = random_division(block, candidates, rng)
        blocks[key] = BlockDecision(
            block.label, regions=tuple(c.choice for c in chosen if c.choice.rule != EXISTING)
        )
        for candidate in [*chosen, *(c for c in candidates if c.choice.rule == EXISTING)]:
            operands = candidate_operands(block, candidate.choice)
            backend = BackendChoice("eager") if candidate in chosen else None
            entry = body_entry(candidate.key, operands)
            bodies.setdefault(entry, BodyDecision(candidate.label, operands=operands, backend=backend))
    decisions: dict[str, Any] = {
        "graphs": {graph_key(gm): GraphDecision("random")},
        "blocks": blocks,
        "bodies": bodies,
    }
    plan = Plan().with_decisions("inference", environment_of(gm), **decisions)
    return Plan.from_json(plan.to_json()), len(bodies)


def applied(plan: Plan, gm: GraphModule) -> AppliedPlan:
    """What the plan does with a graph, all of it."""
    result = PlanApplication(plan, "inference", environment_of(gm)).apply(gm)
    assert [str(u) for u in result.unknown] == []
    assert result.problems == []
    assert result.differences == []
    dovetail.check(result.graph)
    return result


FLAVOURS_DRAWN = ("pure", "memory", "world", "modules", "everything", "traced")


@pytest.mark.parametrize("flavour", FLAVOURS_DRAWN)
def test_plans_of_random_programs_apply_and_compute_the_same(flavour: str) -> None:
    check_random_plans(flavour, Random(flavour), CASES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flavour", FLAVOURS_DRAWN)
def test_plans_of_many_random_programs(flavour: str) -> None:
    check_random_plans(flavour, Random(f"many {flavour}"), MANY)


def check_random_plans(flavour: str, rng: Random, cases: int) -> None:
    regions = 0
    for _ in range(cases):
        try:
            program = draw_program(rng, FLAVOURS[flavour])
            gm = build(program)
        except NotAProgram:
            continue
        plan, count = random_plan(gm, rng)
        graph = applied(plan, gm).graph
        regions += bool(count)
        inputs, state = make_inputs(program), Snapshot(gm)
        before = observe(gm, state, inputs)
        assert difference(before, observe(graph, state, inputs), aliasing=False) == ("", ""), program
    assert regions > cases // 4


@pytest.mark.parametrize("name", ZOO)
def test_plans_of_random_divisions_of_models(name: str) -> None:
    inputs, gm, rng = zoo_inputs(name), zoo_graph(name), Random(name)
    with torch.no_grad():
        expected = gm(*inputs.args, **inputs.kwargs)
        for _ in range(3):
            plan, count = random_plan(gm, rng)
            assert count
            actual = applied(plan, gm).graph(*inputs.args, **inputs.kwargs)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
