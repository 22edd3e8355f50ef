"""What a rule makes of functions: the widest match of each, moved into a region and run; or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import dovetail
from dovetail.lowering.backend_protocol import contract_of
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.verify_region import reference_mismatch
from dovetail.outlining.outline import Request
from dovetail.rules.library import KINDS
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext
from tests.outlining.helpers import equal

Model = Callable[..., Any]


def graph_of(model: Model, inputs: tuple[Any, ...]) -> GraphModule:
    return model if isinstance(model, GraphModule) else dovetail.capture(model, inputs)


def proposals(rules: Rule | Iterable[Rule], graph: GraphModule) -> list[Candidate | Refusal]:
    context = RuleContext(graph)
    return [p for rule in ([rules] if isinstance(rules, Rule) else rules) for p in rule.propose(context)]


def candidates(rules: Rule | Iterable[Rule], graph: GraphModule) -> list[Candidate]:
    """What is proposed, the widest first."""
    matches = [p for p in proposals(rules, graph) if isinstance(p, Candidate)]
    return sorted(matches, key=lambda c: -len(c.members))


def member_names(graph: GraphModule, match: Candidate) -> list[str]:
    nodes = list(graph.graph.nodes)
    return [nodes[i].name for i in match.members]


def request_for(graph: GraphModule, match: Candidate) -> Request:
    """The region that a candidate would become."""
    nodes = list(graph.graph.nodes)
    assert isinstance(match.escapes, str)
    return Request(
        member_names(graph, match),
        match.kind,
        match.version,
        match.attrs,
        match.escapes,
        rule=match.rule,
        arguments={name: nodes[i] for name, i in (match.arguments or {}).items()},
        results=tuple(None if i is None else nodes[i] for i in match.results),
    )


def assert_references(graph: GraphModule) -> int:
    """Every region of a library kind computes what the kind's reference does; returns how many there are."""
    count = 0
    for region in dovetail.regions(graph, nested=True):
        if region.kind not in KINDS:
            continue
        unit = unit_of(region)
        operands = range(len(region.inputs))
        # An operand behind a view that changes nothing, as make_fx has them, is not the argument itself.
        named = set(region.arguments.values()) == set(operands) and not unit.lifted
        assert (contract_of(unit.region) is not None) == named, (region.rule, region.attrs, region.arguments)
        assert reference_mismatch(unit, unit.values) is None, (region.rule, region.attrs)
        count += 1
    return count


@dataclass(frozen=True)
class Look:
    """What a rule proposes for one of several functions in a graph: its widest match, what that leaves, and refusals."""

    match: Candidate | None
    left: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def look_at(rule: Rule, models: Sequence[Model], *inputs: Any) -> tuple[GraphModule, list[Look]]:
    """Several functions of the same inputs in one graph, and what a rule makes of each.

    One graph, since making it takes far longer than looking at it. No operation is shared, so each proposal
    belongs to one of them.
    """

    def all_of_them(*values: Any) -> tuple[Any, ...]:
        return tuple(model(*values) for model in models)

    single = models[0] if len(models) == 1 else all_of_them
    graph = graph_of(single, inputs)
    at = {node: i for i, node in enumerate(graph.graph.nodes)}
    proposed = proposals(rule, graph)
    reports: list[Look] = []
    for results in _results(graph, len(models)):
        operations = {at[n]: n for n in _computed_for(results)}
        here = [p for p in proposed if p.members and operations.keys() >= set(p.members)]
        matches = [p for p in here if isinstance(p, Candidate)]
        widest = max(matches, key=lambda c: len(c.members), default=None)
        left = [n for i, n in operations.items() if widest is None or i not in widest.members]
        names = tuple(sorted(getattr(n.target, "_opname", str(n.target)) for n in left))
        reports.append(Look(widest, names, tuple(p for p in here if isinstance(p, Refusal))))
    return graph, reports


def _results(graph: GraphModule, count: int) -> list[list[Node]]:
    returned = graph.graph.output_node().all_input_nodes
    if count == 1:
        return [returned]
    assert len(returned) == count, "of several functions each returns one value of its own"
    return [[node] for node in returned]


def _computed_for(results: Iterable[Node]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def match_attrs_each(
    rule: Rule, models: Sequence[Model], *inputs: Any, leaving: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """The attributes of the widest match in each function; it must take in all but the operators named `leaving`.

    The matches are outlined and run: same values, same random numbers; the graph they were found in stays as it was.
    """
    graph, reports = look_at(rule, models, *inputs)
    before = dovetail.text(graph)
    requests: list[Request] = []
    for model, look in zip(models, reports, strict=True):
        name = getattr(model, "__name__", type(model).__name__)
        assert look.match is not None, f"'{name}': {[r.reason for r in look.refusals]}"
        assert look.left == tuple(sorted(leaving)), name
        assert (look.match.rule, look.match.kind) == (rule.name, rule.kind)
        match = look.match
        requests.append(request_for(graph, match))
    fused = dovetail.outline(graph, requests)
    assert_references(fused)
    assert [r.kind for r in dovetail.regions(fused)] == [rule.kind] * len(models)
    assert equal(_run([fused], inputs), _run([graph], inputs))
    if not isinstance(models[0], GraphModule):
        assert equal(_run([fused], inputs), _run(models, inputs))
    assert dovetail.text(graph) == before
    return [dict(look.match.attrs or {}) for look in reports if look.match is not None]


def match_attrs(rule: Rule, model: Model, *inputs: Any, leaving: Iterable[str] = ()) -> dict[str, Any]:
    """As `found_each`, of one function."""
    return match_attrs_each(rule, [model], *inputs, leaving=leaving)[0]


def refused_each(rule: Rule, models: Sequence[Model], *inputs: Any) -> list[str]:
    """For each function, in which nothing may be found, the reasons that were given, the nearest miss first."""
    reasons: list[str] = []
    for model, look in zip(models, look_at(rule, models, *inputs)[1], strict=True):
        assert look.match is None, getattr(model, "__name__", "")
        nearest = sorted(look.refusals, key=lambda r: -r.matched)
        reasons.append("; ".join(r.reason for r in nearest))
    return reasons


def why(rule: Rule, model: Model, *inputs: Any) -> str:
    """The reasons why nothing is found in a function; there must be one."""
    (reasons,) = refused_each(rule, [model], *inputs)
    assert reasons, "nothing was said of it"
    return reasons


def _run(models: Sequence[Model], inputs: tuple[Any, ...]) -> list[Any]:
    torch.manual_seed(3)
    results: list[Any] = []
    with torch.no_grad():
        for model in models:
            result = model(*inputs)
            results += [result] if isinstance(result, torch.Tensor) else list(result)
    return results
