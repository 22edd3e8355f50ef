"""Activations: softmax, GELU, sigmoid and hard sigmoid, as operators or by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rules.library.known import has, known
from dovetail.rules.matching.choices import Const, either
from dovetail.rules.matching.match import Match
from dovetail.rules.rule import Decline, RuleSet

_CLOSE = 1e-4
"""How far a constant that somebody typed in may be from the one that is meant, in proportion."""


def close_to(match: Match, name: str, meant: float) -> Decline | None:
    """Refuse a captured constant that is not the one meant; spelled with fewer digits it is."""
    value = match.literals.get(name)
    if value is None or math.isclose(value, meant, rel_tol=_CLOSE):
        return None
    return Decline(f"it has {value!r} where {meant:.7g} is meant")


def _dim(match: Match) -> dict[str, Any]:
    literals = match.literals
    return {"dim": literals["dim"] if "dim" in literals else literals["dims"][0]}


# Of one element, so that every alternative has one shape whatever the dimension.
_ONE = torch.empty(1, 1, 1, device="meta")


@known(kind="softmax", needs="softmax|_softmax|exp", says=_dim, examples=[(_ONE,)])
def softmax(x: Tensor, dim: Any = Const(1), dims: Any = Const([1])) -> Tensor:
    """A softmax over one dimension; by hand with or without taking the largest value off first."""

    def by_hand() -> Tensor:
        top = either(lambda: x.amax(dims, keepdim=True), lambda: x.max(dim, keepdim=True).values)
        powers = either(lambda: torch.exp(x - top), lambda: torch.exp(x))
        return powers / powers.sum(dims, keepdim=True)

    return either(
        lambda: torch.softmax(x, dim),
        lambda: torch.softmax(x, dim, dtype=torch.float32).to(x.dtype),
        lambda: torch.softmax(x.float(), dim).to(x.dtype),
        by_hand,
    )


@softmax.guard
def one_dimension_throughout(match: Match) -> Decline | None:
    dims, dim = match.literals.get("dims"), match.literals.get("dim")
    if dims is not None and (len(dims) != 1 or dim not in (None, dims[0])):
        return Decline(f"it sums over {dims}, which is not one dimension throughout")
    return None


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return either(lambda: F.silu(x), lambda: x * torch.sigmoid(x))


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return either(lambda: F.relu6(x), lambda: F.hardtanh(x, 0.0, 6.0), lambda: x.clamp(0, 6))


def halved(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate / 2, however it is put together."""
    return either(lambda: x * 0.5 * gate, lambda: x * (gate * 0.5), lambda: x * gate * 0.5)


def erf_gelu(x: Tensor, root: Any, inverse: Any) -> Tensor:
    """The exact GELU by hand."""
    turned = either(lambda: torch.erf(x / root), lambda: torch.erf(x * inverse))
    return halved(x, turned + 1.0)


def tanh_gelu(x: Tensor, factor: Any, cubic: Any) -> Tensor:
    """The tanh approximation of GELU by hand."""
    cube = either(lambda: x.pow(3), lambda: x * x * x, lambda: x * (x * x))
    inner = either(
        lambda: (x + cube * cubic) * factor,
        lambda: (x + x * cubic * x * x) * factor,
        lambda: x * factor * (1.0 + x * cubic * x),
        lambda: x * factor * (1.0 + x * x * cubic),
        lambda: x * (1.0 + x * x * cubic) * factor,
    )
    return halved(x, torch.tanh(inner) + 1.0)


def any_gelu(x: Tensor, root: Any, inverse: Any, factor: Any, cubic: Any, slope: Any) -> Tensor:
    """A GELU: exact, its tanh approximation, or the quick one by a sigmoid."""
    return either(
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: erf_gelu(x, root, inverse),
        lambda: tanh_gelu(x, factor, cubic),
        lambda: x * torch.sigmoid(x * slope),
    )


def approximation(match: Match) -> str:
    """Which GELU it is, by the word that torch has for it."""
    if has(match, "sigmoid"):
        return "sigmoid"
    spelled = any(node.kwargs.get("approximate") == "tanh" for node in match.nodes)
    return "tanh" if spelled or has(match, "tanh") else "none"


def gelu_constants(match: Match) -> Decline | None:
    """Refuse constants that are not those of a GELU."""
    meant = {
        "root": math.sqrt(2.0),
        "inverse": math.sqrt(0.5),
        "factor": math.sqrt(2.0 / math.pi),
        "cubic": 0.044715,
        "slope": 1.702,
    }
    verdicts = (close_to(match, name, value) for name, value in meant.items())
    return next((v for v in verdicts if v is not None), None)


@known(kind="gelu", needs="gelu|erf|tanh|sigmoid", says=lambda m: {"approximate": approximation(m)})
def gelu(
    x: Tensor,
    root: Any = Const(1.4143),
    inverse: Any = Const(0.7072),
    factor: Any = Const(0.7979),
    cubic: Any = Const(0.0448),
    slope: Any = Const(1.7021),
) -> Tensor:
    """A GELU, as an operator or by hand."""
    return any_gelu(x, root, inverse, factor, cubic, slope)


gelu.guard(gelu_constants)


@known(kind="sigmoid", needs="exp|tanh", says=lambda m: {})
def sigmoid(x: Tensor) -> Tensor:
    """A sigmoid by hand."""
    return either(
        lambda: 1 / (1 + torch.exp(-x)),
        lambda: torch.reciprocal(1 + torch.exp(-x)),
        lambda: torch.exp(x) / (1 + torch.exp(x)),
        lambda: _over_one_more(torch.exp(x)),
        lambda: (torch.tanh(x * 0.5) + 1) * 0.5,
        lambda: torch.tanh(x * 0.5) * 0.5 + 0.5,
        lambda: (torch.tanh(x / 2) + 1) / 2,
    )


def _over_one_more(power: Tensor) -> Tensor:
    return power / (1 + power)


@known(kind="hard_sigmoid", needs="clamp|hardtanh|relu6|hardsigmoid|minimum|relu", says=lambda m: {})
def hard_sigmoid(x: Tensor, sixth: Any = Const(0.1667)) -> Tensor:
    """A hard sigmoid, min(max(x + 3, 0), 6) / 6."""
    shifted = x + 3
    cut = either(lambda: F.relu6(shifted), lambda: shifted.clamp(0, 6), lambda: F.hardtanh(shifted, 0.0, 6.0))
    return either(
        lambda: cut / 6,
        lambda: cut * sixth,
        lambda: (x / 6 + 0.5).clamp(0, 1),
        lambda: (x * sixth + 0.5).clamp(0, 1),
        lambda: (shifted / 6).clamp(0, 1),
        lambda: F.hardsigmoid(x),
    )


@hard_sigmoid.guard
def sixth_is_a_sixth(match: Match) -> Decline | None:
    return close_to(match, "sixth", 1 / 6)


ACTIVATIONS = RuleSet(softmax, gelu, sigmoid, hard_sigmoid)
