"""Fake tensors and symbolic sizes as picklable values, the specs that code is specialized for, and memory layouts."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dovetail.errors import InvalidArgument
from dovetail.ir.nodes import example_size, is_static_size, size_hint, size_hints, storage_key

if TYPE_CHECKING:
    # sympy takes longer to import than all of this package, and few graphs have symbolic sizes.
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

TensorRow = tuple[Any, ...]
"""Number of the storage, sizes, strides, offset, dtype, device, requires_grad, whether it is a parameter."""


def tensor_row(value: FakeTensor, storages: dict[int, int]) -> TensorRow:
    """Return what `SymbolicEnv.tensor` needs; `storages` numbers the storages met so far."""

    def described(sizes: Any) -> tuple[Any, ...]:
        return tuple(describe_symbolic(s) if isinstance(s, torch.SymInt) else s for s in sizes)

    strided = value.layout is torch.strided
    return (
        storages.setdefault(storage_key(value), len(storages)),
        described(value.shape),
        described(value.stride()) if strided else None,
        described([value.storage_offset()])[0] if strided else 0,
        value.dtype,
        value.device,
        value.requires_grad and (value.is_floating_point() or value.is_complex()),
        isinstance(value, torch.nn.Parameter),
    )


@dataclass(frozen=True)
class Symbolic:
    """A symbolic number: its expression, and for each symbol a hint and a range (None: no hint)."""

    kind: str
    expr: str
    symbols: tuple[tuple[str, int | None, int | None, int | None], ...]


def describe_symbolic(value: Any) -> Symbolic:
    """Return a symbolic number as a `Symbolic`."""
    node = value.node
    expr = node.expr
    env: ShapeEnv = node.shape_env
    rows: list[tuple[str, int | None, int | None, int | None]] = []
    for symbol in sorted(expr.free_symbols, key=str):
        bounds = env.var_to_range.get(symbol)
        lower, upper = _bound(bounds and bounds.lower), _bound(bounds and bounds.upper)
        rows.append((str(symbol), _symbol_hint(env, symbol), lower, upper))
    import sympy

    return Symbolic(type(value).__name__, sympy.srepr(expr), tuple(rows))


def _symbol_hint(env: ShapeEnv, symbol: sympy.Symbol) -> int | None:
    # The table of hints was renamed between torch releases.
    hints = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    known = hints.get(symbol)
    return None if known is None else int(known)


def _bound(value: Any) -> int | None:
    from torch.utils._sympy.numbers import int_oo

    return int(value) if value is not None and value not in (int_oo, -int_oo) and value.is_number else None


_UNBOUNDED_BYTES = 2**50
_SYMBOL_COST = 2**10


class _LazyFakeMode(FakeTensorMode):
    """A fake mode that is initialized when it is used, not by making fake tensors of it.

    Its initialization imports Dynamo, which takes half a second: longer than loading a graph that is compiled already.
    """

    # What FakeTensor reads when one is made: torch's defaults.
    allow_meta = True
    _allow_unsafe_data_ptr_access = True
    in_kernel_invocation = False

    def __init__(self) -> None:
        if "torch._functorch.config" in sys.modules:
            self._initialize()

    def _initialize(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        vars(self)["_is_initialized"] = True
        super().__init__(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def __getattr__(self, name: str) -> Any:
        # Called for what is missing.
        if "_is_initialized" in vars(self) or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        self._initialize()
        return getattr(self, name)

    def __enter__(self) -> Self:
        if "_is_initialized" not in vars(self):
            self._initialize()
        return super().__enter__()


@dataclass
class SymbolicEnv:
    """The fake mode and symbols of one loaded graph; `budget` bounds the cost of parsing its expressions."""

    symbols: dict[str, Any] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _numbers: dict[tuple[str, str], Any] = field(default_factory=dict)
    budget: float = math.inf

    def __post_init__(self) -> None:
        self.mode: FakeTensorMode = _LazyFakeMode()

    @property
    def env(self) -> ShapeEnv:
        """The symbols of the mode."""
        env = self.mode.shape_env
        assert env is not None
        return env

    def symbolic(self, described: Symbolic) -> Any:
        """Return the number that `describe_symbolic` described."""
        for name, hint, lower, upper in described.symbols:
            if name not in self.symbols:
                self.symbols[name] = self._symbol(name, hint, lower, upper)
        key = (described.kind, described.expr)
        if key not in self._numbers:
            self._numbers[key] = self._number(*key)
        return self._numbers[key]

    def _spend(self, cost: int) -> None:
        self.budget -= cost
        if self.budget < 0:
            raise InvalidArgument("the symbolic sizes of the graph are too many or too large.")

    def _number(self, kind: str, text: str) -> Any:
        import sympy
        from sympy.logic.boolalg import Boolean

        from dovetail.ir.symbolic_expr import parse_expression

        expr: Any = parse_expression(text, self.symbols, self._spend)
        is_of_kind = isinstance(expr, Boolean) if kind == "SymBool" else isinstance(expr, sympy.Expr)
        if not is_of_kind:
            raise InvalidArgument(f"{text[:80]!r} is not an expression of a {kind}.")
        hint = _evaluate(expr, self.env)
        if kind == "SymInt":
            return self.env.create_symintnode(expr, hint=None if hint is None else int(hint))
        if kind == "SymBool":
            return self.env.create_symboolnode(expr)
        return self.env.create_symfloatnode(expr, hint=None if hint is None else float(hint))

    def _symbol(self, name: str, hint: int | None, lower: int | None, upper: int | None) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        # torch records where each one was created, which takes a millisecond.
        self._spend(_SYMBOL_COST)
        if hint is None:
            number: Any = self.env.create_unbacked_symint()
        else:
            source = ConstantSource(f"__loaded_{name}")
            symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            number = self.env.create_symintnode(symbol, hint=hint, source=source)
        # Exactly as they were: a new symbol has other bounds, and bounds are part of the key of a body.
        bounds = ValueRanges(-int_oo if lower is None else lower, int_oo if upper is None else upper)
        self.env.var_to_range[number.node.expr] = bounds
        return number.node.expr

    def _symbolic_tensor(
        self, storage_id: int, sizes: Sequence[Any], strides: Sequence[Any], start: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        # Larger than any size can be, so that any view fits.
        storage = self.storages.setdefault(storage_id, torch.UntypedStorage(_UNBOUNDED_BYTES, device="meta"))
        if storage.nbytes() < _UNBOUNDED_BYTES:
            storage.resize_(_UNBOUNDED_BYTES)
        # Unlike `set_` with sizes, this evaluates no condition on the symbols (bounds, contiguity), which would be slow
        # and specialize them.
        return torch.empty(0, dtype=dtype, device="meta").set_(storage).as_strided(sizes, strides, start)

    def tensor(self, row: TensorRow) -> FakeTensor:
        """Return the fake tensor that `tensor_row` described."""
        storage_id, shape, stride, offset, dtype, device, requires_grad, is_parameter = row

        def real(value: Any) -> Any:
            return self.symbolic(value) if isinstance(value, Symbolic) else value

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
        if is_parameter:
            # Like `torch.nn.Parameter(fake)`, without the detached copy that it makes in the fake mode.
            vars(fake)["_is_param"] = True
        if requires_grad:
            fake.requires_grad_()
        return fake


def _evaluate(expr: Any, env: ShapeEnv) -> Any:
    from dovetail.ir.symbolic_expr import evaluate_expression

    hints = {s: _symbol_hint(env, s) for s in expr.free_symbols}
    known = {symbol: hint for symbol, hint in hints.items() if hint is not None}
    return evaluate_expression(expr, known) if len(known) == len(hints) else None


Size = int | str
"""A number, or an expression over the symbols of the operands where it may vary."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor operand as far as compiled code depends on it."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    requires_grad: bool

    @property
    def is_static(self) -> bool:
        """Whether every size and stride is a number."""
        return all(isinstance(n, int) for n in (*self.sizes, *self.strides))


