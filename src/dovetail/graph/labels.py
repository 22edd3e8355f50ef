"""Structural labels: what a node computes as a number that neither names nor the listing can change."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.graph.commuting import commutes
from dovetail.graph.describe import describe
from dovetail.graph.index import Index
from dovetail.graph.module import attribute
from dovetail.graph.spellings import target_name


@functools.lru_cache(maxsize=65536)
def number(text: str) -> int:
    """A number for a text, the same in every process; numbers alone hash alike everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Labeller:
    """Labels of the nodes of one graph. Equal labels: the same computation of the same inputs.

    An input is told by its index and an attribute by its path; both operands of a commutative operation count
    alike; operations with an effect are told by their place in the order that effects have among themselves.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._targets: dict[Any, int] = {}

    def forward(self) -> list[int]:
        """A label for what each position computes."""
        index, found = self.index, self.index.dependencies.effects
        labels: list[int] = [0] * len(index)
        seen: dict[Node, int] = {}
        inputs = acts = 0
        for i, node in enumerate(index.nodes):
            if node.op == "placeholder":
                label = hash((1, inputs))
                inputs += 1
            elif node.op == "get_attr":
                label = hash((2, number(cast("str", node.target))))
            else:
                label = self._call(node, seen)
                told = found.get(i)
                if told is not None and not told.pure:
                    acts += 1
                    label = hash((label, acts))
            labels[i] = seen[node] = label
        return labels

    def backward(self, labels: list[int]) -> list[int]:
        """A label for what becomes of each position's value."""
        found = [0] * len(labels)
        at = self.index.position
        for i in range(len(labels) - 1, -1, -1):
            users = self.index.nodes[i].users
            if users:
                found[i] = hash(tuple(sorted(hash((labels[at[u]], found[at[u]])) for u in users)))
        return found

    def _call(self, node: Node, seen: dict[Node, int]) -> int:
        target = self._target(node)
        args = [argument_label(a, seen) for a in node.args]
        if len(args) > 1 and commutes(node):
            args[:2] = sorted(args[:2])
        if node.kwargs:
            args += [hash((number(k), argument_label(v, seen))) for k, v in sorted(node.kwargs.items())]
        return hash((target, *args))

    def _target(self, node: Node) -> int:
        key = (node.op, node.target)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = target_label(self.index.gm, node)
        return known


def target_label(root: nn.Module, node: Node) -> int:
    """A label for what a node calls: its qualified name, or for a module what the module is."""
    if node.op != "call_module":
        return number(f"{node.op} {target_name(node)}")
    module = attribute(root, cast("str", node.target))
    if isinstance(module, GraphModule):
        return number(f"graph {'; '.join(_written(n) for n in module.graph.nodes)}")
    return number(f"module {node.target}")


def _written(node: Node) -> str:
    return f"{node.op} {target_name(node) if node.op != 'placeholder' else ''} {len(node.args)}"


def argument_label(value: Any, seen: dict[Node, int]) -> int:
    """A label for an argument, its nodes by their labels."""
    if isinstance(value, Node):
        return seen[value]
    if type(value) is int:
        return hash((3, value))
    if isinstance(value, (tuple, list)):
        return hash((4, *(argument_label(v, seen) for v in cast("list[Any]", value))))
    if isinstance(value, slice):
        return hash((5, *(argument_label(v, seen) for v in (value.start, value.stop, value.step))))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return hash((6, *(hash((number(repr(k)), argument_label(v, seen))) for k, v in items)))
    if isinstance(value, torch.Tensor):
        return number(f"tensor {describe(value)}")
    return number(f"{type(value).__name__} {value!r}")


def structural_order(index: Index) -> list[int]:
    """For each position its place in an order that neither names nor the listing can change.

    What depends on less comes first; then by what is computed, then by what becomes of it. Positions that are
    equal in all of that can be exchanged for one another, and keep the order of the listing.
    """
    labeller = Labeller(index)
    labels = labeller.forward()
    after = labeller.backward(labels) if len(set(labels)) < len(labels) else labels
    levels = [0] * len(labels)
    for i, earlier in enumerate(index.before):
        if earlier:
            levels[i] = 1 + max([levels[j] for j in earlier])
    order = sorted(range(len(labels)), key=lambda i: (levels[i], labels[i], after[i]))
    places = [0] * len(labels)
    for place, i in enumerate(order):
        places[i] = place
    return places
