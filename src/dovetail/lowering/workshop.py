"""How code is made: the settings of a lowering, and the tools they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.lowering.artefacts import Workshop


@dataclass(frozen=True, slots=True)
class Settings:
    """How regions are lowered; what a pickled graph remembers of it."""

    specialisations: int = 8
    strict: bool = False
    verify: bool = False
    timeout: float | None = None
    cache: Any = None


def workshop_of(settings: Settings) -> Workshop:
    """The tools for some settings."""
    return Workshop(timeout=settings.timeout)
