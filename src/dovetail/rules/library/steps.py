"""Steps that several kinds have: activations in their usual spellings, and a value cut in halves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.known import has, taking
from dovetail.rules.matching.choices import either
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline

Step = Callable[[Tensor], Tensor]

_CLOSE = 1e-6
"""The relative tolerance of a rounded constant: a few float32 roundings, so that the reference is reproduced."""

_FUNCTIONS: Mapping[str, Step] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "log_sigmoid": F.logsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str | None, slope: float | None = None) -> Tensor:
    """The activation that the attributes of a kind name; None is the identity."""
    if activation is None:
        return x
    if activation == "leaky_relu":
        return F.leaky_relu(x, cast("float", slope))
    return _FUNCTIONS[activation](x)


def close_to(match: Match, name: str, meant: float) -> Decline | None:
    """Refuse a captured constant that differs from the one meant by more than rounding."""
    value = match.literals.get(name)
    if value is None or math.isclose(value, meant, rel_tol=_CLOSE):
        return None
    return Decline(f"it has {value!r} where {meant:.7g} is meant")


def real_numbers(match: Match) -> Decline | None:
    """Refuse integers and complex numbers, which operators do not take where their steps by hand do."""
    for name in ("x", "gate", "empty", "table"):
        value = match.operands.get(name)
        if value is not None and not value.dtype.is_floating_point:
            return Decline(f"'{value.name}' is {value.dtype}, not a real floating-point value", at=value)
    return None


def square(x: Tensor) -> Tensor:
    """x², as people write it."""
    return either(lambda: x.pow(2), lambda: x * x, lambda: x.square())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return either(lambda: F.silu(x), lambda: x * torch.sigmoid(x))


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return either(
        lambda: F.relu6(x),
        lambda: F.hardtanh(x, 0.0, 6.0),
        lambda: x.clamp(0, 6),
        lambda: x.clamp(min=0).clamp(max=6),
        lambda: torch.relu(x).clamp(max=6),
    )


SIMPLE: Mapping[str, tuple[str, Step]] = {
    "relu6": ("relu6|hardtanh|clamp", relu6),
    "relu": ("relu", torch.relu),
    "silu": ("silu|sigmoid", silu),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "hardswish": ("hardswish", F.hardswish),
    "elu": ("elu", F.elu),
    "mish": ("mish", F.mish),
}
"""Activations without constants of their own: the operators one of which each has, and the step.

The first of them whose operators are there is the one that is meant.
"""


def _halved(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate / 2, however it is put together."""
    return either(
        lambda: x * 0.5 * gate,
        lambda: x * (gate * 0.5),
        lambda: x * gate * 0.5,
        lambda: x / 2 * gate,
        lambda: x * gate / 2,
    )


def _erf_gelu(x: Tensor, root: Any, inverse: Any) -> Tensor:
    turned = either(lambda: torch.erf(x / root), lambda: torch.erf(x * inverse))
    return _halved(x, turned + 1.0)


def _tanh_gelu(x: Tensor, factor: Any, cubic: Any) -> Tensor:
    cube = either(lambda: x.pow(3), lambda: x * x * x, lambda: x * (x * x))
    inner = either(
        lambda: (x + cube * cubic) * factor,
        lambda: (x + x * cubic * x * x) * factor,
        lambda: x * factor * (1.0 + x * cubic * x),
        lambda: x * factor * (1.0 + x * x * cubic),
        lambda: x * (1.0 + x * x * cubic) * factor,
    )
    return _halved(x, torch.tanh(inner) + 1.0)


def _gelu(x: Tensor, *, root: Any, inverse: Any, factor: Any, cubic: Any, slope: Any) -> Tensor:
    """A GELU: exact, its tanh approximation, or the quick one by a sigmoid."""
    return either(
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: _erf_gelu(x, root, inverse),
        lambda: _tanh_gelu(x, factor, cubic),
        lambda: x * torch.sigmoid(x * slope),
    )


_EXAMPLES = {"root": 1.4143, "inverse": 0.7072, "factor": 0.7979, "cubic": 0.0448, "slope": 1.7021}
_MEANT = {
    "root": math.sqrt(2.0),
    "inverse": math.sqrt(0.5),
    "factor": math.sqrt(2.0 / math.pi),
    "cubic": 0.044715,
    "slope": 1.702,
}
with_gelu = taking("gelu", _EXAMPLES, partial(partial, _gelu))
"""Hands a pattern the step `gelu`: any GELU, with constants that `gelu_constants` guards."""


GELU_NAMES = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}
"""The name of the activation for each approximation of a GELU."""


def approximation(match: Match) -> str:
    """Which GELU it is, by the word that torch has for it; "sigmoid" for x * sigmoid(1.702 * x)."""
    if has(match, "sigmoid"):
        return "sigmoid"
    spelled = any(node.kwargs.get("approximate") == "tanh" for node in match.aten)
    return "tanh" if spelled or has(match, "tanh") else "none"


def activation_name(match: Match) -> str | None:
    """The activation among the operations of a match that has at most one: a ReLU, a SiLU, or any GELU."""
    if has(match, "relu"):
        return "relu"
    if has(match, "silu") or (has(match, "sigmoid") and "slope" not in match.literals):
        return "silu"
    return GELU_NAMES[approximation(match)] if has(match, "gelu", "erf", "tanh", "sigmoid") else None


def gelu_constants(match: Match) -> Decline | None:
    """Refuse constants that are not those of a GELU."""
    verdicts = (close_to(match, name, value) for name, value in _MEANT.items())
    return next((v for v in verdicts if v is not None), None)


def by_halves(x: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What is made of the two halves of the last dimension, however they are cut."""
    middle = x.shape[-1] // 2

    def chunks() -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return join(a, b)

    def sizes() -> Tensor:
        a, b = x.split([middle, middle], dim=-1)
        return join(a, b)

    return either(chunks, sizes, lambda: join(x[..., :middle], x[..., middle:]))
