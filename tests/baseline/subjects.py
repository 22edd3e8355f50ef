"""Everything that is dumped, by name. The entries of a subject are named after it."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator

import torch

from . import models, pipelines, programs, wrong_calls
from .dump import describe, scrubbed

SUBJECTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    **models.SUBJECTS,
    **pipelines.SUBJECTS,
    **wrong_calls.SUBJECTS,
    **programs.SUBJECTS,
}


def chosen(prefix: str) -> list[str]:
    """The subjects that may have entries whose names begin with a prefix, those that take longest first."""
    return [name for name in SUBJECTS if name.startswith(prefix) or prefix.startswith(name)]


def quiet() -> None:
    """Set up a process: one thread, and no warnings, which are no part of what is dumped."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def entries(subject: str) -> dict[str, str]:
    """All entries of a subject. What fails as a whole is an entry too."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)  # programs that switch it off may leave it so
    texts: dict[str, str] = {}
    try:
        for name, text in SUBJECTS[subject]():
            texts[f"{subject}/{name}".rstrip("/")] = scrubbed(text)
    except Exception as error:
        texts[f"{subject}/failed"] = scrubbed(describe(error))
    return texts
