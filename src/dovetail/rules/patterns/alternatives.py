"""What a pattern may leave open: literals to capture, alternatives, optional parts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch

from dovetail.errors import DovetailError, InvalidArgument


class Const:
    """The default of a pattern's argument that stands for a literal, to be captured into the region's `attrs`.

    In the pattern it is opaque: it may be handed to operations, not computed with or branched on. An `example`
    shows what kind of literal it is, a list say, where that cannot be found by trying.
    """

    def __init__(self, example: Any = ...) -> None:
        self.example = list(example) if isinstance(example, tuple) else example

    @property
    def has_example(self) -> bool:
        """Whether an example was given."""
        return self.example is not ...

    def __repr__(self) -> str:
        return f"Const({self.example!r})" if self.has_example else "Const()"


class ConstMisuse(DovetailError):
    """A pattern computes with or branches on a captured literal; turned into an error that names the rule."""


def _called_by_torch() -> bool:
    """Whether torch's own Python code looks at the number, as its functions do to check their arguments."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _opaque_method(name: str) -> Callable[..., Any]:
    plain: Any = getattr(float, name)

    def method(self: Any, *other: Any) -> Any:
        if _called_by_torch():
            return plain(self, *other)
        if other and isinstance(other[0], torch.Tensor):
            return NotImplemented  # Python asks the number first; a tensor answers for itself
        raise ConstMisuse(
            "a captured literal can only be handed to operations, not computed with or branched on"
        )

    return method


_FLOAT_METHODS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow lt le gt ge eq ne
    neg pos abs bool int round trunc floor ceil
"""
_OPAQUE_METHODS: dict[str, Any] = {
    f"__{name}__": _opaque_method(f"__{name}__") for name in _FLOAT_METHODS.split()
}
_OPAQUE_METHODS["__hash__"] = float.__hash__
_OpaqueFloat = cast("type[float]", type("_OpaqueFloat", (float,), _OPAQUE_METHODS))


def opaque(value: Any) -> Any:
    """A float that torch takes as a number and that Python code cannot look into; other values as they are."""
    return _OpaqueFloat(value) if type(value) is float else value


Site = tuple[int, ...]
"""Where an `either` is met: its number among those of the alternative it is met in, after the way to that one."""


class Chooser:
    """Which alternative each `either` of one run of a pattern takes.

    A `joint` run evaluates all alternatives of a site and goes on with one value that stands for any of them, as
    long as they agree in dtype and shape. Sites where they do not are `split`: each run takes one alternative there,
    the one in `picks`. Where a run is only `tried`, one of the alternatives stands for the
    others; where it is `mixed`, floats of different precisions are joined too, and the widest stands for all.
    """

    def __init__(
        self,
        picks: Mapping[Site, int] | None = None,
        *,
        joint: bool | Literal["tried"] = False,
        mixed: bool = False,
    ) -> None:
        self.picks = dict(picks or {})
        self.mixed = mixed
        self.joint, self.traced = bool(joint), joint != "tried"
        self.split: dict[Site, int] = {}
        self._prefix: Site = ()
        self._met: dict[Site, int] = {}

    def restart(self) -> None:
        """Forget what was met, for another run."""
        self.split.clear()
        self._met.clear()
        self._prefix = ()

    def take(self, alternatives: tuple[Any, ...]) -> Any:
        """The value of an `either`."""
        number = self._met.get(self._prefix, 0)
        self._met[self._prefix] = number + 1
        site = (*self._prefix, number)
        if self.joint and site not in self.picks:
            joined = self._join(site, alternatives)
            if joined is not None:
                return joined
        if self.joint:
            self.split[site] = len(alternatives)
        k = self.picks.get(site, 0)
        return self._evaluate(site, k, alternatives[k])

    def _evaluate(self, site: Site, k: int, alternative: Any) -> Any:
        if not callable(alternative):
            return alternative
        outer, self._prefix = self._prefix, (*site, k)
        self._met.pop(self._prefix, None)
        try:
            return alternative()
        finally:
            self._prefix = outer

    def _join(self, site: Site, alternatives: tuple[Any, ...]) -> Any:
        values: list[Any] = []
        failed: Exception | None = None
        known = dict(self.split)
        for k, alternative in enumerate(alternatives):
            try:
                values.append(self._evaluate(site, k, alternative))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                failed = error
        if failed is not None and not values:
            raise failed
        widest = self._widest(values) if failed is None else None
        if widest is not None:
            return either_op()(values, list(site), widest) if self.traced else values[widest]
        # What was met inside the alternatives belongs to a run that takes one of them.
        self.split = known
        return None

    def _widest(self, values: list[Any]) -> int | None:
        """The place of the one that can stand for all: they agree in dtype and shape, or may be mixed; None if none."""
        first = values[0]
        if not all(isinstance(v, torch.Tensor) and v.shape == first.shape for v in values):
            return None
        # It is not the pattern that asks for precisions here.
        with torch._C.DisableTorchFunction():
            if all(v.dtype == first.dtype for v in values):
                return 0
            if not self.mixed or not all(v.is_floating_point() for v in values):
                return None
            return max(range(len(values)), key=lambda k: values[k].element_size())

    def next(self) -> dict[Site, int] | None:
        """The picks to run with next, None when every combination of split sites was had."""
        sites = list(self.split)
        while sites:
            last = sites.pop()
            if self.picks.get(last, 0) + 1 < self.split[last]:
                picks = {site: self.picks.get(site, 0) for site in sites}
                picks[last] = self.picks.get(last, 0) + 1
                return picks
        return None

    @property
    def settled(self) -> dict[Site, int]:
        """The alternative that was taken at each split site."""
        return {site: self.picks.get(site, 0) for site in self.split}


@functools.cache
def either_op() -> Any:
    """The operator that stands for a choice in a traced pattern; no graph of a user's has it."""

    torch.library.define("dovetail::either", "(Tensor[] alternatives, int[] site, int like) -> Tensor")

    @torch.library.impl("dovetail::either", "CompositeExplicitAutograd")
    def like_one(alternatives: list[torch.Tensor], site: list[int], like: int) -> torch.Tensor:  # pyright: ignore[reportUnusedFunction]
        return torch.empty_like(alternatives[like])

    return torch.ops.dovetail.either.default


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

    An alternative that needs an operand which the others do without must be a function. Outside of matching, when
    a pattern is called as the function it is, the first one is taken.
    """
    if len(alternatives) < 2:
        raise InvalidArgument("either takes at least two alternatives.")
    chooser = _CHOOSER.get()
    if chooser is not None:
        return chooser.take(alternatives)
    return alternatives[0]() if callable(alternatives[0]) else alternatives[0]


def optional(value: Any, step: Callable[[Any], Any]) -> Any:
    """In a pattern: `step(value)`, or just `value` where the graph does without the step."""
    if not callable(step):
        raise InvalidArgument(f"optional takes a value and a function of it, not a {type(step).__name__}.")
    return either(lambda: step(value), lambda: value)
