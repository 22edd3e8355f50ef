"""Specializations of compiled code (operands, gradients, grad mode, autocast), and guards that test a call for one."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Generator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dovetail.ir.guard_code import Guard, GuardCode
from dovetail.ir.tensor_spec import NumberSpec, Size, Spec, Specialization, TensorSpec
from dovetail.ir.weight_fetch import TENSOR_TYPES, tensor_check

_TRIAL: ContextVar[bool] = ContextVar("trial", default=False)


@contextlib.contextmanager
def trial_run() -> Generator[None]:
    """Mark calls as trial runs, which backends that learn from calls ignore."""
    before = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(before)


def is_trial() -> bool:
    """Return whether a call is part of a trial run."""
    return _TRIAL.get()


class Unguardable(Exception):
    """An operand that no guard can test; the message is the reason."""


def specialization_of(args: Sequence[Any]) -> Specialization:
    """Return the specialization of a call."""
    flags = [isinstance(a, Tensor) and a.requires_grad for a in args]
    grad = torch.is_grad_enabled() and any(flags)
    return Specialization(
        tuple(_spec(a, grad and f) for a, f in zip(args, flags, strict=True)), grad, autocast_for(args)
    )


def expected_specialization(
    values: Sequence[Any], requires_grad: Sequence[bool], *, grad: bool
) -> Specialization:
    """Return the specialization of calls with operands like these fake values; symbolic sizes may vary."""
    ranges: dict[str, tuple[str, int | None, int | None]] = {}
    grad = grad and any(requires_grad)
    specs = tuple(_spec(v, grad and r, ranges) for v, r in zip(values, requires_grad, strict=True))
    return _with_numbered_symbols(Specialization(specs, grad, autocast_for(values), tuple(ranges.values())))


def _with_numbered_symbols(specialization: Specialization) -> Specialization:
    """Number symbols in the order of the operands: equal bodies have symbols of different names."""
    names = {symbol: f"s{i}" for i, (symbol, _, _) in enumerate(specialization.ranges)}
    if not names:
        return specialization
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def renamed(size: Any) -> Any:
        return pattern.sub(lambda match: names[match[0]], size) if isinstance(size, str) else size

    operands = tuple(
        replace(spec, sizes=tuple(map(renamed, spec.sizes)), strides=tuple(map(renamed, spec.strides)))
        if isinstance(spec, TensorSpec)
        else replace(spec, value=renamed(spec.value))
        for spec in specialization.operands
    )
    ranges = tuple((names[symbol], low, high) for symbol, low, high in specialization.ranges)
    return replace(specialization, operands=operands, ranges=ranges)


def autocast_for(args: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return the device types of operands for which autocast is enabled, each with its dtype."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    kinds = dict.fromkeys(a.device.type for a in args if isinstance(a, Tensor))
    return tuple((k, str(torch.get_autocast_dtype(k))) for k in kinds if torch.is_autocast_enabled(k))


def active_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types for which autocast is enabled, each with its dtype."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def disable_autocast() -> Generator[None]:
    """Disable autocast on all devices."""
    enabled = [kind for kind, _ in active_autocast()]
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)


@contextlib.contextmanager
def suspend_saved_tensor_hooks() -> Generator[None]:
    """Hide what runs from hooks on saved tensors.

    Those of activation checkpointing count what a call saves, and compilation happens in its first run only. Hooks that
    return each value as it is would hide it too, but an operation that saves its own result would then never be released.
    """
    functions: Any = torch._C._autograd  # pyright: ignore
    suspended: list[tuple[Any, Any]] = []
    while (hooks := functions._top_saved_tensors_default_hooks(False)) is not None:
        suspended.append(hooks)
        functions._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(suspended):
            functions._push_saved_tensors_default_hooks(pack, unpack)


def has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are active, those of checkpointing among them, unless they are suspended."""
    functions: Any = torch._C._autograd  # pyright: ignore
    return functions._top_saved_tensors_default_hooks(False) is not None


def _spec(value: Any, requires_grad: bool, ranges: dict[str, Any] | None = None) -> Spec:
    if isinstance(value, Tensor):
        # Fake tensors describe expected calls; in a real call they belong to a tracer.
        if type(value) not in TENSOR_TYPES and not (ranges is not None and isinstance(value, FakeTensor)):
            raise Unguardable(f"a tensor of class {type(value).__name__}")
        if value.layout is not torch.strided:
            raise Unguardable(f"a tensor of layout {value.layout}")
        if value.is_conj() or value.is_neg():
            raise Unguardable("a tensor with the conjugate or negative bit set")
        return TensorSpec(
            value.dtype,
            value.device,
            tuple(_size(n, ranges) for n in value.shape),
            tuple(_size(n, ranges) for n in value.stride()),
            requires_grad,
        )
    if value is None or isinstance(value, (bool, int, float, complex)):
        return NumberSpec(type(value).__name__, cast("Any", value))
    if isinstance(value, SymInt):
        return NumberSpec("int", _size(value, ranges))
    raise Unguardable(f"a {type(value).__name__}")


