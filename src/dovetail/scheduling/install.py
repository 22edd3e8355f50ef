"""Installation of the state of a schedule on its model: replaced modules and forwards, and their removal."""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dovetail.scheduling.edits import ReplaceEdit
from dovetail.scheduling.installed_forward import InstalledForward, ScheduledForward, user_forward
from dovetail.scheduling.state import ScheduleState


class CheckpointedForward(InstalledForward):
    """The forward of a module whose inner values are recomputed in backward."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own if self.own is not None else type(self.module).forward.__get__(self.module)
        # Early stop ends the recomputation by raising, which compiled code within would treat as its own error.
        with set_checkpoint_early_stop(False):
            return checkpoint(own, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self.module,)


class _Changes:
    """Changes of a model: forwards, swapped and added modules, and parameters that others replace."""

    def __init__(self) -> None:
        self.state: ScheduleState | None = None
        self.forwards: list[InstalledForward] = []
        self.swapped: list[tuple[dict[str, Any], str, nn.Module, nn.Module]] = []
        self.added: list[tuple[dict[str, Any], str, nn.Module]] = []
        self.cleared: list[tuple[dict[str, Any], str, Any]] = []

    def undo(self) -> None:
        for forward in reversed(self.forwards):
            forward.remove()
        for table, name, old, _ in reversed(self.swapped):
            table[name] = old
        for table, name, _ in self.added:
            table.pop(name, None)
        for table, name, value in self.cleared:
            table[name] = value

    def redo(self) -> None:
        for table, name, _, new in self.swapped:
            table[name] = new
        for table, name, new in self.added:
            table[name] = new
        for table, name, _ in self.cleared:
            table[name] = None
        for forward in self.forwards:
            forward.install()


class Installation:
    """The changes that a schedule has made to a model, which can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changes = _Changes()
        self._cached: dict[str, tuple[tuple[object, ...], ScheduledForward]] = {}

    @property
    def state(self) -> ScheduleState | None:
        """The state that the model runs; None for the original model."""
        return self._changes.state

    def install(self, state: ScheduleState, *, forwards: bool = True) -> None:
        """Make the model run a state; without `forwards` only modules are swapped."""
        self.uninstall()
        try:
            self._swap_modules(state)
            if forwards:
                self._install_forwards(state)
        except BaseException:
            self.uninstall()
            raise

    def _swap_modules(self, state: ScheduleState) -> None:
        for path, new in state.swaps.items():
            parent, _, name = path.rpartition(".")
            table = self.model.get_submodule(parent)._modules
            old = table[name]
            assert old is not None
            self._changes.swapped.append((table, name, old, new))
            table[name] = new

    def _install_forwards(self, state: ScheduleState) -> None:
        runs = {root: self._scheduled_forward(state, root) for root in state.traces}
        # A module that replaces an operation becomes a child of its part, which changes the guard key of the part.
        before = {root: run.cache.guard_key() for root, (run, is_new) in runs.items() if is_new}
        self._register_replacements(state)
        for root, (run, _) in runs.items():
            if root in before:
                now = before[root]
                run.adopt([(None if m == now else m, gm) for m, gm in state.programs(root)])
            self._install(run)
        for path in sorted(state.checkpoints):
            self._install(CheckpointedForward(self.model.get_submodule(path)))
        self._changes.state = state

    def _scheduled_forward(self, state: ScheduleState, root: str) -> tuple[ScheduledForward, bool]:
        """Return the forward of a traced part, and whether it is new: with the same graphs it keeps its captures."""
        module = state.traces[root].module
        identity = (state.traces[root], user_forward(module), *(gm for _, gm in state.programs(root)))
        cached = self._cached.get(root)
        if (
            cached is not None
            and len(cached[0]) == len(identity)
            and all(map(operator.is_, cached[0], identity))
        ):
            return cached[1], False
        run = ScheduledForward(module, state.steps(root))
        self._cached[root] = (identity, run)
        return run, True

    def _register_replacements(self, state: ScheduleState) -> None:
        """Register modules that replace operations, so that they are trained, moved and saved with the model.

        Their parameters that parameters of the model replace are left out.
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
            self._changes.added.append((owner._modules, name, new.new))
            for parameter in new.params:
                path, _, own = parameter.rpartition(".")
                holder = new.new.get_submodule(path)
                kind: dict[str, Any] = holder._parameters if own in holder._parameters else holder._buffers
                self._changes.cleared.append((kind, own, kind[own]))
                kind[own] = None

    def _install(self, forward: InstalledForward) -> None:
        forward.install()
        self._changes.forwards.append(forward)

    def uninstall(self) -> None:
        """Restore the original model."""
        self._changes.undo()
        self._changes = _Changes()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Restore the original model for a while; the same changes are made again afterwards."""
        changes, self._changes = self._changes, _Changes()
        changes.undo()
        try:
            yield
        finally:
            self.uninstall()
            self._changes = changes
            changes.redo()

    @contextmanager
    def temporarily(self, state: ScheduleState | None, *, forwards: bool = True) -> Generator[nn.Module]:
        """Make the model run another state for a while; None is the original model."""
        with self.suspended():
            if state is not None:
                self.install(state, forwards=forwards)
            yield self.model


def is_scheduled(module: nn.Module) -> bool:
    """Return whether a schedule installed a forward on a module."""
    return user_forward(module) is not module.__dict__.get("forward")
