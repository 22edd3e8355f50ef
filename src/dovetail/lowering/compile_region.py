"""Compilation of one region: from memory, disk, a worker process or inline, with a trial run before it is used.

The compilations of several regions overlap: all are begun, one after the other, before the first one is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from dovetail.ir.process_state import preserve_rng_state, reset_at_fork
from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Backend, Compiled, backend_class, identity
from dovetail.lowering.cache import Cache, open_cache, precision
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.failures import LoweringFault, fault_of, one_line
from dovetail.lowering.options import Options
from dovetail.lowering.verify_region import uncovered, verify_unit, why_not_run
from dovetail.lowering.worker_process import Workers
from dovetail.numerics.compare import ExpectedOutcome, MutationCheck, expected_outcome
from dovetail.numerics.sample_inputs import as_non_leaf, fake_inputs, random_inputs

# Inductor and most compilers are not to be entered by two threads at once.
COMPILING = reset_at_fork(threading.RLock())
_LOG = logging.getLogger("dovetail")
# The first byte of stored code: whether it was run on sample inputs.
_TRIED, _UNTRIED = b"1", b"0"


@dataclass(frozen=True, slots=True)
class CompileContext:
    """The services of a compilation: storage, verification, and a compiler in another process."""

    store: Cache | None
    workers: Workers
    verify: bool


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledRegion:
    """Code for one body in one specialization. `source` is "compiled" or "disk".

    `untried` is why it was not run on sample inputs first; empty if it was.
    """

    run: Compiled
    backend: Backend
    seconds: float = 0.0
    source: str = ""
    untried: str = ""


_COMPILED: WeakValueDictionary[tuple[Any, ...], CompiledRegion] = WeakValueDictionary()
_LOCKS: WeakValueDictionary[tuple[Any, ...], _KeyLock] = WeakValueDictionary()


class _KeyLock:
    """Lets one thread at a time compile for one key."""

    def __init__(self) -> None:
        self.lock = reset_at_fork(threading.RLock())


def compile_region(
    unit: CompileUnit,
    backend: Backend,
    specialization: Specialization,
    context: CompileContext,
    begun: Compilation | None = None,
) -> CompiledRegion | LoweringFault:
    """Return the code of a backend for a body, compiled now unless it exists already, or the fault.

    Threads take turns, except while a worker process compiles for one of them. `begun` is what `begin_compilation`
    returned for the same arguments.
    """
    compilation = begun or Compilation(unit, backend, specialization, context)
    key = compilation.memory_key
    with COMPILING:
        key_lock = _LOCKS.setdefault(key, _KeyLock())
    with key_lock.lock if compilation.is_isolated else COMPILING:
        with COMPILING:
            existing = _COMPILED.get(key)
        if existing is not None:
            return existing
        result = compilation.run()
        if isinstance(result, CompiledRegion):
            with COMPILING:
                _COMPILED[key] = result
        return result


def begin_compilation(
    unit: CompileUnit, backend: Backend, specialization: Specialization, context: CompileContext
) -> Compilation | None:
    """Let a backend compile a body in the background; None if it cannot, or if the code is in memory."""
    if backend.isolation == "process" or not _has_async_form(backend):
        return None
    compilation = Compilation(unit, backend, specialization, context)
    with COMPILING:
        if _COMPILED.get(compilation.memory_key) is not None:
            return None
        compilation.begin()
    return compilation


def _has_async_form(backend: Backend) -> bool:
    """Return whether `compile_async` does what `compile` does: a subclass may override the latter alone."""
    for kind in backend_class(backend).__mro__:
        if "compile_async" in vars(kind) or "compile" in vars(kind):
            return kind is not Backend and "compile_async" in vars(kind)
    return False


class Compilation:
    """The steps of one compilation; `stage` is the current one."""

    def __init__(
        self, unit: CompileUnit, backend: Backend, specialization: Specialization, context: CompileContext
    ) -> None:
        self.unit, self.backend, self.specialization, self.context = unit, backend, specialization, context
        self.store = context.store if backend.can_save else None
        self.is_isolated = backend.isolation == "process"
        self.stage = "examples"
        self.memory_key = (
            os.getpid(),  # a child does not use code of its parent
            identity(backend),
            id(backend),
            unit.key,
            unit.roles,
            specialization,
            repr(sorted(precision().items())),
            context.verify,
        )
        self.error: Exception | None = None
        """What `begin` raised, which `run` reports."""
        self._finish: Callable[[], Compiled] | None = None
        self._expected: ExpectedOutcome | None = None
        self._seconds = 0.0

    @functools.cached_property
    def key(self) -> str:
        """The key of the code on disk."""
        assert self.store is not None
        return self.store.key(self.unit, self.backend, self.specialization)

    @functools.cached_property
    def _stored(self) -> bytes | None:
        """The code that this or another process stored."""
        return None if self.store is None else self.store.read(self.key)

    def begin(self) -> None:
        """Start the compilation, unless the code is on disk."""
        start = time.perf_counter()
        try:
            if self._stored is None:
                with self._environment() as (examples, _):
                    self.stage = "compile"
                    self._finish = self.backend.compile_async(self.unit.region, examples)
        except Exception as error:
            self.error = error
        self._seconds = time.perf_counter() - start

    def run(self) -> CompiledRegion | LoweringFault:
        """Return the code, or a fault for whatever a backend raises."""
        start = time.perf_counter()
        try:
            if self.error is not None:
                raise self.error
            result, source = self._load_from_disk(), "disk"
            if result is None:
                self.stage = "examples"
                result = self._compile_isolated() if self.is_isolated else self._compile_inline()
                source = "compiled"
        except Exception as error:
            return fault_of(self.unit.region.name, self.backend.name, self.stage, error)
        if isinstance(result, LoweringFault):
            return result
        return replace(result, seconds=self._seconds + time.perf_counter() - start, source=source)

    def _load_from_disk(self) -> CompiledRegion | None:
        """Return code that this or another process stored; None without any that works.

        Code is stored after a trial run. That is repeated if the backend is not one of ours, whose `save` and `load` are
        tested together, and if the first one was not possible.
        """
        if self._stored is None:
            return None
        is_tried, data = self._stored[:1] == _TRIED, self._stored[1:]
        try:
            if is_tried and not self.context.verify and _is_built_in(self.backend):
                with self._loading():
                    run = self.backend.load(data, self.unit.region)
                return CompiledRegion(run, self.backend) if callable(run) else None
            with self._environment() as (examples, expected):
                result = self._checked(self.backend.load(data, self.unit.region), examples, expected)
        except Exception:  # what cannot be read is compiled again and overwritten
            return None
        return result if isinstance(result, CompiledRegion) else None

    def _compile_inline(self) -> CompiledRegion | LoweringFault:
        with self._environment() as (examples, expected):
            self.stage = "compile"
            finish = self._finish
            run = self.backend.compile(self.unit.region, examples) if finish is None else finish()
            result = self._checked(run, examples, expected)
            if isinstance(result, CompiledRegion):
                self._save(run, result)
            return result

    def _compile_isolated(self) -> CompiledRegion | LoweringFault:
        self.stage = "compile"
        with COMPILING:
            wait = self.context.workers(self.backend, self.unit, self.specialization)
        data = wait()
        with self._environment() as (examples, expected):
            self.stage = "load"
            result = self._checked(self.backend.load(data, self.unit.region), examples, expected)
        if isinstance(result, CompiledRegion):
            self._write(data, result)
        return result

    def _save(self, run: Compiled, result: CompiledRegion) -> None:
        """Write code to disk. What cannot be saved is compiled again next time."""
        if self.store is None:
            return
        try:
            data = self.backend.save(run)
        except Exception as error:
            _LOG.info("%r of '%s' is not saved: %s", self.unit.region.name, self.backend.name, error)
            return
        if isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._write(data, result)

    def _write(self, data: bytes, result: CompiledRegion) -> None:
        if self.store is not None:
            self.store.write(self.key, stored_form(data, is_tried=not result.untried))

    @contextlib.contextmanager
    def _loading(self) -> Generator[None]:
        """Hold what a compilation holds, without sample inputs."""
        in_use = self.store.in_use() if self.store is not None else contextlib.nullcontext()
        with COMPILING, preserve_rng_state(), torch.set_grad_enabled(self.specialization.grad), in_use:
            yield

    @contextlib.contextmanager
    def _environment(self) -> Generator[tuple[list[Any], ExpectedOutcome]]:
        """Hold the compilation lock, the random state and the grad mode; yield fake inputs and the expected outcome."""
        with self._loading():
            examples = fake_inputs(self.specialization, self.unit.values)
            if self._expected is None:
                self._expected = self._run_fake(examples)
            yield examples, self._expected

    def _run_fake(self, examples: list[Any]) -> ExpectedOutcome:
        body, effects = self.unit.region.body, self.unit.effects
        if effects.host_effect:
            # A run would have the effect now.
            return ExpectedOutcome((), effects)
        return expected_outcome(body, effects, examples, grad=self.specialization.grad)

    def _checked(
        self, run: Any, examples: list[Any], expected: ExpectedOutcome
    ) -> CompiledRegion | LoweringFault:
        """Return code whose results on sample inputs are as expected, or a fault."""
        unit, name, backend = self.unit, self.unit.region.name, self.backend.name
        if not callable(run):
            return LoweringFault(
                name, backend, self.stage, f"it returned a {type(run).__name__}, not a callable"
            )
        self.stage = "trial"
        untried = ""
        try:
            reason = _trial(unit, run, examples, expected)
        except _Untried as error:
            reason, untried = None, str(error)
        if reason is None and (self.context.verify or self.backend.must_verify):
            self.stage = "verify"
            reason = verify_unit(unit, run, examples, self.specialization, self.backend.bound)
            unverified = untried or uncovered(unit, examples)
            if reason is None and self.backend.must_verify and unverified:
                reason = f"it cannot be verified: {unverified}"
        if reason is not None:
            return LoweringFault(name, backend, self.stage, reason)
        return CompiledRegion(run, self.backend, untried=untried)


def stored_form(data: bytes, *, is_tried: bool) -> bytes:
    """Return code as it is stored, with whether it was run on sample inputs."""
    return (_TRIED if is_tried else _UNTRIED) + data


def _is_built_in(backend: Backend) -> bool:
    return backend_class(backend).__module__.startswith("dovetail.")


class _Untried(Exception):
    """Code cannot be run on sample inputs; the message is the reason."""


def _trial(
    unit: CompileUnit, run: Compiled, examples: Sequence[Any], expected: ExpectedOutcome
) -> str | None:
    """Run code on sample inputs and return what is wrong with it, before it touches data of the user."""
    obstacle = why_not_run(unit, examples)
    if obstacle is not None:
        raise _Untried(obstacle)

    def operands(inputs: Sequence[Any]) -> list[Any]:
        return [as_non_leaf(a, i in unit.effects.writes) for i, a in enumerate(inputs)]

    def unwritten() -> list[Any]:
        return random_inputs(examples, domains=unit.domains) if unit.effects.writes else inputs

    # The body runs first: it may reject sample inputs.
    try:
        inputs = random_inputs(examples, domains=unit.domains)
        unit.region.body(*operands(unwritten()))
    except Exception as error:
        raise _Untried(f"the body itself rejects sample inputs: {one_line(error)}") from error
    mutations = MutationCheck(inputs, unit.effects)
    results = run(*operands(inputs))
    reason = expected.mismatch(results) or mutations.mismatch(results)
    if reason is not None:
        return reason
    return mutations.reused_memory(results, run(*operands(unwritten())))


def make_compile_context(options: Options) -> CompileContext:
    """Return the services for some options."""
    cache = open_cache(options.cache)
    return CompileContext(cache, Workers(options.timeout, cache), options.verify)
