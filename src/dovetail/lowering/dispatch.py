"""Dispatch of a region's calls: the code specialized for the call, compiled on demand, or the body."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.ir.guard_code import Guard
from dovetail.ir.nodes import storage_key
from dovetail.ir.process_state import register_after_fork, reset_at_fork
from dovetail.ir.profiler_ranges import is_traced, range_label
from dovetail.ir.tensor_spec import Specialization
from dovetail.ir.weight_fetch import WeightFetch, mutation_stamp
from dovetail.ir.weight_guard import Checksums, ContentGuard
from dovetail.lowering.backend_protocol import Backend, CallSite
from dovetail.lowering.compile_region import (
    Compilation,
    CompileContext,
    CompiledRegion,
    begin_compilation,
    compile_region,
)
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.double_backward import TwiceDifferentiable
from dovetail.lowering.failures import LoweringFailure, LoweringFault, fault_of, report, report_fault
from dovetail.lowering.guards import (
    Unguardable,
    autocast_for,
    make_guard,
    make_operand_guard,
    specialization_of,
    suspend_saved_tensor_hooks,
)
from dovetail.lowering.options import recompile_limit_of

Record = Callable[[CompiledRegion | LoweringFault], None]


class SpecializedEntry:
    """One specialization of a body: its guard, and compiled code, or the body itself if no backend compiles it.

    `invalid` is set once the code has raised in a call of any site; it is not used again.
    """

    __slots__ = ("compiled", "guard", "invalid", "run", "specialization")

    def __init__(
        self, specialization: Specialization, run: Callable[..., Any], compiled: CompiledRegion | None
    ) -> None:
        self.specialization, self.run, self.compiled, self.invalid = specialization, run, compiled, False
        self.guard: Guard = make_guard(specialization)

    @property
    def backend(self) -> str | None:
        return None if self.compiled is None else self.compiled.backend.name


class Dispatcher:
    """The specializations of one body, shared by all regions with an equal body.

    A call that no specialization covers compiles a new one, up to the recompile limit; after that the body runs. The
    body also runs in a forked child process, while another tracer or a dispatch mode is active, under autocast, and if
    an operand that the body writes shares memory with another one.
    """

    def __init__(
        self,
        unit: CompileUnit,
        backends: Sequence[Backend],
        context: CompileContext,
        record: Record,
        *,
        limit: int | None,
        strict: bool,
    ) -> None:
        self.unit, self.backends, self.context, self.record = unit, tuple(backends), context, record
        self.limit, self.strict = limit, strict
        self.body = unit.region.body
        self.entries: dict[Specialization, SpecializedEntry] = {}
        self._begun: dict[Specialization, Compilation] = {}
        self.writes = tuple(sorted(unit.effects.writes))
        self._lock = reset_at_fork(threading.RLock())
        self._is_forked = False
        register_after_fork(self)
        self._reported: set[str] = set()

    def begin(self, specialization: Specialization) -> bool:
        """Start to compile for a specialization, where the first backend can; return whether that has not failed."""
        if specialization in self.entries or specialization in self._begun:
            return True
        backend = next((b for b in self.backends if b.trains or not specialization.grad), None)
        if backend is None:
            return True
        begun = begin_compilation(self.unit, backend, specialization, self.context)
        if begun is not None:
            self._begun[specialization] = begun
        return begun is None or begun.error is None

    def entry_for(self, specialization: Specialization) -> SpecializedEntry:
        """Return the entry of a specialization, compiled now if there is no entry yet."""
        entry = self.entries.get(specialization)
        if entry is None:
            with self._lock:
                entry = self.entries.get(specialization)
                if entry is None:
                    entry = self.entries[specialization] = self._compile_entry(specialization)
        return entry

    def current_entry(self, specialization: Specialization | None = None) -> SpecializedEntry | None:
        """Return the entry of a specialization, else the first one; None without any."""
        entry = self.entries.get(specialization) if specialization is not None else None
        return entry or next(iter(list(self.entries.values())), None)

    def _compile_entry(
        self, specialization: Specialization, after: Backend | None = None
    ) -> SpecializedEntry:
        """Compile by the first backend that succeeds; with `after`, by the first of those that come after it."""
        backends = iter(self.backends)
        if after is not None:
            next(backend for backend in backends if backend is after)
        begun = self._begun.pop(specialization, None)
        without_gradients: list[LoweringFault] = []
        for backend in backends:
            if specialization.grad and not backend.trains:
                reason = f"autograd cannot go through code of '{backend.name}', and gradients are needed"
                without_gradients.append(
                    LoweringFault(self.unit.region.name, backend.name, "gradients", reason)
                )
                self.record(without_gradients[-1])
                continue
            of_backend = begun if begun is not None and begun.backend is backend else None
            result = compile_region(self.unit, backend, specialization, self.context, of_backend)
            self.record(result)
            if isinstance(result, CompiledRegion):
                return SpecializedEntry(specialization, result.run, result)
            if self.strict:
                raise result.as_error()
            report_fault(result)
        # The next backend of a list is meant to take what one cannot train; without one, the region is not compiled.
        for fault in without_gradients:
            report_fault(fault)
        return SpecializedEntry(specialization, self.body, None)

    def lookup(self, args: tuple[Any, ...]) -> SpecializedEntry | None:
        """Return the entry for a call; None if the body must run."""
        reason = self._why_uncompiled(args)
        if reason is not None:
            self._report_uncompiled(reason)
            return None
        try:
            specialization = specialization_of(args)
        except Unguardable as error:
            self._report_uncompiled(f"its operands cannot be guarded ({error})")
            return None
        for entry in list(self.entries.values()):
            if not entry.specialization.is_static and entry.guard(args):
                return entry
        limit = recompile_limit_of(self.limit)
        if len(self.entries) >= limit and specialization not in self.entries:
            self._warn_of_limit(limit)
            return None
        with suspend_saved_tensor_hooks():
            return self.entry_for(specialization)

    def after_fork(self) -> None:
        """Run the body from now on. The parent's code is kept: releasing it may wait for threads that are not here."""
        self._is_forked = True
        for entry in self.entries.values():
            entry.invalid = True

    def has_aliased_writes(self, args: tuple[Any, ...]) -> bool:
        """Return whether an operand that the body writes shares memory with another one."""
        if not self.writes:
            return False
        storages = [storage_key(a) if isinstance(a, Tensor) else -1 for a in args]
        return any(storages.count(storages[i]) > 1 for i in self.writes)

    def recover(self, entry: SpecializedEntry, error: Exception, args: tuple[Any, ...]) -> Any:
        """Run the body after code has raised in a call, and use the next backend from now on.

        If the body raises too, the call is at fault and the code stays. Where the body writes operands or has an
        effect on the host it cannot run after a part of that was done, and the error is raised.
        """
        if entry.compiled is None:
            raise error
        backend = entry.compiled.backend
        fault = fault_of(self.unit.region.name, backend.name, "call", error)
        can_rerun = not (self.writes or self.unit.effects.host_effect or self.strict)
        result = self.body(*args) if can_rerun else None
        with self._lock:
            if self.entries.get(entry.specialization) is entry:
                self.record(fault)
                report(
                    "failed",
                    f"code of '{backend.name}' for region '{self.unit.region.name}' raised in a call and is not used any "
                    f"more: {fault.reason}. The next backend takes its place, or the operations as they are; "
                    f"dovetail.explain(...).lowered has the reason.",
                )
                if not self.strict:
                    entry.invalid = True
                    self.entries[entry.specialization] = self._compile_entry(entry.specialization, backend)
        if not can_rerun:
            raise fault.as_error()
        return result

    def _why_uncompiled(self, args: tuple[Any, ...]) -> str | None:
        if self._is_forked:
            return "the process was forked after it was compiled; start worker processes by spawn"
        if autocast_for(args):
            return "autocast is active, and it was captured without it; capture the model under autocast"
        if self.has_aliased_writes(args):
            return "an operand that it writes shares memory with another one"
        return None

    def _report_uncompiled(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            report("uncompiled", f"region '{self.unit.region.name}' runs uncompiled in calls where {reason}.")

    def _warn_of_limit(self, limit: int) -> None:
        if "limit" not in self._reported:
            self._reported.add("limit")
            reason = (
                f"the recompile limit of {limit} is reached for region '{self.unit.region.name}': calls unlike those it was "
                f"compiled for run it uncompiled. Capture with dynamic_shapes, or raise `recompile_limit`, here or as "
                f"dovetail.config.recompile_limit."
            )
            names = " or ".join(backend.name for backend in self.backends)
            self.record(LoweringFault(self.unit.region.name, names, "recompile limit", reason))
            report("limit", reason)


_NO_PROFILE = contextlib.nullcontext()
# Checkpointing stops a forward that is recomputed in backward by raising, as soon as all is there that it needs.
_CHECKPOINTING = "torch.utils.checkpoint"
_Stamp = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class SelectedCode:
    """The code for calls that pass a guard, and the state of the weights that it was prepared for."""

    guard: Guard
    entry: SpecializedEntry
    run: Callable[..., Any]
    stamp: _Stamp | None


class DispatchedCall:
    """One call of a region in a lowered graph: calls compiled code or the body, and holds what was prepared for it."""

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
        # One value, so that a thread never has the guard of one specialization and the code of another.
        self._latest: SelectedCode | None = None
        self._specialization: Specialization | None = None
        self._prepared: dict[SpecializedEntry, tuple[Callable[..., Any], _Stamp]] = {}
        self._contents = ContentGuard(None) if contents is None else contents
        self._checksums: Checksums | None = None
        # Constants that prepared code holds copies of, and those that are tensors, by position.
        self._copied: frozenset[int] = frozenset()
        self._tensor_constants: tuple[int, ...] = ()
        self._stamped: Callable[[tuple[Any, ...]], Sequence[Tensor]] = _no_tensors
        # How often contents of weights turned out to differ from those that code was prepared with.
        self.generation = 0

    @property
    def entry(self) -> SpecializedEntry | None:
        """The entry that runs calls like the last one, or the first one compiled before there was a call."""
        return self.dispatcher.current_entry(self._specialization)

    def __call__(self, *args: Any, sentinels: Sequence[Tensor] = ()) -> Any:
        """Run the region. The version counters of `sentinels` rise where its constants are written without their own."""
        if torch.compiler.is_compiling() or is_traced():
            return self.dispatcher.body(*args)
        with self.profiled():
            return self.dispatch(args, sentinels)

    def profiled(self) -> AbstractContextManager[Any]:
        """Return a context that puts the region's name into a profile, if one is taken."""
        is_on = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        label = range_label(self.dispatcher.unit.region.kind, self.name)
        return torch.profiler.record_function(label) if is_on else _NO_PROFILE

    def with_weights(
        self, fetch: WeightFetch, operands: Mapping[int, int], sentinels: Sequence[int]
    ) -> Callable[..., Any]:
        """Return this call with the weights of one program, fetched together."""
        return _CallWithWeights(self, fetch, operands, sentinels)

    def dispatch(self, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> Any:
        """Run a call that no tracer sees."""
        code = self.code_for(args, sentinels)
        return self.dispatcher.body(*args) if code is None else self.run(code.entry, code.run, args)

    def code_for(self, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> SelectedCode | None:
        """Return the code for a call, compiled and prepared now where it has to be; None if the body must run."""
        latest = self._latest
        if (
            latest is not None
            and not latest.entry.invalid
            and latest.guard(args)
            and (latest.stamp is None or self._stamp(args, sentinels) == latest.stamp)
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_autocast_enabled("cuda")
            and not self.dispatcher.has_aliased_writes(args)
        ):
            return latest
        entry = self.dispatcher.lookup(args)
        return None if entry is None else self._select(entry, args, sentinels)

    def run(self, entry: SpecializedEntry, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the code of an entry; if it raises, the body, unless that must not run then."""
        try:
            return run(*args)
        except Exception as error:
            if type(error).__module__ == _CHECKPOINTING:
                raise
            error.add_note(f"in region '{self.name}', lowered by '{entry.backend}'")
            self._latest = None
            self._prepared.pop(entry, None)
            return self.dispatcher.recover(entry, error, tuple(args))

    def _select(
        self, entry: SpecializedEntry, args: tuple[Any, ...], sentinels: Sequence[Tensor]
    ) -> SelectedCode:
        """Make an entry the one whose guard is checked first, and return the code that runs it."""
        run, guard, stamp = entry.run, make_guard(entry.specialization, args), None
        backend = entry.compiled.backend if entry.compiled else None
        if backend is not None and backend.implements("prepare"):
            self._tensor_constants = tuple(i for i in sorted(self.constants) if isinstance(args[i], Tensor))
            self._stamped = _items(self._tensor_constants)
            run, prepared_for = self._prepared.get(entry, (None, None))
            stamp = self._stamp(args, sentinels)
            if run is None or prepared_for != stamp:
                run, stamp = self._prepare(backend, entry, args, sentinels)
                self._prepared[entry] = (run, stamp)
        if backend is not None and entry.specialization.grad and not backend.double_backward:
            run = TwiceDifferentiable(run, self.dispatcher.unit, backend.name)
        self._latest = selected = SelectedCode(guard, entry, run, stamp)
        self._specialization = entry.specialization
        return selected

    def _prepare(
        self, backend: Backend, entry: SpecializedEntry, args: tuple[Any, ...], sentinels: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], _Stamp]:
        """Prepare an entry and watch the contents of the weights it copied; return it with the stamp it holds for."""
        constants = self._tensor_constants
        # All before the weights are read: what is written meanwhile is noticed by the next call.
        checksums = {i: Checksums([args[i]]) for i in constants}
        known, copied = self._checksums, self._copied
        if known is not None and known != Checksums.joined(checksums[i] for i in constants if i in copied):
            # Another specialization has copies of what the weights were.
            self._invalidate()
        stamp = self._stamp(args, sentinels)
        run = self._prepared_code(backend, entry, args)
        in_place = constants if run is entry.run else getattr(run, "reads_in_place", ())
        self._copied = copied | {i for i in constants if i not in in_place}
        if self._copied:
            self._checksums = Checksums.joined(checksums[i] for i in constants if i in self._copied)
            self._contents.watch(self, self._checksums, self._invalidate)
        return run, stamp

    def _invalidate(self) -> None:
        self.generation += 1

    def _prepared_code(
        self, backend: Backend, entry: SpecializedEntry, args: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Return what a backend prepares for this call, or its code as it is if that fails."""
        dispatcher = self.dispatcher

        def record(reason: str) -> None:
            dispatcher.record(LoweringFault(self.name, backend.name, "prepare", reason))

        region = dispatcher.unit.region
        site = CallSite(self.name, region, entry.run, args, self.constants, self.notes, record)
        try:
            prepared = backend.prepare(site)
            if not callable(prepared):
                raise LoweringFailure(f"it returned a {type(prepared).__name__}, not a callable")
        except Exception as error:
            fault = fault_of(self.name, backend.name, "prepare", error)
            if dispatcher.strict:
                raise fault.as_error() from error
            dispatcher.record(fault)
            report_fault(fault)
            return entry.run
        return prepared

    def _stamp(self, args: tuple[Any, ...], sentinels: Sequence[Tensor]) -> _Stamp:
        """Return what prepared code holds for: addresses and version counters of the constants, and their contents."""
        constants = self._stamped(args)
        return self.generation, mutation_stamp((*constants, *sentinels) if sentinels else constants)


@dataclass(frozen=True, slots=True)
class _KnownCall:
    """The code for calls with these weights whose other operands pass a guard; `operands` has the weights in place."""

    weights: tuple[Any, ...]
    guard: Guard
    entry: SpecializedEntry
    run: Callable[..., Any]
    generation: int
    operands: list[Any]


class _CallWithWeights:
    """A call of a region in one program, which takes the program's weights as the tuple that they were fetched in.

    The same tuple as in the last call means that nothing about the weights has changed: then only the other operands
    are compared.
    """

    def __init__(
        self, site: DispatchedCall, fetch: WeightFetch, operands: Mapping[int, int], sentinels: Sequence[int]
    ) -> None:
        self._site, self._fetch = site, fetch
        self._operands, self._sentinels = dict(operands), tuple(sentinels)
        self.__name__ = site.__name__
        self._others: tuple[int, ...] = ()
        self._last_weights: tuple[Any, ...] | None = None
        # One value, so that threads see it whole.
        self._known: _KnownCall | None = None

    def __call__(self, *args: Any, weights: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling() or is_traced():
            return self._site.dispatcher.body(*self._with_weights(args, weights))
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            with self._site.profiled():
                return self._dispatch(args, weights)
        return self._dispatch(args, weights)

    def _dispatch(self, args: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
        known = self._known
        if (
            known is None
            or weights is not known.weights
            or known.entry.invalid
            or known.generation != self._site.generation
            or not known.guard(args)
            or torch.is_autocast_enabled("cpu")
            or torch.is_autocast_enabled("cuda")
        ):
            return self._dispatch_unknown(args, weights)
        operands = known.operands.copy()
        for i, value in zip(self._others, args):  # noqa: B905 (the guard has counted them)
            operands[i] = value
        return self._site.run(known.entry, known.run, operands)

    def _dispatch_unknown(self, args: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
        site, operands = self._site, self._with_weights(args, weights)
        code = site.code_for(operands, tuple([weights[i] for i in self._sentinels]))
        if code is None:
            return site.dispatcher.body(*operands)
        # Weights that are written between calls are another tuple each time.
        if weights is self._last_weights and not site.dispatcher.writes:
            self._keep(code, operands, args, weights)
        self._last_weights = weights
        return site.run(code.entry, code.run, operands)

    def _keep(
        self, code: SelectedCode, operands: tuple[Any, ...], args: tuple[Any, ...], weights: tuple[Any, ...]
    ) -> None:
        """Keep the code of a call for the next ones."""
        # What the code has copies of must be another tuple after a write.
        if code.stamp is not None and not self._fetch.stamp({*self._operands.values(), *self._sentinels}):
            return
        guard = make_operand_guard(code.entry.specialization, operands, self._operands)
        if guard is not None and guard(args):
            held = [value if i in self._operands else None for i, value in enumerate(operands)]
            generation = self._site.generation if code.stamp is None else code.stamp[0]
            self._known = _KnownCall(weights, guard, code.entry, code.run, generation, held)

    def _with_weights(self, args: tuple[Any, ...], weights: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all operands in order."""
        count = len(args) + len(self._operands)
        if len(self._others) != len(args):
            self._others = tuple(i for i in range(count) if i not in self._operands)
        operands: list[Any] = [None] * count
        for i, at in self._operands.items():
            operands[i] = weights[at]
        for i, value in zip(self._others, args, strict=True):
            operands[i] = value
        return tuple(operands)


def _no_tensors(args: tuple[Any, ...]) -> Sequence[Tensor]:
    return ()


def _items(indices: tuple[int, ...]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """Return a function that selects the items at some indices, as a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: tuple([args[i] for i in indices])
