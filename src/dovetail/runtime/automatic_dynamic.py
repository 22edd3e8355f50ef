"""Automatic dynamic shapes: which sizes of the inputs are symbolic in the next capture of a model."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import Dim
from torch.utils._pytree import MappingKey, SequenceKey, TreeSpec

from dovetail.frontend import calling_convention

# Attributes that torch._dynamo.mark_dynamic, mark_unbacked, maybe_mark_dynamic and mark_static set on a tensor.
_MARKED, _UNBACKED, _MAYBE_MARKED, _STATIC = (
    "_dynamo_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_static_indices",
)
_MARKS = (
    _MARKED,
    _UNBACKED,
    _MAYBE_MARKED,
    _STATIC,
    "_has_symbolic_sizes",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
)
_CONTAINERS = frozenset({dict, list, tuple, OrderedDict, defaultdict, deque})
_MAX_SHOWN = 3


@dataclass
class _Observed:
    """Calls that differ only in sizes and integers: those of the last call, and which ones differed so far."""

    spec: TreeSpec
    kinds: list[Any]
    sizes: list[tuple[int, ...]]
    dynamic: list[set[int]]
    is_static: bool = False


@dataclass(frozen=True)
class Dimensions:
    """The symbolic dimensions of each leaf of the arguments; an integer has dimension 0.

    `changes` describes those that are symbolic because they changed since the last such call, and were not before;
    `specialized` those that would be symbolic if they were not 0 or 1.
    """

    spec: TreeSpec
    leaves: tuple[dict[int, Any], ...]
    changes: tuple[str, ...] = ()
    specialized: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(self.leaves)

    def as_dynamic_shapes(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the `dynamic_shapes` for `torch.export`, by parameters of `forward`."""
        leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
        marks = [
            _Mark((dims.get(0) if not isinstance(leaf, Tensor) else dims) or None)
            for leaf, dims in zip(leaves, self.leaves, strict=True)
        ]
        marked_args, marked_kwargs = pytree.tree_unflatten(marks, self.spec)
        bound = inspect.signature(forward).bind(*marked_args, **marked_kwargs)
        return {name: _nested(value) for name, value in bound.arguments.items()}


@dataclass(frozen=True)
class _Mark:
    """A leaf of the tree of arguments, replaced by its dimensions."""

    dims: Any


