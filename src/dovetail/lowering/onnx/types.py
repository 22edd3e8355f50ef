"""Which ONNX element type a dtype is."""

from __future__ import annotations

from typing import Any

import torch

ELEMENTS: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
"""By torch's dtype, the number that `onnx.TensorProto` has for it."""


def is_number(size: Any) -> bool:
    """Whether a size is known, and no symbol."""
    return isinstance(size, int)


class NoForm(Exception):
    """There is no ONNX form of something; the text says of what and why."""


class MissingForm(NoForm):
    """There is no ONNX form of an operator, whatever its arguments."""


def element(dtype: torch.dtype) -> int:
    """The ONNX element type of a dtype."""
    found = ELEMENTS.get(dtype)
    if found is None:
        raise NoForm(f"ONNX has no {str(dtype).removeprefix('torch.')}")
    return found
