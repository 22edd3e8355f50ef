"""Backends that are given ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from torch.fx import GraphModule, Node

from dovetail.lowering.backends.foreign import Foreign
from dovetail.lowering.onnx.layouts import Layout
from dovetail.lowering.onnx.program import model_of
from dovetail.lowering.onnx.types import NoForm
from dovetail.lowering.onnx.writer import Dialect, Writer


class OnnxBackend(Foreign):
    """A backend whose programs are ONNX models; sizes may vary where the forms of operators allow it."""

    open_sizes: ClassVar[bool] = True
    dialect: ClassVar[Dialect] = Dialect(runs=True)

    def why_not_operation(self, node: Node) -> str | None:
        writer = Writer(self.dialect)
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            count = len(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else 0
            writer.names[given] = tuple(f"{given.name}_{i}" for i in range(count)) if count else given.name
        try:
            writer.write(node)
        except NoForm as failure:
            return str(failure)
        return None

    def program(self, body: GraphModule, operands: Sequence[Any], results: Sequence[Layout]) -> Any:
        return model_of(body.graph, self.dialect, operands=operands, results=results).SerializeToString()

    def packed(self, program: Any) -> bytes:
        return program

    def unpacked(self, data: bytes) -> Any:
        return data


def input_names(model: bytes) -> list[str]:
    """The names of the inputs of an ONNX model, which stand for the operands in their order."""
    import onnx

    return [i.name for i in onnx.ModelProto.FromString(model).graph.input]


def require_in_range(flag: Any) -> None:
    """Raise what eager code would where a model says that an index was out of range."""
    if not flag:
        raise IndexError("an index is out of range")