@dataclass(frozen=True, slots=True)
class NumberSpec:
    """An operand that is a number: its value, or an expression where it may vary."""

    kind: str
    value: float | str | None


Spec = TensorSpec | NumberSpec
Ranges = tuple[tuple[str, int | None, int | None], ...]
"""Symbols with the smallest and the largest value they may take; None if unbounded."""


@dataclass(frozen=True, slots=True)
class Specialization:
    """What compiled code is specialized for, and cached by.

    `grad` is whether autograd records the call: grad mode is on and an operand requires gradients. If it does not, no
    operand counts as requiring any.
    """

    operands: tuple[Spec, ...]
    grad: bool
    autocast: tuple[tuple[str, str], ...] = ()
    ranges: Ranges = ()

    @property
    def is_static(self) -> bool:
        """Whether no size may vary."""
        return not self.ranges and all(
            s.is_static if isinstance(s, TensorSpec) else not isinstance(s.value, str) for s in self.operands
        )


@dataclass(frozen=True)
class Layout:
    """A tensor as a runtime sees it: contiguous, with its dimensions permuted by `order`.

    Without an order no permutation is contiguous, and the tensor has to be copied. `sizes` and `strides` are None where
    some are symbolic.
    """

    dtype: torch.dtype
    order: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    @functools.cached_property
    def permuted(self) -> bool:
        """Whether the runtime has the dimensions in another order."""
        return self.order is not None and self.order != tuple(range(len(self.order)))

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes `order`."""
        order = self.order or ()
        return tuple(order.index(d) for d in range(len(order)))

    def to_runtime(self, value: Tensor) -> Tensor:
        """Return a tensor as the runtime sees it: the same memory unless it has to be copied."""
        if self.order is None:
            return value.contiguous()
        return (value.permute(self.order) if self.permuted else value).contiguous()

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Return memory for a result: the tensor, and a view of it as the runtime sees it. Sizes must be known."""
        assert self.sizes is not None
        assert self.strides is not None
        if self.order is None:
            return (buffer := torch.empty(self.sizes, dtype=self.dtype)), buffer
        tensor = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)
        return tensor, (tensor.permute(self.order) if self.permuted else tensor)

    def from_runtime(self, buffer: Tensor) -> Tensor:
        """Return the tensor that a runtime's result stands for."""
        if self.order is not None:
            return buffer.permute(self.inverse) if self.permuted else buffer
        if self.strides is None:
            return buffer
        sizes = buffer.shape
        # Elements that share memory, as in an expanded tensor, are copied once.
        for dim, (size, stride) in enumerate(zip(sizes, self.strides, strict=True)):
            if stride == 0 and size > 1:
                buffer = buffer.narrow(dim, 0, 1)
        return torch.empty_strided(buffer.shape, self.strides, dtype=buffer.dtype).copy_(buffer).expand(sizes)


