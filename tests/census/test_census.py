"""The census itself: types that everything takes reach every column; what goes wrong is told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.census.__main__ import COLUMNS

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent


def rows(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.census", "--out", str(folder), *arguments]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        timeout=900,
    )
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {row["type"]: row for row in map(json.loads, lines)}


@pytest.mark.long
def test_a_type_that_needs_longer_than_the_limit_is_ended(tmp_path: Path) -> None:
    row = rows(tmp_path, "--only", "bert", "--limit-seconds", "0.01")["bert"]
    assert row["built"] == "over 0.01 s"
    assert "over" in (tmp_path / "summary.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "types",
    [
        ("bert", "llama", "gpt2", "mixtral"),
        ("t5", "whisper", "bart"),
        ("vit", "clip", "resnet", "mamba", "llava"),
    ],
    ids=" ".join,
)
def test_well_known_types_reach_every_column(tmp_path: Path, types: tuple[str, ...]) -> None:
    results = rows(tmp_path, "--only", *types, "--jobs", "2")
    assert set(results) == set(types)
    assert {name: {c: row.get(c) for c in COLUMNS} for name, row in results.items()} == {
        name: dict.fromkeys(COLUMNS, True) for name in types
    }
    again = rows(tmp_path, "--only", *types)
    assert again == results


@pytest.mark.long
@pytest.mark.parametrize(("captured", "code"), [(True, 0), ("CaptureError: no", 1)])
def test_a_type_that_is_exported_and_not_captured_fails_the_census(
    tmp_path: Path, captured: Any, code: int
) -> None:
    row = {"type": "bert", **dict.fromkeys(COLUMNS, True), "captured": captured, "gradients": "no"}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "tests.census", "--out", str(tmp_path), "--summarize"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True, timeout=300).returncode == code
