"""Values of a graph as JSON: arguments, meta, fake tensors and symbolic sizes, without code and without pickle.

What JSON has no form for is an object with one short key that says what it is: `{"t": [...]}` is a tuple. Fake tensors,
long texts and equal metas are written once, in tables, and named by their number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from dovetail.graph.fakes import Symbolic, describe_symbolic, tensor_row
from dovetail.interop import functions

_LONG = 40
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
}
# Where a node came from is told by its stack trace and modules; these are the tracer's own notes, or follow from `val`.
_NOTES = frozenset({"from_node", "desc", "tensor_meta", "unbacked_bindings", "eager_input_vals"})


class Unwritable(Exception):
    """A value has no form in a file; the text says which and why."""


class Encoder:
    """Writes values, and keeps the tables they refer to."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.values: list[Any] = []
        self.symbols: dict[str, list[Any]] = {}
        self.metas: list[Any] = []
        self.dropped: dict[str, str] = {}
        self._meta_numbers: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        # A number is given by identity: what has one must not make room for another.
        self._kept: list[Any] = []

    def tables(self) -> dict[str, Any]:
        """What values refer to by number."""
        return {
            "texts": list(self.texts),
            "symbols": self.symbols,
            "values": self.values,
            "metas": self.metas,
        }

    def value(self, value: Any, nodes: Mapping[Node, int] | None = None) -> Any:
        """A value as JSON; nodes by their numbers. Raises Unwritable."""
        if value is None or value is True or value is False or type(value) is int:
            return value
        if isinstance(value, Node):
            if nodes is None or value not in nodes:
                raise Unwritable(f"the node '{value.name}', which is none of its graph")
            return {"n": nodes[value]}
        kind = type(value)
        if kind is float:
            return value if math.isfinite(value) else {"f": repr(value)}
        if kind is str:
            return self._text(value)
        if isinstance(value, torch.Size):
            return {"sz": [self.value(v) for v in value]}
        if isinstance(value, (tuple, list)) and not hasattr(kind, "_fields"):
            items = [self.value(v, nodes) for v in cast("Sequence[Any]", value)]
            return items if isinstance(value, list) else {"t": items}
        if isinstance(value, dict):
            rows = cast("dict[Any, Any]", value).items()
            return {"d": [[self.value(k), self.value(v, nodes)] for k, v in rows]}
        if isinstance(value, (FakeTensor, *SYMBOLIC)):
            return {"v": self._number(value)}
        return self._object(value, nodes)

    def _object(self, value: Any, nodes: Mapping[Node, int] | None) -> Any:
        if isinstance(value, slice):
            return {"sl": [self.value(v, nodes) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, torch._ops.OpOverload):
            return {"op": value.name()}
        if isinstance(value, torch._ops.OpOverloadPacket):
            return {"pk": value._qualified_op_name}
        if isinstance(value, torch._ops.HigherOrderOperator):
            return {"ho": value.name()}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"dev": str(value)}
        if type(value) is complex:
            return {"c": [repr(value.real), repr(value.imag)]}
        if value is Ellipsis:
            return {"e": 0}
        if isinstance(value, bool | int | float | str):
            raise Unwritable(
                f"a {type(value).__name__}, which is more than a plain {type(value).__mro__[1].__name__}"
            )
        name = functions.name_of(value) if callable(value) else None
        if name is not None:
            return {"fn": name}
        raise Unwritable(f"a {type(value).__name__}")

    def _text(self, text: str) -> Any:
        if len(text) < _LONG:
            return text
        return {"s": self.texts.setdefault(text, len(self.texts))}

    def _number(self, value: Any) -> int:
        known = self._numbers.get(id(value))
        if known is None:
            row = (
                self._fake(value)
                if isinstance(value, FakeTensor)
                else self._symbolic(describe_symbolic(value))
            )
            self.values.append(row)
            self._kept.append(value)
            known = self._numbers[id(value)] = len(self.values) - 1
        return known

    def _fake(self, value: FakeTensor) -> list[Any]:
        storage, sizes, strides, start, dtype, device, grad, parameter = tensor_row(value, self._storages)

        def plain(size: Any) -> Any:
            return self._symbolic(size) if isinstance(size, Symbolic) else size

        return [
            storage,
            [plain(s) for s in sizes],
            None if strides is None else [plain(s) for s in strides],
            plain(start),
            str(dtype).removeprefix("torch."),
            str(device),
            bool(grad),
            parameter,
        ]

    def _symbolic(self, described: Symbolic) -> dict[str, Any]:
        for name, *facts in described.symbols:
            self.symbols.setdefault(name, facts)
        return {"x": [described.kind, described.expr, [name for name, *_ in described.symbols]]}

    def type(self, kind: Any) -> str | None:
        """The name of a node's type where it is a common one; others only annotate."""
        return next((name for name, known in TYPES.items() if known is kind), None)

    def meta(self, meta: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> int:
        """The number of a node's meta, with `extra` entries that are JSON already. What has no form is left out."""
        row: dict[str, Any] = {}
        for key, value in meta.items():
            if extra is not None and key in extra:
                row[key] = extra[key]
            elif key not in _NOTES:
                try:
                    row[key] = self._stack(value) if key == "nn_module_stack" else self.value(value)
                except Unwritable as reason:
                    self.dropped.setdefault(key, str(reason))
        told = json.dumps(row)
        if told not in self._meta_numbers:
            self._meta_numbers[told] = len(self.metas)
            self.metas.append(row)
        return self._meta_numbers[told]

    def _stack(self, stack: Mapping[str, tuple[str, Any]]) -> Any:
        """The modules that an operation comes from, classes by their names, as exporters write them."""
        return self.value(
            {
                key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
                for key, (path, kind) in stack.items()
            }
        )


_ATOM = r"[^.\"'\\{}\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]+"
PATH = re.compile(rf"{_ATOM}(\.{_ATOM})*")
"""Where a graph keeps something: it is written into generated code, so what ends a text there has no place in it."""
