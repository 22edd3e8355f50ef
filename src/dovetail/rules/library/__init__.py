"""Rules for well-known kinds. Rule sets are values: add them, or pick rules out of them by name."""

from collections.abc import Mapping as _Mapping

from dovetail.rules.library.activations import ACTIVATIONS
from dovetail.rules.library.attention_variants import ATTENTION
from dovetail.rules.library.convolution import CONVOLUTION, MIX_FFN
from dovetail.rules.library.library_rule import Kind as _Kind
from dovetail.rules.library.linear import GATES, LINEAR
from dovetail.rules.library.norms import EMBEDDINGS, NORMS
from dovetail.rules.library.pooling import POOLING
from dovetail.rules.library.rotary import ROTARY
from dovetail.rules.library.training import GRADIENTS, LOSSES, SAMPLING

ALL = (
    ATTENTION
    + NORMS
    + EMBEDDINGS
    + ROTARY
    + GATES
    + LINEAR
    + MIX_FFN
    + CONVOLUTION
    + ACTIVATIONS
    + POOLING
    + LOSSES
    + SAMPLING
    + GRADIENTS
)

KINDS: _Mapping[str, _Kind] = {rule.kind: rule.reference for rule in ALL}
"""The contract of each kind, by name: arguments, attributes, and the reference that computes it."""

__all__ = [
    "ACTIVATIONS",
    "ALL",
    "ATTENTION",
    "CONVOLUTION",
    "EMBEDDINGS",
    "GATES",
    "GRADIENTS",
    "KINDS",
    "LINEAR",
    "LOSSES",
    "MIX_FFN",
    "NORMS",
    "POOLING",
    "ROTARY",
    "SAMPLING",
]


def __dir__() -> list[str]:
    return sorted(__all__)
