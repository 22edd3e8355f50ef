"""Random programs with random candidates: whatever is chosen is legal, exact, repeatable and undone by `inline`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from torch.fx import GraphModule

import dovetail
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.ir.dependencies import Index
from dovetail.rules.rule import Candidate, Limits, Proposal, Rule, RuleContext
from tests.fuzz.generate import FLAVOURS, draw_program
from tests.fuzz.observe import Snapshot, difference, observe
from tests.fuzz.program import NotAProgram, build, make_inputs

POLICIES = ("auto", "auto", "output", "duplicate", "leave", "refuse")


class Scattered(Rule):
    """Proposes sets of operations by name, drawn once; what is not in the graph any more is left out."""

    def __init__(self, name: str, rng: Random, names: list[str], *, count: int) -> None:
        self.name = self.kind = name
        self.priority = rng.choice([0, 0, 0, 1, -10])
        self.nests = rng.random() < 0.1
        self.divisible = rng.random() < 0.5
        self.sets: list[tuple[list[str], str]] = []
        for _ in range(count):
            start, width = rng.randrange(len(names)), rng.randrange(1, 10)
            near = names[start : start + width]
            chosen = rng.sample(near, rng.randrange(1, len(near) + 1))
            self.sets.append((chosen, rng.choice(POLICIES)))

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        at = {n.name: i for i, n in enumerate(context.nodes) if n.target is not operator.getitem}
        for chosen, policy in self.sets:
            members = tuple(at[n] for n in chosen if n in at and at[n] not in context.barred)
            if len(members) > 1 or (members and context.nodes[members[0]].op != "get_attr"):
                yield Candidate(self.name, self.kind, members, escapes=policy, divisible=self.divisible)


def draw_rules(rng: Random, gm: GraphModule) -> list[Scattered]:
    names = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    return [Scattered(f"r{k}", rng, names, count=rng.randrange(1, 7)) for k in range(rng.randrange(1, 4))]


def draw_options(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        limit = rng.choice(["nodes", "operands", "outputs"])
        options["limits"] = Limits(**{limit: rng.randrange(1, 5)})
    return options


def within(gm: GraphModule, limits: Limits) -> bool:
    for region in dovetail.regions(gm):
        results = region.body.graph.output_node().args[0]
        if limits.nodes is not None and len(region.nodes) > limits.nodes:
            return False
        if limits.operands is not None and len(region.inputs) > limits.operands:
            return False
        if limits.outputs is not None and len(results) > limits.outputs:
            return False
    return True


def prove(rng: Random, flavour: str) -> int:
    """Fuse one random program; how many regions came of it."""
    try:
        program = draw_program(rng, FLAVOURS[flavour])
        gm = build(program)
    except NotAProgram:
        return 0
    if not any(n.op not in ("placeholder", "output") for n in gm.graph.nodes):
        return 0
    rules, options = draw_rules(rng, gm), draw_options(rng)
    before = dovetail.text(gm)
    new = fuse(gm, rules, on_error="raise", **options)
    assert dovetail.text(gm) == before
    dovetail.check(new)
    state, inputs = Snapshot(gm), make_inputs(program)
    want, got = observe(gm, state, inputs), observe(new, state, inputs)
    if not want[0].error:
        # A view of a clone does not share memory with the original: where clones are asked for, that shows.
        asked = any(policy == "duplicate" for rule in rules for _, policy in rule.sets)
        assert difference(want, got, aliasing=not asked) == ("", "")
    if not Index(gm).dependencies.reshaping:
        assert dovetail.text(dovetail.inline(new)) == before
    assert within(new, options.get("limits", Limits()))
    again = fuse(new, rules, **options)
    if not any(rule.nests for rule in rules):
        assert dovetail.text(again) == dovetail.text(new)
        assert explain(again).accepted == explain(new).accepted
    return len(dovetail.regions(new))


@pytest.mark.parametrize("flavour", ["pure", "memory", "world", "everything"])
def test_random_programs(flavour: str) -> None:
    region_count = sum(prove(Random(f"{flavour}/{i}"), flavour) for i in range(60))
    assert region_count > 60  # a run that fused little would prove little
