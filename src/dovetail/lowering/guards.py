"""What compiled code was made for: operands, gradients, grad mode and autocast, and whether a call is like that."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.printers import PythonPrinter

from dovetail import torch_compat
from dovetail.ir.tensor_spec import NumberSpec, Size, Spec, Specialization, TensorSpec

_TRIAL: ContextVar[bool] = ContextVar("trial", default=False)
_PLAIN = (Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def trial_run() -> Generator[None]:
    """Calls that tell nothing of those to come: a backend that learns from calls does not learn from these."""
    before = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(before)


def is_trial() -> bool:
    """Whether a call is part of a trial run."""
    return _TRIAL.get()


class Unguardable(Exception):
    """An operand of a kind that no guard can tell apart; the reason is its text."""


def specialization_of(args: Sequence[Any]) -> Specialization:
    """The situation of a real call."""
    flags = [isinstance(a, Tensor) and a.requires_grad for a in args]
    grad = torch.is_grad_enabled() and any(flags)
    return Specialization(
        tuple(_spec(a, grad and f) for a, f in zip(args, flags, strict=True)), grad, autocast_now(args)
    )


def expected_specialization(
    values: Sequence[Any], requires_grad: Sequence[bool], *, grad: bool
) -> Specialization:
    """The situation that fake values foretell; sizes that are symbols may vary."""
    ranges: dict[str, tuple[str, int | None, int | None]] = {}
    grad = grad and any(requires_grad)
    specs = tuple(_spec(v, grad and r, ranges) for v, r in zip(values, requires_grad, strict=True))
    return _with_numbered_symbols(Specialization(specs, grad, autocast_now(values), tuple(ranges.values())))


def _with_numbered_symbols(situation: Specialization) -> Specialization:
    """The same with symbols named by the order in which operands show them: equal bodies have symbols of their own."""
    names = {symbol: f"s{i}" for i, (symbol, _, _) in enumerate(situation.ranges)}
    if not names:
        return situation
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def renamed(size: Any) -> Any:
        return pattern.sub(lambda match: names[match[0]], size) if isinstance(size, str) else size

    operands = tuple(
        replace(spec, sizes=tuple(map(renamed, spec.sizes)), strides=tuple(map(renamed, spec.strides)))
        if isinstance(spec, TensorSpec)
        else replace(spec, value=renamed(spec.value))
        for spec in situation.operands
    )
    ranges = tuple((names[symbol], low, high) for symbol, low, high in situation.ranges)
    return replace(situation, operands=operands, ranges=ranges)


def autocast_now(args: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Device types of the operands for which autocast is on, each with its dtype."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    kinds = dict.fromkeys(a.device.type for a in args if isinstance(a, Tensor))
    return tuple((k, str(torch.get_autocast_dtype(k))) for k in kinds if torch.is_autocast_enabled(k))


def autocasting() -> tuple[tuple[str, torch.dtype], ...]:
    """Device types for which autocast is on, each with its dtype."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def autocast_off() -> Generator[None]:
    """Run something in which every operation keeps the dtypes it is given."""
    on = [kind for kind, _ in autocasting()]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


