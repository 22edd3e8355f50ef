"""The kinds of trial that `python -m tests.fuzz` does, one after the other."""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from dovetail.errors import CaptureError

from .files import hunt_file
from .generate import FLAVOURS
from .hunt import draw, hunt
from .jobs import Failure, Trial
from .references import check, families

TOO_LONG = 120  # seconds for one program, shrinking included: whatever hangs is a finding too


@dataclass(frozen=True)
class Stage:
    """One kind of trial. `option` says how many there are; `start` is called once in each process.

    `missing` lists what the counts of all trials should have and do not.
    """

    name: str
    option: str
    start: Callable[[Any], Trial]
    missing: Callable[[Mapping[str, int]], list[str]] = lambda counts: []


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


@dataclass
class _Mismatch:
    """A spelling whose match is not what the reference computes."""

    rule: str
    words: str
    times: int = 1

    @property
    def signature(self) -> str:
        return f"reference of {self.rule}"

    @property
    def slug(self) -> str:
        return f"reference_{self.rule}"

    @property
    def script(self) -> str:
        return f"# {'# '.join(self.words.splitlines(keepends=True))}\n"


LEAST_MATCHES = 50


def spellings(options: argparse.Namespace) -> Trial:
    """Random spellings of every rule of the library, each match compared with the reference of its kind."""
    drawn = list(families().values())

    def trial(i: int, counts: Counter[str], known: dict[str, Any]) -> Failure | None:
        family, seed = drawn[i % len(drawn)], f"{options.seed}/{i // len(drawn)}"
        try:
            coverage = check(family, seed)
        except CaptureError:
            counts["refused"] += 1
            return None
        except Exception as error:
            failure = _Mismatch(family.rule, f"{type(error).__name__} at seed {seed!r}: {error}")
            if failure.signature in known:
                known[failure.signature].times += 1
                return None
            return failure
        counts["matches"] += coverage.matches
        counts[f"{family.rule}/"] += coverage.matches
        for variation, count in coverage.variations.items():
            counts[f"{family.rule}/{variation}"] += count
        return None

    return trial


def _uncovered(counts: Mapping[str, int]) -> list[str]:
    """Rules that matched too rarely, and variations of which there was no match, where enough was drawn to tell."""
    if counts.get("matches", 0) < LEAST_MATCHES * len(families()):
        return []
    few = [
        f"{name}: {counts.get(f'{name}/', 0)} matches, not {LEAST_MATCHES}"
        for name in families()
        if counts.get(f"{name}/", 0) < LEAST_MATCHES
    ]
    absent = [
        f"{family.rule}: no match with {variation}"
        for family in families().values()
        for variation in sorted(family.variations)
        if not counts.get(f"{family.rule}/{variation}")
    ]
    return few + absent


STAGES = (
    Stage("programs", "n", programs),
    Stage("spellings", "spellings", spellings, _uncovered),
    Stage("files", "files", files),
)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done after {TOO_LONG} seconds")
