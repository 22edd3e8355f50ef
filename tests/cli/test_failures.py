"""Failure modes: one line on stderr, nothing on stdout, and an exit code that tells usage from failure."""

import contextlib
import errno
import importlib.util
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import tuning_commands
from dovetail.cli.entry_point import main
from dovetail.errors import TuningError
from dovetail.formats.archive.load import load
from dovetail.outlining.region import regions
from dovetail.tuning.plan import Plan
from tests.cli.runner import dovetail, environment

USAGE = [
    (["inspect", "missing.pt2"], "'missing.pt2': No such file or directory"),
    (["inspect", "missing.py:model"], "there is no file"),
    (["inspect", "models.py:modle"], "'models.py' has no 'modle'. Did you mean 'model'?"),
    (["inspect", "no_such_module:model"], "there is no module 'no_such_module'"),
    (["inspect", "llama"], "'llama' is not a model. Did you mean 'zoo:llama'?"),
    (["inspect", "models.py"], "'models.py' is not a model. Give zoo:NAME"),
    (["inspect", "zoo:lama"], "the zoo has no model 'lama'. Did you mean 'llama'?"),
    (["inspect", "zoo:llama", "--arg", "size=huge"], "--arg of 'zoo:llama': unknown size 'huge'"),
    (["inspect", "zoo:llama", "--arg", "size"], "--arg 'size' is not key=value"),
    (["inspect", "zoo:llama", "--config", "a=1"], "--config is not for a model of the zoo"),
    (["inspect", "zoo:llama", "--device", "moon"], "--device moon: "),
    (["inspect", "models.py:gated", "--arg", "wdth=4"], "--arg of 'models.py:gated': got an unexpected keyword argument 'wdth'; it is called as models.py:gated(width=8)"),
    (["inspect", "models.py:Needs"], "--arg of 'models.py:Needs': missing a required argument: 'width'"),
    (["inspect", "models.py:alone"], "give its inputs as --input"),
    (["inspect", "models.py:alone", "--input", "4y8"], "--input '4y8' is not [NAME=]SHAPE"),
    (["inspect", "models.py:alone", "--input", "4x8:float99"], "there is no dtype 'float99'"),
    (["inspect", "zoo:llama", "--rules", "rms_nor"], "there are no rules 'rms_nor'. Did you mean 'rms_norm'"),
    (["inspect", "zoo:llama", "--rules", "models.py:model"], "is a Sequential, neither a rule nor a RuleSet"),
    (["inspect"], "missing argument 'MODEL'. Try 'dovetail inspect --help'."),
    (["inspect", "zoo:llama", "--jsn"], "no such option: --jsn"),
    (["inspct", "zoo:llama"], "no such command 'inspct'. Did you mean 'inspect'?"),
    (["why", "models.py:gated", "nonsense"], "no such operation, module or source line: 'nonsense'"),
    (["why", "models.py:gated"], "give an operation, a module or a source line, or --rule"),
    (["fuse", "models.py:gated", "-o", "fused.txt"], "there is no format for the suffix '.txt'"),
    (["fuse", "models.py:gated", "-o", "nowhere/fused.pt2"], "there is no folder 'nowhere'"),
    (["fuse", "models.py:gated", "--never", "nonsense"], "never: the graph has no node"),
    (["report", "models.py:gated", "-o", "."], "is a folder; give the name of a file"),
    (["convert", "models.py:gated", "out"], "there is no format for the suffix ''"),
    (["diff", "models.py:gated", "missing.pt2"], "'missing.pt2': No such file or directory"),
    (["bench", "models.py:gated", "--backend", "inductr"], "there is no backend 'inductr'. Did you mean 'inductor'?"),
    (["bench", "models.py:gated", "--train"], "bench measures inference"),
    (["tune", "models.py:gated", "--backend", "inductr"], "there is no backend 'inductr'"),
    (["tune", "models.py:gated", "--budget", "nothing"], "invalid value for '--budget'"),
    (["plan", "show", "missing.json"], "'missing.json' cannot be read as a plan: No such file or directory"),
    (["plan", "show", "models.py"], "'models.py' is not a plan"),
    (["plan", "check", "missing.json", "zoo:mlp"], "'missing.json' cannot be read as a plan"),
    (["plan", "diff", "missing.json", "missing.json"], "'missing.json' cannot be read as a plan"),
    (["cache", "list", "--folder", "missing"], "there is no folder 'missing'"),
    (["measurements", "export", "all.jsonl", "--store", "missing.db"], "missing.db' does not exist"),
    (["tune", "models.py:gated", "--store", "nowhere/s.db"], "there is no folder"),
    (["worker", "--store", "models.py"], "the store "),
    (["diff", "models.py:gated", "zoo:mlp", "--config", "a=1"], "--config is not for a factory or a model of the zoo."),
    (["report", "models.py:gated", "--plan", "plan.json", "--rules", "norms"], "give --plan or --rules"),
    (["demo", "--size", "huge"], "--arg of 'zoo:llama': unknown size 'huge'"),
    (["demo", "--backend", "inductr"], "there is no backend 'inductr'"),
]  # fmt: skip
FAILED = [
    (["inspect", "models.py:broken"], ": no weights here; and more."),
    (["inspect", "models.py:unloadable"], 'Missing key(s) in state_dict: "gate.weight"'),
    (["inspect", "models.py:number"], "'models.py:number' returned int; return a module"),
    (["inspect", "models.py:branching"], "the model branches on, or takes a size from, values"),
    (["inspect", "models.py:alone", "--input", "4x9"], "torch.export cannot trace this model with the inputs"),
    (["inspect", "faulty.py:model"], "'faulty.py' cannot be imported: ZeroDivisionError"),
    (["inspect", "models.py:leaving"], "the Python code of the model or the rules ended the process: SystemExit(0)"),
    (["fuse", "leaving.py:model"], "the Python code of the model or the rules ended the process: SystemExit(3)"),
    (["why", "models.py:gated", "mul", "--rules", "leaving.py:rule"], "ended the process: SystemExit(3)"),
]  # fmt: skip


