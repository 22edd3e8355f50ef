"""Between a call and compiled code: the code whose situation the call is in, made on demand, or the body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dovetail.graph.forking import on_fork, released_by_fork
from dovetail.lowering.artefacts import Artefact, Workshop, obtain
from dovetail.lowering.backend import setting
from dovetail.lowering.diagnostics import report
from dovetail.lowering.faults import Fault, fault_of
from dovetail.lowering.options import compilation_limit
from dovetail.lowering.situation import (
    Fit,
    Situation,
    Unguardable,
    autocast_now,
    fit_for,
    nothing_noted,
    situation_of,
)
from dovetail.lowering.unit import Unit

Tell = Callable[[Any], None]


class Entry:
    """One specialisation: code, or the body where there is none, and the calls it is for.

    `dropped` says that its code has raised in a call, whosever it was, and is not to be used by anybody any more.
    """

    __slots__ = ("artefact", "dropped", "fits", "run", "situation")

    def __init__(self, situation: Situation, run: Callable[..., Any], artefact: Artefact | None) -> None:
        self.situation, self.run, self.artefact, self.dropped = situation, run, artefact, False
        self.fits: Fit = fit_for(situation)

    @property
    def backend(self) -> str | None:
        return None if self.artefact is None else self.artefact.backend.name


class Dispatcher:
    """A body behind guards: compiled code where a call fits it, a new specialisation where it does not.

    Up to the recompile limit specialisations are made; then the body runs. In a child process that was forked later, calls run the
    body. Calls in which another tracer or a dispatch mode looks
    on, in which autocast is on, or in which a written operand shares memory with another one, run the body too.
    """

    def __init__(
        self,
        unit: Unit,
        backends: Sequence[Any],
        workshop: Workshop,
        tell: Tell,
        *,
        limit: int | None,
        strict: bool,
    ) -> None:
        self.unit, self.backends, self.workshop, self.tell = unit, tuple(backends), workshop, tell
        self.limit, self.strict = limit, strict
        self.body = unit.region.body
        self.entries: dict[Situation, Entry] = {}
        self._writes = tuple(sorted(unit.effects.writes))
        self._lock = released_by_fork(threading.RLock())
        self._inherited = False
        on_fork(self)
        self._warned = False

    def entry_for(self, situation: Situation) -> Entry:
        """The specialisation for a situation, made now if there is none."""
        found = self.entries.get(situation)
        if found is None:
            with self._lock:
                found = self.entries.get(situation)
                if found is None:
                    found = self.entries[situation] = self._made(situation)
        return found

    def entry_now(self, situation: Situation | None = None) -> Entry | None:
        """The specialisation that there is for a situation, else the one that was foreseen; None without any."""
        found = self.entries.get(situation) if situation is not None else None
        return found or next(iter(list(self.entries.values())), None)

    def _made(self, situation: Situation, after: Any = None) -> Entry:
        """An entry by the first backend that has no trouble; with `after`, by the first of those that come after it."""
        rest = iter(self.backends)
        if after is not None:
            next(backend for backend in rest if backend is after)
        for backend in rest:
            if situation.grad and not setting(backend, "trains"):
                reason = f"autograd cannot go through what '{backend.name}' makes, and gradients are needed"
                self.tell(Fault(self.unit.region.name, backend.name, "gradients", reason))
                continue
            made = obtain(self.unit, backend, situation, self.workshop)
            self.tell(made)
            if isinstance(made, Artefact):
                return Entry(situation, made.run, made)
            if self.strict:
                raise made.raised()
        return Entry(situation, self.body, None)

    def find(self, args: tuple[Any, ...]) -> Entry | None:
        """The specialisation for a call; None if the body is to run."""
        if self._inherited or autocast_now(args) or self.aliased(args):
            return None
        try:
            situation = situation_of(args)
        except Unguardable:
            return None
        for entry in list(self.entries.values()):
            if not entry.situation.is_static and entry.fits(args):
                return entry
        limit = compilation_limit(self.limit)
        if len(self.entries) >= limit and situation not in self.entries:
            self._warn(limit)
            return None
        with nothing_noted():
            return self.entry_for(situation)

    def after_fork(self) -> None:
        """Run the body from now on. Code of the parent is kept, for its end may wait for threads that are not here."""
        self._inherited = True
        for entry in self.entries.values():
            entry.dropped = True

    def aliased(self, args: tuple[Any, ...]) -> bool:
        """Whether an operand that the body writes shares memory with another one."""
        if not self._writes:
            return False
        places = [a.untyped_storage()._cdata if isinstance(a, Tensor) else -1 for a in args]
        return any(places.count(places[i]) > 1 for i in self._writes)

    def failed(self, entry: Entry, error: Exception, args: tuple[Any, ...]) -> Any:
        """What is done after code has raised in a real call: the body now, and from now on the next backend.

        A call that the body does not take either is the caller's mistake, and the code stays. Where the body writes
        operands or acts on the world it cannot be run after half of that was done, and the error is raised.
        """
        if entry.artefact is None:
            raise error
        backend = entry.artefact.backend
        fault = fault_of(self.unit.region.name, backend.name, "call", error)
        runs_again = not (self._writes or self.unit.effects.world or self.strict)
        made = self.body(*args) if runs_again else None
        with self._lock:
            if self.entries.get(entry.situation) is entry:
                self.tell(fault)
                report(
                    "failed",
                    f"code of '{backend.name}' for region '{self.unit.region.name}' raised in a call and is not used any "
                    f"more: {fault.reason}. The next backend takes its place, or the operations as they are; "
                    f"dovetail.explain(...).lowering has the traceback.",
                )
                if not self.strict:
                    entry.dropped = True
                    self.entries[entry.situation] = self._made(entry.situation, after=backend)
        if not runs_again:
            raise fault.raised()
        return made

    def _warn(self, limit: int) -> None:
        if not self._warned:
            self._warned = True
            reason = (
                f"the recompile limit of {limit} is reached for region '{self.unit.region.name}': calls unlike those it was "
                f"compiled for run it uncompiled. Capture with dynamic_shapes, or raise `recompile_limit`, here or as "
                f"dovetail.config.recompile_limit."
            )
            names = " or ".join(backend.name for backend in self.backends)
            self.tell(Fault(self.unit.region.name, names, "recompile limit", reason))
            report("limit", reason)
