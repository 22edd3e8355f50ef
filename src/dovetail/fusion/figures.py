"""What the operations of a graph take, in numbers: bytes, flops and whether they are launched at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.graph.commuting import base_name
from dovetail.graph.describe import nbytes
from dovetail.graph.index import Index
from dovetail.graph.module import attribute
from dovetail.graph.spellings import traits
from dovetail.outlining.requests import is_projection

_UNASKED = -1
# By the argument whose last dimension is summed over; the result's elements are multiplied by it.
_CONTRACTIONS = {
    "linear": ("input",),
    "matmul": ("self", "input"),
    "mm": ("self", "input"),
    "bmm": ("self", "input"),
    "mv": ("self", "input"),
    "addmm": ("mat1",),
    "baddbmm": ("batch1",),
    "addbmm": ("batch1",),
}
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution", "_convolution"})


class Figures:
    """Sizes and work of each position of one graph, looked up when first asked for.

    A size that is not known counts as nothing, in what is saved as in what is spent; `known` tells.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._bytes = [_UNASKED] * len(index)
        self._free = [_UNASKED] * len(index)
        self._unknown: set[int] = set()

    def bytes(self, position: int) -> int:
        """Bytes of a position's value, of all its parts if it has several."""
        found = self._bytes[position]
        if found == _UNASKED:
            found = self._bytes[position] = self._measure(position)
        return found

    def known(self, position: int) -> bool:
        """Whether the size of a position's value is known."""
        self.bytes(position)
        return position not in self._unknown

    def _measure(self, position: int) -> int:
        node = self.index.nodes[position]
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = attribute(self.index.gm, cast("str", node.target))
        total = nbytes(value)
        if total is not None:
            return total
        parts = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,)
        # What no one reads, such as the None of an assertion, takes nothing.
        each = [nbytes(part) for part in parts if part is not None or (value is None and node.users)]
        if None in each:
            self._unknown.add(position)
        return sum(size for size in each if size is not None)

    def free(self, position: int) -> bool:
        """Whether nothing is launched for it: an input, a constant, a view, a part of a tuple, a size."""
        found = self._free[position]
        if found == _UNASKED:
            found = self._free[position] = int(self._is_free(position))
        return found == 1

    def _is_free(self, position: int) -> bool:
        node = self.index.nodes[position]
        if node.op in ("placeholder", "get_attr", "output"):
            return True
        value = node.meta.get("val")
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        return self.view_of(position) is not None or is_projection(node)

    def view_of(self, position: int) -> int | None:
        """The position whose memory a view names anew, None for anything that makes a value of its own."""
        told = self.index.dependencies.effects.get(position)
        if told is None or not told.aliases:
            return None
        base = self.index.position[told.aliases[0]]
        if is_projection(self.index.nodes[position]):
            return base if self._splits(base) else None
        return base if not told.looks or self._splits(position) else None

    def _splits(self, position: int) -> bool:
        """Whether it returns several views, as `split` does."""
        node, told = self.index.nodes[position], self.index.dependencies.effects.get(position)
        if told is None or not told.aliases or told.writes or told.doubtful_aliases:
            return False
        return node.op in ("call_function", "call_method") and traits(node).several

    def writes(self, position: int) -> bool:
        """Whether it writes memory that was there before."""
        told = self.index.dependencies.effects.get(position)
        return told is not None and bool(told.writes or told.state_written)

    def flops(self, position: int) -> int:
        """Multiplications and additions of an operation; one for each element where no formula is known."""
        node = self.index.nodes[position]
        if self.free(position):
            return 0
        shape = _shape(node)
        if shape is None:
            return 0
        count = _product(shape)
        name = base_name(node) if node.op != "call_module" else ""
        if name in _CONTRACTIONS:
            first = _shape(_argument(node, _CONTRACTIONS[name]))
            return 2 * count * first[-1] if first else count
        if name in _CONVOLUTIONS:
            weight = _shape(_argument(node, ("weight",), 1))
            return 2 * count * _product(weight[1:]) if weight else count
        if name == "scaled_dot_product_attention":
            query, key = _shape(_argument(node, ("query",))), _shape(_argument(node, ("key",), 1))
            return 2 * _product(query) * key[-2] + 2 * count * key[-2] if query and key else count
        return self._by_formula(node, count)

    def work(self, position: int) -> int:
        """Flops beyond one for each element: those that take time of their own beside the memory's."""
        shape = _shape(self.index.nodes[position])
        return max(0, self.flops(position) - _product(shape)) if shape is not None else 0

    @staticmethod
    def _by_formula(node: Node, count: int) -> int:
        from torch.utils.flop_counter import flop_registry

        formula = flop_registry.get(getattr(node.target, "overloadpacket", node.target))
        if formula is None:
            return count

        def value(n: Node) -> Any:
            return n.meta.get("val")

        args: Any = map_arg(node.args, value)
        kwargs: Any = map_arg(node.kwargs, value)
        try:
            return int(formula(*args, **kwargs, out_val=value(node)))
        except Exception:  # a formula that does not take this call tells nothing
            return count


def _argument(node: Node, names: Sequence[str], place: int = 0) -> Any:
    told = traits(node)
    for name in names:
        found = told.argument(node, name)
        if isinstance(found, Node):
            return found
    return node.args[place] if place < len(node.args) else None


def _shape(node: Any) -> list[int] | None:
    """The sizes of a node's value, symbolic ones by hint; None if they are not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, (tuple, list)):
        value = next((v for v in cast("Sequence[Any]", value) if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return None
    sizes: list[int] = []
    for size in value.shape:
        if type(size) is not int and not cast("Any", size).node.has_hint():
            return None
        sizes.append(size if type(size) is int else int(cast("Any", size).node.hint))
    return sizes


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
