"""State of the process: forks, and what tracing must leave as it was (warnings, logs, random state).

After a fork only the thread that forked runs in the child: a lock that another one held is never released there, a pool of
threads that compiled code waits for does not exist, and a trace in progress has left torch half patched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

Lock = TypeVar("Lock")


class ForkAware(Protocol):
    """An object with state that a child process must not use."""

    def after_fork(self) -> None:
        """Discard that state; called in the child, before anything else runs."""
        ...


_LOCKS: WeakSet[Any] = WeakSet()
_INHERITORS: WeakSet[Any] = WeakSet()
_tracing = 0
_forked_while_tracing = False


def reset_at_fork(lock: Lock) -> Lock:
    """Return the lock, which is released in every child process, even if another thread held it at the fork."""
    _LOCKS.add(lock)
    return lock


def register_after_fork(inheritor: ForkAware) -> None:
    """Call `after_fork` of an object in every child, as long as the object lives."""
    _INHERITORS.add(inheritor)


def make_immortal(value: object) -> None:
    """Never destroy an object: a destructor that joins threads would wait in a child for threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def tracing() -> Generator[None]:
    """Mark that a model is being traced: a child that is forked meanwhile cannot trace."""
    global _tracing
    _tracing += 1
    try:
        yield
    finally:
        _tracing -= 1


def tracing_switches() -> list[Any]:
    """Return global switches of torch that decide which operators are recorded in a trace."""
    sdp = torch.backends.cuda
    return [
        torch.get_default_device(),
        [getattr(sdp, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")],
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch.is_anomaly_enabled(),
    ]


def forked_while_tracing() -> bool:
    """Whether this process was forked while another thread traced a model."""
    return _forked_while_tracing


def _in_child() -> None:
    global _tracing, _forked_while_tracing
    _forked_while_tracing |= _tracing > 0
    _tracing = 0
    # torch creates its pool of threads again at the next use. Since torch.export has registered devices that are not there,
    # a first backward starts a thread for each of them, which would make the pool at once and find none.
    torch.set_num_threads(torch.get_num_threads())
    for lock in list(_LOCKS):
        lock._at_fork_reinit()
    for inheritor in list(_INHERITORS):
        inheritor.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def suppress_torch_warnings() -> Generator[None]:
    """Suppress warnings of torch about its own code; those about the user's code pass."""
    with warnings.catch_warnings():
        for module in (r"torch(\..*)?$", r"copyreg$", r"transformers(\..*)?$"):
            warnings.filterwarnings("ignore", module=module)
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
        yield


@contextlib.contextmanager
def suppress_fake_tensor_log() -> Generator[None]:
    """Suppress torch's log of failures on fake tensors, where failures are expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def get_rng_state(devices: Iterable[torch.device] | None = None) -> dict[str, torch.Tensor]:
    """Return the state of the default generators of the CPU and of `devices`, by default all CUDA devices in use."""
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [torch.device("cuda", i) for i in range(count)]
    states = {str(d): torch.get_device_module(d).get_rng_state(d) for d in devices}
    return {"cpu": torch.get_rng_state(), **states}


def set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    """Set the default generators to states that `get_rng_state` returned."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(name).set_rng_state(state, torch.device(name))


@contextlib.contextmanager
def preserve_rng_state() -> Generator[None]:
    """Restore the global random state at the end, Python's and NumPy's too."""
    numpy_random = sys.modules.get("numpy.random")
    host, numpy_state = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    states = get_rng_state()
    try:
        yield
    finally:
        random.setstate(host)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        set_rng_state(states)


@contextlib.contextmanager
def defer_torch_output() -> Generator[list[str]]:
    """Collect what torch logs and prints to stderr; on success it is printed, on an error the caller decides."""
    messages: list[str] = []
    names = ["", *(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch")]
    handlers = [h for name in names for h in logging.getLogger(name).handlers]
    deferred: list[tuple[logging.Handler, logging.LogRecord]] = []

    def defer(handler: logging.Handler, record: logging.LogRecord) -> bool:
        if not record.name.startswith("torch"):
            return True
        messages.append(record.getMessage())
        deferred.append((handler, record))
        return False

    filters = [(handler, functools.partial(defer, handler)) for handler in handlers]
    real, buffer = sys.stderr, io.StringIO()
    for handler, hold in filters:
        handler.addFilter(hold)
    failed = True
    try:
        with suppress_torch_warnings(), contextlib.redirect_stderr(buffer):
            yield messages
        failed = False
    finally:
        for handler, hold in filters:
            handler.removeFilter(hold)
        if failed:
            messages.append(buffer.getvalue())
        else:
            real.write(buffer.getvalue())
            for handler, record in deferred:
                if record.levelno >= logging.ERROR:
                    handler.handle(record)
