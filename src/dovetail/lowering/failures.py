"""Faults of a lowering as values for the ledger, and diagnostics of compiled models."""

from __future__ import annotations

import logging
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Literal

from dovetail.errors import LoweringError, user_stacklevel


@dataclass(frozen=True)
class LoweringFault:
    """Why a backend's code for a region is not used; `stage` is the step that failed."""

    region: str
    backend: str
    stage: str
    reason: str
    trace: str = field(default="", repr=False)
    error: BaseException | None = field(default=None, repr=False, compare=False)

    def as_error(self) -> LoweringError:
        """Return the fault as an exception, chained to its cause."""
        error = LoweringError(self.region, self.backend, f"{self.stage}: {self.reason}")
        error.__cause__ = self.error
        return error


class LoweringFailure(Exception):
    """A step of a lowering failed; the message is the whole reason."""


def one_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def fault_of(region: str, backend: str, stage: str, error: BaseException) -> LoweringFault:
    """Return the fault for an exception."""
    reason = str(error) if isinstance(error, LoweringFailure) else one_line(error)
    return LoweringFault(
        region, backend, stage, reason, "".join(traceback.format_exception(error))[-4000:], error
    )


_LOG = logging.getLogger("dovetail")
Kind = Literal[
    "recompiled",
    "fallback",
    "limit",
    "failed",
    "uncompiled",
    "unplanned",
    "environment",
    "stale",
    "shared",
    "unshared",
]
_INFORMATIVE = ("unplanned", "environment", "shared")


@dataclass(frozen=True)
class Diagnostic:
    """An event of a compiled model: its kind, and a message with the cause and what to do about it."""

    kind: Kind
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Diagnostics:
    """The events of one compiled model, each of them reported once.

    They are logged by the logger `dovetail`, what a plan does not cover and what ranks share at level INFO, all others as
    warnings. Where a model runs uncompiled, because it cannot be captured or a limit is reached, it is a Python warning too.
    """

    def __init__(self) -> None:
        self.events: list[Diagnostic] = []

    def report(self, kind: Kind, message: str) -> None:
        """Log an event unless an equal one was logged before."""
        event = Diagnostic(kind, message)
        if event in self.events:
            return
        self.events.append(event)
        report(kind, message)


def report(kind: Kind, message: str) -> None:
    """Log an event, and warn of it if something runs uncompiled because of it."""
    is_warned = kind in ("fallback", "limit")
    if not is_warned or _LOG.hasHandlers():
        level = logging.INFO if kind in _INFORMATIVE else logging.WARNING
        _LOG.log(level, "%s", message)
    if is_warned:
        warnings.warn(message, stacklevel=user_stacklevel("torch"))


def report_fault(fault: LoweringFault) -> None:
    """Log that code of a backend is not used for a region."""
    of_region = f" for region '{fault.region}'" if fault.region else ""
    report(
        "failed",
        f"code of '{fault.backend}'{of_region} is not used, {fault.stage}: {fault.reason}. The next backend takes its place, "
        f"or the operations as they are; dovetail.explain(...) has the reason.",
    )


class UnsupportedOp(Exception):
    """Something cannot be written as ONNX; the message has what and why."""


class UnknownOp(UnsupportedOp):
    """An operator cannot be written as ONNX, whatever its arguments."""
