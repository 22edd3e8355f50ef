"""What a rule proposes for a small graph, and proof that all of it together changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail.ir.dependencies import Index
from dovetail.ir.op_traits import is_commutative
from dovetail.ir.structural_hash import StructuralHasher
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext
from tests.outlining.helpers import equal, run


def captured(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    """A function as a captured graph, with inputs of the given shapes."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(shape) for shape in shapes)
    return dovetail.capture(function, inputs), inputs


def candidates(context: RuleContext, rule: Rule) -> list[Candidate]:
    return [p for p in rule.propose(context) if isinstance(p, Candidate)]


def moved(candidate: Candidate) -> list[int]:
    """What a candidate takes in; what it has a clone of stays outside."""
    policies = candidate.escapes
    return [i for i in candidate.members if isinstance(policies, str) or policies.get(i) != "duplicate"]


def proposed(gm: GraphModule, rule: Rule, **about: Any) -> list[list[str]]:
    """The names of the operations of each candidate, in the graph's order, smallest candidate first."""
    context = RuleContext(gm, **about)
    by_name = [[context.nodes[i].name for i in sorted(c.members)] for c in candidates(context, rule)]
    return sorted(by_name, key=lambda names: (len(names), names))


def refusals(gm: GraphModule, rule: Rule, **about: Any) -> dict[tuple[str, ...], str]:
    """The reason by the names of what was refused, in the graph's order."""
    context = RuleContext(gm, **about)
    refused = [p for p in rule.propose(context) if isinstance(p, Refusal)]
    return {tuple(context.nodes[i].name for i in sorted(r.members)): r.reason for r in refused}


def why_not(gm: GraphModule, rule: Rule, first: str, second: str, **about: Any) -> list[str]:
    context = RuleContext(gm, **about)
    return rule.why_not(context, context.index.names[first], context.index.names[second])


def requests(context: RuleContext, rule: Rule) -> list[dovetail.Request]:
    """Everything a rule proposes, as one request each."""
    nodes = context.nodes
    return [
        dovetail.Request(
            [nodes[i] for i in c.members],
            c.kind,
            attrs=c.attrs,
            escapes=c.escapes
            if isinstance(c.escapes, str)
            else {nodes[i]: how for i, how in c.escapes.items()},
        )
        for c in candidates(context, rule)
    ]


def fused(gm: GraphModule, rule: Rule, *inputs: Any, **about: Any) -> GraphModule:
    """Make all that a rule proposes, in one sweep, and prove that nothing changed."""
    before = dovetail.text(gm)
    asked = requests(RuleContext(gm, **about), rule)
    new = dovetail.outline(gm, asked) if asked else gm
    assert dovetail.text(gm) == before
    dovetail.check(new)
    assert equal(run(new, *inputs), run(gm, *inputs))
    assert dovetail.text(dovetail.inline(new)) == dovetail.text(dovetail.inline(gm))
    return new


def relisted(gm: GraphModule, seed: int) -> GraphModule:
    """The same graph in another order that dependencies allow, operands swapped, every node renamed."""
    rng = random.Random(seed)
    index = Index(gm)
    waiting = [len(set(b)) for b in index.before]
    inputs = [i for i, n in enumerate(index.nodes) if n.op == "placeholder"]
    ready = [i for i, count in enumerate(waiting) if not count and i not in inputs]
    listing = list(inputs)
    for i in inputs:
        _release(index, i, waiting, ready)
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        if index.nodes[i].op == "output":
            continue
        listing.append(i)
        _release(index, i, waiting, ready)
    graph, copies = Graph(), dict[Node, Node]()
    for number, i in enumerate([*listing, len(index) - 1]):
        old = index.nodes[i]
        new = copies[old] = graph.node_copy(old, copies.__getitem__)
        new.name = (
            f"n{rng.randrange(10**6)}_{number}" if old.op not in ("placeholder", "output") else old.name
        )
        if is_commutative(new) and isinstance(new.args[0], Node) and isinstance(new.args[1], Node):
            new.args = (new.args[1], new.args[0], *new.args[2:])
    graph.set_codegen(gm.graph._codegen)
    return GraphModule(gm, graph)


def _release(index: Index, done: int, waiting: list[int], ready: list[int]) -> None:
    for later in sorted(set(index.after[done])):
        waiting[later] -= 1
        if not waiting[later]:
            ready.append(later)


def structure(gm: GraphModule, rule: Rule, **about: Any) -> list[tuple[int, ...]]:
    """The candidates by what their operations compute, the same for a graph that was listed otherwise."""
    context = RuleContext(gm, **about)
    labels = StructuralHasher(context.index).forward()
    return sorted(tuple(sorted(labels[i] for i in c.members)) for c in candidates(context, rule))


def bodies(gm: GraphModule) -> int:
    """How many distinct bodies the regions of a graph have."""
    return len({id(region.body) for region in dovetail.regions(gm)})


def is_legal(context: RuleContext, number: Mapping[int, int]) -> bool:
    """Whether regions, given by number for each member, are free of circles when each is drawn together."""
    unit = [("region", number[i]) if i in number else ("node", i) for i in range(len(context.nodes))]
    needs: dict[Any, set[Any]] = {u: set() for u in unit}
    for i, earlier in enumerate(context.index.before):
        needs[unit[i]].update(unit[j] for j in earlier if unit[j] != unit[i])
    done: set[Any] = set()
    while needs:
        free = [u for u, before in needs.items() if before <= done]
        if not free:
            return False
        done.update(free)
        for u in free:
            del needs[u]
    return True


def is_connected(context: RuleContext, members: Sequence[int]) -> bool:
    """Whether data edges, in either direction, lead from each member to each other."""
    inside, seen, stack = set(members), {members[0]}, [members[0]]
    while stack:
        at = stack.pop()
        readers = [context.index.position[user] for user in context.nodes[at].users]
        near = inside.intersection([*context.index.data[at], *readers]) - seen
        seen |= near
        stack.extend(near)
    return seen == inside
