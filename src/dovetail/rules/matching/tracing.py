"""A pattern as a graph: the same operators, in the same form, as a captured or an AOTAutograd graph has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dovetail.errors import DovetailError
from dovetail.graph.canonical import canonicalise
from dovetail.graph.capture import capture
from dovetail.graph.capturing.quieting import quiet, quietly, rng_kept
from dovetail.graph.module import Program, copy_graph, rebuild
from dovetail.graph.spellings import traits
from dovetail.rules.matching.recording import record

CAPTURED, AUTOGRAD = "captured", "autograd"
"""The two dialects: what `capture` makes, and what AOTAutograd hands to a compiler."""

_COMPOSITE = "CompositeImplicitAutograd"


@functools.cache
def taken_apart() -> dict[OpOverload, Callable[..., Any]]:
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
    with quiet(), quietly(), rng_kept(), torch.no_grad():
        if dialect == AUTOGRAD:
            with enable_python_dispatcher():
                traced = make_fx(torch.func.functionalize(function))(*values)
        else:
            traced = _recorded(function, values) if quick else None
            if traced is None:
                table = cast("dict[Any, Any]", taken_apart())
                traced = make_fx(function, decomposition_table=table, pre_dispatch=True)(*values)
                if writes(traced):
                    return _captured(function, values)
    return canonicalise(traced)[0]


@dataclass(frozen=True)
class Sketch:
    """A graph traced on tensors of the meta device; a `blind` one would be the same in any other precision."""

    program: Program
    blind: bool


def sketch(function: Callable[..., Any], values: Sequence[Tensor]) -> Sketch:
    """The canonical graph of a function on tensors of the meta device; `NotPlain` where it is more than operators."""
    with quiet(), quietly(), rng_kept(), torch.no_grad():
        recorded, blind = record(function, values, taken_apart())
    return Sketch(canonicalise(recorded)[0], blind)


def _recorded(function: Callable[..., Any], values: Sequence[Any]) -> Program | None:
    try:
        return record(function, values, taken_apart())[0]
    except DovetailError:
        raise
    except Exception:  # whatever it is, the long way meets it again and says so
        return None


def writes(module: GraphModule) -> bool:
    """Whether a traced graph has operators that write, as only a functional form can be compared."""
    return any(n.op == "call_function" and traits(n).writes for n in module.graph.nodes)


def _captured(function: Callable[..., Any], values: Sequence[Any]) -> Program:
    """The long way round, for what writes: functional as `capture` makes it, without the writes at the end."""
    program = cast("Program", capture(function, tuple(values)))
    graph = copy_graph(program.graph)
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            graph.erase_node(node)
    return rebuild(program, graph)


class _StageMode(FakeTensorMode):
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


class Stage:
    """Makes stand-ins for values: same sizes, strides, dtypes and devices, with symbols of their own.

    A pattern that was run on a graph's own values would add guards to the graph's symbols.
    """

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = _StageMode(shape_env=self.env, allow_non_fake_inputs=True)
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
        hint = size.node.hint if size.node.has_hint() else None
        return self.env.create_symintnode(renamed, hint=hint)

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
