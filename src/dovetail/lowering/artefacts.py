"""Compiled code, made once for equal bodies in equal situations and tried before it is used."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from dovetail.lowering.backend import Compiled, identity, saves, setting
from dovetail.lowering.examples import fake_examples, hint_of, random_state_kept, real_examples
from dovetail.lowering.faults import Fault, fault_of
from dovetail.lowering.outcomes import Expected, Watch, expected_of
from dovetail.lowering.situation import Situation
from dovetail.lowering.unit import Unit

# Inductor and most compilers are not to be entered by two threads at once.
COMPILING = threading.RLock()
_LARGEST_TRIAL = 2**31


class Store(Protocol):
    """Where compiled code is kept between processes."""

    def read(self, key: str) -> bytes | None: ...

    def write(self, key: str, data: bytes) -> None: ...

    def key(self, unit: Unit, backend: Any, situation: Situation) -> str: ...


class Verifier(Protocol):
    """Compares compiled code with the body; None, or what is wrong in words."""

    def __call__(
        self, unit: Unit, run: Compiled, examples: Sequence[Any], situation: Situation
    ) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Workshop:
    """How code is made: where it is kept, how it is checked, and how long a process may take."""

    store: Store | None = None
    verify: Verifier | None = None
    timeout: float | None = None
    isolated: Callable[..., bytes] | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Artefact:
    """Code for one body in one situation. `source` is "compiled" or "disk"."""

    run: Compiled
    backend: Any
    expected: Expected
    seconds: float
    source: str


_MADE: WeakValueDictionary[tuple[Any, ...], Artefact] = WeakValueDictionary()


def obtain(unit: Unit, backend: Any, situation: Situation, workshop: Workshop) -> Artefact | Fault:
    """The code of a backend for a body, made now unless it is there already, or what went wrong."""
    verified = workshop.verify is not None
    key = (identity(backend), id(backend), unit.key, unit.roles, situation, verified)
    with COMPILING:
        found = _MADE.get(key)
        if found is not None:
            return found
        made = _make(unit, backend, situation, workshop)
        if isinstance(made, Artefact):
            _MADE[key] = made
        return made


def _make(unit: Unit, backend: Any, situation: Situation, workshop: Workshop) -> Artefact | Fault:
    name = unit.region.name
    start = time.perf_counter()
    stage = "examples"
    try:
        with random_state_kept(), torch.set_grad_enabled(situation.grad):
            examples = fake_examples(situation, unit.values)
            expected = expected_of(unit.region.body, unit.effects, examples, grad=situation.grad)
            stage = "compile"
            run, source = _compiled(unit, backend, situation, examples, workshop)
            if not callable(run):
                return Fault(name, backend.name, stage, f"it returned a {type(run).__name__}, not a callable")
            stage = "trial"
            reason = _tried(unit, run, examples, expected)
            if reason is None and workshop.verify is not None:
                stage = "verify"
                reason = workshop.verify(unit, run, examples, situation)
    except Exception as error:
        return fault_of(name, backend.name, stage, error)
    if reason is not None:
        return Fault(name, backend.name, stage, reason)
    return Artefact(run, backend, expected, time.perf_counter() - start, source)


def _compiled(
    unit: Unit, backend: Any, situation: Situation, examples: list[Any], workshop: Workshop
) -> tuple[Any, str]:
    store = workshop.store if saves(backend) else None
    key = store.key(unit, backend, situation) if store is not None else ""
    if store is not None:
        data = store.read(key)
        if data is not None:
            try:
                return backend.load(data, unit.region), "disk"
            except Exception:  # an entry that cannot be read is a miss: it is made anew and written over
                pass
    if setting(backend, "isolation") == "process":
        if workshop.isolated is None:
            raise RuntimeError("compiling in a process of its own is not available here")
        timeout = workshop.timeout if workshop.timeout is not None else setting(backend, "timeout")
        data = workshop.isolated(backend, unit, situation, timeout)
        run = backend.load(data, unit.region)
    else:
        run = backend.compile(unit.region, examples)
        data = None
    if store is not None:
        with contextlib.suppress(Exception):  # what cannot be kept is made again next time
            store.write(key, backend.save(run) if data is None else data)
    return run, "compiled"


def _tried(unit: Unit, run: Compiled, examples: Sequence[Any], expected: Expected) -> str | None:
    """Run code once on made-up operands, so that what is wrong with it shows before anybody's data are touched."""
    if unit.effects.world or _bytes(examples) > _LARGEST_TRIAL:
        return None
    given = real_examples(examples)
    # The body is asked first: made-up operands may be none that it takes.
    try:
        unit.region.body(*real_examples(examples))
    except Exception:
        return None
    watch = Watch(given, unit.effects)
    made = run(*[a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in given])
    return expected.wrong(made) or watch.wrong(made)


def _bytes(examples: Sequence[Any]) -> int:
    tensors = [e for e in examples if isinstance(e, torch.Tensor)]
    return sum(t.element_size() * math.prod(hint_of(n) for n in t.shape) for t in tensors)
