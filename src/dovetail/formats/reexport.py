"""A flat body written anew for a compiler: operands in the order of memory, indices checked, what it does not know in
operations that it does."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from dovetail.formats.onnx.writer import Layout

ATEN = torch.ops.aten
Spelling = Callable[[Node], GraphModule | None]
"""The operations to write in place of a node, with its inputs in order as operands; None to write it as it is."""


@dataclass(frozen=True)
class Retold:
    """A graph, and whether its last result says that every index was in range."""

    graph: Graph
    guarded: bool


class Reexporter:
    """Writes operations into a graph, each with a fake of its value. `checks` says that indices are looked at."""

    def __init__(self, checks: bool = True) -> None:
        self.graph, self.mode, self.checks = Graph(), FakeTensorMode(), checks
        self.flags: list[Node] = []
        self._start: Node | None = None

    def operand(self, name: str, sizes: Sequence[int], dtype: torch.dtype) -> Node:
        """An operand that lies row by row."""
        # Operands come first, also those that are thought of later.
        with contextlib.nullcontext() if self._start is None else self.graph.inserting_before(self._start):
            made = self.graph.placeholder(name)
        with self.mode:
            made.meta["val"] = torch.empty(tuple(sizes), dtype=dtype)
        return made

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """An operation. Views of memory are told as what they are views of, however that lies."""
        if target in _VIEWS:
            # _reshape_alias has strides too.
            target, args = ATEN.reshape.default, args[:2]
        made = self.graph.call_function(target, args, kwargs)
        self._start = self._start or made
        given, named = cast("Any", map_arg((args, kwargs), lambda n: n.meta["val"]))
        with self.mode, torch.no_grad():
            made.meta["val"] = target(*given, **named)
        return made

    def write(self, node: Node, env: dict[Node, Any], spelling: Spelling) -> None:
        """An operation of another graph, written out where `spelling` says so; `env` has what stands for its inputs."""
        if node.target is operator.getitem and isinstance(env[cast("Node", node.args[0])], tuple):
            env[node] = env[cast("Node", node.args[0])][cast("int", node.args[1])]
            return
        args, kwargs = cast("Any", map_arg((node.args, node.kwargs), env.__getitem__))
        args = self._in_range(node.target, list(args))
        written = None if node.target is operator.getitem else spelling(node)
        if written is None:
            env[node] = self.call(node.target, *args, **kwargs)
            return
        # The inputs as they are now: an index may have been replaced by one that is in range.
        replaced = dict(zip(_nodes(node.args), _nodes(args), strict=False))
        inner: dict[Node, Any] = {}
        given = [replaced.get(n, env[n]) for n in node.all_input_nodes]
        for one in written.graph.nodes:
            if one.op == "placeholder":
                inner[one] = given.pop(0)
            elif one.op == "output":
                made = cast("tuple[Any, ...]", map_arg(one.args[0], inner.__getitem__))
                env[node] = made[0] if isinstance(node.meta["val"], Tensor) else made
            else:
                told = cast("Any", map_arg((one.args, one.kwargs), inner.__getitem__))
                inner[one] = self.call(one.target, *told[0], **told[1])

    def _in_range(self, target: Any, args: list[Any]) -> list[Any]:
        """Arguments with indices that are counted from the front and in range; whether they were in range is a flag.

        Eager code raises where one is not. Compilers read what lies there, or the last row.
        """
        at = _INDICES.get(str(target))
        if at is not None:
            source, index, dim = at
            along = 0 if dim is None else args[dim]
            args[index] = self._checked(args[index], _size(args[source], along), 0)
        elif str(target) == "aten.index.Tensor":
            sizes = args[0].meta["val"].shape
            args[1] = [
                None if one is None else self._wrapped(self._checked(one, sizes[d], -sizes[d]), sizes[d])
                for d, one in enumerate(args[1])
            ]
        return args

    def _checked(self, index: Node, size: int, lowest: int) -> Node:
        if not self.checks or not index.meta["val"].numel() or not size:
            return index
        least, most = (self.call(op, index) for op in (ATEN.min.default, ATEN.max.default))
        low = self.call(ATEN.ge.Scalar, least, lowest)
        self.flags.append(self.call(ATEN.logical_and.default, low, self.call(ATEN.lt.Scalar, most, size)))
        return self.call(ATEN.clamp.default, index, lowest, size - 1)

    def _wrapped(self, index: Node, size: int) -> Node:
        from_the_end = self.call(ATEN.lt.Scalar, index, 0)
        return self.call(ATEN.where.self, from_the_end, self.call(ATEN.add.Tensor, index, size), index)

    def finish(self, results: Sequence[Node]) -> Retold:
        """The graph with these results, and the flag after them."""
        flag: list[Node] = []
        for one in self.flags:
            flag = [self.call(ATEN.logical_and.default, flag[0], one) if flag else one]
        self.graph.output((*results, *flag))
        return Retold(self.graph, bool(flag))


_VIEWS = (ATEN.view.default, ATEN._unsafe_view.default, ATEN._reshape_alias.default)
_INDICES: Mapping[str, tuple[int, int, int | None]] = {
    "aten.embedding.default": (0, 1, None),
    "aten.index_select.default": (0, 2, 1),
    "aten.gather.default": (0, 2, 1),
    "aten.scatter.value": (0, 2, 1),
    "aten.scatter.src": (0, 2, 1),
    "aten.scatter_add.default": (0, 2, 1),
}
"""Which argument is read or written at positions, which has the positions, and which says along which dimension."""
INDEXING = frozenset({*_INDICES, "aten.index.Tensor"})


def _size(node: Node, dim: int) -> int:
    shape = node.meta["val"].shape
    return shape[dim] if shape else 1


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def reexported(
    body: GraphModule,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    spelling: Spelling = lambda _: None,
) -> Retold:
    """A flat body whose operands and results have their dimensions in the order in which they lie in memory."""
    teller = Reexporter()
    env: dict[Node, Any] = {}
    waiting = list(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            layout = waiting.pop(0)
            sizes = cast("tuple[int, ...]", layout.sizes)
            order = layout.order or tuple(range(len(sizes)))
            given = teller.operand(node.name, [sizes[d] for d in order], layout.dtype)
            env[node] = (
                teller.call(ATEN.permute.default, given, list(layout.back)) if layout.turned else given
            )
        elif node.op == "call_function":
            teller.write(node, env, spelling)
    nodes = cast("Sequence[Node]", body.graph.output_node().args[0])
    made: list[Node] = []
    for node, layout in zip(nodes, results, strict=True):
        value = env[node]
        made.append(
            teller.call(ATEN.permute.default, value, list(layout.order))
            if layout.order and layout.turned
            else value
        )
    return teller.finish(made)


def written_out(
    node: Node, table: Mapping[Any, Callable[..., Any]], call: Callable[..., Any] | None = None
) -> GraphModule:
    """A graph that does what one operation does in the operations that `table` leads to.

    `call` is what is written out, the operator itself if it is not given.
    """
    inputs = node.all_input_nodes
    target = call or cast("Any", node.target)

    def run(*given: Tensor) -> tuple[Any, ...]:
        env = dict(zip(inputs, given, strict=True))
        args, kwargs = cast("Any", map_arg((node.args, node.kwargs), env.__getitem__))
        made = target(*args, **kwargs)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in inputs]
        return _pure(make_fx(run, decomposition_table=dict(table))(*fakes))


def _pure(written: GraphModule) -> GraphModule:
    """Without writes into what it has made itself and reads nowhere else, as some decompositions have them."""
    for node in written.graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or not target._schema.is_mutable:
            continue
        made = node.args[0]
        name = target._schema.name.removeprefix("aten::")
        packet = getattr(ATEN, name.removesuffix("_"), None)
        if not name.endswith("_") or made.op != "call_function" or len(made.users) > 1 or packet is None:
            raise ValueError(f"{target} writes what is read elsewhere")
        node.target = getattr(packet, target._overloadname)
    return written


def alone(nodes: Sequence[Node], spelling: Spelling) -> Graph:
    """A graph of operations each of which has operands of its own."""
    teller = Reexporter()
    made: list[Node] = []
    for node in nodes:
        env: dict[Node, Any] = {
            n: teller.operand(n.name, n.meta["val"].shape, n.meta["val"].dtype) for n in node.all_input_nodes
        }
        teller.write(node, env, spelling)
        value = env[node]
        if isinstance(value, Node) and not isinstance(value.meta["val"], Tensor):
            # Parts that nobody can ask for are empty, or not there.
            parts = enumerate(value.meta["val"])
            value = tuple(
                teller.call(operator.getitem, value, i) for i, one in parts if one is not None and one.numel()
            )
        made.extend(cast("Sequence[Node]", value) if isinstance(value, tuple) else [value])
    return teller.finish(made).graph


def root(x: Tensor, exponent: float) -> Any:
    """Powers that torch takes for roots, which differ from powers for the lowest of all numbers."""
    if exponent == 0.5:
        return torch.sqrt(x)
    return torch.rsqrt(x) if exponent == -0.5 else NotImplemented


def lerp(start: Tensor, end: Tensor, weight: Any) -> Any:
    """Between two values, from the nearer one, so that an infinite one stays what it is."""
    way = end - start
    if isinstance(weight, Tensor):
        return torch.where(weight.abs() < 0.5, start + way * weight, end + way * (weight - 1))
    return start + way * weight if abs(weight) < 0.5 else end + way * (weight - 1)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value * b


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value / b


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if eps is not None:
        return NotImplemented
    return ATEN.rms_norm.default(x, normalized_shape, weight, torch.finfo(x.dtype).eps)


def _max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Where a last window is not full: the largest of what is at each place of a window."""
    k, p, d = (_pair(one) for one in (kernel, padding, dilation))
    s = _pair(stride) if stride else k
    counts, missing = [0, 0], [0, 0]
    for i in range(2):
        size, reach = x.shape[i - 2], d[i] * (k[i] - 1) + 1
        counts[i] = -((reach - size - 2 * p[i]) // s[i]) + 1
        # No window begins behind the end.
        counts[i] -= (counts[i] - 1) * s[i] >= size + p[i]
        missing[i] = (counts[i] - 1) * s[i] + reach - size - 2 * p[i]
    if not ceil_mode or max(missing) <= 0:
        return NotImplemented
    down, across = (max(n, 0) for n in missing)
    least = -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    wide = F.pad(x, (p[1], p[1] + across, p[0], p[0] + down), value=least)
    rows, columns = (
        [slice(j * d[i], j * d[i] + (counts[i] - 1) * s[i] + 1, s[i]) for j in range(k[i])] for i in range(2)
    )
    return functools.reduce(torch.maximum, [wide[..., r, c] for r in rows for c in columns])


def _pair(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[-1]]


def _without(product: Callable[..., Tensor]) -> Callable[..., Any]:
    """A product to which something is added; nothing of what is taken zero times may be left."""

    def run(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if beta:
            return NotImplemented
        made = product(a, b)
        return made if alpha == 1 else made * alpha

    return run


def _extreme(target: Any) -> Callable[..., Any]:
    """The place of the largest or smallest one; what is no number is both."""

    def run(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        lost = torch.isnan(x)
        some = lost.any() if dim is None else lost.any(dim, keepdim)
        return torch.where(some, torch.argmax(lost.int(), dim, keepdim), target(x, dim, keepdim))

    return run


def _ordered(target: Any) -> Callable[..., Any]:
    """What is in order; of what is no number the sign is that of the largest."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        return target(torch.where(torch.isnan(x), torch.nan, x), *args, **kwargs)

    return run


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Each side has a least length of its own."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    a, b = (
        one / torch.linalg.vector_norm(one, 2, dim, keepdim=True).clamp(min=eps)
        for one in torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    )
    return (a * b).sum(dim)


MENDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.pow.Tensor_Scalar: root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.addcmul.default: _addcmul,
    ATEN.addcdiv.default: _addcdiv,
    ATEN.log_sigmoid.default: _log_sigmoid,
    ATEN.rms_norm.default: _rms_norm,
    ATEN.max_pool2d.default: _max_pool2d,
    ATEN.addmm.default: _without(torch.mm),
    ATEN.baddbmm.default: _without(torch.bmm),
    ATEN.argmax.default: _extreme(ATEN.argmax.default),
    ATEN.argmin.default: _extreme(ATEN.argmin.default),
    ATEN.sort.default: _ordered(ATEN.sort.default),
    ATEN.argsort.default: _ordered(ATEN.argsort.default),
    ATEN.topk.default: _ordered(ATEN.topk.default),
    ATEN.cosine_similarity.default: _cosine_similarity,
}