def nothing_noted() -> contextlib.AbstractContextManager[Any]:
    """Run something that hooks on saved tensors do not notice: those of activation checkpointing count what a call
    saves, and would miss what is only made on the way to its first run."""
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def has_saving_hooks() -> bool:
    """Whether hooks on saved tensors are active, those of checkpointing among them, other than `nothing_noted`'s."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    return hooks is not None and hooks[0] is not _as_it_is


def _spec(value: Any, requires_grad: bool, ranges: dict[str, Any] | None = None) -> Spec:
    if isinstance(value, Tensor):
        # Fake ones stand for plain ones where a situation is foretold; in a call they are somebody's tracing.
        if type(value) not in _PLAIN and not (ranges is not None and isinstance(value, FakeTensor)):
            raise Unguardable(f"a tensor of class {type(value).__name__}")
        if value.layout is not torch.strided:
            raise Unguardable(f"a tensor of layout {value.layout}")
        if value.is_conj() or value.is_neg():
            raise Unguardable("a tensor that stands for the conjugate or the negative of what is in memory")
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
    expr = cast("sympy.Expr", n.node.expr)
    if expr.is_number:
        return int(expr)
    if ranges is None:
        raise Unguardable("a size that is not known")
    for symbol in sorted(expr.free_symbols, key=str):
        bounds = n.node.shape_env.var_to_range.get(symbol)
        if bounds is None:
            raise Unguardable(f"the size {expr}, of which nothing is known")
        ranges[str(symbol)] = (str(symbol), _bound(bounds.lower), _bound(bounds.upper))
    return PythonPrinter().doprint(expr)


def _bound(value: Any) -> int | None:
    # Torch's infinite integers say of themselves that they are finite, and it has huge ones that mean the same.
    return int(value) if isinstance(value, sympy.Integer) and abs(value) < 2**62 else None


Fit = Callable[[tuple[Any, ...]], bool]


def fit_for(situation: Specialization, args: Sequence[Any] | None = None) -> Fit:
    """A test whether a call is as the situation says, autocast aside.

    With operands that are known to fit, torch's own check of tensors does most of it, at a tenth of the cost.
    """
    if args is not None and situation.is_static:
        found = _native_fit(situation, args)
        if found is not None:
            return found
    return _written_fit(situation)


def _native_fit(situation: Specialization, args: Sequence[Any]) -> Fit | None:
    if not all(isinstance(s, TensorSpec) for s in situation.operands):
        return None
    if not args or any(type(a) not in _PLAIN for a in args):
        return None
    try:
        sizes: Any = [list(a.shape) for a in args]
        strides: Any = [list(a.stride()) for a in args]
        check = torch_compat.TENSOR_GUARDS.value(
            *args, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        if not check(*args):
            return None
    except Exception:  # the check is torch's own business; ours does the same, slower
        return None

    # What it holds to is these very operands, gradient flags and all, so grad mode must be what it is now.
    now, asked = torch.is_grad_enabled(), torch.is_grad_enabled
    return lambda given: asked() is now and check(*given)


def _written_fit(situation: Specialization) -> Fit:
    """The test as generated code: one line per operand, symbols bound where they stand alone."""
    names: dict[str, Any] = {"plain": _PLAIN, "asked": torch.is_grad_enabled, "math": math}
    bound: set[str] = set()
    tests: list[str] = []
    late: list[str] = []
    lines = ["def fits(given):", "    grad = asked()"]
    lines.append(f"    if len(given) != {len(situation.operands)}: return False")
    for i, spec in enumerate(situation.operands):
        if isinstance(spec, NumberSpec):
            tests.append(f"type(given[{i}]).__name__ == {spec.kind!r}")
            if isinstance(spec.value, str):
                _match(spec.value, f"given[{i}]", bound, lines, late)
            else:
                names[f"n{i}"] = spec.value
                tests.append(f"given[{i}] == n{i}")
            continue
        names[f"d{i}"], names[f"v{i}"] = spec.dtype, spec.device
        tests += [
            f"type(given[{i}]) in plain",
            f"given[{i}].dtype is d{i}",
            f"given[{i}].device == v{i}",
            f"given[{i}].dim() == {len(spec.sizes)}",
            f"not given[{i}].is_conj() and not given[{i}].is_neg()",
            f"(grad and given[{i}].requires_grad) is {spec.requires_grad}",
        ]
    if tests:
        lines.append(f"    if not ({' and '.join(tests)}): return False")
    for i, spec in enumerate(situation.operands):
        if isinstance(spec, TensorSpec):
            _sizes(i, spec, bound, lines, late)
    stated = [test.split(" == ", 1) for test in late]
    for symbol, _, _ in situation.ranges:
        if symbol not in bound:
            solution = _solved(symbol, stated, bound)
            if solution is None:
                return lambda given: False  # a symbol whose value no operand shows
            bound.add(symbol)
            lines.append(f"    {symbol} = {solution}")
    for symbol, lower, upper in situation.ranges:
        late += [f"{lower} <= {symbol}"] if lower is not None else []
        late += [f"{symbol} <= {upper}"] if upper is not None else []
    lines.append(f"    return {' and '.join(late) or 'True'}")
    exec("\n".join(lines), names)
    return names["fits"]


def _sizes(i: int, spec: TensorSpec, bound: set[str], lines: list[str], late: list[str]) -> None:
    for what, numbers in (("shape", spec.sizes), ("stride()", spec.strides)):
        if all(isinstance(n, int) for n in numbers):
            lines.append(f"    if given[{i}].{what} != {tuple(numbers)!r}: return False")
            continue
        local = f"{what.removesuffix('()')}{i}"
        lines.append(f"    {local} = given[{i}].{what}")
        for at, n in enumerate(numbers):
            if isinstance(n, int):
                late.append(f"{local}[{at}] == {n}")
            else:
                _match(n, f"{local}[{at}]", bound, lines, late)


def _match(expression: str, place: str, bound: set[str], lines: list[str], late: list[str]) -> None:
    if expression.isidentifier() and expression not in bound:
        bound.add(expression)
        lines.append(f"    {expression} = {place}")
    else:
        late.append(f"{place} == {expression}")


def _solved(symbol: str, stated: Sequence[Sequence[str]], bound: set[str]) -> str | None:
    """A symbol as an expression of what is known, from a size that is affine in it; None if there is no such size."""
    for place, text in stated:
        names = set(re.findall(r"[A-Za-z_]\w*", text))
        if symbol not in names or not names <= {symbol, *bound}:
            continue
        code = compile(text, "<size>", "eval")
        others = [dict.fromkeys(names, n) for n in (3, 7)]
        try:
            samples = [[eval(code, {}, known | {symbol: n}) for n in (0, 1, 2, 1000)] for known in others]
        except (ArithmeticError, TypeError):
            continue
        slope = samples[0][1] - samples[0][0]
        is_affine = all(
            row[1] - row[0] == slope and row[2] - row[0] == 2 * slope and row[3] - row[0] == 1000 * slope
            for row in samples
        )
        if slope and is_affine:
            constant = re.sub(rf"\b{symbol}\b", "0", text)
            return f"({place} - ({constant})) // {slope}"
    return None
