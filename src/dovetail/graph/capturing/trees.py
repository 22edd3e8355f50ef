"""Key-value caches of Hugging Face models as pytrees, and their update in place after a graph has run."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._pytree import MappingKey, TreeSpec

from dovetail.errors import CaptureError
from dovetail.graph.capturing.specs import children, context_of

_CACHES = "transformers.cache_utils"
# The groups of leaves of a cache, in order. `torch.export` knows a DynamicCache by the first two, and dynamic_shapes
# are written for these.
_GROUPS = ("keys", "values", "caches", "lengths", "others")
_LENGTH = "cumulative_length"
_PLAIN = (bool, float, str, type(None))


def prepare() -> None:
    """Register every cache class of transformers that is loaded as a pytree node, unless somebody did already."""
    for kind in _loaded("Cache"):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _flatten,
                functools.partial(_unflatten, kind=kind),
                serialized_type_name=_qualified_name(kind),
                flatten_with_keys_fn=_flatten_with_keys,
            )


def is_cache(value: object) -> bool:
    base = getattr(sys.modules.get(_CACHES), "Cache", None)
    return base is not None and isinstance(value, base)


def _loaded(*names: str) -> list[type]:
    """Classes of this name in transformers' cache module and all that derive from them."""
    module = sys.modules.get(_CACHES)
    known = [kind for name in names if isinstance(kind := getattr(module, name, None), type)]
    for kind in known:
        known.extend(sub for sub in kind.__subclasses__() if sub not in known)
    return known


def _layer_types() -> tuple[type, ...]:
    return tuple(_loaded("CacheLayerMixin", "LinearAttentionCacheLayerMixin"))


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """Tensors and integers of a cache and its layers by group, and all else as data that JSON can hold."""
    leaves: dict[str, list[Any]] = {group: [] for group in _GROUPS}
    layers = _layer_types()

    def described(value: Any, name: str) -> Any:
        if isinstance(value, _PLAIN):
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
        # Tensors and integers, and whatever a tree_map has put in their place.
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
    """The groups that a context takes leaves from, `keys` and `values` always."""
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
    classes = {_qualified_name(known): known for known in (*_layer_types(), *_loaded("Cache"))}

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


@dataclass(frozen=True)
class Carried:
    """A cache argument that the model updates in place: which parameter, and where in the results its state is.

    `start` and `count` are the leaves of the results that make up the cache.
    """

    slot: int
    start: int
    count: int


def find_caches(spec: TreeSpec) -> list[tuple[int, int]]:
    """First leaf and number of leaves of every cache in a spec, in order."""
    places: list[tuple[int, int]] = []
    stack: list[tuple[TreeSpec, int]] = [(spec, 0)]
    while stack:
        at, start = stack.pop()
        if _is_cache_spec(at):
            places.append((start, at.num_leaves))
            continue
        for child in children(at):
            stack.append((child, start))
            start += child.num_leaves
    return sorted(places)


def _is_cache_spec(spec: TreeSpec) -> bool:
    return isinstance(spec.type, type) and spec.type in _loaded("Cache")


def split_at(spec: TreeSpec, starts: frozenset[int]) -> tuple[TreeSpec, dict[int, TreeSpec]]:
    """The spec with the caches whose leaves begin at `starts` as one leaf each, and the specs of these caches."""
    leaf = pytree.tree_structure(0)
    inner: dict[int, TreeSpec] = {}

    def walk(at: TreeSpec, first: int) -> TreeSpec:
        if first in starts and _is_cache_spec(at):
            inner[first] = at
            return leaf
        if at.type is None:
            return at
        parts: list[TreeSpec] = []
        for child in children(at):
            parts.append(walk(child, first))
            first += child.num_leaves
        return TreeSpec(at.type, context_of(at), parts)

    return walk(spec, 0), inner


def hand_back(given: Any, updated: Any) -> Any:
    """Give the caller's cache the updated state, its layers those of theirs; returns the caller's."""
    for name in [name for name in vars(given) if name not in vars(updated)]:
        del vars(given)[name]
    for name, value in vars(updated).items():
        vars(given)[name] = _merged(vars(given).get(name), value)
    return given


def _merged(old: Any, new: Any) -> Any:
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        items, others = cast("list[Any]", old), cast("list[Any]", new)
        both = [_merged(a, b) for a, b in zip(items, others, strict=False)]
        items[:] = [*both, *others[len(items) :]]
        return items
    if isinstance(old, dict):
        table, changed = cast("dict[Any, Any]", old), cast("dict[Any, Any]", new)
        merged = {key: _merged(table.get(key), value) for key, value in changed.items()}
        table.clear()
        table.update(merged)
        return table
    if is_cache(old) or isinstance(old, _layer_types()):
        return hand_back(old, new)
    return new
