"""A graph's operations in one line that only its structure decides, each with a label for what it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from dovetail.ir.effects import is_subgraph
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection, value_signature
from dovetail.outlining.region import call_of, literal
from dovetail.rules.rule import RuleContext


class Linearization:
    """The operations of a context by place: a walk from the outputs, operands first, in the order of arguments.

    An operation that returns several values is one with the getitems that take them apart. Labels are equal for
    operations that are called alike: target, literals, form of the arguments, dtype, sizes and strides of operands
    and result. What is not in `free` has a label of its own, and so is never part of anything that repeats.
    """

    def __init__(self, context: RuleContext, free: Iterable[int]) -> None:
        self.context = context
        self.head, self.part = _heads(context)
        self.heads: list[int] = []  # by place: the position of the operation
        self.place: list[int] = [-1] * len(context.nodes)  # by position: -1 for what is no operation
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
        for output in self.context.nodes:
            if output.op == "output":
                for slot, node in enumerate(output.all_input_nodes):
                    value = self.context.index.position[node]
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
        call = self.context.calls.get(self.heads[place])
        if call is not None:
            return call.size
        told = self.context.index.dependencies.effects.get(self.heads[place])
        return 0 if told is not None and told.aliases and not told.reads_data else 1

    def positions(self, places: Iterable[int]) -> tuple[int, ...]:
        """The positions of operations with the getitems that belong to them, in the graph's order."""
        return tuple(sorted(i for q in places for i in (self.heads[q], *self.parts[q])))

    def described(self, value: int) -> int:
        """A number for what is known of a value: dtype, sizes, strides, device."""
        found = self._described.get(value)
        if found is None:
            told = value_signature(self.context.value(value))
            found = self._described[value] = self._descriptions.setdefault(told, len(self._descriptions))
        return found

    def _walk(self) -> None:
        """Places by a depth-first walk without recursion; what a getitem waits for, its operation waits for."""
        context, head = self.context, self.head
        waits = self._waits()
        state = bytearray(len(context.nodes))
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
                    if context.nodes[at].op.startswith("call"):
                        self.place[at] = len(self.heads)
                        self.heads.append(at)
        for i, at in enumerate(head):
            self.place[i] = self.place[at]
        for at in self.heads:
            earlier = {self.place[j] for j in waits(at)} - {-1, self.place[at]}
            self.before.append(sorted(earlier))

    def _waits(self) -> Any:
        index = self.context.index
        effects = index.dependencies.before
        if not effects:
            return index.data.__getitem__
        order = self.context.order
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
        nodes, found = self.context.nodes, self.context.index.dependencies.effects
        outputs = [i for i, node in enumerate(nodes) if node.op == "output"]
        unread = {
            self.head[i] for i, node in enumerate(nodes) if not node.users and node.op.startswith("call")
        }
        calls = sorted(unread, key=self.context.order.__getitem__) if len(unread) > 1 else list(unread)
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
        data = self.context.index.data
        for i, at in enumerate(self.head):
            if at != i and (i not in free or len(data[i]) > 1) and self.place[at] >= 0:
                found[self.place[at]] = False
        return found

    def _label(self) -> None:
        context = self.context
        root, at = context.gm, context.index.position
        known: dict[Any, int] = {}
        sketches = [known.setdefault(_value_key(n.meta.get("val")), len(known)) for n in context.nodes]
        shapes = [tuple(sorted([self.part[i] for i in parts])) for parts in self.parts]
        for q, position in enumerate(self.heads):
            node = context.nodes[position]
            refs = _NodeCollector(root if isinstance(node.target, HigherOrderOperator) else None)
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


class _NodeCollector:
    """Collects the nodes among arguments; all look the same, but for sub-graphs, which are no values."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: list[Node] = []

    def __call__(self, node: Node) -> Any:
        if self.root is not None and is_subgraph(self.root, node):
            return ("graph", id(attribute(self.root, cast("str", node.target))))
        self.nodes.append(node)
        return "%"


def _heads(context: RuleContext) -> tuple[list[int], list[int]]:
    """For each position the operation it is a part of, itself for most, and which part: -1 is the whole."""
    head = list(range(len(context.nodes)))
    part = [-1] * len(head)
    at = context.index.position
    paths: dict[tuple[int, Any], int] = {}
    for i, node in enumerate(context.nodes):
        if is_projection(node):
            source = at[cast("Node", node.args[0])]
            head[i] = head[source]
            step = (part[source], literal(node.args[1], id))
            part[i] = paths.setdefault(step, len(paths))
    return head, part


def _value_key(value: Any) -> Any:
    """Dtype, sizes and strides; symbolic ones count alike, for some are numbered anew wherever they arise."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (value.dtype, tuple([s if type(s) is int else None for s in (*value.shape, *strides)]))
    if isinstance(value, (tuple, list)):
        return tuple([_value_key(v) for v in cast("list[Any]", value)])
    return type(value).__name__


# Of each width, as many kinds of stretches are looked at more closely as could matter.
_MAX_KINDS = 256


