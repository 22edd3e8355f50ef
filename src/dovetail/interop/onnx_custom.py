"""ONNX forms that users give for operators: how they are called, and what they may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.errors import SaveError
from dovetail.lowering.faults import in_a_line
from dovetail.lowering.onnx.program import IR_VERSION
from dovetail.lowering.onnx.writer import OPSET, Writer, bound, packed

OnnxForm = Callable[..., Any]
"""Called with an `OnnxOperators` and the arguments of an operator; returns the name of the result, or a tuple of them."""

_LARGEST_CHECKED = 2**31 - 2**26


class OnnxOperators:
    """Appends ONNX nodes: `op.Relu(x)` is the name of a ReLU of the value named x.

    Inputs are names of values, numbers, lists of numbers, tensors, or None for one that is left out. Keywords are
    attributes (numbers, texts, tensors, and lists of them), save `domain` ("" for ONNX's own operators) and `outputs`, how many results there are. `node` is the
    operation that is written, with `node.meta["val"]` for its dtype and sizes.
    """

    def __init__(self, writer: Writer, node: Node, what: str) -> None:
        self._writer, self.node, self._what = writer, node, what

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if kind.startswith("_"):
            raise AttributeError(kind)

        def append(*inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
            if not domain:
                self._check_known(kind)
            names = [self._value(value) for value in inputs]
            held = {k: packed(v) if isinstance(v, Tensor) else v for k, v in attributes.items()}
            result = self._writer.op(kind, *names, results=outputs, domain=domain, **held)
            if not domain:
                self._check_node(kind, self._writer.nodes[-1])
            return result

        return append

    def _value(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            if not self._writer.has(value):
                raise self._wrong(f"reads {value!r}, which is no value of the graph")
            return value
        if isinstance(value, Tensor):
            return self._writer.op("Constant", value=packed(value), label="constant")
        numbers: list[Any] = list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else [value]
        for kind, dtype in ((bool, torch.bool), (int, torch.int64), ((int, float), torch.float32)):
            # An empty list is of sizes or axes.
            if all(isinstance(n, kind) for n in numbers) and (numbers or kind is int):
                return self._writer.constant(value, dtype)
        raise self._wrong(f"reads a {type(value).__name__}; inputs are names of values, numbers and tensors")

    def _check_known(self, kind: str) -> None:
        from onnx import defs

        try:
            defs.get_schema(kind, OPSET, "")
        except defs.SchemaError as error:
            raise self._wrong(
                f"uses '{kind}', which opset {OPSET} of ONNX does not have; give domain= for one of another"
            ) from error

    def _check_node(self, kind: str, written: Any) -> None:
        from onnx import checker

        context = checker.C.CheckerContext()
        context.ir_version, context.opset_imports = IR_VERSION, {"": OPSET}
        try:
            checker.check_node(written, context)
        except checker.ValidationError as error:
            raise self._wrong(f"uses '{kind}' wrongly: {in_a_line(error)}") from error

    def _wrong(self, what: str) -> SaveError:
        return SaveError(f"the form given for {self._what} {what}.", self.node.name)


class CustomForm:
    """The form that a user gave for an operator."""

    def __init__(self, target: str, function: OnnxForm) -> None:
        self.target, self.function = target, function
        self.used = False

    def write(self, writer: Writer, node: Node) -> Any:
        """Append the nodes of the form; SaveError where it is wrong."""
        self.used = True
        args, kwargs = map_arg(bound(node), writer.of)
        try:
            result = self.function(OnnxOperators(writer, node, self.target), *args, **kwargs)
        except SaveError:
            raise
        except Exception as error:  # whatever a user's function raises
            raise SaveError(
                f"the form given for {self.target} raised {in_a_line(error).removesuffix('.')}.",
                node.name,
            ) from error
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        names: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
        expected = len(cast("tuple[Any, ...]", value)) if several else 1
        wrong = not all(isinstance(n, str) and writer.has(n) for n in names) or len(names) != expected
        if wrong or several != isinstance(result, (tuple, list)):
            form = f"a tuple of {expected} names" if several else "the name"
            raise SaveError(
                f"the form given for {self.target} returned {result!r}; return {form} of what its last "
                f"ONNX operators gave.",
                node.name,
            )
        return tuple(names) if several else names[0]

    def check(self, model: Any) -> None:
        """Refuse a model whose types do not fit together, if this form is part of it."""
        if not self.used or model.ByteSize() > _LARGEST_CHECKED:
            return
        import onnx

        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            raise SaveError(
                f"with the form given for {self.target} the model is not valid: {in_a_line(error)}."
            ) from error
