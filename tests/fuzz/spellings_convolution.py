"""Spellings of convolutions with norms and activations, and of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from .references import Family, Spelling
from .spelling_drawing import Drawing, backward_graph

Step = Callable[[Tensor], Tensor]

_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

_ACTIVATIONS: dict[str, Step] = {
    "relu": torch.relu,
    "relu_in_place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0),
    "clamp": lambda x: x.clamp(0, 6),
    "clamp_twice": lambda x: x.clamp(min=0).clamp(max=6),
    "relu_clamp": lambda x: torch.relu(x).clamp(max=6),
    "silu": F.silu,
    "silu_by_hand": lambda x: x * torch.sigmoid(x),
    "silu_left": lambda x: torch.sigmoid(x) * x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "leaky_slope": lambda x: F.leaky_relu(x, 0.2),
}
_HOSTILE: dict[str, Step] = {
    "clamp_five": lambda x: x.clamp(0, 5),
    "clamp_min": lambda x: x.clamp(min=0),
    "hardtanh_one": F.hardtanh,
    "relu_clamp_low": lambda x: torch.relu(x).clamp(min=1),
    "elu_alpha": lambda x: F.elu(x, 0.5),
    "softplus": F.softplus,
    "selu": F.selu,
    "sigmoid_of_other": lambda x: x.flip(0) * torch.sigmoid(x),
    "sigmoid_twice": lambda x: torch.sigmoid(torch.sigmoid(x)),
    "square": lambda x: torch.relu(x).square(),
    "softsign": F.softsign,
}


def _activation(d: Drawing) -> Step:
    return d.mostly(_ACTIVATIONS, _HOSTILE)


def _geometry(d: Drawing, rank: int, word: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The settings of a convolution, and its window."""
    window = tuple(d.any([1, 2, 3]) for _ in range(rank))
    settings: dict[str, Any] = {}
    if d.chance(0.3, "dilation"):
        settings["dilation"] = d.any([2, tuple(d.any([1, 2]) for _ in range(rank))])
    if word:
        settings["padding"] = d.one({"same": "same", "valid": "valid"})
        # torch warns of windows that "same" cannot pad evenly.
        window = tuple(d.any([1, 3]) for _ in range(rank)) if settings["padding"] == "same" else window
    elif d.chance(0.5, "padding"):
        settings["padding"] = d.any([1, tuple(d.any([0, 1, 2]) for _ in range(rank))])
    if settings.get("padding") != "same" and d.chance(0.4, "stride"):
        settings["stride"] = d.any([2, tuple(d.any([1, 2, 3]) for _ in range(rank))])
    return settings, window


def _channels(d: Drawing) -> tuple[int, int, int]:
    """Channels in and out, equal at times, and groups."""
    if d.chance(0.3, "groups"):
        inward, out, groups = d.any([(4, 4, 2), (4, 4, 4), (2, 4, 2), (6, 3, 3)])
        return inward, out, groups
    return (*d.any([(3, 3), (2, 3), (4, 2)]), 1)


