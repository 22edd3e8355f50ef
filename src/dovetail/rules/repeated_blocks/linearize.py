"""Linearization of a graph: its operations in an order that depends only on structure, each with a label, and repeats in it.

The order is a depth-first postorder from the outputs, operands first, in the order of arguments; equal computations that
are reached alike are therefore equal windows of labels. Windows of widths 2^k are numbered by prefix doubling (Karp, Miller
and Rosenberg 1972), level by level, each number standing for a pair of numbers of the level before: O(n) per level, O(n log n)
in all. Longest common extensions of two places take O(log n) by descending the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The operations of a graph by place in the linear order.

    An operation that returns a tuple is one place with the getitems that project it. Labels are equal for operations
    that are called alike: target, literals, structure of the arguments, dtype, sizes and strides of operands and result.
    An operation that is not in `free` has a unique label, and so is never part of a repeat.
    """

    def __init__(self, context: RuleContext, free: Iterable[int]) -> None:
        self.context = context
        self.head, self.part = _heads(context)
        self.heads: list[int] = []  # by place: the position of the operation
        self.place: list[int] = [-1] * len(context.nodes)  # by position: -1 for inputs and outputs
        self.before: list[list[int]] = []  # by place: the places it depends on
        self._walk()
        self.free = self._free(set(free))
        # By place: the positions of the values it reads, in the order of its arguments, with repetitions.
        self.reads: list[list[int]] = []
        self.labels: list[int] = []
        self.op_labels: list[int] = []  # by target alone
        self._label()
        self._metadata_ids: dict[int, int] = {}
        self._signatures: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.heads)

    @cached_property
    def uses(self) -> list[list[tuple[int, int, int]]]:
        """By place: the readers of its values, as (part, place, argument), by ascending place.

        The graph's output has the place `len(self)`.
        """
        uses: list[list[tuple[int, int, int]]] = [[] for _ in self.heads]
        for q, values in enumerate(self.reads):
            for slot, value in enumerate(values):
                producer = self.place[value]
                if producer >= 0:
                    uses[producer].append((self.part[value], q, slot))
        for output in self.context.nodes:
            if output.op == "output":
                for slot, node in enumerate(output.all_input_nodes):
                    value = self.context.index.position[node]
                    if self.place[value] >= 0:
                        uses[self.place[value]].append((self.part[value], len(self), slot))
        return uses

    @cached_property
    def parts(self) -> list[list[int]]:
        """By place: the positions of the getitems that belong to it."""
        parts: list[list[int]] = [[] for _ in self.heads]
        for i, head in enumerate(self.head):
            if head != i:
                parts[self.place[head]].append(i)
        return parts

    @cached_property
    def ascending(self) -> bool:
        """Whether the order is topological, so that every window is convex."""
        return all(j < i for i, earlier in enumerate(self.before) for j in earlier)

    def size(self, place: int) -> int:
        """Return how many operations a place counts for: none for a view, those inside for a region."""
        call = self.context.calls.get(self.heads[place])
        if call is not None:
            return call.size
        effects = self.context.index.dependencies.effects.get(self.heads[place])
        return 0 if effects is not None and effects.aliases and not effects.reads_data else 1

    def positions(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the positions of operations and of their getitems, in the graph's order."""
        return tuple(sorted(i for q in places for i in (self.heads[q], *self.parts[q])))

    def metadata_id(self, value: int) -> int:
        """Return a number for the metadata of a value: dtype, sizes, strides, device."""
        if value not in self._metadata_ids:
            signature = value_signature(self.context.value(value))
            self._metadata_ids[value] = self._signatures.setdefault(signature, len(self._signatures))
        return self._metadata_ids[value]

    def _walk(self) -> None:
        """Assign places in depth-first postorder, without recursion; dependencies of a getitem are its operation's."""
        context, head = self.context, self.head
        dependencies = self._dependencies()
        state = bytearray(len(context.nodes))
        for root in self._roots():
            if state[root]:
                continue
            state[root] = 1
            stack = [(root, iter(dependencies(root)))]
            while stack:
                at, rest = stack[-1]
                for needed in rest:
                    needed = head[needed]
                    if not state[needed]:
                        state[needed] = 1
                        stack.append((needed, iter(dependencies(needed))))
                        break
                else:
                    stack.pop()
                    if context.nodes[at].op.startswith("call"):
                        self.place[at] = len(self.heads)
                        self.heads.append(at)
        for i, at in enumerate(head):
            self.place[i] = self.place[at]
        for at in self.heads:
            earlier = {self.place[j] for j in dependencies(at)} - {-1, self.place[at]}
            self.before.append(sorted(earlier))

    def _dependencies(self) -> Callable[[int], list[int]]:
        index = self.context.index
        effects = index.dependencies.before
        if not effects:
            return index.data.__getitem__
        order = self.context.order
        parts: dict[int, list[int]] = {}
        for i, at in enumerate(self.head):
            if at != i and i in effects:
                parts.setdefault(at, []).append(i)

        def dependencies(position: int) -> list[int]:
            whole = [position, *parts.get(position, ())]
            added = [j for i in whole for j in effects.get(i, ())]
            return [*index.data[position], *sorted(added, key=order.__getitem__)]

        return dependencies

    def _roots(self) -> list[int]:
        """Return the roots of the walk: unread operations, then the output, and last the updates of state.

        Assertions and the like are thus placed next to what they check. Updates come at the end of a program, and a
        block without them has no effects.
        """
        nodes, effects = self.context.nodes, self.context.index.dependencies.effects
        outputs = [i for i, node in enumerate(nodes) if node.op == "output"]
        unread = {
            self.head[i] for i, node in enumerate(nodes) if not node.users and node.op.startswith("call")
        }
        calls = sorted(unread, key=self.context.order.__getitem__) if len(unread) > 1 else list(unread)
        self.updates = {
            i
            for i in calls
            if (own := effects.get(i)) is not None
            and any(node.op in ("placeholder", "get_attr") for node in own.writes)
        }
        # An operation of which only some parts are unread is reached through the others.
        first = [i for i in calls if i not in self.updates and not nodes[i].users]
        return [*first, *outputs, *(i for i in calls if i in self.updates), *calls]

    def _free(self, free: set[int]) -> list[bool]:
        """Return for each place whether it is free, with all of its getitems, which must read nothing else."""
        result = [at in free and at not in self.updates for at in self.heads]
        data = self.context.index.data
        for i, at in enumerate(self.head):
            if at != i and (i not in free or len(data[i]) > 1) and self.place[at] >= 0:
                result[self.place[at]] = False
        return result

    def _label(self) -> None:
        context = self.context
        root, at = context.gm, context.index.position
        known: dict[Any, int] = {}
        values = [known.setdefault(_value_key(n.meta.get("val")), len(known)) for n in context.nodes]
        shapes = [tuple(sorted([self.part[i] for i in parts])) for parts in self.parts]
        for q, position in enumerate(self.heads):
            node = context.nodes[position]
            operands = _NodeCollector(root if isinstance(node.target, HigherOrderOperator) else None)
            target: Any = node.target
            if node.op == "call_module":
                target = id(attribute(root, cast("str", target)))
            args = tuple([literal(a, operands) for a in node.args])
            kwargs = literal(node.kwargs, operands) if node.kwargs else None
            call = call_of(node.meta) if node.op == "call_module" else None
            reads = [at[n] for n in operands.nodes]
            self.reads.append(reads)
            op_key = (node.op, target, call.identity if call is not None else None, len(operands.nodes))
            read_values = tuple([values[i] for i in reads])
            key: Any = (op_key, args, kwargs, values[position], read_values, shapes[q])
            if not self.free[q]:
                key = op_key = ("fixed", q)
            self.op_labels.append(known.setdefault(op_key, len(known)))
            self.labels.append(known.setdefault(key, len(known)))


class _NodeCollector:
    """Collects the nodes among arguments and replaces them by "%"; subgraphs of `root` are not values and stay."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: list[Node] = []

    def __call__(self, node: Node) -> Any:
        if self.root is not None and is_subgraph(self.root, node):
            return ("graph", id(attribute(self.root, cast("str", node.target))))
        self.nodes.append(node)
        return "%"


def _heads(context: RuleContext) -> tuple[list[int], list[int]]:
    """Return for each position the operation it is a part of, itself for most, and which part, -1 for the whole."""
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
    """Return dtype, sizes and strides; symbolic ones count as equal, since unbacked symbols are new at each use."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (value.dtype, tuple([s if type(s) is int else None for s in (*value.shape, *strides)]))
    if isinstance(value, (tuple, list)):
        return tuple([_value_key(v) for v in cast("list[Any]", value)])
    return type(value).__name__


# The number of kinds of repeats considered for each width.
_MAX_KINDS = 256


@dataclass(frozen=True, slots=True)
class MaximalRepeat:
    """A window of `length` items at `start` that equals the one at `start - distance` and cannot be extended.

    `covered` estimates how many items all such windows cover.
    """

    start: int
    distance: int
    length: int
    covered: int

    @property
    def is_tandem(self) -> bool:
        """Whether copies follow one another without a gap, so that the distance is a period."""
        return self.length >= self.distance


class WindowNumbering:
    """Numbers the windows of a sequence whose widths are powers of two, equal ones alike.

    Each level numbers the pairs of numbers of the level before. It stops where every repeated window recurs within its
    own width: all repeats are tandem then, and wider windows add nothing.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        self.count = len(sequence)
        self.levels: list[list[int]] = []
        # By level: the places whose number occurred before, and how far back.
        self.recurrences: list[list[tuple[int, int]]] = []
        self._places: dict[int, dict[int, list[int]]] = {}
        numbers, width = list(sequence), 1
        while numbers:
            recurrences = _previous_occurrences(numbers)
            if not recurrences and self.levels:
                break
            self.levels.append(numbers)
            self.recurrences.append(recurrences)
            if all(distance <= width for _, distance in recurrences):
                break
            known: dict[tuple[int, int], int] = {}
            pairs = zip(numbers, numbers[width:], strict=False)
            numbers = [known.setdefault(pair, len(known)) for pair in pairs]
            width *= 2

    def forward(self, i: int, j: int) -> int:
        """Return how many items are equal from two places on (their longest common extension)."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            numbers = self.levels[k]
            while max(i, j) + length < len(numbers) and numbers[i + length] == numbers[j + length]:
                length += 1 << k
        return length

    def backward(self, i: int, j: int) -> int:
        """Return how many items are equal before two places, these excluded."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            numbers, width = self.levels[k], 1 << k
            while min(i, j) - length - width >= 0 and (
                numbers[i - length - width] == numbers[j - length - width]
            ):
                length += width
        return length

    def occurrences(self, start: int, length: int) -> list[int]:
        """Return every place where the `length` items at `start` occur, in order."""
        k = min(length.bit_length(), len(self.levels)) - 1
        numbers, width = self.levels[k], 1 << k
        if k not in self._places:
            by_number: dict[int, list[int]] = {}
            for i, number in enumerate(numbers):
                by_number.setdefault(number, []).append(i)
            self._places[k] = by_number
        places = [i for i in self._places[k][numbers[start]] if i + length <= self.count]
        for offset in (*range(width, length - width, width), length - width):
            places = [i for i in places if numbers[i + offset] == numbers[start + offset]]
        return places

    def maximal_repeats(self, least: int) -> list[MaximalRepeat]:
        """Return repeats of at least `least` items, each with its nearest earlier occurrence, widest coverage first."""
        if not self.levels:
            return []
        by_distance: dict[int, dict[int, MaximalRepeat]] = {}
        for k in range(min(least.bit_length(), len(self.levels)) - 1, len(self.levels)):
            for start, distance, covered in self._best(k, least):
                repeats = by_distance.setdefault(distance, {})
                around = (r for r in repeats.values() if r.start <= start < r.start + r.length)
                if not any(r.covered >= covered for r in around):
                    repeat = self._extend(start, distance, covered)
                    repeats[repeat.start] = repeat
        every = [repeat for repeats in by_distance.values() for repeat in repeats.values()]
        return sorted(every, key=lambda r: (-r.covered, -r.length, r.start, r.distance))

    def _best(self, k: int, least: int) -> list[tuple[int, int, int]]:
        """Return the first of each kind of repeat of one width: start, distance, and what its kind covers in all."""
        numbers, width = self.levels[k], 1 << k
        kinds: dict[tuple[int, int, int, int], list[int]] = {}
        for start, distance, windows in self._runs(k):
            length = windows + width - 1
            if length < least:
                continue
            tandem = length >= distance
            covered = (length + distance) // distance * distance if tandem else length
            kind = (length, numbers[start], numbers[start + windows - 1], distance if tandem else 0)
            # The first occurrence of repeats with gaps is not itself a recurrence, and counts too.
            first = kinds.setdefault(kind, [start, distance, 0 if tandem else length])
            first[2] += covered
        ranked = sorted(kinds.values(), key=lambda first: (-first[2], first[0]))
        return [(start, distance, covered) for start, distance, covered in ranked[:_MAX_KINDS]]

    def _runs(self, k: int) -> Iterator[tuple[int, int, int]]:
        """Yield maximal runs of consecutive windows that recur at one distance: the first, the distance, the count."""
        begin = last = far = -2
        for place, distance in self.recurrences[k]:
            if place == last + 1 and distance == far:
                last = place
                continue
            if begin >= 0:
                yield begin, far, last - begin + 1
            begin, last, far = place, place, distance
        if begin >= 0:
            yield begin, far, last - begin + 1

    def _extend(self, start: int, distance: int, covered: int) -> MaximalRepeat:
        back = self.backward(start, start - distance)
        length = back + self.forward(start, start - distance)
        if length >= distance:
            covered = max(covered, (length + distance) // distance * distance)
        return MaximalRepeat(start - back, distance, length, covered)


def _previous_occurrences(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the places whose number occurred before, ascending, and how far back."""
    last: dict[int, int] = {}
    recurrences: list[tuple[int, int]] = []
    for i, number in enumerate(numbers):
        j = last.get(number)
        if j is not None:
            recurrences.append((i, i - j))
        last[number] = i
    return recurrences
