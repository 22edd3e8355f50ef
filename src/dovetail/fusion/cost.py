"""The cost model: an estimate of what a region saves, in memory traffic and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection, nbytes, size_hint, size_hints
from dovetail.ir.op_traits import base_name, traits_of
from dovetail.outlining.escapes import RegionDraft
from dovetail.rules.op_classes import REDUCTIONS

_NOT_COMPUTED = -1

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
_TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_ATTENTIONS = frozenset(
    {
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)

# Of their first operand they read as many elements as they return.
_GATHERS = frozenset(
    {"embedding", "index_select", "gather", "index", "_unsafe_index", "take", "take_along_dim"}
)

_RESHAPES = frozenset({"reshape", "reshape_as", "flatten"})


class Figures:
    """Sizes and flops of each position of one graph, computed on first use.

    A size that is not known (see `known`) counts as zero, both as saved and as spent.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._bytes = [_NOT_COMPUTED] * len(index)
        self._free = [_NOT_COMPUTED] * len(index)
        self._unknown: set[int] = set()
        self._behind: dict[int, int] = {}

    def bytes(self, position: int) -> int:
        """Return the bytes of a position's value, of all elements if it is a tuple."""
        size = self._bytes[position]
        if size == _NOT_COMPUTED:
            size = self._bytes[position] = self._measure(position)
        return size

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
        # A None without readers, such as the result of an assertion, takes no memory.
        each = [nbytes(part) for part in parts if part is not None or (value is None and node.users)]
        if None in each:
            self._unknown.add(position)
        return sum(size for size in each if size is not None)

    def free(self, position: int) -> bool:
        """Whether nothing is launched for it: an input, a constant, a view, an element of a tuple, a size."""
        free = self._free[position]
        if free == _NOT_COMPUTED:
            free = self._free[position] = int(self._is_free(position))
        return free == 1

    def _is_free(self, position: int) -> bool:
        node = self.index.nodes[position]
        if node.op in ("placeholder", "get_attr", "output"):
            return True
        value = node.meta.get("val")
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        return self.view_of(position) is not None or is_projection(node)

    def view_of(self, position: int) -> int | None:
        """Return the position whose memory a view aliases, None for an operation that allocates its result."""
        if _is_view_by_layout(self.index.nodes[position]):
            return self.index.position[self.index.nodes[position].all_input_nodes[0]]
        effects = self.index.dependencies.effects.get(position)
        if effects is None or not effects.aliases:
            return None
        base = self.index.position[effects.aliases[0]]
        if is_projection(self.index.nodes[position]):
            return base if self._splits(base) else None
        return base if not effects.reads_data or self._splits(position) else None

    def _splits(self, position: int) -> bool:
        """Whether it returns a tuple of views, as `split` does."""
        node, effects = self.index.nodes[position], self.index.dependencies.effects.get(position)
        if effects is None or not effects.aliases or effects.writes or effects.assumed_aliases:
            return False
        return node.op in ("call_function", "call_method") and traits_of(node).returns_tuple

    def writes(self, position: int) -> bool:
        """Whether it writes memory in place."""
        effects = self.index.dependencies.effects.get(position)
        return effects is not None and bool(effects.writes or effects.state_written)

    def flops(self, position: int) -> int:
        """Return the flops of an operation; if no formula is known, one for each element that it computes or reduces."""
        node = self.index.nodes[position]
        if self.free(position):
            return 0
        shape = _shape(node)
        if shape is None:
            return 0
        count = math.prod(shape)
        name = self._name(node)
        if name in _CONTRACTIONS:
            first = _shape(_argument(node, _CONTRACTIONS[name]))
            return 2 * count * first[-1] if first else count
        if name in _CONVOLUTIONS:
            weight = _shape(_argument(node, ("weight",), 1))
            return 2 * count * math.prod(weight[1:]) if weight else count
        if name in _TRANSPOSED_CONVOLUTIONS:
            operand, weight = _shape(_argument(node, ("input",))), _shape(_argument(node, ("weight",), 1))
            return 2 * math.prod(operand) * math.prod(weight[1:]) if operand and weight else count
        if name in _ATTENTIONS:
            query, key = _shape(_argument(node, ("query",))), _shape(_argument(node, ("key",), 1))
            return 2 * math.prod(query) * key[-2] + 2 * count * key[-2] if query and key else count
        if name == "einsum":
            return _einsum_flops(node) or count
        return self._by_formula(node, self._elements(position))

    def work(self, position: int) -> int:
        """Return the flops beyond one for each element: those that memory traffic does not hide."""
        return max(0, self.flops(position) - self._elements(position))

    @staticmethod
    def _name(node: Node) -> str:
        return base_name(node) if node.op != "call_module" else ""

    def _elements(self, position: int) -> int:
        """Return the elements that an operation computes, or reduces if those are more."""
        node = self.index.nodes[position]
        shape = _shape(node)
        count = math.prod(shape) if shape is not None else 0
        if self._name(node) in REDUCTIONS:
            operands = (_shape(operand) for operand in node.all_input_nodes[:1])
            count = max(count, *(math.prod(sizes) for sizes in operands if sizes is not None), 0)
        return count

    def bytes_written(self, position: int) -> int:
        """Return the bytes that an operation stores when it runs alone."""
        return 0 if self.free(position) else self.bytes(position)

    def bytes_read(self, position: int) -> int:
        """Return the bytes that an operation loads when it runs alone: each value once, of a broadcast what it repeats."""
        if self.free(position):
            return 0
        reads = self.index.data[position]
        sizes = [self._bytes_behind(j) for j in reads]
        if sizes and self._name(self.index.nodes[position]) in _GATHERS:
            sizes[0] = min(sizes[0], self.bytes(position))
        return sum(sizes)

    def _bytes_behind(self, position: int) -> int:
        """Return the bytes of a value, or of what it is a view of if those are fewer."""
        size = self._behind.get(position)
        if size is None:
            chain = [position]
            while (base := self.view_of(chain[-1])) is not None and base not in self._behind:
                chain.append(base)
            size = self._behind[base] if base is not None else self._distinct_bytes(chain[-1])
            for view in reversed(chain):
                size = self._behind[view] = min(size, self.bytes(view)) if self.known(view) else size
        return size

    def _distinct_bytes(self, position: int) -> int:
        """Return the bytes of a value; of one that arrives broadcast, those that are repeated once."""
        size, value = self.bytes(position), self.index.nodes[position].meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return size
        for count, stride in zip(size_hints(value) or (), value.stride(), strict=False):
            if count > 1 and size_hint(stride) == 0:
                size //= count
        return size

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
        except Exception:  # a formula that does not support this call
            return count


