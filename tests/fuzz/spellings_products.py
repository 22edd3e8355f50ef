"""Spellings of products with an activation, a residual sum or a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from .composing import COMMON, Keep, Sketch
from .references import Family, Spelling

Step = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

WIDTH = 4


def _plus(product: Callable[[Tensor, Tensor], Tensor], *, before: bool = False) -> Product:
    def with_bias(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if b is None:
            return product(x, w)
        return b + product(x, w) if before else product(x, w) + b

    return with_bias


def _addmm(turn: Step, *, beta: float = 1, alpha: float = 1) -> Product:
    def flat(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        rows, right = x.reshape(-1, x.shape[-1]), turn(w)
        product = torch.mm(rows, right) if b is None else torch.addmm(b, rows, right, beta=beta, alpha=alpha)
        return product.view(*x.shape[:-1], right.shape[-1])

    return flat


def _batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w.expand(x.shape[0], *w.shape)) if x.dim() == 3 else torch.matmul(x, w)


def _minus(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else x @ w - b


def _twice(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else torch.add(x @ w, b, alpha=2)


OUT_IN: Mapping[str, Product] = {
    "linear": F.linear,
    "linear_plus": _plus(F.linear),
    "addmm_t": _addmm(lambda w: w.t()),
    "matmul_t": _plus(lambda x, w: x @ w.T),
    "matmul_transposed": _plus(lambda x, w: torch.matmul(x, w.transpose(-1, -2))),
    "einsum_out_in": _plus(lambda x, w: torch.einsum("...i,oi->...o", x, w)),
}
IN_OUT: Mapping[str, Product] = {
    "matmul": _plus(lambda x, w: x @ w),
    "matmul_after": _plus(torch.matmul, before=True),
    "addmm": _addmm(lambda w: w),
    "linear_t": lambda x, w, b: F.linear(x, w.t(), b),
    "einsum_in_out": _plus(lambda x, w: torch.einsum("...i,io->...o", x, w)),
    "tensordot": _plus(lambda x, w: torch.tensordot(x, w, 1)),
    "bmm": _plus(_batched),
    "!subtracted": _minus,
    "!alpha": _twice,
    "!beta": _addmm(lambda w: w, beta=2.0),
    "!addmm_alpha": _addmm(lambda w: w, alpha=0.5),
}
PRODUCTS = {**OUT_IN, **IN_OUT}
# Common spellings more often than rare ones, so that most spellings match.
_ODDS = [
    {"linear": 6.0, "matmul": 4.0, "addmm": 3.0, "addmm_t": 2.0}.get(n, 0.3 if n[0] == "!" else 1.0)
    for n in PRODUCTS
]


def product_of(sketch: Sketch) -> Product:
    return sketch.pick(PRODUCTS, _ODDS)


def weights_for(sketch: Sketch, product: Product, out: int = WIDTH) -> int:
    """Add a weight and perhaps a bias, in the layout of the product; returns how many operands they are."""
    is_linear = any(product is each for each in OUT_IN.values())
    sketch.weight(*((out, WIDTH) if is_linear else (WIDTH, out)))
    if not sketch.chance(0.5, "bias"):
        sketch.tags.add("no_bias")
        return 1
    shape = sketch.pick({"whole": (out,), "!one": (1,), "!scalar": (), "!row": (1, out)}, (20, 1, 1, 1))
    # Operators that take a bias want it in the dtype of the product.
    mixed = {"matmul", "matmul_after", "linear_plus"} & sketch.tags and sketch.chance(0.2, "mixed_bias")
    sketch.weight(*shape, dtype=torch.float32 if mixed else None)
    return 2


def out_width(sketch: Sketch) -> int:
    return sketch.pick({"square": WIDTH, "wide": 6, "one_wide": 1}, (6, 2, 1))


def rows_and_width(sketch: Sketch) -> None:
    rank = len(sketch.rows)
    if rank == 1 and sketch.chance(0.15):
        sketch.rows, rank = (), 0
    sketch.tags.add(f"rank={rank + 1}")
    sketch.stream(*sketch.rows, WIDTH)


RELU: dict[str, Step] = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "!clamp": lambda x: x.clamp(min=0),
    "!threshold": lambda x: F.threshold(x, 0.5, 0.0),
}
STEPS: Mapping[str, Mapping[str, Step]] = {
    "relu": RELU,
    "relu6": {
        "F.relu6": F.relu6,
        "hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0),
        "clamp": lambda x: x.clamp(0, 6),
        "clamp_twice": lambda x: x.clamp(min=0).clamp(max=6),
        "relu_clamp": lambda x: torch.relu(x).clamp(max=6),
        "!minimum": lambda x: torch.clamp(torch.relu(x), max=5),
        "!below": lambda x: x.clamp(-1, 6),
    },
    "silu": {
        "F.silu": F.silu,
        "x*sigmoid": lambda x: x * torch.sigmoid(x),
        "sigmoid*x": lambda x: x.sigmoid() * x,
        "!beta": lambda x: x * torch.sigmoid(1.5 * x),
    },
    "tanh": {
        "torch.tanh": torch.tanh,
        "method": lambda x: x.tanh(),
        "!tanhshrink": lambda x: torch.tanh(2 * x),
    },
    "sigmoid": {
        "torch.sigmoid": torch.sigmoid,
        "method": lambda x: x.sigmoid(),
        "!logsigmoid": F.logsigmoid,
    },
    "hardswish": {"F.hardswish": F.hardswish, "!by_hand": lambda x: x * F.relu6(x + 3) / 6},
    "elu": {
        "F.elu": F.elu,
        "alpha=1": lambda x: F.elu(x, 1.0),
        "!alpha": lambda x: F.elu(x, 0.5),
        "!selu": F.selu,
    },
    "mish": {"F.mish": F.mish, "!by_hand": lambda x: x * torch.tanh(F.softplus(x))},
    "squared_relu": {
        "square": lambda x: F.relu(x).square(),
        "pow": lambda x: F.relu(x) ** 2,
        "times": lambda x: (y := torch.relu(x)) * y,
        "!cube": lambda x: F.relu(x) ** 3,
        "!relu_x": lambda x: F.relu(x) * x,
    },
    "softplus": {
        "F.softplus": F.softplus,
        "!beta": lambda x: F.softplus(x, beta=2.0),
        "!threshold": lambda x: F.softplus(x, threshold=0.5),
    },
}
_ROOT, _FACTOR = math.sqrt(2.0), math.sqrt(2.0 / math.pi)
GELUS: Mapping[str, Step] = {
    "none": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / _ROOT)),
    "erf_inverse": lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865475)),
    "erf_halved_last": lambda x: x * (torch.erf(x / math.sqrt(2)) + 1) / 2,
    "new": lambda x: 0.5 * x * (1.0 + torch.tanh(_FACTOR * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1.0 + 0.044715 * x * x))),
    "bloom": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "!slope": lambda x: x * torch.sigmoid(1.7 * x),
    "!root": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41)),
    "!cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(_FACTOR * (x + 0.0447 * torch.pow(x, 3.0)))),
    "!square": lambda x: 0.5 * x * (1.0 + torch.tanh(_FACTOR * (x + 0.044715 * torch.pow(x, 2.0)))),
    "!minus": lambda x: 0.5 * x * (1.0 - torch.erf(x / _ROOT)),
}
_SLOPES: Mapping[str, Step] = {
    "default": F.leaky_relu,
    "slope": lambda x: F.leaky_relu(x, 0.2),
    "negative": lambda x: F.leaky_relu(x, -0.5),
    "zero": lambda x: F.leaky_relu(x, 0),
    "!rrelu": lambda x: F.rrelu(x),
}

_PRODUCT_TAGS = COMMON | {
    "linear",
    "matmul",
    "addmm",
    "addmm_t",
    "linear_t",
    "bias",
    "no_bias",
    "square",
    "wide",
}
_PRODUCT_TAGS |= {f"rank={n}" for n in (1, 2, 3, 4)}


def _linear_then(steps: Mapping[str, Step]) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        rows_and_width(sketch)
        product, step = product_of(sketch), sketch.pick(steps)
        count = weights_for(sketch, product, out_width(sketch))

        def program(keep: Keep, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return step(keep(product(x, w, b)))

        return sketch.spelling(program if count == 2 else lambda keep, x, w: program(keep, x, w))

    return draw


def _residual(rng: Random) -> Spelling:
    sketch = Sketch(rng)
    rows_and_width(sketch)
    product, out = product_of(sketch), out_width(sketch)
    count = weights_for(sketch, product, out)
    rows = sketch.rows
    shapes = {
        "same": (*rows, out),
        "!one_row": (*(1 for _ in rows), out),
        "!one_column": (*rows, 1),
        "wider": (*(3 if n == 1 else n for n in rows), out),
        "!vector": (out,),
        "!scalar": (),
        "!rank": (2, *rows, out),
    }
    shape = sketch.pick(shapes, (12, 2, 2, 2, 1, 1, 1))
    sketch.stream(*shape, dtype=torch.float32 if sketch.chance(0.1, "mixed_dtypes") else None)
    dropout: float = sketch.pick({"no_dropout": 0.0, "dropout": 0.25, "dropout=0.5": 0.5}, (6, 3, 1))
    swapped, alpha = sketch.chance(0.4, "swapped"), 2 if sketch.chance(0.05, "!alpha") else 1

    def program(keep: Keep, x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        y, residual = keep(product(x, w, rest[0] if count == 2 else None)), rest[-1]
        y = keep(F.dropout(y, dropout)) if dropout else y
        return torch.add(residual, y, alpha=alpha) if swapped else torch.add(y, residual, alpha=alpha)

    return sketch.spelling(program)


SILUS: Mapping[str, Step] = {**STEPS["silu"], "!silu_shifted": lambda x: (x + 1) * torch.sigmoid(x)}


def _times(swapped: bool, gate: Tensor, up: Tensor) -> Tensor:
    return up * gate if swapped else gate * up


def _two(steps: Mapping[str, Step]) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        rows_and_width(sketch)
        product = product_of(sketch)
        # Two weights that are laid out differently, which no attribute names.
        other = product_of(sketch) if sketch.chance(0.15, "!mixed") else product
        out = out_width(sketch)
        first = weights_for(sketch, product, out)
        second = weights_for(sketch, other, out)
        step, swapped = sketch.pick(steps), sketch.chance(0.4, "swapped")
        crossed = sketch.chance(0.05, "!crossed")

        def program(keep: Keep, x: Tensor, *weights: Tensor) -> Tensor:
            w, b = weights[0], weights[1] if first == 2 else None
            v, c = weights[first], weights[-1] if second == 2 else None
            up = keep(other(x + 1 if crossed else x, v, c))
            return _times(swapped, keep(step(keep(product(x, w, b)))), up)

        return sketch.spelling(program, alias=0.2)

    return draw


def _interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second


def _slices(x: Tensor) -> tuple[Tensor, Tensor]:
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def _negative_slices(x: Tensor) -> tuple[Tensor, Tensor]:
    middle = x.shape[-1] // 2
    return x[..., :-middle], x[..., -middle:]


CUTS: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(2, dim=-1),
    "chunk_front": lambda x: x.chunk(2, dim=x.dim() - 1),
    "split": lambda x: x.split(x.shape[-1] // 2, dim=-1),
    "split_sizes": lambda x: x.split([x.shape[-1] // 2] * 2, dim=-1),
    "slices": _slices,
    "negative_slices": _negative_slices,
    "tensor_split": lambda x: x.tensor_split(2, dim=-1),
    "narrow": lambda x: (x.narrow(-1, 0, x.shape[-1] // 2), x.narrow(-1, x.shape[-1] // 2, x.shape[-1] // 2)),
    "!interleaved": _interleaved,
    "!pairs": _pairs,
    "!rows": lambda x: x.chunk(2, dim=0),
    "!overlapping": lambda x: (x[..., :-1], x[..., 1:]),
    "!one_half_twice": lambda x: (x.chunk(2, -1)[0],) * 2,
}
_CUT_ODDS = [{"chunk": 4.0, "slices": 3.0}.get(n, 0.2 if n[0] == "!" else 1.0) for n in CUTS]


def _packed(steps: Mapping[str, Step]) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        rows_and_width(sketch)
        product, step, cut = product_of(sketch), sketch.pick(steps), sketch.pick(CUTS, _CUT_ODDS)
        if "!rows" in sketch.tags and sketch.rows[:1] != (2,):
            sketch.operands.clear()
            sketch.stream(2, *sketch.rows[1:], WIDTH)
        count = weights_for(sketch, product, sketch.pick({"square": WIDTH, "wide": 6, "!odd": 3}, (6, 3, 1)))
        second, swapped = sketch.chance(0.4, "gate_second"), sketch.chance(0.4, "swapped")
        if not second:
            sketch.tags.add("gate_first")

        def program(keep: Keep, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            gate, up = cut(keep(product(x, w, b)))
            gate, up = (up, gate) if second else (gate, up)
            return _times(swapped, keep(step(gate)), keep(up))

        if "!odd" in sketch.tags and not {"chunk", "chunk_front", "tensor_split"} & sketch.tags:
            cut = CUTS["chunk"]
        return sketch.spelling(program if count == 2 else lambda keep, x, w: program(keep, x, w))

    return draw


def _alone(steps: Mapping[str, Step]) -> Callable[[Random], Spelling]:
    def draw(rng: Random) -> Spelling:
        sketch = Sketch(rng)
        rows = sketch.rows
        sketch.stream(*rows, WIDTH)
        shapes = {
            "same": (*rows, WIDTH),
            "vector": (WIDTH,),
            "column": (*rows, 1),
            "scalar": (),
            "higher": (2, *rows, WIDTH),
        }
        sketch.weight(
            *sketch.pick(shapes, (6, 1, 1, 1, 1)),
            dtype=torch.float32 if sketch.chance(0.1, "mixed_dtypes") else None,
        )
        step, swapped = sketch.pick(steps), sketch.chance(0.4, "swapped")

        def program(keep: Keep, gate: Tensor, up: Tensor) -> Tensor:
            return _times(swapped, keep(step(gate)), up)

        return sketch.spelling(program, alias=0.15)

    return draw


def _tags(steps: Mapping[str, Step]) -> frozenset[str]:
    return frozenset(n for n in steps if not n.startswith("!"))


_GATE_TAGS = (_PRODUCT_TAGS | {"swapped"}) - {"rank=1"}
_PACKED_TAGS = _GATE_TAGS | {"gate_first", "gate_second", "chunk", "split", "split_sizes", "slices"}
_ALONE_TAGS = COMMON | {"same", "vector", "column", "scalar", "higher", "swapped", "aliased"}
FAMILIES: tuple[Family, ...] = (
    *(
        Family(f"linear_{name}", _linear_then(steps), _PRODUCT_TAGS | _tags(steps))
        for name, steps in STEPS.items()
    ),
    Family("linear_gelu", _linear_then(GELUS), _PRODUCT_TAGS | _tags(GELUS)),
    Family("linear_leaky_relu", _linear_then(_SLOPES), _PRODUCT_TAGS | _tags(_SLOPES)),
    Family(
        "linear_residual",
        _residual,
        (_PRODUCT_TAGS - {"rank=1"}) | {"same", "wider", "dropout", "no_dropout"},
    ),
    Family("swiglu", _two(SILUS), _GATE_TAGS | _tags(SILUS)),
    Family("swiglu_packed", _packed(SILUS), _PACKED_TAGS | _tags(SILUS)),
    Family("swiglu_gate", _alone(SILUS), _ALONE_TAGS | _tags(SILUS)),
    Family("geglu", _two(GELUS), _GATE_TAGS | _tags(GELUS)),
    Family("geglu_packed", _packed(GELUS), _PACKED_TAGS | _tags(GELUS)),
    Family("geglu_gate", _alone(GELUS), _ALONE_TAGS | _tags(GELUS)),
)
