"""Canonicalization of ATen graphs: one form for each operation, whichever way it was written.

One forward sweep normalizes arguments, turns views into reshapes, makes casts explicit and drops views, copies and
assertions that change nothing; one backward sweep drops dead code. Linear in the size of the graph, and idempotent.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.ir.graph_module import Program, copy_node, rebuild
from dovetail.ir.op_traits import MAY_RETURN_OPERAND, is_removable
from dovetail.ir.schema import (
    explicit_sizes,
    is_aten,
    is_viewable,
    named_arguments,
    normalized_arguments,
    op_name,
    same_geometry,
    to_args_kwargs,
    value_of,
    viewed_operand,
)

_RESHAPE = torch.ops.aten.reshape.default
_VIEWS = MAY_RETURN_OPERAND | {"type_as"}

# Views that keep the order of elements.
_ORDER_PRESERVING = frozenset(
    {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "unflatten"}
)
_MAX_VIEW_CHAIN = 8
_COPIES = frozenset({"cat", "clone", "_to_copy", "lift_fresh_copy"})
_METADATA_ASSERTS = frozenset({"_assert_tensor_metadata"})


@dataclass(frozen=True)
class CanonicalReport:
    """What canonicalization removed or rewrote, counted by reason."""

    counts: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, reason: str) -> int:
        return dict(self.counts).get(reason, 0)

    @property
    def total(self) -> int:
        return sum(count for _, count in self.counts)

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.counts) or "nothing"


def canonicalize(module: GraphModule) -> tuple[Program, CanonicalReport]:
    """Return a copy of the graph in canonical form, and a report of the changes.

    Values, gradients, dtypes, strides and aliasing of the results stay exactly as they are. Nodes without a rule or
    without `meta["val"]` are left alone. Applying it twice changes nothing the second time.
    """
    program, report, _ = canonicalize_traced(module)
    return program, report


def canonicalize_traced(module: GraphModule) -> tuple[Program, CanonicalReport, dict[Node, Node]]:
    """Do what `canonicalize` does, and also return the new node of each old one that has one."""
    counts: Counter[str] = Counter()
    inner: dict[str, Program] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        child = module._modules.get(cast(str, node.target))
        if isinstance(child, GraphModule) and node.target not in inner:
            inner[cast(str, node.target)], report = canonicalize(child)
            counts.update(dict(report.counts))
    sweep = _Sweep(module.graph, counts)
    graph = sweep.run()
    _remove_dead_code(graph, counts)
    alive = set(graph.nodes)
    env = {old: new for old, new in sweep.env.items() if new in alive}
    meta = dict(cast("Mapping[str, Any]", module.meta))
    report = CanonicalReport(tuple(sorted(counts.items())))
    return rebuild(module, graph, add=inner, meta=meta), report, env


class _Sweep:
    """The forward sweep: copies the graph and canonicalizes each node on the way."""

    def __init__(self, source: Graph, counts: Counter[str]) -> None:
        self.source = source
        self.counts = counts
        self.graph = Graph(tracer_cls=source._tracer_cls)
        self.env: dict[Node, Node] = {}
        nodes = list(source.nodes)
        self.roots = _roots(nodes)
        writes = [n for n in nodes if _mutates(n)]
        # Otherwise a write in between could distinguish a copy from its original.
        self.functional = all(_is_trailing_write(n) for n in writes)
        self.written = {self.roots[a] for n in writes for a in n.all_input_nodes[:1]}
        self.inputs = {n for n in nodes if n.op in ("placeholder", "get_attr")}
        self.returned = {a for n in nodes if n.op == "output" for a in n.all_input_nodes}
        self.outgoing = {self.roots[n] for n in self.returned}
        # Copies give these the strides that their readers assume, whatever the strides of a call.
        self.strided = {self.roots[a] for n in nodes if _reads_strides(n) for a in n.all_input_nodes}
        self.shared: dict[Node, Node] = {}

    def run(self) -> Graph:
        for node in self.source.nodes:
            if is_aten(node.target) and op_name(node.target) in _METADATA_ASSERTS and not node.users:
                self.counts["metadata asserts removed"] += 1
            elif (same := self._same_as(node)) is not None:
                self.env[node] = same
            elif self._is_reshape(node):
                self.env[node] = self._as_reshape(node)
            elif node.target is torch.ops.aten.type_as.default and isinstance(node.meta.get("val"), Tensor):
                self.env[node] = self._as_cast(node)
            else:
                self.env[node] = self._normalize(node)
        self.graph.set_codegen(self.source._codegen)
        return self.graph

    def _same_as(self, node: Node) -> Node | None:
        """Return the operand that an operator returns unchanged, if nothing can distinguish the two."""
        name = op_name(node.target)
        if not is_aten(node.target) or node in self.returned:
            return None
        copies = name in _COPIES or bool(named_arguments(node).get("copy"))
        operand = _only_operand(node) if copies or name in _VIEWS else None
        if not isinstance(operand, Node):
            return None
        source = self.env[operand]
        old, new = source.meta.get("val"), node.meta.get("val")
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            return None
        if not same_geometry(old, new):
            return self._viewed_back(node, source, new)
        if not copies:
            if _is_active_dropout(node):
                return None
            self.counts["views that change nothing removed"] += 1
            return source
        if self.roots[node] in self.strided or not self._may_share(self.roots[operand], self.roots[node]):
            return None
        self.counts["copies that change nothing removed"] += 1
        return source

    def _viewed_back(self, node: Node, view: Node, value: Tensor) -> Node | None:
        """Return the source of a chain of views, if the last one restores its sizes and strides."""
        if (
            op_name(node.target) not in _ORDER_PRESERVING
            or not self.functional
            or self.roots[node] in self.strided
        ):
            return None
        for _ in range(_MAX_VIEW_CHAIN):
            if not is_aten(view.target) or op_name(view.target) not in _ORDER_PRESERVING:
                return None
            source = _only_operand(view)
            old = source.meta.get("val") if isinstance(source, Node) else None
            if not isinstance(old, Tensor):
                return None
            if same_geometry(old, value):
                self.counts["views that change nothing removed"] += 1
                return source
            view = cast(Node, source)
        return None

    def _may_share(self, old: Node, new: Node) -> bool:
        """Whether a copy and its original may become one tensor: no write and no caller can distinguish them."""
        old = self.shared.get(old, old)
        if not self.functional or old in self.written or new in self.written:
            return False
        if new in self.outgoing:
            if old in self.inputs or old in self.outgoing:
                return False
            self.outgoing.add(old)
        self.shared[new] = old
        return True

    def _is_reshape(self, node: Node) -> bool:
        if not is_aten(node.target) or op_name(node.target) not in ("view", "_unsafe_view"):
            return False
        return "size" in named_arguments(node) and isinstance(node.meta.get("val"), Tensor)

    def _as_reshape(self, node: Node) -> Node:
        arguments = named_arguments(node)
        operand, sizes = cast(Node, arguments["self"]), arguments["size"]
        original = self._before_copy(operand, node)
        if original is not None:
            self.counts["copies for a reshape removed"] += 1
        source = self.env[operand] if original is None else original
        sizes = explicit_sizes(map_arg(sizes, self.env.__getitem__), node.meta["val"])
        new = self.graph.create_node("call_function", _RESHAPE, (source, sizes), {}, "reshape")
        new.meta = dict(node.meta)
        self.counts["reshapes respelled"] += 1
        return new

    def _as_cast(self, node: Node) -> Node:
        """Replace a conversion to another tensor's dtype and device by one that names them."""
        value, source = node.meta["val"], self.env[cast(Node, named_arguments(node)["self"])]
        kwargs: dict[str, Any] = {"dtype": value.dtype}
        was = source.meta.get("val")
        if not isinstance(was, Tensor) or was.device != value.device:
            kwargs["device"] = value.device
        new = self.graph.create_node(
            "call_function", torch.ops.aten._to_copy.default, (source,), kwargs, "_to_copy"
        )
        new.meta = dict(node.meta)
        new.args, new.kwargs = to_args_kwargs(torch.ops.aten._to_copy.default, normalized_arguments(new))
        self.counts["conversions respelled"] += 1
        return new

    def _before_copy(self, operand: Node, node: Node) -> Node | None:
        """Return what was cloned because its strides did not allow the view: `reshape` does that by itself."""
        is_clone = operand.target is torch.ops.aten.clone.default
        if not is_clone or len(operand.users) != 1 or not self.functional:
            return None
        arguments = named_arguments(operand)
        if arguments.get("memory_format") is not torch.contiguous_format:
            return None
        original = arguments["self"]
        value = value_of(original)
        if self.env[operand].target is not operand.target or not isinstance(value, Tensor):
            return None
        root = self.roots[original]
        if self.shared.get(root, root) in self.written:
            return None
        return self.env[original] if is_viewable(value, node.meta["val"].shape) is False else None

    def _normalize(self, node: Node) -> Node:
        new = copy_node(self.graph, node, self.env.__getitem__)
        if isinstance(new.target, OpOverload):
            args, kwargs = to_args_kwargs(new.target, normalized_arguments(new))
            if (args, kwargs) != (new.args, new.kwargs):
                new.args, new.kwargs = args, kwargs
                self.counts["arguments respelled"] += 1
        return new


