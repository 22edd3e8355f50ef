"""What a compiled model does that costs its user something: recompilations, fallbacks, limits, code that failed."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Literal

from dovetail.errors import user_stacklevel

_LOG = logging.getLogger("dovetail")

Kind = Literal["recompiled", "fallback", "limit", "failed"]


@dataclass(frozen=True)
class Diagnostic:
    """One such event: its kind, and a message with the cause and what to do about it."""

    kind: Kind
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Diagnostics:
    """The events of one compiled model, each of them reported once.

    All are logged as warnings under `dovetail`. Where a model runs as it is, for it cannot be captured or a limit is
    reached, it is a Python warning too.
    """

    def __init__(self) -> None:
        self.events: list[Diagnostic] = []

    def report(self, kind: Kind, message: str) -> None:
        """Log an event unless the very same was logged before."""
        event = Diagnostic(kind, message)
        if event in self.events:
            return
        self.events.append(event)
        report(kind, message)


def report(kind: Kind, message: str) -> None:
    """Log an event, and warn of it where something runs uncompiled because of it."""
    is_warned = kind in ("fallback", "limit")
    if not is_warned or _LOG.hasHandlers():
        _LOG.warning("%s", message)
    if is_warned:
        warnings.warn(message, stacklevel=user_stacklevel("torch"))
