"""Translations of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.formats.onnx.writer import OnnxWriter, OpTranslation, element_type
from dovetail.lowering.failures import UnsupportedOp

_NAMED_ALIKE = """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf exp floor log mish neg reciprocal relu round sigmoid
    sign sin sinh softsign sqrt tan tanh
"""
_UNARY = {name: name.capitalize() for name in _NAMED_ALIKE.split()} | {"hardswish": "HardSwish"}
_CLIPPED = (torch.float32, torch.float64)
"""The dtypes of which ONNX Runtime has Clip on a CPU, integers aside: their bounds may not fit them."""
_BINARY = {"mul": "Mul", "div": "Div", "maximum": "Max", "minimum": "Min"}
_COMPARISONS = {"eq": "Equal", "lt": "Less", "gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual"}
_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_BITS = {"bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor"}


def _promoted(a: Any, b: Any) -> torch.dtype:
    """Return the dtype that two operands are promoted to."""
    values = [v.meta["val"] if isinstance(v, Node) else v for v in (a, b)]
    if not all(isinstance(v, (Tensor, int, float)) for v in values):
        raise UnsupportedOp("an operand that is neither a tensor nor a number")
    return torch.result_type(*values)


def require_floating(w: OnnxWriter, node: Any) -> None:
    """Raise UnsupportedOp for integers, where ONNX takes floating point only."""
    if not w.dtype(node).is_floating_point:
        raise UnsupportedOp("integers, where ONNX takes floating point only")


def _unary(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, x: Any) -> str:
        if kind not in ("Abs", "Neg", "Sign") or w.dtype(node) == torch.bool:
            require_floating(w, node)
        return w.op(kind, w.read(x, w.dtype(node)), label=node.name)

    return write


def _binary(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = w.dtype(node)
        if dtype == torch.bool:
            raise UnsupportedOp(f"{kind} of booleans")
        return w.op(kind, w.read(a, dtype), w.read(b, dtype), label=node.name)

    return write


def _comparison(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = _promoted(a, b)
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.int32
        return w.op(kind, w.read(a, dtype), w.read(b, dtype), label=node.name)

    return write


def _logical(kind: str, *, bits: str | None = None) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
        dtype = w.dtype(node)
        if bits is not None and dtype != torch.bool:
            return w.op(bits, w.read(a, dtype), w.read(b, dtype), label=node.name)
        return w.op(kind, w.read(a, torch.bool), w.read(b, torch.bool), label=node.name)

    return write


def _ne(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    return w.op("Not", _comparison("Equal")(w, node, a, b))


def _logical_not(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Not", w.read(x, torch.bool), label=node.name)


def _bitwise_not(w: OnnxWriter, node: Node, x: Any) -> str:
    dtype = w.dtype(node)
    return w.op("Not" if dtype == torch.bool else "BitwiseNot", w.read(x, dtype), label=node.name)


def _sum(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, a: Any, b: Any, alpha: Any = 1) -> str:
        dtype = w.dtype(node)
        if dtype == torch.bool:
            raise UnsupportedOp(f"{kind} of booleans")
        scaled = w.read(b, dtype)
        if alpha != 1:
            scaled = w.op("Mul", scaled, w.constant(alpha, dtype))
        return w.op(kind, w.read(a, dtype), scaled, label=node.name)

    return write


def _rsub(w: OnnxWriter, node: Node, a: Any, b: Any, alpha: Any = 1) -> str:
    return _sum("Sub")(w, node, b, a, alpha=alpha)


def _div(w: OnnxWriter, node: Node, a: Any, b: Any, *, rounding_mode: str | None) -> str:
    dtype = w.dtype(node)
    if rounding_mode is None:
        return _binary("Div")(w, node, a, b)
    if not dtype.is_floating_point:
        raise UnsupportedOp("ONNX rounds the division of integers differently")
    left, right = w.read(a, dtype), w.read(b, dtype)
    ratio = w.op("Div", left, right)
    if rounding_mode == "floor":
        return _floor_divided(w, left, right, ratio, dtype, node.name)
    return w.op("Mul", w.op("Sign", ratio), w.op("Floor", w.op("Abs", ratio)), label=node.name)


def _remainder(w: OnnxWriter, node: Node, a: Any, b: Any) -> str:
    dtype = w.dtype(node)
    left, right = w.read(a, dtype), w.read(b, dtype)
    if not dtype.is_floating_point:
        return w.op("Mod", left, right, label=node.name)
    rest, differs = _remainder_of(w, left, right, dtype)
    return w.op("Where", differs, w.op("Add", rest, right), rest, label=node.name)


def _remainder_of(w: OnnxWriter, left: str, right: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the remainder of a truncated division, and where its sign differs from the divisor's."""
    rest, zero = w.op("Mod", left, right, fmod=1), w.constant(0, dtype)
    differs = w.op("Xor", w.op("Less", rest, zero), w.op("Less", right, zero))
    return rest, w.op("And", differs, w.op("Not", w.op("Equal", rest, zero)))