def _size(n: Any, ranges: dict[str, Any] | None) -> Size:
    if isinstance(n, int):
        return n
    expr: Any = n.node.expr
    if expr.is_number:
        return int(expr)
    if ranges is None:
        raise Unguardable("a size that is not known")
    for symbol in sorted(expr.free_symbols, key=str):
        bounds = n.node.shape_env.var_to_range.get(symbol)
        if bounds is None:
            raise Unguardable(f"the size {expr}, whose range is not known")
        ranges[str(symbol)] = (str(symbol), _bound(bounds.lower), _bound(bounds.upper))
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expr)


def _bound(value: Any) -> int | None:
    # Torch's infinite integers claim to be finite, and it uses huge ones as infinities too.
    import sympy

    return int(value) if isinstance(value, sympy.Integer) and abs(value) < 2**62 else None


def make_guard(specialization: Specialization, args: Sequence[Any] | None = None) -> Guard:
    """Return a test whether a call has a specialization, autocast aside.

    With operands that are known to have it, torch's own check of tensors does most of it, at a tenth of the cost.
    """
    if args is not None and specialization.is_static:
        guard = _tensor_guard(specialization, args)
        if guard is not None:
            return guard
    return _generated_guard(specialization)


def make_operand_guard(
    specialization: Specialization, args: Sequence[Any], others: Collection[int]
) -> Guard | None:
    """Return a test of some operands for calls whose `others`, tensors, are as in a call with these `args`.

    None if sizes of the others may vary.
    """
    kept = [i for i in range(len(args)) if i not in others]
    specs = specialization.operands
    if not all(isinstance(spec, TensorSpec) and spec.is_static for spec in (specs[i] for i in others)):
        return None
    # The gradient flags of the others count only in this mode.
    grad, is_grad_enabled = torch.is_grad_enabled(), torch.is_grad_enabled
    if not kept:
        return lambda values: is_grad_enabled() is grad
    guard = make_guard(
        replace(specialization, operands=tuple(specs[i] for i in kept)), [args[i] for i in kept]
    )
    return lambda values: is_grad_enabled() is grad and guard(values)


def _tensor_guard(specialization: Specialization, args: Sequence[Any]) -> Guard | None:
    if not all(isinstance(s, TensorSpec) for s in specialization.operands):
        return None
    check = tensor_check(args)
    if check is None:
        return None
    # It holds for the gradient flags of these operands, so grad mode must be what it is now.
    grad, is_grad_enabled = torch.is_grad_enabled(), torch.is_grad_enabled
    return lambda values: is_grad_enabled() is grad and check(*values)


def _generated_guard(specialization: Specialization) -> Guard:
    """Return the test as generated code; all types before any size, for sizes of other values do not exist."""
    names = {"tensor_types": TENSOR_TYPES, "is_grad_enabled": torch.is_grad_enabled, "math": math}
    code = GuardCode(names)
    code.assign("grad", "is_grad_enabled()")
    code.require(f"len(values) == {len(specialization.operands)}")
    tests: list[str] = []
    for i, spec in enumerate(specialization.operands):
        value = f"values[{i}]"
        if isinstance(spec, NumberSpec):
            tests.append(f"type({value}).__name__ == {spec.kind!r}")
            if not isinstance(spec.value, str):
                code.names[f"n{i}"] = spec.value
                tests.append(f"{value} == n{i}")
            continue
        code.names[f"d{i}"], code.names[f"v{i}"] = spec.dtype, spec.device
        tests += [
            f"type({value}) in tensor_types",
            f"{value}.dtype is d{i}",
            f"{value}.device == v{i}",
            f"{value}.dim() == {len(spec.sizes)}",
            f"not {value}.is_conj() and not {value}.is_neg()",
            f"(grad and {value}.requires_grad) is {spec.requires_grad}",
        ]
    code.require(*tests)
    for i, spec in enumerate(specialization.operands):
        if isinstance(spec, TensorSpec):
            _match_sizes(code, i, spec)
        elif isinstance(spec.value, str):
            code.match(spec.value, f"values[{i}]")
    for symbol, _, _ in specialization.ranges:
        if symbol not in code.bound and not code.solve(symbol):
            return lambda values: False  # no operand determines the symbol
    code.test_ranges(specialization.ranges)
    return code.compile()


def _match_sizes(code: GuardCode, i: int, spec: TensorSpec) -> None:
    for attribute, numbers in (("shape", spec.sizes), ("stride()", spec.strides)):
        if all(isinstance(n, int) for n in numbers):
            code.require(f"values[{i}].{attribute} == {tuple(numbers)!r}")
            continue
        local = f"{attribute.removesuffix('()')}{i}"
        code.assign(local, f"values[{i}].{attribute}")
        for dim, n in enumerate(numbers):
            code.match(n, f"{local}[{dim}]")
