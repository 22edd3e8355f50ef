"""How a tensor is laid out in memory, for runtimes that take contiguous buffers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from dovetail.ir.nodes import is_static_size
from dovetail.numerics.sample_inputs import example_size


@dataclass(frozen=True)
class Layout:
    """A tensor as a runtime sees it: contiguous, with its dimensions permuted by `order`.

    Without an order no permutation is contiguous, and the tensor has to be copied. `sizes` and `strides` are None where
    some are symbolic.
    """

    dtype: torch.dtype
    order: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    @property
    def permuted(self) -> bool:
        """Whether the runtime has the dimensions in another order."""
        return self.order is not None and self.order != tuple(range(len(self.order)))

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes `order`."""
        order = self.order or ()
        return tuple(order.index(d) for d in range(len(order)))

    def to_runtime(self, value: Tensor) -> Tensor:
        """Return a tensor as the runtime sees it: the same memory unless it has to be copied."""
        if self.order is None:
            return value.contiguous()
        return (value.permute(self.order) if self.permuted else value).contiguous()

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Return memory for a result: the tensor, and a view of it as the runtime sees it. Sizes must be known."""
        assert self.sizes is not None
        assert self.strides is not None
        if self.order is None:
            return (buffer := torch.empty(self.sizes, dtype=self.dtype)), buffer
        tensor = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)
        return tensor, (tensor.permute(self.order) if self.permuted else tensor)

    def from_runtime(self, buffer: Tensor) -> Tensor:
        """Return the tensor that a runtime's result stands for."""
        if self.order is not None:
            return buffer.permute(self.inverse) if self.permuted else buffer
        if self.strides is None:
            return buffer
        return torch.empty_strided(buffer.shape, self.strides, dtype=buffer.dtype).copy_(buffer)


def layout_of(value: Tensor) -> Layout:
    """Return the layout of a tensor, fake or real."""
    sizes, strides = tuple(value.shape), tuple(value.stride())
    fixed = all(is_static_size(n) for n in (*sizes, *strides))
    return Layout(
        value.dtype,
        _contiguous_order(sizes, strides),
        tuple(map(int, sizes)) if fixed else None,
        tuple(map(int, strides)) if fixed else None,
    )


def _contiguous_order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the permutation of the dimensions that is contiguous, or None. Symbols are compared by expression."""
    hints = [example_size(n) for n in strides]
    ranked = sorted(range(len(sizes)), key=lambda d: (-hints[d], d))
    step: Any = 1
    for d in reversed(ranked):
        # Comparing the symbols themselves would write a guard into the graph's environment.
        if sizes[d] != 1 and not bool(_expression(strides[d]) == step):
            return None
        step = step * _expression(sizes[d])
    return tuple(ranked)


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, SymInt) else value
