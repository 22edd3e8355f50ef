"""A graph's operations in one line that only its structure decides, each with a label for what it does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from dovetail.graph.describe import describe
from dovetail.graph.effects import is_subgraph
from dovetail.graph.module import attribute
from dovetail.outlining.bodies import literal
from dovetail.outlining.record import call_of
from dovetail.outlining.requests import is_projection
from dovetail.rules.scene import Scene


class Line:
    """The operations of a scene by place: a walk from the outputs, operands first, in the order of arguments.

    An operation that returns several values is one with the getitems that take them apart. Labels are equal for
    operations that are called alike: target, literals, form of the arguments, dtype, sizes and strides of operands
    and result. What is not in `free` has a label of its own, and so is never part of anything that repeats.
    """

    def __init__(self, scene: Scene, free: Iterable[int]) -> None:
        self.scene = scene
        self.head, self.part = _heads(scene)
        self.heads: list[int] = []  # by place: the position of the operation
        self.place: list[int] = [-1] * len(scene.nodes)  # by position: -1 for what is no operation
        self.before: list[list[int]] = []  # by place: places that must come before it
        self._walk()
        self.free = self._free(set(free))
        # By place: the positions of the values it reads, as often and in the order it names them.
        self.reads: list[list[int]] = []
        self.labels: list[int] = []
        self.rough: list[int] = []  # labels by target alone
        self._label()
        self._described: dict[int, int] = {}
        self._descriptions: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.heads)

    @cached_property
    def uses(self) -> list[list[tuple[int, int, int]]]:
        """By place: who reads its values, as (part, place, argument), by ascending place.

        The graph's output has the place `len(self)`.
        """
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.heads]
        for q, values in enumerate(self.reads):
            for slot, value in enumerate(values):
                maker = self.place[value]
                if maker >= 0:
                    found[maker].append((self.part[value], q, slot))
        for output in self.scene.nodes:
            if output.op == "output":
                for slot, node in enumerate(output.all_input_nodes):
                    value = self.scene.index.position[node]
                    if self.place[value] >= 0:
                        found[self.place[value]].append((self.part[value], len(self), slot))
        return found

    @cached_property
    def parts(self) -> list[list[int]]:
        """By place: the positions of the getitems that belong to it."""
        found: list[list[int]] = [[] for _ in self.heads]
        for i, head in enumerate(self.head):
            if head != i:
                found[self.place[head]].append(i)
        return found

    @cached_property
    def ascending(self) -> bool:
        """Whether everything comes after what it depends on, so that a stretch of the line is convex."""
        return all(j < i for i, earlier in enumerate(self.before) for j in earlier)

    def size(self, place: int) -> int:
        """How many operations a place stands for: none if it is a view, those inside if it calls a region."""
        call = self.scene.calls.get(self.heads[place])
        if call is not None:
            return call.size
        told = self.scene.index.dependencies.effects.get(self.heads[place])
        return 0 if told is not None and told.aliases and not told.looks else 1

    def positions(self, places: Iterable[int]) -> tuple[int, ...]:
        """The positions of operations with the getitems that belong to them, in the graph's order."""
        return tuple(sorted(i for q in places for i in (self.heads[q], *self.parts[q])))

    def described(self, value: int) -> int:
        """A number for what is known of a value: dtype, sizes, strides, device."""
        found = self._described.get(value)
        if found is None:
            told = describe(self.scene.value(value))
            found = self._described[value] = self._descriptions.setdefault(told, len(self._descriptions))
        return found

    def _walk(self) -> None:
        """Places by a depth-first walk without recursion; what a getitem waits for, its operation waits for."""
        scene, head = self.scene, self.head
        waits = self._waits()
        state = bytearray(len(scene.nodes))
        for root in self._roots():
            if state[root]:
                continue
            state[root] = 1
            stack = [(root, iter(waits(root)))]
            while stack:
                at, rest = stack[-1]
                for needed in rest:
                    needed = head[needed]
                    if not state[needed]:
                        state[needed] = 1
                        stack.append((needed, iter(waits(needed))))
                        break
                else:
                    stack.pop()
                    if scene.nodes[at].op.startswith("call"):
                        self.place[at] = len(self.heads)
                        self.heads.append(at)
        for i, at in enumerate(head):
            self.place[i] = self.place[at]
        for at in self.heads:
            earlier = {self.place[j] for j in waits(at)} - {-1, self.place[at]}
            self.before.append(sorted(earlier))

    def _waits(self) -> Any:
        index = self.scene.index
        effects = index.dependencies.before
        if not effects:
            return index.data.__getitem__
        order = self.scene.order
        parts: dict[int, list[int]] = {}
        for i, at in enumerate(self.head):
            if at != i and i in effects:
                parts.setdefault(at, []).append(i)

        def waits(position: int) -> list[int]:
            whole = [position, *parts.get(position, ())]
            added = [j for i in whole for j in effects.get(i, ())]
            return [*index.data[position], *sorted(added, key=order.__getitem__)]

        return waits

    def _roots(self) -> list[int]:
        """Where the walk begins: at what nothing reads, then at the output, and last at the updates of state.

        Assertions and the like so stand beside what they are about. Updates come at the end of a program, and
        a block that leaves them there has no effect.
        """
        nodes, found = self.scene.nodes, self.scene.index.dependencies.effects
        outputs = [i for i, node in enumerate(nodes) if node.op == "output"]
        unread = {
            self.head[i] for i, node in enumerate(nodes) if not node.users and node.op.startswith("call")
        }
        calls = sorted(unread, key=self.scene.order.__getitem__) if len(unread) > 1 else list(unread)
        self.updates = {
            i
            for i in calls
            if (told := found.get(i)) is not None
            and any(node.op in ("placeholder", "get_attr") for node in told.writes)
        }
        # An operation of which only some parts are not read is reached by way of the others.
        first = [i for i in calls if i not in self.updates and not nodes[i].users]
        return [*first, *outputs, *(i for i in calls if i in self.updates), *calls]

    def _free(self, free: set[int]) -> list[bool]:
        """By place, whether it may be taken: so must be all of its getitems, which read nothing else."""
        found = [at in free and at not in self.updates for at in self.heads]
        data = self.scene.index.data
        for i, at in enumerate(self.head):
            if at != i and (i not in free or len(data[i]) > 1) and self.place[at] >= 0:
                found[self.place[at]] = False
        return found

    def _label(self) -> None:
        scene = self.scene
        root, at = scene.gm, scene.index.position
        known: dict[Any, int] = {}
        sketches = [known.setdefault(_sketch(n.meta.get("val")), len(known)) for n in scene.nodes]
        shapes = [tuple(sorted([self.part[i] for i in parts])) for parts in self.parts]
        for q, position in enumerate(self.heads):
            node = scene.nodes[position]
            refs = _Refs(root if isinstance(node.target, HigherOrderOperator) else None)
            target: Any = node.target
            if node.op == "call_module":
                target = id(attribute(root, cast("str", target)))
            form = tuple([literal(a, refs) for a in node.args])
            named = literal(node.kwargs, refs) if node.kwargs else None
            call = call_of(node.meta) if node.op == "call_module" else None
            reads = [at[n] for n in refs.nodes]
            self.reads.append(reads)
            rough = (node.op, target, call.identity if call is not None else None, len(refs.nodes))
            seen = tuple([sketches[i] for i in reads])
            key: Any = (rough, form, named, sketches[position], seen, shapes[q])
            if not self.free[q]:
                key = rough = ("fixed", q)
            self.rough.append(known.setdefault(rough, len(known)))
            self.labels.append(known.setdefault(key, len(known)))


