"""What all commands have in common: help, terminals and pipes, JSON, colors, completion; and info and the cache."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.benchmark import COLUMNS, OPTIONAL, RIGHT
from dovetail.cli.console import Console
from tests.cli.runner import Result, Terminal, dovetail, environment

COMMANDS = [
    ["demo"], ["info"], ["inspect"], ["why"], ["diff"], ["fuse"], ["report"], ["convert"], ["bench"], ["tune"],
    ["plan", "show"], ["plan", "diff"], ["plan", "check"], ["cache", "list"], ["cache", "clear"], ["cache", "verify"],
]  # fmt: skip
BY_NAME = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@BY_NAME
def test_every_command_has_help(command: list[str]) -> None:
    shown = dovetail(*command, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"Usage: dovetail {' '.join(command)} ")
    assert "--json" in shown.out
    assert "--traceback" in shown.out
    assert shown.err == ""
    assert dovetail(*command, "-h").out == shown.out


def test_help_lists_every_command_in_a_line(folder: Path) -> None:
    shown = dovetail("--help")
    names = {command[0] for command in COMMANDS}
    lines = [line for line in shown.out.splitlines() if line.strip().split(" ")[0] in names]
    assert len(lines) == len(names)
    assert not any(line.endswith("...") for line in lines)
    assert "\x1b" not in shown.out


def test_without_arguments_it_shows_help() -> None:
    shown = dovetail()
    assert (shown.code, shown.out) == (2, "")
    assert "Usage: dovetail" in shown.err
    assert dovetail("plan").code == 2


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert done.stdout.startswith("dovetail 0.")


def test_colors_are_for_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    piped = dovetail("diff", "zoo:mlp", "zoo:mlp", "--arg", "batch=2", "--context", "1")
    assert "\x1b" not in piped.out + piped.err
    failing = ["inspect", "models.py:gated"]
    shown = dovetail(*failing, terminal=True)
    assert "\x1b[1m" in shown.out
    monkeypatch.setenv("NO_COLOR", "1")
    uncolored = dovetail("cache", "verify", terminal=True)
    assert "\x1b[3" not in uncolored.out


def test_differences_have_no_color_with_no_color(archive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    colored = dovetail("diff", "models.py:gated", archive, terminal=True)
    assert "\x1b[32m" in colored.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in dovetail("diff", "models.py:gated", archive, terminal=True).out


def test_a_name_is_no_markup(folder: Path) -> None:
    shown = dovetail("inspect", "zoo:llama", terminal=True)
    assert "zoo:llama: Llama" in shown.out


def test_tables_fit_a_terminal_and_are_whole_in_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    drawn, piped = dovetail("info", terminal=True), dovetail("info")
    assert "─" in drawn.out
    assert "─" not in piped.out
    table = re.sub(r"\x1b\[[\d;]*m", "", drawn.out).partition("──")[2]
    assert all(len(line) <= 60 for line in table.splitlines()[1:])


ROWS = [
    ["eager", "287 µs", "62.6 µs", "61.8 µs – 64.1 µs", "", "", ""],
    ["dovetail: torchscript", "1.36 s", "53.6 µs", "52.5 µs – 55.6 µs", "1.17x undecided", "3.1e-06", "3 of 4, 2 compiled"],
]  # fmt: skip


@pytest.mark.parametrize(("width", "dropped"), [(60, (3, 5, 1)), (80, (3, 5)), (100, (3,)), (160, ())])
def test_figures_do_not_wrap_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, dropped: tuple[int, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(Terminal()) as out:
        Console().table(COLUMNS, ROWS, right=RIGHT, optional=OPTIONAL)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert all(len(line) <= width for line in lines)
    for number in range(6):
        for cell in (COLUMNS[number], ROWS[0][number], ROWS[1][number]):
            assert any(cell in line for line in lines[:4]) == (number not in dropped or not cell)
    named = [line for line in lines if line.startswith("too narrow for ")]
    assert named == ([f"too narrow for {', '.join(repr(COLUMNS[k]) for k in dropped)}"] if dropped else [])


def test_info_lists_which_backends_can_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.backends import Inductor, OpenVino

    monkeypatch.setattr(OpenVino, "packages", ("no_such_package",))
    monkeypatch.setattr("dovetail.lowering.cache.shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    backends = {row["name"]: row for row in dovetail("info", "--json").document["backends"]}
    assert backends["eager"] == {"name": "eager", "usable": True, "reason": None}
    assert backends["openvino"]["reason"].startswith("no_such_package not installed; pip install")
    assert "no C++ compiler" in backends["inductor"]["reason"]
    assert backends["cuda_graphs"]["reason"] == "torch has no CUDA device here"
    assert Inductor().missing() == backends["inductor"]["reason"]
    shown = dovetail("info")
    assert "C++ compiler  none" in shown.out
    rows = [line.split()[:2] for line in shown.out.splitlines() if line.startswith("  ")]
    assert {usable for _, usable in rows[1:]} <= {"yes", "no"}


def cached(folder: Path) -> Path:
    """Put code into the cache, and return one of its files."""
    done = dovetail("bench", "models.py:gated", "--no-torch-compile", "-b", "torchscript", "--seconds", "0.1")
    assert done.code == 0, done.err
    return next(p for p in sorted((folder / "cache" / "entries").rglob("*")) if p.is_file())


def test_the_cache_is_shown_verified_and_cleared(folder: Path) -> None:
    assert dovetail("cache", "list").out == f"{folder / 'cache'}: 0 files, 0 B of at most 4.0 GiB\n"
    entry = cached(folder)
    files = dovetail("cache", "list", "--json").document["files"]
    assert entry.name in {file["name"] for file in files}
    assert "compiled code and graphs" in dovetail("cache", "list").out
    assert entry.name in dovetail("cache", "list", "--all").out
    assert dovetail("cache", "verify").code == 0
    cleared = dovetail("cache", "clear", "--json").document
    assert cleared["removed"] == len(files)
    assert dovetail("cache", "list", "--json").document["files"] == []


def test_a_damaged_entry_is_reported_and_removed_on_request(folder: Path) -> None:
    entry = cached(folder)
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    damaged = dovetail("cache", "verify")
    assert damaged.code == 1
    assert f"{entry.name}: its checksum does not match" in damaged.out
    assert entry.exists()
    removed = dovetail("cache", "verify", "--remove", "--json")
    assert (removed.code, [e["name"] for e in removed.document["damaged"]]) == (0, [entry.name])
    assert not entry.exists()
    assert dovetail("cache", "verify").code == 0


def completions(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What bash offers for the last of some words, which it has split at colons."""
    split = [part for word in words for part in word.replace(":", " : ").split(" ") if part or not word]
    with monkeypatch.context() as context:
        context.setenv("_DOVETAIL_COMPLETE", "complete_bash")
        context.setenv("COMP_WORDS", "\n".join(["dovetail", *split]))
        context.setenv("COMP_CWORD", str(len(split)))
        shown: Result = dovetail()
    assert shown.err == ""
    return shown.out.split()


