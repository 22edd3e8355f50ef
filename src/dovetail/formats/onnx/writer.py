"""Writes operations into the node list of an ONNX graph or function."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from dovetail.ir.nodes import is_number
from dovetail.ir.weight_guard import packed_bytes
from dovetail.lowering.failures import UnknownOp, UnsupportedOp
from dovetail.numerics.sample_inputs import hint_of

ELEMENTS: dict[torch.dtype, int] = {
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
"""By torch's dtype, the number that `onnx.TensorProto` has for it."""


def element(dtype: torch.dtype) -> int:
    """The ONNX element type of a dtype."""
    found = ELEMENTS.get(dtype)
    if found is None:
        raise UnsupportedOp(f"ONNX has no {str(dtype).removeprefix('torch.')}")
    return found


OPSET = 20
"""The version of ONNX's own operators that is written: the first with Gelu, and one that every reader knows."""
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Dialect:
    """What a reader of ONNX knows besides the operators of the standard.

    `attention` says that ONNX Runtime's own fused attention may be written. `runs` says that what is written is run in
    place of torch, and not kept as a file: what runtimes are known to get wrong has no form then, and flags tell whether
    all indices were in range. Eager code raises where one is not; runtimes count from the end, or read what lies there.
    """

    attention: bool = False
    runs: bool = False

    @property
    def opsets(self) -> dict[str, int]:
        """The operator sets that what is written imports."""
        return {"": OPSET, **({MICROSOFT: 1} if self.attention else {})}


Form = Callable[..., Any]
"""Writes one operation, given the writer, the node and its arguments; the name of the result, or a tuple of them."""