def _convolution(rank: int, word: bool, normalised: bool, rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    settings, window = _geometry(d, rank, word)
    inward, out, groups = _channels(d)
    spatial = tuple(d.any([5, 6]) for _ in range(rank))
    batch = () if not normalised and d.chance(0.12, "unbatched") else (2,)
    x = d.tensor(*batch, inward, *spatial)
    weight = d.tensor(out, inward // groups, *window)
    bias = [d.tensor(out)] if d.chance(0.5, "bias") else []
    convolve = _CONVOLVE[rank - 1]
    if rank > 1 and d.chance(0.04, "transposed") and not word:
        convolve, weight, groups = _TRANSPOSED[rank - 1], d.tensor(inward, out, *window), 1
        settings.pop("dilation", None)
    if d.chance(0.04, "padded_before") and len(batch) == 1:
        inner = convolve

        def convolve(x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
            return inner(F.pad(x, (1, 1) * rank, mode="replicate"), *rest, **kwargs)

    activation = _activation(d) if not normalised or d.chance(0.75) else (lambda x: x)
    statistics = [d.tensor(out), d.tensor(out).abs() + 0.1] if normalised else []
    affine = [d.tensor(out), d.tensor(out)] if normalised and d.chance(0.7, "affine") else []
    training = normalised and d.chance(0.2, "training")
    eps = d.any([1e-5, 1e-3, 0.25])
    d.tags.add(f"eps_{eps}")
    shape = convolve(x, weight, *bias, **settings, groups=groups).shape
    streams: list[Tensor] = []
    if normalised and d.chance(0.3, "residual"):
        streams = [d.tensor(*(d.broadcast(*shape) if d.chance(0.3) else shape))]
    total: Callable[[Tensor, Tensor], Tensor] = d.mostly(
        {"add": torch.add, "add_left": lambda y, r: r + y, "add_operator": lambda y, r: y + r},
        {"alpha": lambda y, r: torch.add(y, r, alpha=2), "subtract": lambda y, r: y - r},
    )

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        operands = list(rest)

        def take(count: int) -> list[Any]:
            return [operands.pop(0) for _ in range(count)]

        added, kernel, shift = take(len(streams)), take(1)[0], take(len(bias))
        y = d.inner(convolve(x, kernel, *shift, **settings, groups=groups))
        if normalised:
            mean, variance = take(2)
            scale, offset = take(len(affine)) or (None, None)
            if training:
                mean, variance = mean.clone(), variance.clone()
            y = d.inner(F.batch_norm(y, mean, variance, scale, offset, training, 0.2, eps))
        if added:
            y = d.inner(total(y, added[0]))
        return activation(y)

    weights = [weight, *bias, *statistics, *affine]
    dims = {0: (0,), 1: (0,) if streams and streams[0].dim() == rank + 2 and streams[0].shape[0] > 1 else ()}
    graphs = 0.0 if "relu_in_place" in d.tags else 0.15
    return d.spelling(
        run,
        (x, *streams, *weights),
        weights=len(weights),
        symbolic=dims if batch and (not streams or dims[1]) else {},
        graphs=graphs,
    )


def _modules(rank: int, rng: Random) -> Spelling:
    """A stack of layers in train or eval mode, as vision models have it."""
    d = Drawing(rng)
    layers = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}
    settings, window = _geometry(d, rank, False)
    inward, out, groups = _channels(d)
    convolution, norm = layers[rank]
    model = nn.Sequential(
        convolution(inward, out, window, **settings, groups=groups, bias=d.chance(0.5, "bias")),
        norm(out, eps=d.any([1e-5, 1e-3]), affine=d.chance(0.8, "affine")),
        nn.ReLU(),
    )
    model.train(d.chance(0.4, "training"))
    d.tags.update({"parameters", "relu"})
    return Spelling(model, (torch.randn(2, inward, *[6] * rank),), frozenset(d.tags))


def _with_modules(rank: int, rng: Random) -> Spelling:
    return _modules(rank, rng) if rng.random() < 0.12 else _convolution(rank, False, True, rng)


def _families() -> list[Family]:
    settings = frozenset(
        {"dilation", "stride", "groups", "bias", "parameters", "constants", "bf16", "f64", "symbolic"}
    )
    norms = frozenset({"affine", "training", "residual", "eps_1e-05", "eps_0.25"})
    usual = frozenset(
        {"relu", "relu6", "silu", "silu_by_hand", "sigmoid", "tanh", "gelu", "gelu_tanh", "leaky_slope"}
    )
    families: list[Family] = []
    for word in (False, True):
        padding = frozenset({"same", "valid"} if word else {"padding"})
        # A batch norm by kept statistics is another operator in the graph of a compiler, and not matched there.
        graphs = frozenset() if word else frozenset({"make_fx", "decomposed"})
        for rank in (1, 2, 3):
            stem = f"conv{rank}d{'_padded' if word else ''}"
            normed = functools.partial(_convolution, rank, word, True)
            alone = functools.partial(_convolution, rank, word, False)
            draw = normed if word else functools.partial(_with_modules, rank)
            families.append(Family(f"{stem}_bn_act", draw, settings | norms | padding))
            families.append(Family(f"{stem}_act", alone, settings | padding | usual | graphs | {"unbatched"}))
    return families


def _gradients(rng: Random) -> Spelling:
    d = Drawing(rng)
    rank = d.any([1, 2, 2, 2, 3])
    d.tags.add(f"dims={rank}")
    settings, window = _geometry(d, rank, False)
    inward, out, groups = _channels(d)
    transposed = d.chance(0.3, "transposed")
    weight = (
        d.tensor(inward, out // groups, *window) if transposed else d.tensor(out, inward // groups, *window)
    )
    if transposed and "stride" in settings and d.chance(0.6, "output_padding"):
        strides = settings["stride"]
        settings["output_padding"] = tuple(
            min(1, s - 1) for s in (strides if isinstance(strides, tuple) else (strides,) * rank)
        )
    convolve = (_TRANSPOSED if transposed else _CONVOLVE)[rank - 1]
    bias = [d.tensor(out)] if d.chance(0.5, "bias") else []
    after = d.mostly(
        {"relu": torch.relu, "relu_function": F.relu, "alone": lambda x: x, "tanh": torch.tanh},
        {
            "threshold": lambda x: F.threshold(x, 0.5, 0.0),
            "leaky_relu": F.leaky_relu,
            "relu6": F.relu6,
            "relu_twice": lambda x: torch.relu(x) + x,
        },
        0.2,
    )
    x = d.tensor(2, inward, *[5] * rank)
    operands = (x, weight, *bias)

    def loss(*values: Tensor) -> Tensor:
        return after(convolve(*values, **settings, groups=groups)).sin().sum()

    outputs = d.any([(0, 1), (0,), (1,), tuple(range(len(operands)))])
    d.tags.add(f"of_{'_'.join(map(str, outputs))}")
    if d.chance(0.15, "aot_module"):
        return Spelling(*backward_graph(loss, operands, outputs), frozenset(d.tags))
    mode = "symbolic" if d.chance(0.15, "symbolic") else "real"
    grad = torch.func.grad(loss, argnums=outputs)
    graph = make_fx(grad, tracing_mode=mode)(*operands)
    return Spelling(graph, operands, frozenset(d.tags))


FAMILIES = (
    *_families(),
    Family(
        "conv_grad",
        _gradients,
        frozenset({"transposed", "output_padding", "groups", "dilation", "stride", "padding", "bias", "relu"})
        | {
            "dims=1",
            "dims=2",
            "dims=3",
            "alone",
            "threshold",
            "aot_module",
            "symbolic",
            "of_0",
            "of_1",
            "of_0_1",
        },
    ),
)
