"""Every attention, norm and MLP of the zoo's models is proposed as what it is."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import dovetail
from dovetail import zoo
from tests.rules.library.census import Census, census, outlined, parts_by_kind, same_results

LINEAR = ("linear_activation",)
# MLPs that have no class of their own, by path.
EXTRA: dict[str, dict[str, tuple[str, ...]]] = {
    "mlp": {"blocks.0": LINEAR, "blocks.1": LINEAR},
    "bert": {"layers.0": LINEAR, "layers.1": LINEAR},
    "vit": {"layers.0.mlp": LINEAR, "layers.1.mlp": LINEAR},
    "mamba": {"layers.0.mixer": ("swiglu",), "layers.1.mixer": ("swiglu",)},
}
PARTS: dict[str, dict[str, int]] = {
    "mlp": {"layer_norm": 2, "linear_activation": 2},
    "llama": {"rms_norm": 5, "attention": 2, "swiglu": 2},
    "bert": {"layer_norm": 5, "attention": 2, "linear_activation": 2},
    "vit": {"layer_norm": 5, "attention": 2, "linear_activation": 2},
    "mamba": {"rms_norm": 3, "swiglu": 2},
    "moe": {"rms_norm": 5, "attention": 2, "swiglu": 2},
    "resnet": {},
    "inception": {},
    "lstm": {},
}


@cache
def looked_at(name: str, mode: str) -> tuple[nn.Module, Census]:
    model = zoo.get(name).build().train(mode == "train")
    inputs = zoo.get(name).example_inputs()
    graph = dovetail.capture(model, inputs.args, inputs.kwargs)
    return model, census(model, graph, EXTRA.get(name))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", zoo.names())
def test_every_part_is_matched(name: str, mode: str) -> None:
    model, report = looked_at(name, mode)
    assert dict(parts_by_kind(report)) == PARTS[name]
    assert not report.unfound()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    covered = {
        i
        for c in report.candidates
        if c.kind == "conv_bn_act" and c.attrs and c.attrs["batch_norm"]
        for i in c.members
        if "batch_norm" in str(report.context.nodes[i].target)
    }
    assert len(covered) == len(norms)


@pytest.mark.parametrize("name", zoo.names())
def test_as_regions_they_compute_the_same(name: str) -> None:
    _, report = looked_at(name, "eval")
    inputs = zoo.get(name).example_inputs()
    before = pytree.tree_leaves(report.context.gm(*inputs.args, **inputs.kwargs))
    after = pytree.tree_leaves(outlined(report)(*inputs.args, **inputs.kwargs))
    assert same_results(before, after)


def test_what_belongs_to_a_llama() -> None:
    _, report = looked_at("llama", "eval")
    pairs = [c for c in report.candidates if c.rule == "rotary_pair"]
    assert len(pairs) == 2
    assert sum(c.rule == "rotary" for c in report.candidates) == 4
    causal = [c.attrs for c in report.candidates if c.kind == "attention"]
    assert all(attrs is not None and attrs["causal"] for attrs in causal)
    assert {attrs["groups"] for attrs in causal if attrs} >= {2}
    norms = {c.members for c in report.candidates if c.kind == "add_rms_norm"}
    assert len({m for members in norms for m in members if "rsqrt" in report.context.nodes[m].name}) == 4


def test_what_belongs_to_a_bert() -> None:
    _, report = looked_at("bert", "train")
    assert {c.attrs["tables"] for c in report.candidates if c.kind == "embedding_norm" and c.attrs} == {3}
    dropped = [c for c in report.candidates if c.kind == "dropout_add_layer_norm"]
    assert len(dropped) == 4
    assert torch.tensor([c.attrs["dropout"] for c in dropped if c.attrs]).allclose(torch.tensor(0.1))


class Odd(nn.Module):
    """A norm by the largest value, and an attention without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.norm(x))


class RMSNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).amax(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ x.mT) @ x


def test_a_part_that_is_not_matched_is_reported_with_its_near_miss() -> None:
    model = Odd()
    report = census(model, dovetail.capture(model, (torch.randn(2, 6, 8),)))
    norm, attention = sorted(report.unfound(), reverse=True)
    assert "it has 'aten.amax.default' where the pattern has 'aten.mean" in norm
    assert attention.startswith("attention: ")
