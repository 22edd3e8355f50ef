"""The form of arguments: a model's parameters, and tree specs that pickle on any torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.utils._pytree as pytree
from torch.utils._pytree import TreeSpec

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
