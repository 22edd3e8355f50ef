"""What went wrong with a lowering, as values: told in the ledger, raised on request."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from dovetail.errors import LoweringError


@dataclass(frozen=True)
class Fault:
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


class Failure(Exception):
    """Something went wrong with a lowering, and the text says all of it."""


def in_a_line(error: BaseException) -> str:
    """What was raised, without what it says after its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def fault_of(region: str, backend: str, stage: str, error: BaseException) -> Fault:
    """A fault from what was raised."""
    reason = str(error) if isinstance(error, Failure) else in_a_line(error)
    return Fault(region, backend, stage, reason, "".join(traceback.format_exception(error))[-4000:], error)
