"""What Inductor needs whatever it compiles, loaded beside other work."""

from __future__ import annotations

import contextlib
import threading
from importlib import import_module

_DONE = threading.Event()
_LOCK = threading.Lock()


def warm() -> None:
    """Import the compiler and start its processes; done once, in any thread.

    Nothing here is needed for correct code: what cannot be done ahead is done by the compiler itself.
    """
    with _LOCK:
        if _DONE.is_set():
            return
        with contextlib.suppress(Exception):
            _load()
        _DONE.set()


def _load() -> None:
    import torch

    for name in ("torch._inductor.compile_fx", "torch._inductor.standalone_compile"):
        import_module(name)
    if torch.cuda.is_available():
        # Processes that compile kernels take seconds to start.
        import_module("torch._inductor.async_compile").AsyncCompile.warm_pool()
        import_module("triton.compiler")
