"""Which values of a graph may share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.meta_keys import CANONICAL


class Sharing(Protocol):
    """What an operator says of the memory of its result."""

    @property
    def aliases(self) -> tuple[Node, ...]: ...
    @property
    def doubtful_aliases(self) -> bool: ...
    @property
    def state_shared(self) -> tuple[torch.Tensor, ...]: ...


class Storages:
    """Which values may share memory, as a union of sets: linear, and never too fine."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self.position: dict[Node, int] = {}
        self._state: dict[int, int] = {}

    def find(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)

    def of(self, node: Node) -> int:
        return self.find(self.position[node])

    def of_state(self, tensor: torch.Tensor) -> int:
        """The class of a parameter or buffer that no node names."""
        key = storage_key(tensor)
        if key not in self._state:
            self._state[key] = len(self._parent)
            self._parent.append(len(self._parent))
        return self.find(self._state[key])


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def storages(root: nn.Module, nodes: Sequence[Node], each: Sequence[Sharing]) -> Storages:
    """Which nodes may share memory: by operator schemas, by the fake values' storages, by the real attributes."""
    classes = Storages(len(nodes))
    trusted = values_tell(root, nodes, each)
    position = classes.position
    seen: dict[int, int] = {}
    for i, node in enumerate(nodes):
        position[node] = i
    for i, node in enumerate(nodes):
        if node.op == "output":
            continue
        keys = _storage_keys(node.meta.get("val"))
        if node.op == "get_attr":
            value = attribute(root, cast("str", node.target))
            if isinstance(value, torch.Tensor):
                classes.join(i, classes.of_state(value))
        told = each[i]
        if told.aliases and not (trusted and rules_out(node, told)):
            for other in told.aliases:
                classes.join(i, position[other])
        for tensor in told.state_shared:
            classes.join(i, classes.of_state(tensor))
        for key in keys:
            classes.join(i, seen.setdefault(key, i))
    return classes


def _storage_keys(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [storage_key(value)]
    if isinstance(value, (tuple, list)):
        return [storage_key(v) for v in cast("Sequence[Any]", value) if isinstance(v, torch.Tensor)]
    return []


def values_tell(root: nn.Module, nodes: Sequence[Node], each: Sequence[Sharing]) -> bool:
    """Whether the values of a graph share storage where the program does, so that not sharing means something.

    Captured graphs' values do. Elsewhere the views that schemas declare give evidence: some tracers make every value
    anew.
    """
    if CANONICAL in getattr(root, "meta", {}):
        return True
    evidence = False
    for node, told in zip(nodes, each, strict=True):
        if told.aliases and not told.doubtful_aliases:
            keys = _storage_keys(node.meta.get("val"))
            theirs = {k for n in told.aliases for k in _storage_keys(n.meta.get("val"))}
            if keys and theirs:
                if not theirs.intersection(keys):
                    return False
                evidence = True
    return evidence


def rules_out(node: Node, told: Sharing) -> bool:
    """Whether the values show that a result is memory of its own, where no schema claims otherwise."""
    if not told.doubtful_aliases:
        return False
    keys = _storage_keys(node.meta.get("val"))
    if not keys:
        # A size, a number, or nothing at all shares no memory; a missing value proves nothing.
        return isinstance(
            node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
        )
    theirs = [_storage_keys(n.meta.get("val")) for n in told.aliases]
    if any("val" not in n.meta or n.meta["val"] is None for n in told.aliases):
        return False
    return not any(k in keys for ks in theirs for k in ks)
