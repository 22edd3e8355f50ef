"""From proposals to regions, and graphs listed in other orders."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule

import dovetail
from dovetail import Request
from dovetail.graph.index import Index
from dovetail.rules.rule import Candidate, Refusal, Rule
from dovetail.rules.scene import Scene


def proposed(rule: Rule, gm: GraphModule, **scene: Any) -> tuple[Scene, list[Candidate], list[Refusal]]:
    """What a rule says of a graph, which it leaves as it was."""
    before = dovetail.text(gm)
    look = Scene(gm, **scene)
    said = list(rule.propose(look))
    assert dovetail.text(gm) == before
    candidates = [p for p in said if isinstance(p, Candidate)]
    return look, candidates, [p for p in said if isinstance(p, Refusal)]


def requests(scene: Scene, candidates: list[Candidate]) -> list[Request]:
    return [
        Request(
            [scene.nodes[i] for i in c.members],
            c.kind,
            c.version,
            c.attrs,
            escapes=str(c.escapes),
            rule=c.rule,
        )
        for c in candidates
    ]


def applied(rule: Rule, gm: GraphModule) -> GraphModule:
    """The graph with every candidate of highest priority as a region."""
    scene, candidates, _ = proposed(rule, gm)
    if not candidates:
        return gm
    first = max(c.priority for c in candidates)
    out = dovetail.outline(gm, requests(scene, [c for c in candidates if c.priority == first]))
    dovetail.check(out)
    return out


def to_the_end(rule: Rule, gm: GraphModule, rounds: int = 8) -> GraphModule:
    """Round after round, until the rule has nothing more to propose."""
    for _ in range(rounds):
        new = applied(rule, gm)
        if new is gm:
            return gm
        gm = new
    raise AssertionError(f"{rule.name} goes on after {rounds} rounds")


def member_names(scene: Scene, candidates: list[Candidate]) -> list[list[str]]:
    return [[scene.nodes[i].name for i in c.members] for c in candidates]


def bodies(gm: GraphModule, kind: str | None = None) -> int:
    return len({id(region.body) for region in dovetail.regions(gm, kind=kind)})


def same_run(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two programs give the same values, bit for bit, from the same random state."""
    results: list[Any] = []
    for program in (a, b):
        torch.manual_seed(7)
        results.append(copy.deepcopy(program)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    flat = [torch.utils._pytree.tree_leaves(r) for r in results]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(x, y) for x, y in zip(*flat, strict=True))


def relisted(gm: GraphModule, seed: int) -> GraphModule:
    """The same graph with other names, listed in another order that its dependencies allow.

    What each node was called is in its meta as "original".
    """
    rng = random.Random(seed)
    gm = copy.deepcopy(gm)
    index = Index(gm)
    nodes = index.nodes
    waiting = [len(set(before)) for before in index.before]
    ready = [i for i, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        inputs = [i for i in ready if nodes[i].op == "placeholder"]
        others = [i for i in ready if nodes[i].op != "output"] or ready
        i = inputs[0] if inputs else rng.choice(others)
        ready.remove(i)
        order.append(i)
        for j in set(index.after[i]):
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    for before, after in pairwise(order):
        nodes[before].append(nodes[after])
    for number, i in enumerate(rng.sample(order, len(order))):
        nodes[i].meta["original"] = nodes[i].name
        if nodes[i].op.startswith("call"):
            nodes[i].name = f"n{number}"
    gm.graph.lint()
    gm.recompile()
    return gm
