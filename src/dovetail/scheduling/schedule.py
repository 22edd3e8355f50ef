"""Schedules: a model taken apart and changed step by step, each step checked and each one undoable."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dovetail.errors import InvalidArgument, ScheduleError, checked_call
from dovetail.graph.capturing.callables import refuse_scripted
from dovetail.lowering.lower import settle_parts
from dovetail.scheduling.history import History, described
from dovetail.scheduling.installing import is_scheduled
from dovetail.scheduling.part import Part
from dovetail.scheduling.printing import tree
from dovetail.scheduling.recording import Example
from dovetail.scheduling.replaying import replay
from dovetail.scheduling.verifying import Verdict, verify
from dovetail.scheduling.workspace import Done, Workspace

Result = TypeVar("Result")


class Schedule(Part):
    """A model and what was done to it. The model itself changes when `build` is called, and not before."""

    def __init__(self, model: nn.Module, example: Example | None) -> None:
        super().__init__(Workspace(model, example), ("",))

    @property
    def history(self) -> History:
        """What was done, in order; it can be saved, and replayed on another model."""
        work = self._work
        inputs = (
            None if work.example is None else described((tuple(work.example.args), dict(work.example.kwargs)))
        )
        return History([{"do": "schedule", "inputs": inputs}, *work.history] if work.done else [])

    def example(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Schedule:
        """Set the inputs that parts are traced with from now on."""
        self._work.example = _example(args, kwargs)
        return self

    def undo(self, steps: int = 1) -> list[dict[str, Any]]:
        """Take the last steps back and return them."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"undo takes a number of steps, not {steps!r}.")
        if steps > len(self._work.done):
            raise ScheduleError(f"there are {len(self._work.done)} steps, and {steps} are to be undone")
        return self._work.undo(steps)

    def replay(self, history: Iterable[Mapping[str, Any]] | str | Path) -> Schedule:
        """Do the steps of another schedule here, all of them or none; a path or text is loaded first."""
        if not isinstance(history, (Iterable, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"replay takes a history, or the path or text of one, not a {type(history).__name__}."
            )
        steps = History.load(history) if isinstance(history, (str, Path)) else list(history)
        replay(self, self._work, steps)
        return self

    def apply(self, primitive: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a function of the schedule as one step: `primitive(schedule, *args, **kwargs)`."""
        if not callable(primitive):
            raise InvalidArgument(
                f"apply takes a function of the schedule, not a {type(primitive).__name__}."
            )
        label = getattr(primitive, "__qualname__", repr(primitive))
        return self._work.step(
            lambda _: {"do": "apply", "primitive": label},
            lambda: primitive(self, *args, **kwargs),
            is_own=False,
        )

    def build(self) -> nn.Module:
        """The model, run as scheduled: the very modules, of which traced ones have another forward.

        `state_dict`, hooks, parameters and their order are as they were. Steps done later take effect at once;
        `release` gives the model back as it was.
        """
        self._work.installation.put(self._work.state)
        model = self._work.model
        if not model.training:
            settle_parts(
                model, [b for part in self._work.state.graphs.values() for b in part.backends.values()]
            )
        return model

    def release(self) -> nn.Module:
        """The model as it was before it was scheduled."""
        self._work.installation.take()
        return self._work.model

    def verify(self, *, fresh: int = 1, train: bool | None = None) -> Verdict:
        """Compare with the model as it was: results, gradients, buffers and random numbers.

        On the example inputs and on `fresh` others like them. Where something differs, VerificationError names the
        first step that made it so.
        """
        return verify(self._work, fresh=fresh, train=train)

    @contextmanager
    def verifying(self, **options: Any) -> Generator[Schedule]:
        """Verify after each step within; a step that fails is not done."""

        def check(doing: Done) -> None:
            verify(self._work, doing=doing, **options)

        self._work.after.append(check)
        try:
            yield self
        finally:
            self._work.after.remove(check)

    def text(self) -> str:
        """The tree of modules with what was done where, and the graphs of traced parts."""
        return tree(self._work, graphs=True)

    def print(self) -> None:
        """Show the tree of modules with what was done where."""
        print(tree(self._work))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ScheduleError(
            "a schedule belongs to its model and is not copied or pickled. Copy the model, built or not, and replay the "
            "history on it: schedule(copy).replay(s.history)"
        )

    def __str__(self) -> str:
        return tree(self._work)

    def __repr__(self) -> str:
        return f"Schedule({type(self._work.model).__name__}, {len(self._work.done)} steps)"


@checked_call()
def schedule(
    model: nn.Module, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Schedule:
    """A schedule of a model: find its parts, fuse or replace them, and leave the rest as it is.

    `args` and `kwargs` are what the model is called with; parts are traced from a run on them when they are first
    looked into. They may be left out until then.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"schedule takes a module, not a {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        refuse_scripted(model)
    if any(is_scheduled(module) for module in model.modules()):
        raise InvalidArgument("the model is built by a schedule; go on with that one, or `release` it first.")
    return Schedule(
        model, None if args is None and kwargs is None else _example(() if args is None else args, kwargs)
    )


def _example(args: Any, kwargs: Any) -> Example:
    if not isinstance(args, (tuple, list)):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    return Example(tuple(args), dict(kwargs or {}))
