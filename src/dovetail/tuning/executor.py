"""Executors: where trials run. A worker process may crash, hang or exhaust memory; that is a failed measurement.

One worker runs one trial at a time, for two that run at once would measure each other. Blocks and the model are written to
files once and loaded by each worker when it first needs them, on this machine or, through the store, on another. What no module has that a worker could import, such as
lambdas and classes of the script that runs, is in these files by value (cloudpickle); classes of equal origin are one class
in a worker, whichever file they come from.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import multiprocessing.spawn as spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._library.custom_ops import CustomOpDef

from dovetail.errors import InvalidArgument
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.cache import precision, restore_precision
from dovetail.lowering.worker_process import describe_exit, die_with_parent, kill_process
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import copy_tensors
from dovetail.tuning.block import Block
from dovetail.tuning.measurement import Measurement
from dovetail.tuning.trial import Trial
from dovetail.tuning.trial_runner import TrialRunner

_Result = TypeVar("_Result")
IN_WORKER = "DOVETAIL_TUNING_WORKER"
"""Set in the environment of worker processes, where `tune` must not start."""
SETUP, MODEL = "setup", "model"
_START_SECONDS = 180.0
_AGAIN_SECONDS = 1.0
_OUTPUTS = itertools.count()
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

    A crash ends the search. A trial that hangs is stopped where `can_interrupt` holds, and only between two steps of Python
    code: not inside of a kernel or a compiler.
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

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:
        if not can_interrupt():
            return self._measure(trial)
        measured = interrupted_after(timeout, lambda: self._measure(trial))
        if measured is None:
            # What the interrupt left half-done is not used again.
            self.restart()
        return measured

    def _measure(self, trial: Trial) -> Measurement:
        if self._runner is None:
            runner = TrialRunner(self._backends, str(self._model.device))
            for block in self._blocks.values():
                runner.load_block(block)
            tuned = self._model
            args, kwargs = copy_tensors((tuned.args, dict(tuned.kwargs)))
            runner.load_model(_copied(tuned.model), args, kwargs, tuned.mode)
            self._runner = runner
        return self._runner.run(trial)

    def restart(self) -> None:
        self._runner = None

    def close(self) -> None:
        self._runner = None


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InvalidArgument(
            f"the model can neither be sent to another process nor be copied: {type(error).__name__}: {error}"
        ) from error


def can_interrupt() -> bool:
    """Return whether a timer can interrupt code that runs here: on the main thread of a POSIX process."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        # A handler that was not set by Python code could not be restored.
        and signal.getsignal(signal.SIGALRM) is not None
    )


def interrupted_after(seconds: float, run: Callable[[], _Result]) -> _Result | None:
    """Return what `run` returns; None if it takes longer, after TimeoutError was raised inside of it.

    The error is raised again every second until `run` ends, for code that catches it may go on. The handler and the timer
    of the process are restored, a timer that ran before with the time that it has left.
    """
    is_running, is_late = True, False

    def stop(number: int, frame: Any) -> None:
        nonlocal is_late
        if is_running:
            is_late = True
            raise TimeoutError(f"it takes longer than {seconds:.3g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    start = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        try:
            result = run()
        finally:
            is_running = False
    except TimeoutError:
        if not is_late:
            raise
        return None
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left - (time.monotonic() - start)), interval)
    # Code that catches errors of trials has caught this one too.
    return None if is_late else result


class WorkerLost(Exception):
    """A worker process has died or was killed; the message is the reason."""


