"""When merging pays: what a guard is shown, and the one that is used unless another is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dovetail.rules.rule import Decline

_MANY_ROWS = 8192
_LARGE = 512


@dataclass(frozen=True)
class Branch:
    """One of the products to be merged, by its sizes: `rows` × `depth` times `depth` × `width`.

    For a convolution `rows` are the positions it computes and `depth` is what each sums over. Symbolic sizes are
    given by their hints, None where there is none.
    """

    name: str
    operator: str
    rows: int | None
    depth: int | None
    width: int
    dtype: torch.dtype
    device: torch.device


Guard = Callable[[Sequence[Branch]], Decline | None]


def pays(branches: Sequence[Branch]) -> Decline | None:
    """Decline where every product is large enough to fill a device alone, so that merging saves next to nothing.

    Merging saves launches and reads the shared value once. Measured on an H200: with 16 rows q, k and v take half
    the time as one product, with 512 rows three quarters, gate and up nine tenths. Beyond that the gain is lost in
    the noise, while slices that are not contiguous still cost whoever reads them.
    """
    for branch in branches:
        if branch.rows is None or branch.depth is None:
            return None
        if branch.rows < _MANY_ROWS or branch.depth < _LARGE or branch.width < _LARGE:
            return None
    rows = branches[0].rows
    return Decline(f"each product is large by itself ({rows} rows): merging them saves nothing to speak of")
