"""Entry point of the command `dovetail`: exit codes, and what is outside of any one command."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from typing import Any, TextIO

SUCCESS, FAILURE, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141
"""Exit codes: done; what was asked about failed or differs; the command could not begin; Ctrl-C; nobody reads stdout.

The last two are what a shell reports for SIGINT and SIGPIPE.
"""
_PACKAGES = ("typer", "rich")


class UnwritableStdout(OSError):
    """What a command writes does not get to stdout, for another reason than a closed pipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process by default, and return its exit code."""
    _open_closed_streams()
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        write_error(
            f"the command line needs {' and '.join(absent)}, not installed; pip install 'dovetail[cli]'"
        )
        return USAGE
    with _one_line_warnings(), _replaced_characters(sys.stdout), _replaced_characters(sys.stderr):
        try:
            from dovetail.cli.application import run_application

            code = run_application(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stdout()
            code = CLOSED_PIPE
        except KeyboardInterrupt:
            write_error("interrupted")
            code = INTERRUPTED
        except OSError as error:  # what was buffered cannot be written, to a full disk say
            discard_stdout()
            write_error(f"stdout cannot be written: {error.strerror or error}")
            code = FAILURE
    return code


def write_error(message: str) -> None:
    """Write one line about an error to stderr."""
    with contextlib.suppress(OSError):
        print(f"dovetail: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def joined_lines(text: str) -> str:
    """Return text in one line: its lines as sentences, or as items of a list."""
    lines = [line.strip().rstrip(";") for line in text.splitlines() if line.strip()]
    return "; ".join(lines).replace(".; ", ". ").replace(":; ", ": ")


def _open_closed_streams() -> None:
    """Give a process that was started without stdout or stderr one that goes nowhere, as Python has None for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def discard_stdout() -> None:
    """Send what is still buffered for a closed pipe nowhere, so that the interpreter's exit does not report it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _one_line_warnings() -> Generator[None]:
    """Show a warning as its first line, without the line of Python that issued it."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        first = next(iter(str(message).strip().splitlines()), category.__name__)
        with contextlib.suppress(OSError):
            print(f"dovetail: warning: {first}", file=file or sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _replaced_characters(stream: Any) -> Generator[None]:
    """Write `?` for what an encoding such as ASCII lacks, instead of failing."""
    errors, reconfigure = getattr(stream, "errors", None), getattr(stream, "reconfigure", None)
    if reconfigure is None:
        yield
        return
    reconfigure(errors="replace")
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            reconfigure(errors=errors)
