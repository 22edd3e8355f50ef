"""What went wrong with a lowering, as values: told in the ledger, raised on request."""

from __future__ import annotations

import logging
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Literal

from dovetail.errors import LoweringError, user_stacklevel


@dataclass(frozen=True)
class LoweringFault:
    """Why a backend's code for a region is not used. `stage` is where it showed."""

    region: str
    backend: str
    stage: str
    reason: str
    trace: str = field(default="", repr=False)
    error: BaseException | None = field(default=None, repr=False, compare=False)

    def raised(self) -> LoweringError:
        """The error that says so, chained to its cause."""
        made = LoweringError(self.region, self.backend, f"{self.stage}: {self.reason}")
        made.__cause__ = self.error
        return made


class LoweringFailure(Exception):
    """Something went wrong with a lowering, and the text says all of it."""


def in_a_line(error: BaseException) -> str:
    """What was raised, without what it says after its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def fault_of(region: str, backend: str, stage: str, error: BaseException) -> LoweringFault:
    """A fault from what was raised."""
    reason = str(error) if isinstance(error, LoweringFailure) else in_a_line(error)
    return LoweringFault(
        region, backend, stage, reason, "".join(traceback.format_exception(error))[-4000:], error
    )


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


class UnsupportedOp(Exception):
    """There is no ONNX form of something; the text says of what and why."""


class UnknownOp(UnsupportedOp):
    """There is no ONNX form of an operator, whatever its arguments."""
