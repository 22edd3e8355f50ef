"""Large FX graphs of known shapes, with the meta that exporters put on nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
Quads = list[list[Node]]


class Sketch:
    """A graph being drawn: unary and binary operations with values, stack traces and module paths."""

    def __init__(self, *, distinct: bool) -> None:
        self.graph = Graph()
        self.distinct = distinct
        self.count = 0
        self.quads: Quads = []
        mode = FakeTensorMode()
        with mode:
            self.value = torch.empty(8, 16)

    def input(self, name: str) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.value
        return node

    def op(self, *inputs: Node) -> Node:
        self.count += 1
        # A literal of its own makes every body another one.
        literal = float(self.count) if self.distinct else 2.0
        if len(inputs) == 1:
            return self._described(self.graph.call_function(aten.mul.Tensor, (inputs[0], literal)))
        return self._described(self.graph.call_function(aten.add.Tensor, inputs))

    def call(self, target: Any, *args: Any) -> Node:
        self.count += 1
        return self._described(self.graph.call_function(target, args))

    def _described(self, node: Node) -> Node:
        path = f"layers.{self.count % 97}.mlp"
        node.meta = {
            "val": self.value,
            "stack_trace": f'File "model.py", line {self.count % 500}, in forward\n    x = x * w',
            "nn_module_stack": {path: (path, "Block")},
            "seq_nr": self.count,
            "torch_fn": ("mul_1", "method_descriptor.mul"),
        }
        return node

    def quad(self, *inputs: Node) -> Node:
        """Four operations in a row, to be one region."""
        at = self.op(*inputs)
        nodes = [at]
        for _ in range(3):
            at = self.op(at)
            nodes.append(at)
        self.quads.append(nodes)
        return at

    def finish(self, result: Node) -> tuple[GraphModule, Quads]:
        self.graph.output(result).meta["val"] = None
        return GraphModule(torch.nn.Module(), self.graph), self.quads


def _gaps(sketch: Sketch, at: Node, count: int) -> Node:
    for _ in range(count):
        at = sketch.op(at)
    return at


def chain(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """One operation after the other; of every sixteen, four are a region."""
    s = Sketch(distinct=distinct)
    at = s.input("x")
    while s.count < n:
        at = _gaps(s, s.quad(at), 12)
    return s.finish(at)


def residual(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """Blocks of sixteen with a skip around each; the region reads the skip's source too."""
    s = Sketch(distinct=distinct)
    at = s.input("x")
    while s.count < n:
        start = at
        at = s.quad(_gaps(s, at, 5), start)
        at = s.op(_gaps(s, at, 6), start)
    return s.finish(at)


def branches(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """Sixty-four branches listed in turns, so that what belongs together does not stand together."""
    s = Sketch(distinct=distinct)
    width = 64
    ends = [s.input("x")] * width
    while s.count < n:
        runs: list[list[Node]] = [[] for _ in range(width)]
        for step in range(16):
            for b in range(width):
                ends[b] = s.op(ends[b])
                if step < 4:
                    runs[b].append(ends[b])
        s.quads.extend(runs)
    while len(ends) > 1:
        ends = [s.op(*pair) if len(pair) == 2 else pair[0] for pair in _pairs(ends)]
    return s.finish(ends[0])


def nested_skips(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """Skips within skips: what is made first is read last."""
    s = Sketch(distinct=distinct)
    at = s.input("x")
    saved: list[Node] = []
    while s.count < n * 15 // 16:
        at = _gaps(s, s.quad(at), 10)
        saved.append(at)
    while saved:
        at = s.op(at, saved.pop())
    return s.finish(at)


def long_skip(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """A chain whose first value is read again at the very end."""
    s = Sketch(distinct=distinct)
    first = at = s.op(s.input("x"))
    while s.count < n:
        at = _gaps(s, s.quad(at), 12)
    return s.finish(s.op(at, first))


def views_and_effects(n: int, *, distinct: bool) -> tuple[GraphModule, Quads]:
    """Blocks with a view, a random draw and a write, whose regions also return a value from their middle."""
    s = Sketch(distinct=distinct)
    at = s.input("x")
    while s.count < n:
        start = at
        at = s.quad(_gaps(s, at, 3))
        at = s.op(_gaps(s, at, 2), s.quads[-1][1])
        view = s.call(aten.view.default, at, [8, 16])
        drawn = s.call(aten.bernoulli.p, view, 0.5)
        s.call(aten.add_.Tensor, drawn, 1.0)
        at = s.op(drawn, start)
    return s.finish(at)


def _pairs(nodes: list[Node]) -> Iterator[list[Node]]:
    for i in range(0, len(nodes), 2):
        yield nodes[i : i + 2]


SHAPES: dict[str, Callable[..., tuple[GraphModule, Any]]] = {
    "chain": chain,
    "residual": residual,
    "branches": branches,
    "nested skips": nested_skips,
    "one long skip": long_skip,
    "views, effects": views_and_effects,
}
