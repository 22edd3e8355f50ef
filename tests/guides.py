"""Documents whose examples are run: each python block must print the text block right below it."""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A python block, the line it starts on, and the text block right below it: what it prints."""

    code: str
    line: int
    shown: str


def examples(source: str) -> list[Example]:
    blocks = list(FENCE.finditer(source))
    parsed: list[Example] = []
    for i, block in enumerate(blocks):
        if block[1] != "python":
            continue
        below = blocks[i + 1] if i + 1 < len(blocks) else None
        shown = below is not None and below[1] == "text" and not source[block.end() : below.start()].strip()
        line = source.count("\n", 0, block.start()) + 2
        parsed.append(Example(block[2], line, below[2] if below is not None and shown else ""))
    return parsed


def check_examples(guide: Path, least: int) -> None:
    """Run every python block of a document in one scope, in order."""
    blocks = examples(guide.read_text())
    assert len(blocks) >= least
    scope: dict[str, object] = {"__name__": "guide"}
    for example in blocks:
        # Blank lines in front make a traceback point at the line of the document.
        code = compile("\n" * (example.line - 1) + example.code, str(guide), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        assert _trimmed(printed.getvalue()) == _trimmed(example.shown), f"{guide.name}:{example.line}"


def _trimmed(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip("\n").splitlines()]
