"""One program at a time: draw it, verify it, and if it fails make it small enough to read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from torch.fx import GraphModule

from .capture_properties import verify_capture
from .generate import FLAVOURS
from .plan import draw_case
from .program import Case, NotAProgram
from .properties import Outcome, Violated, verify
from .schedule_properties import verify_schedule
from .script import script
from .shrink import shrink


@dataclass
class FailedCase:
    """A failure, made small."""

    case: Case
    which: str
    words: str
    times: int = 1

    @property
    def signature(self) -> str:
        """What failures of one cause have in common: the property, and the words without names and numbers."""
        return signature(self.which, self.words)

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "_", self.which).strip("_")[:60]

    @property
    def script(self) -> str:
        return script(self.case, self.which, self.words)


def signature(which: str, words: str) -> str:
    if "(" not in which or which.startswith("effects"):
        return which  # two texts or two tensors: the words are the program, not the cause
    words_only = re.sub(r"'[^']*'|\d+|\bv\w*\b", "_", words.splitlines()[0] if words else "")
    words_only = re.sub(r" \(in .*\)", "", words_only)
    return f"{which} {words_only[:80]}".strip()


def draw(rng: Random, flavour: str) -> tuple[Case, GraphModule | None]:
    return draw_case(rng, FLAVOURS[flavour])


def hunt(
    make: Callable[[], tuple[Case, GraphModule | None]],
    counts: Counter[str],
    *,
    known: Mapping[str, FailedCase] | None = None,
    seconds: float = 20.0,
) -> FailedCase | None:
    """Draw and verify one case. What comes back is shrunk, unless its like is `known` already."""
    try:
        case, original = make()
    except NotAProgram:
        counts["not a program"] += 1
        return None
    try:
        outcome = _verified(case, original)
    except NotAProgram:
        counts["not a program"] += 1
    except Violated as violated:
        counts["violated"] += 1
        seen = (known or {}).get(signature(violated.which, violated.words))
        if seen is not None:
            seen.times += 1
            return seen
        return _shrunk(case, violated, seconds)
    else:
        counts["stages"] += outcome.stages
        counts["refused"] += len(outcome.refused)
        counts["with regions"] += bool(outcome.regions)
    return None


def _verified(case: Case, original: GraphModule | None = None) -> Outcome:
    try:
        if case.captures:
            return verify_capture(case)
        return verify_schedule(case) if case.is_model else verify(case, original)
    except (Violated, NotAProgram):
        raise
    except Exception as error:
        raise Violated(f"crash in the properties ({type(error).__name__})", str(error)) from error


def _shrunk(case: Case, violated: Violated, seconds: float) -> FailedCase:
    last = violated

    def fails(candidate: Case) -> bool:
        nonlocal last
        try:
            _verified(candidate)
        except Violated as again:
            if signature(again.which, again.words) == signature(violated.which, violated.words):
                last = again
                return True
        except Exception:  # not a program any more
            return False
        return False

    small = shrink(case, fails, seconds=seconds)
    return FailedCase(small, last.which, last.words)
