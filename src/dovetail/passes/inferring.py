"""Fake values for new nodes, made without adding anything to what is known of a graph's symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.graph.normalform import same_geometry, same_number
from dovetail.graph.storages import storage_key


def fake_mode(nodes: Iterable[Node]) -> FakeTensorMode | None:
    """The mode that the values of a graph live in, None if there are no fake values."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextlib.contextmanager
def inferring(mode: FakeTensorMode | None) -> Generator[None]:
    """Operators called inside run on fake values, untracked by autograd, and settle no symbol."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
        yield


def run_on(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """What a call of a function gives for other values of its arguments; raises what the function raises."""
    function = cast("Callable[..., Any]", node.target)
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    return function(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", kwargs))


def storage_keys(value: Any) -> set[int]:
    """The storages that a value, or the values of a tuple, lie in."""
    if isinstance(value, Tensor):
        return {storage_key(value)}
    if isinstance(value, (tuple, list)):
        return {key for item in cast("Sequence[Any]", value) for key in storage_keys(item)}
    return set()


def same_form(a: Any, b: Any) -> bool:
    """Whether two values have one dtype, device, shape, strides and offset, tuples part by part."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_geometry(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        return len(left) == len(right) and all(same_form(x, y) for x, y in zip(left, right, strict=True))
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return same_number(a, b)
    return type(a) is type(b) and a == b


def moved(value: Any, onto: dict[int, Tensor]) -> Any:
    """The value with each tensor that lies in a storage of `onto` laid into the storage found there instead."""
    if isinstance(value, Tensor):
        base = onto.get(storage_key(value))
        if base is None:
            return value
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (tuple, list)):
        items = [moved(item, onto) for item in cast("Sequence[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
