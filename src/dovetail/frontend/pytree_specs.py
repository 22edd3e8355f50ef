"""The form of arguments: a model's parameters, and tree specs that pickle on any torch."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._pytree import MappingKey, TreeSpec

from dovetail.errors import CaptureError

EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Slot:
    """One parameter of the model's signature, whether capture was given a value for it, and whether by its name."""

    name: str
    kind: Any
    has_default: bool
    default: Any
    captured: bool
    by_name: bool = False

    def parameter(self) -> inspect.Parameter:
        default = self.default if self.has_default else EMPTY
        return inspect.Parameter(self.name, self.kind, default=default)


def children(spec: TreeSpec) -> list[TreeSpec]:
    """The specs directly inside `spec`."""
    getter = getattr(spec, "children", None)
    return list(cast(Any, getter() if callable(getter) else cast(Any, spec).children_specs))


def context_of(spec: TreeSpec) -> Any:
    """What the node keeps beside its children: the keys of a dict, say."""
    return cast(Any, spec).context


def pack(spec: TreeSpec) -> Any:
    """A tree spec as plain tuples, which pickle without going through torch's own spec classes."""
    if spec.type is None:
        return None
    return (spec.type, context_of(spec), tuple(pack(child) for child in children(spec)))


def unpack(packed: Any) -> TreeSpec:
    """The tree spec that `pack` wrote."""
    if packed is None:
        return leaf_spec()
    kind, context, inner = packed
    return TreeSpec(kind, context, [unpack(child) for child in inner])


def leaf_spec() -> TreeSpec:
    return pytree.tree_structure(0)


def tuple_of(specs: Sequence[TreeSpec]) -> TreeSpec:
    return TreeSpec(tuple, None, list(specs))


def dict_of(keys: Sequence[str], specs: Sequence[TreeSpec]) -> TreeSpec:
    return TreeSpec(dict, list(keys), list(specs))


def describe_spec(names: Sequence[str], spec: TreeSpec) -> str:
    """The nesting of the arguments in words: a name for each, a star for each leaf."""
    parts = [f"{name}={_shown(child)}" for name, child in zip(names, children(spec), strict=False)]
    return f"({', '.join(parts)})"


def _shown(spec: TreeSpec) -> str:
    if spec.type is None:
        return "*"
    inner = [_shown(child) for child in children(spec)]
    if spec.type is dict:
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(context_of(spec), inner, strict=True)) + "}"
    if spec.type in (list, tuple):
        opening, closing = ("[", "]") if spec.type is list else ("(", ")")
        return opening + ", ".join(inner) + closing
    return f"{spec.type.__name__}({', '.join(inner)})"


@dataclass(frozen=True)
class Arrangement:
    """How a signature's parameters, flattened in order, line up with a graph's inputs."""

    slots: tuple[Slot, ...]
    spec: TreeSpec
    order: tuple[int, ...]
    paths: tuple[str, ...]


def arrange(in_spec: TreeSpec, signature: inspect.Signature) -> Arrangement:
    """Line up torch's `(args, kwargs)` spec with the model's signature. Raises TypeError if they disagree."""
    args_spec, kwargs_spec = children(in_spec)
    specs = [*children(args_spec), *children(kwargs_spec)]
    keys: list[str] = list(context_of(kwargs_spec) or ())
    starts: list[int] = []
    total = 0
    for spec in specs:
        starts.append(total)
        total += spec.num_leaves
    positional = len(specs) - len(keys)
    bound = signature.bind(*range(positional), **{k: positional + i for i, k in enumerate(keys)})

    slots: list[Slot] = []
    chosen: list[TreeSpec] = []
    leaf_of: list[int] = []
    paths: list[str] = []

    def take(index: int, path: str) -> TreeSpec:
        leaf_of.extend(range(starts[index], starts[index] + specs[index].num_leaves))
        paths.extend(path + inner for inner in _leaf_paths(specs[index]))
        return specs[index]

    for name, parameter in signature.parameters.items():
        captured = name in bound.arguments
        default = parameter.default
        value: Any = bound.arguments.get(name)
        by_name = _is_named(value, positional)
        known = None if default is EMPTY else default
        slots.append(Slot(name, parameter.kind, default is not EMPTY, known, captured, by_name))
        if not captured:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            chosen.append(tuple_of([take(i, f"{name}[{j}]") for j, i in enumerate(value)]))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            chosen.append(dict_of(list(value), [take(i, f"{name}[{k!r}]") for k, i in value.items()]))
        else:
            chosen.append(take(value, name))
    order = [0] * total
    named = [""] * total
    for leaf, (placeholder, path) in enumerate(zip(leaf_of, paths, strict=True)):
        order[placeholder] = leaf
        named[placeholder] = path
    return Arrangement(tuple(slots), tuple_of(chosen), tuple(order), tuple(named))


def _is_named(value: Any, positional: int) -> bool:
    """Whether what was bound to a parameter, by number, was given by name: the numbers of those come last."""
    return isinstance(value, dict) or (isinstance(value, int) and value >= positional)


def _leaf_paths(spec: TreeSpec) -> list[str]:
    if spec.type is None:
        return [""]
    inner = children(spec)
    keys: list[Any] = list(context_of(spec)) if spec.type is dict else list(range(len(inner)))
    return [f"[{key!r}]{rest}" for key, child in zip(keys, inner, strict=True) for rest in _leaf_paths(child)]


def leaf_steps(spec: TreeSpec) -> list[tuple[Any, ...]]:
    """The way to each leaf: keys, names of fields, and positions."""
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
    """As `leaf_steps`, of a cache of transformers: the tensors of each layer, or the caches in it by name.

    Its children are groups of leaves: the keys of all layers, their values, caches, and what else there is.
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
    """What the children of a node are called."""
    context = context_of(spec)
    # What a named tuple has as context is its class.
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
            listed = cast("list[Any]", names)
            if all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in listed):
                return listed
    return range(count)


def generic_signature() -> inspect.Signature:
    """What is called with anything: used where the model's own signature is not known."""
    return inspect.Signature(
        [
            inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    )


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
