"""Random programs of sibling products: branches of every kind, alike and not, and what may follow them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import dovetail

_aten = torch.ops.aten
Drawn = tuple[GraphModule, tuple[torch.Tensor, ...]]


class Drawing:
    """A graph in the making: each operation is run on real values at once, so that the next one fits."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.root, self.graph = nn.Module(), Graph()
        self.values: dict[Node, Any] = {}
        self.inputs: list[torch.Tensor] = []
        self.some_frozen = rng.randrange(4) == 0

    def input(self, *shape: int) -> Node:
        value = torch.randn(shape)
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(value)
        self.values[node] = value
        return node

    def parameter(self, *shape: int) -> Node:
        name = f"p{len(self.root._parameters)}"
        value = nn.Parameter(
            torch.randn(shape) / 2, requires_grad=not (self.some_frozen and self.rng.randrange(4) == 0)
        )
        self.root.register_parameter(name, value)
        node = self.graph.get_attr(name)
        self.values[node] = value
        return node

    def buffer(self, value: torch.Tensor) -> Node:
        name = f"b{len(self.root._buffers)}"
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        self.values[node] = value
        return node

    def call(self, target: Any, *args: Any) -> Node | None:
        real = [self.values[a] if isinstance(a, Node) else a for a in args]
        try:
            value = target(*real)
        except (RuntimeError, IndexError):
            return None
        node = self.graph.call_function(target, args)
        self.values[node] = value
        return node

    def tensors(self) -> list[Node]:
        return [n for n, v in self.values.items() if isinstance(v, torch.Tensor) and n.op == "call_function"]


def draw(rng: Random) -> Drawn:
    """A graph with values, and inputs for it."""
    torch.manual_seed(rng.randrange(1 << 30))
    d = Drawing(rng)
    image = rng.randrange(3) == 0
    grown: list[Node] = []
    value = d.input(2, 3, 5, 5) if image else d.input(*((2, 4, 3) if rng.randrange(2) else (4, 3)))
    for _ in range(1 + rng.randrange(3)):
        branches = _convolutions(d, value) if image else _linears(d, value)
        alike = [rng.randrange(13) for _ in range(rng.randrange(4))] if rng.randrange(3) else None
        grown = [_grow(d, b, alike or [rng.randrange(13) for _ in range(rng.randrange(4))]) for b in branches]
        value = grown[rng.randrange(len(grown))]
        if d.values[value].dim() != (4 if image else 2):
            break
    tips = [d.call(_aten.neg.default, tip) for tip in grown]
    pool = d.tensors()
    others = [pool[rng.randrange(len(pool))] for _ in range(rng.randrange(3))]
    d.graph.output((*tips, *others))
    gm = GraphModule(d.root, d.graph)
    gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op == "placeholder" or _writes(n))
    return dovetail.capture(gm, tuple(d.inputs)), tuple(d.inputs)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or bool(schema is not None and schema.is_mutable)


def _linears(d: Drawing, x: Node) -> list[Node]:
    rng, size = d.rng, d.values[x].shape[-1]
    products: list[Node] = []
    for _ in range(2 + rng.randrange(3)):
        width = rng.choice((2, 3, 4))
        way = rng.randrange(6)
        if way <= 2:
            bias = d.parameter(width) if rng.randrange(2) else None
            node = d.call(_aten.linear.default, x, d.parameter(width, size), bias)
        elif way == 3:
            node = d.call(_aten.matmul.default, x, d.parameter(size, width))
        elif way == 4 and d.values[x].dim() == 2:
            turned = d.call(_aten.t.default, d.parameter(width, size))
            node = d.call(_aten.addmm.default, d.parameter(width), x, turned)
        else:
            node = d.call(_aten.matmul.default, x, d.call(_aten.t.default, d.parameter(width, size)))
        products += [node] if node is not None else []
    return products


def _convolutions(d: Drawing, x: Node) -> list[Node]:
    rng, channels = d.rng, d.values[x].shape[1]
    products: list[Node] = []
    for _ in range(2 + rng.randrange(3)):
        width, kernel = rng.choice((2, 4)), rng.choice((1, 1, 3))
        bias = d.parameter(width) if rng.randrange(2) else None
        weight = d.parameter(width, channels, kernel, kernel)
        padding = kernel // 2
        node = d.call(_aten.conv2d.default, x, weight, bias, [1, 1], [padding, padding], [1, 1], 1)
        products += [node] if node is not None else []
    return products


def _grow(d: Drawing, at: Node, way: list[int]) -> Node:
    """A branch with what follows it, by number."""
    ways: tuple[Callable[[Node], Node | None], ...] = (
        lambda n: d.call(_aten.relu.default, n),
        lambda n: d.call(_aten.relu.default, n),
        lambda n: d.call(_aten.mul.Tensor, n, 0.5),
        lambda n: _gated(d, n),
        lambda n: _scaled(d, n),
        lambda n: d.call(_aten.transpose.int, n, 0, 1),
        lambda n: d.call(_aten.reshape.default, n, [-1]),
        lambda n: d.call(_aten.view.default, n, [-1]),
        lambda n: d.call(_aten.sum.dim_IntList, n, [0]),
        lambda n: d.call(_aten.softmax.int, n, 1),
        lambda n: d.call(_aten.relu_.default, n),
        lambda n: d.call(_aten.add_.Tensor, n, 1.0),
        lambda n: _normed(d, n),
    )
    for number in way:
        grown = ways[number](at)
        at = grown if grown is not None else at
    return at


def _gated(d: Drawing, n: Node) -> Node | None:
    gate = d.call(_aten.sigmoid.default, n)
    return d.call(_aten.mul.Tensor, n, gate) if gate is not None else None


def _scaled(d: Drawing, n: Node) -> Node | None:
    value = d.values[n]
    shape = (value.shape[1], 1, 1) if value.dim() == 4 else (value.shape[-1],) if value.dim() else ()
    return d.call(_aten.mul.Tensor, n, d.parameter(*shape))


def _normed(d: Drawing, n: Node) -> Node | None:
    if d.values[n].dim() < 2:
        return None
    width = d.values[n].shape[1]
    scale, shift = d.parameter(width), d.parameter(width)
    mean, variance = d.buffer(torch.randn(width)), d.buffer(torch.rand(width) + 0.5)
    norm = _aten._native_batch_norm_legit_no_training.default
    normed = d.call(norm, n, scale, shift, mean, variance, 0.1, 1e-5)
    return d.call(operator.getitem, normed, 0) if normed is not None else None
