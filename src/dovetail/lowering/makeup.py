"""What captures of a model hold to: its tensors and modules, and the numbers and hooks on them that are baked in."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.graph.holding import dict_version

# What every module has is torch's own business; of that only the mode is baked into a capture.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_BAKED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Settings = tuple[Any, ...]


class Makeup:
    """A model as it is now: which parameters, buffers and modules it has, and what may change without a new one.

    Attributes that are no numbers, strings or tensors (a list, a configuration object) are not looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._tables = [t for m in modules for t in (m._parameters, m._buffers, m._modules)]
        self._parts = _values(self._tables)
        self._parameters = [m._parameters for m in modules]
        self._tensors = [v for v in self._parts if isinstance(v, Tensor)]
        self._dtypes = list(map(_DTYPE, self._tensors))
        # A model is moved module by module.
        heads = [next((v for v in m._parameters.values() if v is not None), None) for m in modules]
        self._heads = [v for v in heads if v is not None]
        self._devices = list(map(_DEVICE, self._heads))
        self._loose = [
            (m.__dict__, name, value)
            for m in modules
            for name, value in m.__dict__.items()
            if isinstance(value, Tensor)
        ]
        self._baked = [(operator.itemgetter(*_baked(m.__dict__)), m.__dict__) for m in modules]
        self._dicts = [*(m.__dict__ for m in modules), *self._tables]
        # Those of the model itself run around each call.
        self._hooks = [m.__dict__[kind] for m in modules[1:] for kind in _HOOKS]
        # One value, for threads: how often the dicts had been written, and what they told.
        self._last: tuple[list[int], Settings] = ([], ())

    def settings(self) -> Settings | None:
        """Modes, numbers, strings and hooks as they are now; None if the model has other parts than it had.

        Parts are modules and tensors, the dtypes and devices of these, and the names of attributes.
        """
        versions = [0] if dict_version is None else list(map(dict_version, self._dicts))
        seen, told = self._last
        if dict_version is None or versions != seen:
            found = self._told()
            if found is None:
                return None
            told = found
            self._last = (versions, told)
        # Neither of these needs a write to any dict.
        if (
            list(map(_DTYPE, self._tensors)) != self._dtypes
            or list(map(_DEVICE, self._heads)) != self._devices
        ):
            return None
        return (told, tuple(tuple(hooks.items()) for hooks in self._hooks)) if any(self._hooks) else told

    def _told(self) -> Settings | None:
        parts = _values(self._tables)
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return None
        if not all(attributes.get(name) is value for attributes, name, value in self._loose):
            return None
        try:
            now = chain.from_iterable([get(attributes) for get, attributes in self._baked])
        except KeyError:
            return None
        # 1, 1.0 and True are equal, and a graph with one of them in it is not one with another.
        return tuple((type(v).__name__, v if _is_baked(v) else id(v)) for v in now)

    def has_stand_ins(self) -> bool:
        """Whether parameters are replaced by tensors for a while, as `torch.func.functional_call` does."""
        found = _values(self._parameters)
        return any(v is not None and not isinstance(v, nn.Parameter) for v in found)


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable([table.values() for table in tables]))


def _baked(attributes: dict[str, Any]) -> list[str]:
    names = sorted(n for n, v in attributes.items() if n not in _OWN and _is_baked(v))
    # `itemgetter` gives a tuple for two names or more.
    return [*names, "training"]


def _is_baked(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_baked(v) for v in cast("tuple[Any, ...]", value))
    return isinstance(value, _BAKED)