def _einsum_flops(node: Node) -> int:
    """Return two flops for each combination of indices and each product; 0 if the sizes are not known."""
    equation = next((arg for arg in node.args if isinstance(arg, str)), None)
    shapes = [_shape(operand) for operand in node.all_input_nodes]
    if equation is None or "..." in equation:
        return 0
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        if shape is None or len(shape) != len(term):
            return 0
        sizes.update(zip(term, shape, strict=True))
    return 2 * math.prod(sizes.values()) * max(1, len(terms) - 1) if len(terms) == len(shapes) else 0


def _is_view_by_layout(node: Node) -> bool:
    """Whether a reshape returns a view, because its operand is contiguous; symbolic sizes count by their hints."""
    if node.op != "call_function" or base_name(node) not in _RESHAPES:
        return False
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    sizes, strides = size_hints(value), [size_hint(stride) for stride in value.stride()]
    expected = 1
    for size, stride in zip(reversed(sizes or ()), reversed(strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return sizes is not None


def _argument(node: Node, names: Sequence[str], place: int = 0) -> Any:
    op_traits = traits_of(node)
    for name in names:
        value = op_traits.argument(node, name)
        if isinstance(value, Node):
            return value
    return node.args[place] if place < len(node.args) else None


def _shape(node: Any) -> list[int] | None:
    """Return the sizes of a node's value, symbolic ones by hint; None if they are not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, (tuple, list)):
        value = next((v for v in cast("Sequence[Any]", value) if isinstance(v, torch.Tensor)), None)
    return size_hints(value) if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of running operations: bytes read and written, flops, launches, and the peak of bytes held."""

    bytes: int = 0
    flops: int = 0
    launches: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Gain:
    """What a region saves over running its operations one by one, and what it recomputes.

    `score`, in bytes, is what regions are compared by. Sizes that are not known count as zero.
    """

    bytes_saved: int = 0
    launches_saved: int = 0
    bytes_recomputed: int = 0
    score: int = 0


NOTHING = Gain()


class CostModel(Protocol):
    """Estimates what a region would save. `figures` has the sizes; the draft has the members, clones and outputs."""

    def gain(self, figures: Figures, draft: RegionDraft) -> Gain:
        """Return what making a region of the draft saves, all else unchanged."""
        ...

    def freed(self, figures: Figures, position: int) -> Gain:
        """Return what is saved in addition when every reader of an operation has a clone and it is removed."""
        ...


@checked_init()
@dataclass(frozen=True)
class Traffic:
    """Counts memory traffic: values inside a region are neither stored nor loaded, operands are loaded once.

    A launch is worth `launch_bytes`; `flops_per_byte` operations that are done a second time cost one byte.
    """

    launch_bytes: int = 1 << 20
    flops_per_byte: int = 64

    def __post_init__(self) -> None:
        for name in ("launch_bytes", "flops_per_byte"):
            value = getattr(self, name)
            least = 1 if name == "flops_per_byte" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"{name}={value!r} is not an int of {least} or more.")

    def gain(self, figures: Figures, draft: RegionDraft) -> Gain:
        """Return what making a region of the draft saves, all else unchanged."""
        apart, launches = _apart(figures, draft)
        own, again = _loads(figures, draft)
        saved = apart - own - _stores(figures, draft)
        busy = launches or not all(figures.free(i) for i in draft.clones)
        flops = sum(figures.work(i) for i in draft.clones) if draft.clones else 0
        fewer = launches - 1 if busy else 0
        score = saved - again - flops // self.flops_per_byte + fewer * self.launch_bytes
        return Gain(saved, fewer, again, score)

    def freed(self, figures: Figures, position: int) -> Gain:
        """Return what is saved in addition when every reader of an operation has a clone and it is removed."""
        if figures.free(position):
            return NOTHING
        reads = sum(figures.bytes(j) for j in figures.index.data[position])
        saved = reads + figures.bytes(position)
        work = figures.work(position) // self.flops_per_byte
        return Gain(saved, 1, 0, saved + work + self.launch_bytes)

    def apart(self, figures: Figures, draft: RegionDraft) -> Cost:
        """Return the cost of the operations of a draft run one by one."""
        moved, launches = _apart(figures, draft)
        flops = sum(figures.flops(i) for i in draft.members)
        return Cost(moved, flops, launches, _held(figures, draft))

    def together(self, figures: Figures, draft: RegionDraft) -> Cost:
        """Return the cost of the region, with what is cloned into it."""
        own, again = _loads(figures, draft)
        flops = sum(figures.flops(i) for i in draft.inside)
        launched = not all(figures.free(i) for i in draft.inside)
        held = sum(figures.bytes(i) for i in draft.operands(figures.index))
        held += sum(figures.bytes(i) for i in draft.outputs)
        return Cost(own + again + _stores(figures, draft), flops, int(launched), held)


def _apart(figures: Figures, draft: RegionDraft) -> tuple[int, int]:
    """Return the bytes that the members read and write one by one, and how many of them are launched."""
    data, moved, launches = figures.index.data, 0, 0
    for i in draft.members:
        if figures.free(i):
            continue
        launches += 1
        moved += figures.bytes(i)
        for j in data[i]:
            moved += figures.bytes(j)
    return moved, launches


def _base(figures: Figures, position: int, draft: RegionDraft) -> int:
    """Return the value that a view inside the draft aliases, through any number of views."""
    members, clones = draft.members, draft.clones
    while position in members or position in clones:
        base = figures.view_of(position)
        if base is None:
            break
        position = base
    return position


def _loads(figures: Figures, draft: RegionDraft) -> tuple[int, int]:
    """Return the bytes the region loads, each value once: those its members need, and those only clones need."""
    index, members, clones = figures.index, draft.members, draft.clones
    through: dict[int, set[int]] = {}
    needed: set[int] = set()
    for inside, own in ((members, True), (clones, False)):
        for i in inside:
            if figures.free(i):
                continue
            for j in index.data[i]:
                base = _base(figures, j, draft)
                if (base in members or base in clones) and index.nodes[base].op != "get_attr":
                    continue
                through.setdefault(base, set()).add(j)
                if own:
                    needed.add(base)
    loads = again = 0
    for base, ways in through.items():
        size = figures.bytes(base)
        if base not in ways:
            # A region that reads a value through narrow views does not load all of it.
            narrow = sum(figures.bytes(j) for j in ways)
            size = min(size, narrow) if figures.known(base) else narrow
        if base in needed:
            loads += size
        else:
            again += size
    return loads, again


def _stores(figures: Figures, draft: RegionDraft) -> int:
    """Return the bytes the region stores: its results, each memory once, and what it writes in place."""
    members, nodes = draft.members, figures.index.nodes
    stored: dict[Any, int] = {i: i for i in members if figures.writes(i)}
    for i in draft.outputs:
        base = _base(figures, i, draft)
        if base in members:
            # Two getitems may read the same element of a tuple.
            part = nodes[base].args if is_projection(nodes[base]) else base
            stored[part] = base
    return sum(figures.bytes(i) for i in stored.values())


def _held(figures: Figures, draft: RegionDraft) -> int:
    """Return the peak of bytes held while the members run one by one."""
    index, members, kept = figures.index, draft.members, set(draft.outputs)
    last: dict[int, int] = {}
    for i in draft.inside:
        if is_projection(index.nodes[i]):
            continue  # a tuple is held as long as its elements are
        for j in index.data[i]:
            if j in members:
                last[_base(figures, j, draft)] = i
    held = most = sum(figures.bytes(i) for i in draft.operands(figures.index))
    ends: dict[int, list[int]] = {}
    for value, at in last.items():
        ends.setdefault(at, []).append(value)
    for i in sorted(members):
        if not figures.free(i):
            held += figures.bytes(i)
            most = max(most, held)
        held -= sum(figures.bytes(v) for v in ends.get(i, ()) if v in members and v not in kept)
    return most
