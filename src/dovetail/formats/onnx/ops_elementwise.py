"""Operators that look at each element by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.formats.onnx.writer import Form, OnnxWriter, element
from dovetail.lowering.failures import UnsupportedOp

_UNARY = {
    "abs": "Abs",
    "acos": "Acos",
    "acosh": "Acosh",
    "asin": "Asin",
    "asinh": "Asinh",
    "atan": "Atan",
    "atanh": "Atanh",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "hardswish": "HardSwish",
    "log": "Log",
    "mish": "Mish",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "relu": "Relu",
    "round": "Round",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "softsign": "Softsign",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}
_BINARY = {"mul": "Mul", "div": "Div", "maximum": "Max", "minimum": "Min"}
_COMPARED = {"eq": "Equal", "lt": "Less", "gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual"}
_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_BITS = {"bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor"}


def dtype_of(w: OnnxWriter, node: Any) -> torch.dtype:
    """The dtype of what a node computes."""
    return w.value(node).dtype


def together(a: Any, b: Any) -> torch.dtype:
    """The dtype in which two operands meet."""
    known = [v.meta["val"] if isinstance(v, Node) else v for v in (a, b)]
    if not all(isinstance(v, (Tensor, int, float)) for v in known):
        raise UnsupportedOp("an operand that is neither a tensor nor a number")
    return torch.result_type(*known)


def floating(w: OnnxWriter, node: Any) -> None:
    """Refuse what ONNX has for fractions only."""
    if not dtype_of(w, node).is_floating_point:
        raise UnsupportedOp("whole numbers, where ONNX wants fractions")


def _unary(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, x: Any) -> str:
        if kind not in ("Abs", "Neg", "Sign") or dtype_of(w, node) == torch.bool:
            floating(w, node)
        return w.op(kind, w.read(x, dtype_of(w, node)), label=node.name)

    return write


def _binary(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = dtype_of(w, node)
        if dtype == torch.bool:
            raise UnsupportedOp(f"{kind} of truth values")
        return w.op(kind, w.read(a, dtype), w.read(b, dtype), label=node.name)

    return write


def _compared(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = together(a, b)
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.int32
        return w.op(kind, w.read(a, dtype), w.read(b, dtype), label=node.name)

    return write


def _logical(kind: str, *, bits: str | None = None) -> Form:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = dtype_of(w, node)
        if bits is not None and dtype != torch.bool:
            return w.op(bits, w.read(a, dtype), w.read(b, dtype), label=node.name)
        return w.op(kind, w.read(a, torch.bool), w.read(b, torch.bool), label=node.name)

    return write


def _ne(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    return w.op("Not", _compared("Equal")(w, node, a, b))


def _logical_not(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Not", w.read(x, torch.bool), label=node.name)


def _bitwise_not(w: OnnxWriter, node: Node, x: Any) -> str:
    dtype = dtype_of(w, node)
    return w.op("Not" if dtype == torch.bool else "BitwiseNot", w.read(x, dtype), label=node.name)


def _sum(kind: str) -> Form:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any, alpha: Any = 1) -> str:
        dtype = dtype_of(w, node)
        if dtype == torch.bool:
            raise UnsupportedOp(f"{kind} of truth values")
        scaled = w.read(b, dtype)
        if alpha != 1:
            scaled = w.op("Mul", scaled, w.constant(alpha, dtype))
        return w.op(kind, w.read(a, dtype), scaled, label=node.name)

    return write


def _rsub(w: OnnxWriter, node: Node, a: Any, b: Any, alpha: Any = 1) -> str:
    return _sum("Sub")(w, node, b, a, alpha=alpha)


def _div(w: OnnxWriter, node: Node, a: Any, b: Any, *, rounding_mode: str | None) -> str:
    dtype = dtype_of(w, node)
    if rounding_mode is None:
        return _binary("Div")(w, node, a, b)
    if not dtype.is_floating_point:
        raise UnsupportedOp("whole numbers are divided otherwise in ONNX")
    left, right = w.read(a, dtype), w.read(b, dtype)
    ratio = w.op("Div", left, right)
    if rounding_mode == "floor":
        return _rounded_down(w, left, right, ratio, dtype, node.name)
    return w.op("Mul", w.op("Sign", ratio), w.op("Floor", w.op("Abs", ratio)), label=node.name)


def _remainder(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    dtype = dtype_of(w, node)
    left, right = w.read(a, dtype), w.read(b, dtype)
    if not dtype.is_floating_point:
        return w.op("Mod", left, right, label=node.name)
    rest, unlike = _left_over(w, left, right, dtype)
    return w.op("Where", unlike, w.op("Add", rest, right), rest, label=node.name)


def _left_over(w: OnnxWriter, left: str, right: str, dtype: torch.dtype) -> tuple[str, str]:
    """What is left over of a division that is cut off, and where its sign is not the divisor's."""
    rest, zero = w.op("Mod", left, right, fmod=1), w.constant(0, dtype)
    unlike = w.op("Xor", w.op("Less", rest, zero), w.op("Less", right, zero))
    return rest, w.op("And", unlike, w.op("Not", w.op("Equal", rest, zero)))


