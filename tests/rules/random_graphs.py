"""Small graphs of any shape for properties of rules that grow regions: skips, diamonds, tuples, draws, writes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

aten = torch.ops.aten

Step = tuple[str, int, int]
PURE = ("sin", "add", "add", "mul", "mm", "sum", "softmax", "t", "max", "cat")
EFFECTS = ("bernoulli", "write")


def steps(*, effects: bool = False, most: int = 24) -> st.SearchStrategy[list[Step]]:
    """Programs: what each operation is, and how far back its operands were made."""
    ops = st.sampled_from(PURE + EFFECTS if effects else PURE)
    back = st.one_of(st.integers(0, 2), st.integers(0, 30))
    return st.lists(st.tuples(ops, back, back), min_size=2, max_size=most)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.rand(4, 4), torch.rand(4, 4)


class _Drawing:
    def __init__(self) -> None:
        self.graph = Graph()
        self.drawn: list[tuple[Node, tuple[int, int]]] = []
        for name in ("x", "y"):
            self.drawn.append((self.graph.placeholder(name), (4, 4)))

    def call(self, target: Any, *args: Any) -> Node:
        return self.graph.call_function(target, args)

    def step(self, op: str, back: int, other: int) -> None:
        node, shape = self.drawn[-1 - back % len(self.drawn)]
        second, wide = self.drawn[-1 - other % len(self.drawn)]
        whole = shape == wide == (4, 4)
        if op in ("add", "mul") or (op in ("mm", "cat") and not whole):
            drawn = self.call(aten.add.Tensor if op == "add" else aten.mul.Tensor, node, second)
            shape = (max(shape[0], wide[0]), max(shape[1], wide[1]))
        elif op == "mm":
            drawn = self.call(aten.mm.default, node, second)
        elif op == "cat":
            joined = self.call(aten.cat.default, [node, second], 1)
            drawn = self.call(aten.slice.Tensor, joined, 1, 2, 6)
        elif op == "sum":
            drawn, shape = self.call(aten.sum.dim_IntList, node, [1], True), (shape[0], 1)
        elif op == "softmax":
            drawn = self.call(aten.softmax.int, node, 0)
        elif op == "t":
            drawn, shape = self.call(aten.t.default, node), (shape[1], shape[0])
        elif op == "max":
            pair = self.call(aten.max.dim, node, 0, True)
            drawn, shape = self.call(operator.getitem, pair, 0), (1, shape[1])
        elif op == "bernoulli":
            drawn = self.call(aten.bernoulli.p, node, 0.5)
        elif op == "write":
            drawn = self.call(aten.add_.Tensor, node, 1.0)
        else:
            drawn = self.call(aten.sin.default, node)
        self.drawn.append((drawn, shape))


def built(program: Sequence[Step], *, values: bool = True) -> GraphModule:
    """The graph of a program. It returns what nothing reads."""
    drawing = _Drawing()
    for op, back, other in program:
        drawing.step(op, back, other)
    ends = [node for node, _ in drawing.drawn if not node.users and node.op != "placeholder"]
    drawing.graph.output(tuple(ends))
    gm = GraphModule(torch.nn.Module(), drawing.graph)
    if values:
        FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs())
    return gm