def _id(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else ""


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=_id)
def test_wrong_usage_exits_with_two(folder: Path, arguments: list[str], message: str) -> None:
    done = dovetail(*arguments)
    assert message in done.error
    assert (done.code, done.out.replace("made by the factory\n", "")) == (2, "")


@pytest.mark.parametrize(("arguments", "message"), FAILED, ids=_id)
def test_a_model_that_fails_exits_with_one(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "faulty.py").write_text("1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(3)\n")
    done = dovetail(*arguments)
    assert message in done.error
    assert (done.code, done.out.replace("made by the factory\n", "")) == (1, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arg", "width=8"], "--arg is not for a file."),
        (["--train"], "--train is not for a file: its graph is of the mode it was captured in."),
        (["--device", "cpu"], "--device is not for a file: its graph is of the device it was captured on."),
        (["--input", "2x9"], "--input of 'fused.pt2': 'x' was captured with shape (4, 8) and has (2, 9) here."),
    ],
    ids=_id,
)  # fmt: skip
def test_a_file_takes_only_inputs_of_its_graph(archive: str, options: list[str], message: str) -> None:
    done = dovetail("inspect", archive, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.error


@pytest.mark.parametrize("what", ["swiglu", "swiglu_0", "silu", "up"])
def test_never_does_not_pass_over_a_region_of_the_file(archive: str, what: str) -> None:
    done = dovetail("fuse", archive, "--never", what)
    assert done.code == 2
    assert "'fused.pt2' has the region 'swiglu_0' of kind 'swiglu' already" in done.error


def test_a_configuration_that_no_model_takes_is_wrong_usage(folder: Path) -> None:
    pytest.importorskip("transformers")
    done = dovetail("inspect", "hf:bert", "--config", "num_hidden_layers=abc")
    assert done.code == 2
    assert done.error.count("Field 'num_hidden_layers' expected int") == 1
    assert "uniform" not in done.error


def test_messages_of_a_search_name_options_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*_: Any, **__: Any) -> Plan:
        raise TuningError("nothing was measured. Give a larger `budget`; dry_run=True estimates it.")

    monkeypatch.setattr(tuning_commands, "tune", tune)
    done = dovetail("tune", "models.py:gated")
    assert (done.code, done.error) == (
        1,
        "nothing was measured. Give a larger --budget; --dry-run estimates it.",
    )


def test_json_has_nothing_on_stdout_for_an_error(folder: Path) -> None:
    done = dovetail("inspect", "missing.pt2", "--json")
    assert (done.code, done.out) == (2, "")