def test_bash_completes_commands_models_backends_and_rules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completions(monkeypatch, "ins") == ["inspect"]
    assert completions(monkeypatch, "inspect", "zo")[0] == "zoo:mlp"
    assert completions(monkeypatch, "inspect", "zoo:ll") == ["llama"]
    assert "mlp" in completions(monkeypatch, "inspect", "zoo:")
    assert completions(monkeypatch, "inspect", "hf:distilb") == ["distilbert"]
    assert completions(monkeypatch, "inspect", "mod") == ["models.py:"]
    assert completions(monkeypatch, "bench", "zoo:mlp", "--backend", "on") == ["onnxruntime"]
    assert "rms_norm" in completions(monkeypatch, "inspect", "zoo:mlp", "--rules", "rms")


def test_completion_is_shown_for_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"),
    )
    assert "complete -o default -F" in done.stdout, done.stderr


def test_transformers_are_small_models_by_type(folder: Path) -> None:
    pytest.importorskip("transformers")
    shown = dovetail("inspect", "hf:bert", "--config", "num_hidden_layers=1", "--json")
    assert shown.code == 0, shown.err
    assert shown.document["class"] == "BertModel"
    assert shown.document["parameters"] < 200_000
    deeper = dovetail("inspect", "hf:bert", "--config", "num_hidden_layers=3", "--json").document
    assert deeper["parameters"] > shown.document["parameters"]
    misspelled = dovetail("inspect", "hf:bert", "--config", "hiden_size=3")
    assert misspelled.code == 2
    assert "has no 'hiden_size'. Did you mean 'hidden_size'?" in misspelled.error
    assert "Did you mean 'bert'" in dovetail("inspect", "hf:brt").error


def test_the_environment_does_not_leak(folder: Path) -> None:
    """Running a command leaves streams, warnings and signals of the process as they were."""
    import signal
    import warnings

    before = (
        sys.stdout,
        sys.stderr,
        warnings.showwarning,
        signal.getsignal(signal.SIGINT),
        warnings.filters[:],
    )
    dovetail("inspect", "zoo:mlp")
    assert before == (
        sys.stdout,
        sys.stderr,
        warnings.showwarning,
        signal.getsignal(signal.SIGINT),
        warnings.filters[:],
    )