def _only_operand(node: Node) -> Any:
    """Return the tensor that an operator may return unchanged: its operand, or the only one of a list."""
    arguments = named_arguments(node)
    if op_name(node.target) != "cat":
        return arguments.get("self", arguments.get("input"))
    tensors = normalized_arguments(node, arguments)["tensors"]
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else None


def _reads_strides(node: Node) -> bool:
    """Whether an operator describes views of its operands by strides."""
    if is_aten(node.target):
        return op_name(node.target).startswith("as_strided")
    return getattr(node.target, "__name__", "") == "auto_functionalized_v2"


def _is_active_dropout(node: Node) -> bool:
    arguments = named_arguments(node)
    return op_name(node.target) == "dropout" and bool(arguments.get("train")) and arguments.get("p") != 0


def _roots(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return for each node the root of its chain of views: itself, unless it is a view of another."""
    roots: dict[Node, Node] = {}
    for node in nodes:
        base = viewed_operand(node)
        if base is None and is_aten(node.target) and op_name(node.target) in _VIEWS:
            base = _only_operand(node)
        if base is None and node.target is operator.getitem:
            base = node.args[0] if isinstance(node.args[0], Node) else None
        roots[node] = roots[base] if isinstance(base, Node) else node
    return roots


def _is_trailing_write(node: Node) -> bool:
    """Whether a write only stores a result in an input or an attribute, as captured graphs do at their end."""
    if node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[0], Node):
        return False
    return node.args[0].op in ("placeholder", "get_attr") and not node.users


def _remove_dead_code(graph: Graph, counts: Counter[str]) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and is_removable(node):
            graph.erase_node(node)
            counts["unused operations removed"] += 1


def _mutates(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    return node.op in ("call_method", "call_module")
