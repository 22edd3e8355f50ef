"""Structural hashing: a number for what each node computes, independent of names and of the order of nodes.

The problem is canonical labeling of a directed acyclic graph. As in hash consing (value numbering), the forward hash of a
node combines its target with the hashes of its operands; the backward hash combines the hashes and operand slots of its
users: one sweep of color refinement in each direction (B. Weisfeiler, A. Leman, "The reduction of a graph to canonical
form", 1968). Operands of commutative operations, and operands and results of called graphs, are hashed as multisets. What
is still alike is ordered by a depth-first walk from the results. Time is linear in the size of the graph, but for sorting.

Hashes of 56 bits come from BLAKE2b, and are combined by Python's `hash` of tuples of ints, which no process seeds.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.nodes import value_signature
from dovetail.ir.op_traits import is_commutative, target_name


@functools.lru_cache(maxsize=65536)
def stable_hash(text: str) -> int:
    """Return a number for a text, the same in every process: Python's `hash` is that for ints only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True)
class GraphHash:
    """The hash of a graph that is called, and of the role that each operand and each result has in it.

    Neither the order of operands nor that of operations counts: bodies have them as the graph around had them.
    """

    value: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


class StructuralHasher:
    """Hashes the nodes of one graph. Equal hashes mean the same computation on the same inputs.

    An input is identified by its index and an attribute by its path; the operands of a commutative operation are
    interchangeable; what an effect must come after is part of the computation. With `graphs`, the hashes of called
    graphs known so far, the graph is itself one that is called.
    """

    def __init__(self, index: Index, graphs: dict[int, GraphHash] | None = None) -> None:
        self.index = index
        # Of a graph that is called, neither operands nor results have an order of their own.
        self._is_called = graphs is not None
        self._targets: dict[Any, int] = {}
        # By the id of the module, which the graph keeps alive.
        self._graphs: dict[int, GraphHash] = {} if graphs is None else graphs

    def forward(self) -> list[int]:
        """Return a hash of what each position computes."""
        body = self.index.gm
        pure = self._is_called and isinstance(body, Body) and not body.is_marked_impure
        effects: Mapping[int, Sequence[int]] = {} if pure else self.index.dependencies.before
        hashes: list[int] = [0] * len(self.index)
        known: dict[Node, int] = {}
        inputs = 0
        for i, node in enumerate(self.index.nodes):
            if node.op == "placeholder":
                value = hash((1, 0 if self._is_called else inputs))
                inputs += 1
            elif node.op == "get_attr":
                value = hash((2, stable_hash(cast("str", node.target))))
            elif self._is_called and node.op == "output":
                value = 0
            else:
                value = self._call(node, known)
                if i in effects:
                    value = hash((value, *sorted({hashes[j] for j in effects[i]})))
            hashes[i] = known[node] = value
        return hashes

    def backward(self, forward: Sequence[int]) -> list[int]:
        """Return a hash of all uses of each position's value, from the forward hashes."""
        nodes, data = self.index.nodes, self.index.data
        hashes = [0] * len(forward)
        uses: list[list[int]] = [[] for _ in forward]
        for i in range(len(forward) - 1, -1, -1):
            if uses[i]:
                hashes[i] = hash(tuple(sorted(uses[i])))
            reads = data[i]
            if len(reads) > 1:
                for slot, j in zip(self._slots(nodes[i], reads), reads, strict=True):
                    uses[j].append(hash((forward[i], hashes[i], slot)))
            elif reads:
                uses[reads[0]].append(hash((forward[i], hashes[i])))
        return hashes

    def _slots(self, node: Node, reads: Sequence[int]) -> Sequence[int]:
        """Return the operand slot of each value that a node reads, the same for operands that may be swapped."""
        called = self.called_graph(node)
        if called is not None:
            at = self.index.position
            roles: dict[int, int] = {}
            for role, operand in zip(called.operands, node.args, strict=True):
                if isinstance(operand, Node):
                    roles[at[operand]] = roles.get(at[operand], 0) ^ role
            return [roles[j] for j in reads]
        if self._is_called and node.op == "output":
            return [0] * len(reads)
        if is_commutative(node):
            return [0, 0, *range(2, len(reads))]
        return range(len(reads))

    def ordered_reads(self, node: Node, reads: Sequence[int], keys: Sequence[Any]) -> list[int]:
        """Return what a node reads in an order that does not depend on that of interchangeable operands."""
        slots = self._slots(node, reads)
        ranked = sorted(range(len(reads)), key=lambda k: (slots[k], keys[reads[k]]))
        return [reads[k] for k in ranked]

    def called_graph(self, node: Node) -> GraphHash | None:
        """Return the hash of the graph that a node calls with positional operands; None for any other node."""
        if node.op != "call_module" or node.kwargs:
            return None
        body = attribute(self.index.gm, cast("str", node.target))
        if not isinstance(body, GraphModule):
            return None
        known = self._graphs.get(id(body))
        if known is None:
            known = self._graphs[id(body)] = _graph_hash(body, self._graphs)
        return known if len(known.operands) == len(node.args) else None

    def _call(self, node: Node, known: dict[Node, int]) -> int:
        if node.op == "call_module":
            called = self.called_graph(node)
            if called is not None:
                pairs = zip(called.operands, node.args, strict=True)
                return hash((called.value, *sorted(hash((r, argument_hash(a, known))) for r, a in pairs)))
        elif node.target is operator.getitem:
            source, part = node.args
            called = self.called_graph(source) if isinstance(source, Node) else None
            if called is not None and type(part) is int and part < len(called.results):
                return hash((argument_hash(source, known), called.results[part]))
        args = [argument_hash(a, known) for a in node.args]
        if len(args) > 1 and is_commutative(node):
            args[:2] = sorted(args[:2])
        if node.kwargs:
            args += [hash((stable_hash(k), argument_hash(v, known))) for k, v in sorted(node.kwargs.items())]
        key = (node.op, node.target)
        if key not in self._targets:
            self._targets[key] = target_hash(node)
        return hash((self._targets[key], *args))


