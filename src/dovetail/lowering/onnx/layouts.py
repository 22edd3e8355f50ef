"""How tensors lie in memory, and how a runtime that knows rows only reads and writes them without copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from dovetail.lowering.examples import hint_of
from dovetail.lowering.onnx.types import is_number


@dataclass(frozen=True)
class Layout:
    """A tensor as a runtime has it: row by row in the order of dimensions `order`.

    Without an order there is none in which its rows lie one behind the other, and it has to be copied. `sizes` and
    `strides` are None where some may vary.
    """

    dtype: torch.dtype
    order: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    @property
    def turned(self) -> bool:
        """Whether the runtime has the dimensions in another order."""
        return self.order is not None and self.order != tuple(range(len(self.order)))

    @property
    def back(self) -> tuple[int, ...]:
        """The order that undoes `order`."""
        order = self.order or ()
        return tuple(order.index(d) for d in range(len(order)))

    def rows(self, value: Tensor) -> Tensor:
        """A tensor as the runtime has it; the same memory unless it had to be copied."""
        if self.order is None:
            return value.contiguous()
        return (value.permute(self.order) if self.turned else value).contiguous()

    def place(self) -> tuple[Tensor, Tensor]:
        """Memory for a result: the tensor, and the same as the runtime has it. Sizes must be known."""
        assert self.sizes is not None
        assert self.strides is not None
        if self.order is None:
            return (rows := torch.empty(self.sizes, dtype=self.dtype)), rows
        made = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)
        return made, (made.permute(self.order) if self.turned else made)

    def result(self, rows: Tensor) -> Tensor:
        """What the runtime made as the tensor it stands for, in memory of its own."""
        if self.order is not None:
            return rows.permute(self.back) if self.turned else rows
        if self.strides is None:
            return rows
        return torch.empty_strided(rows.shape, self.strides, dtype=rows.dtype).copy_(rows)


def layout_of(value: Tensor) -> Layout:
    """The layout of a tensor, fake or not."""
    sizes, strides = tuple(value.shape), tuple(value.stride())
    fixed = all(is_number(n) for n in (*sizes, *strides))
    return Layout(
        value.dtype,
        _order(sizes, strides),
        tuple(map(int, sizes)) if fixed else None,
        tuple(map(int, strides)) if fixed else None,
    )


def _order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[int, ...] | None:
    """Dimensions such that elements lie one behind the other, or None. Symbols are compared as they are written."""
    hints = [hint_of(n) for n in strides]
    ranked = sorted(range(len(sizes)), key=lambda d: (-hints[d], d))
    step: Any = 1
    for d in reversed(ranked):
        if sizes[d] != 1 and not _same(strides[d], step):
            return None
        step = _times(step, sizes[d])
    return tuple(ranked)


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, SymInt) else value


def _same(a: Any, b: Any) -> bool:
    # Asking the symbols themselves would write a guard into the graph's environment.
    return bool(_expression(a) == _expression(b))


def _times(a: Any, b: Any) -> Any:
    return _expression(a) * _expression(b)
