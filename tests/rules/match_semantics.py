"""Whether a match means what its rule says: the pattern, run on the operands, gives the very values of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from dovetail.rules.patterns.alternatives import Chooser, choosing
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import RuleContext


class _Values(Interpreter):
    """Every value of one run, kept by node."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value


def values_of(gm: GraphModule, inputs: list[Any]) -> dict[Node, Any]:
    run = _Values(gm)
    run.run(*inputs, enable_io_processing=False)
    return run.seen


def computes_the_same(rule: PatternRule, match: Match, values: dict[Node, Any]) -> bool:
    """Whether the pattern gives the values that the graph has, as near as another layout of memory allows."""
    arguments = dict(rule.parameters.fixed)
    arguments.update(match.literals)
    for name in rule.parameters.literals:
        arguments.setdefault(name, 0.5)  # only alternatives that were not taken need it
    for name, value in match.operands.items():
        arguments[name] = values[value.node] if value is not None else None
    for name, value in arguments.items():
        if value is None and name in rule.parameters.operands and name not in rule.parameters.optional:
            arguments[name] = torch.zeros(1)
    with choosing(Chooser(match.alternatives)), torch.no_grad():
        result = rule.function(**arguments)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for mine, node in zip(results, match.outputs, strict=True):
        theirs = values[node]
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True):
            return False
    return True


def wrong(rule: PatternRule, gm: GraphModule, inputs: list[Any]) -> list[list[str]]:
    """The matches of a rule that do not mean what it says."""
    matches = rule.matches(RuleContext(gm))
    if not matches:
        return []
    values = values_of(gm, inputs)
    return [[n.name for n in m.nodes] for m in matches if not computes_the_same(rule, m, values)]
