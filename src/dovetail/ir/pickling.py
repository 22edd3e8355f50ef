"""A graph as bytes and back: names, order, arguments and meta, without tracing it again.

Only what Python's pickle does not support is translated: nodes become positions, operators their names, fake tensors
and symbolic sizes a description from which a new FakeTensorMode recreates them, with shared storages shared.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from dovetail.errors import InvalidArgument
from dovetail.ir.meta_keys import REGION
from dovetail.ir.nodes import SYMBOLIC
from dovetail.ir.tensor_spec import SymbolicEnv, describe_symbolic, tensor_row


@dataclass(frozen=True)
class _Ref:
    """An argument that is the node at this position."""

    index: int


def dump(graph: Graph) -> bytes:
    """Return the graph as bytes. Meta entries that cannot be pickled are left out, with a warning naming them."""
    position = {node: i for i, node in enumerate(graph.nodes)}

    def ref(node: Node) -> Any:
        return _Ref(position[node])

    rows = [
        (n.op, n.target, map_arg(n.args, ref), map_arg(n.kwargs, ref), n.name, n.type, dict(n.meta))
        for n in graph.nodes
    ]
    table = (rows, graph._codegen, graph._tracer_cls if _importable(graph._tracer_cls) else None)
    try:
        return _dumps(table)
    except RecursionError:
        raise InvalidArgument(
            "regions are nested too deep to be pickled; inline some levels first."
        ) from None
    except Exception:  # one bad meta entry must not cost the rest: find it and leave it out
        return _dumps((_without_unpicklable(rows), *table[1:]))


def load(data: bytes) -> Graph:
    """Return the graph that `dump` wrote."""
    rows, codegen, tracer_cls = _Unpickler(io.BytesIO(data)).load()
    graph = Graph(tracer_cls=tracer_cls)
    nodes: list[Node] = []

    def resolve(value: Any) -> Any:
        return nodes[value.index] if isinstance(value, _Ref) else value

    for op, target, *arguments, name, type_expr, meta in rows:
        args, kwargs = (map_aggregate(part, resolve) for part in arguments)
        node = graph.create_node(op, target, args, kwargs, name, type_expr)
        node.meta = meta
        nodes.append(node)
    graph.set_codegen(codegen)
    return graph


def _importable(cls: type | None) -> bool:
    return cls is not None and "<locals>" not in cls.__qualname__


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _without_unpicklable(rows: list[Any]) -> list[Any]:
    dropped: dict[str, str] = {}
    kept: list[Any] = []
    for *head, meta in rows:
        good: dict[str, Any] = {}
        for key, value in meta.items():
            if key == REGION:
                good[key] = value.map_meta(_picklable_values)
            elif why := _why_not(value):
                dropped[key] = why
            else:
                good[key] = value
        kept.append((*head, good))
    if dropped:
        entries = "; ".join(f"{key} ({why})" for key, why in dropped.items())
        warnings.warn(f"node meta that cannot be pickled was left out: {entries}", stacklevel=4)
    return kept


def _why_not(value: Any) -> str:
    """Return why a value cannot be pickled, "" if it can."""
    try:
        _dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _picklable_values(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if _can_be_pickled(value)}


def _can_be_pickled(value: Any) -> bool:
    return not _why_not(value)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.storages: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return ("overload", obj.name())
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return ("packet", obj._qualified_op_name)
        if isinstance(obj, torch._ops.HigherOrderOperator):
            return ("higher_order", obj.name())
        if isinstance(obj, FakeTensor):
            return ("tensor", tensor_row(obj, self.storages))
        if isinstance(obj, SYMBOLIC):
            return ("symbolic", describe_symbolic(obj))
        if isinstance(obj, FakeTensorMode) or _is_shape_env(obj):
            return ("none",)
        return None


def _is_shape_env(value: Any) -> bool:
    # Its module is imported only if there is one.
    symbolic_shapes = sys.modules.get("torch.fx.experimental.symbolic_shapes")
    return symbolic_shapes is not None and isinstance(value, symbolic_shapes.ShapeEnv)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.env = SymbolicEnv()

    def persistent_load(self, pid: Any) -> Any:
        what, *rest = pid
        makers: dict[str, Callable[..., Any]] = {
            "overload": overload_by_name,
            "packet": packet_by_name,
            "higher_order": higher_order_by_name,
            "tensor": self.env.tensor,
            "symbolic": self.env.symbolic,
            "none": lambda: None,
        }
        return makers[what](*rest)


def _lookup(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def packet_by_name(qualified: str) -> Any:
    """Return the packet of a name such as `aten::add`."""
    return _lookup(*qualified.split("::", 1))


def higher_order_by_name(name: str) -> Any:
    """Return the higher-order operator of a name."""
    return _lookup("higher_order", name.split("::")[-1])


def overload_by_name(qualified: str) -> Any:
    """Return the overload of a name such as `aten::add.Tensor`."""
    namespace, rest = qualified.split("::", 1)
    name, _, overload = rest.partition(".")
    return getattr(_lookup(namespace, name), overload or "default")
