"""One call of a region in a lowered graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dovetail.lowering.backend import Compiled, setting
from dovetail.lowering.dispatch import Dispatcher, Entry
from dovetail.lowering.double_backward import TwiceDifferentiable
from dovetail.lowering.faults import Failure, Fault, fault_of
from dovetail.lowering.situation import Fit, Situation, fit_for
from dovetail.lowering.writes import fused_steps
from dovetail.outlining.region import Region


@dataclass(frozen=True, eq=False)
class CallSite:
    """What `Backend.prepare` gets: one call of a region, the code made for it, and the operands of its first call.

    `constants` are the numbers of the operands that are parameters, buffers or constants of the model, or views of
    those. What is prepared is used until one of them is written or replaced; then it is prepared again. `notes` is for
    what is to be known then, or in copies and pickles of the graph; all calls of a graph share it. `tell` writes a
    reason into the record.
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
    ) -> None:
        # Equal bodies share a dispatcher, but each call has constants of its own.
        self.name, self.dispatcher, self.lifted = name, dispatcher, lifted
        self.constants: frozenset[int] = frozenset()
        self.notes = {} if notes is None else notes
        self.__name__ = f"region_{name.replace('/', '__')}"
        # One value, so that a thread never has the guard of one specialisation and the code of another.
        self._first: tuple[Fit, Entry | None, Callable[..., Any]] = _NONE
        self._latest: Situation | None = None
        self._prepared: dict[Entry, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    @property
    def entry(self) -> Entry | None:
        """What runs calls like the last one, or, before there was one, those that were foreseen."""
        return self.dispatcher.entry_now(self._latest)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched():
            return self.dispatcher.body(*args)
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            with torch.profiler.record_function(f"region {self.name}"):
                return self._called(args)
        return self._called(args)

    def _called(self, args: tuple[Any, ...]) -> Any:
        fits, entry, run = self._first
        if (
            entry is None
            or entry.dropped
            or not fits(args)
            or torch.is_autocast_enabled("cpu")
            or torch.is_autocast_enabled("cuda")
            or self.dispatcher.aliased(args)
        ):
            entry = self.dispatcher.find(args)
            if entry is None:
                return self.dispatcher.body(*args)
            run = self._take(entry, args)
        try:
            return run(*args)
        except Exception as error:
            if type(error).__module__ == _CHECKPOINTING:
                raise
            error.add_note(f"in region '{self.name}', lowered by '{entry.backend}'")
            self._first = _NONE
            self._prepared.pop(entry, None)
            return self.dispatcher.failed(entry, error, args)

    def _take(self, entry: Entry, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Make an entry the one that is tried first."""
        run, fits = entry.run, fit_for(entry.situation, args)
        prepare = getattr(entry.artefact.backend, "prepare", None) if entry.artefact else None
        if prepare is not None:
            run, seen = self._prepared.get(entry, (None, ()))
            now = self._seen(args)
            if run is None or seen != now:
                run = self._ready(prepare, entry, args)
                self._prepared[entry] = (run, now)
            fits = self._while(fits, now)
        if entry.artefact and entry.situation.grad and not setting(entry.artefact.backend, "double_backward"):
            run = TwiceDifferentiable(run, self.dispatcher.unit, entry.artefact.backend.name)
        self._first = fits, entry, run
        self._latest = entry.situation
        return run

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
            lambda reason: dispatcher.tell(Fault(self.name, backend, "prepare", reason)),
        )
        try:
            made = prepare(site)
            if not callable(made):
                raise Failure(f"it returned a {type(made).__name__}, not a callable")
        except Exception as error:
            fault = fault_of(self.name, backend, "prepare", error)
            if dispatcher.strict:
                raise fault.raised() from error
            dispatcher.tell(fault)
            return entry.run
        return made

    def _while(self, fits: Fit, seen: tuple[Any, ...]) -> Fit:
        return lambda given: fits(given) and self._seen(given) == seen

    def _seen(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where the constants lie and how often they were written: prepared state holds while that is so."""
        tensors = [args[i] for i in sorted(self.constants) if isinstance(args[i], Tensor)]
        written = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
        return (fused_steps(), *written)


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


_NONE: tuple[Fit, Entry | None, Callable[..., Any]] = (_never, None, _never)
