"""What a rule says of a graph, in names."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

import dovetail
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext
from tests.outlining.helpers import equal, run


def proposals(
    rule: Rule, gm: GraphModule, **options: Any
) -> tuple[list[Candidate], list[Refusal], RuleContext]:
    context = RuleContext(gm, **options)
    before = dovetail.text(gm)
    proposed = list(rule.propose(context))
    assert dovetail.text(gm) == before, "a rule must not edit"
    return (
        [p for p in proposed if isinstance(p, Candidate)],
        [p for p in proposed if isinstance(p, Refusal)],
        context,
    )


def matches(rule: Rule, gm: GraphModule, **options: Any) -> list[list[str]]:
    """The operations of each candidate by name."""
    candidates, _, context = proposals(rule, gm, **options)
    return [[context.nodes[i].name for i in c.members] for c in candidates]


def declined(rule: Rule, gm: GraphModule, **options: Any) -> list[str]:
    """The reasons of a rule that proposes nothing."""
    candidates, refusals, _ = proposals(rule, gm, **options)
    assert candidates == []
    return [r.reason for r in refusals]


def outlined(rule: Rule, gm: GraphModule, *inputs: Any) -> GraphModule:
    """The graph with every candidate made a region; the candidates must not overlap. Values are compared."""
    candidates, _, context = proposals(rule, gm)
    requests = [
        dovetail.Request(
            [context.nodes[i] for i in c.members],
            c.kind,
            c.version,
            c.attrs,
            c.escapes if isinstance(c.escapes, str) else {context.nodes[i]: p for i, p in c.escapes.items()},
        )
        for c in candidates
    ]
    new = dovetail.outline(gm, requests)
    dovetail.check(new)
    assert equal(run(new, *inputs), run(gm, *inputs))
    return new
