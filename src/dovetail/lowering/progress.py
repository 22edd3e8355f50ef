"""How far a lowering is, on one line of a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time


class Progress:
    """Counts the bodies that are done, on standard error: in place on a terminal, else a line for each.

    With None it tells only on a terminal, and only once there is something to wait for.
    """

    def __init__(self, total: int, wanted: bool | None) -> None:
        self.total, self.done = total, 0
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._wanted = self._terminal if wanted is None else wanted
        self._quiet_until = time.monotonic() + (0.5 if wanted is None else 0.0)
        self._lock = threading.Lock()
        self._written = 0

    def finished(self, name: str) -> None:
        """Tell that a body is done."""
        with self._lock:
            self.done += 1
            self._show(f"lowering: {self.done} of {self.total} bodies, {name}")

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._written:
            self._put("\r" + " " * self._written + "\r")

    def _show(self, line: str) -> None:
        if not self._wanted or time.monotonic() < self._quiet_until:
            return
        if not self._terminal:
            self._put(line + "\n")
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        self._put("\r" + line.ljust(self._written))
        self._written = len(line)

    def _put(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self._wanted = False
