"""What a model type needs beyond the general rules: fields of its configuration."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {}
"""By model type: "base" are arguments of the unshrunk configuration, "config" replaces fields of the shrunk one."""
