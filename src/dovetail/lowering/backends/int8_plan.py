"""A body in three forms: as it is, with its products watched, and with them computed in integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from dovetail.graph.module import Body
from dovetail.lowering.backends.int8_products import Product, products_of
from dovetail.lowering.backends.int8_ranges import Seen
from dovetail.lowering.backends.int8_steps import Ranging, Step, channels_last
from dovetail.lowering.examples import hint_of
from dovetail.lowering.faults import Failure
from dovetail.lowering.flattening import flat

Code = Callable[..., Any]


class Plan:
    """What is to be done with a body, the same for all calls of it.

    `plain` takes the operands. `watched` and `quantised` take before them, for each product, what is called with its
    input, or with its input, its residual and its weights and gives its result.
    """

    def __init__(self, body: Body, examples: Sequence[Any]) -> None:
        whole = flat(body)
        self.products = products_of(whole.graph)
        self.plain: Code = whole.forward
        self.watched = _code(whole.graph, self.products, _watch)
        self.quantised = _code(whole.graph, self.products, _replace)
        operands = [n for n in whole.graph.nodes if n.op == "placeholder"]
        self.numbers = tuple(
            tuple(None if w is None else operands.index(w) for w in _weights(p)) for p in self.products
        )
        self.layouts = _layouts(whole, self.products, examples)

    @property
    def constants(self) -> frozenset[int]:
        """The operands that must not change from call to call."""
        return frozenset(i for numbers in self.numbers for i in numbers if i is not None)

    def ranging(self) -> tuple[Ranging, ...]:
        """Products that need no calibration."""
        return tuple(Ranging(p, layout) for p, layout in zip(self.products, self.layouts, strict=True))

    def packed(self, seen: Sequence[Seen], operands: Sequence[Any]) -> tuple[Step, ...]:
        """Products for values like those seen, with the weights that are among the operands."""
        made: list[Step] = []
        for i, product in enumerate(self.products):
            weights = [None if k is None else operands[k] for k in self.numbers[i]]
            made.append(Step(product, seen[i], self.layouts[i], weights))
        return tuple(made)


def _weights(product: Product) -> tuple[Node | None, ...]:
    return (product.weight, product.bias, *product.norm)


def _watch(graph: Graph, product: Product, what: Node, env: dict[Node, Node]) -> None:
    graph.call_function(operator.call, (what, env[product.x]))


def _replace(graph: Graph, product: Product, what: Node, env: dict[Node, Node]) -> None:
    residual = None if product.residual is None else env[product.residual]
    weights = [None if w is None else env[w] for w in _weights(product)]
    env[product.last] = graph.call_function(operator.call, (what, env[product.x], residual, *weights))


def _code(old: Graph, products: Sequence[Product], put: Callable[..., None]) -> Code:
    """The code of a graph in which something is put at each product; what it takes in its place is left out."""
    graph = Graph()
    given = [graph.placeholder(f"product_{i}") for i in range(len(products))]
    replaces = put is _replace
    place = {(p.last if replaces else p.node): (p, what) for p, what in zip(products, given, strict=True)}
    gone = {node for p in products for node in p.taken} if replaces else set[Node]()
    env: dict[Node, Node] = {}
    for node in old.nodes:
        if node in place:
            product, what = place[node]
            put(graph, product, what, env)
        if node not in gone:
            env[node] = graph.node_copy(node, env.__getitem__)
    if replaces:
        graph.eliminate_dead_code()
    return GraphModule({}, graph).forward


class _Fake(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def _layouts(
    whole: GraphModule, products: Sequence[Product], examples: Sequence[Any]
) -> tuple[torch.memory_format, ...]:
    """How the results of products lie in memory when the body computes them for such operands."""
    if all(p.window is None for p in products):
        return (torch.contiguous_format,) * len(products)
    ran = _Fake(whole)
    mode = next(e.fake_mode for e in examples if hasattr(e, "fake_mode"))
    with mode, torch.no_grad():
        ran.run(*examples)
    return tuple(_layout(p, cast("Tensor", ran.env[p.last])) for p in products)


def _layout(product: Product, value: Tensor) -> torch.memory_format:
    if product.window is None:
        return torch.contiguous_format
    sizes, strides = ([hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    like = torch.empty_strided(sizes, strides, device="meta")
    for layout in (torch.contiguous_format, channels_last(len(product.window.stride))):
        if like.is_contiguous(memory_format=layout):
            return layout
    raise Failure(f"the result of '{product.node.name}' lies in memory as no integer convolution gives it")