class TrialFiles:
    """A folder with what worker processes load: the setup, the model with its inputs, and blocks by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def setup(self) -> Path:
        return self.folder / SETUP

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    def block(self, key: str) -> Path:
        return self.folder / f"block-{key}"

    def write(
        self, tuned: TunedModel, backends: Sequence[Backend], runner: type[TrialRunner] = TrialRunner
    ) -> None:
        """Write setup and model; raise InvalidArgument for what cannot be sent to a process."""
        self._pickle = _pickle_module()
        what = "the backends"
        try:
            packed = self._pickle.dumps((runner, list(backends)))
            what = "the model"
            self._write((tuned.model, tuned.args, dict(tuned.kwargs), tuned.mode), self.model)
        except Exception as error:
            raise InvalidArgument(
                f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
            ) from error
        setup = {
            "path": list(sys.path),
            "main": _main_script() if self._pickle is pickle else None,
            "threads": torch.get_num_threads(),
            "precision": precision(),
            "device": str(tuned.device),
            "runner": packed,
        }
        self.setup.write_bytes(pickle.dumps(setup))

    def write_block(self, block: Block) -> None:
        path = self.block(block.key)
        if not path.exists():
            self._write(block, path)

    def _write(self, value: Any, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(value, path, pickle_module=self._pickle)


class ProcessExecutor:
    """Runs trials in one worker process, which is started again after it has died; its files are written already.

    `variables` are set in the environment of the process. With `has_spare` a second one, which has imported what it needs
    and loaded nothing, takes the place of the first when that one ends.
    """

    def __init__(
        self, files: TrialFiles, variables: Mapping[str, str] | None = None, *, has_spare: bool = False
    ) -> None:
        self.files, self.variables, self.has_spare = files, dict(variables or {}), has_spare
        self._spare: _Worker | None = None
        self._process: _Worker | None = None

    def check(self, seconds: float = math.inf) -> None:
        """Start the process; raise for a model that cannot be read there, TimeoutError after so many seconds.

        Else that would be the failure of every trial.
        """
        until = time.monotonic() + min(seconds, _START_SECONDS)
        # They import side by side, and before anything is measured.
        spare = _Worker(self.files, self.variables) if self.has_spare else None
        try:
            worker = self._start(until)
            worker.request(("model", None), until)
            worker.loaded.add("")
            if spare is not None:
                spare.request(("ready", None), until)
        except BaseException:
            if spare is not None:
                spare.kill()
            self.restart()
            raise
        self._spare = spare

    def measure(self, trial: Trial, timeout: float) -> Measurement | None:
        start = time.perf_counter()
        try:
            until = time.monotonic() + timeout
            worker = self._process or self._start(until)
            for key in trial.blocks:
                if key not in worker.loaded:
                    worker.request(("block", str(self.files.block(key))), until)
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

    def cancel(self) -> None:
        """Kill the process from another thread: the trial that runs ends as a failure."""
        worker = self._process
        if worker is not None:
            worker.signal()

    def restart(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        self.restart()
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _start(self, until: float) -> _Worker:
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_running:
            spare.kill()
            spare = None
        self._process = spare or _Worker(self.files, self.variables)
        self._process.request(("hello", None), until)
        return self._process


class LocalExecutor(ProcessExecutor):
    """Runs trials in one worker process of this machine, which must start within so many seconds."""

    def __init__(self, model: TunedModel, backends: Sequence[Backend], seconds: float = math.inf) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-tune-")
        super().__init__(TrialFiles(Path(self._folder.name)))
        try:
            self.files.write(model, backends)
            self.check(seconds)
        except BaseException:
            self.close()
            raise

    def add_block(self, block: Block) -> None:
        self.files.write_block(block)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def _pickle_module() -> ModuleType:
    """Return what writes for workers: cloudpickle, or pickle if workers have to import the script that runs.

    A script that has registered operators or types with torch must be imported, for that registers them there too; its
    classes then are those of the import.
    """
    if _script_registers():
        return pickle
    import cloudpickle

    return cloudpickle


def _script_registers() -> bool:
    """Return whether the script that runs has registered operators with torch, or types as containers of tensors."""
    # Operators are registered as long as the script holds one of these.
    holders = (torch.library.Library, CustomOpDef)
    if any(isinstance(value, holders) for value in list(vars(sys.modules["__main__"]).values())):
        return True
    return any(cls.__module__ == "__main__" for cls in pytree.SUPPORTED_NODES)


def _main_script() -> dict[str, Any]:
    """Return how a worker imports the script that runs, as `multiprocessing` does it."""
    data = spawn.get_preparation_data("dovetail-tuning")
    return {name: value for name, value in data.items() if name.startswith("init_main_from")}


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, files: TrialFiles, variables: Mapping[str, str]) -> None:
        self.loaded: set[str] = set()
        self._output = files.folder / f"output{next(_OUTPUTS)}"
        self._connection, theirs = Pipe()
        source = str(Path(__file__).parents[2])
        start = (
            f"import sys; sys.path.insert(0, {source!r}); import {__name__} as worker; "
            f"worker.run_worker(int(sys.argv[1]), sys.argv[2])"
        )
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(theirs.fileno()), str(files.setup)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **variables, IN_WORKER: "1"},
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

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self) -> None:
        """Kill the process and those it has started, and leave the rest to the thread that waits for it."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

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
    # On another machine, what this one has is elsewhere.
    sys.path[:] = [*setup["path"], *(path for path in sys.path if path not in setup["path"])]
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
            if runner is None and kind != "ready":
                if setup["main"] is not None:
                    spawn.prepare(setup["main"])
                runner_class, backends = pickle.loads(setup["runner"])
                runner = cast("TrialRunner", runner_class(backends, setup["device"]))
            if runner is None:
                pass
            elif kind == "block":
                runner.load_block(torch.load(value, weights_only=False))
            elif kind == "model":
                model, args, kwargs, mode = torch.load(Path(setup_path).parent / MODEL, weights_only=False)
                runner.load_model(model, args, kwargs, mode)
            elif kind == "run":
                answer = runner.run(value)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"[:500]
        connection.send((failure, answer))
