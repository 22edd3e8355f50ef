"""Programs that reports are written of in tests: gated layers of which one differs, and large graphs without a model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import dovetail

X = torch.linspace(-1, 1, 32).reshape(4, 8)
NARROW = 16


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GatedLayers(nn.Module):
    """Equal layers, of which one may be wider."""

    def __init__(self, depth: int = 6, wide: int | None = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(8, 2 * NARROW if i == wide else NARROW) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def swiglu_pattern(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def narrow_swiglu() -> dovetail.Rule:
    """A rule that declines layers wider than its kernel takes."""
    rule = dovetail.rule(kind="swiglu", name="swiglu")(swiglu_pattern)

    @rule.guard
    def narrow(match: dovetail.Match) -> dovetail.Decline | None:
        if match["gate"].shape[0] > NARROW:
            return dovetail.Decline("wider than my kernel takes", at=match["gate"])
        return None

    return rule


@cache
def gated(depth: int = 6, wide: int | None = 3) -> GraphModule:
    """The captured layers."""
    return dovetail.capture(GatedLayers(depth, wide).eval(), (X,))


@cache
def fused_gated(depth: int = 6, wide: int | None = 3) -> GraphModule:
    """The layers with a region in each but the wide one."""
    return dovetail.fuse(gated(depth, wide), narrow_swiglu())


_UNARY = [torch.ops.aten.relu.default, torch.ops.aten.tanh.default, torch.ops.aten.neg.default]


def large_graph(count: int, *, layers: bool) -> GraphModule:
    """A graph of so many operations: of equal layers of fifty in modules, or drawn at random without any."""
    with FakeTensorMode():
        value = torch.empty(8, 16)
    graph = Graph()
    last = [graph.placeholder("x")]
    last[0].meta["val"] = value
    draw = random.Random(0)
    for i in range(count):
        number, place = divmod(i, 50)
        if layers:
            other = last[-1 - place % 3] if place > 3 else last[-1]
            binary, target = place % 7 == 6, _UNARY[place % 3]
        else:
            other = last[draw.randrange(max(0, len(last) - 9), len(last))]
            binary, target = draw.random() < 0.4, _UNARY[draw.randrange(3)]
        args: tuple[Any, ...] = (last[-1], other) if binary else (last[-1],)
        node = graph.call_function(torch.ops.aten.add.Tensor if binary else target, args)
        node.meta["val"] = value
        if layers:
            part = "attention" if place < 25 else "mlp"
            node.meta["nn_module_stack"] = {
                "": ("", "models.Model"),
                f"l{number}": (f"layers.{number}", "models.Layer"),
                f"l{number}p": (f"layers.{number}.{part}", f"models.{part.title()}"),
            }
        last.append(node)
    graph.output(last[-1])
    return GraphModule(nn.Module(), graph)
