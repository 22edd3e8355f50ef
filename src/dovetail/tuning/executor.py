"""Executors: where trials run. A worker process may crash, hang or exhaust memory; that is a failed measurement.

One worker runs one trial at a time, for two that run at once would measure each other. Blocks and the model are written to
files once and loaded by each worker when it first needs them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing.spawn as spawn
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from dovetail.errors import InvalidArgument
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.cache import precision, restore_precision
from dovetail.lowering.worker import describe_exit, die_with_parent, kill_process
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import copy_tensors
from dovetail.tuning.block import Block
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.trial import Trial
from dovetail.tuning.trial_runner import TrialRunner

IN_WORKER = "DOVETAIL_TUNING_WORKER"
"""Set in the environment of worker processes, where `tune` must not start."""
_START_SECONDS = 180.0
_LOG = logging.getLogger("dovetail")


class Executor(Protocol):
    """Runs trials; a trial that fails does not raise, its measurement has the failure."""

    def add_block(self, block: Block) -> None:
        """Make a block available to trials."""
        ...

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:
        """Return the result of a trial; None if it takes longer than `timeout` seconds and was stopped."""
        ...

    def restart(self) -> None:
        """Run the next trial in a fresh process, where there are processes."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


@dataclass(eq=False)
class TunedModel:
    """The model that is tuned, with its example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mode: Mode
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class InProcess:
    """Runs trials in this process, on a copy of the model: for models that cannot be sent to another.

    A crash ends the search, and a trial that hangs is not stopped.
    """

    def __init__(self, model: TunedModel, backends: Sequence[Backend]) -> None:
        self._model = model
        self._backends = list(backends)
        self._blocks: dict[str, Block] = {}
        self._runner: TrialRunner | None = None

    def add_block(self, block: Block) -> None:
        self._blocks[block.key] = block
        if self._runner is not None:
            self._runner.load_block(block)

    def measure(self, trial: Trial, timeout: float) -> Measurement:
        if self._runner is None:
            self._runner = TrialRunner(self._backends, str(self._model.device))
            for block in self._blocks.values():
                self._runner.load_block(block)
            tuned = self._model
            args, kwargs = copy_tensors((tuned.args, dict(tuned.kwargs)))
            self._runner.load_model(copy.deepcopy(tuned.model), args, kwargs, tuned.mode)
        return self._runner.run(trial)

    def restart(self) -> None:
        self._runner = None

    def close(self) -> None:
        self._runner = None


class WorkerLost(Exception):
    """A worker process has died or was killed; the message is the reason."""


class LocalExecutor:
    """Runs trials in one worker process, which is started again after it has died."""

    def __init__(self, model: TunedModel, backends: Sequence[Backend]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-tune-")
        self._process: _Worker | None = None
        at = Path(self._folder.name)
        try:
            self._setup = _write_setup(at, model, backends)
            until = time.monotonic() + _START_SECONDS
            worker = self._start(until)
            # A model that can be written but not read there is an error here, not that of every trial.
            worker.request(("model", None), until)
            worker.loaded.add("")
        except BaseException:
            self.close()
            raise
        self._block_files: dict[str, Path] = {}

    def add_block(self, block: Block) -> None:
        if block.key not in self._block_files:
            path = Path(self._folder.name) / f"block-{len(self._block_files)}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(block, path)
            self._block_files[block.key] = path

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:
        start = time.perf_counter()
        try:
            until = time.monotonic() + timeout
            worker = self._process or self._start(until)
            for key in trial.blocks:
                if key not in worker.loaded:
                    worker.request(("block", str(self._block_files[key])), until)
                    worker.loaded.add(key)
            if trial.needs_model and "" not in worker.loaded:
                worker.request(("model", None), until)
                worker.loaded.add("")
            return cast("Measurement", worker.request(("run", trial), until))
        except TimeoutError:
            self.restart()
            return None
        except WorkerLost as lost:
            self.restart()
            return Measurement((), failure=str(lost), compile_seconds=time.perf_counter() - start)

    def restart(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        self.restart()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _start(self, until: float) -> _Worker:
        self._process = _Worker(Path(self._folder.name), self._setup)
        self._process.request(("hello", None), until)
        return self._process


def _write_setup(at: Path, tuned: TunedModel, backends: Sequence[Backend]) -> Path:
    """Write what a worker loads first; raise InvalidArgument for what cannot be sent to a process."""
    model = at / "model"
    what = "the backends"
    try:
        packed = pickle.dumps(list(backends))
        what = "the model"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save((tuned.model, tuned.args, dict(tuned.kwargs), tuned.mode), model)
    except Exception as error:
        raise InvalidArgument(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from error
    # The script that runs is imported by the worker only if something of it is needed.
    needs_main = b"__main__" in packed or _mentions_main(model)
    setup = {
        "path": list(sys.path),
        "main": _main_script() if needs_main else None,
        "threads": torch.get_num_threads(),
        "precision": precision(),
        "device": str(tuned.device),
        "backends": packed,
        "model": str(model),
    }
    path = at / "setup"
    path.write_bytes(pickle.dumps(setup))
    return path


def _main_script() -> dict[str, Any]:
    """Return how a worker imports the script that runs, as `multiprocessing` does it."""
    data = spawn.get_preparation_data("dovetail-tuning")
    return {name: value for name, value in data.items() if name.startswith("init_main_from")}


def _mentions_main(path: Path) -> bool:
    """Return whether a file of torch.save refers to the script that runs: its pickle is stored uncompressed."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return any(b"__main__" in archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, folder: Path, setup: Path) -> None:
        self.loaded: set[str] = set()
        self._output = folder / "output"
        self._connection, theirs = Pipe()
        source = str(Path(__file__).parents[2])
        start = (
            f"import sys; sys.path.insert(0, {source!r}); import {__name__} as worker; "
            f"worker.run_worker(int(sys.argv[1]), sys.argv[2])"
        )
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(theirs.fileno()), str(setup)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, IN_WORKER: "1"},
            )
        theirs.close()

    def request(self, message: tuple[str, Any], until: float) -> Any:
        """Return the answer to a message; raise WorkerLost if the process dies, TimeoutError if it takes too long."""
        try:
            self._connection.send(message)
            while not self._connection.poll(min(0.5, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise TimeoutError
            failure, answer = self._connection.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process.wait()
            raise WorkerLost(f"its process {describe_exit(self._process.returncode)}{self._tail()}") from None
        if failure:
            raise WorkerLost(f"the worker process cannot be used: {failure}")
        return answer

    def kill(self) -> None:
        self._connection.close()
        kill_process(self._process)

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._output.read_text(errors="replace").strip().splitlines()
            return f": {lines[-1][:200]}" if lines else ""
        return ""


# What follows runs in the worker process.
def run_worker(descriptor: int, setup_path: str) -> None:
    """Answer requests until the connection is closed."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    setup = pickle.loads(Path(setup_path).read_bytes())
    sys.path[:] = setup["path"]
    torch.set_num_threads(setup["threads"])
    restore_precision(setup["precision"])
    runner: TrialRunner | None = None
    while True:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        failure, answer = "", None
        try:
            if runner is None:
                if setup["main"] is not None:
                    spawn.prepare(setup["main"])
                runner = TrialRunner(pickle.loads(setup["backends"]), setup["device"])
            if kind == "block":
                runner.load_block(torch.load(value, weights_only=False))
            elif kind == "model":
                model, args, kwargs, mode = torch.load(setup["model"], weights_only=False)
                runner.load_model(model, args, kwargs, mode)
            elif kind == "run":
                answer = runner.run(value)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"[:500]
        connection.send((failure, answer))
