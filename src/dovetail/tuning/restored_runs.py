"""Runs whose calls all begin with the same buffers and inputs, for models that write to them.

A position in a cache that advances with each call leaves the cache after some calls, and values that are scaled in place
overflow or become denormal: later samples would be of other work, or fail. What one call has changed is written back
before the next one, outside of what is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.scheduling.call_recording import isolated_run
from dovetail.tuning.timing import RestoredRun, Run

Saved = Sequence[tuple[Tensor, Tensor]]
"""Tensors, each with a copy of its values."""


def saved_values(values: Iterable[Any]) -> Saved:
    """Return the tensors among some values that can be restored, each once, with copies."""
    tensors = {id(value): value for value in values if isinstance(value, Tensor) and _is_dense(value)}
    return [(tensor, tensor.detach().clone()) for tensor in tensors.values()]


def restore_values(saved: Saved) -> None:
    """Write values back into their tensors."""
    with torch.no_grad():
        for tensor, values in saved:
            # A write of something with a gradient gave it a history.
            if not tensor.is_leaf and not tensor._is_view():
                tensor.detach_()
            tensor.copy_(values)


def changed_values(saved: Saved) -> Saved:
    """Return the tensors that do not have the saved values any more."""
    # Version counters miss what batch norm writes.
    return [(tensor, values) for tensor, values in saved if not torch.equal(tensor.detach(), values)]


def restored(run: Run, operands: Any) -> Run:
    """Return a run whose calls begin with the present values of operands, as far as a call changes any.

    It is called once to see which. A run that changes none is returned as it is.
    """
    saved = saved_values(pytree.tree_leaves(operands))
    run()
    changed = changed_values(saved)
    if not changed:
        return run
    restore_values(changed)
    return RestoredRun(run, lambda: restore_values(changed))


@contextlib.contextmanager
def preserved_buffers(module: nn.Module) -> Generator[None]:
    """Restore the values of a module's buffers in the end."""
    saved = saved_values(module.buffers())
    try:
        yield
    finally:
        restore_values(changed_values(saved))


@dataclass(frozen=True, eq=False)
class ModelWrites:
    """What a call of a model changes: values of buffers, tensors in the place of buffers, and inputs, by number."""

    buffers: Saved
    places: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]
    inputs: Sequence[int]

    @classmethod
    def of_call(cls, model: nn.Module, run: Run, inputs: Sequence[Any]) -> ModelWrites:
        """Return what a call changes; the model is restored, the inputs are not."""
        buffers = saved_values(model.buffers())
        tables = [m._buffers for m in model.modules() if isinstance(cast("Any", m)._buffers, dict)]
        places = [(table, dict(table)) for table in tables]
        before = {id(tensor): (tensor, values) for tensor, values in saved_values(inputs)}
        with isolated_run(model):
            run()
            changed = changed_values(buffers)
            moved = [
                row for row in places if any(row[0].get(name) is not held for name, held in row[1].items())
            ]
            written = {id(tensor) for tensor, _ in changed_values([*before.values()])}
        return cls(changed, moved, [i for i, value in enumerate(inputs) if id(value) in written])

    def restored(self, run: Run, inputs: Sequence[Any]) -> Run:
        """Return a run, which has these inputs, whose calls begin with what the model and they have now."""
        if not (self.buffers or self.places or self.inputs):
            return run
        own = saved_values(inputs[i] for i in self.inputs)

        def restore() -> None:
            for table, held in self.places:
                table.update(held)
            restore_values(self.buffers)
            restore_values(own)

        return RestoredRun(run, restore)


def _is_dense(value: Tensor) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.layout is torch.strided
        and not value.is_meta
    )
