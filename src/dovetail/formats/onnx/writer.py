"""Translates FX nodes to ONNX nodes, one at a time, into the node list of an ONNX graph or function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.ir.nodes import is_static_size
from dovetail.ir.weight_guard import packed_bytes
from dovetail.lowering.failures import UnknownOp, UnsupportedOp
from dovetail.outlining.region import unique_name

ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
"""The number of each dtype in `onnx.TensorProto`."""
OPSET = 20
"""The version of ONNX's own operators that is written: the first with Gelu, and one that every reader knows."""
IR_VERSION = 10
MICROSOFT = "com.microsoft"


def element_type(dtype: torch.dtype) -> int:
    """Return the ONNX element type of a dtype."""
    if dtype not in ELEMENT_TYPES:
        raise UnsupportedOp(f"ONNX has no {str(dtype).removeprefix('torch.')}")
    return ELEMENT_TYPES[dtype]


@dataclass(frozen=True)
class Dialect:
    """What a consumer of ONNX supports besides the operators of the standard.

    With `attention`, ONNX Runtime's own fused attention may be written. With `powers`, small integer powers are computed
    as products, and recognized in what is fused, such as the approximation of GELU. With `runs`, the model is executed in place of
    torch instead of being kept as a file: operators that runtimes are known to compute wrongly are refused, and a flag
    reports whether all indices were in range. Eager code raises for an index out of range; runtimes count from the end,
    or read whatever is in memory there.
    """

    attention: bool = False
    powers: bool = False
    runs: bool = False

    @property
    def opsets(self) -> dict[str, int]:
        """The operator sets that a model imports."""
        return {"": OPSET, **({MICROSOFT: 1} if self.attention else {})}


OpTranslation = Callable[..., Any]
"""Called with the writer, the node and its arguments; returns the name of the result, or a tuple of names."""


class OnnxWriter:
    """A list of ONNX nodes under construction, and the names of the values of FX nodes in it.

    `translations` has a function for each supported operator. Everything is written into the node list, constants too,
    so that the list can become a graph as well as a function.
    """

    def __init__(self, translations: Mapping[str, OpTranslation], dialect: Dialect | None = None) -> None:
        self.translations, self.dialect = translations, dialect or Dialect()
        self.nodes: list[Any] = []
        self.names: dict[Node, Any] = {}
        self.flags: list[str] = []
        self._constants: dict[Any, str] = {}
        self._used: dict[str, int] = {}

    def name(self, stem: str) -> str:
        """Return a name that no other value has."""
        return unique_name(stem, self._used)

    def has(self, name: str) -> bool:
        """Whether a value has this name."""
        return name in self._used

    def op(
        self, kind: str, *inputs: str, results: int = 1, domain: str = "", label: str = "", **attributes: Any
    ) -> Any:
        """Append an ONNX node; return the name of its result, or a tuple of names for more than one."""
        from onnx import helper

        outputs = [self.name(label or kind.lower()) for _ in range(results)]
        present = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(
            helper.make_node(kind, list(inputs), outputs, name=outputs[0], domain=domain or None, **present)
        )
        return outputs[0] if results == 1 else tuple(outputs)

    def identity(self, node: Node, x: Any) -> str:
        """Append a node that returns a value unchanged, as the result of `node`."""
        return self.op("Identity", x if isinstance(x, str) else self.of(x), label=node.name)

    def write(self, node: Node) -> None:
        """Append the translation of an FX node."""
        if node.op != "call_function":
            raise UnsupportedOp(f"'{node.name}' calls {node.target}, which is not an operator")
        key = _PYTHON.get(node.target) or str(node.target)
        if key not in self.translations:
            raise UnknownOp(f"there is no ONNX translation of {key}")
        args, kwargs = bind_arguments(node)
        self.names[node] = self.translations[key](self, node, *args, **kwargs)

    def value(self, node: Any) -> Tensor:
        """Return the fake tensor that a node computes."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor):
            raise UnsupportedOp(f"the value of '{node}' is unknown")
        return value

    def dtype(self, node: Any) -> torch.dtype:
        """Return the dtype of the tensor that a node computes."""
        return self.value(node).dtype

    def rank(self, node: Any) -> int:
        """Return the number of dimensions of the tensor that a node computes."""
        return self.value(node).dim()

    def sizes(self, node: Any) -> list[int]:
        """Return the sizes of a tensor; raise UnsupportedOp if one is symbolic."""
        return [self.fixed(n, f"a size of '{node}'") for n in self.value(node).shape]

    def fixed(self, value: Any, what: str) -> int:
        """Return a number that ONNX needs as an attribute; raise UnsupportedOp if it is symbolic."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedOp(f"{what} must be known beforehand")
        return value

    def of(self, node: Any) -> str:
        """Return the name of the value of a node."""
        if not isinstance(node, Node):
            raise UnsupportedOp(f"{node!r} is used as a tensor")
        name = self.names[node]
        if not isinstance(name, str):
            raise UnsupportedOp(f"'{node.name}' is a tuple of values")
        return name

    def read(self, value: Any, dtype: torch.dtype) -> str:
        """Return a tensor or a number as an operand of a dtype."""
        if not isinstance(value, Node):
            return self.constant(value, dtype)
        fake = value.meta.get("val")
        return self.cast(
            self.of(value), fake.dtype if isinstance(fake, Tensor) else _number_dtype(fake), dtype
        )

    def cast(self, name: str, source: torch.dtype, target: torch.dtype) -> str:
        """Return a value in another dtype."""
        return name if source == target else self.op("Cast", name, to=element_type(target))

    def constant(self, value: Any, dtype: torch.dtype = torch.float32) -> str:
        """Return a number or a list of numbers as a value."""
        key = (repr(value), dtype)
        if key not in self._constants:
            try:
                tensor = torch.tensor(value, dtype=dtype)
            except RuntimeError as error:
                raise UnsupportedOp(f"{value} is not a {str(dtype).removeprefix('torch.')}") from error
            self._constants[key] = self.op("Constant", value=tensor_proto(tensor), label="constant")
        return self._constants[key]

    def integers(self, values: Any) -> str:
        """Return sizes or positions as a vector of int64; some may be values that are computed in the graph."""
        items = list(cast("Sequence[Any]", values)) if isinstance(values, (list, tuple)) else [values]
        if all(isinstance(v, int) for v in items):
            return self.constant([int(v) for v in items], torch.int64)
        one = self.constant([1], torch.int64)
        parts = [
            self.op("Reshape", self.of(v), one)
            if isinstance(v, Node)
            else self.constant([int(v)], torch.int64)
            for v in items
        ]
        return self.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def integer(self, value: int) -> str:
        """Return a number as a scalar of int64."""
        return self.constant(value, torch.int64)

    def shape(self, node: Node) -> str:
        """Return the sizes of a tensor as a vector."""
        sizes = list(self.value(node).shape)
        return self.integers(sizes) if all(map(is_static_size, sizes)) else self.op("Shape", self.of(node))

    def axes(self, axes: Sequence[int], rank: int) -> str:
        """Return dimensions as a vector, counted from the front."""
        return self.integers([a % max(rank, 1) for a in axes])


