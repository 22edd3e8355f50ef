"""Spellings of products, gates, norms, embeddings, activations and samples."""

from __future__ import annotations

from .references import Family

FAMILIES: tuple[Family, ...] = ()