def _nested(value: Any) -> Any:
    """Return a tree of marks in builtin containers; any other node becomes the sequence of its children."""
    if isinstance(value, _Mark):
        return value.dims
    if not _is_builtin(value):
        return _nested(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    return pytree.tree_map(_nested, value, is_leaf=lambda inner: not _is_builtin(inner))


def _is_builtin(value: Any) -> bool:
    return type(value) in _CONTAINERS or pytree.is_namedtuple(value)


@dataclass
class AutomaticDynamic:
    """The sizes of calls so far, so that those that change are captured as symbols.

    With `dynamic` None these are the sizes and integers that differed in an earlier call of the same structure, those
    marked by `torch._dynamo.mark_dynamic`, and the lengths of key-value caches, which grow from call to call. With True
    every size, with False only those that are marked.
    """

    dynamic: bool | None = None
    _observed: list[_Observed] = field(default_factory=list[_Observed])

    def observe(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Dimensions:
        """Record a call and return the dimensions that should be symbolic in a capture for it."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds, sizes = [_kind(leaf) for leaf in leaves], [_sizes(leaf) for leaf in leaves]
        known = next((o for o in self._observed if o.spec == spec and o.kinds == kinds), None)
        changes: list[tuple[int, int, int]] = []
        specialized: list[tuple[int, int, None]] = []
        if known is None:
            known = _Observed(spec, kinds, sizes, [set() for _ in leaves])
            self._observed.append(known)
            if self.dynamic is None:
                for leaf, dim in _lengths_of_caches(args, kwargs):
                    known.dynamic[leaf].add(dim)
        elif self.dynamic is not False and not known.is_static:
            for i, (was, now) in enumerate(zip(known.sizes, sizes, strict=True)):
                changed = {d for d, (a, b) in enumerate(zip(was, now, strict=True)) if a != b}
                changes += [(i, dim, was[dim]) for dim in sorted(changed - known.dynamic[i])]
                known.dynamic[i] |= changed
                # Broadcasting and emptiness depend on these.
                specialized += [(i, dim, None) for dim in sorted(changed) if now[dim] in (0, 1)]
        known.sizes = sizes
        dims = tuple(
            {} if known.is_static else self._dims(leaf, symbolic, size)
            for leaf, symbolic, size in zip(leaves, known.dynamic, sizes, strict=True)
        )
        changed_dims = [(i, d, was) for i, d, was in changes if d in dims[i]]
        return Dimensions(
            spec,
            dims,
            _describe_changes(forward, args, kwargs, changed_dims),
            _describe_changes(forward, args, kwargs, specialized),
        )

    def keep_static(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make no sizes of such calls symbolic from now on, because they could not be captured so."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds = [_kind(leaf) for leaf in leaves]
        for known in self._observed:
            if known.spec == spec and known.kinds == kinds:
                known.is_static = True

    def _dims(self, leaf: Any, symbolic: set[int], sizes: tuple[int, ...]) -> dict[int, Any]:
        if self.dynamic is True:
            symbolic = set(range(len(sizes)))
        dims: dict[int, Any] = {d: Dim.AUTO for d in sorted(symbolic) if sizes[d] not in (0, 1)}
        if isinstance(leaf, Tensor):
            dims |= dict.fromkeys(sorted(getattr(leaf, _MAYBE_MARKED, ())), Dim.AUTO)
            for name in (_UNBACKED, _MARKED):
                dims |= dict.fromkeys(sorted(getattr(leaf, name, ())), Dim.DYNAMIC)
            for dim in getattr(leaf, _STATIC, ()):
                dims.pop(dim, None)
        return dims


@contextmanager
def preserve_dynamic_marks(inputs: Any) -> Generator[None]:
    """Restore the marks of dynamic sizes on tensors, which torch.export removes."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    marks = [(t, name, getattr(t, name)) for t in tensors for name in _MARKS if hasattr(t, name)]
    try:
        yield
    finally:
        for tensor, name, mark in marks:
            setattr(tensor, name, mark)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (Tensor, leaf.dtype, leaf.device, leaf.dim())
    if type(leaf) is int:
        return int
    return (type(leaf), leaf if isinstance(leaf, (bool, float, str, type(None))) else id(leaf))


def _sizes(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return (leaf,) if type(leaf) is int else ()


def _lengths_of_caches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the leaves and dimensions with the length of a cache, or of a cache and the tokens of this call."""
    leaves = pytree.tree_leaves((args, dict(kwargs)), is_leaf=calling_convention.is_cache)
    if not any(calling_convention.is_cache(leaf) for leaf in leaves):
        return
    lengths: set[int] = set()
    others: list[tuple[int, Tensor]] = []
    start = 0
    for leaf in leaves:
        if not calling_convention.is_cache(leaf):
            others += [(start, leaf)] if isinstance(leaf, Tensor) else []
            start += 1
            continue
        for path, item in pytree.tree_flatten_with_path(leaf)[0]:
            group = {key.key for key in path if isinstance(key, MappingKey)}
            if group & {"keys", "values"} and isinstance(item, Tensor) and item.dim() > 1 and item.numel():
                lengths.add(item.shape[-2])
                yield start, item.dim() - 2
            elif "lengths" in group and type(item) is int:
                lengths.add(item)
                yield start, 0
            start += 1
    tokens = {t.shape[-1] for _, t in others if not t.dtype.is_floating_point and t.dim()}
    lengths |= {length + n for length in lengths for n in tokens}
    for index, tensor in others:
        yield from ((index, dim) for dim, size in enumerate(tensor.shape) if size in lengths)


def _describe_changes(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    changes: Sequence[tuple[int, int, int | None]],
) -> tuple[str, ...]:
    """Return each size and, if given, its previous value; of several equal ones in an argument the first."""
    if not changes:
        return ()
    paths, leaves = zip(*pytree.tree_flatten_with_path((args, dict(kwargs)))[0], strict=True)
    names = _positional_names(forward, len(args))
    lines: dict[tuple[Any, int, int | None], str] = {}
    for i, dim, was in changes:
        place = f"'{_argument_name(paths[i], names)}'"
        if isinstance(leaves[i], Tensor):
            place = f"dimension {dim} of {place}"
        size = _sizes(leaves[i])[dim]
        change = f"is {size}" if was is None else f"from {was} to {size}"
        lines.setdefault((paths[i][:2], dim, was), f"{place} {change}")
    shown = list(lines.values())
    rest = len(shown) - _MAX_SHOWN
    return (*shown[:_MAX_SHOWN], f"{rest} more") if rest > 0 else tuple(shown)


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    for name, parameter in inspect.signature(forward).parameters.items():
        collects = parameter.kind is parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(count - len(names))] if collects else [name]
    return names


def _argument_name(path: tuple[Any, ...], names: list[str]) -> str:
    head = path[1]
    name = names[head.idx] if isinstance(head, SequenceKey) else str(head.key)
    return name + pytree.keystr(path[2:])
