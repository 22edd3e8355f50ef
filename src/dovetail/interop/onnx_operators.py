"""What ONNX operators are in torch. Vectors of sizes and positions are lists here, so that a reshape stays one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.lowering.onnx.types import DTYPES

Reading = Callable[..., Any]
OPERATORS: dict[str, Reading] = {}
"""By the name of an ONNX operator, a function of its inputs and, by keyword, its attributes."""


@functools.cache
def operators() -> Mapping[str, Reading]:
    """All of them, from every file that has some."""
    for file in ("layers", "shaping"):
        import_module(f"dovetail.interop.onnx_{file}")
    return OPERATORS


class NoCounterpart(Exception):
    """ATen has nothing that does what an ONNX node does; the text says what."""


def operator(*names: str) -> Callable[[Reading], Reading]:
    """Make a function the meaning of some ONNX operators."""

    def register(function: Reading) -> Reading:
        for name in names:
            OPERATORS[name] = function
        return function

    return register


def tensor(value: Any, like: Any = None) -> Tensor:
    """A value as a tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(like, Tensor) and not isinstance(value, list):
        return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)
    return torch.tensor(value)


def known(value: Any, what: str) -> Any:
    """Numbers that must be known when the model is read."""
    if isinstance(value, Tensor):
        raise NoCounterpart(f"{what} is only known in a call")
    return value


def listed(value: Any, what: str) -> list[Any]:
    """A vector of numbers that must be known when the model is read."""
    found = known(value, what)
    return list(cast("list[Any]", found)) if isinstance(found, list) else [found]


_UNARY: Mapping[str, Reading] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: Mapping[str, Reading] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Equal": torch.eq,
    "Less": torch.lt,
    "Greater": torch.gt,
    "LessOrEqual": torch.le,
    "GreaterOrEqual": torch.ge,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
_WHOLE: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a // b,
}


def _unary(function: Reading) -> Reading:
    def read(x: Any) -> Any:
        return function(tensor(x))

    return read


def _pair(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands for torch: numbers stay numbers beside a tensor."""
    if isinstance(a, list):
        a = tensor(a)
    if isinstance(b, list):
        b = tensor(b)
    return a, b


def _binary(name: str, function: Reading) -> Reading:
    def read(a: Any, b: Any) -> Any:
        if not isinstance(a, (Tensor, list)) and not isinstance(b, (Tensor, list)) and name in _WHOLE:
            return _WHOLE[name](a, b)
        left, right = _pair(a, b)
        if isinstance(left, Tensor):
            return function(left, right)
        if name in ("Add", "Mul"):
            return function(right, left)
        if name == "Sub":
            return torch.rsub(right, left)
        return function(tensor(left, right), right)

    return read


for _name, _function in _UNARY.items():
    OPERATORS[_name] = _unary(_function)
for _name, _function in _BINARY.items():
    OPERATORS[_name] = _binary(_name, _function)


@operator("Div")
def _(a: Any, b: Any) -> Any:
    if not isinstance(a, (Tensor, list)) and not isinstance(b, (Tensor, list)):
        return a // b if isinstance(a, int) else a / b
    left, right = _pair(a, b)
    whole = not tensor(left, right).is_floating_point()
    left = tensor(left, right)
    return torch.div(left, right, rounding_mode="trunc") if whole else torch.div(left, right)


@operator("Mod")
def _(a: Any, b: Any, *, fmod: int = 0) -> Any:
    return torch.fmod(tensor(a, b), b) if fmod else torch.remainder(tensor(a, b), b)


@operator("Pow")
def _(a: Any, b: Any) -> Any:
    return torch.pow(*_pair(a, b))


def _extreme(function: Reading) -> Reading:
    def read(*given: Any) -> Any:
        first = next(v for v in given if isinstance(v, Tensor))
        found = tensor(given[0], first)
        for other in given[1:]:
            found = function(found, tensor(other, first))
        return found

    return read


OPERATORS["Max"], OPERATORS["Min"] = _extreme(torch.maximum), _extreme(torch.minimum)


@operator("Clip")
def _(x: Any, least: Any = None, most: Any = None) -> Any:
    if isinstance(least, Tensor) or isinstance(most, Tensor):
        least, most = (v if v is None else tensor(v, x) for v in (least, most))
    return torch.clamp(x, least, most)


@operator("Where")
def _(condition: Any, a: Any, b: Any) -> Any:
    like = a if isinstance(a, Tensor) else b
    return torch.where(tensor(condition), tensor(a, like), tensor(b, like))


@operator("Gelu")
def _(x: Any, *, approximate: str = "none") -> Any:
    return F.gelu(x, approximate=approximate)


@operator("LeakyRelu")
def _(x: Any, *, alpha: float = 0.01) -> Any:
    return F.leaky_relu(x, alpha)


@operator("Elu")
def _(x: Any, *, alpha: float = 1.0) -> Any:
    return F.elu(x, alpha)


@operator("Celu")
def _(x: Any, *, alpha: float = 1.0) -> Any:
    return F.celu(x, alpha)


@operator("HardSigmoid")
def _(x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


@operator("PRelu")
def _(x: Any, slope: Any) -> Any:
    return torch.where(x > 0, x, x * slope)


@operator("Cast")
def _(x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    # Both options are about types of eight bits, which are not read.
    if to not in DTYPES:
        raise NoCounterpart(f"torch has no dtype for the element type {to}")
    return tensor(x).to(DTYPES[to])


@operator("IsInf")
def _(x: Any, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    return torch.isposinf(x) if detect_positive else torch.isneginf(x)


@operator("Identity")
def _(x: Any) -> Any:
    return x
