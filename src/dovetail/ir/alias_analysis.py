"""Alias analysis: which values of a graph may share memory.

A flow-insensitive, unification-based may-alias analysis in the manner of B. Steensgaard ("Points-to analysis in almost
linear time", POPL 1996): each node and each tensor of the module's state begins in a class of its own, and every fact that
two of them may share memory (an alias in the operator's schema, one storage behind their fake values, one attribute)
merges their classes. Classes are never too fine, and the time is nearly linear in the size of the graph. Aliases that no
schema declares, but that cannot be ruled out, are dropped where the fake values prove that they do not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import nn
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.meta_keys import CANONICAL
from dovetail.ir.nodes import SCALARS, storage_key, storage_keys
from dovetail.ir.quotient_graph import UnionFind


class AliasInfo(Protocol):
    """The memory that the result of a node may share."""

    @property
    def aliases(self) -> tuple[Node, ...]: ...
    @property
    def assumed_aliases(self) -> bool: ...
    @property
    def state_shared(self) -> tuple[torch.Tensor, ...]: ...


class AliasClasses:
    """Classes of nodes and state tensors that may share memory, each under a number."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.position = {node: i for i, node in enumerate(nodes)}
        self._sets = UnionFind(len(nodes))
        self._state: dict[int, int] = {}
        self.join = self._sets.union

    def of(self, node: Node) -> int:
        return self._sets.find(self.position[node])

    def of_state(self, tensor: torch.Tensor) -> int:
        """Return the class of a parameter or buffer that no node names."""
        key = storage_key(tensor)
        if key not in self._state:
            self._state[key] = self._sets.add()
        return self._sets.find(self._state[key])


def alias_classes(root: nn.Module, nodes: Sequence[Node], infos: Sequence[AliasInfo]) -> AliasClasses:
    """Return the alias classes of a graph's nodes, from `infos`, the fake values' storages and the real attributes."""
    classes = AliasClasses(nodes)
    trusted = _values_model_aliasing(root, nodes, infos)
    first: dict[int, int] = {}
    for i, (node, info) in enumerate(zip(nodes, infos, strict=True)):
        if node.op == "output":
            continue
        if node.op == "get_attr":
            value = attribute(root, cast("str", node.target))
            if isinstance(value, torch.Tensor):
                classes.join(i, classes.of_state(value))
        if info.aliases and not (trusted and values_exclude_alias(node, info)):
            for other in info.aliases:
                classes.join(i, classes.position[other])
        for tensor in info.state_shared:
            classes.join(i, classes.of_state(tensor))
        for key in storage_keys(node.meta.get("val")):
            classes.join(i, first.setdefault(key, i))
    return classes


def _values_model_aliasing(root: nn.Module, nodes: Sequence[Node], infos: Sequence[AliasInfo]) -> bool:
    """Whether fake values share storage where the program does, so that not sharing proves something.

    Values of captured graphs do. Elsewhere the views that schemas declare are the evidence: some tracers give every
    value a storage of its own.
    """
    if CANONICAL in getattr(root, "meta", {}):
        return True
    evidence = False
    for node, info in zip(nodes, infos, strict=True):
        if info.aliases and not info.assumed_aliases:
            keys = storage_keys(node.meta.get("val"))
            theirs = {key for n in info.aliases for key in storage_keys(n.meta.get("val"))}
            if keys and theirs:
                if keys.isdisjoint(theirs):
                    return False
                evidence = True
    return evidence


def values_exclude_alias(node: Node, info: AliasInfo) -> bool:
    """Whether the fake values show that a result has memory of its own, where no schema declares otherwise."""
    if not info.assumed_aliases:
        return False
    value = node.meta.get("val")
    keys = storage_keys(value)
    if not keys:
        # A number shares no memory; a missing value proves nothing.
        return isinstance(value, SCALARS)
    others = [n.meta.get("val") for n in info.aliases]
    return all(other is not None and keys.isdisjoint(storage_keys(other)) for other in others)
