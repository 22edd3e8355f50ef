"""What Inductor needs whatever it compiles for a GPU, started beside other work."""

from __future__ import annotations

import contextlib
import threading
from importlib import import_module

from dovetail.graph.forking import released_by_fork

_LOCK = released_by_fork(threading.Lock())
_STARTED: list[threading.Thread] = []


def warm() -> None:
    """Start the processes that compile kernels, and Triton's driver; once, and without waiting for them.

    Nothing is imported ahead: modules load no sooner for being loaded in a thread beside a capture. Nor is anything
    here needed for correct code: what cannot be done ahead is done by the compiler itself.
    """
    import torch

    if not torch.cuda.is_available():
        return
    with _LOCK:
        if _STARTED:
            return
        _STARTED.append(threading.Thread(target=_start_driver, daemon=True))
    with contextlib.suppress(Exception):
        compiling = import_module("torch._inductor.async_compile").AsyncCompile
        compiling.warm_pool()
        # Until the first job has come back Inductor compiles one kernel after the other by itself.
        compiling.use_process_pool()
    _STARTED[0].start()


def _start_driver() -> None:
    """Let Triton build its driver, for which it runs a C compiler."""
    with contextlib.suppress(Exception):
        _ = import_module("triton.runtime").driver.active.utils
