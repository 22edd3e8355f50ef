"""The files that say what operators are in ONNX, read when the first of them is needed."""

from __future__ import annotations

import functools
from importlib import import_module

_FILES = (
    "elementwise",
    "shaping",
    "indexing",
    "reducing",
    "products",
    "attention",
    "convolving",
    "normalising",
    "rearranging",
)


@functools.cache
def load() -> None:
    """Read them all."""
    for name in _FILES:
        import_module(f"dovetail.lowering.onnx.{name}")
