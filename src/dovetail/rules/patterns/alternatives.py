"""What a pattern leaves open: captured literals (`Const`), alternatives (`either`) and optional steps (`optional`).

A pattern is a Python function, so alternatives are explored by running it: a `Chooser` decides at each `either` what the
call returns, and enumerates the combinations like a depth-first search over the decisions of earlier runs. Combinations
multiply; alternatives that agree in dtype and shape are therefore joined into one node of the trace (a packed forest, as in
generalized parsing), and only the others need a run each.
"""

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
    """The default of a pattern's argument that is a literal, to be captured into the region's `attrs`.

    In the pattern it is opaque: it may be passed to operations, not computed with or branched on. An `example` is a
    literal of the right type (a list, for instance), needed where that cannot be found by trying.
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
    """A pattern computes with or branches on a captured literal; converted to a RuleError with the rule's name."""


def _called_by_torch() -> bool:
    """Whether the caller is torch's own Python code, which reads numbers to check arguments."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _opaque_method(name: str) -> Callable[..., Any]:
    original: Any = getattr(float, name)

    def method(self: Any, *other: Any) -> Any:
        if _called_by_torch():
            return original(self, *other)
        if other and isinstance(other[0], torch.Tensor):
            return NotImplemented  # so that Python calls the tensor's reflected method
        raise ConstMisuse(
            "a captured literal can only be passed to operations, not computed with or branched on"
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
    """Return a float that torch accepts as a number and Python code cannot read; other values as they are."""
    return _OpaqueFloat(value) if type(value) is float else value


Site = tuple[int, ...]
"""The address of an `either`: the site and number of the alternative around it, then its index in that alternative."""


class Chooser:
    """Decides which alternative each `either` of one run of a pattern returns.

    A `joint` run evaluates all alternatives of a site and continues with one value that represents them, if they agree
    in dtype and shape. Sites where they do not are `split`: each run takes the one alternative in `picks`. With
    `joint="tried"` nothing is traced, and one alternative represents the others. With `mixed`, floating-point values of
    different precisions are joined too, represented by the widest.
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
        """Reset the sites recorded, for another run."""
        self.split.clear()
        self._met.clear()
        self._prefix = ()

    def choose(self, alternatives: tuple[Any, ...]) -> Any:
        """Return the value of an `either`."""
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
        split_before = dict(self.split)
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
        # Sites inside the alternatives belong to runs that take one of them.
        self.split = split_before
        return None

    def _widest(self, values: list[Any]) -> int | None:
        """Return the index of the value that represents all, None if they differ in dtype (unless mixed) or shape."""
        first = values[0]
        if not all(isinstance(v, torch.Tensor) and v.shape == first.shape for v in values):
            return None
        # These dtype queries are not the pattern's, and must not be recorded as such.
        with torch._C.DisableTorchFunction():
            if all(v.dtype == first.dtype for v in values):
                return 0
            if not self.mixed or not all(v.is_floating_point() for v in values):
                return None
            return max(range(len(values)), key=lambda k: values[k].element_size())

    def next_picks(self) -> dict[Site, int] | None:
        """Return the picks of the next run, None after every combination of split sites."""
        sites = list(self.split)
        while sites:
            last = sites.pop()
            if self.picks.get(last, 0) + 1 < self.split[last]:
                picks = {site: self.picks.get(site, 0) for site in sites}
                picks[last] = self.picks.get(last, 0) + 1
                return picks
        return None

    @property
    def chosen(self) -> dict[Site, int]:
        """The alternative taken at each split site."""
        return {site: self.picks.get(site, 0) for site in self.split}


@functools.cache
def either_op() -> Any:
    """Return the operator that represents joined alternatives in a traced pattern; users' graphs never have it."""

    torch.library.define("dovetail::either", "(Tensor[] alternatives, int[] site, int like) -> Tensor")

    @torch.library.impl("dovetail::either", "CompositeExplicitAutograd")
    def like_one(alternatives: list[torch.Tensor], site: list[int], like: int) -> torch.Tensor:  # pyright: ignore[reportUnusedFunction]
        return torch.empty_like(alternatives[like])

    return torch.ops.dovetail.either.default


_CHOOSER: ContextVar[Chooser | None] = ContextVar("chooser", default=None)


@contextmanager
def choosing(chooser: Chooser) -> Generator[Chooser]:
    """Let `chooser` decide for `either` and `optional`."""
    token = _CHOOSER.set(chooser)
    try:
        yield chooser
    finally:
        _CHOOSER.reset(token)


def either(*alternatives: Any) -> Any:
    """In a pattern: match any of these values. An alternative may be a function without arguments that returns it.

    An alternative that needs an operand which the others do not use must be a function. When a pattern is called as an
    ordinary function, the first alternative is returned.
    """
    if len(alternatives) < 2:
        raise InvalidArgument("either takes at least two alternatives.")
    chooser = _CHOOSER.get()
    if chooser is not None:
        return chooser.choose(alternatives)
    return alternatives[0]() if callable(alternatives[0]) else alternatives[0]


def optional(value: Any, step: Callable[[Any], Any]) -> Any:
    """In a pattern: match `step(value)`, or just `value` where the graph does not have the step."""
    if not callable(step):
        raise InvalidArgument(f"optional takes a value and a function of it, not a {type(step).__name__}.")
    return either(lambda: step(value), lambda: value)