def _rounded_down(w: OnnxWriter, left: str, right: str, ratio: str, dtype: torch.dtype, label: str) -> str:
    """A division rounded down as torch does it, by what is left over: a quotient that is rounded may be one off."""
    rest, unlike = _left_over(w, left, right, dtype)
    even = w.op("Div", w.op("Sub", left, rest), right)
    down = w.op("Where", unlike, w.op("Sub", even, w.constant(1, dtype)), even)
    floor = w.op("Floor", down)
    above = w.op("Greater", w.op("Sub", down, floor), w.constant(0.5, dtype))
    made = w.op("Where", above, w.op("Add", floor, w.constant(1, dtype)), floor)
    by_nothing = w.op("Equal", right, w.constant(0, dtype))
    return w.op("Where", by_nothing, ratio, made, label=label)


def _pow(w: OnnxWriter, node: Node, base: Any, exponent: Any) -> str:
    dtype = dtype_of(w, node)
    x = w.read(base, dtype)
    # torch computes these as products and roots, and ONNX's readers do not always see it.
    if exponent in (2, 3) and not isinstance(exponent, Node):
        square = w.op("Mul", x, x, label=node.name)
        return square if exponent == 2 else w.op("Mul", square, x, label=node.name)
    if w.dialect.runs and not dtype.is_floating_point:
        raise UnsupportedOp("a power of whole numbers, which runtimes of ONNX compute as fractions")
    if not isinstance(exponent, Node) and exponent == 0.5:
        return w.op("Sqrt", x, label=node.name)
    return w.op("Pow", x, w.read(exponent, dtype), label=node.name)


def _square(w: OnnxWriter, node: Node, x: Any) -> str:
    floating(w, node)
    return w.op("Mul", w.of(x), w.of(x), label=node.name)


