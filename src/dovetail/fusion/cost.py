"""The cost model: an estimate of what a region saves, in memory traffic and launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Body, attribute, called_body
from dovetail.ir.nodes import is_projection, nbytes, size_hint, size_hints
from dovetail.ir.op_traits import base_name, target_name, traits_of
from dovetail.ir.tensor_spec import reshapes_to_view
from dovetail.outlining.escapes import RegionDraft
from dovetail.rules.op_classes import ANCHORS, REDUCTIONS

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

# Products of each group of rows with a matrix of its own.
_GROUPED_PRODUCTS = frozenset({"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"})

_COUNTED = frozenset(
    {*_CONTRACTIONS, *_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS, *_ATTENTIONS, *_GROUPED_PRODUCTS, "einsum"}
)

# What has more than one flop for each element of its result, and no formula here.
_UNCOUNTED = (ANCHORS - _COUNTED) | {
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("cdist", "_cdist_forward", "cholesky", "cholesky_inverse", "cholesky_solve", "triangular_solve"),
}
_UNCOUNTED_PREFIXES = ("linalg_", "_linalg_", "fft_", "_fft_", "mkldnn_rnn", "_cudnn_rnn")

# Of the operand looked up in they read as many elements as they return.
_GATHERS = frozenset(
    {"embedding", "index_select", "gather", "index", "_unsafe_index", "take", "take_along_dim"}
)

# They return a view where the strides of their operand allow it, and a copy otherwise.
_RESHAPES = frozenset({"reshape", "reshape_as", "view_as", "flatten", "unflatten", "ravel"})


class Figures:
    """Sizes and flops of each position of one graph, computed on first use.

    A size that is not known (see `known`) counts as zero, both as saved and as spent.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._bytes = [_NOT_COMPUTED] * len(index)
        self._free = [_NOT_COMPUTED] * len(index)
        self._unknown: set[int] = set()
        self._distinct: dict[int, int | None] = {}
        self._partial: dict[int, Mapping[int, int]] = {}

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
        if _is_view_reshape(self.index.nodes[position]):
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
        if name in _GROUPED_PRODUCTS:
            return _grouped_product_flops(node) or count
        if name == "einsum":
            return _einsum_flops(node) or count
        return self._by_formula(node, self._elements(position))

    def without_formula(self, position: int) -> str:
        """Return the operator whose flops are not known, so that `flops` counts one for each element; "" if they are."""
        node = self.index.nodes[position]
        target: Any = node.target
        if self.free(position) or node.op != "call_function" or _shape(node) is None:
            return ""
        if isinstance(target, HigherOrderOperator):
            return target_name(node)
        if not isinstance(target, OpOverload) or self._name(node) in _COUNTED or _formula(target) is not None:
            return ""
        if target.namespace in ("aten", "prims"):
            name = self._name(node)
            is_unknown = name in _UNCOUNTED or name.startswith(_UNCOUNTED_PREFIXES)
        else:
            is_unknown = not traits_of(node).pointwise
        return str(target.overloadpacket) if is_unknown else ""

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
        """Return the bytes that an operation loads when it runs alone."""
        if self.free(position):
            return 0
        return sum(self.bytes_loaded(position, j) for j in self.index.data[position])

    def bytes_loaded(self, position: int, operand: int) -> int:
        """Return the bytes that an operation loads from one of its operands when it runs alone.

        Each element is loaded once, however often a broadcast repeats it; of a table, only the rows looked up; of an
        operand of a region, what its body loads.
        """
        size = self.distinct_bytes(operand) or 0
        part = self._partial_loads(position).get(operand)
        return size if part is None else min(size, part)

    def loads_all(self, position: int, operand: int) -> bool:
        """Whether an operation loads every element of an operand."""
        return self.bytes_loaded(position, operand) == (self.distinct_bytes(operand) or 0)

    def _partial_loads(self, position: int) -> Mapping[int, int]:
        """Return the operands of which an operation may load a part alone, with the bytes of that part."""
        parts = self._partial.get(position)
        if parts is None:
            parts = self._partial[position] = self._find_partial_loads(position)
        return parts

    def _find_partial_loads(self, position: int) -> Mapping[int, int]:
        node = self.index.nodes[position]
        if node.op == "call_module":
            body = called_body(self.index.gm, node)
            if body is None:
                return {}
            parts: dict[int, int] = {}
            for operand, size in zip(node.args, _body_loads(body), strict=False):
                if isinstance(operand, Node):
                    j = self.index.position[operand]
                    parts[j] = parts.get(j, 0) + size
            return parts
        if self._name(node) not in _GATHERS:
            return {}
        table = _argument(node, ("weight", "self", "input"))
        return {self.index.position[table]: self.bytes(position)} if isinstance(table, Node) else {}

    def distinct_bytes(self, position: int) -> int | None:
        """Return the bytes of memory behind a value, which a view may repeat or show in part; None if not known."""
        if position not in self._distinct:
            chain = [position]
            while (base := self.view_of(chain[-1])) is not None and base not in self._distinct:
                chain.append(base)
            if base is None:
                base = chain.pop()
                self._distinct[base] = self._unrepeated_bytes(base)
            size = self._distinct[base]
            for view in reversed(chain):
                own = self.bytes(view) if self.known(view) else None
                size = min((n for n in (size, own) if n is not None), default=None)
                self._distinct[view] = size
        return self._distinct[position]

    def _unrepeated_bytes(self, position: int) -> int | None:
        """Return the bytes of a value; of one that arrives broadcast, those that are repeated once."""
        if not self.known(position):
            return None
        size, value = self.bytes(position), self.index.nodes[position].meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return size
        for count, stride in zip(size_hints(value) or (), value.stride(), strict=False):
            if count > 1 and size_hint(stride) == 0:
                size //= count
        return size

    @staticmethod
    def _by_formula(node: Node, count: int) -> int:
        formula = _formula(node.target)
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


