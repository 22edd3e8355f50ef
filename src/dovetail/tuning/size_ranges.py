"""Ranges of a size: calls within one share a capture, whose guards hold for the range, and the plan that was measured in it.

The size that varies is described by the inputs of a call, with `n` in place of it: "int64[1, n]". Every input that has this
size has it in common.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim

from dovetail.errors import InvalidArgument
from dovetail.runtime.automatic_dynamic import Dimensions

Range = tuple[int, int]
_SIZE = "n"
_SEPARATOR, _ESCAPED = "; ", "\\x3b "
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_MODEL = re.compile(r" @[0-9a-f]{8}$")
_POINTS = 3
"""How many sizes of a dynamic dimension are tuned."""


@dataclass(frozen=True)
class SizedExample:
    """Example inputs of one size, and the range of sizes that they are tuned for."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    range: Range
    pattern: str


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], varying: Mapping[int, set[int]]) -> str:
    """Return the inputs of a call in order, with `n` for the sizes that vary."""
    texts: list[str] = []
    for i, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
        if isinstance(leaf, Tensor):
            sizes = [_SIZE if d in varying.get(i, ()) else str(n) for d, n in enumerate(leaf.shape)]
            texts.append(f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
        else:
            text = repr(leaf) if isinstance(leaf, (int, float, bool, str)) else type(leaf).__name__
            texts.append(text.replace(_SEPARATOR, _ESCAPED))
    return _SEPARATOR.join(texts)


def model_pattern(pattern: str, model: Any) -> str:
    """Return the key of ranges of one model: the pattern, and a digest of the model's modules and the sizes of its state.

    Models with inputs alike have ranges of their own; what their forwards do is not compared.
    """
    if not isinstance(model, nn.Module):
        return pattern
    facts: list[Any] = [
        (name, type(module).__qualname__, _ADDRESS.sub("", module.extra_repr()))
        for name, module in model.named_modules()
    ]
    facts += [(name, tuple(t.shape)) for name, t in (*model.named_parameters(), *model.named_buffers())]
    digest = hashlib.blake2b("\n".join(map(repr, facts)).encode(), digest_size=4).hexdigest()
    return f"{pattern} @{digest}"


def patterns_for(sizes: Mapping[str, Sequence[Range]], model: Any) -> dict[str, Sequence[Range]]:
    """Return the ranges of each pattern for a model: its own, else those of any model, else those of another one.

    Another one may have the same graphs under other names.
    """

    def rank(key: str) -> int:
        pattern = _OF_MODEL.sub("", key)
        return 1 if key == pattern else 0 if key == model_pattern(pattern, model) else 2

    chosen: dict[str, Sequence[Range]] = {}
    for key in sorted(sizes, key=rank):
        chosen.setdefault(_OF_MODEL.sub("", key), sizes[key])
    return chosen


def dynamic_shapes_for(
    sizes: Mapping[str, Sequence[Range]],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the `dynamic_shapes` of a call with the inputs of a pattern; None for any other call.

    A size in no range gets the gap that it is in, so that its capture does not take the calls of a range.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    for pattern, ranges in sizes.items():
        matched = _match(pattern, leaves, args, kwargs)
        if matched is None:
            continue
        size, varying = matched
        low, high = _range_or_gap(size, ranges)
        dim = Dim("n", min=low, max=high) if high is None or low < high else None
        dims = tuple(
            dict.fromkeys(sorted(varying.get(i, ())) if dim else (), dim) for i in range(len(leaves))
        )
        return Dimensions(spec, cast("Any", dims)).as_dynamic_shapes(forward, args, kwargs)
    return None


def _range_or_gap(size: int, ranges: Sequence[Range]) -> tuple[int, int | None]:
    """Return the range that a size is in, or the sizes around it that are in none; sizes of 0 and 1 are alone."""
    inside = next((r for r in ranges if r[0] <= size <= r[1]), None)
    if inside is not None or size < 2:
        return inside or (size, size)
    below = max((high for _, high in ranges if high < size), default=1)
    above = min((low for low, _ in ranges if low > size), default=None)
    return max(2, below + 1), None if above is None else above - 1


def _match(
    pattern: str, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, dict[int, set[int]]] | None:
    """Return the size of a call and where it is, if its inputs are those of a pattern."""
    parts = pattern.split(_SEPARATOR)
    if len(parts) != len(leaves):
        return None
    varying: dict[int, set[int]] = {}
    for i, part in enumerate(parts):
        sizes = part.rpartition("[")[2].removesuffix("]").split(", ")
        if _SIZE in sizes:
            varying[i] = {d for d, n in enumerate(sizes) if n == _SIZE}
    if any(not isinstance(leaves[i], Tensor) or max(d) >= leaves[i].dim() for i, d in varying.items()):
        return None
    values = {int(leaves[i].shape[d]) for i, dims in varying.items() for d in dims}
    if len(values) != 1 or describe_inputs(args, kwargs, varying) != pattern:
        return None
    return values.pop(), varying


def sized_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Any) -> list[SizedExample]:
    """Return example inputs for each range of sizes.

    `sizes` is a list of example inputs, each a tuple like `args`, that differ in one size; or a mapping from the name or
    position of an argument to `{dim: Dim(name, min=..., max=...)}`, whose range is divided.
    """
    if isinstance(sizes, Mapping):
        examples, bounds = _examples_of_dim(args, kwargs, cast("Mapping[Any, Any]", sizes))
    else:
        examples, bounds = _examples_of_list(args, kwargs, sizes), None
    varying = _varying(examples)
    pattern = describe_inputs(*examples[0], varying)
    by_size = {_size_of(example, varying): example for example in examples}
    ordered = sorted(by_size)
    low, high = bounds or (2 if ordered[0] > 2 else ordered[0], ordered[-1])
    sized: list[SizedExample] = []
    for i, size in enumerate(ordered):
        first = low if i == 0 else math.isqrt(ordered[i - 1] * size) + 1
        last = high if i == len(ordered) - 1 else math.isqrt(size * ordered[i + 1])
        if size <= 1:
            # Sizes of 0 and 1 are always specialized.
            first = last = size
        elif i and ordered[i - 1] <= 1:
            first = 2
        sized.append(SizedExample(*by_size[size], (first, last), pattern))
    return sized


def _examples_of_list(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Any
) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    if not isinstance(sizes, (list, tuple)) or not sizes:
        raise InvalidArgument(
            "sizes must be a list of example inputs, each a tuple like `args`, or a mapping from arguments to "
            "{dim: Dim(name, min=..., max=...)}."
        )
    examples = cast("Sequence[Any]", sizes)
    for one in examples:
        if not isinstance(one, tuple):
            raise InvalidArgument(
                f"sizes: each of the examples is a tuple like `args`, not a {type(one).__name__}."
            )
    return [(args, kwargs), *((cast("tuple[Any, ...]", one), kwargs) for one in examples)]


def _examples_of_dim(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Mapping[Any, Any]
) -> tuple[list[tuple[tuple[Any, ...], Mapping[str, Any]]], Range]:
    dims: dict[Any, int] = {}
    ranges: set[Range] = set()
    for name, by_dim in sizes.items():
        if not isinstance(by_dim, Mapping) or len(cast("Mapping[Any, Any]", by_dim)) != 1:
            raise InvalidArgument(
                f"sizes[{name!r}] must be {{dim: Dim(name, min=..., max=...)}} with one dimension."
            )
        ((dim, symbol),) = cast("Mapping[Any, Any]", by_dim).items()
        low, high = getattr(symbol, "min", None), getattr(symbol, "max", None)
        if not isinstance(dim, int) or not isinstance(low, int) or not isinstance(high, int) or high > 2**31:
            raise InvalidArgument(f"sizes[{name!r}][{dim!r}] must be a Dim with a `min` and a `max`.")
        dims[name] = dim
        ranges.add((max(2, low), high))
    if len(ranges) != 1:
        raise InvalidArgument("sizes: all dimensions must have one range, for one size varies.")
    low, high = ranges.pop()
    if low >= high:
        raise InvalidArgument(f"sizes: the range from {low} to {high} has less than two sizes.")
    points = sorted({round(low * (high / low) ** (k / (_POINTS - 1))) for k in range(_POINTS)})
    examples: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [
        (_resized(args, dims, n), {**kwargs, **_resized_named(kwargs, dims, n)}) for n in points
    ]
    return examples, (low, high)


def _resized(args: tuple[Any, ...], dims: Mapping[Any, int], size: int) -> tuple[Any, ...]:
    for name in dims:
        if isinstance(name, int) and not 0 <= name < len(args):
            raise InvalidArgument(f"sizes: there is no argument {name}; {len(args)} are given.")
    return tuple(_with_size(value, dims[i], size) if i in dims else value for i, value in enumerate(args))


def _resized_named(kwargs: Mapping[str, Any], dims: Mapping[Any, int], size: int) -> dict[str, Any]:
    for name in dims:
        if isinstance(name, str) and name not in kwargs:
            raise InvalidArgument(
                f"sizes: there is no keyword argument '{name}'; give positional arguments by their position."
            )
    return {name: _with_size(kwargs[name], dim, size) for name, dim in dims.items() if isinstance(name, str)}


def _with_size(value: Any, dim: int, size: int) -> Any:
    """Return a tensor with its elements repeated or cut along a dimension."""
    if not isinstance(value, Tensor) or not -value.dim() <= dim < value.dim():
        raise InvalidArgument(f"sizes: there is no dimension {dim} of a {type(value).__name__}.")
    if value.shape[dim] == 0:
        raise InvalidArgument("sizes: an example of size 0 has no elements to repeat.")
    index = torch.arange(size, device=value.device) % value.shape[dim]
    return value.index_select(dim, index)


def _varying(examples: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> dict[int, set[int]]:
    """Return the dimensions of each input that differ between examples; raise unless it is one size."""
    flat = [pytree.tree_flatten((args, dict(kwargs))) for args, kwargs in examples]
    first, spec = flat[0]
    varying: dict[int, set[int]] = {}
    for leaves, other in flat[1:]:
        if other != spec:
            raise InvalidArgument("sizes: the examples have other inputs than `args`.")
        for i, (a, b) in enumerate(zip(first, leaves, strict=True)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if type(a) is not type(b) or (isinstance(a, (int, float, str)) and a != b):
                    raise InvalidArgument("sizes: the examples differ in more than a size.")
                continue
            if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
                raise InvalidArgument("sizes: the examples differ in more than a size.")
            dims = {d for d in range(a.dim()) if a.shape[d] != b.shape[d]}
            if dims:
                varying.setdefault(i, set()).update(dims)
    if not varying:
        raise InvalidArgument("sizes: no size differs between the examples and `args`.")
    for leaves, _ in flat:
        if len({leaves[i].shape[d] for i, dims in varying.items() for d in dims}) != 1:
            raise InvalidArgument("sizes: more than one size varies; tune them one after the other.")
    return varying


def _size_of(example: tuple[tuple[Any, ...], Mapping[str, Any]], varying: Mapping[int, Iterable[int]]) -> int:
    leaves = pytree.tree_leaves((example[0], dict(example[1])))
    return next(int(leaves[i].shape[d]) for i, dims in varying.items() for d in dims)
