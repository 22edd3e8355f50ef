"""The table of a census: how many types reach each column, and why the others do not."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

TITLE = "Model types of transformers, built small"
COLUMNS = {
    "built": "built and run",
    "exports": "torch.export takes it",
    "unrun": "captured before its first call",
    "captured": "captured after a call",
    "equal": "equal to the exported program, bit for bit",
    "faithful": "the exported program equals eager mode",
    "fused": "fused, equal bit for bit",
    "inverse": "inlined again, the same graph",
    "gradients": "gradients as in eager mode",
    "compiled": "through `dovetail.compile` without a backend, equal to eager",
}
MOST_NAMES = 40
UNBUILT = {
    "requires the": "a library that is not installed",
    "no model class": "no model class of its own",
    "process ended": "the process ended",
    "over ": "over the time limit",
    "million parameters": "too large however configured",
}


def write(folder: Path, rows: dict[str, dict[str, Any]], into: Path | None) -> str:
    text = render(rows)
    (folder / "summary.md").write_text(f"# {TITLE}\n\n{text}\n")
    if into is not None:
        from benchmarks.results import write_section

        write_section(into, TITLE, text)
    return text


def render(rows: dict[str, dict[str, Any]]) -> str:
    lines = [*_head(rows), "| | types | of those tried | not applicable |", "|---|---|---|---|"]
    for column, label in COLUMNS.items():
        values = [row[column] for row in rows.values() if column in row]
        skipped = sum(_skipped(v) for v in values)
        lines.append(
            f"| {label} | {sum(v is True for v in values)} | {len(values) - skipped} | {skipped or ''} |"
        )
    for column, label in COLUMNS.items():
        groups = _groups(rows, column)
        if groups:
            lines += ["", f"Not so: {label}", ""]
        for reason, names in groups:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            lines.append(f"- {len(names)}: {reason} ({', '.join(names[:MOST_NAMES])}{more})")
    return "\n".join(lines)


def _head(rows: dict[str, dict[str, Any]]) -> list[str]:
    import torch
    import transformers

    seconds = sum(row.get("seconds", 0.0) for row in rows.values())
    return [
        "`python -m tests.census --out FOLDER --write benchmarks/RESULTS.md` measures this: each model type with a small",
        "configuration and random weights, in a process of its own.",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {len(rows)} types,"
        f" {seconds:.0f} s of processes in all.",
        "",
    ]


def _skipped(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("skipped")


def _groups(rows: dict[str, dict[str, Any]], column: str) -> list[tuple[str, list[str]]]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, row in sorted(rows.items()):
        value = row.get(column)
        if isinstance(value, str) and not (_skipped(value) and column not in ("built", "faithful")):
            groups[_pattern(column, value)].append(name)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def _pattern(column: str, reason: str) -> str:
    """A reason without what differs from model to model or machine to machine."""
    if column == "built":
        return next(
            (cause for mark, cause in UNBUILT.items() if mark in reason), "no sizes or inputs that fit"
        )
    short = re.sub(r"/\S*/(?=[\w-]+/[\w-]+\.py)", "", reason)
    short = re.sub(r"'[^']{1,80}'", "'…'", short)
    short = re.sub(r"(?<![\w.])\d[\d.e+-]*\b", "N", short)
    return short[:200].replace("|", "/")