def _formula(target: Any) -> Any:
    """Return torch's formula for the flops of a target, None if it has none."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(target, "overloadpacket", target))


def _grouped_product_flops(node: Node) -> int:
    """Return the flops of a product of groups: of rows with a matrix each, or of columns; 0 if sizes are not known."""
    first, second = _shape(_argument(node, ("self", "input"))), _shape(_argument(node, ("mat2", "weight"), 1))
    result = _shape(node)
    if not first or not second or result is None:
        return 0
    # Groups along the dimension that is summed over share it; elsewhere every result has all of it.
    count = first[0] * second[-1] if len(first) == len(second) == 2 else math.prod(result)
    return 2 * count * first[-1]


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


def _is_view_reshape(node: Node) -> bool:
    """Whether a node reshapes, and the strides of its operand allow to return a view."""
    if node.op != "call_function" or base_name(node) not in _RESHAPES or not node.all_input_nodes:
        return False
    operand, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(operand, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return reshapes_to_view(operand, result.shape)


# Of each operand of a body, in order.
_BODY_LOADS: WeakKeyDictionary[Body, tuple[int, ...]] = WeakKeyDictionary()


def _body_loads(body: Body) -> tuple[int, ...]:
    """Return the bytes that a body loads from each operand. It is kept: bodies never change."""
    sizes = _BODY_LOADS.get(body)
    if sizes is None:
        figures = Figures(Index(body))
        nodes = figures.index.nodes
        operands = [i for i, node in enumerate(nodes) if node.op == "placeholder"]
        inside = {i for i, node in enumerate(nodes) if node.op not in ("placeholder", "output")}
        loads = _loads(figures, inside, frozenset())
        sizes = _BODY_LOADS[body] = tuple(sum(loads.get(i, (0, 0))) for i in operands)
    return sizes


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
        own, again = _loaded(figures, draft)
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
        saved = figures.bytes_read(position) + figures.bytes_written(position)
        work = figures.work(position) // self.flops_per_byte
        return Gain(saved, 1, 0, saved + work + self.launch_bytes)

    def apart(self, figures: Figures, draft: RegionDraft) -> Cost:
        """Return the cost of the operations of a draft run one by one."""
        moved, launches = _apart(figures, draft)
        flops = sum(figures.flops(i) for i in draft.members)
        return Cost(moved, flops, launches, _held(figures, draft))

    def together(self, figures: Figures, draft: RegionDraft) -> Cost:
        """Return the cost of the region, with what is cloned into it."""
        own, again = _loaded(figures, draft)
        flops = sum(figures.flops(i) for i in draft.inside)
        launched = not all(figures.free(i) for i in draft.inside)
        held = sum(figures.bytes(i) for i in draft.operands(figures.index))
        held += sum(figures.bytes(i) for i in draft.outputs)
        return Cost(own + again + _stores(figures, draft), flops, int(launched), held)


def _apart(figures: Figures, draft: RegionDraft) -> tuple[int, int]:
    """Return the bytes that the members read and write one by one, and how many of them are launched."""
    launched = [i for i in draft.members if not figures.free(i)]
    return sum(figures.bytes_read(i) + figures.bytes_written(i) for i in launched), len(launched)


def _base(figures: Figures, position: int, inside: Set[int]) -> int:
    """Return the value that a view inside a region aliases, through any number of views."""
    while position in inside:
        base = figures.view_of(position)
        if base is None:
            break
        position = base
    return position


def _loaded(figures: Figures, draft: RegionDraft) -> tuple[int, int]:
    """Return the bytes the region loads: those its members need, and those only clones need."""
    loads = _loads(figures, draft.members, draft.clones).values()
    return sum(own for own, _ in loads), sum(again for _, again in loads)


def _loads(figures: Figures, members: Set[int], clones: Set[int]) -> dict[int, tuple[int, int]]:
    """Return what a region loads from each value outside: the bytes its members need, and those only clones need.

    What several operations read is loaded once, but lookups in one table may be of different rows: their bytes are
    summed. Of no value more is loaded than there is.
    """
    index, inside = figures.index, members | clones
    # By value: each view of it that is loaded, and the sum of the lookups.
    views: dict[int, dict[int, int]] = {}
    lookups: dict[int, int] = {}

    def total(base: int) -> int:
        size, needed = figures.distinct_bytes(base), sum(views[base].values()) + lookups.get(base, 0)
        return needed if size is None else min(size, needed)

    own: dict[int, int] = {}
    for part in (members, clones):
        for i in part:
            if figures.free(i):
                continue
            for j in index.data[i]:
                base = _base(figures, j, inside)
                if base in inside and index.nodes[base].op != "get_attr":
                    continue
                loaded, ways = figures.bytes_loaded(i, j), views.setdefault(base, {})
                if figures.loads_all(i, j):
                    ways[j] = loaded
                else:
                    lookups[base] = lookups.get(base, 0) + loaded
        if part is members:
            own = {base: total(base) for base in views}
    return {base: (own.get(base, 0), total(base) - own.get(base, 0)) for base in views}


def _stores(figures: Figures, draft: RegionDraft) -> int:
    """Return the bytes the region stores: its results, each memory once, and what it writes in place."""
    members, inside, nodes = draft.members, draft.members | draft.clones, figures.index.nodes
    stored: dict[Any, int] = {i: i for i in members if figures.writes(i)}
    for i in draft.outputs:
        base = _base(figures, i, inside)
        if base in members:
            # Two getitems may read the same element of a tuple.
            part = nodes[base].args if is_projection(nodes[base]) else base
            stored[part] = base
    return sum(figures.bytes(i) for i in stored.values())


def _held(figures: Figures, draft: RegionDraft) -> int:
    """Return the peak of bytes held while the members run one by one."""
    index, members, kept = figures.index, draft.members, set(draft.outputs)
    inside = members | draft.clones
    last: dict[int, int] = {}
    for i in draft.inside:
        if is_projection(index.nodes[i]):
            continue  # a tuple is held as long as its elements are
        for j in index.data[i]:
            if j in members:
                last[_base(figures, j, inside)] = i
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
