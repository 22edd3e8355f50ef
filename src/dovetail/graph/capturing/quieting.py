"""Running torch's tracers without their noise and without touching the global random state."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import warnings
from collections.abc import Generator

import torch


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