def _graph_hash(body: GraphModule, graphs: dict[int, GraphHash]) -> GraphHash:
    index = Index(body)
    hasher = StructuralHasher(index, graphs)
    forward = hasher.forward()
    backward = hasher.backward(forward)
    both = [hash(pair) for pair in zip(forward, backward, strict=True)]
    operands = tuple(backward[i] for i, node in enumerate(index.nodes) if node.op == "placeholder")
    returned: Any = index.nodes[-1].args[0] if index.nodes else ()
    items = cast("Sequence[Any]", returned) if isinstance(returned, (tuple, list)) else ()
    results = tuple(both[index.position[n]] if isinstance(n, Node) else 0 for n in items)
    return GraphHash(hash(tuple(sorted(both[:-1]))), operands, results)


def target_hash(node: Node) -> int:
    """Return a hash of a node's target: of its qualified name, or the path of a module."""
    return stable_hash(f"{'module' if node.op == 'call_module' else node.op} {target_name(node)}")


def argument_hash(value: Any, known: Mapping[Node, int]) -> int:
    """Return a hash of an argument, its nodes by their hashes."""
    if isinstance(value, Node):
        return known[value]
    if type(value) is int:
        # -1 and -2 have the same `hash`.
        return hash((3, abs(value), value < 0))
    if isinstance(value, (tuple, list)):
        return hash((4, *(argument_hash(v, known) for v in cast("list[Any]", value))))
    if isinstance(value, slice):
        return hash((5, *(argument_hash(v, known) for v in (value.start, value.stop, value.step))))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return hash((6, *(hash((stable_hash(repr(k)), argument_hash(v, known))) for k, v in items)))
    if isinstance(value, torch.Tensor):
        return stable_hash(f"tensor {value_signature(value)}")
    return stable_hash(f"{type(value).__name__} {value!r}")


def structural_order(index: Index) -> list[int]:
    """Return the rank of each position in an order that neither names nor the order of nodes can change.

    By depth, then by forward hash, then by backward hash, then by the walk from the results. Nodes that are still
    alike are interchangeable, and keep their order.
    """
    hasher = StructuralHasher(index)
    forward = hasher.forward()
    levels = [0] * len(forward)
    for i, earlier in enumerate(index.before):
        if earlier:
            levels[i] = 1 + max([levels[j] for j in earlier])
    keys: list[Any] = list(zip(levels, forward, strict=True))
    if len(set(forward)) < len(forward):
        keys = list(zip(levels, forward, hasher.backward(forward), strict=True))
    if len(set(keys)) < len(keys):
        keys = list(zip(keys, _visit_order(hasher, keys), strict=True))
    ranks = [0] * len(forward)
    for rank, i in enumerate(sorted(range(len(forward)), key=keys.__getitem__)):
        ranks[i] = rank
    return ranks


def _visit_order(hasher: StructuralHasher, keys: Sequence[Any]) -> list[int]:
    """Return the preorder number of each position in a depth-first walk from the results over operands.

    It distinguishes equal computations that are used in different places.
    """
    index = hasher.index
    nodes, data = index.nodes, index.data
    order: dict[int, int] = {}

    def walk(root: int) -> None:
        stack = [root]
        while stack:
            i = stack.pop()
            if i in order:
                continue
            order[i] = len(order)
            reads = data[i]
            stack.extend(reversed(hasher.ordered_reads(nodes[i], reads, keys)) if len(reads) > 1 else reads)

    # The output is always last. Among the nodes that it does not reach, those with a unique key go first.
    walk(len(nodes) - 1)
    counts = Counter(keys)
    ends = [i for i, node in enumerate(nodes) if not node.users and i not in order]
    for i in sorted(ends, key=lambda i: (counts[keys[i]], keys[i], [order.get(j, -1) for j in data[i]])):
        walk(i)
    return [order[i] for i in range(len(nodes))]
