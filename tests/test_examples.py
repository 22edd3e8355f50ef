"""Each script of `examples` runs, and shows what it is there to show."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import ROOT

# The arguments that make it short, the packages it needs, and what it prints. `make demo` has a test of its own.
SCRIPTS = {
    "fuse_and_explain.py": ([], (), ["acme.decay_gate", "a width of 30 is no multiple of 8"]),
    "vendor_backend.py": ([], ("onnxruntime",), ["same bits: True", "npu.attention"]),
    "schedule_bert.py": ([], ("transformers",), ["attention", "verified"]),
    "training.py": (["8", "torchscript"], (), ["100% alike in eval mode", "'torchscript'"]),
    "generate.py": (["6", "torchscript"], ("transformers",), ["the tokens of eager mode: True", "2 graphs"]),
}
LONG = {
    "tune.py": (["40"], ("sqlalchemy", "optuna"), ["runner-up", "tuned", "first result from the bundle"]),
    "training.py": ([], (), ["100% alike in eval mode", "'inductor'"]),
    "generate.py": ([], ("transformers",), ["the tokens of eager mode: True", "2 graphs"]),
}


def check_script(
    name: str, arguments: list[str], packages: tuple[str, ...], shown: list[str], cwd: Path
) -> None:
    for package in packages:
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [text for text in shown if text not in done.stdout], done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    check_script(name, *SCRIPTS[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_the_example_runs_as_it_is_meant_to(name: str, tmp_path: Path) -> None:
    check_script(name, *LONG[name], tmp_path)


def test_every_example_is_run() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts - {"demo.py"} == {*SCRIPTS, *LONG}
