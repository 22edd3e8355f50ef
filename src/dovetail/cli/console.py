"""Output of commands: tables and progress on a terminal, plain text in a pipe, one JSON document on request."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dovetail.cli.entry_point import UnwritableStdout
from dovetail.ir.text_tables import align, format_seconds, quoted

Style = Literal["", "good", "bad", "strong", "faint"]
_STYLES: dict[Style, str] = {"": "", "good": "green", "bad": "red", "strong": "bold", "faint": "dim"}

_ANY_WIDTH = 10_000


class _RaisingConsole(RichConsole):
    """A console of Rich that leaves a closed pipe to the entry point."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextlib.contextmanager
def _stdout_errors() -> Generator[None]:
    """Tell errors of stdout from those of files that a command writes, which have no name either."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableStdout(error.errno, error.strerror) from error


class Console:
    """Where a command writes: results to stdout, progress to stderr.

    With `as_json` stdout has one document at the end and nothing else: what would be text is not written, and what
    Python code of a model prints goes to stderr. Rich decides about colors, by NO_COLOR, FORCE_COLOR and TERM.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout
        self._rich = _RaisingConsole(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
        self._progress = _RaisingConsole(file=sys.stderr, highlight=False, emoji=False)

    @property
    def is_terminal(self) -> bool:
        """Whether a person sees stdout directly."""
        return self._rich.is_terminal

    def text(self, text: str = "", *, style: Style = "") -> None:
        """Write text as it is, in one style; nothing with `as_json`."""
        if not self.as_json:
            with _stdout_errors():
                self._rich.print(text, style=_STYLES[style] or None, markup=False)

    def verdict(self, holds: bool, text: str, *, refuted: str = "DIFFERS") -> bool:
        """Write whether something holds, and return it."""
        if not self.as_json:
            mark = "ok" if holds else refuted
            width = max(len(refuted), 2)
            self.text(f"  {mark:<{width}}  {text}", style="good" if holds else "bad")
        return holds

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Collection[int] = (),
        bad: Collection[int] = (),
        optional: Sequence[int] = (),
    ) -> None:
        """Write a table, the columns `right` aligned to the right and the rows `bad` marked by color.

        On a terminal only text wraps, not the first column nor those to the right. One that is too narrow is without the
        columns `optional`, the first of them first, which a line below the table names.
        """
        if self.as_json:
            return
        cells = [[*row] for row in rows]
        if not self.is_terminal:
            self.text("\n".join(align([columns, *cells], right=right)))
            return
        shown, dropped = [*range(len(columns))], list[int]()
        table = _drawn(columns, cells, shown, right, bad)
        for number in optional:
            unbounded = self._rich.options.update(max_width=_ANY_WIDTH)
            if Measurement.get(self._rich, unbounded, table).minimum <= self._rich.width:
                break
            shown.remove(number)
            dropped.append(number)
            table = _drawn(columns, cells, shown, right, bad)
        with _stdout_errors():
            self._rich.print(table, soft_wrap=False)
        if dropped:
            self.text(f"too narrow for {quoted([columns[number] for number in dropped])}", style="faint")

    def document(self, document: Any) -> None:
        """Write the JSON document of a command; nothing without `as_json`."""
        if self.as_json:
            text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
            with _stdout_errors():
                self._stdout.write(text + "\n")

    @contextlib.contextmanager
    def stdout_for_results(self) -> Generator[None]:
        """Keep what others print off stdout while a JSON document is to be the only thing there."""
        if not self.as_json:
            yield
            return
        with contextlib.redirect_stdout(sys.stderr):
            yield

    @contextlib.contextmanager
    def step(self, what: str, *, is_long: bool = False) -> Generator[TimedStep]:
        """Show on stderr what is being done: in place on a terminal; else one line, of long steps only."""
        step = TimedStep()
        if self._progress.is_terminal and not self._progress.is_dumb_terminal:
            with self._progress.status(f"{what} ..."):
                yield step
        else:
            if is_long:
                print(f"dovetail: {what} ...", file=sys.stderr, flush=True)
            yield step
        step.seconds = time.perf_counter() - step.start


def _drawn(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    right: Collection[int],
    bad: Collection[int],
) -> Table:
    """Return a table for a terminal of the columns `shown`, of which the first and those to the right do not wrap."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number in shown:
        is_whole = number == 0 or number in right
        table.add_column(
            columns[number],
            justify="right" if number in right else "left",
            no_wrap=is_whole,
            # Without it Rich measures what does not wrap as if it did.
            min_width=max(cell_len(row[number]) for row in (columns, *rows)) if is_whole else None,
            overflow="fold",
        )
    for number, row in enumerate(rows):
        table.add_row(*(Text(row[column]) for column in shown), style="red" if number in bad else None)
    return table


class TimedStep:
    """How long a step took, once it is done."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds = 0.0

    def __str__(self) -> str:
        return format_seconds(self.seconds)
