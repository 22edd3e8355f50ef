"""Memory that tensors share: two inputs, or an input and what the model owns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from dovetail.graph.module import attribute

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Owned:
    """Where a graph has state that it writes, and, if it also writes inputs, state that it reads.

    The graph computes with one value of each while the model would see every write through either.
    """

    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.written or self.read)

    def shared(
        self, module: nn.Module, values: Sequence[Any], mutated: Collection[int]
    ) -> tuple[int, str, bool] | None:
        """An input and the state it shares memory with, and whether it is the state that is written."""
        tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
        for target in self.written:
            held = attribute(module, target)
            for i, value in tensors:
                if isinstance(held, Tensor) and overlap(value, held):
                    return i, target, True
        for target in self.read:
            held = attribute(module, target)
            for i, value in tensors:
                if i in mutated and isinstance(held, Tensor) and overlap(value, held):
                    return i, target, False
        return None


NOTHING = Owned()


def owned_by(graph: Graph, *, writes_inputs: bool) -> Owned:
    """The state of a captured graph, whose writes are copies at its end."""
    writes = [node.args[0] for node in graph.nodes if node.target is _COPY]
    written = [str(node.target) for node in writes if isinstance(node, Node) and node.op == "get_attr"]
    read = [str(node.target) for node in graph.find_nodes(op="get_attr")] if writes_inputs else []
    return Owned(tuple(dict.fromkeys(written)), tuple(dict.fromkeys(read)))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors may share memory."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b
    if a.numel() == 0 or b.numel() == 0:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        if a.untyped_storage()._cdata != b.untyped_storage()._cdata:  # they have no data to point at
            return False
    elif a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (start_a, end_a), (start_b, end_b) = _extent(a), _extent(b)
    return start_a < end_b and start_b < end_a


def _extent(value: Tensor) -> tuple[int, int]:
    start = int(value.storage_offset()) * value.element_size()
    steps = [int((size - 1) * stride) for size, stride in zip(value.shape, value.stride(), strict=True)]
    span = sum(steps) + 1
    return start, start + span * value.element_size()


def overlaps_itself(value: Tensor) -> bool:
    """Whether two elements of a strided tensor may lie in one place, as in an expanded one."""
    if value.layout is not torch.strided:
        return False
    if isinstance(value, FakeTensor) and value._has_symbolic_sizes_strides:
        # Comparing symbols would add guards to the graph.
        return any(type(stride) is int and stride == 0 for stride in value.stride())
    if value.is_contiguous():
        return False
    span = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two values are the same elements of one memory."""
    if a.layout is not torch.strided or b.layout is not torch.strided or a.dim() != b.dim():
        return False
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.dtype == b.dtype
    return same and str(a.shape) == str(b.shape) and str(a.stride()) == str(b.stride())
