"""Compiling in a process of its own, which may crash or hang: one process group per job, killed whole."""

from __future__ import annotations

import contextlib
import faulthandler
import json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import setting
from dovetail.lowering.cache import Cache, open_cache, precision, set_precision
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.failures import LoweringFailure
from dovetail.numerics.sample_inputs import fake_examples
from dovetail.outlining.region import Region

_PATIENCE = 1800.0
"""Seconds that a process may take where neither the caller nor the backend says: a hang must end some day."""
_STOP: ContextVar[threading.Event | None] = ContextVar("dovetail_stop", default=None)
_JOB, _RESULT, _FAILURE, _SAID = "job", "result", "failure", "said"


class WorkerFailed(LoweringFailure):
    """A process that compiled gave no code; the text says why, and `said` is what it wrote before."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        if said:
            self.add_note(said)


@dataclass(frozen=True, slots=True)
class Workers:
    """Compiles each job in a new process. `timeout` comes before that of a backend; `cache` is for their tools."""

    timeout: float | None = None
    cache: Cache | None = None

    def __call__(self, backend: Any, unit: CompileUnit, situation: Specialization) -> Callable[[], bytes]:
        """Pack a job; calling what is returned runs it and gives the bytes that the backend's `save` made of it."""
        timeout = self.timeout or setting(backend, "timeout") or _PATIENCE
        packed = _packed(backend, unit, situation, self.cache)
        return lambda: _run(packed, timeout)


@dataclass(frozen=True, slots=True)
class _DetachedRegion:
    """What a region is beside its body, without the graph around it."""

    fields: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: int


def _packed(backend: Any, unit: CompileUnit, situation: Specialization, cache: Cache | None) -> bytes:
    region = unit.region
    taken = (
        "kind",
        "version",
        "attrs",
        "nodes",
        "escapes",
        "effects",
        "rule",
        "round",
        "arguments",
        "results",
    )
    fields = {"name": region.name, "backend": None, **{name: getattr(region, name) for name in taken}}
    call = _DetachedRegion(fields, tuple(n.name for n in region.inputs), len(region.outputs))
    if type(backend).__module__ == "__main__":
        raise WorkerFailed(
            f"the class {type(backend).__qualname__} is in the script that runs; a process of its own can only "
            "import it from a module"
        )
    parts: list[bytes] = []
    for what, value in (("backend", backend), ("situation", (situation, call)), ("body", region.body)):
        try:
            with warnings.catch_warnings():
                # Meta that cannot travel is of no use to a compiler.
                warnings.simplefilter("ignore")
                parts.append(pickle.dumps(value))
        except Exception as error:
            raise WorkerFailed(
                f"its {what} cannot be sent to a process of its own: {type(error).__name__}: {error}"
            ) from error
    folder = None if cache is None else str(cache.folder)
    surroundings = {"threads": torch.get_num_threads(), "precision": precision(), "cache": folder}
    return pickle.dumps((list(sys.path), surroundings, parts))


def _run(packed: bytes, timeout: float) -> bytes:
    """Have a job done. Nothing of it is left running afterwards, however it ended."""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        at = Path(folder)
        (at / _JOB).write_bytes(packed)
        with (at / _SAID).open("wb") as said:
            # The path goes with the job; the interpreter must only find dovetail.
            source = str(Path(__file__).parents[2])
            start = (
                f"import sys; sys.path.insert(0, {source!r}); from {__name__} import work; work(sys.argv[1])"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", start, folder],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            reason = _awaited(process, timeout)
        finally:
            _end(process)
        if reason is not None:
            raise WorkerFailed(reason, _said(at))
        return _result(at, process.returncode)


def _awaited(process: subprocess.Popen[bytes], timeout: float) -> str | None:
    """Wait for a process; why it has to be killed, or None where it has ended."""
    until, stop = time.monotonic() + timeout, _STOP.get()
    while not _has_ended(process):
        if stop is not None and stop.is_set():
            return "nobody waits for it any more"
        if time.monotonic() > until:
            return f"it took longer than {timeout:g} s and was killed"
        time.sleep(0.02)
    return None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    # Not reaped, its number stays its own, and killing its group can hit nobody else.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextlib.contextmanager
def stopped_by(stop: threading.Event) -> Generator[None]:
    """Kill the process that this thread waits for, once `stop` is set."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a job: the process, and all that it has started."""
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
        told = json.loads(failure.read_text())
        raise WorkerFailed(told["reason"], told["trace"])
    result = at / _RESULT
    if code == 0 and result.exists():
        return result.read_bytes()
    raise WorkerFailed(f"its process {_ending(code)}", _said(at))


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    return f"ended with status {code} and no result"


def _said(at: Path) -> str:
    with contextlib.suppress(OSError):
        return (at / _SAID).read_text(errors="replace")[-4000:].strip()
    return ""


# What follows runs in the new process.
def work(folder: str) -> None:
    """Do the job that lies in a folder, and put the result, or what went wrong, beside it."""
    faulthandler.enable()
    at = Path(folder)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        data = _done((at / _JOB).read_bytes())
        _write(at / _RESULT, data)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        trace = "".join(traceback.format_exception(error))[-4000:]
        _write(at / _FAILURE, json.dumps({"reason": reason, "trace": trace}).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and pools that a compiler has left must not keep the result waiting.
    os._exit(0)


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def _die_with_parent() -> None:
    """The other end of standard input is closed when the process that asked is gone; nobody wants the code then."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _done(packed: bytes) -> bytes:
    path, surroundings, parts = pickle.loads(packed)
    sys.path[:] = path
    torch.set_num_threads(surroundings["threads"])
    set_precision(surroundings["precision"])
    cache = open_cache(surroundings["cache"])
    # The backend comes first: what it imports may define operators that the body calls.
    backend = pickle.loads(parts[0])
    situation, call = pickle.loads(parts[1])
    region = _region(pickle.loads(parts[2]), call)
    kept = cache.in_use() if cache is not None else contextlib.nullcontext()
    with torch.set_grad_enabled(situation.grad), kept:
        values = [n.meta.get("val") for n in region.body.graph.nodes if n.op == "placeholder"]
        compiled = backend.compile(region, fake_examples(situation, values))
        data = backend.save(compiled)
    if not isinstance(data, bytes):
        raise TypeError(f"`save` returned a {type(data).__name__}, not bytes")
    return data


def _region(body: Any, call: _DetachedRegion) -> Region:
    """The region again, called in a graph that has nothing else."""
    graph = Graph()
    operands = [n for n in body.graph.nodes if n.op == "placeholder"]
    inputs = [graph.create_node("placeholder", name, name=name) for name in call.inputs]
    for node, operand in zip(inputs, operands, strict=False):
        node.meta["val"] = operand.meta.get("val")
    node = graph.create_node("call_module", "body", tuple(inputs))
    outputs = [graph.call_function(_item, (node, i)) for i in range(call.outputs)]
    return Region(body=body, node=node, inputs=tuple(inputs), outputs=tuple(outputs), **call.fields)


def _item(values: Any, number: int) -> Any:
    return values[number]
