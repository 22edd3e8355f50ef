"""Random graphs with many overlapping candidates: legal, independent of every listing, and the best where it is small."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import dovetail
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.fusion.select import best_choice
from dovetail.rules.rule import Candidate, Limits, Proposal, Rule, RuleContext
from tests.outlining.helpers import equal

X = torch.linspace(-1, 1, 6).reshape(2, 3)
Ops = list[tuple[int, ...]]

drawn = pytest.mark.parametrize("seed", range(40))


def draw_ops(rng: Random, count: int) -> Ops:
    """What each operation reads; -1 is the input. Mostly near ones, so that long and wide parts both occur."""
    ops: Ops = []
    for i in range(count):
        reach = rng.choice([1, 2, 4, count])
        sources = [rng.randrange(max(-1, i - reach), i) for _ in range(rng.choice([1, 1, 2]))]
        ops.append(tuple(dict.fromkeys(sources)))
    return ops


def build(ops: Ops, order: list[int] | None = None, rename: str = "v") -> tuple[GraphModule, dict[str, int]]:
    """The graph, listed in any order that is topological, and the number of each operation by name."""
    graph = Graph()
    copies = {-1: graph.placeholder("x")}
    names: dict[str, int] = {}
    for i in order or range(len(ops)):
        inputs = [copies[j] for j in ops[i]]
        target, last = (
            (torch.ops.aten.add.Tensor, inputs[1]) if len(inputs) > 1 else (torch.ops.aten.mul.Tensor, None)
        )
        # A number of its own makes each operation one that no other could stand for.
        args = (inputs[0], last if last is not None else 1.0 + i / 1000)
        copies[i] = graph.create_node(
            "call_function", target, args, {"alpha": 1 + i} if last is not None else {}
        )
        copies[i]._rename(f"{rename}{i if rename == 'v' else (i * 7919) % 10007}")
        names[copies[i].name] = i
    read = {j for sources in ops for j in sources}
    graph.output(tuple(copies[i] for i in range(len(ops)) if i not in read))
    for node in graph.nodes:
        node.meta["val"] = X
    return GraphModule(torch.nn.Module(), graph), names


def shuffled(ops: Ops, rng: Random) -> list[int]:
    """Another topological order."""
    done: set[int] = {-1}
    left = list(range(len(ops)))
    order: list[int] = []
    while left:
        ready = [i for i in left if done.issuperset(ops[i])]
        one = rng.choice(ready)
        left.remove(one)
        done.add(one)
        order.append(one)
    return order


class Numbered(Rule):
    """Proposes sets of operations by their numbers."""

    def __init__(self, name: str, sets: list[tuple[int, ...]], names: dict[str, int], **facts: Any) -> None:
        self.name = self.kind = name
        self.sets, self.at = sets, {i: name for name, i in names.items()}
        self.divisible, self.priority = facts.get("divisible", False), facts.get("priority", 0)
        self.escapes = facts.get("escapes", "auto")

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        where = {n.name: i for i, n in enumerate(context.nodes) if n.target is not operator.getitem}
        for chosen in self.sets:
            members = tuple(where[self.at[i]] for i in chosen if self.at[i] in where)
            if len(members) == len(chosen) or (self.divisible and len(members) > 1):
                yield Candidate(self.name, self.kind, members, escapes=self.escapes, divisible=self.divisible)


def draw_sets(rng: Random, ops: Ops, count: int) -> list[tuple[int, ...]]:
    """Sets that grow along edges and some that are picked anywhere, legal or not."""
    sets: list[tuple[int, ...]] = []
    for _ in range(count):
        start = rng.randrange(len(ops))
        if rng.random() < 0.2:
            chosen = set(rng.sample(range(len(ops)), min(3, len(ops))))
        else:
            chosen = {start}
            for _ in range(rng.randrange(6)):
                near = [j for i in chosen for j in ops[i] if j >= 0]
                near += [k for k, reads in enumerate(ops) if chosen.intersection(reads)]
                if near:
                    chosen.add(rng.choice(near))
        sets.append(tuple(sorted(chosen)))
    return sets


def draw_rules(rng: Random, ops: Ops, most: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"r{k}",
            "sets": draw_sets(rng, ops, rng.randrange(1, most)),
            "divisible": rng.random() < 0.4,
            "priority": rng.choice([0, 0, 1]),
            "escapes": rng.choice(["auto", "auto", "output", "duplicate"]),
        }
        for k in range(rng.randrange(1, 4))
    ]


def regions_of(gm: GraphModule, names: dict[str, int]) -> set[tuple[str, tuple[int, ...]]]:
    return {(r.kind, tuple(sorted(names[n] for n in r.nodes))) for r in dovetail.regions(gm)}


def history(gm: GraphModule, names: dict[str, int]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(a.round, a.rule, tuple(sorted(names.get(n, -1) for n in a.nodes))) for a in explain(gm).accepted]


@drawn
def test_what_is_chosen_is_legal_exact_and_the_same_in_any_listing(seed: int) -> None:
    rng = Random(seed)
    ops = draw_ops(rng, rng.randrange(3, 60))
    facts = draw_rules(rng, ops, 40)
    gm, names = build(ops)
    new = fuse(gm, [Numbered(names=names, **f) for f in facts], on_error="raise")
    dovetail.check(new)
    assert equal(new(X), gm(X))
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(gm)
    other, others = build(ops, shuffled(ops, rng), rename="w")
    turned = [Numbered(names=others, **{**f, "sets": rng.sample(f["sets"], len(f["sets"]))}) for f in facts]
    rng.shuffle(turned)
    assert regions_of(fuse(other, turned), others) == regions_of(new, names)


@drawn
def test_fuel_gives_a_beginning_of_what_more_fuel_gives(seed: int) -> None:
    rng = Random(seed)
    ops = draw_ops(rng, rng.randrange(3, 20))
    gm, names = build(ops)
    rules = [Numbered(names=names, **f) for f in draw_rules(rng, ops, 8)]
    whole = history(fuse(gm, rules), names)
    for fuel in range(len(whole) + 2):
        part = fuse(gm, rules, fuel=fuel)
        assert history(part, names) == whole[:fuel]
        assert equal(part(X), gm(X))


@drawn
def test_limits_hold_exactly(seed: int) -> None:
    rng = Random(seed)
    ops = draw_ops(rng, rng.randrange(3, 40))
    gm, names = build(ops)
    limits = Limits(
        nodes=rng.choice([None, 1, 2, 5]),
        operands=rng.choice([None, 1, 2]),
        outputs=rng.choice([None, 1, 2]),
        bytes=rng.choice([None, 24, 48, 96]),
    )
    new = fuse(gm, [Numbered(names=names, **f) for f in draw_rules(rng, ops, 20)], limits=limits)
    for region in dovetail.regions(new):
        results = region.body.graph.output_node().args[0]
        moved = 24 * (len(region.inputs) + len(results))
        assert limits.nodes is None or len(region.nodes) <= limits.nodes
        assert limits.operands is None or len(region.inputs) <= limits.operands
        assert limits.outputs is None or len(results) <= limits.outputs
        assert limits.bytes is None or moved <= limits.bytes
    assert equal(new(X), gm(X))


@drawn
def test_a_small_cluster_is_solved_exactly(seed: int) -> None:
    rng = Random(seed)
    count = rng.randrange(1, 9)
    weights = [(rng.choice([0, 0, 1]), rng.randrange(-2, 6), rng.randrange(1, 4)) for _ in range(count)]
    pairs = {pair for pair in combinations(range(count), 2) if rng.random() < 0.4}
    clashes = [sum(1 << j for j in range(count) if {(i, j), (j, i)} & pairs) for i in range(count)]

    def total(chosen: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sum(weights[i][k] for i in chosen) for k in range(3))

    legal = [
        chosen
        for size in range(count + 1)
        for chosen in combinations(range(count), size)
        if not any(pair in pairs for pair in combinations(chosen, 2))
    ]
    picked = tuple(best_choice(weights, clashes))
    assert picked in legal
    assert total(picked) == max(total(chosen) for chosen in legal)
