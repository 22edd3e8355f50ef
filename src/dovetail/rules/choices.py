"""What a pattern may leave open: literals to capture, alternatives, optional parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch

from dovetail.errors import DovetailError, InvalidArgument


class Const:
    """The default of a pattern's argument that stands for a literal, to be captured into the region's `attrs`.

    In the pattern it is opaque: it may be handed to operations, not computed with or branched on.
    """

    def __repr__(self) -> str:
        return "Const()"


class ConstMisuse(DovetailError):
    """A pattern computes with or branches on a captured literal; turned into an error that names the rule."""


def _asked_by_torch() -> bool:
    """Whether torch's own Python code looks at the number, as its functions do to check their arguments."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _opaque(name: str) -> Callable[..., Any]:
    plain: Any = getattr(float, name)

    def method(self: Any, *other: Any) -> Any:
        if _asked_by_torch():
            return plain(self, *other)
        if other and isinstance(other[0], torch.Tensor):
            return NotImplemented  # Python asks the number first; a tensor answers for itself
        raise ConstMisuse(
            "a captured literal can only be handed to operations, not computed with or branched on"
        )

    return method


_METHODS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow lt le gt ge eq ne
    neg pos abs bool int round trunc floor ceil
"""
_OPAQUE: dict[str, Any] = {f"__{name}__": _opaque(f"__{name}__") for name in _METHODS.split()}
_OPAQUE["__hash__"] = float.__hash__
_OpaqueFloat = cast("type[float]", type("_OpaqueFloat", (float,), _OPAQUE))


def opaque(value: Any) -> Any:
    """A float that torch takes as a number and that Python code cannot look into; other values as they are."""
    return _OpaqueFloat(value) if type(value) is float else value


class Chooser:
    """Which alternative each `either` of one run of a pattern takes; notes how many there were."""

    def __init__(self, picks: tuple[int, ...]) -> None:
        self.picks = picks
        self.sizes: list[int] = []

    def pick(self, count: int) -> int:
        at = len(self.sizes)
        self.sizes.append(count)
        return self.picks[at] if at < len(self.picks) else 0

    def next(self) -> tuple[int, ...] | None:
        """The picks to run with next, None when every combination was had."""
        picks = [*self.picks, *[0] * (len(self.sizes) - len(self.picks))][: len(self.sizes)]
        while picks:
            if picks[-1] + 1 < self.sizes[len(picks) - 1]:
                picks[-1] += 1
                return tuple(picks)
            picks.pop()
        return None


_CHOOSER: ContextVar[Chooser | None] = ContextVar("chooser", default=None)


@contextmanager
def choosing(chooser: Chooser) -> Generator[Chooser]:
    """Let `either` and `optional` take what `chooser` says."""
    token = _CHOOSER.set(chooser)
    try:
        yield chooser
    finally:
        _CHOOSER.reset(token)


def either(*alternatives: Any) -> Any:
    """In a pattern: any of these values will do. A function is called, without arguments, when it is its turn.

    Outside of matching, when a pattern is called as the function it is, the first one is taken.
    """
    if len(alternatives) < 2:
        raise InvalidArgument("either takes at least two alternatives.")
    chooser = _CHOOSER.get()
    chosen = alternatives[chooser.pick(len(alternatives)) if chooser is not None else 0]
    return chosen() if callable(chosen) else chosen


def optional(value: Any, step: Callable[[Any], Any]) -> Any:
    """In a pattern: `step(value)`, or just `value` where the graph does without the step."""
    return either(lambda: step(value), lambda: value)
