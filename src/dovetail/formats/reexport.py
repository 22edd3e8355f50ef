"""Rewrites a flat body for an external compiler: contiguous operands, checked indices, unsupported operators decomposed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from dovetail.ir.schema import op_name
from dovetail.ir.tensor_spec import Layout

ATEN = torch.ops.aten
Decomposition = Callable[[Node], GraphModule | None]
"""Returns the graph to write in place of a node, with its inputs in order as operands; None to write it as it is."""


@dataclass(frozen=True)
class ReexportedGraph:
    """A graph, and whether its last result reports that every index was in range."""

    graph: Graph
    guarded: bool


class Reexporter:
    """Writes operations into a graph, each with a fake value. With `checks`, indices are checked."""

    def __init__(self, checks: bool = True) -> None:
        self.graph, self.mode, self.checks = Graph(), FakeTensorMode(), checks
        self.flags: list[Node] = []
        self._start: Node | None = None

    def operand(self, name: str, sizes: Sequence[int], dtype: torch.dtype) -> Node:
        """Return a new contiguous operand."""
        # Operands come first, also those that are added later.
        with contextlib.nullcontext() if self._start is None else self.graph.inserting_before(self._start):
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(tuple(sizes), dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Append an operation; views become reshapes, which do not depend on strides."""
        if target in _VIEWS:
            # _reshape_alias has strides as well.
            target, args = ATEN.reshape.default, args[:2]
        node = self.graph.call_function(target, args, kwargs)
        self._start = self._start or node
        given, named = cast("Any", map_arg((args, kwargs), lambda n: n.meta["val"]))
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*given, **named)
        return node

    def write(self, node: Node, env: dict[Node, Any], decompose: Decomposition) -> None:
        """Append an operation of another graph, decomposed by `decompose`; `env` maps the nodes of that graph."""
        if node.target is operator.getitem and isinstance(env[cast("Node", node.args[0])], tuple):
            env[node] = env[cast("Node", node.args[0])][cast("int", node.args[1])]
            return
        args, kwargs = cast("Any", map_arg((node.args, node.kwargs), env.__getitem__))
        args = self._in_range(node.target, list(args))
        decomposed = None if node.target is operator.getitem else decompose(node)
        if decomposed is None:
            env[node] = self.call(node.target, *args, **kwargs)
            return
        # An index may have been replaced by one that is in range.
        replaced = dict(zip(input_nodes(node.args), input_nodes(args), strict=False))
        inner: dict[Node, Any] = {}
        inputs = [replaced.get(n, env[n]) for n in node.all_input_nodes]
        for one in decomposed.graph.nodes:
            if one.op == "placeholder":
                inner[one] = inputs.pop(0)
            elif one.op == "output":
                results = cast("tuple[Any, ...]", map_arg(one.args[0], inner.__getitem__))
                env[node] = results[0] if isinstance(node.meta["val"], Tensor) else results
            else:
                args, kwargs = cast("Any", map_arg((one.args, one.kwargs), inner.__getitem__))
                inner[one] = self.call(one.target, *args, **kwargs)

    def _in_range(self, target: Any, args: list[Any]) -> list[Any]:
        """Return arguments with indices that are clamped to their range and counted from the front, and record a flag.

        Eager code raises for an index out of range. Compilers read whatever is in memory there, or the last row.
        """
        at = _INDICES.get(str(target))
        if at is not None:
            source, index, dim = at
            along = 0 if dim is None else args[dim]
            args[index] = self._checked(args[index], _size(args[source], along), 0)
        elif str(target) == "aten.index.Tensor":
            sizes = args[0].meta["val"].shape
            args[1] = [
                None if one is None else self._wrapped(self._checked(one, sizes[d], -sizes[d]), sizes[d])
                for d, one in enumerate(args[1])
            ]
        return args

    def _checked(self, index: Node, size: int, lowest: int) -> Node:
        if not self.checks or not index.meta["val"].numel() or not size:
            return index
        least, most = (self.call(op, index) for op in (ATEN.min.default, ATEN.max.default))
        low = self.call(ATEN.ge.Scalar, least, lowest)
        self.flags.append(self.call(ATEN.logical_and.default, low, self.call(ATEN.lt.Scalar, most, size)))
        return self.call(ATEN.clamp.default, index, lowest, size - 1)

    def _wrapped(self, index: Node, size: int) -> Node:
        from_the_end = self.call(ATEN.lt.Scalar, index, 0)
        return self.call(ATEN.where.self, from_the_end, self.call(ATEN.add.Tensor, index, size), index)

    def finish(self, results: Sequence[Node]) -> ReexportedGraph:
        """Return the graph with these results, followed by the flag."""
        flag: list[Node] = []
        for one in self.flags:
            flag = [self.call(ATEN.logical_and.default, flag[0], one) if flag else one]
        self.graph.output((*results, *flag))
        return ReexportedGraph(self.graph, bool(flag))


