"""The documents tell the truth: examples run and print what is shown, links and make targets exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import ROOT, check_examples

README = ROOT / "README.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BY_NAME = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def test_readme_examples_print_what_is_shown() -> None:
    check_examples(README, 1)


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


def test_pages_of_folders_list_every_file() -> None:
    for page in sorted((ROOT / "docs" / "internals").glob("*.md")):
        folder = ROOT / "src" / "dovetail" / page.stem
        named = set(re.findall(r"`(\w+\.py|\w+/)`", page.read_text()))
        present = {f"{p.name}/" if p.is_dir() else p.name for p in folder.iterdir()} - {
            "__init__.py",
            "__pycache__/",
        }
        inner = {p.name for p in folder.glob("*/*.py")}
        assert not present - named, page.name
        assert not named - present - inner, page.name


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
    # A build for CUDA says so on a machine without it.
    assert [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line] == []
