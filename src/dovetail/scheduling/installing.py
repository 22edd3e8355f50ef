"""Putting a schedule's state onto the model and taking it off again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from dovetail.scheduling.edits import Replace
from dovetail.scheduling.running import Installed, Running, Steps, own_forward
from dovetail.scheduling.state import State


class Checkpointed(Installed):
    """A module whose inner values are computed again in backward."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own if self.own is not None else type(self.module).forward.__get__(self.module)
        return checkpoint(own, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpointed, (self.module,)


class Installation:
    """What is on a model now, so that it can be taken off."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: State | None = None
        self._forwards: list[Installed] = []
        self._swapped: list[tuple[nn.Module, str, nn.Module]] = []
        self._added: list[tuple[nn.Module, str]] = []
        self._emptied: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, state: State, *, forwards: bool = True) -> None:
        """Make the model run a state; without `forwards` only its modules are exchanged."""
        self.take()
        for path, new in state.swaps.items():
            parent, _, name = path.rpartition(".")
            owner = self.model.get_submodule(parent)
            old = owner._modules[name]
            assert old is not None
            self._swapped.append((owner, name, old))
            owner._modules[name] = new
        if forwards:
            runs = [Running(t.module, Steps(state.redo(root))) for root, t in state.traces.items()]
            # What replaces an operation is a child of its part: with it the part is not what was captured.
            before = [run.forms.modes() for run in runs]
            self._add(state)
            for run, root, modes in zip(runs, state.traces, before, strict=True):
                run.adopt([(None if m == modes else m, gm) for m, gm in state.programs(root)])
                self._install(run)
            for path in sorted(state.checkpoints):
                self._install(Checkpointed(self.model.get_submodule(path)))
        self.state = state if forwards else None

    def _add(self, state: State) -> None:
        """Register modules that stand for operations, so that they are trained, moved and saved with the model.

        Parameters of theirs that others of the model stand for are not among them.
        """
        placed: set[nn.Module] = set()
        for edit in state.edits:
            new = edit.new if isinstance(edit, Replace) else None
            if new is None or not isinstance(new.new, nn.Module) or new.new in placed:
                continue
            placed.add(new.new)
            owner = self.model.get_submodule(edit.root)
            name, count = new.name, 0
            while hasattr(owner, name):
                count += 1
                name = f"{new.name}_{count}"
            owner.add_module(name, new.new)
            self._added.append((owner, name))
            for taken in new.params:
                path, _, own = taken.rpartition(".")
                holder = new.new.get_submodule(path)
                kind = holder._parameters if own in holder._parameters else holder._buffers
                self._emptied.append((kind, own, kind[own]))
                kind[own] = None

    def _install(self, made: Installed) -> None:
        made.install()
        self._forwards.append(made)

    def take(self) -> None:
        """Give the model back what it had."""
        for made in reversed(self._forwards):
            made.remove()
        for owner, name, old in reversed(self._swapped):
            owner._modules[name] = old
        for owner, name in self._added:
            owner._modules.pop(name, None)
        for kind, own, value in self._emptied:
            kind[own] = value
        self._forwards, self._swapped, self._added, self._emptied, self.state = [], [], [], [], None

    @contextmanager
    def instead(self, state: State | None, *, forwards: bool = True) -> Generator[nn.Module]:
        """The model as another state has it for a while; None is the model as it was given."""
        was = self.state
        try:
            if state is None:
                self.take()
            else:
                self.put(state, forwards=forwards)
            yield self.model
        finally:
            self.take()
            if was is not None:
                self.put(was)


def is_scheduled(module: nn.Module) -> bool:
    """Whether a schedule put something onto a module."""
    return own_forward(module) is not module.__dict__.get("forward")
