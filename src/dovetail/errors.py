"""Every exception dovetail raises: what went wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C")


class DovetailError(Exception):
    """The base class of all exceptions that dovetail raises on purpose."""


class InvalidArgument(DovetailError, ValueError):
    """An argument is invalid by itself, before any graph is read."""


class CaptureError(DovetailError):
    """A model cannot be captured; the message gives the user's source line and what to do."""


class CaptureMismatch(CaptureError):
    """A captured graph does not compute what the model does on the example inputs.

    `what` is the first thing that differs, `module` the path of the first module whose result does; it is empty where no
    inner module is at fault.
    """

    def __init__(self, what: str, *, module: str = "", how: str = "") -> None:
        where = f" The first module whose result differs is '{module}': {how}." if module else ""
        super().__init__(
            f"the captured graph differs from the model on the example inputs: {what}.{where} torch.export may have run "
            f"other code than the model does (torch.compiler.is_compiling(), torch.jit.is_tracing()). Rewrite that "
            f"module, or run the model as it is."
        )
        self.what, self.module = what, module


class CallMismatch(DovetailError):
    """A captured graph is called differently from how it was captured."""


class InvalidGraph(DovetailError):
    """A graph breaks an invariant; `node` is the name of the first node that does."""

    def __init__(self, what: str, node: str | None = None) -> None:
        super().__init__(f"node '{node}': {what}" if node is not None else what)
        self.node = node


class RuleError(DovetailError, ValueError):
    """A rule cannot be made or used; `rule` is its name."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule '{rule}': {what}.")
        self.rule = rule


class LoweringError(DovetailError):
    """A backend's code for a region cannot be used; `region` and `backend` are their names.

    `region` is empty where it is about the graph as a whole.
    """

    def __init__(self, region: str, backend: str, what: str) -> None:
        where = f"region '{region}', " if region else ""
        super().__init__(f"{where}backend '{backend}': {what}.")
        self.region = region
        self.backend = backend


class PassError(DovetailError):
    """A pass violated the contract of passes, or returned an invalid graph; `name` is the pass."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"pass '{name}' {what}.")
        self.name = name


class ScheduleError(DovetailError):
    """A step of a schedule cannot be done; the schedule is as it was."""


