"""Text for people: aligned tables, amounts in readable units, reasons without names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_QUOTED = re.compile(r"'[^']*'")
_CHAIN = re.compile(r"\S+( -> \S+)+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?![\w])")
_ENUMERATION = re.compile(r"'…'((,| and) ('…'|N more))+")


def generic(reason: str) -> str:
    """Return a reason without names and numbers, so that reasons of one sort are equal."""
    text = _NUMBER.sub("N", _CHAIN.sub("…", _QUOTED.sub("'…'", reason)))
    return _ENUMERATION.sub("'…'", text)


def quoted(names: Sequence[str], most: int = 4) -> str:
    """Return names in quotes, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def amount(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def magnitude(count: int) -> str:
    """Return a number with a decimal prefix and three digits: 1.23 M."""
    size = float(count)
    for prefix in ("", " k", " M", " G", " T"):
        if abs(size) < 999.5:
            return f"{size:.3g}{prefix}"
        size /= 1000
    return f"{size:.3g} P"


def format_seconds(seconds: float) -> str:
    """Return a time with a unit and three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def percent(part: float, whole: float) -> str:
    """Return a share in per cent; what is neither nothing nor all is neither 0 nor 100."""
    if not whole or not part:
        return "0 %"
    share = 100 * part / whole
    if share < 1:
        return "<1 %"
    return f"{min(round(share), 99) if part < whole else 100} %"


def align(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "  ") -> list[str]:
    """Return rows of cells as lines, the columns aligned to the left or, if they are in `right`, to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        (
            indent
            + "  ".join(
                cell.rjust(width) if k in right else cell.ljust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in rows
    ]


def counted(count: int, what: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def cut(text: str, width: int) -> str:
    """Return text in one line of at most `width` characters."""
    line = " ".join(text.split("\n"))
    return line if len(line) <= width else f"{line[: width - 3]}..."
