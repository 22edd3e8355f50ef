"""Compilation in a process of its own, which may crash or hang: one process group per job, killed as a whole."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Backend, backend_class
from dovetail.lowering.cache import Cache, open_cache, precision, restore_precision
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.failures import LoweringFailure
from dovetail.numerics.sample_inputs import fake_inputs
from dovetail.outlining.region import Region

_DEFAULT_TIMEOUT = 1800.0
"""Seconds that a process may take if neither the caller nor the backend sets a timeout: a hang must end."""
_STOP: ContextVar[threading.Event | None] = ContextVar("dovetail_stop", default=None)
_JOB, _RESULT, _FAILURE, _OUTPUT = "job", "result", "failure", "output"


class WorkerFailed(LoweringFailure):
    """A worker process returned no code; `output` is what it printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        if output:
            self.add_note(output)


@dataclass(frozen=True, slots=True)
class Workers:
    """Compiles each job in a new process. `timeout` overrides that of a backend; `cache` is for their tools."""

    timeout: float | None = None
    cache: Cache | None = None

    def __call__(
        self, backend: Backend, unit: CompileUnit, specialization: Specialization
    ) -> Callable[[], bytes]:
        """Pack a job; return a function that runs it and returns the bytes of the backend's `save`."""
        timeout = self.timeout or backend.timeout or _DEFAULT_TIMEOUT
        packed = _pack(backend, unit, specialization, self.cache)
        return lambda: _run(packed, timeout)


# Fields of a region that refer to its body and to the graph around it.
_ATTACHED = ("body", "node", "inputs", "outputs", "backend")


def _pack(backend: Backend, unit: CompileUnit, specialization: Specialization, cache: Cache | None) -> bytes:
    region = unit.region
    detached = {f.name: getattr(region, f.name) for f in fields(region) if f.name not in _ATTACHED}
    call = (detached, [n.name for n in region.inputs], len(region.outputs))
    if backend_class(backend).__module__ == "__main__":
        raise WorkerFailed(
            f"the class {backend_class(backend).__qualname__} is in the script that runs; a process of its own can only "
            "import it from a module"
        )
    parts: list[bytes] = []
    for what, value in (
        ("backend", backend),
        ("specialization", (specialization, call)),
        ("body", region.body),
    ):
        try:
            with warnings.catch_warnings():
                # Meta that cannot be pickled is of no use to a compiler.
                warnings.simplefilter("ignore")
                parts.append(pickle.dumps(value))
        except Exception as error:
            raise WorkerFailed(
                f"its {what} cannot be sent to a process of its own: {type(error).__name__}: {error}"
            ) from error
    folder = None if cache is None else str(cache.folder)
    environment = {"threads": torch.get_num_threads(), "precision": precision(), "cache": folder}
    return pickle.dumps((list(sys.path), environment, parts))


def _run(packed: bytes, timeout: float) -> bytes:
    """Run a job in a new process; none of its processes is left running afterwards."""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        at = Path(folder)
        (at / _JOB).write_bytes(packed)
        with (at / _OUTPUT).open("wb") as output:
            # The path is part of the job; the interpreter must only find dovetail.
            source = str(Path(__file__).parents[2])
            start = f"import sys; sys.path.insert(0, {source!r}); import {__name__} as worker; worker.run_worker(sys.argv[1])"
            process = subprocess.Popen(
                [sys.executable, "-c", start, folder],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            reason = _wait(process, timeout)
        finally:
            kill_process(process)
        if reason is not None:
            raise WorkerFailed(reason, _output(at))
        return _result(at, process.returncode)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> str | None:
    """Wait for a process; return why it has to be killed, or None if it has ended."""
    until, stop = time.monotonic() + timeout, _STOP.get()
    while not _has_ended(process):
        if stop is not None and stop.is_set():
            return "it was cancelled"
        if time.monotonic() > until:
            return f"it took longer than {timeout:g} s and was killed"
        time.sleep(0.02)
    return None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    # Until it is reaped its id is not used again, and killing its group cannot hit another process.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextlib.contextmanager
def cancelled_by(stop: threading.Event) -> Generator[None]:
    """Kill the process that this thread waits for, once `stop` is set."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of a job and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _result(at: Path, code: int) -> bytes:
    failure = at / _FAILURE
    if failure.exists():
        report = json.loads(failure.read_text())
        raise WorkerFailed(report["reason"], report["trace"])
    result = at / _RESULT
    if code == 0 and result.exists():
        return result.read_bytes()
    raise WorkerFailed(f"its process {describe_exit(code)}", _output(at))


def describe_exit(code: int) -> str:
    """Return how a process has ended that left no result."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    return f"ended with status {code} and no result"


def _output(at: Path) -> str:
    with contextlib.suppress(OSError):
        return (at / _OUTPUT).read_text(errors="replace")[-4000:].strip()
    return ""


# What follows runs in the new process.
def run_worker(folder: str) -> None:
    """Run the job in a folder and write the result, or the failure, there."""
    faulthandler.enable()
    at = Path(folder)
    threading.Thread(target=die_with_parent, daemon=True).start()
    try:
        data = _compile((at / _JOB).read_bytes())
        _write(at / _RESULT, data)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        trace = "".join(traceback.format_exception(error))[-4000:]
        _write(at / _FAILURE, json.dumps({"reason": reason, "trace": trace}).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and pools of a compiler must not delay the result.
    os._exit(0)


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def die_with_parent() -> None:
    """Exit once standard input is closed, which happens when the parent process has ended."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _compile(packed: bytes) -> bytes:
    path, environment, parts = pickle.loads(packed)
    sys.path[:] = path
    torch.set_num_threads(environment["threads"])
    restore_precision(environment["precision"])
    cache = open_cache(environment["cache"])
    # The backend comes first: what it imports may define operators that the body calls.
    backend = pickle.loads(parts[0])
    specialization, call = pickle.loads(parts[1])
    region = _region(pickle.loads(parts[2]), *call)
    in_use = cache.in_use() if cache is not None else contextlib.nullcontext()
    with torch.set_grad_enabled(specialization.grad), in_use:
        values = [n.meta.get("val") for n in region.body.graph.nodes if n.op == "placeholder"]
        compiled = backend.compile(region, fake_inputs(specialization, values))
        data = backend.save(compiled)
    if not isinstance(data, bytes):
        raise TypeError(f"`save` returned a {type(data).__name__}, not bytes")
    return data


def _region(body: Any, detached: dict[str, Any], names: list[str], count: int) -> Region:
    """Return the region, called in a graph with nothing else."""
    graph = Graph()
    operands = body.graph.find_nodes(op="placeholder")
    inputs = [graph.create_node("placeholder", name, name=name) for name in names]
    for node, operand in zip(inputs, operands, strict=False):
        node.meta["val"] = operand.meta.get("val")
    node = graph.create_node("call_module", "body", tuple(inputs))
    outputs = [graph.call_function(operator.getitem, (node, i)) for i in range(count)]
    return Region(body=body, node=node, inputs=tuple(inputs), outputs=tuple(outputs), **detached)