class VerificationError(ScheduleError):
    """A scheduled model does not compute what the model did.

    `what` is the first difference, `step` the number of the step that caused it, counted from one, and `entry` that
    step in the history; both are None where no step is at fault.
    """

    def __init__(
        self, message: str, *, what: str, step: int | None = None, entry: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{message}.")
        self.what, self.step, self.entry = what, step, entry


class UnknownPart(ScheduleError):
    """A model has no module at the path that was asked for."""

    def __init__(self, pattern: str, near: Sequence[str]) -> None:
        there = f"There are {_quoted_list(near)}." if near else "The model has no modules in it."
        super().__init__(f"no module matches '{pattern}'. {there}")
        self.pattern = pattern


class SaveError(DovetailError):
    """A graph cannot be written to a file, which is unchanged; `node` is the name of the node at fault, if any."""

    def __init__(self, what: str, node: str | None = None) -> None:
        super().__init__(f"node '{node}': {what}" if node is not None else what)
        self.node = node


class InvalidFile(DovetailError):
    """A file is not one that dovetail wrote, or not whole, or of a newer version; `path` is what was given."""

    def __init__(self, path: object, what: str) -> None:
        super().__init__(f"'{path}' {what}")
        self.path = path


class PlanMismatch(DovetailError):
    """A plan does not fit a model, or not as it did when the plan was made; `problems` has what changed, each in words."""

    def __init__(self, problems: Iterable[str], advice: str = "Tune the model again.") -> None:
        self.problems = tuple(problems)
        shown = "".join(f"\n- {problem}" for problem in self.problems[:_MOST_PROBLEMS])
        more = len(self.problems) - _MOST_PROBLEMS
        super().__init__(
            f"the plan does not fit the model:{shown}{f'{chr(10)}and {more} more.' if more > 0 else ''}\n{advice}"
        )


class BundleMismatch(DovetailError):
    """A bundle does not fit this process or model; `problems` has what differs, each in words."""

    def __init__(self, path: object, problems: Iterable[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        shown = "".join(f"\n- {problem}" for problem in self.problems[:_MOST_PROBLEMS])
        more = len(self.problems) - _MOST_PROBLEMS
        super().__init__(
            f"the bundle '{path}' does not fit:{shown}{f'{chr(10)}and {more} more.' if more > 0 else ''}\n"
            f"Compile the model here and write another bundle."
        )


_MOST_PROBLEMS = 20


class StoreError(DovetailError):
    """A store of measurements cannot be opened, read or written; `store` is its path, or its URL without credentials."""

    def __init__(self, store: str, what: str) -> None:
        super().__init__(f"the store '{store}' {what}.")
        self.store = store


class TuningError(DovetailError):
    """No program of a model could be measured, not even the model as it is."""


class RegionError(DovetailError):
    """A region cannot be outlined, found or inlined; nothing was changed."""


class UnknownNode(RegionError):
    """A node or name is not in this graph, or is not an operation; `nodes` are the names."""

    def __init__(self, what: str, nodes: Iterable[str], advice: str = "") -> None:
        self.nodes = tuple(nodes)
        super().__init__(f"{what}: {_quoted_list(self.nodes)}.{' ' + advice if advice else ''}")


class UnknownRegion(RegionError):
    """A graph has no region of the name or kind that was asked for."""

    def __init__(self, what: str, known: Sequence[str], name: str | None = None) -> None:
        has = f"It has {_quoted_list(known)}." if known else "It has no regions."
        hint = "" if name is None else did_you_mean(name, known)
        super().__init__(f"{what}. {has}{' ' + hint if hint else ''}")


class EmptyRegion(RegionError):
    """A region would have no operation left to compute."""

    def __init__(self, region: str, why: str) -> None:
        super().__init__(f"region '{region}' has nothing to compute: {why}. List at least one operation.")


class OverlappingRegions(RegionError):
    """Two requests claim the same operations; `nodes` are their names."""

    def __init__(self, first: str, second: str, nodes: Iterable[str]) -> None:
        self.nodes = tuple(nodes)
        super().__init__(
            f"regions '{first}' and '{second}' both claim {_quoted_list(self.nodes)}. "
            f"Give each operation to one of them, or outline one after the other to nest them."
        )


class CyclicRegion(RegionError):
    """A region's inputs would depend on its outputs; `path` leads out of it and back in."""

    def __init__(self, region: str, path: Sequence[str]) -> None:
        self.path = tuple(path)
        inner = self.path[1:-1]
        todo = (
            f" Take '{inner[0]}' in, or leave '{self.path[-1]}' out."
            if inner
            else f" Leave '{self.path[-1]}' out."
        )
        super().__init__(f"region '{region}' would depend on itself: {' -> '.join(self.path)}.{todo}")


class EscapingValue(RegionError):
    """A value that is also used outside may not escape the region; `users` are the nodes that use it."""

    def __init__(self, region: str, value: str, users: Iterable[str]) -> None:
        self.value, self.users = value, tuple(users)
        super().__init__(
            f"region '{region}': '{value}' is also used outside, by {_quoted_list(self.users)}. "
            f"Allow it with escapes='output' or 'duplicate', or take its users in."
        )


class EffectOrder(RegionError):
    """A region would move the effect `second` before `first`; `path` is the chain of dependencies that forces it."""

    def __init__(self, region: str, first: str, second: str, why: str, path: Sequence[str]) -> None:
        self.first, self.second, self.path = first, second, tuple(path)
        super().__init__(
            f"region '{region}' would reorder effects: '{first}' must stay before '{second}' ({why}), "
            f"but the region would need {' -> '.join(self.path)}. "
            f"Take what lies between in, or leave '{self.path[0]}' or '{self.path[-1]}' out."
        )


def _quoted_list(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def nearest(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the known names most similar to a name, best first; case and underscores do not count."""
    folded: dict[str, str] = {}
    for one in sorted(known, key=lambda n: (len(n), sum(x != y for x, y in zip(n, name, strict=False)))):
        folded.setdefault(_folded(one), one)
    return [folded[near] for near in difflib.get_close_matches(_folded(name), folded, n=most, cutoff=cutoff)]


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return "Did you mean" with the known names most similar to an unknown one, `otherwise` if none is similar."""
    near = " or ".join(f"'{one}'" for one in nearest(name, known))
    return f"Did you mean {near}?" if near else otherwise


def misspelled(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a name is certainly a misspelling of; None where it may be a name of its own.

    It differs by case and underscores, or in one letter that was swapped with its neighbor, left out or added or, in a
    long name, exchanged. Names that differ in a digit are different names.
    """
    own = _folded(name)
    best: tuple[int, str] | None = None
    for one in sorted(known, key=lambda n: (len(n), n)):
        edit = _edit(own, _folded(one))
        if edit is not None and (best is None or edit < best[0]):
            best = edit, one
    return None if best is None else best[1]


def _edit(a: str, b: str) -> int | None:
    """Return 0 for equal words, 1 for neighbors swapped, 2 for a letter added, 3 for one exchanged; None otherwise."""
    if a == b:
        return 0
    if abs(len(a) - len(b)) > 1 or len(a) < 4:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if (a[at : at + 1] + b[at : at + 1]).isdigit():
        return None
    if len(a) == len(b):
        if a[at : at + 2] == b[at : at + 2][::-1] and a[at + 2 :] == b[at + 2 :]:
            return 1
        return 3 if len(a) > 5 and a[at + 1 :] == b[at + 1 :] else None
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    return 2 if len(longer) > 4 and longer[at + 1 :] == shorter[at:] and not longer[at].isdigit() else None


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def user_stacklevel(*others: str) -> int:
    """Return the `stacklevel` of a warning issued by the caller that shows the first line outside of dovetail.

    `others` are packages that are skipped like dovetail.
    """
    frame, level = inspect.currentframe(), 0
    # The code of FX graphs has no module.
    skipped = ("dovetail", "", *others)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
        frame, level = frame.f_back, level + 1
    return max(level, 1)


def checked_call(**replaced: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function raise InvalidArgument for a call that does not fit its signature, with what fits.

    `replaced` has keywords of other functions, each with what this one has instead.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                what = _wrong_call(function.__qualname__, signature, kwargs, replaced, str(error))
                raise InvalidArgument(what) from None
            return function(*args, **kwargs)

        return checked

    return decorate


def checked_init(**replaced: str) -> Callable[[type[_C]], type[_C]]:
    """Do the same for the constructor of a class."""

    def decorate(cls: type[_C]) -> type[_C]:
        def without_arguments(self: object) -> None:
            pass

        without_arguments.__qualname__ = f"{cls.__qualname__}.__init__"
        target: Any = cls
        own = without_arguments if target.__init__ is object.__init__ else target.__init__
        target.__init__ = checked_call(**replaced)(own)
        return cls

    return decorate


_RENAMED = {"specialisations": "recompile_limit"}


def _wrong_call(
    name: str, signature: inspect.Signature, kwargs: dict[str, Any], replaced: dict[str, str], error: str
) -> str:
    name = name.removesuffix(".__init__")
    names = [p.name for p in signature.parameters.values() if p.name != "self"]
    unknown = next((k for k in kwargs if k not in names), None)
    if unknown is None:
        parameters = [p.replace(annotation=p.empty) for n, p in signature.parameters.items() if n != "self"]
        shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
        return f"{name}: {error}. It is called as {name}{shown}."
    instead = replaced.get(unknown)
    if instead is None and _RENAMED.get(unknown) in names:
        instead = _RENAMED[unknown]
    if instead is not None:
        return f"{name} has no argument '{unknown}'; give {instead}."
    arguments = f"Its arguments are {', '.join(names)}." if names else "It takes none."
    return f"{name} has no argument '{unknown}'. {did_you_mean(unknown, names, otherwise=arguments)}"