def test_a_damaged_file_is_wrong_usage(archive: str) -> None:
    data = bytearray(Path(archive).read_bytes())
    Path("cut.pt2").write_bytes(data[: len(data) // 2])
    done = dovetail("inspect", "cut.pt2")
    assert done.code == 2
    assert "cut.pt2" in done.error


def test_traceback_is_shown_on_request(folder: Path) -> None:
    done = dovetail("inspect", "models.py:broken", "--traceback")
    assert done.code == 1
    assert "Traceback (most recent call last):" in done.err
    assert "in broken" in done.err
    assert done.err.splitlines()[-1].startswith("dovetail: error: 'models.py:broken' cannot be made")


def test_without_its_packages_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "typer" else real(name, *a)
    )
    done = dovetail("info")
    assert done.code == 2
    assert done.error == "the command line needs typer, not installed; pip install 'dovetail[cli]'"


def test_transformers_that_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else real(name, *a)
    )
    done = dovetail("inspect", "hf:bert")
    assert (done.code, done.error) == (
        2,
        "'hf:bert' needs transformers, not installed; pip install transformers",
    )


def test_a_backend_that_differs_is_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dovetail as library
    from dovetail.cli import benchmark

    class Wrong(library.Backend):
        name = "wrong"

        def supports(self, region: Any) -> bool:
            return True

        def compile(self, region: Any, examples: Any) -> Any:
            return lambda *operands: tuple(r + 1 for r in region.body(*operands))

    monkeypatch.setattr(benchmark, "chosen_backends", lambda names, device: (Wrong(),))
    done = dovetail("bench", "models.py:gated", "--no-torch-compile", "--seconds", "0.1", "--json")
    rows = {row["name"]: row for row in done.document["programs"]}
    assert done.code == 1
    assert "it does not compute the same" in rows["dovetail: wrong"]["failure"]
    assert rows["eager"]["seconds"]["median"] > 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.cli.model_source import ModelSource

    monkeypatch.setattr(ModelSource, "load", lambda *a: os.kill(os.getpid(), signal.SIGINT))
    done = dovetail("inspect", "zoo:llama")
    assert (done.code, done.err) == (130, "dovetail: error: interrupted\n")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_search_keeps_its_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(*_: Any, **__: Any) -> Plan:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return Plan()
        raise AssertionError("the interrupt did not reach the search")

    monkeypatch.setattr(tuning_commands, "tune", tune)
    before = signal.getsignal(signal.SIGINT)
    done = dovetail("tune", "models.py:gated", "-o", "plan.json", "--json")
    assert done.code == 130
    assert "dovetail: error: interrupted; the plan has the best program so far" in done.err
    assert done.document["interrupted"] is True
    assert Plan.load("plan.json") == Plan()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_pipe_is_silent(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "inspect", "zoo:mlp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (141, "")


class Failing(io.StringIO):
    """A stream that nothing can be written to, for a reason of the system."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self.reason = reason

    def write(self, text: str) -> int:
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["cache", "list"], ["info", "--json"]])
def test_every_output_fails_alike(folder: Path, arguments: list[str]) -> None:
    """A closed pipe is silent and a full disk one message, for text, JSON and help."""
    message = "dovetail: error: stdout cannot be written: No space left on device\n"
    for reason, expected in ((errno.EPIPE, (141, "")), (errno.ENOSPC, (1, message))):
        errors = io.StringIO()
        with contextlib.redirect_stdout(Failing(reason)), contextlib.redirect_stderr(errors):
            code = main(arguments)
        assert (code, errors.getvalue()) == expected


@pytest.mark.parametrize("arguments", [["inspect", "zoo:mlp"], ["cache", "list"]])
def test_a_full_disk_under_stdout_is_a_failure(folder: Path, arguments: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    with full.open("w") as stream:
        command = [sys.executable, "-m", "dovetail", *arguments]
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr == "dovetail: error: stdout cannot be written: No space left on device\n"


def test_without_stdout_and_stderr_files_are_written(folder: Path) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m dovetail fuse models.py:gated -o fused.pt2 >&- 2>&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert regions(load("fused.pt2"))


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_from_outside_ends_a_process_cleanly(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "bench", "zoo:mlp", "--no-torch-compile", "-b", "eager", "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )  # fmt: skip
    assert process.stderr is not None
    while "timing" not in (line := process.stderr.readline()):
        assert line, "it ended before it timed anything"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (130, "dovetail: error: interrupted\n")


@pytest.mark.long
def test_an_interrupted_search_writes_what_it_has(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "tune", "zoo:mlp", "--budget", "300", "-b", "torchscript", "-o", "plan.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    while "best" not in (line := process.stderr.readline()):
        assert line, "it ended before it measured anything"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "dovetail: error: interrupted; the plan has the best program so far"
    assert Plan.load(folder / "plan.json").graphs


def test_main_returns_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dovetail 0.")
