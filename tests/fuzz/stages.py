"""The kinds of trial that `python -m tests.fuzz` does, one after the other."""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .files import hunt_file
from .generate import FLAVOURS
from .hunt import draw, hunt
from .jobs import Failure, Trial

TOO_LONG = 120  # seconds for one program, shrinking included: whatever hangs is a finding too


@dataclass(frozen=True)
class Stage:
    """One kind of trial. `option` says how many there are; `start` is called once in each process."""

    name: str
    option: str
    start: Callable[[Any], Trial]


def programs(options: argparse.Namespace) -> Trial:
    """Random programs, outlined, inlined, fused and scheduled."""
    signal.signal(signal.SIGALRM, _give_up)
    drawn = [f for f in FLAVOURS.values() if f.name in (options.flavour or FLAVOURS)]
    names = [f.name for i in range(max(f.share for f in drawn)) for f in drawn if i < f.share]

    def trial(i: int, counts: Counter[str], known: dict[str, Any]) -> Failure | None:
        signal.setitimer(signal.ITIMER_REAL, TOO_LONG)
        try:
            return hunt(
                lambda: draw(Random(f"{options.seed}/{i}"), names[i % len(names)]), counts, known=known
            )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return trial


def files(options: argparse.Namespace) -> Trial:
    """Saved files with something changed in them, which `load` opens or refuses."""
    return lambda i, counts, known: hunt_file(Random(f"{options.seed}/files/{i}"), counts, known)


STAGES = (Stage("programs", "n", programs), Stage("files", "files", files))


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done after {TOO_LONG} seconds")
