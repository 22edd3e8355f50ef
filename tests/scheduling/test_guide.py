"""The guide to schedules tells the truth, and so does the example."""

import subprocess
import sys

import pytest
import torch

from tests.guides import ROOT, check_examples


def test_examples_print_what_is_shown() -> None:
    state = torch.get_rng_state()
    with torch.enable_grad():
        check_examples(ROOT / "docs" / "coming-from-slapo.md", 6)
    torch.set_rng_state(state)


def test_the_example_runs() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "schedule_bert.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention" in done.stdout
    assert "verified" in done.stdout