@dataclass(frozen=True, slots=True)
class MaximalRepeat:
    """`length` items from `start` on, equal to those from `start - distance` on.

    `covered` estimates how many items such stretches make up in all.
    """

    start: int
    distance: int
    length: int
    covered: int

    @property
    def in_a_row(self) -> bool:
        """Whether copies follow one another without a gap, so that the distance is a period."""
        return self.length >= self.distance


class WindowNumbering:
    """Equal numbers for equal windows of a sequence, for widths that are powers of two.

    A width is named by pairs of names of half of it, so each costs no more than the first. Where every window that
    occurs twice does so within its own width, the sequence is nothing but rows of copies, and wider windows would
    tell nothing new.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        self.count = len(sequence)
        self.levels: list[list[int]] = []
        self.earlier: list[
            list[tuple[int, int]]
        ] = []  # by level: places, and how far back their name last was
        self._places: dict[int, dict[int, list[int]]] = {}
        names, width = list(sequence), 1
        while names:
            again = _previous_occurrences(names)
            if not again and self.levels:
                break
            self.levels.append(names)
            self.earlier.append(again)
            if all(distance <= width for _, distance in again):
                break
            known: dict[tuple[int, int], int] = {}
            names = [known.setdefault(pair, len(known)) for pair in zip(names, names[width:], strict=False)]
            width *= 2

    def forward(self, i: int, j: int) -> int:
        """How many items are equal from two places on."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            names = self.levels[k]
            while max(i, j) + length < len(names) and names[i + length] == names[j + length]:
                length += 1 << k
        return length

    def backward(self, i: int, j: int) -> int:
        """How many items are equal before two places, those places not counted."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            names, width = self.levels[k], 1 << k
            while min(i, j) - length - width >= 0 and (
                names[i - length - width] == names[j - length - width]
            ):
                length += width
        return length

    def places(self, start: int, length: int) -> list[int]:
        """Every place where the `length` items from `start` on occur, in order."""
        k = min(length.bit_length(), len(self.levels)) - 1
        names, width = self.levels[k], 1 << k
        if k not in self._places:
            by_name: dict[int, list[int]] = {}
            for i, name in enumerate(names):
                by_name.setdefault(name, []).append(i)
            self._places[k] = by_name
        found = [i for i in self._places[k][names[start]] if i + length <= self.count]
        for offset in (*range(width, length - width, width), length - width):
            found = [i for i in found if names[i + offset] == names[start + offset]]
        return found

    def stretches(self, least: int) -> list[MaximalRepeat]:
        """Stretches of at least `least` items that occurred before, each with its nearest earlier place.

        What covers most comes first.
        """
        if not self.levels:
            return []
        found: dict[int, dict[int, MaximalRepeat]] = {}
        for k in range(min(least.bit_length(), len(self.levels)) - 1, len(self.levels)):
            for start, distance, covered in self._best(k, least):
                rows = found.setdefault(distance, {})
                known = (s for s in rows.values() if s.start <= start < s.start + s.length)
                if not any(s.covered >= covered for s in known):
                    stretch = self._widest(start, distance, covered)
                    rows[stretch.start] = stretch
        every = [stretch for rows in found.values() for stretch in rows.values()]
        return sorted(every, key=lambda s: (-s.covered, -s.length, s.start, s.distance))

    def _best(self, k: int, least: int) -> list[tuple[int, int, int]]:
        """The first of each kind of stretch that windows of one width make up, where and how far back, with
        what all of its kind cover together."""
        names, width = self.levels[k], 1 << k
        kinds: dict[tuple[int, int, int, int], list[int]] = {}
        for start, distance, windows in self._runs(k):
            length = windows + width - 1
            if length < least:
                continue
            row = length >= distance
            covered = (length + distance) // distance * distance if row else length
            kind = (length, names[start], names[start + windows - 1], distance if row else 0)
            # The first of stretches with gaps between them was not seen before and counts too.
            known = kinds.setdefault(kind, [start, distance, 0 if row else length])
            known[2] += covered
        ranked = sorted(kinds.values(), key=lambda found: (-found[2], found[0]))
        return [(start, distance, covered) for start, distance, covered in ranked[:_MAX_KINDS]]

    def _runs(self, k: int) -> Iterator[tuple[int, int, int]]:
        """Windows that go on side by side with what they equal: the first, how far back, and how many."""
        begin = last = far = -2
        for place, distance in self.earlier[k]:
            if place == last + 1 and distance == far:
                last = place
                continue
            if begin >= 0:
                yield begin, far, last - begin + 1
            begin, last, far = place, place, distance
        if begin >= 0:
            yield begin, far, last - begin + 1

    def _widest(self, start: int, distance: int, covered: int) -> MaximalRepeat:
        back = self.backward(start, start - distance)
        length = back + self.forward(start, start - distance)
        if length >= distance:
            covered = max(covered, (length + distance) // distance * distance)
        return MaximalRepeat(start - back, distance, length, covered)


def _previous_occurrences(names: list[int]) -> list[tuple[int, int]]:
    """The places whose name occurred before, ascending, and how far back that was."""
    last: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for i, name in enumerate(names):
        j = last.get(name)
        if j is not None:
            found.append((i, i - j))
        last[name] = i
    return found
