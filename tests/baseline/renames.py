"""Words that the frozen dump has and that are others by now."""

from __future__ import annotations

RENAMED: dict[str, str] = {}
"""Regular expressions for whole words of the frozen text, and what stands there now; applied in this order."""
