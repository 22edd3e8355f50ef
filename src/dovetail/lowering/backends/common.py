"""What several backends ask of a region before they take it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.graph.effects import effects
from dovetail.lowering.onnx.types import is_number
from dovetail.outlining.region import Region

_NOWHERE = torch.nn.Module()


def why_not_fixed(region: Region) -> str | None:
    """Why code for the sizes seen once would not do: a size that may vary, an operand that is a number."""
    for node in region.body.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"its operand '{node.name}' is a {_word(value)}, not a tensor"
        if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride())):
            return f"the sizes of its operand '{node.name}' may vary"
    return None


def why_not_plain(region: Region, *allowed: str) -> str | None:
    """Why a region is no plain computation, effects of the words given aside."""
    found = [word for word in region.effects if word not in allowed]
    return f"it has effects ({', '.join(found)}) that must stay where they are" if found else None


def operand_devices(region: Region) -> Iterator[torch.device]:
    """Where the operands of a region lie, as far as that is known."""
    for node in region.body.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            yield value.device


def values_of(*nodes: Node) -> Iterator[Any]:
    """What nodes compute; parts of tuples one by one, without those that are not there."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            yield from (one for one in cast("Sequence[Any]", value) if one is not None)
        else:
            yield value


def why_empty(node: Node) -> str | None:
    """Why an operation is on tensors without elements, of which compilers make other numbers than torch, or none.

    Of a tuple some may be empty that nobody reads, as the statistics of a norm in eval mode.
    """
    for one in (node, *node.all_input_nodes):
        value = one.meta.get("val")
        if isinstance(value, Tensor) and any(_may_be_zero(n) for n in value.shape):
            return f"'{one.name}' has no elements, or may have none"
    return None


def why_denormal(node: Node, name: str) -> str | None:
    """Why a literal would be zero to a compiler: it is denormal in the dtype that the operation computes in."""
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
            return f"{literal} is denormal in {str(dtype).removeprefix('torch.')}, and '{name}' takes that for zero"
    return None


def _may_be_zero(size: Any) -> bool:
    """Whether a size can be zero; those that operands have may not where they vary, for calls are guarded."""
    if is_number(size):
        return size == 0
    node = size.node
    return not node.expr.is_symbol and node.shape_env.bound_sympy(node.expr).lower < 1


def why_not_pure(node: Node) -> str | None:
    """Why a node is no operation of tensors alone."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return f"'{node.name}' calls {target}, which is no operator"
    found = effects(node, _NOWHERE)
    if found.pure:
        return None
    word = "writes" if found.writes else "draws random numbers" if found.random else "acts on the world"
    return f"{target} {word}"


@contextmanager
def quiet() -> Generator[None]:
    """Keep from the user what torch says of its own older parts: that they are deprecated, and how they work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _word(value: object) -> str:
    return "number" if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__
