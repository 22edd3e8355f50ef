"""Structural labels: what a node computes as a number that neither names nor the listing can change."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.nodes import value_signature
from dovetail.ir.op_traits import is_commutative, target_name


@functools.lru_cache(maxsize=65536)
def stable_hash(text: str) -> int:
    """A number for a text, the same in every process; numbers alone hash alike everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True)
class GraphHash:
    """What a graph that is called computes, and what each operand and each result is in it.

    Bodies list operands and operations as the graph listed them that they were taken from: neither order counts.
    """

    label: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


class StructuralHasher:
    """Labels of the nodes of one graph. Equal labels: the same computation of the same inputs.

    An input is told by its index and an attribute by its path; both operands of a commutative operation count
    alike; what an effect must come after is part of what is computed.
    """

    def __init__(self, index: Index, forms: dict[int, GraphHash] | None = None) -> None:
        self.index = index
        # Of a graph that is called, neither operands nor results have an order of their own.
        self._called = forms is not None
        self._targets: dict[Any, int] = {}
        # By the module itself, which the graph keeps alive.
        self._forms: dict[int, GraphHash] = {} if forms is None else forms

    def forward(self) -> list[int]:
        """A label for what each position computes."""
        body = self.index.gm
        plain = self._called and isinstance(body, Body) and not body.is_marked_impure
        effects: Mapping[int, Sequence[int]] = {} if plain else self.index.dependencies.before
        labels: list[int] = [0] * len(self.index)
        seen: dict[Node, int] = {}
        inputs = 0
        for i, node in enumerate(self.index.nodes):
            if node.op == "placeholder":
                label = hash((1, 0 if self._called else inputs))
                inputs += 1
            elif node.op == "get_attr":
                label = hash((2, stable_hash(cast("str", node.target))))
            elif self._called and node.op == "output":
                label = 0
            else:
                label = self._call(node, seen)
                if i in effects:
                    label = hash((label, *sorted({labels[j] for j in effects[i]})))
            labels[i] = seen[node] = label
        return labels

    def backward(self, labels: Sequence[int]) -> list[int]:
        """A label for what becomes of each position's value."""
        nodes, data = self.index.nodes, self.index.data
        found = [0] * len(labels)
        uses: list[list[int]] = [[] for _ in labels]
        for i in range(len(labels) - 1, -1, -1):
            if uses[i]:
                found[i] = hash(tuple(sorted(uses[i])))
            reads = data[i]
            if len(reads) > 1:
                for slot, j in zip(self._slots(nodes[i], reads), reads, strict=True):
                    uses[j].append(hash((labels[i], found[i], slot)))
            elif reads:
                uses[reads[0]].append(hash((labels[i], found[i])))
        return found

    def _slots(self, node: Node, reads: Sequence[int]) -> Sequence[int]:
        """For each value that a node reads what place it has there; the same where places may be swapped."""
        form = self.form(node)
        if form is not None:
            at = self.index.position
            roles: dict[int, int] = {}
            for role, operand in zip(form.operands, node.args, strict=True):
                if isinstance(operand, Node):
                    roles[at[operand]] = roles.get(at[operand], 0) ^ role
            return [roles[j] for j in reads]
        if self._called and node.op == "output":
            return [0] * len(reads)
        if is_commutative(node):
            return [0, 0, *range(2, len(reads))]
        return range(len(reads))

    def swaps(self, node: Node, reads: Sequence[int], keys: Sequence[Any]) -> list[int]:
        """What a node reads in an order that the listing of a body and swapped operands cannot change."""
        slots = self._slots(node, reads)
        ranked = sorted(range(len(reads)), key=lambda k: (slots[k], keys[reads[k]]))
        return [reads[k] for k in ranked]

    def form(self, node: Node) -> GraphHash | None:
        """The form of the graph that a node calls, its operands one by one; None for any other node."""
        if node.op != "call_module" or node.kwargs:
            return None
        body = attribute(self.index.gm, cast("str", node.target))
        if not isinstance(body, GraphModule):
            return None
        known = self._forms.get(id(body))
        if known is None:
            known = self._forms[id(body)] = _form(body, self._forms)
        return known if len(known.operands) == len(node.args) else None

    def _call(self, node: Node, seen: dict[Node, int]) -> int:
        if node.op == "call_module":
            form = self.form(node)
            if form is not None:
                given = [
                    hash((r, argument_hash(a, seen))) for r, a in zip(form.operands, node.args, strict=True)
                ]
                return hash((form.label, *sorted(given)))
        elif node.target is operator.getitem:
            source, part = node.args
            form = self.form(source) if isinstance(source, Node) else None
            if form is not None and type(part) is int and part < len(form.results):
                return hash((argument_hash(source, seen), form.results[part]))
        args = [argument_hash(a, seen) for a in node.args]
        if len(args) > 1 and is_commutative(node):
            args[:2] = sorted(args[:2])
        if node.kwargs:
            args += [hash((stable_hash(k), argument_hash(v, seen))) for k, v in sorted(node.kwargs.items())]
        return hash((self._target(node), *args))

    def _target(self, node: Node) -> int:
        key = (node.op, node.target)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = target_hash(self.index.gm, node)
        return known


