"""A graph as bytes and back: names, order, arguments and meta, without tracing it anew.

Only what Python's pickle cannot take is translated: nodes become positions, operators their names, fake tensors
and symbolic sizes a description from which one fresh FakeTensorMode makes them again, storages shared as before.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg
from torch.utils._sympy.numbers import int_oo

from dovetail.errors import InvalidArgument
from dovetail.graph.keys import REGION


@dataclass(frozen=True)
class _Ref:
    """An argument that is the node at this position."""

    index: int


def dump(graph: Graph) -> bytes:
    """The graph as bytes. Meta entries that cannot be pickled are left out, with a warning naming them."""
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
    """The graph that `dump` wrote."""
    rows, codegen, tracer_cls = _Unpickler(io.BytesIO(data)).load()
    graph = Graph(tracer_cls=tracer_cls)
    made: list[Node] = []

    def resolve(value: Any) -> Any:
        if isinstance(value, _Ref):
            return made[value.index]
        if isinstance(value, tuple):
            return tuple(resolve(v) for v in value)
        if isinstance(value, list):
            return [resolve(v) for v in value]
        if isinstance(value, dict):
            return {k: resolve(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(resolve(value.start), resolve(value.stop), resolve(value.step))
        return value

    for op, target, args, kwargs, name, type_expr, meta in rows:
        node = graph.create_node(op, target, resolve(args), resolve(kwargs), name, type_expr)
        node.meta = meta
        made.append(node)
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
                good[key] = value.keeping(_can_be_pickled)
            elif why := _why_not(value):
                dropped[key] = why
            else:
                good[key] = value
        kept.append((*head, good))
    if dropped:
        listed = "; ".join(f"{key} ({why})" for key, why in dropped.items())
        warnings.warn(f"node meta that cannot be pickled was left out: {listed}", stacklevel=4)
    return kept


def _why_not(value: Any) -> str:
    """Why a value cannot be pickled, empty if it can."""
    try:
        _dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _can_be_pickled(value: Any) -> bool:
    return not _why_not(value)


# Translating what pickle cannot take. Each function below is named in the bytes, so it stays importable.


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
            return ("tensor", self._tensor(obj))
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ("symbolic", _describe_symbolic(obj))
        if isinstance(obj, (FakeTensorMode, ShapeEnv)):
            return ("none",)
        return None

    def _tensor(self, value: FakeTensor) -> tuple[Any, ...]:
        def plain(sizes: Any) -> tuple[Any, ...]:
            return tuple(_describe_symbolic(s) if isinstance(s, torch.SymInt) else s for s in sizes)

        strided = value.layout is torch.strided
        storage = value.untyped_storage()._cdata if strided else id(value)
        return (
            self.storages.setdefault(storage, len(self.storages)),
            plain(value.shape),
            plain(value.stride()) if strided else None,
            plain([value.storage_offset()])[0] if strided else 0,
            value.dtype,
            value.device,
            value.requires_grad and (value.is_floating_point() or value.is_complex()),
            isinstance(value, torch.nn.Parameter),
        )


@dataclass(frozen=True)
class _Symbolic:
    """A symbolic number: its expression, and for each symbol a hint and a range (None: no hint)."""

    kind: str
    expr: str
    symbols: tuple[tuple[str, int | None, int | None, int | None], ...]


def _describe_symbolic(value: Any) -> _Symbolic | tuple[str, Any]:
    node = value.node
    expr = node.expr
    env: ShapeEnv = node.shape_env
    rows: list[tuple[str, int | None, int | None, int | None]] = []
    for symbol in sorted(expr.free_symbols, key=str):
        bounds = env.var_to_range.get(symbol)
        rows.append(
            (
                str(symbol),
                _hint(env, symbol),
                _bound(bounds and bounds.lower),
                _bound(bounds and bounds.upper),
            )
        )
    return _Symbolic(type(value).__name__, sympy.srepr(expr), tuple(rows))


def _hint(env: ShapeEnv, symbol: sympy.Symbol) -> int | None:
    # The table of hints was renamed between torch releases.
    hints = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    known = hints.get(symbol)
    return None if known is None else int(known)


def _bound(value: Any) -> int | None:
    return int(value) if value is not None and value not in (int_oo, -int_oo) and value.is_number else None


_ENDLESS = 2**50


@dataclass
class _World:
    """What fake tensors and symbols of one loaded graph live in."""

    env: ShapeEnv = field(default_factory=ShapeEnv)
    symbols: dict[str, Any] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def symbolic(self, described: _Symbolic) -> Any:
        for name, hint, lower, upper in described.symbols:
            if name not in self.symbols:
                self.symbols[name] = self._symbol(name, hint, lower, upper)
        names = {name: symbol.node.expr for name, symbol in self.symbols.items()}
        expr = _parse(described.expr).subs({s: names[str(s)] for s in _parse(described.expr).free_symbols})
        hint = _evaluate(expr, self.env)
        if described.kind == "SymInt":
            return self.env.create_symintnode(expr, hint=None if hint is None else int(hint))
        if described.kind == "SymBool":
            return self.env.create_symboolnode(expr)
        return self.env.create_symfloatnode(expr, hint=None if hint is None else float(hint))

    def _symbol(self, name: str, hint: int | None, lower: int | None, upper: int | None) -> Any:
        from torch._dynamo.source import ConstantSource

        if hint is None:
            made: Any = self.env.create_unbacked_symint()
        else:
            source = ConstantSource(f"__loaded_{name}")
            symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            made = self.env.create_symintnode(symbol, hint=hint, source=source)
        if lower is not None or upper is not None:
            self.env.constrain_symbol_range(
                made.node.expr,
                compiler_min=lower if lower is not None else -(2**63),
                compiler_max=upper if upper is not None else 2**63 - 1,
            )
        return made

    def _symbolic_tensor(
        self, storage_id: int, sizes: Sequence[Any], strides: Sequence[Any], start: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        # Larger than any size can be, so that any view fits.
        storage = self.storages.setdefault(storage_id, torch.UntypedStorage(_ENDLESS, device="meta"))
        if storage.nbytes() < _ENDLESS:
            storage.resize_(_ENDLESS)
        # What torch asks of the symbols on the way (does it fit, is it contiguous) must not settle their values.
        with self.env.suppress_guards():
            return torch.empty(0, dtype=dtype, device="meta").set_(storage, start, sizes, strides)

    def tensor(self, row: tuple[Any, ...]) -> FakeTensor:
        storage_id, shape, stride, offset, dtype, device, requires_grad, is_parameter = row

        def real(value: Any) -> Any:
            return self.symbolic(value) if isinstance(value, _Symbolic) else value

        sizes, start = [real(s) for s in shape], real(offset)
        strides = None if stride is None else [real(s) for s in stride]
        with torch.no_grad():
            if strides is None:
                meta = torch.empty(sizes, dtype=dtype, device="meta")
            elif any(isinstance(s, torch.SymInt) for s in [*sizes, *strides, start]):
                meta = self._symbolic_tensor(storage_id, sizes, strides, start, dtype)
            else:
                needed = start + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
                nbytes = 0 if 0 in sizes else needed * dtype.itemsize
                storage = self.storages.get(storage_id)
                if storage is None:
                    storage = self.storages[storage_id] = torch.UntypedStorage(nbytes, device="meta")
                elif storage.nbytes() < nbytes:
                    storage.resize_(nbytes)
                meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, start, sizes, strides)
            fake = FakeTensor(self.mode, meta, torch.device(device))
            made: Any = torch.nn.Parameter(fake, requires_grad) if is_parameter else fake
        if requires_grad and not is_parameter:
            made.requires_grad_()
        return made


def _parse(text: str) -> Any:
    """The sympy expression that `srepr` wrote."""
    from torch.utils._sympy import functions

    names: dict[str, Any] = dict(vars(sympy))
    names.update({k: v for k, v in vars(functions).items() if isinstance(v, type)})
    return eval(text, {"__builtins__": {}}, names)


def _evaluate(expr: Any, env: ShapeEnv) -> Any:
    hints = {s: _hint(env, s) for s in expr.free_symbols}
    if any(h is None for h in hints.values()):
        return None
    return expr.xreplace({s: sympy.Integer(h) for s, h in hints.items()})


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.world = _World()

    def persistent_load(self, pid: Any) -> Any:
        what, *rest = pid
        makers: dict[str, Callable[..., Any]] = {
            "overload": _overload,
            "packet": _packet,
            "higher_order": _higher_order,
            "tensor": self.world.tensor,
            "symbolic": self.world.symbolic,
            "none": lambda: None,
        }
        return makers[what](*rest)


def _lookup(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def _packet(qualified: str) -> Any:
    return _lookup(*qualified.split("::", 1))


def _higher_order(name: str) -> Any:
    return _lookup("higher_order", name.split("::")[-1])


def _overload(qualified: str) -> Any:
    namespace, rest = qualified.split("::", 1)
    name, _, overload = rest.partition(".")
    return getattr(_lookup(namespace, name), overload or "default")
