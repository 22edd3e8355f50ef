"""The documents tell the truth: examples run and print what is shown, links and make targets exist."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BY_NAME = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A python block, the line it starts on, and the text block right below it: what it prints."""

    code: str
    line: int
    shown: str


def examples(source: str) -> list[Example]:
    blocks = list(FENCE.finditer(source))
    found: list[Example] = []
    for i, block in enumerate(blocks):
        if block[1] != "python":
            continue
        below = blocks[i + 1] if i + 1 < len(blocks) else None
        shown = below is not None and below[1] == "text" and not source[block.end() : below.start()].strip()
        line = source.count("\n", 0, block.start()) + 2
        found.append(Example(block[2], line, below[2] if below is not None and shown else ""))
    return found


def test_readme_examples_print_what_is_shown() -> None:
    found = examples(README.read_text())
    assert found
    scope: dict[str, object] = {"__name__": "readme"}
    for example in found:
        # Blank lines in front make a traceback point at the line of the README.
        code = compile("\n" * (example.line - 1) + example.code, str(README), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        assert _trimmed(printed.getvalue()) == _trimmed(example.shown), f"README.md:{example.line}"


def _trimmed(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip("\n").splitlines()]


@BY_NAME
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@BY_NAME
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4}|^)make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert named <= targets


@BY_NAME
def test_files_named_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_demo_agrees_with_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout
    assert done.stderr == ""
