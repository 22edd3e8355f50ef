"""Forks of the process: what a child must not take over from its parent.

Only the thread that forks goes on in the child. A lock that another one held is never released there, a pool of threads
that compiled code waits for is gone, and a trace that was under way has left torch half patched.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

Lock = TypeVar("Lock")


class Inheritor(Protocol):
    """Something that holds state which a child must not use."""

    def after_fork(self) -> None:
        """Give that up; called in the child, before anything else runs."""
        ...


_LOCKS: WeakSet[Any] = WeakSet()
_INHERITORS: WeakSet[Any] = WeakSet()
_tracing = 0
_forked_while_tracing = False


def released_by_fork(lock: Lock) -> Lock:
    """The lock, free in every child whoever held it when the process was forked."""
    _LOCKS.add(lock)
    return lock


def on_fork(inheritor: Inheritor) -> None:
    """Let an object know, as long as it lives, that it is in a child now."""
    _INHERITORS.add(inheritor)


def keep_for_ever(value: object) -> None:
    """Never destroy an object: what ends threads in its destructor would wait in a child for threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def tracing() -> Generator[None]:
    """Note that a model is being traced: a child that is forked meanwhile cannot trace."""
    global _tracing
    _tracing += 1
    try:
        yield
    finally:
        _tracing -= 1


def forked_while_tracing() -> bool:
    """Whether this process was forked while another thread traced a model."""
    return _forked_while_tracing


def _in_child() -> None:
    global _tracing, _forked_while_tracing
    _forked_while_tracing |= _tracing > 0
    _tracing = 0
    # torch makes its pool of threads anew at the next use. Since torch.export has registered devices that are not there,
    # a first backward starts a thread for each of them, which would make the pool at once and find none.
    torch.set_num_threads(torch.get_num_threads())
    for lock in list(_LOCKS):
        lock._at_fork_reinit()
    for inheritor in list(_INHERITORS):
        inheritor.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep warnings that torch gives about its own inside away from the user; the user's own pass."""
    with warnings.catch_warnings():
        for module in (r"torch(\..*)?$", r"copyreg$", r"transformers(\..*)?$"):
            warnings.filterwarnings("ignore", module=module)
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
        yield


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Keep torch from logging that a trial on tensors without data failed: that is what trials are for."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


@contextlib.contextmanager
def rng_kept() -> Generator[None]:
    """Leave the global random state as it was, Python's and NumPy's too."""
    numpy_random = sys.modules.get("numpy.random")
    host, numpy_state = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(host)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def noise_kept() -> Generator[list[str]]:
    """Collect what torch logs and prints on stderr; shown to the user only if all goes well."""
    kept: list[str] = []
    names = ["", *(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch")]
    handlers = [h for name in names for h in logging.getLogger(name).handlers]
    held: list[tuple[logging.Handler, logging.LogRecord]] = []

    class Hold(logging.Filter):
        def __init__(self, handler: logging.Handler) -> None:
            super().__init__()
            self.handler = handler

        def filter(self, record: logging.LogRecord) -> bool:
            if not record.name.startswith("torch"):
                return True
            kept.append(record.getMessage())
            held.append((self.handler, record))
            return False

    filters = [(handler, Hold(handler)) for handler in handlers]
    real, buffer = sys.stderr, io.StringIO()
    for handler, hold in filters:
        handler.addFilter(hold)
    failed = True
    try:
        with quiet(), contextlib.redirect_stderr(buffer):
            yield kept
        failed = False
    finally:
        for handler, hold in filters:
            handler.removeFilter(hold)
        if failed:
            kept.append(buffer.getvalue())
        else:
            real.write(buffer.getvalue())
            for handler, record in held:
                if record.levelno >= logging.ERROR:
                    handler.handle(record)
