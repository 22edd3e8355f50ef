"""Key-value caches of transformers as pytree nodes, so that they can be arguments and results of a graph.

Registered are all cache classes that are loaded: their tensors and integers are leaves, in groups, and all else is context
that JSON can hold. `leaf_steps` names the leaves of any tree spec, those of caches too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._pytree import MappingKey, TreeSpec

from dovetail.errors import CaptureError
from dovetail.frontend.calling_convention import (
    cache_layer_types,
    children,
    context_of,
    is_cache,
    loaded_types,
)


def leaf_steps(spec: TreeSpec) -> list[tuple[Any, ...]]:
    """Return the path to each leaf: keys, names of fields, and positions."""
    if spec.is_leaf():
        return [()]
    inner = children(spec)
    if getattr(spec.type, "__name__", "").endswith("Cache"):
        return _steps_of_cache(spec)
    return [
        (step, *rest)
        for step, child in zip(_steps(spec, len(inner)), inner, strict=True)
        for rest in leaf_steps(child)
    ]


def _steps_of_cache(spec: TreeSpec) -> list[tuple[Any, ...]]:
    """Return the same for a cache of transformers: the tensors of each layer, or the caches in it by name.

    Its children are groups of leaves: the keys of all layers, their values, caches, and the rest.
    """
    context = context_of(spec)
    fields = cast("list[Any]", context) if isinstance(context, list) else []
    caches = [name for name, value in fields if value == ["caches"]]
    steps: list[tuple[Any, ...]] = []
    for i, group in enumerate(children(spec)):
        for first, *rest in leaf_steps(group):
            if i < 2 and not rest:
                steps.append((first, ("key", "value")[i]))
            else:
                name = caches[first] if i == 2 and len(caches) > first else first
                steps.append((name, *rest))
    return steps


def _steps(spec: TreeSpec, count: int) -> Sequence[Any]:
    """Return the names of the children of a node."""
    context = context_of(spec)
    # The context of a named tuple is its class.
    fields = getattr(context, "_fields", None)
    if fields is not None and len(fields) == count:
        return fields
    # Classes with keys or fields have their names as context, alone or first: in a tuple, as those of transformers, or,
    # as dataclasses, in a list. Keys of a dict may be tuples, but no lists.
    parts = cast("Sequence[Any]", context) if isinstance(context, (list, tuple)) else ()
    if isinstance(context, list):
        parts = [part for part in parts if isinstance(part, list)]
    for names in (context, *parts):
        if isinstance(names, (list, tuple)) and len(cast("list[Any]", names)) == count:
            fields_or_keys = cast("list[Any]", names)
            if all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in fields_or_keys):
                return fields_or_keys
    return range(count)


# The groups of leaves of a cache, in order. `torch.export` knows a DynamicCache by the first two, and dynamic_shapes
# are written for these.
_GROUPS = ("keys", "values", "caches", "lengths", "others")
_LENGTH = "cumulative_length"
_JSON_VALUES = (bool, float, str, type(None))


def register_caches() -> None:
    """Register every cache class of transformers that is loaded as a pytree node, unless it is registered already."""
    for kind in loaded_types("Cache"):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _flatten,
                functools.partial(_unflatten, kind=kind),
                serialized_type_name=_qualified_name(kind),
                flatten_with_keys_fn=_flatten_with_keys,
            )


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """Return the tensors and integers of a cache and its layers by group, and all else as context that JSON can hold."""
    leaves: dict[str, list[Any]] = {group: [] for group in _GROUPS}
    layers = cache_layer_types()

    def described(value: Any, name: str) -> Any:
        if isinstance(value, _JSON_VALUES):
            return ["value", value]
        if isinstance(value, (torch.dtype, torch.device)):
            return [type(value).__name__, str(value).removeprefix("torch.")]
        if isinstance(value, type):
            return ["class", _qualified_name(value)]
        if isinstance(value, (list, tuple)):
            items = cast("list[Any]", value)
            return [type(items).__name__, [described(item, name) for item in items]]
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value).items()
            return ["dict", [[_key(k), described(v, name)] for k, v in pairs]]
        if isinstance(value, layers):
            return ["layer", _qualified_name(type(value)), attributes(value)]
        # Tensors and integers, and what a tree_map has replaced them by.
        group = "caches" if is_cache(value) else name if name in ("keys", "values") else "others"
        group = "lengths" if name.startswith(_LENGTH) else group
        leaves[group].append(value)
        return [group]

    def attributes(owner: Any) -> list[Any]:
        return [[name, described(value, name)] for name, value in vars(owner).items()]

    context = attributes(cache)
    return [leaves["keys"], leaves["values"], *(leaves[g] for g in _GROUPS[2:] if leaves[g])], context


def _flatten_with_keys(cache: Any) -> tuple[list[Any], Any]:
    values, context = _flatten(cache)
    return [
        (MappingKey(group), value) for group, value in zip(_groups(context), values, strict=True)
    ], context


def _groups(context: Any) -> list[str]:
    """Return the groups of leaves that a context refers to, `keys` and `values` always."""
    present = {"keys", "values"}
    stack: list[Any] = [context]
    while stack:
        at = stack.pop()
        if isinstance(at, list):
            stack.extend(cast("list[Any]", at))
            if len(cast("list[Any]", at)) == 1 and at[0] in _GROUPS:
                present.add(at[0])
    return [group for group in _GROUPS if group in present]


def _unflatten(values: Any, context: Any, *, kind: type) -> Any:
    leaves = {group: iter(value) for group, value in zip(_groups(context), values, strict=True)}
    # A file names classes; only those that are loaded already are used.
    classes = {_qualified_name(known): known for known in (*cache_layer_types(), *loaded_types("Cache"))}

    def restored(written: Any) -> Any:
        form, *rest = written
        if form in leaves:
            return next(leaves[form])
        if form == "value":
            return rest[0]
        if form in ("dtype", "device"):
            return getattr(torch, rest[0]) if form == "dtype" else torch.device(rest[0])
        if form == "class":
            return classes[rest[0]]
        if form == "layer":
            return filled(classes[rest[0]], rest[1])
        if form == "dict":
            return {key: restored(value) for key, value in rest[0]}
        return (tuple if form == "tuple" else list)(restored(item) for item in rest[0])

    def filled(owner: Any, attributes: Any) -> Any:
        instance = owner.__new__(owner)
        vars(instance).update({name: restored(value) for name, value in attributes})
        return instance

    return filled(kind, context)


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int)):
        raise CaptureError(f"a cache keeps a dict with a key {key!r}, which a graph cannot take.")
    return key
