"""bench, tune, plan and demo: what is measured is verified, and reported as JSON and as text."""

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli import tuning_commands
from dovetail.tuning.decisions import Alternative, GraphDecision, Spread
from dovetail.tuning.plan import Plan, Scope
from dovetail.tuning.store import Store
from tests.cli.runner import dovetail, environment
from tests.guides import ROOT
from tests.tuning.helpers import DONE, FAILED, HERE, body

EXAMPLE_PLAN = str(ROOT / "examples" / "llama.plan.json")


def test_bench_verifies_and_times_each_program(folder: Path) -> None:
    done = dovetail(
        "bench",
        "zoo:mlp",
        "--no-torch-compile",
        "-b",
        "torchscript",
        "-b",
        "eager",
        "--seconds",
        "0.2",
        "--json",
    )
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.document["programs"]}
    assert list(rows) == ["eager", "dovetail: torchscript", "dovetail: eager"]
    for name, row in rows.items():
        assert row["failure"] is None
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["first_seconds"] > 0
        assert (row["relative_to_eager"] is None) == (name == "eager")
    assert rows["dovetail: torchscript"]["error"] < 1e-5
    assert rows["dovetail: torchscript"]["lowered"].startswith("3 of 4, ")
    assert "dovetail: timing calls, interleaved ..." in done.err


def test_bench_uses_the_disk_cache_unless_it_is_cold(folder: Path) -> None:
    arguments = ["bench", "models.py:gated", "--no-torch-compile", "-b", "torchscript", "--seconds", "0.1"]
    cold = dovetail(*arguments, "--cold")
    assert "no disk caches" in cold.out
    assert "1 compiled" in cold.out
    assert not (folder / "cache").exists()
    assert "disk caches as they were" in dovetail(*arguments).out
    assert list((folder / "cache" / "entries").iterdir())


def test_bench_of_a_fused_file_lowers_its_own_regions(archive: str) -> None:
    done = dovetail("bench", archive, "--no-torch-compile", "-b", "torchscript", "--seconds", "0.1")
    assert done.code == 0, done.err
    assert "1 of 1, 1 compiled" in done.out
    assert done.out.splitlines()[2].split("  ")[1].strip() == "program"


def test_tune_shows_what_it_would_measure(folder: Path) -> None:
    done = dovetail("tune", "zoo:mlp", "--dry-run", "-b", "torchscript", "--json")
    assert done.code == 0, done.err
    assert done.document["measurements"] > 0
    assert not Path("plan.json").exists()


@pytest.mark.long
def test_tune_writes_a_plan_that_fits(folder: Path) -> None:
    done = dovetail(
        "tune",
        "models.py:gated",
        "--budget",
        "60",
        "-b",
        "torchscript",
        "-o",
        "plan.json",
        "--store",
        "store.db",
    )
    assert done.code == 0, done.err
    assert "wrote plan.json: compile(model, args, plan='plan.json') applies it" in done.out
    shown = dovetail("plan", "show", "plan.json")
    assert "Gated, inference, float32[4, 8]" in shown.out
    assert dovetail("plan", "check", "plan.json", "models.py:gated").code == 0
    assert dovetail("plan", "check", "plan.json", "zoo:mlp").code == 1


def test_tune_shows_rejected_programs_with_their_reasons(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `plan show` does: medians of different comparisons would not be comparable."""
    spread = Spread(3e-5, 2e-5, 4e-5, 9)
    decision = GraphDecision(
        "Gated",
        Spread(2e-5, 1e-5, 3e-5, 9),
        Alternative("eager", spread, "not a plan's own program"),
        (Alternative("no passes", spread, "1.221 times the time"),),
    )
    plan = Plan({HERE.key: HERE}, {"0" * 64: {Scope("inference", HERE.key): decision}})
    monkeypatch.setattr(tuning_commands, "tune", lambda *_, **__: plan)
    done = dovetail("tune", "models.py:gated")
    shown = dovetail("plan", "show", "plan.json").out.splitlines()
    lines = [line for line in shown if line.startswith(("  runner-up: ", "  rejected: "))]
    assert len(lines) == 2
    assert [line for line in done.out.splitlines() if line in lines] == lines
    assert "30 µs" not in lines[1]


def test_plans_are_shown_compared_and_checked(folder: Path) -> None:
    assert (
        "Llama, inference, int64[1, 64]: one region by openvino" in dovetail("plan", "show", EXAMPLE_PLAN).out
    )
    assert dovetail("plan", "show", EXAMPLE_PLAN, "--json").document["format"] == "dovetail-plan"
    assert dovetail("plan", "diff", EXAMPLE_PLAN, EXAMPLE_PLAN).out == "no difference\n"
    checked = dovetail("plan", "check", EXAMPLE_PLAN, "zoo:mlp", "--structure", "--json")
    assert (checked.code, checked.document["fits"]) == (1, False)
    assert checked.document["problems"][0].startswith("there is no decision for the graph")
    Path("empty.json").write_text('{"format": "dovetail-plan", "version": 1, "environments": {}}')
    changed = dovetail("plan", "diff", "empty.json", EXAMPLE_PLAN)
    assert changed.code == 1
    assert "added: Llama, inference, int64[1, 64]" in changed.out


def test_the_demo_agrees_with_itself(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "demo", "--size", "tiny"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout
    assert done.stdout.count("  ok       ") == 4
    assert "torch.compile" in done.stdout
    assert "dovetail: inductor" in done.stdout
    assert f"report: {folder / 'report.html'}" in done.stdout
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    # A build for CUDA reports that it is on a machine without it.
    steps = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert all(line.endswith(" ...") for line in steps), done.stderr


def test_measurements_go_from_one_store_to_another(folder: Path) -> None:
    with Store("a.db") as store:
        store.add([(body(number), DONE) for number in range(3)], HERE)
    done = dovetail(
        "measurements", "export", "all.jsonl", "--store", "a.db", "--environment", HERE.key, "--json"
    )
    assert (done.code, done.document) == (0, {"path": "all.jsonl", "measurements": 3})
    with Store("b.db") as store:
        store.add([(body(0), FAILED), (body(1), DONE)], HERE)
    done = dovetail("measurements", "import", "all.jsonl", "--store", "b.db")
    assert done.code == 0
    assert done.out == "1 measurement added, 2 already there (1 of them with other values)\n"
    done = dovetail("measurements", "import", "all.jsonl", "--store", "b.db", "--json")
    assert done.document == {"path": "all.jsonl", "new": 0, "present": 2, "different": 1}


def test_measurements_that_cannot_be_exchanged_are_wrong_usage_or_a_failure(folder: Path) -> None:
    done = dovetail("measurements", "export", "all.jsonl", "--store", "absent.db")
    assert (done.code, "absent.db' does not exist" in done.err) == (2, True)
    (folder / "other.jsonl").write_text("{}\n")
    done = dovetail("measurements", "import", "other.jsonl", "--store", "b.db", "--json")
    assert (done.code, done.out) == (2, "")
    assert "'other.jsonl' is not a file of measurements" in done.err
    assert not (folder / "b.db").exists()