class _Refs:
    """Collects the nodes among arguments; all look the same, but for sub-graphs, which are no values."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: list[Node] = []

    def __call__(self, node: Node) -> Any:
        if self.root is not None and is_subgraph(self.root, node):
            return ("graph", id(attribute(self.root, cast("str", node.target))))
        self.nodes.append(node)
        return "%"


def _heads(scene: Scene) -> tuple[list[int], list[int]]:
    """For each position the operation it is a part of, itself for most, and which part: -1 is the whole."""
    head = list(range(len(scene.nodes)))
    part = [-1] * len(head)
    at = scene.index.position
    paths: dict[tuple[int, Any], int] = {}
    for i, node in enumerate(scene.nodes):
        if is_projection(node):
            source = at[cast("Node", node.args[0])]
            head[i] = head[source]
            step = (part[source], literal(node.args[1], id))
            part[i] = paths.setdefault(step, len(paths))
    return head, part


def _sketch(value: Any) -> Any:
    """Dtype, sizes and strides; symbolic ones count alike, for some are numbered anew wherever they arise."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (value.dtype, tuple([s if type(s) is int else None for s in (*value.shape, *strides)]))
    if isinstance(value, (tuple, list)):
        return tuple([_sketch(v) for v in cast("list[Any]", value)])
    return type(value).__name__
