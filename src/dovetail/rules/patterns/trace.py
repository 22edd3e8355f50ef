"""Tracing a pattern to a graph with the same operators, in the same form, as a captured or an AOTAutograd graph.

There are three tracers, quickest first. The recorder notes each operator at the pre-dispatch level on tensors of the meta
device (a few milliseconds), and refuses functions that do more than call operators; `make_fx` traces those on fake tensors,
and `capture` those that write.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.utils._device import DeviceContext

from dovetail.errors import DovetailError
from dovetail.frontend.capture import capture
from dovetail.ir.canonicalize import canonicalize
from dovetail.ir.graph_module import Program, copy_graph, rebuild
from dovetail.ir.nodes import size_hint
from dovetail.ir.op_traits import traits_of
from dovetail.ir.process_state import preserve_rng_state, suppress_fake_tensor_log, suppress_torch_warnings

DecompositionTable = Mapping[OpOverload, Callable[..., Any]]

# They convert data to numbers, or constants to tensors.
_UNTRACEABLE = frozenset(
    {
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
    }
)

# They let a function depend on the precision of its operands.
_DTYPE_QUERIES: frozenset[Any] = frozenset(
    {
        cast("Any", Tensor.dtype).__get__,
        cast("Any", Tensor.itemsize).__get__,
        cast("Any", Tensor.nbytes).__get__,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_signed,
        Tensor.element_size,
        Tensor.type,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_signed,
        torch.result_type,
        torch.can_cast,
    }
)
_CASTS = frozenset({"to", "_to_copy", "type_as", "convert_element_type"})


class NotRecordable(Exception):
    """A function does more than call operators on its arguments; it must be traced by `make_fx`."""


class _MetaDevice(DeviceContext):
    """Creates tensors on the meta device by default, and records whether a precision was queried."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.queried_dtype = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.queried_dtype = self.queried_dtype or func in _DTYPE_QUERIES
        return super().__torch_function__(func, types, args, kwargs)


