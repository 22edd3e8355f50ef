"""Compiled code, made once for equal bodies in equal situations and tried before it is used."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from dovetail.ir.process_state import released_by_fork
from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Compiled, identity, saves, setting
from dovetail.lowering.cache import open_cache, precision
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.failures import LoweringFault, fault_of, in_a_line
from dovetail.lowering.options import Options
from dovetail.lowering.verify_region import verify_unit
from dovetail.lowering.worker import Workers
from dovetail.numerics.compare import ExpectedOutcome, MutationCheck, expected_of
from dovetail.numerics.sample_inputs import fake_examples, hint_of, passed, random_state_kept, real_examples

# Inductor and most compilers are not to be entered by two threads at once.
COMPILING = released_by_fork(threading.RLock())
_LARGEST_TRIAL = 2**31
_LOG = logging.getLogger("dovetail")


class Store(Protocol):
    """Where compiled code is kept between processes; it never raises for what a disk does."""

    def read(self, key: str) -> bytes | None: ...

    def write(self, key: str, data: bytes) -> None: ...

    def key(self, of: CompileUnit, backend: Any, situation: Specialization) -> str: ...

    def in_use(self) -> contextlib.AbstractContextManager[None]: ...


class Isolated(Protocol):
    """Compiles in a process of its own: the job is packed, then waited for, and what comes back is `save`'s bytes."""

    def __call__(self, backend: Any, unit: CompileUnit, situation: Specialization) -> Callable[[], bytes]: ...


class Verifier(Protocol):
    """Compares compiled code with the body; None, or what is wrong in words."""

    def __call__(
        self,
        unit: CompileUnit,
        run: Compiled,
        examples: Sequence[Any],
        situation: Specialization,
        bound: float | None,
    ) -> str | None: ...


@dataclass(frozen=True, slots=True)
class CompileContext:
    """How code is made: where it is kept, how it is checked, and by whom where a process of its own is asked for."""

    store: Store | None = None
    verify: Verifier | None = None
    isolated: Isolated | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledRegion:
    """Code for one body in one situation. `source` is "compiled" or "disk".

    `untried` says why it was not run on made-up operands first; it is empty where it was.
    """

    run: Compiled
    backend: Any
    seconds: float = 0.0
    source: str = ""
    untried: str = ""


_MADE: WeakValueDictionary[tuple[Any, ...], CompiledRegion] = WeakValueDictionary()
_GATES: WeakValueDictionary[tuple[Any, ...], _Gate] = WeakValueDictionary()


class _Gate:
    """Lets one thread at a time make the code of one key."""

    def __init__(self) -> None:
        self.lock = released_by_fork(threading.RLock())


def obtain(
    unit: CompileUnit, backend: Any, situation: Specialization, workshop: CompileContext
) -> CompiledRegion | LoweringFault:
    """The code of a backend for a body, made now unless it is there already, or what went wrong.

    Threads take turns, but not while a process of its own compiles for one of them.
    """
    job = _Job(unit, backend, situation, workshop)
    key = (
        os.getpid(),  # a child does not use what its parent made
        identity(backend),
        id(backend),
        unit.key,
        unit.roles,
        situation,
        _set(),
        workshop.verify is not None,
    )
    with COMPILING:
        gate = _GATES.setdefault(key, _Gate())
    with gate.lock if job.is_isolated else COMPILING:
        with COMPILING:
            found = _MADE.get(key)
        if found is not None:
            return found
        made = job.made()
        if isinstance(made, CompiledRegion):
            with COMPILING:
                _MADE[key] = made
        return made


def _set() -> str:
    return repr(sorted(precision().items()))


