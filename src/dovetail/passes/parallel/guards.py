"""When merging pays: what a guard is shown, and the one that is used unless another is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dovetail.rules.rule import Decline

# Both measured on an H200 in bfloat16: beyond the first, merged products took 0.95 to 1.14 of the time of single
# ones. Joining as much as the second at each call took as long as merging three products saved.
_FILLS_A_DEVICE = 10**10
_TOO_MUCH_TO_JOIN = 16 * 2**20


@dataclass(frozen=True)
class Branch:
    """One of the products to be merged, by its sizes: `rows` × `depth` times `depth` × `width`.

    For a convolution `rows` are the positions it computes and `depth` is what each sums over. Symbolic sizes are
    given by their hints, None where there is none. `each_call` says whether its weight, of `weight_bytes`, will be
    joined with the others at each call, and not once.
    """

    name: str
    operator: str
    rows: int | None
    depth: int | None
    width: int
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int | None = None
    each_call: bool = False

    @property
    def work(self) -> int | None:
        """How many multiplications it takes."""
        if self.rows is None or self.depth is None:
            return None
        return self.rows * self.depth * self.width


Guard = Callable[[Sequence[Branch]], Decline | None]


def pays(branches: Sequence[Branch]) -> Decline | None:
    """Decline only where merging clearly saves nothing: products that fill a device alone, or too much to join.

    Merging saves launches and reads the shared value once. On an H200, q, k and v of a width of 2048 take a third of
    their time as one product with 16 rows, half with 512 and nine tenths with 2048; gate and up six and nine tenths
    with 16 and 512 rows. Products of more than 10¹⁰ multiplications gain nothing. Large weights that are joined at each
    call cost more than that: gate and up with 16 rows then take two and a half times as long.
    """
    work = [branch.work for branch in branches]
    if all(amount is not None and amount >= _FILLS_A_DEVICE for amount in work):
        return Decline("each product is large enough by itself: merging them saves nothing to speak of")
    joined = sum(branch.weight_bytes or 0 for branch in branches if branch.each_call)
    if joined > _TOO_MUCH_TO_JOIN:
        return Decline(
            f"joining {joined / 2**20:.0f} MiB of weights at each call costs more than merging saves; "
            f"materialise=True joins them once, for inference"
        )
    return None
