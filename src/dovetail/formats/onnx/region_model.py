"""The ONNX model of one flat graph, as the backends that run ONNX take it, and the table of all translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from dovetail.formats.onnx.ops_elementwise import ELEMENTWISE
from dovetail.formats.onnx.ops_linear import ATTENTION, CONVOLUTIONS, PRODUCTS
from dovetail.formats.onnx.ops_reduce import NORMS, REDUCTIONS
from dovetail.formats.onnx.ops_shape import INDEXING, REARRANGE, SHAPE
from dovetail.formats.onnx.writer import (
    IR_VERSION,
    Dialect,
    OnnxWriter,
    OpTranslation,
    element_type,
    value_info,
)
from dovetail.ir.tensor_spec import Layout

_TABLES = (ELEMENTWISE, SHAPE, INDEXING, REDUCTIONS, PRODUCTS, ATTENTION, CONVOLUTIONS, NORMS, REARRANGE)
TRANSLATIONS: Mapping[str, OpTranslation] = {
    target: translation for table in _TABLES for targets, translation in table.items() for target in targets
}
"""The translation of each supported operator."""


def region_model(
    graph: Graph,
    dialect: Dialect | None = None,
    *,
    operands: Sequence[Layout | None] = (),
    results: Sequence[Layout] = (),
) -> Any:
    """Return the ONNX model of a flat graph, with inputs and results in the order of the graph's.

    With layouts, inputs and results have their dimensions in the order of memory. Where the dialect `runs` and the
    graph has indices, one more result reports whether all were in range.
    """
    from onnx import helper

    writer = OnnxWriter(TRANSLATIONS, dialect)
    inputs: list[Any] = []
    layouts = list(operands)
    for node in graph.nodes:
        if node.op == "placeholder":
            layout = layouts.pop(0) if layouts else None
            name = writer.name(node.name)
            inputs.append(value_info(name, node.meta.get("val"), None if layout is None else layout.order))
            if layout is not None and layout.permuted:
                name = writer.op("Transpose", name, perm=layout.inverse, label=node.name)
            writer.names[node] = name
        elif node.op != "output":
            writer.write(node)
    outputs = _outputs(writer, graph, results)
    flag = ""
    for one in writer.flags:
        flag = writer.op("And", flag, one) if flag else one
    if flag:
        outputs.append(helper.make_tensor_value_info(flag, element_type(torch.bool), []))
    return helper.make_model(
        helper.make_graph(writer.nodes, "region", inputs, outputs),
        opset_imports=[helper.make_opsetid(d, v) for d, v in writer.dialect.opsets.items()],
        ir_version=IR_VERSION,
        producer_name="dovetail",
    )


def _outputs(writer: OnnxWriter, graph: Graph, layouts: Sequence[Layout]) -> list[Any]:
    names: set[str] = set()
    outputs: list[Any] = []
    nodes = cast("Sequence[Node]", graph.output_node().args[0])
    for node, layout in zip(nodes, layouts or [None] * len(nodes), strict=True):
        name = writer.of(node)
        if layout is not None and layout.permuted:
            name = writer.op("Transpose", name, perm=layout.order, label=node.name)
        # A result that is an operand, or that comes twice, needs a name of its own.
        elif name in names or node.op == "placeholder":
            name = writer.identity(node, name)
        names.add(name)
        outputs.append(value_info(name, node.meta.get("val"), None if layout is None else layout.order))
    return outputs
