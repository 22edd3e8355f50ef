"""Conditions that backends check before they take a region or an operation: static sizes, effects, devices, empty tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.ir.effects import effects_of
from dovetail.ir.nodes import is_static_size
from dovetail.outlining.region import Region

_NO_MODULE = nn.Module()


def why_not_static(region: Region) -> str | None:
    """Return why a region needs more than static sizes: a symbolic size, or an operand that is a number."""
    for node in region.body.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            kind = "number" if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__
            return f"its operand '{node.name}' is a {kind}, not a tensor"
        if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride())):
            return f"the sizes of its operand '{node.name}' may vary"
    return None


def why_effectful(region: Region, *allowed: str) -> str | None:
    """Return the effects of a region other than the allowed ones, as a reason; None if it has no others."""
    others = [effect for effect in region.effects if effect not in allowed]
    return f"it has effects ({', '.join(others)}) that must stay where they are" if others else None


def operand_devices(region: Region) -> Iterator[torch.device]:
    """Yield the devices of a region's tensor operands."""
    for node in region.body.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            yield value.device


def values_of(*nodes: Node) -> Iterator[Any]:
    """Yield the values of nodes, the elements of tuples one by one without those that are None."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            yield from (one for one in cast("Sequence[Any]", value) if one is not None)
        else:
            yield value


def why_empty(node: Node) -> str | None:
    """Return which tensor of an operation may be empty: compilers differ from torch there, or fail.

    Elements of tuples do not count: some are empty and unused, as the statistics of a norm in eval mode.
    """
    for one in (node, *node.all_input_nodes):
        value = one.meta.get("val")
        if isinstance(value, Tensor) and any(_may_be_zero(n) for n in value.shape):
            return f"'{one.name}' has no elements, or may have none"
    return None


def why_denormal(node: Node, name: str) -> str | None:
    """Return which literal a compiler would flush to zero: one denormal in the dtype of the operation."""
    dtypes = [v.dtype for v in values_of(node, *node.all_input_nodes) if isinstance(v, Tensor)]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    dtype = (
        functools.reduce(torch.promote_types, floating, floating[0])
        if floating
        else torch.get_default_dtype()
    )
    literals = [v for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, float)]
    for literal in literals:
        if literal and 0 < float(torch.tensor(literal, dtype=dtype).abs()) < torch.finfo(dtype).tiny:
            return f"{literal} is denormal in {str(dtype).removeprefix('torch.')}, and '{name}' flushes that to zero"
    return None


def _may_be_zero(size: Any) -> bool:
    """Return whether a size can be zero; symbolic sizes of operands cannot, for calls are guarded."""
    if is_static_size(size):
        return size == 0
    node = size.node
    return not node.expr.is_symbol and node.shape_env.bound_sympy(node.expr).lower < 1


def why_not_pure(node: Node) -> str | None:
    """Return why a node is not a pure operator; None if it is."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return f"'{node.name}' calls {target}, which is not an operator"
    node_effects = effects_of(node, _NO_MODULE)
    if node_effects.pure:
        return None
    if node_effects.writes:
        return f"{target} writes"
    return f"{target} {'draws random numbers' if node_effects.random else 'acts on the host'}"


@contextmanager
def suppress_warnings() -> Generator[None]:
    """Suppress warnings of torch about deprecated parts of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
