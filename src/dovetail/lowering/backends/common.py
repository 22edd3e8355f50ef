"""What several backends ask of a region before they take it."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dovetail.outlining.region import Region


def why_not_fixed(region: Region) -> str | None:
    """Why code for the sizes seen once would not do: a size that may vary, an operand that is a number."""
    for node in region.body.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"its operand '{node.name}' is a {_word(value)}, not a tensor"
        if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride())):
            return f"the sizes of its operand '{node.name}' may vary"
    return None


def why_not_plain(region: Region, *allowed: str) -> str | None:
    """Why a region is no plain computation, effects of the words given aside."""
    found = [word for word in region.effects if word not in allowed]
    return f"it has effects ({', '.join(found)}) that must stay where they are" if found else None


def operand_devices(region: Region) -> Iterator[torch.device]:
    """Where the operands of a region lie, as far as that is known."""
    for node in region.body.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            yield value.device


@contextmanager
def quiet() -> Generator[None]:
    """Keep from the user what torch says of its own older parts: that they are deprecated, and how they work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _word(value: object) -> str:
    return "number" if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__