def _rsqrt(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Reciprocal", w.op("Sqrt", w.read(x, dtype_of(w, node))), label=node.name)


def _log2(w: OnnxWriter, node: Node, x: Any) -> str:
    dtype = dtype_of(w, node)
    base = 2.0 if "log2" in str(node.target) else 10.0
    return w.op("Mul", w.op("Log", w.read(x, dtype)), w.constant(1 / math.log(base), dtype), label=node.name)


def _silu(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Mul", w.of(x), w.op("Sigmoid", w.of(x)), label=node.name)


def _gelu(w: OnnxWriter, node: Node, x: Any, *, approximate: str = "none") -> str:
    return w.op("Gelu", w.of(x), approximate=approximate, label=node.name)


def _leaky_relu(w: OnnxWriter, node: Node, x: Any, slope: float = 0.01) -> str:
    return w.op("LeakyRelu", w.of(x), alpha=float(slope), label=node.name)


def _elu(
    w: OnnxWriter, node: Node, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> str:
    if scale != 1 or input_scale != 1:
        raise UnsupportedOp("elu with scales")
    return w.op("Elu", w.of(x), alpha=float(alpha), label=node.name)


def _celu(w: OnnxWriter, node: Node, x: Any, alpha: float = 1.0) -> str:
    return w.op("Celu", w.of(x), alpha=float(alpha), label=node.name)


def _prelu(w: OnnxWriter, node: Node, x: Any, weight: Any) -> str:
    rank = w.value(x).dim()
    slope = w.of(weight)
    if rank > 2 and w.value(weight).dim() == 1:
        slope = w.op("Reshape", slope, w.constant([-1] + [1] * (rank - 2), torch.int64))
    return w.op("PRelu", w.of(x), slope, label=node.name)


def _softplus(w: OnnxWriter, node: Node, x: Any, beta: float = 1.0, threshold: float = 20.0) -> str:
    dtype = dtype_of(w, node)
    scaled = w.of(x) if beta == 1 else w.op("Mul", w.of(x), w.constant(beta, dtype))
    soft = w.op("Softplus", scaled)
    if beta != 1:
        soft = w.op("Div", soft, w.constant(beta, dtype))
    large = w.op("Greater", scaled, w.constant(threshold, dtype))
    return w.op("Where", large, w.of(x), soft, label=node.name)


def _log_sigmoid(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Neg", w.op("Softplus", w.op("Neg", w.of(x))), label=node.name)


def _hardsigmoid(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("HardSigmoid", w.of(x), alpha=1 / 6, beta=0.5, label=node.name)


def _hardtanh(w: OnnxWriter, node: Node, x: Any, least: Any = None, most: Any = None) -> str:
    dtype = dtype_of(w, node)
    if "hardtanh" in str(node.target):
        least, most = -1.0 if least is None else least, 1.0 if most is None else most
    found = w.read(x, dtype)
    # Max and Min rather than Clip: bounds may be tensors, and then they broadcast.
    if least is not None:
        found = w.op("Max", found, w.read(least, dtype), label=node.name)
    return found if most is None else w.op("Min", found, w.read(most, dtype), label=node.name)


def _clamp_min(w: OnnxWriter, node: Node, x: Any, least: Any) -> str:
    return _binary("Max")(w, node, x, least)


def _clamp_max(w: OnnxWriter, node: Node, x: Any, most: Any) -> str:
    return _binary("Min")(w, node, x, most)


def _relu6(w: OnnxWriter, node: Node, x: Any) -> str:
    floating(w, node)
    dtype = dtype_of(w, node)
    return w.op("Min", w.op("Relu", w.of(x)), w.constant(6, dtype), label=node.name)


def _glu(w: OnnxWriter, node: Node, x: Any, dim: int = -1) -> str:
    left, right = w.op("Split", w.of(x), results=2, axis=dim, num_outputs=2)
    return w.op("Mul", left, w.op("Sigmoid", right), label=node.name)


def _where(w: OnnxWriter, node: Node, condition: Any, a: Any, b: Any) -> str:
    return _chosen(w, node, w.read(condition, torch.bool), a, b)


def _chosen(w: OnnxWriter, node: Node, condition: str, a: Any, b: Any) -> str:
    dtype = dtype_of(w, node)
    left, right = w.read(a, dtype), w.read(b, dtype)
    if dtype == torch.bool:
        # Runtimes choose between numbers only.
        other = w.op("And", w.op("Not", condition), right)
        return w.op("Or", w.op("And", condition, left), other, label=node.name)
    return w.op("Where", condition, left, right, label=node.name)


def _masked_fill(w: OnnxWriter, node: Node, x: Any, mask: Any, value: Any) -> str:
    return _chosen(w, node, w.read(mask, torch.bool), value, x)


def _isnan(w: OnnxWriter, node: Node, x: Any) -> str:
    floating(w, x)
    return w.op("IsNaN", w.of(x), label=node.name)


def _isinf(w: OnnxWriter, node: Node, x: Any) -> str:
    floating(w, x)
    return w.op("IsInf", w.of(x), label=node.name)


def _to_copy(w: OnnxWriter, node: Node, x: Any, *_: Any, **options: Any) -> str:
    if any(options.get(k) is not None for k in ("layout", "pin_memory")) or "device" in options:
        given, made = w.value(x), w.value(node)
        if given.device != made.device:
            raise UnsupportedOp("a copy to another device")
    given, wanted = dtype_of(w, x), dtype_of(w, node)
    number = element(wanted)
    if given.is_floating_point and not wanted.is_floating_point and wanted not in (torch.bool, torch.int64):
        raise UnsupportedOp("numbers that a small whole number cannot hold are cast otherwise in ONNX")
    return w.op("Cast", w.of(x), to=number, label=node.name)


def _clone(w: OnnxWriter, node: Node, x: Any, **_: Any) -> str:
    return w.op("Identity", w.of(x), label=node.name)


def _dropout(w: OnnxWriter, node: Node, x: Any, p: float, train: bool) -> str:
    if train and p:
        raise UnsupportedOp("a dropout draws random numbers")
    return w.op("Identity", w.of(x), label=node.name)


ELEMENTWISE: Mapping[tuple[str, ...], Form] = {
    **{(f"aten.{name}.default",): _unary(kind) for name, kind in _UNARY.items()},
    **{
        (f"aten.{name}.{overload}",): _binary(kind)
        for name, kind in _BINARY.items()
        for overload in (("default",) if name in ("maximum", "minimum") else ("Tensor", "Scalar"))
    },
    ("aten.max.other",): _binary("Max"),
    ("aten.min.other",): _binary("Min"),
    **{(f"aten.{name}.Tensor", f"aten.{name}.Scalar"): _compared(kind) for name, kind in _COMPARED.items()},
    **{(f"aten.{name}.default",): _logical(kind) for name, kind in _LOGICAL.items()},
    **{
        (f"aten.{packet}.Tensor", f"aten.{packet}.Scalar"): _logical(logic, bits=kind)
        for ((name, kind), logic) in zip(_BITS.items(), _LOGICAL.values(), strict=True)
        for packet in (name, f"__{name.removeprefix('bitwise_')}__")
    },
    ("aten.ne.Tensor", "aten.ne.Scalar"): _ne,
    ("aten.logical_not.default",): _logical_not,
    ("aten.bitwise_not.default",): _bitwise_not,
    ("aten.add.Tensor", "aten.add.Scalar"): _sum("Add"),
    ("aten.sub.Tensor", "aten.sub.Scalar"): _sum("Sub"),
    ("aten.rsub.Scalar", "aten.rsub.Tensor"): _rsub,
    ("aten.div.Tensor_mode", "aten.div.Scalar_mode"): _div,
    ("aten.remainder.Tensor", "aten.remainder.Scalar"): _remainder,
    ("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar"): _pow,
    ("aten.square.default",): _square,
    ("aten.rsqrt.default",): _rsqrt,
    ("aten.log2.default", "aten.log10.default"): _log2,
    ("aten.silu.default",): _silu,
    ("aten.gelu.default",): _gelu,
    ("aten.leaky_relu.default",): _leaky_relu,
    ("aten.elu.default",): _elu,
    ("aten.celu.default",): _celu,
    ("aten.prelu.default",): _prelu,
    ("aten.softplus.default",): _softplus,
    ("aten.log_sigmoid.default",): _log_sigmoid,
    ("aten.hardsigmoid.default",): _hardsigmoid,
    ("aten.hardtanh.default", "aten.clamp.default", "aten.clamp.Tensor"): _hardtanh,
    ("aten.clamp_min.default", "aten.clamp_min.Tensor"): _clamp_min,
    ("aten.clamp_max.default", "aten.clamp_max.Tensor"): _clamp_max,
    ("aten.relu6.default",): _relu6,
    ("aten.glu.default",): _glu,
    ("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"): _where,
    ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"): _masked_fill,
    ("aten.isnan.default",): _isnan,
    ("aten.isinf.default",): _isinf,
    ("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"): _to_copy,
    ("aten.clone.default", "aten.detach.default", "aten.alias.default", "aten.contiguous.default"): _clone,
    ("aten.dropout.default",): _dropout,
}
