"""From proposals to regions, and graphs listed in other orders."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

import dovetail
from dovetail import Request
from dovetail.ir.dependencies import Index
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext
from tests.outlining.helpers import equal


def proposed(
    rule: Rule, gm: GraphModule, **context: Any
) -> tuple[RuleContext, list[Candidate], list[Refusal]]:
    """What a rule says of a graph, which it leaves as it was."""
    before = dovetail.text(gm)
    look = RuleContext(gm, **context)
    proposals = list(rule.propose(look))
    assert dovetail.text(gm) == before
    candidates = [p for p in proposals if isinstance(p, Candidate)]
    return look, candidates, [p for p in proposals if isinstance(p, Refusal)]


def requests(context: RuleContext, candidates: list[Candidate]) -> list[Request]:
    return [
        Request(
            [context.nodes[i] for i in c.members],
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
    context, candidates, _ = proposed(rule, gm)
    if not candidates:
        return gm
    first = max(c.priority for c in candidates)
    out = dovetail.outline(gm, requests(context, [c for c in candidates if c.priority == first]))
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


def member_names(context: RuleContext, candidates: list[Candidate]) -> list[list[str]]:
    return [[context.nodes[i].name for i in c.members] for c in candidates]


def bodies(gm: GraphModule, kind: str | None = None) -> int:
    return len({id(region.body) for region in dovetail.regions(gm, kind=kind)})


def same_run(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two programs give the same values, bit for bit, from the same random state."""
    results: list[Any] = []
    for program in (a, b):
        torch.manual_seed(7)
        results.append(copy.deepcopy(program)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    return equal(*(torch.utils._pytree.tree_leaves(r) for r in results))


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


def layer(x: Tensor, scale: float = 1.0) -> Tensor:
    """A residual block of six operations."""
    h = torch.sin(x) * scale
    return x + torch.tanh(torch.exp(h) - h)


def an_input() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def blocks(function: Callable[..., Any], **options: Any) -> list[list[str]]:
    """The operations of each candidate, after proof that outlining them all changes nothing and shares a body."""
    gm = symbolic_trace(function)
    context, candidates, _ = proposed(repeats(**options), gm)
    if candidates:
        out = dovetail.outline(gm, requests(context, candidates))
        dovetail.check(out)
        assert bodies(out) < len(candidates)
        assert same_run(gm, out, an_input())
        assert dovetail.text(dovetail.inline(out)) == dovetail.text(gm)
    return member_names(context, candidates)


def reasons(function: Callable[..., Any], **options: Any) -> list[str]:
    return [refusal.reason for refusal in proposed(repeats(**options), symbolic_trace(function))[2]]
