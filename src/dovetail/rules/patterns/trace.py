"""A pattern as a graph: the same operators, in the same form, as a captured or an AOTAutograd graph has."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._device import DeviceContext

from dovetail.errors import DovetailError
from dovetail.frontend.capture import capture
from dovetail.ir.canonicalize import canonicalize
from dovetail.ir.graph_module import Program, copy_graph, rebuild
from dovetail.ir.nodes import size_hint
from dovetail.ir.op_traits import traits_of
from dovetail.ir.process_state import preserve_rng_state, suppress_fake_tensor_log, suppress_torch_warnings

DecompositionTable = Mapping[OpOverload, Callable[..., Any]]

# They turn data into numbers, or constants into tensors.
_UNTRACEABLE = frozenset(
    {
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
    }
)

# They tell a function what precision it works in.
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
    """A function does more than call operators on what it is given; it is to be traced the long way."""


class _MetaDevice(DeviceContext):
    """Makes tensors on the meta device by default, and notes when a precision is asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.asked = self.asked or func in _DTYPE_QUERIES
        return super().__torch_function__(func, types, args, kwargs)


class _ProxyRecorder(ProxyTorchDispatchMode):
    """Notes every operator before torch takes it apart, as `make_fx(pre_dispatch=True)` does.

    Only its place among torch's modes is inherited: torch lets no other kind of mode see operators that early.
    """

    def __init__(self, apart: DecompositionTable, *, on_meta: bool) -> None:
        super().__init__(cast("Any", None), "real", pre_dispatch=True)
        self.apart, self.on_meta = apart, on_meta
        self.graph = Graph()
        self.made: dict[int, tuple[Node, Any]] = {}
        self.plain = True
        self.casts = False

    def input(self, name: str, value: Tensor) -> None:
        self._note(value, self.graph.placeholder(name))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **named)
        if not isinstance(func, OpOverload):
            self.give_up(f"it calls {func}")
        self.casts = self.casts or func.overloadpacket.__name__ in _CASTS
        decomposed = self.apart.get(func)
        if decomposed is not None:
            with self:
                return decomposed(*args, **named)
        if func in _UNTRACEABLE or func._schema.is_mutable:
            self.give_up(f"it calls {func}")
        inputs = self._nodes(args)
        keywords = {name: self._nodes(value) for name, value in named.items()}
        # On the meta device torch's own kernels will do, and they are much quicker than those in Python.
        with no_python_dispatcher() if self.on_meta else contextlib.nullcontext():
            out = func(*args, **named)
        node = self.graph.create_node("call_function", func, inputs, keywords)
        if isinstance(out, Tensor):
            self._note(out, node)
        else:
            self._note_parts(out, node)
        return out

    def _note(self, value: Tensor, node: Node) -> None:
        # A tensor just made must have one owner, or torch hands on a copy that nobody knows.
        node.meta["val"] = value if node.all_input_nodes or node.op == "placeholder" else value.detach()
        self.made[id(value)] = (node, weakref.ref(value))

    def _note_parts(self, out: Any, node: Node) -> None:
        if not isinstance(out, (tuple, list)) or not all(
            isinstance(part, (Tensor, int, float)) for part in cast("list[Any]", out)
        ):
            self.give_up(f"{node.target} returns a {type(out).__name__}")
        node.meta["val"] = out
        for i, part in enumerate(cast("list[Any]", out)):
            if isinstance(part, Tensor):
                self._note(part, self.graph.create_node("call_function", operator.getitem, (node, i)))

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            items = [self._nodes(item) for item in cast("list[Any]", value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            self.give_up("it computes with numbers that are not known")
        return value

    def node(self, value: Any) -> Node:
        """The node that made a tensor."""
        node, made = self.made.get(id(value), (None, None))
        # A tensor that was freed leaves its id to another.
        if node is None or made is None or made() is not value:
            self.give_up("it uses a tensor that it was not given")
        return cast("Node", node)

    def give_up(self, why: str) -> None:
        # The function may swallow the exception; what it did afterwards is worth nothing.
        self.plain = False
        raise NotRecordable(why)


def record(
    function: Callable[..., Any], values: Sequence[Any], apart: DecompositionTable
) -> tuple[Program, bool]:
    """The graph of a function of tensors without data, and whether it would be the same in any other precision.

    Each node has its value; sizes that are symbols stand among the arguments as they are. Values are all fake or all on the meta device. The operators in `apart` are taken apart
    as it says. `NotPlain` is raised if the function does more than call operators.
    """
    on_meta = all(type(value) is Tensor and value.is_meta for value in values)
    if not on_meta and not all(isinstance(value, FakeTensor) for value in values):
        raise NotRecordable("an operand is no plain tensor")
    recorder = _ProxyRecorder(apart, on_meta=on_meta)
    for i, value in enumerate(values):
        recorder.input(f"arg{i}_1", value)
    # What the function makes is to be of the same kind as what it is given.
    world = _MetaDevice() if on_meta else values[0].fake_mode
    with world, enable_python_dispatcher(), recorder:
        results = function(*values)
    if not recorder.plain:
        raise NotRecordable("it swallowed an exception")
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    program = rebuild(nn.Module(), recorder.graph)
    return program, isinstance(world, _MetaDevice) and not world.asked and not recorder.casts


CAPTURED, AUTOGRAD = "captured", "autograd"
"""The two dialects: what `capture` makes, and what AOTAutograd hands to a compiler."""
_COMPOSITE = "CompositeImplicitAutograd"


@functools.cache
def capture_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """What `capture` takes apart: operators made of others whose result may be a view of an argument."""
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel_for_dispatch_key(
            name, _COMPOSITE
        ):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        op: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if isinstance(op, OpOverload) and _may_alias(op):
            found[op] = op.decompose
    # Its schema does not tell of the statistics it updates, so export takes it apart too.
    lying = torch.ops.aten.native_batch_norm.default
    found[lying] = lying.decompose
    return found


def _may_alias(op: OpOverload) -> bool:
    if torch.Tag.maybe_aliasing_or_mutating in op.tags or op._schema.is_mutable:
        return True
    return any(part.alias_info is not None for part in (*op._schema.returns, *op._schema.arguments))


def trace(
    function: Callable[..., Any], values: Sequence[Any], dialect: str = CAPTURED, *, quick: bool = False
) -> Program:
    """The canonical graph of a function on (fake) values; the values' own symbols get no new guards.

    The `quick` way is tried first where it is asked for; it keeps no record of where an operation came from.
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


@dataclass(frozen=True)
class MetaTrace:
    """A graph traced on tensors of the meta device; a `blind` one would be the same in any other precision."""

    program: Program
    blind: bool


def trace_on_meta(function: Callable[..., Any], values: Sequence[Tensor]) -> MetaTrace:
    """The canonical graph of a function on tensors of the meta device; `NotPlain` where it is more than operators."""
    with suppress_torch_warnings(), suppress_fake_tensor_log(), preserve_rng_state(), torch.no_grad():
        recorded, blind = record(function, values, capture_decompositions())
    return MetaTrace(canonicalize(recorded)[0], blind)


def _try_record(function: Callable[..., Any], values: Sequence[Any]) -> Program | None:
    try:
        return record(function, values, capture_decompositions())[0]
    except DovetailError:
        raise
    except Exception:  # whatever it is, the long way meets it again and says so
        return None


def has_writes(module: GraphModule) -> bool:
    """Whether a traced graph has operators that write, as only a functional form can be compared."""
    return any(n.op == "call_function" and traits_of(n).writes for n in module.graph.nodes)


def _trace_by_capture(function: Callable[..., Any], values: Sequence[Any]) -> Program:
    """The long way round, for what writes: functional as `capture` makes it, without the writes at the end."""
    program = cast("Program", capture(function, tuple(values)))
    graph = copy_graph(program.graph)
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            graph.erase_node(node)
    return rebuild(program, graph)


class _FakeMode(FakeTensorMode):
    """Fake tensors on which a convolution decides nothing about sizes.

    Which library takes it hangs on the size of the batch, what it computes does not; `capture` has none of them on.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.convolution.default or self.shape_env is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self.shape_env.suppress_guards():
            return super().__torch_dispatch__(func, types, args, kwargs or {})


class FakeEnvironment:
    """Makes stand-ins for values: same sizes, strides, dtypes and devices, with symbols of their own.

    A pattern that was run on a graph's own values would add guards to the graph's symbols.
    """

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = _FakeMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.symbols: dict[Any, Any] = {}
        self._envs: dict[int, ShapeEnv] = {}

    def settled(self) -> list[str]:
        """What was decided about sizes here that the graph does not go by itself."""
        known = {guard.expr.xreplace(self.symbols) for env in self._envs.values() for guard in env.guards}
        return [str(guard.expr) for guard in self.env.guards if guard.expr not in known]

    def stand_in(self, value: Any) -> Any:
        """A stand-in for a value."""
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
        made: Any = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        # Within the bounds of the graph's own symbol, a pattern may ask what it likes.
        known = size.node.shape_env.var_to_range.get(symbol)
        if known is not None:
            self.env.var_to_range[made] = known
        return made

    def same_number(self, ours: Any, theirs: Any) -> bool:
        """Whether a number of the stand-ins' world is that of the graph's."""
        left = ours.node.expr if isinstance(ours, torch.SymInt) else ours
        if not isinstance(theirs, torch.SymInt):
            return bool(left == theirs)
        expr = theirs.node.expr
        # Symbols of the two worlds may have the same names by chance.
        return expr.free_symbols <= self.symbols.keys() and bool(left == expr.xreplace(self.symbols))