class _Job:
    """The making of one artefact, step by step; `stage` is where it is."""

    def __init__(
        self, unit: CompileUnit, backend: Any, situation: Specialization, workshop: CompileContext
    ) -> None:
        self.unit, self.backend, self.situation, self.workshop = unit, backend, situation, workshop
        self.store = workshop.store if saves(backend) else None
        self.is_isolated = setting(backend, "isolation") == "process"
        self.stage = "examples"
        self.key = ""

    def made(self) -> CompiledRegion | LoweringFault:
        """The artefact, or a fault; whatever a backend raises is one."""
        start = time.perf_counter()
        try:
            run, source = self._from_disk(), "disk"
            if run is None:
                self.stage = "examples"
                run, source = (self._isolated() if self.is_isolated else self._compiled()), "compiled"
        except Exception as error:
            return fault_of(self.unit.region.name, self.backend.name, self.stage, error)
        return (
            run
            if isinstance(run, LoweringFault)
            else replace(run, seconds=time.perf_counter() - start, source=source)
        )

    def _from_disk(self) -> CompiledRegion | None:
        """What another process, or this one before, has kept; None if that is nothing that can be used."""
        if self.store is None:
            return None
        self.key = self.store.key(self.unit, self.backend, self.situation)
        data = self.store.read(self.key)
        if data is None:
            return None
        try:
            with self._place() as (examples, expected):
                found = self._tried(self.backend.load(data, self.unit.region), examples, expected)
        except Exception:  # what cannot be read is made anew and written over
            return None
        return found if isinstance(found, CompiledRegion) else None

    def _compiled(self) -> CompiledRegion | LoweringFault:
        with self._place() as (examples, expected):
            self.stage = "compile"
            run = self.backend.compile(self.unit.region, examples)
            made = self._tried(run, examples, expected)
            if self.store is not None and isinstance(made, CompiledRegion):
                self._keep(run)
            return made

    def _isolated(self) -> CompiledRegion | LoweringFault:
        self.stage = "compile"
        if self.workshop.isolated is None:
            raise RuntimeError("compiling in a process of its own is not available here")
        with COMPILING:
            wait = self.workshop.isolated(self.backend, self.unit, self.situation)
        data = wait()
        with self._place() as (examples, expected):
            self.stage = "load"
            made = self._tried(self.backend.load(data, self.unit.region), examples, expected)
        if self.store is not None and isinstance(made, CompiledRegion):
            self.store.write(self.key, data)
        return made

    def _keep(self, run: Any) -> None:
        """Write what was compiled to disk. What cannot be saved is made again next time."""
        try:
            data = self.backend.save(run)
        except Exception as error:
            _LOG.info("%r of '%s' is not kept: %s", self.unit.region.name, self.backend.name, error)
            return
        if isinstance(data, bytes) and self.store is not None:
            self.store.write(self.key, data)

    @contextlib.contextmanager
    def _place(self) -> Generator[tuple[list[Any], ExpectedOutcome]]:
        """Where code is made and tried: nobody else compiles, random numbers and grad mode come back as they were."""
        kept = self.store.in_use() if self.store is not None else contextlib.nullcontext()
        with COMPILING, random_state_kept(), torch.set_grad_enabled(self.situation.grad), kept:
            examples = fake_examples(self.situation, self.unit.values)
            body, effects = self.unit.region.body, self.unit.effects
            if effects.world:
                # Whatever it does to the world it would do now.
                yield examples, ExpectedOutcome((), effects)
                return
            yield examples, expected_of(body, effects, examples, grad=self.situation.grad)

    def _tried(
        self, run: Any, examples: list[Any], expected: ExpectedOutcome
    ) -> CompiledRegion | LoweringFault:
        """Code that has given what it must on made-up operands, or what was wrong."""
        unit, name, backend = self.unit, self.unit.region.name, self.backend.name
        if not callable(run):
            return LoweringFault(
                name, backend, self.stage, f"it returned a {type(run).__name__}, not a callable"
            )
        self.stage = "trial"
        untried = ""
        try:
            reason = _trial(unit, run, examples, expected)
        except _Untried as why:
            reason, untried = None, str(why)
        if reason is None and self.workshop.verify is not None:
            self.stage = "verify"
            bound = setting(self.backend, "bound")
            reason = self.workshop.verify(unit, run, examples, self.situation, bound)
        if reason is not None:
            return LoweringFault(name, backend, self.stage, reason)
        return CompiledRegion(run, self.backend, untried=untried)


class _Untried(Exception):
    """Code cannot be tried, and the text says why."""


def _trial(
    unit: CompileUnit, run: Compiled, examples: Sequence[Any], expected: ExpectedOutcome
) -> str | None:
    """Run code once on made-up operands, so that what is wrong with it shows before anybody's data are touched."""
    if unit.effects.world:
        raise _Untried(f"it acts on the world ({unit.effects.world})")
    size = _bytes(examples)
    if size > _LARGEST_TRIAL:
        raise _Untried(f"its operands are too large to be made up ({size / 2**30:.1f} GiB)")
    # The body is asked first: made-up operands may be none that it takes.
    try:
        given = _again(unit, examples)
        unit.region.body(*_passed(unit, _again(unit, examples) if unit.effects.writes else given))
    except Exception as error:
        raise _Untried(f"the body itself does not take made-up operands: {in_a_line(error)}") from error
    watch = MutationCheck(given, unit.effects)
    made = run(*_passed(unit, given))
    reason = expected.wrong(made) or watch.wrong(made)
    if reason is not None:
        return reason
    again = run(*_passed(unit, _again(unit, examples) if unit.effects.writes else given))
    return watch.kept(made, again)


def _again(unit: CompileUnit, examples: Sequence[Any]) -> list[Any]:
    return real_examples(examples, domains=unit.domains)


def _passed(unit: CompileUnit, given: Sequence[Any]) -> list[Any]:
    return [passed(a, i in unit.effects.writes) for i, a in enumerate(given)]


def _bytes(examples: Sequence[Any]) -> int:
    tensors = [e for e in examples if isinstance(e, torch.Tensor)]
    return sum(t.element_size() * math.prod(hint_of(n) for n in t.shape) for t in tensors)


def compile_context_of(options: Options) -> CompileContext:
    """The tools for some options."""
    cache = open_cache(options.cache)
    verify = verify_unit if options.verify else None
    return CompileContext(store=cache, verify=verify, isolated=Workers(options.timeout, cache))