_PYTHON: Mapping[Any, str] = {
    operator.getitem: "getitem",
    operator.add: "int.add",
    operator.sub: "int.sub",
    operator.mul: "int.mul",
    operator.floordiv: "int.floordiv",
    operator.neg: "int.neg",
}


def bind_arguments(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a node by the operator's schema: positional where possible, with defaults."""
    target: Any = node.target
    args, kwargs = list(node.args), dict(node.kwargs)
    for i, parameter in enumerate(target._schema.arguments if isinstance(target, OpOverload) else ()):
        if i >= len(args) and not parameter.kwarg_only:
            args.append(kwargs.pop(parameter.name, parameter.default_value))
    return args, kwargs


def tensor_proto(value: Tensor) -> Any:
    """Return a tensor with its data as `onnx.TensorProto`."""
    from onnx import helper

    raw = packed_bytes(value.detach().cpu()).numpy().tobytes()
    return helper.make_tensor("", element_type(value.dtype), list(value.shape), raw, raw=True)


def value_info(name: str, value: Any, order: Sequence[int] | None = None) -> Any:
    """Return name, dtype and sizes of a value as `onnx.ValueInfoProto`, dimensions in `order`; symbols by expression."""
    from onnx import helper

    if isinstance(value, Tensor):
        shape: list[Any] = [value.shape[d] for d in (range(value.dim()) if order is None else order)]
        sizes = [n if isinstance(n, int) else str(n.node.expr).replace(" ", "") for n in shape]
        return helper.make_tensor_value_info(name, element_type(value.dtype), sizes)
    if isinstance(value, (int, SymInt)) and not isinstance(value, bool):
        return helper.make_tensor_value_info(name, element_type(torch.int64), [])
    raise UnsupportedOp(f"'{name}' is a {type(value).__name__}, and ONNX has tensors only")


def _number_dtype(value: Any) -> torch.dtype:
    if isinstance(value, (SymInt, int)) and not isinstance(value, bool):
        return torch.int64
    raise UnsupportedOp(f"a number of type {type(value).__name__} is computed in the graph")
