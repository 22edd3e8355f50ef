"""Spellings of attention, rotary embeddings, convolutions, pooling, losses and gradients."""

from __future__ import annotations

from .references import Family

FAMILIES: tuple[Family, ...] = ()
