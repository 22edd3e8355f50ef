"""Documents whose examples are run: each python block must print the text block right below it.

`python tests/guides.py README.md` runs those of one document with whatever dovetail that interpreter imports.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The site, and the documents at the root that are pages of it too.
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Written from the references of kinds, which the tests of the library execute; no program to run from top to bottom.
NOT_PROGRAMS = {ROOT / "docs" / "kinds.md"}


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


def programs() -> list[Path]:
    """Return the documents that have examples to run."""
    return [path for path in DOCUMENTS if path not in NOT_PROGRAMS and examples(path.read_text())]


def run_examples(guide: Path) -> Iterator[tuple[Example, str]]:
    """Run every python block of a document in one scope, in order; yield each with what it printed."""
    module = ModuleType("guide")
    # Some of torch imports the module of a function by name.
    sys.modules["guide"] = module
    for example in examples(guide.read_text()):
        # Blank lines in front make a traceback point at the line of the document.
        code = compile("\n" * (example.line - 1) + example.code, str(guide), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        yield example, printed.getvalue()


def check_examples(guide: Path) -> None:
    """Run the examples of a document, which must print what is shown."""
    for example, printed in run_examples(guide):
        assert _trimmed(printed) == _trimmed(example.shown), f"{guide.name}:{example.line}"


def _trimmed(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip("\n").splitlines()]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check_examples(Path(argument))
