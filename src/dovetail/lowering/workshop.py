"""How code is made: the settings of a lowering, and the tools they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.lowering.artefacts import Workshop
from dovetail.lowering.cache import open_cache
from dovetail.lowering.verify import verify_unit
from dovetail.lowering.workers import Workers


@dataclass(frozen=True, slots=True)
class Settings:
    """How regions are lowered; what a pickled graph remembers of it. `cache` is True, False or a folder."""

    specialisations: int = 8
    strict: bool = False
    verify: bool = False
    timeout: float | None = None
    cache: Any = None


def workshop_of(settings: Settings) -> Workshop:
    """The tools for some settings."""
    cache = open_cache(settings.cache)
    verify = verify_unit if settings.verify else None
    return Workshop(store=cache, verify=verify, isolated=Workers(settings.timeout, cache))
