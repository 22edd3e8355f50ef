"""Forks of the process: what a child must not take over from its parent.

Only the thread that forks goes on in the child. A lock that another one held is never released there, a pool of threads
that compiled code waits for is gone, and a trace that was under way has left torch half patched.
"""

from __future__ import annotations

import ctypes
import os
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