def layout_of(value: Tensor) -> Layout:
    """Return the layout of a tensor, fake or real."""
    sizes, strides = tuple(value.shape), tuple(value.stride())
    fixed = all(is_static_size(n) for n in (*sizes, *strides))
    return Layout(
        value.dtype,
        _contiguous_order(sizes, strides),
        tuple(map(int, sizes)) if fixed else None,
        tuple(map(int, strides)) if fixed else None,
    )


def _contiguous_order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the permutation of the dimensions that is contiguous, or None. Symbols are compared by expression."""
    hints = [example_size(n) for n in strides]
    ranked = sorted(range(len(sizes)), key=lambda d: (-hints[d], d))
    step: Any = 1
    for d in reversed(ranked):
        # Comparing the symbols themselves would write a guard into the graph's environment.
        if sizes[d] != 1 and not bool(_expression(strides[d]) == step):
            return None
        step = step * _expression(sizes[d])
    return tuple(ranked)


def reshapes_to_view(value: Tensor, sizes: Sequence[Any]) -> bool:
    """Whether reshaping a tensor to these sizes returns a view, as ATen's `computeStride` decides it.

    Dimensions that are evenly spaced in memory form a run, and each run must consist of consecutive new sizes. A
    tensor that is contiguous in the example counts as contiguous; other symbolic sizes and strides must be equal by
    their expressions.
    """
    hints, new_hints = size_hints(value), [size_hint(size) for size in sizes]
    if value.layout is not torch.strided or hints is None:
        return False
    if 0 in hints or _is_contiguous(hints, [size_hint(stride) for stride in value.stride()]):
        return True
    dims = [
        (_expression(size), hint, _expression(stride))
        for size, hint, stride in zip(value.shape, hints, value.stride(), strict=True)
        if _expression(size) != 1
    ]
    new = [(_expression(s), h) for s, h in zip(sizes, new_hints, strict=True) if _expression(s) != 1]
    elements: Any = 1
    hint, spacing = 1, dims[-1][2] if dims else 1
    for d in reversed(range(len(dims))):
        elements, hint = elements * dims[d][0], hint * dims[d][1]
        if d > 0 and bool(dims[d - 1][2] == elements * spacing):
            continue
        covered: Any = 1
        covered_hint = 1
        while new and covered_hint < hint:
            size, own = new.pop()
            if own is None:
                return False
            covered, covered_hint = covered * size, covered_hint * own
        if not bool(covered == elements):
            return False
        elements, hint, spacing = 1, 1, dims[d - 1][2]
    return not new


def _is_contiguous(sizes: Sequence[int], strides: Sequence[int | None]) -> bool:
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, SymInt) else value
