"""Between a call and compiled code: the code whose situation the call is in, made on demand, or the body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dovetail.ir.process_state import on_fork, released_by_fork
from dovetail.ir.tensor_spec import Specialization
from dovetail.ir.weight_guard import Checksums, ContentGuard, write_state
from dovetail.lowering.backend_protocol import Compiled, setting
from dovetail.lowering.compile_region import CompileContext, CompiledRegion, obtain
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.double_backward import TwiceDifferentiable
from dovetail.lowering.failures import LoweringFailure, LoweringFault, fault_of, report
from dovetail.lowering.guards import Fit, Unguardable, autocast_now, fit_for, nothing_noted, specialization_of
from dovetail.lowering.options import compilation_limit
from dovetail.outlining.region import Region

Tell = Callable[[Any], None]


class Entry:
    """One specialisation: code, or the body where there is none, and the calls it is for.

    `dropped` says that its code has raised in a call, whosever it was, and is not to be used by anybody any more.
    """

    __slots__ = ("artefact", "dropped", "fits", "run", "situation")

    def __init__(
        self, situation: Specialization, run: Callable[..., Any], artefact: CompiledRegion | None
    ) -> None:
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
        unit: CompileUnit,
        backends: Sequence[Any],
        workshop: CompileContext,
        tell: Tell,
        *,
        limit: int | None,
        strict: bool,
    ) -> None:
        self.unit, self.backends, self.workshop, self.tell = unit, tuple(backends), workshop, tell
        self.limit, self.strict = limit, strict
        self.body = unit.region.body
        self.entries: dict[Specialization, Entry] = {}
        self._writes = tuple(sorted(unit.effects.writes))
        self._lock = released_by_fork(threading.RLock())
        self._inherited = False
        on_fork(self)
        self._warned = False

    def entry_for(self, situation: Specialization) -> Entry:
        """The specialisation for a situation, made now if there is none."""
        found = self.entries.get(situation)
        if found is None:
            with self._lock:
                found = self.entries.get(situation)
                if found is None:
                    found = self.entries[situation] = self._made(situation)
        return found

    def entry_now(self, situation: Specialization | None = None) -> Entry | None:
        """The specialisation that there is for a situation, else the one that was foreseen; None without any."""
        found = self.entries.get(situation) if situation is not None else None
        return found or next(iter(list(self.entries.values())), None)

    def _made(self, situation: Specialization, after: Any = None) -> Entry:
        """An entry by the first backend that has no trouble; with `after`, by the first of those that come after it."""
        rest = iter(self.backends)
        if after is not None:
            next(backend for backend in rest if backend is after)
        for backend in rest:
            if situation.grad and not setting(backend, "trains"):
                reason = f"autograd cannot go through what '{backend.name}' makes, and gradients are needed"
                self.tell(LoweringFault(self.unit.region.name, backend.name, "gradients", reason))
                continue
            made = obtain(self.unit, backend, situation, self.workshop)
            self.tell(made)
            if isinstance(made, CompiledRegion):
                return Entry(situation, made.run, made)
            if self.strict:
                raise made.raised()
        return Entry(situation, self.body, None)

    def find(self, args: tuple[Any, ...]) -> Entry | None:
        """The specialisation for a call; None if the body is to run."""
        if self._inherited or autocast_now(args) or self.aliased(args):
            return None
        try:
            situation = specialization_of(args)
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
            self.tell(LoweringFault(self.unit.region.name, names, "recompile limit", reason))
            report("limit", reason)


@dataclass(frozen=True, eq=False)
class CallSite:
    """What `Backend.prepare` gets: one call of a region, the code made for it, and the operands of its first call.

    `constants` are the numbers of the operands that are parameters, buffers or constants of the model, or views of
    those. What is prepared is used until one of them is written or replaced; then it is prepared again. Writes that no
    version counter shows are noticed by contents within `weight_check_interval` calls. For that what is prepared is
    taken to copy all constants but those whose numbers are in its attribute `reads_in_place`, if it has one. `notes` is
    for what is to be known when it is prepared again, or in copies and pickles of the graph; all calls of a graph share
    it. `tell` writes a reason into the record.
    """

    name: str
    region: Region
    compiled: Compiled
    operands: tuple[Any, ...]
    constants: frozenset[int]
    notes: dict[str, Any]
    tell: Callable[[str], None]


# It stops a forward that is run again in backward by raising, as soon as all is there that it was run for.
_CHECKPOINTING = "torch.utils.checkpoint"


class Site:
    """Calls compiled code for one region, or its body; it knows its name, and what was prepared for it."""

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
        lifted: tuple[str, ...],
        notes: dict[str, Any] | None = None,
        contents: ContentGuard | None = None,
    ) -> None:
        # Equal bodies share a dispatcher, but each call has constants of its own.
        self.name, self.dispatcher, self.lifted = name, dispatcher, lifted
        self.constants: frozenset[int] = frozenset()
        self.notes = {} if notes is None else notes
        self.__name__ = f"region_{name.replace('/', '__')}"
        # One value, so that a thread never has the guard of one specialisation and the code of another.
        self._first: _First = _NONE
        self._latest: Specialization | None = None
        self._prepared: dict[Entry, tuple[Callable[..., Any], _State]] = {}
        self._contents = ContentGuard(None) if contents is None else contents
        self._checksums: Checksums | None = None
        # Numbers of the constants that some prepared state holds copies of.
        self._copied: frozenset[int] = frozenset()
        self._numbers: tuple[int, ...] = ()
        self._generation = 0

    @property
    def entry(self) -> Entry | None:
        """What runs calls like the last one, or, before there was one, those that were foreseen."""
        return self.dispatcher.entry_now(self._latest)

    def __call__(self, *args: Any, sentinels: Sequence[Tensor] = ()) -> Any:
        """Run the region. The version counters of `sentinels` rise where its constants are written unseen."""
        if torch.compiler.is_compiling() or is_watched():
            return self.dispatcher.body(*args)
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            with torch.profiler.record_function(f"region {self.name}"):
                return self._called(args, sentinels)
        return self._called(args, sentinels)

    def _called(self, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> Any:
        fits, entry, run, state = self._first
        if (
            entry is None
            or entry.dropped
            or not fits(args)
            or (state is not None and self._state(args, sentinels) != state)
            or torch.is_autocast_enabled("cpu")
            or torch.is_autocast_enabled("cuda")
            or self.dispatcher.aliased(args)
        ):
            entry = self.dispatcher.find(args)
            if entry is None:
                return self.dispatcher.body(*args)
            run = self._take(entry, args, sentinels)
        try:
            return run(*args)
        except Exception as error:
            if type(error).__module__ == _CHECKPOINTING:
                raise
            error.add_note(f"in region '{self.name}', lowered by '{entry.backend}'")
            self._first = _NONE
            self._prepared.pop(entry, None)
            return self.dispatcher.failed(entry, error, args)

    def _take(self, entry: Entry, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> Callable[..., Any]:
        """Make an entry the one that is tried first."""
        run, fits, state = entry.run, fit_for(entry.situation, args), None
        prepare = getattr(entry.artefact.backend, "prepare", None) if entry.artefact else None
        if prepare is not None:
            self._numbers = tuple(i for i in sorted(self.constants) if isinstance(args[i], Tensor))
            run, seen = self._prepared.get(entry, (None, None))
            state = self._state(args, sentinels)
            if run is None or seen != state:
                run, state = self._prepare(prepare, entry, args, sentinels)
                self._prepared[entry] = (run, state)
        if entry.artefact and entry.situation.grad and not setting(entry.artefact.backend, "double_backward"):
            run = TwiceDifferentiable(run, self.dispatcher.unit, entry.artefact.backend.name)
        self._first = fits, entry, run, state
        self._latest = entry.situation
        return run

    def _prepare(
        self, prepare: Callable[..., Any], entry: Entry, args: tuple[Any, ...], sentinels: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], _State]:
        """Prepare an entry, and have the contents compared of what it copied; with the state that it is for."""
        constants = self._numbers
        # All before the weights are read: what is written meanwhile is noticed by the next call.
        checksums = {i: Checksums([args[i]]) for i in constants}
        known, copied = self._checksums, self._copied
        if known is not None and known != Checksums.joined(checksums[i] for i in constants if i in copied):
            # Another specialisation has copies of what the weights were.
            self._written()
        state = self._state(args, sentinels)
        run = self._ready(prepare, entry, args)
        in_place = constants if run is entry.run else getattr(run, "reads_in_place", ())
        self._copied = copied | {i for i in constants if i not in in_place}
        if self._copied:
            self._checksums = Checksums.joined(checksums[i] for i in constants if i in self._copied)
            self._contents.watch(self, self._checksums, self._written)
        return run, state

    def _written(self) -> None:
        self._generation += 1

    def _ready(self, prepare: Callable[..., Any], entry: Entry, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What a backend prepares for this call, or its code as it is where that fails."""
        dispatcher = self.dispatcher
        backend = str(entry.backend)
        site = CallSite(
            self.name,
            dispatcher.unit.region,
            entry.run,
            args,
            self.constants,
            self.notes,
            lambda reason: dispatcher.tell(LoweringFault(self.name, backend, "prepare", reason)),
        )
        try:
            made = prepare(site)
            if not callable(made):
                raise LoweringFailure(f"it returned a {type(made).__name__}, not a callable")
        except Exception as error:
            fault = fault_of(self.name, backend, "prepare", error)
            if dispatcher.strict:
                raise fault.raised() from error
            dispatcher.tell(fault)
            return entry.run
        return made

    def _state(self, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> _State:
        """What prepared state holds for: addresses and version counters of the constants, and no write unseen."""
        return self._generation, write_state([*[args[i] for i in self._numbers], *sentinels])


def is_watched() -> bool:
    """Whether a dispatch mode, a transform or forward-mode AD is active: it must see the operations, not one call."""
    transforms: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or transforms.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _never(_: tuple[Any, ...]) -> bool:
    return False


_State = tuple[Any, ...]
_First = tuple[Fit, Entry | None, Callable[..., Any], _State | None]
_NONE: _First = (_never, None, _never, None)
