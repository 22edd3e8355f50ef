"""Writes operations into the node list of an ONNX graph or function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.graph.weight_guard import packed_bytes
from dovetail.lowering.onnx.types import MissingForm, NoForm, element, is_number

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

FORMS: dict[str, Form] = {}


def form(*targets: str) -> Callable[[Form], Form]:
    """Make a function the ONNX form of some operators."""

    def register(function: Form) -> Form:
        for target in targets:
            FORMS[target] = function
        return function

    return register


class Writer:
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
        from dovetail.lowering.onnx.operators import load

        load()
        if node.op != "call_function":
            raise NoForm(f"'{node.name}' calls {node.target}, which is no operator")
        found = FORMS.get(_spelled(node.target))
        if found is None:
            raise MissingForm(f"there is no ONNX form of {_spelled(node.target)}")
        return found

    def value(self, node: Any) -> Tensor:
        """What is known of a tensor: its dtype and sizes."""
        found = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(found, Tensor):
            raise NoForm(f"nothing is known of the value of '{node}'")
        return found

    def sizes(self, node: Any) -> list[int]:
        """The sizes of a tensor, which must all be numbers."""
        return [self.fixed(n, f"a size of '{node}'") for n in self.value(node).shape]

    def fixed(self, value: Any, what: str) -> int:
        """A number that ONNX wants to know beforehand."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise NoForm(f"{what} must be known beforehand")
        return value

    def of(self, node: Any) -> str:
        """The name of what a node computes."""
        if not isinstance(node, Node):
            raise NoForm(f"{node!r} stands where a tensor is wanted")
        found = self.names[node]
        if not isinstance(found, str):
            raise NoForm(f"'{node.name}' is no single value")
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
                raise NoForm(f"{value} is no {str(dtype).removeprefix('torch.')}") from error
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
    raise NoForm(f"a number of type {type(value).__name__} is made in the graph")


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