class OnnxWriter:
    """A list of ONNX nodes in the making, and the names of the values that FX nodes have in it.

    Everything it writes stands in the node list, constants too, so that it can be a graph as well as a function.
    """

    def __init__(self, dialect: Dialect | None = None, prefix: str = "") -> None:
        self.dialect, self.prefix = dialect or Dialect(), prefix
        self.nodes: list[Any] = []
        self.names: dict[Node, Any] = {}
        self.flags: list[str] = []
        self._constants: dict[Any, str] = {}
        self._taken: dict[str, int] = {}

    def name(self, wanted: str) -> str:
        """A name that nothing else has."""
        found = wanted
        while found in self._taken:
            self._taken[wanted] += 1
            found = f"{wanted}_{self._taken[wanted]}"
        self._taken[found] = 0
        return self.prefix + found

    def has(self, name: str) -> bool:
        """Whether a value of that name was given or written."""
        return name.removeprefix(self.prefix) in self._taken

    def op(
        self, kind: str, *inputs: str, results: int = 1, domain: str = "", label: str = "", **attributes: Any
    ) -> Any:
        """Append an ONNX node; the name of its result, or a tuple of names where there are several."""
        from onnx import helper

        made = [self.name(label or kind.lower()) for _ in range(results)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(
            helper.make_node(kind, list(inputs), made, name=made[0], domain=domain or None, **given)
        )
        return made[0] if results == 1 else tuple(made)

    def write(self, node: Node) -> None:
        """Append what an FX node computes."""
        args, kwargs = bound(node)
        self.names[node] = self.form_of(node)(self, node, *args, **kwargs)

    @staticmethod
    def form_of(node: Node) -> Form:
        """What writes a node."""

        if node.op != "call_function":
            raise UnsupportedOp(f"'{node.name}' calls {node.target}, which is no operator")
        found = forms().get(_spelled(node.target))
        if found is None:
            raise UnknownOp(f"there is no ONNX form of {_spelled(node.target)}")
        return found

    def value(self, node: Any) -> Tensor:
        """What is known of a tensor: its dtype and sizes."""
        found = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(found, Tensor):
            raise UnsupportedOp(f"nothing is known of the value of '{node}'")
        return found

    def sizes(self, node: Any) -> list[int]:
        """The sizes of a tensor, which must all be numbers."""
        return [self.fixed(n, f"a size of '{node}'") for n in self.value(node).shape]

    def fixed(self, value: Any, what: str) -> int:
        """A number that ONNX wants to know beforehand."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedOp(f"{what} must be known beforehand")
        return value

    def of(self, node: Any) -> str:
        """The name of what a node computes."""
        if not isinstance(node, Node):
            raise UnsupportedOp(f"{node!r} stands where a tensor is wanted")
        found = self.names[node]
        if not isinstance(found, str):
            raise UnsupportedOp(f"'{node.name}' is no single value")
        return found

    def read(self, value: Any, dtype: torch.dtype) -> str:
        """A tensor or a number as an operand of some dtype."""
        if isinstance(value, Node):
            known = value.meta.get("val")
            if isinstance(known, Tensor):
                return self.cast(self.of(value), known.dtype, dtype)
            return self.cast(self.of(value), _number_dtype(known), dtype)
        return self.constant(value, dtype)

    def cast(self, name: str, given: torch.dtype, wanted: torch.dtype) -> str:
        """A value in another dtype."""
        return name if given == wanted else self.op("Cast", name, to=element(wanted))

    def constant(self, value: Any, dtype: torch.dtype = torch.float32) -> str:
        """A number, or a list of numbers, as a value."""
        key = (repr(value), dtype)
        if key not in self._constants:
            try:
                made = torch.tensor(value, dtype=dtype)
            except RuntimeError as error:
                raise UnsupportedOp(f"{value} is no {str(dtype).removeprefix('torch.')}") from error
            self._constants[key] = self.op("Constant", value=packed(made), label="constant")
        return self._constants[key]

    def integers(self, values: Any) -> str:
        """A list of sizes or positions as a vector; some may only be known in a call."""
        if isinstance(values, Node):
            return self.op("Reshape", self.of(values), self.constant([1], torch.int64))
        listed = list(cast("Sequence[Any]", values)) if isinstance(values, (list, tuple)) else [values]
        if all(isinstance(v, int) for v in listed):
            return self.constant([int(v) for v in listed], torch.int64)
        one = self.constant([1], torch.int64)
        parts = [
            self.op("Reshape", self.of(v), one)
            if isinstance(v, Node)
            else self.constant([int(v)], torch.int64)
            for v in listed
        ]
        return self.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def shape(self, node: Node) -> str:
        """The sizes of a tensor as a vector."""
        sizes = list(self.value(node).shape)
        if all(map(is_number, sizes)):
            return self.constant(sizes, torch.int64)
        return self.op("Shape", self.of(node))

    def axes(self, axes: Sequence[int], rank: int) -> str:
        """Dimensions as a vector, counted from the front."""
        return self.constant([a % max(rank, 1) for a in axes], torch.int64)


def bound(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node by the operator's schema: what can stand by position does, with its default."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return list(node.args), dict(node.kwargs)
    args, kwargs = list(node.args), dict(node.kwargs)
    for i, parameter in enumerate(target._schema.arguments):
        if i >= len(args) and not parameter.kwarg_only:
            args.append(kwargs.pop(parameter.name, parameter.default_value))
    return args, kwargs


def packed(value: Tensor) -> Any:
    """A tensor with its data, as ONNX holds one."""
    from onnx import helper

    raw = packed_bytes(value.detach().cpu()).numpy().tobytes()
    return helper.make_tensor("", element(value.dtype), list(value.shape), raw, raw=True)


def _number_dtype(value: Any) -> torch.dtype:
    if isinstance(value, (SymInt, int)) and not isinstance(value, bool):
        return torch.int64
    raise UnsupportedOp(f"a number of type {type(value).__name__} is made in the graph")


_PYTHON: Mapping[Any, str] = {
    operator.getitem: "getitem",
    operator.add: "int.add",
    operator.sub: "int.sub",
    operator.mul: "int.mul",
    operator.floordiv: "int.floordiv",
    operator.neg: "int.neg",
}


def _spelled(target: Any) -> str:
    return _PYTHON.get(target) or str(target)


@functools.cache
def forms() -> Mapping[str, Form]:
    """The form of each operator that has one; the tables are imported on first use."""
    from dovetail.formats.onnx.ops_elementwise import ELEMENTWISE
    from dovetail.formats.onnx.ops_linear import ATTENTION, CONVOLUTIONS, PRODUCTS
    from dovetail.formats.onnx.ops_reduce import NORMS, REDUCTIONS
    from dovetail.formats.onnx.ops_shape import INDEXING, REARRANGE, SHAPE

    tables = (
        ELEMENTWISE,
        SHAPE,
        INDEXING,
        REDUCTIONS,
        PRODUCTS,
        ATTENTION,
        CONVOLUTIONS,
        NORMS,
        REARRANGE,
    )
    return {target: form for table in tables for targets, form in table.items() for target in targets}


@dataclass(frozen=True)
class Layout:
    """A tensor as a runtime has it: row by row in the order of dimensions `order`.

    Without an order there is none in which its rows lie one behind the other, and it has to be copied. `sizes` and
    `strides` are None where some may vary.
    """

    dtype: torch.dtype
    order: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    @property
    def turned(self) -> bool:
        """Whether the runtime has the dimensions in another order."""
        return self.order is not None and self.order != tuple(range(len(self.order)))

    @property
    def back(self) -> tuple[int, ...]:
        """The order that undoes `order`."""
        order = self.order or ()
        return tuple(order.index(d) for d in range(len(order)))

    def rows(self, value: Tensor) -> Tensor:
        """A tensor as the runtime has it; the same memory unless it had to be copied."""
        if self.order is None:
            return value.contiguous()
        return (value.permute(self.order) if self.turned else value).contiguous()

    def place(self) -> tuple[Tensor, Tensor]:
        """Memory for a result: the tensor, and the same as the runtime has it. Sizes must be known."""
        assert self.sizes is not None
        assert self.strides is not None
        if self.order is None:
            return (rows := torch.empty(self.sizes, dtype=self.dtype)), rows
        made = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)
        return made, (made.permute(self.order) if self.turned else made)

    def result(self, rows: Tensor) -> Tensor:
        """What the runtime made as the tensor it stands for, in memory of its own."""
        if self.order is not None:
            return rows.permute(self.back) if self.turned else rows
        if self.strides is None:
            return rows
        return torch.empty_strided(rows.shape, self.strides, dtype=rows.dtype).copy_(rows)


def layout_of(value: Tensor) -> Layout:
    """The layout of a tensor, fake or not."""
    sizes, strides = tuple(value.shape), tuple(value.stride())
    fixed = all(is_number(n) for n in (*sizes, *strides))
    return Layout(
        value.dtype,
        _order(sizes, strides),
        tuple(map(int, sizes)) if fixed else None,
        tuple(map(int, strides)) if fixed else None,
    )


def _order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[int, ...] | None:
    """Dimensions such that elements lie one behind the other, or None. Symbols are compared as they are written."""
    hints = [hint_of(n) for n in strides]
    ranked = sorted(range(len(sizes)), key=lambda d: (-hints[d], d))
    step: Any = 1
    for d in reversed(ranked):
        if sizes[d] != 1 and not _same(strides[d], step):
            return None
        step = _times(step, sizes[d])
    return tuple(ranked)


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, SymInt) else value


def _same(a: Any, b: Any) -> bool:
    # Asking the symbols themselves would write a guard into the graph's environment.
    return bool(_expression(a) == _expression(b))


def _times(a: Any, b: Any) -> Any:
    return _expression(a) * _expression(b)


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

    writer = OnnxWriter(dialect)
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


def _flag(writer: OnnxWriter) -> list[str]:
    """Whether every index was in range, if any was looked at."""
    found: list[str] = []
    for flag in writer.flags:
        found = [writer.op("And", found[0], flag) if found else flag]
    return found


def finished(
    writer: OnnxWriter, graph: Graph, layouts: Sequence[Layout] = ()
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
    raise UnsupportedOp(f"'{name}' is a {type(value).__name__}, and ONNX has tensors only")


def dimensions(shape: Sequence[Any]) -> list[int | str]:
    """Sizes as ONNX has them: a number, or the text of the expression that it is."""
    return [n if isinstance(n, int) else str(n.node.expr).replace(" ", "") for n in shape]