def _form(body: GraphModule, forms: dict[int, GraphHash]) -> GraphHash:
    index = Index(body)
    labeller = StructuralHasher(index, forms)
    labels = labeller.forward()
    after = labeller.backward(labels)
    both = [hash(pair) for pair in zip(labels, after, strict=True)]
    operands = tuple(after[i] for i, node in enumerate(index.nodes) if node.op == "placeholder")
    returned: Any = index.nodes[-1].args[0] if index.nodes else ()
    listed = cast("Sequence[Any]", returned) if isinstance(returned, (tuple, list)) else ()
    results = tuple(both[index.position[n]] if isinstance(n, Node) else 0 for n in listed)
    return GraphHash(hash(tuple(sorted(both[:-1]))), operands, results)


def target_hash(root: nn.Module, node: Node) -> int:
    """A label for what a node calls: its qualified name, or for a module the path it has."""
    if node.op != "call_module":
        return stable_hash(f"{node.op} {target_name(node)}")
    return stable_hash(f"module {node.target}")


def argument_hash(value: Any, seen: Mapping[Node, int]) -> int:
    """A label for an argument, its nodes by their labels."""
    if isinstance(value, Node):
        return seen[value]
    if type(value) is int:
        # To `hash`, -1 and -2 are one number.
        return hash((3, abs(value), value < 0))
    if isinstance(value, (tuple, list)):
        return hash((4, *(argument_hash(v, seen) for v in cast("list[Any]", value))))
    if isinstance(value, slice):
        return hash((5, *(argument_hash(v, seen) for v in (value.start, value.stop, value.step))))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return hash((6, *(hash((stable_hash(repr(k)), argument_hash(v, seen))) for k, v in items)))
    if isinstance(value, torch.Tensor):
        return stable_hash(f"tensor {value_signature(value)}")
    return stable_hash(f"{type(value).__name__} {value!r}")


def structural_order(index: Index) -> list[int]:
    """For each position its place in an order that neither names nor the listing can change.

    What depends on less comes first; then by what is computed, then by what becomes of it, then by the way in which
    the results are computed from it. What is still alike can be exchanged for one another, and keeps the order of
    the listing.
    """
    labeller = StructuralHasher(index)
    labels = labeller.forward()
    levels = [0] * len(labels)
    for i, earlier in enumerate(index.before):
        if earlier:
            levels[i] = 1 + max([levels[j] for j in earlier])
    keys: list[Any] = list(zip(levels, labels, strict=True))
    if len(set(labels)) < len(labels):
        keys = list(zip(levels, labels, labeller.backward(labels), strict=True))
    if len(set(keys)) < len(keys):
        keys = list(zip(keys, _visits(labeller, keys), strict=True))
    order = sorted(range(len(labels)), key=keys.__getitem__)
    places = [0] * len(labels)
    for place, i in enumerate(order):
        places[i] = place
    return places


def _visits(labeller: StructuralHasher, keys: Sequence[Any]) -> list[int]:
    """When each position is come to on a walk from the results back, arguments in turn.

    Tells apart what is computed several times over and then used in different places.
    """
    index = labeller.index
    nodes, data = index.nodes, index.data
    met: dict[int, int] = {}

    def walk(root: int) -> None:
        stack = [root]
        while stack:
            i = stack.pop()
            if i in met:
                continue
            met[i] = len(met)
            reads = data[i]
            stack.extend(reversed(labeller.swaps(nodes[i], reads, keys)) if len(reads) > 1 else reads)

    # The output is last in every listing. Of what it does not lead to, what there is but once goes first.
    walk(len(nodes) - 1)
    often = Counter(keys)
    ends = [i for i, node in enumerate(nodes) if not node.users and i not in met]
    for one in sorted(ends, key=lambda i: (often[keys[i]], keys[i], [met.get(j, -1) for j in data[i]])):
        walk(one)
    return [met[i] for i in range(len(nodes))]