def _floor_divided(w: OnnxWriter, left: str, right: str, ratio: str, dtype: torch.dtype, label: str) -> str:
    """Return a floor division as torch computes it, from the remainder: a rounded quotient may be off by one."""
    rest, differs = _remainder_of(w, left, right, dtype)
    even = w.op("Div", w.op("Sub", left, rest), right)
    down = w.op("Where", differs, w.op("Sub", even, w.constant(1, dtype)), even)
    floor = w.op("Floor", down)
    above = w.op("Greater", w.op("Sub", down, floor), w.constant(0.5, dtype))
    quotient = w.op("Where", above, w.op("Add", floor, w.constant(1, dtype)), floor)
    by_zero = w.op("Equal", right, w.constant(0, dtype))
    return w.op("Where", by_zero, ratio, quotient, label=label)


def _pow(w: OnnxWriter, node: Node, base: Any, exponent: Any) -> str:
    dtype = w.dtype(node)
    x = w.read(base, dtype)
    # torch computes these as products and roots, and runtimes do not always recognize them.
    if not isinstance(exponent, Node) and exponent in (2, 3) and not (w.dialect.powers and exponent == 3):
        square = w.op("Mul", x, x, label=node.name)
        return square if exponent == 2 else w.op("Mul", square, x, label=node.name)
    if w.dialect.runs and not dtype.is_floating_point:
        raise UnsupportedOp("a power of integers, which ONNX runtimes compute in floating point")
    if not isinstance(exponent, Node) and exponent == 0.5:
        return w.op("Sqrt", x, label=node.name)
    return w.op("Pow", x, w.read(exponent, dtype), label=node.name)


def _square(w: OnnxWriter, node: Node, x: Any) -> str:
    require_floating(w, node)
    return w.op("Mul", w.of(x), w.of(x), label=node.name)


def _rsqrt(w: OnnxWriter, node: Node, x: Any) -> str:
    return w.op("Reciprocal", w.op("Sqrt", w.read(x, w.dtype(node))), label=node.name)


def _log_base(w: OnnxWriter, node: Node, x: Any) -> str:
    dtype = w.dtype(node)
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
    rank = w.rank(x)
    slope = w.of(weight)
    if rank > 2 and w.rank(weight) == 1:
        slope = w.op("Reshape", slope, w.integers([-1] + [1] * (rank - 2)))
    return w.op("PRelu", w.of(x), slope, label=node.name)


def _softplus(w: OnnxWriter, node: Node, x: Any, beta: float = 1.0, threshold: float = 20.0) -> str:
    dtype = w.dtype(node)
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


def _clamp(w: OnnxWriter, node: Node, x: Any, least: Any = None, most: Any = None) -> str:
    dtype = w.dtype(node)
    if "hardtanh" in str(node.target):
        least, most = -1.0 if least is None else least, 1.0 if most is None else most
    result = w.read(x, dtype)
    if _are_ordered_numbers(least, most) and dtype in _CLIPPED:
        # ONNX Runtime fuses Clip with the convolution before it, but not Max and Min.
        return w.op("Clip", result, w.constant(least, dtype), w.constant(most, dtype), label=node.name)
    # Bounds that are tensors broadcast, which those of Clip do not.
    if least is not None:
        result = w.op("Max", result, w.read(least, dtype), label=node.name)
    return result if most is None else w.op("Min", result, w.read(most, dtype), label=node.name)


def _are_ordered_numbers(least: Any, most: Any) -> bool:
    """Return whether two bounds are numbers of which the first is not greater; what Clip does else is not specified."""
    return all(isinstance(bound, (int, float)) for bound in (least, most)) and least <= most


def _relu6(w: OnnxWriter, node: Node, x: Any) -> str:
    require_floating(w, node)
    return _clamp(w, node, x, 0, 6)