_VIEWS = (ATEN.view.default, ATEN._unsafe_view.default, ATEN._reshape_alias.default)
_INDICES: Mapping[str, tuple[int, int, int | None]] = {
    "aten.embedding.default": (0, 1, None),
    "aten.index_select.default": (0, 2, 1),
    "aten.gather.default": (0, 2, 1),
    "aten.scatter.value": (0, 2, 1),
    "aten.scatter.src": (0, 2, 1),
    "aten.scatter_add.default": (0, 2, 1),
}
"""Positions of the indexed argument, of the indices, and of the dimension."""
INDEXED_OPS = frozenset({*_INDICES, "aten.index.Tensor"})


def _size(node: Node, dim: int) -> int:
    shape = node.meta["val"].shape
    return shape[dim] if shape else 1


def input_nodes(arguments: Any) -> list[Node]:
    """Return the nodes in nested arguments, one for each occurrence."""
    nodes: list[Node] = []
    map_arg(arguments, nodes.append)
    return nodes


def reexport_body(
    body: GraphModule,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    decompose: Decomposition = lambda _: None,
) -> ReexportedGraph:
    """Return a flat body whose operands and results are contiguous, with their dimensions in the order of memory."""
    exporter = Reexporter()
    env: dict[Node, Any] = {}
    layouts = list(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            layout = layouts.pop(0)
            sizes = cast("tuple[int, ...]", layout.sizes)
            order = layout.order or tuple(range(len(sizes)))
            operand = exporter.operand(node.name, [sizes[d] for d in order], layout.dtype)
            env[node] = (
                exporter.call(ATEN.permute.default, operand, list(layout.inverse))
                if layout.permuted
                else operand
            )
        elif node.op == "call_function":
            exporter.write(node, env, decompose)
    nodes = cast("Sequence[Node]", body.graph.output_node().args[0])
    outputs: list[Node] = []
    for node, layout in zip(nodes, results, strict=True):
        value = env[node]
        outputs.append(
            exporter.call(ATEN.permute.default, value, list(layout.order))
            if layout.order and layout.permuted
            else value
        )
    return exporter.finish(outputs)


def decompose_node(
    node: Node, table: Mapping[Any, Callable[..., Any]], call: Callable[..., Any] | None = None
) -> GraphModule:
    """Trace one operation with a decomposition table; `call` is traced in place of the operator if given."""
    inputs = node.all_input_nodes
    target = call or cast("Any", node.target)

    def run(*given: Tensor) -> tuple[Any, ...]:
        env = dict(zip(inputs, given, strict=True))
        args, kwargs = cast("Any", map_arg((node.args, node.kwargs), env.__getitem__))
        result = target(*args, **kwargs)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in inputs]
        return _functional(make_fx(run, decomposition_table=dict(table))(*fakes))


def _functional(traced: GraphModule) -> GraphModule:
    """Replace in-place operators, which some decompositions use on fresh values, by functional ones."""
    for node in traced.graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or not target._schema.is_mutable:
            continue
        operand = node.args[0]
        name = op_name(target)
        packet = getattr(ATEN, name.removesuffix("_"), None)
        if (
            not name.endswith("_")
            or operand.op != "call_function"
            or len(operand.users) > 1
            or packet is None
        ):
            raise ValueError(f"{target} writes what is read elsewhere")
        node.target = getattr(packet, target._overloadname)
    return traced


def isolated_calls(nodes: Sequence[Node], decompose: Decomposition) -> Graph:
    """Return a graph of operations that each have operands of their own."""
    exporter = Reexporter()
    results: list[Node] = []
    for node in nodes:
        env: dict[Node, Any] = {
            n: exporter.operand(n.name, n.meta["val"].shape, n.meta["val"].dtype)
            for n in node.all_input_nodes
        }
        exporter.write(node, env, decompose)
        value = env[node]
        if isinstance(value, Node) and not isinstance(value.meta["val"], Tensor):
            # Elements that are empty or None cannot be read.
            parts = enumerate(value.meta["val"])
            value = tuple(
                exporter.call(operator.getitem, value, i)
                for i, one in parts
                if one is not None and one.numel()
            )
        results.extend(cast("Sequence[Node]", value) if isinstance(value, tuple) else [value])
    return exporter.finish(results).graph


def pow_as_root(x: Tensor, exponent: float) -> Any:
    """Compute powers that torch computes as roots, which differ for minus infinity."""
    if exponent == 0.5:
        return torch.sqrt(x)
    return torch.rsqrt(x) if exponent == -0.5 else NotImplemented


def lerp(start: Tensor, end: Tensor, weight: Any) -> Any:
    """Interpolate from the nearer end, as torch does, so that an infinite end stays infinite."""
    delta = end - start
    if isinstance(weight, Tensor):
        return torch.where(weight.abs() < 0.5, start + delta * weight, end + delta * (weight - 1))
    return start + delta * weight if abs(weight) < 0.5 else end + delta * (weight - 1)
