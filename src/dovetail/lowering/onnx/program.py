"""A body as a whole ONNX model, all its operands inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from dovetail.lowering.onnx.layouts import Layout
from dovetail.lowering.onnx.types import NoForm, element
from dovetail.lowering.onnx.writer import Dialect, Writer

IR_VERSION = 10


def model_of(
    graph: Graph,
    dialect: Dialect | None = None,
    name: str = "region",
    *,
    operands: Sequence[Layout | None] = (),
    results: Sequence[Layout] = (),
) -> Any:
    """The ONNX model that computes what a flat graph does: inputs and results in the order of the graph's.

    With layouts, inputs and results have their dimensions in the order in which they lie in memory. Where it is
    run in place of torch and has indices, one more result says whether all were in range.
    """
    from onnx import helper

    writer = Writer(dialect)
    inputs: list[Any] = []
    waiting = list(operands)
    for node in graph.nodes:
        if node.op == "placeholder":
            layout = waiting.pop(0) if waiting else None
            given = writer.name(node.name)
            inputs.append(described(given, node.meta.get("val"), layout))
            if layout is not None and layout.turned:
                given = writer.op("Transpose", given, perm=layout.back, label=node.name)
            writer.names[node] = given
        elif node.op != "output":
            writer.write(node)
    made = finished(writer, graph, results)
    outputs = [described(value, node.meta.get("val"), layout) for value, node, layout in made]
    outputs += [helper.make_tensor_value_info(flag, element(torch.bool), []) for flag in _flag(writer)]
    return helper.make_model(
        helper.make_graph(writer.nodes, name, inputs, outputs),
        opset_imports=[helper.make_opsetid(d, v) for d, v in writer.dialect.opsets.items()],
        ir_version=IR_VERSION,
        producer_name="dovetail",
    )


def _flag(writer: Writer) -> list[str]:
    """Whether every index was in range, if any was looked at."""
    found: list[str] = []
    for flag in writer.flags:
        found = [writer.op("And", found[0], flag) if found else flag]
    return found


def finished(
    writer: Writer, graph: Graph, layouts: Sequence[Layout] = ()
) -> list[tuple[str, Node, Layout | None]]:
    """The results of a graph by the names they have, each a name of its own."""
    seen: set[str] = set()
    made: list[tuple[str, Node, Layout | None]] = []
    nodes = cast("Sequence[Node]", graph.output_node().args[0])
    for node, layout in zip(nodes, layouts or [None] * len(nodes), strict=True):
        value = writer.of(node)
        if layout is not None and layout.turned:
            value = writer.op("Transpose", value, perm=layout.order, label=node.name)
        # A result that is an operand, or that comes twice, needs a name of its own.
        elif value in seen or node.op == "placeholder":
            value = writer.op("Identity", value, label=node.name)
        seen.add(value)
        made.append((value, node, layout))
    return made


def described(name: str, value: Any, layout: Layout | None = None) -> Any:
    """What a value is, by name: dtype and sizes, symbols where they may vary."""
    from onnx import helper

    if isinstance(value, Tensor):
        order = range(value.dim()) if layout is None or layout.order is None else layout.order
        return helper.make_tensor_value_info(
            name, element(value.dtype), dimensions([value.shape[d] for d in order])
        )
    if isinstance(value, (int, SymInt)) and not isinstance(value, bool):
        return helper.make_tensor_value_info(name, element(torch.int64), [])
    raise NoForm(f"'{name}' is a {type(value).__name__}, and ONNX has tensors only")


def dimensions(shape: Sequence[Any]) -> list[int | str]:
    """Sizes as ONNX has them: a number, or the text of the expression that it is."""
    return [n if isinstance(n, int) else str(n.node.expr).replace(" ", "") for n in shape]
