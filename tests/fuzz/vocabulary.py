"""What generated programs are made of, by category: steps without effects."""

from __future__ import annotations

from typing import Any

import torch

from .builder import SHAPES, Builder
from .program import Ref

A = "torch.ops.aten"

UNARY = (
    f"{A}.relu.default",
    f"{A}.neg.default",
    f"{A}.sigmoid.default",
    f"{A}.tanh.default",
    f"{A}.clone.default",
    f"{A}.abs.default",
    f"{A}.alias.default",
    "torch.relu",
    "torch.tanh",
    "F.relu",
    "F.gelu",
    "F.silu",
    "operator.neg",
    f"{A}.sin",  # a packet, as some tracers leave it
    "torch.ops.dovetail_fuzz.twice.default",
)
UNARY_METHODS = ("abs", "sin", "relu", "tanh", "clone", "contiguous", "float")
BINARY = (
    f"{A}.add.Tensor",
    f"{A}.mul.Tensor",
    f"{A}.sub.Tensor",
    f"{A}.maximum.default",
    "operator.add",
    "operator.mul",
    "operator.sub",
    "torch.add",
    "torch.mul",
)


def unary(b: Builder) -> None:
    x = b.tensor()
    if b.chance(4):
        b.method(b.choice(UNARY_METHODS), x)
    else:
        b.call(b.choice(UNARY), x)


def exponential(b: Builder) -> None:
    clamped = b.call(f"{A}.clamp.default", b.tensor(), -2.0, 2.0)
    if clamped:
        b.call(f"{A}.exp.default", clamped)


def binary(b: Builder) -> None:
    x = b.tensor()
    if x is None:
        return
    y: Any = b.like(x) if b.rng.randrange(3) else b.tensor()
    way = b.rng.randrange(8)
    if way == 0:
        b.call(f"{A}.add.Tensor", x, y, alpha=2)
    elif way == 1:
        b.call(b.choice(BINARY), x, b.choice((0.5, 2, -1.0, True)))
    elif way == 2:
        b.method(b.choice(("add", "mul", "sub")), x, y)
    else:
        b.call(b.choice(BINARY), x, y)


def reduction(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() > 0)
    way = b.rng.randrange(6)
    if way == 0:
        b.call(f"{A}.sum.default", x)
    elif way == 1:
        b.call(f"{A}.sum.dim_IntList", x, [-1], b.chance(2))
    elif way == 2:
        b.call(f"{A}.mean.dim", x, [0], True)
    elif way == 3:
        b.call("torch.sum", x, dim=0)
    elif way == 4:
        b.method("mean", x, -1, keepdim=True)
    else:
        b.call(f"{A}.amax.default", x, [0], True)


def product(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() == 2)
    if x is None:
        return
    y = b.tensor(lambda v: v.dim() == 2 and v.shape[0] == b.of(x).shape[1])
    way = b.rng.randrange(5)
    if way == 0:
        b.call(f"{A}.mm.default", x, y)
    elif way == 1:
        b.call("torch.matmul", x, y)
    elif way == 2:
        b.call("operator.matmul", x, y)
    elif way == 3:
        b.call(f"{A}.einsum.default", "ij,jk->ik", [x, y])
    else:
        b.call("F.linear", x, b.tensor(lambda v: v.dim() == 2 and v.shape[1] == b.of(x).shape[1]))


def joining(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() > 0)
    if x is None:
        return
    parts = [x, *(b.like(x) for _ in range(b.rng.randrange(3)))]
    way = b.rng.randrange(5)
    if way == 0:
        b.call(f"{A}.cat.default", parts)
    elif way == 1:
        b.call("torch.cat", tensors=parts, dim=-1)
    elif way == 2:
        b.call("torch.stack", parts)
    elif way == 3:
        b.call(f"{A}.stack.default", parts, -1)
    else:
        sequence = b.pick(
            lambda v: isinstance(v, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in v)
        )
        b.call(b.choice(("torch.cat", f"{A}.cat.default")), sequence or parts)


def selecting(b: Builder) -> None:
    x = b.tensor()
    if x is None:
        return
    condition = b.call(b.choice((f"{A}.gt.Scalar", f"{A}.ne.Scalar", "operator.gt", "torch.le")), x, 0.25)
    if condition and b.rng.randrange(3):
        b.call(b.choice((f"{A}.where.self", "torch.where")), condition, x, b.like(x))


def constant(b: Builder) -> None:
    shape = list(b.choice(SHAPES))
    way = b.rng.randrange(9)
    if way == 0:
        b.call(f"{A}.full.default", shape, b.choice((0.5, 2.0)))
    elif way == 1:
        b.call(f"{A}.arange.default", 3, dtype=torch.float32)
    elif way == 2:
        b.call(f"{A}.zeros_like.default", b.tensor())
    elif way == 3:
        b.call(f"{A}.ones.default", shape)
    elif way == 4:
        b.call(f"{A}.scalar_tensor.default", 1.5)
    elif way == 5:
        b.call("torch.zeros", *shape)
    elif way == 6:
        b.call(f"{A}.full_like.default", b.tensor(), 0.25)
    elif way == 7:
        b.call("torch.tensor", [0.5, 1.5, -0.5])
    else:
        b.call("torch.arange", 6.0)


