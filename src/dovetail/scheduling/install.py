"""Putting a schedule's state onto the model and taking it off again."""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dovetail.scheduling.edits import ReplaceEdit
from dovetail.scheduling.installed_forward import Installed, Running, own_forward
from dovetail.scheduling.state import ScheduleState


class Checkpointed(Installed):
    """A module whose inner values are computed again in backward."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own if self.own is not None else type(self.module).forward.__get__(self.module)
        # Torch stops running it again by raising, which compiled code within would take for an error of its own.
        with set_checkpoint_early_stop(False):
            return checkpoint(own, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpointed, (self.module,)


@dataclass(eq=False)
class _Put:
    """What is on a model: forwards, other modules, further ones, and parameters that others stand for."""

    state: ScheduleState | None = None
    forwards: list[Installed] = field(default_factory=list[Installed])
    swapped: list[tuple[dict[str, Any], str, nn.Module, nn.Module]] = field(
        default_factory=list[tuple[dict[str, Any], str, nn.Module, nn.Module]]
    )
    added: list[tuple[dict[str, Any], str, nn.Module]] = field(
        default_factory=list[tuple[dict[str, Any], str, nn.Module]]
    )
    emptied: list[tuple[dict[str, Any], str, Any]] = field(
        default_factory=list[tuple[dict[str, Any], str, Any]]
    )

    def off(self) -> None:
        """Give the model back what it had."""
        for made in reversed(self.forwards):
            made.remove()
        for table, name, old, _ in reversed(self.swapped):
            table[name] = old
        for table, name, _ in self.added:
            table.pop(name, None)
        for table, name, value in self.emptied:
            table[name] = value

    def on(self) -> None:
        """Put on again what was taken off."""
        for table, name, _, new in self.swapped:
            table[name] = new
        for table, name, new in self.added:
            table[name] = new
        for table, name, _ in self.emptied:
            table[name] = None
        for made in self.forwards:
            made.install()


class Installation:
    """What is on a model now, so that it can be taken off."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._put = _Put()
        self._known: dict[str, tuple[tuple[object, ...], Running]] = {}

    @property
    def state(self) -> ScheduleState | None:
        """The state that the model runs; None if it runs as it was given."""
        return self._put.state

    def put(self, state: ScheduleState, *, forwards: bool = True) -> None:
        """Make the model run a state; without `forwards` only its modules are exchanged."""
        self.take()
        try:
            self._exchange(state)
            if forwards:
                self._run(state)
        except BaseException:
            self.take()
            raise

    def _exchange(self, state: ScheduleState) -> None:
        for path, new in state.swaps.items():
            parent, _, name = path.rpartition(".")
            table = self.model.get_submodule(parent)._modules
            old = table[name]
            assert old is not None
            self._put.swapped.append((table, name, old, new))
            table[name] = new

    def _run(self, state: ScheduleState) -> None:
        runs = {root: self._running(state, root) for root in state.traces}
        # What replaces an operation is a child of its part: with it the part is not what was captured.
        before = {root: run.forms.modes() for root, (run, is_new) in runs.items() if is_new}
        self._add(state)
        for root, (run, _) in runs.items():
            if root in before:
                now = before[root]
                run.adopt([(None if m == now else m, gm) for m, gm in state.programs(root)])
            self._install(run)
        for path in sorted(state.checkpoints):
            self._install(Checkpointed(self.model.get_submodule(path)))
        self._put.state = state

    def _running(self, state: ScheduleState, root: str) -> tuple[Running, bool]:
        """What runs a traced part, and whether it is new: one whose graphs are as they were keeps what it made."""
        module = state.traces[root].module
        told = (state.traces[root], own_forward(module), *(gm for _, gm in state.programs(root)))
        known = self._known.get(root)
        if known is not None and len(known[0]) == len(told) and all(map(operator.is_, known[0], told)):
            return known[1], False
        run = Running(module, state.steps(root))
        self._known[root] = (told, run)
        return run, True

    def _add(self, state: ScheduleState) -> None:
        """Register modules that stand for operations, so that they are trained, moved and saved with the model.

        Parameters of theirs that others of the model stand for are not among them.
        """
        placed: set[nn.Module] = set()
        for edit in state.edits:
            new = edit.new if isinstance(edit, ReplaceEdit) else None
            if new is None or not isinstance(new.new, nn.Module) or new.new in placed:
                continue
            placed.add(new.new)
            owner = self.model.get_submodule(edit.root)
            name, count = new.name, 0
            while hasattr(owner, name):
                count += 1
                name = f"{new.name}_{count}"
            owner.add_module(name, new.new)
            self._put.added.append((owner._modules, name, new.new))
            for taken in new.params:
                path, _, own = taken.rpartition(".")
                holder = new.new.get_submodule(path)
                kind: dict[str, Any] = holder._parameters if own in holder._parameters else holder._buffers
                self._put.emptied.append((kind, own, kind[own]))
                kind[own] = None

    def _install(self, made: Installed) -> None:
        made.install()
        self._put.forwards.append(made)

    def take(self) -> None:
        """Give the model back what it had."""
        self._put.off()
        self._put = _Put()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """The model as it was given for a while; afterwards the very same is on it again."""
        put, self._put = self._put, _Put()
        put.off()
        try:
            yield
        finally:
            self.take()
            self._put = put
            put.on()

    @contextmanager
    def instead(self, state: ScheduleState | None, *, forwards: bool = True) -> Generator[nn.Module]:
        """The model as another state has it for a while; None is the model as it was given."""
        with self.suspended():
            if state is not None:
                self.put(state, forwards=forwards)
            yield self.model


def is_scheduled(module: nn.Module) -> bool:
    """Whether a schedule put something onto a module."""
    return own_forward(module) is not module.__dict__.get("forward")
