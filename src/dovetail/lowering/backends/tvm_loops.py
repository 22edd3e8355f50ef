"""Loops for some of Relax's operators, where TVM's own would give other values than torch.

Its maxima drop what is no number, which torch keeps; and its `take` reads outside of a tensor where an index is out of
range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.lowering.backends.foreign import loaded

Loops = Callable[[Any, Any], Any]
Better = Callable[[Any, Any], Any]


@functools.cache
def loops() -> dict[str, Loops]:
    """By the name of an operator, what writes its loops."""
    topi = loaded("tvm.topi")

    def take(builder: Any, call: Any) -> Any:
        axis = call.attrs.axis
        return builder.call_te(
            topi.take, call.args[0], call.args[1], None if axis is None else int(axis), mode="clip"
        )

    return {
        "relax.take": take,
        "relax.nn.relu": lambda builder, call: builder.call_te(_relu, call.args[0]),
        "relax.clip": lambda builder, call: builder.call_te(_clip, *call.args),
        "relax.maximum": lambda builder, call: builder.call_te(_broadcast(True), *call.args),
        "relax.minimum": lambda builder, call: builder.call_te(_broadcast(False), *call.args),
        "relax.max": lambda builder, call: _reduced(builder, call, True),
        "relax.min": lambda builder, call: _reduced(builder, call, False),
        "relax.nn.max_pool2d": _pooled,
    }


def _relu(x: Any) -> Any:
    te, tirx = loaded("tvm.te"), loaded("tvm.tirx")

    def at(*i: Any) -> Any:
        return tirx.Select(x(*i) < 0, tirx.const(0, x.dtype), x(*i))

    return te.compute(x.shape, at, name="relu")


def _clip(x: Any, low: Any, high: Any) -> Any:
    te, tirx = loaded("tvm.te"), loaded("tvm.tirx")
    # A bound that is not there is infinite, which whole numbers cannot be.
    least = None if _number(low) == -math.inf else tirx.Cast(x.dtype, low)
    most = None if _number(high) == math.inf else tirx.Cast(x.dtype, high)

    def at(*i: Any) -> Any:
        value = x(*i)
        if least is not None:
            value = tirx.Select(value < least, least, value)
        # The upper bound has the last word, also where it is below the lower one.
        return value if most is None else tirx.Select(value > most, most, value)

    return te.compute(x.shape, at, name="clip")


def _number(bound: Any) -> float:
    return float(getattr(bound, "value", 0))


def _better(most: bool, dtype: Any) -> Better:
    """The larger one of two, or the smaller; what is no number is kept."""
    tirx, floats = loaded("tvm.tirx"), "float" in str(dtype)

    # A reducer looks at the code of the function, so this must be one that has two parameters.
    def better(a: Any, b: Any) -> Any:
        first = a > b if most else a < b
        # A comparison with itself would be simplified away.
        return tirx.Select(tirx.any(first, tirx.isnan(a)) if floats else first, a, b)

    return better


def _broadcast(most: bool) -> Better:
    def both(x: Any, y: Any) -> Any:
        te, topi = loaded("tvm.te"), loaded("tvm.topi")
        shape = [
            max(int(a), int(b)) if 0 not in (int(a), int(b)) else 0 for a, b in _aligned(x.shape, y.shape)
        ]
        wide = [topi.broadcast_to(one, shape) for one in (x, y)]
        better = _better(most, x.dtype)

        def at(*i: Any) -> Any:
            return better(wide[0](*i), wide[1](*i))

        return te.compute(shape, at, name="extreme")

    return both


def _aligned(x: Sequence[Any], y: Sequence[Any]) -> list[tuple[Any, Any]]:
    rank = max(len(x), len(y))
    filled = [[1] * (rank - len(shape)) + list(shape) for shape in (x, y)]
    return list(zip(*filled, strict=True))


def _bound(dtype: Any, least: bool) -> Any:
    te, tirx = loaded("tvm.te"), loaded("tvm.tirx")
    text = str(dtype)
    if text.startswith("float"):
        return tirx.const(float("-inf" if least else "inf"), text)
    return te.min_value(text) if least else te.max_value(text)


def _reducer(most: bool, dtype: Any) -> Any:
    te = loaded("tvm.te")

    def identity(dtype: Any) -> Any:
        return _bound(dtype, most)

    return te.comm_reducer(_better(most, dtype), identity, name="extreme")


def _reduced(builder: Any, call: Any, most: bool) -> Any:
    te = loaded("tvm.te")
    given = [int(n) for n in call.args[0].ty.shape.values]
    axes = range(len(given)) if call.attrs.axis is None else [int(a) % len(given) for a in call.attrs.axis]
    sizes = [int(n) for n in call.ty.shape.values]
    kept, reducer = bool(call.attrs.keepdims), _reducer(most, call.args[0].ty.dtype)

    def run(x: Any) -> Any:
        along = {a: te.reduce_axis((0, given[a]), name=f"k{a}") for a in axes}

        def at(*i: Any) -> Any:
            free = iter(i)
            place = [along[d] if d in along and not kept else next(free) for d in range(len(given))]
            value = x(*[along.get(d, p) for d, p in enumerate(place)])
            return reducer(value, axis=list(along.values())) if along else value

        return te.compute(sizes, at, name="extreme")

    return builder.call_te(run, call.args[0])


def _pooled(builder: Any, call: Any) -> Any:
    te, tirx = loaded("tvm.te"), loaded("tvm.tirx")
    attrs = call.attrs
    if str(attrs.layout) != "NCHW" or str(attrs.out_layout) != "NCHW":
        raise NotImplementedError(f"max_pool2d in the layout {attrs.layout}")
    sizes = [int(n) for n in call.ty.shape.values]
    height, width = (int(n) for n in call.args[0].ty.shape.values[2:])
    kernel, step, wide = ([int(n) for n in a] for a in (attrs.pool_size, attrs.strides, attrs.dilation))
    top, left = (int(n) for n in list(attrs.padding)[:2])
    reducer = _reducer(True, call.args[0].ty.dtype)

    def run(x: Any) -> Any:
        down, across = (
            te.reduce_axis((0, k), name=name) for k, name in zip(kernel, ("kh", "kw"), strict=True)
        )

        def at(n: Any, c: Any, i: Any, j: Any) -> Any:
            row = i * step[0] + down * wide[0] - top
            column = j * step[1] + across * wide[1] - left
            inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
            value = tirx.if_then_else(inside, x(n, c, row, column), _bound(x.dtype, True))
            return reducer(value, axis=[down, across])

        return te.compute(sizes, at, name="max_pool2d")

    return builder.call_te(run, call.args[0])
