"""Buffers of inner modules that forward gives another tensor: the exporter sees that of the model's own only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.graph.capturing.aliasing import storage_of

Note = Callable[[str, str], None]


class Rebinding:
    """The buffers of a model when its forward begins, so that at the end new tensors can be written into them."""

    def __init__(self, model: nn.Module) -> None:
        self._own = model._buffers
        self._before = [
            (path, module._buffers, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
        ]

    def settle(self, result: Any, note: Note) -> Any:
        """Write what buffers were given into the tensors they had; returns what forward returns then.

        A result that is a buffer's old value becomes a copy, for the write would change it.
        """
        changed = [
            (_joined(path, name), holder, name, old, holder.get(name))
            for path, holder, name, old in self._before
            if holder.get(name) is not old
        ]
        inner: list[tuple[Tensor, Tensor]] = []
        for label, holder, name, old, new in changed:
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                note(
                    f"forward gives buffer '{label}' a tensor of another form, which a graph cannot do",
                    "Keep its shape and dtype, or pass the value in and return it.",
                )
            elif self._is_tied(old, holder, name):
                note(
                    f"forward gives buffer '{label}' a tensor of its own, and others that share it keep the old one",
                    "Register a buffer of its own for each.",
                )
            elif holder is not self._own:
                inner.append((old, new))
                holder[name] = old
        if not inner:
            return result
        places = {storage_of(old) for old, _ in inner}

        def kept(value: Any) -> Any:
            is_old = isinstance(value, Tensor) and storage_of(value) in places
            return value.clone() if is_old else value

        result = pytree.tree_map(kept, result)
        values = [kept(new) for _, new in inner]
        for (old, _), value in zip(inner, values, strict=True):
            old.copy_(value)
        return result

    def _is_tied(self, old: Tensor, holder: dict[str, Any], name: str) -> bool:
        here = [(h, n) for _, h, n, buffer in self._before if buffer is old]
        return any(h.get(n) is not holder[name] for h, n in here)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