def multiple_results(b: Builder) -> None:
    """Operations with several results, of which some are taken, sometimes none."""
    x = b.tensor(lambda v: v.dim() > 0 and min(v.shape) > 1)
    if x is None:
        return
    way = b.rng.randrange(12)
    if way == 0:
        results = b.call(f"{A}.split.Tensor", x, 1)
    elif way == 1:
        results = b.call(f"{A}.max.dim", x, -1)
    elif way == 2:
        results = b.call(f"{A}.topk.default", x, 2)
    elif way == 3:
        results = b.call(f"{A}.native_layer_norm.default", x, list(b.of(x).shape[-1:]), None, None, 1e-5)
    elif way == 4:
        results = b.call("torch.chunk", x, 2)
    elif way == 5:
        results = b.call(f"{A}.unbind.int", x)
    elif way == 6:
        results = b.call(f"{A}.var_mean.correction", x, [0], correction=0)
    elif way == 7:
        results = b.call("torch.topk", x, k=1)
    elif way == 8:
        results = b.method("max", x, 0)
    elif way == 9:
        results = b.call("torch.split", x, 1, dim=-1)
    elif way == 10:
        results = b.method("chunk", x, 2, -1)
    else:
        results = b.call(f"{A}._foreach_add.Scalar", [x, x], 0.5)
    if results is not None:
        _take(b, results)


def _take(b: Builder, results: Ref) -> None:
    count = len(b.of(results))
    for i in range(min(count, 3)):
        if b.rng.randrange(4):
            b.call("operator.getitem", results, i if b.rng.randrange(5) else i - count)


def late_part(b: Builder) -> None:
    """A part taken long after the operation that made it."""
    results = b.pick(lambda v: isinstance(v, (tuple, list)) and len(v) > 0)
    if results is not None:
        b.call("operator.getitem", results, b.rng.randrange(len(b.of(results))))


def view(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() > 0)
    if x is None:
        return
    shape = list(b.of(x).shape)
    way = b.rng.randrange(24)
    if way == 0:
        b.call(f"{A}.view.default", x, [-1])
    elif way == 1:
        b.call(f"{A}.transpose.int", x, 0, -1)
    elif way == 2:
        b.call(f"{A}.slice.Tensor", x, 0, 0, 1)
    elif way == 3:
        b.call(f"{A}.select.int", x, 0, 0)
    elif way == 4:
        b.call(f"{A}.expand.default", x, [2, *shape])
    elif way == 5:
        b.call(f"{A}.unsqueeze.default", x, 0)
    elif way == 6:
        b.call(f"{A}.detach.default", x)
    elif way == 7:
        b.call(f"{A}.permute.default", x, list(range(len(shape)))[::-1])
    elif way == 8:
        b.call(f"{A}.t.default", x)
    elif way == 9:
        b.method("view", x, -1)
    elif way == 10:
        b.method("reshape", x, shape[::-1])
    elif way == 11:
        b.method("t", x)
    elif way == 12:
        b.method("flatten", x)
    elif way == 13:
        b.call("torch.reshape", x, (-1,))
    elif way == 14:
        b.call("operator.getitem", x, 0)
    elif way == 15:
        b.call("operator.getitem", x, (Ellipsis, slice(1, None, None)))
    elif way == 16:
        b.call("operator.getitem", x, (slice(None, None, None), None))
    elif way == 17:
        b.call(f"{A}.reshape.default", x, [-1])
    elif way == 18:
        b.call("getattr", x, b.choice(("data", "mT")))
    elif way == 19:
        b.call("torch.transpose", x, 0, -1)
    elif way == 20:
        b.method(b.choice(("detach", "squeeze", "expand_as", "view_as")), x, *([x] if b.chance(2) else []))
    elif way == 21:
        b.call(f"{A}.squeeze.dim", x, 0)
    elif way == 22:
        b.call(f"{A}.to.dtype", x, torch.float32)
    else:
        b.call(f"{A}.diagonal.default", x)


def nested_arguments(b: Builder) -> None:
    x = b.tensor()
    if x is not None:
        b.call("gather", {"a": x, "b": b.like(x)}, also=[b.like(x)])


def size(b: Builder) -> None:
    """Sizes as values, and what they are used for."""
    x = b.tensor(lambda v: v.dim() > 0)
    if x is None:
        return
    way = b.rng.randrange(4)
    if way == 0:
        rows = b.method("size", x, 0)
    elif way == 1:
        shape = b.call("getattr", x, "shape")
        rows = b.call("operator.getitem", shape, 0) if shape else None
    else:
        rows = b.call(f"{A}.sym_size.int", x, 0)
    if rows is not None:
        _use_size(b, x, rows)


def use_size(b: Builder) -> None:
    rows = b.pick(lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v < 8)
    x = b.tensor(lambda v: v.dim() > 0)
    if rows is not None and x is not None:
        _use_size(b, x, rows)


def _use_size(b: Builder, x: Ref, rows: Ref) -> None:
    way = b.rng.randrange(6)
    if way == 0:
        b.call(f"{A}.view.default", x, [rows, -1])
    elif way == 1:
        b.call(f"{A}.full.default", [rows, 3], 0.5)
    elif way == 2:
        twice = b.call("operator.mul", rows, 2)
        b.call(f"{A}.zeros.default", [twice, 1]) if twice else None
    elif way == 3:
        b.call("operator.getitem", x, (slice(0, rows, None),))
    elif way == 4:
        b.call(f"{A}.mul.Tensor", x, rows)
    else:
        b.method("expand", x, rows, *list(b.of(x).shape))