def _glu(w: OnnxWriter, node: Node, x: Any, dim: int = -1) -> str:
    left, right = w.op("Split", w.of(x), results=2, axis=dim, num_outputs=2)
    return w.op("Mul", left, w.op("Sigmoid", right), label=node.name)


def _where(w: OnnxWriter, node: Node, condition: Any, a: Any, b: Any) -> str:
    return _select_by(w, node, w.read(condition, torch.bool), a, b)


def _select_by(w: OnnxWriter, node: Node, condition: str, a: Any, b: Any) -> str:
    dtype = w.dtype(node)
    left, right = w.read(a, dtype), w.read(b, dtype)
    if dtype == torch.bool:
        # Runtimes have Where for numbers only.
        other = w.op("And", w.op("Not", condition), right)
        return w.op("Or", w.op("And", condition, left), other, label=node.name)
    return w.op("Where", condition, left, right, label=node.name)


def _masked_fill(w: OnnxWriter, node: Node, x: Any, mask: Any, value: Any) -> str:
    return _select_by(w, node, w.read(mask, torch.bool), value, x)


def _is(kind: str) -> OpTranslation:
    def write(w: OnnxWriter, node: Node, x: Any) -> str:
        require_floating(w, x)
        return w.op(kind, w.of(x), label=node.name)

    return write


def _to_copy(w: OnnxWriter, node: Node, x: Any, *_: Any, **options: Any) -> str:
    placed = any(options.get(k) is not None for k in ("layout", "pin_memory")) or "device" in options
    if placed and w.value(x).device != w.value(node).device:
        raise UnsupportedOp("a copy to another device")
    source, target = w.dtype(x), w.dtype(node)
    number = element_type(target)
    if source.is_floating_point and not target.is_floating_point and target not in (torch.bool, torch.int64):
        raise UnsupportedOp("ONNX casts numbers that overflow a small integer differently")
    return w.op("Cast", w.of(x), to=number, label=node.name)


def _clone(w: OnnxWriter, node: Node, x: Any, **_: Any) -> str:
    return w.identity(node, x)


def _dropout(w: OnnxWriter, node: Node, x: Any, p: float, train: bool) -> str:
    if train and p:
        raise UnsupportedOp("a dropout draws random numbers")
    return w.identity(node, x)


ELEMENTWISE: Mapping[tuple[str, ...], OpTranslation] = {
    **{(f"aten.{name}.default",): _unary(kind) for name, kind in _UNARY.items()},
    **{
        (f"aten.{name}.{overload}",): _binary(kind)
        for name, kind in _BINARY.items()
        for overload in (("default",) if name in ("maximum", "minimum") else ("Tensor", "Scalar"))
    },
    ("aten.max.other",): _binary("Max"),
    ("aten.min.other",): _binary("Min"),
    **{
        (f"aten.{name}.Tensor", f"aten.{name}.Scalar"): _comparison(kind)
        for name, kind in _COMPARISONS.items()
    },
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
    ("aten.log2.default", "aten.log10.default"): _log_base,
    ("aten.silu.default",): _silu,
    ("aten.gelu.default",): _gelu,
    ("aten.leaky_relu.default",): _leaky_relu,
    ("aten.elu.default",): _elu,
    ("aten.celu.default",): _celu,
    ("aten.prelu.default",): _prelu,
    ("aten.softplus.default",): _softplus,
    ("aten.log_sigmoid.default",): _log_sigmoid,
    ("aten.hardsigmoid.default",): _hardsigmoid,
    ("aten.hardtanh.default", "aten.clamp.default", "aten.clamp.Tensor"): _clamp,
    ("aten.clamp_min.default", "aten.clamp_min.Tensor"): _binary("Max"),
    ("aten.clamp_max.default", "aten.clamp_max.Tensor"): _binary("Min"),
    ("aten.relu6.default",): _relu6,
    ("aten.glu.default",): _glu,
    ("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"): _where,
    ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"): _masked_fill,
    ("aten.isnan.default",): _is("IsNaN"),
    ("aten.isinf.default",): _is("IsInf"),
    ("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"): _to_copy,
    (
        "aten.clone.default",
        "aten.detach.default",
        "aten.alias.default",
        "aten.contiguous.default",
        "aten.lift_fresh_copy.default",
    ): _clone,
    ("aten.dropout.default",): _dropout,
}
