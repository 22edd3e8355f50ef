"""The library as a whole: rules are well formed, cost nothing until used, and are found in compilers' graphs too."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import dovetail
from dovetail.rules import library
from dovetail.rules.library import ALL
from dovetail.rules.library.library_rule import LibraryRule
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import Candidate, RuleContext, RuleSet
from tests.rules.library.helpers import candidates, graph_of, proposals

PATTERNS = [rule for rule in ALL if isinstance(rule, PatternRule)]
KINDS = """
    attention rms_norm add_rms_norm layer_norm add_layer_norm dropout_add_layer_norm embedding_norm rotary swiglu geglu
    linear_activation linear_residual conv_bn_act conv_grad softmax gelu sigmoid hard_sigmoid avg_pool cross_entropy
    trunc_normal layer_norm_grad softmax_grad log_softmax_grad group_norm mix_ffn
"""


@pytest.mark.parametrize("rule", PATTERNS, ids=lambda rule: rule.name)
def test_every_pattern_can_be_traced_and_uses_what_it_names(rule: PatternRule) -> None:
    rule.variants.check()


def test_every_kind_is_there_and_described() -> None:
    assert {rule.kind for rule in ALL} == set(KINDS.split())
    assert len({rule.name for rule in ALL}) == len(ALL)
    assert all(rule.priority == 0 for rule in ALL)


def test_all_is_the_sum_of_the_sets() -> None:
    sets = [value for name, value in vars(library).items() if isinstance(value, RuleSet) and name != "ALL"]
    assert {rule.name for each in sets for rule in each} == {rule.name for rule in ALL}
    sets_by_name = {n for n, v in vars(library).items() if isinstance(v, RuleSet)}
    assert set(library.__all__) == {"KINDS", *sets_by_name}


def test_importing_traces_nothing_and_a_graph_without_the_operators_neither() -> None:
    script = """
import torch, dovetail
from dovetail.rules.library import ALL
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import RuleContext

def traced():
    return [r.name for r in ALL if isinstance(r, PatternRule) and "examples" in vars(r.variants)]

assert not traced(), traced()
graph = dovetail.capture(lambda x: torch.sort(x).values.cumsum(0), (torch.randn(4),))
assert not [p for rule in ALL for p in rule.propose(RuleContext(graph))]
assert not traced(), traced()
graph = dovetail.capture(lambda x: torch.softmax(x, 0), (torch.randn(4),))
assert [p.kind for rule in ALL for p in rule.propose(RuleContext(graph))] == ["softmax"]
assert traced() == ["softmax"], traced()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_rule_is_still_the_function_it_was_created_from() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.allclose(library.NORMS["rms_norm"](x, weight, 1e-6, 0.0), F.rms_norm(x, (8,), weight, 1e-6))  # type: ignore[operator]


class Block(nn.Module):
    """Attention and MLP with their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.after, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


EXPECTED = {"layer_norm": 2, "attention": 1, "linear_activation": 1, "linear_residual": 2}


def counts(graph: GraphModule) -> dict[str, int]:
    roots: dict[str, set[Any]] = {}
    for match in candidates(ALL, graph):
        roots.setdefault(match.kind, set()).add(max(match.members))
    return {kind: len(roots.get(kind, ())) for kind in EXPECTED}


def test_in_a_captured_graph() -> None:
    assert counts(graph_of(Block(), (torch.randn(2, 6, 16),))) == EXPECTED


def test_in_a_graph_of_modules_and_methods() -> None:
    model, x = Block(), torch.randn(2, 6, 16)
    graph = dovetail.capture(symbolic_trace(model), (x,))
    assert any(n.op == "call_module" for n in graph.graph.nodes)
    assert counts(graph) == EXPECTED


def test_in_the_graphs_of_autograd() -> None:
    from torch._functorch.aot_autograd import aot_module, make_boxed_func

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(dovetail.capture(graph, tuple(inputs)))
        return make_boxed_func(graph.forward)

    compiled: Any = aot_module(Block(), fw_compiler=keep, bw_compiler=keep)
    compiled(torch.randn(2, 6, 16)).sum().backward()
    assert counts(graphs[0]) == EXPECTED


def test_a_near_miss_of_what_every_graph_has_is_not_reported() -> None:
    def normed(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return y, F.silu(gate) * x

    proposed = proposals(ALL, graph_of(normed, (torch.randn(2, 8), torch.randn(2, 8), torch.randn(8))))
    assert {p.rule for p in proposed} == {"rms_norm", "swiglu_gate"}
    assert all(isinstance(p, Candidate) for p in proposed)


def test_what_was_looked_for_once_is_not_looked_for_again() -> None:
    context = RuleContext(graph_of(Block(), (torch.randn(2, 6, 16),)))
    rule = library.NORMS["layer_norm"]
    assert rule.propose(context) is rule.propose(context)


def test_nothing_is_reported_of_what_no_rule_knows() -> None:
    graph = graph_of(lambda x, y: torch.atan2(x, y).cumsum(0), (torch.randn(4), torch.randn(4)))
    assert not proposals(ALL, graph)


def test_rules_say_what_they_need_in_names_of_operators() -> None:
    known = [rule for rule in ALL if isinstance(rule, LibraryRule)]
    assert known
    for rule in known:
        for word in rule.needs:
            assert any(hasattr(torch.ops.aten, name) for name in word), (rule.name, word)
