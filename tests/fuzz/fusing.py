"""Fusion as a stage of a case: rules of every kind on any program, and what must hold of what comes of it."""

from __future__ import annotations

from random import Random

import torch
from torch.fx import GraphModule

import dovetail

from .program import Fused


@dovetail.rule(kind="relu_sum")
def _relu_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + y


@dovetail.rule(kind="scaled", escapes="output")
def _scaled(x: torch.Tensor, factor: float = dovetail.Const()) -> torch.Tensor:
    return dovetail.either(lambda: torch.tanh(x), lambda: torch.neg(x), lambda: torch.relu(x)) * factor


WRITTEN = {
    "groups": "dovetail.rules.groups()",
    "pairs": "dovetail.rules.groups(name='pairs', kind='pair', nests=True)",
    "arithmetic": "dovetail.rules.capability(['add', 'mul', 'sub', 'relu', 'neg'], kind='npu.arithmetic')",
    "anything": "dovetail.rules.capability(lambda n: True, kind='all', priority=-5)",
    "together": "dovetail.rules.capability(['relu', 'tanh', 'mul'], kind='npu.joined', join_siblings=True)",
    "siblings": "dovetail.rules.siblings()",
    "following": "dovetail.rules.siblings(kind='lanes', follow=True)",
    "repeats": "dovetail.rules.repeats(min_size=2)",
}
"""Rules as a script has them."""

RULES = {name: eval(text, {"dovetail": dovetail}) for name, text in WRITTEN.items()}
RULES |= {"relu_sum": _relu_sum, "scaled": _scaled}
WRITTEN |= {
    "relu_sum": "dovetail.rule(lambda x, y: torch.relu(x) + y, kind='relu_sum', name='relu_sum')",
    "scaled": "dovetail.rule(lambda x, factor=dovetail.Const(): dovetail.either(torch.tanh(x), torch.neg(x), "
    "torch.relu(x)) * factor, kind='scaled', name='scaled', escapes='output')",
}


def draw_fusion(rng: Random) -> Fused:
    names = list(RULES)
    rules = tuple(dict.fromkeys(names[rng.randrange(len(names))] for _ in range(1 + rng.randrange(3))))
    options: dict[str, object] = {}
    if rng.randrange(4) == 0:
        options["rounds"] = 1 + rng.randrange(2)
    if rng.randrange(4) == 0:
        most = (1, 2, 3, 5)[rng.randrange(4)]
        field = ("nodes", "operands", "outputs")[rng.randrange(3)]
        options["limits"] = dovetail.Limits(**{field: most})
    if rng.randrange(8) == 0:
        options["fuel"] = rng.randrange(4)
    return Fused(rules, tuple(options.items()))


def fused(gm: GraphModule, stage: Fused) -> GraphModule:
    result = dovetail.fuse(gm, [RULES[name] for name in stage.rules], on_error="raise", **dict(stage.options))
    limits = dict(stage.options).get("limits")
    if limits is not None:
        known = {r.name for r in dovetail.regions(gm)}
        for region in dovetail.regions(result):
            if region.name not in known:
                _within(region, limits)
    return result


def _within(region: dovetail.Region, limits: dovetail.Limits) -> None:
    inside = [n for n in region.body.graph.nodes if n.op not in ("placeholder", "output")]
    counts = {
        "nodes": sum(not _is_part(n) for n in inside),
        "operands": len(region.inputs),
        "outputs": len(region.body.graph.output_node().args[0]),
    }
    for field, count in counts.items():
        most = getattr(limits, field)
        if most is not None and count > most:
            raise AssertionError(f"region '{region.name}' has {count} {field}, and {most} is the most")


def _is_part(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" or node.op == "get_attr"


def why_not_settled(result: GraphModule, stage: Fused) -> str:
    """What fusing once more changes, where it should change nothing."""
    options = dict(stage.options)
    if "rounds" in options or "fuel" in options:
        return ""
    again = fused(result, stage)
    if dovetail.text(again) != dovetail.text(result):
        return dovetail.diff(result, again)
    before, after = dovetail.explain(result).accepted, dovetail.explain(again).accepted
    return "" if len(before) == len(after) else "the ledger tells of new regions"