class _ProxyRecorder(ProxyTorchDispatchMode):
    """Records every operator before torch decomposes it, as `make_fx(pre_dispatch=True)` does.

    Only its place among torch's modes is inherited: torch lets no other kind of mode see operators that early.
    """

    def __init__(self, decompositions: DecompositionTable, *, on_meta: bool) -> None:
        super().__init__(cast("Any", None), "real", pre_dispatch=True)
        self.decompositions, self.on_meta = decompositions, on_meta
        self.graph = Graph()
        self.producers: dict[int, tuple[Node, Any]] = {}
        self.recordable = True
        self.casts = False

    def input(self, name: str, value: Tensor) -> None:
        self._record(value, self.graph.placeholder(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **named)
        if not isinstance(func, OpOverload):
            self.refuse(f"it calls {func}")
        self.casts = self.casts or func.overloadpacket.__name__ in _CASTS
        decomposition = self.decompositions.get(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **named)
        if func in _UNTRACEABLE or func._schema.is_mutable:
            self.refuse(f"it calls {func}")
        inputs = self._nodes(args)
        keywords = {name: self._nodes(value) for name, value in named.items()}
        # On the meta device torch's C++ kernels suffice, and are much quicker than those in Python.
        with no_python_dispatcher() if self.on_meta else contextlib.nullcontext():
            out = func(*args, **named)
        node = self.graph.create_node("call_function", func, inputs, keywords)
        if isinstance(out, Tensor):
            self._record(out, node)
        else:
            self._record_parts(out, node)
        return out

    def _record(self, value: Tensor, node: Node) -> None:
        # A new tensor must have a single reference, or torch returns a copy of it that is not recorded.
        node.meta["val"] = value if node.all_input_nodes or node.op == "placeholder" else value.detach()
        self.producers[id(value)] = (node, weakref.ref(value))

    def _record_parts(self, out: Any, node: Node) -> None:
        if not isinstance(out, (tuple, list)) or not all(
            isinstance(part, (Tensor, int, float)) for part in cast("list[Any]", out)
        ):
            self.refuse(f"{node.target} returns a {type(out).__name__}")
        node.meta["val"] = out
        for i, part in enumerate(cast("list[Any]", out)):
            if isinstance(part, Tensor):
                self._record(part, self.graph.create_node("call_function", operator.getitem, (node, i)))

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            items = [self._nodes(item) for item in cast("list[Any]", value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            self.refuse("it computes with unknown numbers")
        return value

    def node(self, value: Any) -> Node:
        """Return the node that produced a tensor."""
        node, reference = self.producers.get(id(value), (None, None))
        # The id of a freed tensor may have been reused.
        if node is None or reference is None or reference() is not value:
            self.refuse("it uses a tensor that is not an argument")
        return cast("Node", node)

    def refuse(self, why: str) -> None:
        # The function may swallow the exception, and what is recorded afterwards is invalid.
        self.recordable = False
        raise NotRecordable(why)


def record(
    function: Callable[..., Any], values: Sequence[Any], decompositions: DecompositionTable
) -> tuple[Program, bool]:
    """Return the graph of a function of tensors without data, and whether it is the same in any precision.

    Each node has its value; symbolic sizes are arguments as they are. Values are all fake or all on the meta device.
    Raise NotRecordable if the function does more than call operators.
    """
    on_meta = all(type(value) is Tensor and value.is_meta for value in values)
    if not on_meta and not all(isinstance(value, FakeTensor) for value in values):
        raise NotRecordable("an operand is neither fake nor on the meta device")
    recorder = _ProxyRecorder(decompositions, on_meta=on_meta)
    for i, value in enumerate(values):
        recorder.input(f"arg{i}_1", value)
    # Tensors that the function creates must be of the same kind as its arguments.
    mode = _MetaDevice() if on_meta else values[0].fake_mode
    with mode, enable_python_dispatcher(), recorder:
        results = function(*values)
    if not recorder.recordable:
        raise NotRecordable("it swallowed an exception")
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    program = rebuild(nn.Module(), recorder.graph)
    return program, isinstance(mode, _MetaDevice) and not mode.queried_dtype and not recorder.casts


CAPTURED, AUTOGRAD = "captured", "autograd"
"""The two dialects: of `capture`, and of the graphs that AOTAutograd passes to a compiler."""
_COMPOSITE = "CompositeImplicitAutograd"


@functools.cache
def capture_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return what `capture` decomposes: composite operators whose result may be a view of an argument."""
    table: dict[OpOverload, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel_for_dispatch_key(
            name, _COMPOSITE
        ):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        op: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if isinstance(op, OpOverload) and _may_alias(op):
            table[op] = op.decompose
    # Its schema omits the statistics it updates, so export decomposes it too.
    batch_norm = torch.ops.aten.native_batch_norm.default
    table[batch_norm] = batch_norm.decompose
    return table


def _may_alias(op: OpOverload) -> bool:
    if torch.Tag.maybe_aliasing_or_mutating in op.tags or op._schema.is_mutable:
        return True
    return any(part.alias_info is not None for part in (*op._schema.returns, *op._schema.arguments))


def trace(
    function: Callable[..., Any], values: Sequence[Any], dialect: str = CAPTURED, *, quick: bool = False
) -> Program:
    """Return the canonical graph of a function on (fake) values; the values' own symbols get no new guards.

    With `quick`, the recorder is tried first; it does not preserve the origins of operations.
    """
    with suppress_torch_warnings(), suppress_fake_tensor_log(), preserve_rng_state(), torch.no_grad():
        if dialect == AUTOGRAD:
            with enable_python_dispatcher():
                traced = make_fx(torch.func.functionalize(function))(*values)
        else:
            traced = _try_record(function, values) if quick else None
            if traced is None:
                table = cast("dict[Any, Any]", capture_decompositions())
                traced = make_fx(function, decomposition_table=table, pre_dispatch=True)(*values)
                if has_writes(traced):
                    return _trace_by_capture(function, values)
    return canonicalize(traced)[0]


def trace_on_meta(function: Callable[..., Any], values: Sequence[Tensor]) -> tuple[Program, bool]:
    """Return the canonical graph of a function on tensors of the meta device, and whether any precision has the same.

    Raise NotRecordable as in `record`.
    """
    with suppress_torch_warnings(), suppress_fake_tensor_log(), preserve_rng_state(), torch.no_grad():
        recorded, dtype_independent = record(function, values, capture_decompositions())
    return canonicalize(recorded)[0], dtype_independent


def _try_record(function: Callable[..., Any], values: Sequence[Any]) -> Program | None:
    try:
        return record(function, values, capture_decompositions())[0]
    except DovetailError:
        raise
    except Exception:  # `make_fx` raises it again, if it is an error of the function
        return None


def has_writes(module: GraphModule) -> bool:
    """Whether a traced graph has operators that write; only a functional form can be compared."""
    return any(n.op == "call_function" and traits_of(n).writes for n in module.graph.nodes)


def _trace_by_capture(function: Callable[..., Any], values: Sequence[Any]) -> Program:
    """Trace a function that writes: functionalized by `capture`, without the writes at the end."""
    program = cast("Program", capture(function, tuple(values)))
    graph = copy_graph(program.graph)
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            graph.erase_node(node)
    return rebuild(program, graph)


class _FakeMode(FakeTensorMode):
    """Fake tensors on which a convolution adds no guards on sizes.

    The size of the batch decides which library runs it, not what it computes; `capture` has none of these guards.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.convolution.default or self.shape_env is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self.shape_env.suppress_guards():
            return super().__torch_dispatch__(func, types, args, kwargs or {})


class FakeEnvironment:
    """Fake copies of values: same sizes, strides, dtypes and devices, with symbols of their own.

    A pattern that ran on a graph's own values would add guards to the graph's symbols.
    """

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = _FakeMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.symbols: dict[Any, Any] = {}
        self._envs: dict[int, Any] = {}

    def added_guards(self) -> list[str]:
        """Return the guards on sizes that were added here and that the graph does not have itself."""
        known = {guard.expr.xreplace(self.symbols) for env in self._envs.values() for guard in env.guards}
        return [str(guard.expr) for guard in self.env.guards if guard.expr not in known]

    def fake_copy(self, value: Any) -> Any:
        """Return a fake copy of a tensor or a symbolic size, any other value as it is."""
        if isinstance(value, torch.Tensor):
            sizes = [self._size(s) for s in value.shape]
            with self.mode:
                if value.layout is not torch.strided:
                    return torch.empty(sizes, dtype=value.dtype, device=value.device, layout=value.layout)
                strides = [self._size(s) for s in value.stride()]
                return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return value

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr, env = size.node.expr, size.node.shape_env
        self._envs[id(env)] = env
        for symbol in expr.free_symbols:
            if symbol not in self.symbols:
                self.symbols[symbol] = self._symbol(size, symbol)
        renamed = expr.xreplace(self.symbols)
        return self.env.create_symintnode(renamed, hint=size_hint(size))

    def _symbol(self, size: torch.SymInt, symbol: Any) -> Any:
        from torch._dynamo.source import ConstantSource

        hints: Mapping[Any, Any] = getattr(size.node.shape_env, "backed_var_to_val", None) or getattr(
            size.node.shape_env, "var_to_val", {}
        )
        hint = int(hints.get(symbol, 8))
        source = ConstantSource(f"pattern_{len(self.symbols)}")
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        copy: Any = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        # A guard that follows from the bounds of the graph's own symbol is not an added one.
        bounds = size.node.shape_env.var_to_range.get(symbol)
        if bounds is not None:
            self.env.var_to_range[copy] = bounds
        return copy

    def same_number(self, ours: Any, theirs: Any) -> bool:
        """Whether a size of the fake copies equals one of the graph."""
        left = ours.node.expr if isinstance(ours, torch.SymInt) else ours
        if not isinstance(theirs, torch.SymInt):
            return bool(left == theirs)
        expr = theirs.node.expr
        # Symbols of two environments may happen to have the same names.
        return expr.free_symbols <= self.symbols.keys() and bool(left == expr.xreplace(self.symbols))
