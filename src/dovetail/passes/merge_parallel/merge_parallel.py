"""`MergeParallel`: sibling products as one wider product, and the rewriting of the graph.

Horizontal fusion of matrix products: products that read the same value and agree in everything but their width become
one product of the concatenated weights, whose result is split. Siblings are grouped by the value they read and by their
options, and elementwise operations that follow every branch alike are lifted above the split (`sibling_groups`);
values, strides and copies are decided by running the operators on fake tensors (`merge_plan`); and
the graph is written once. Each step is linear in the operations concerned, apart from a heap ordered by position.

Reference: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; TASO's "merge parallel" substitutions
(Jia et al., SOSP 2019).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, pause_gc, require_graph
from dovetail.ir.schema import named_arguments, op_name
from dovetail.ir.shape_prop import fake_inference, fake_mode
from dovetail.outlining.bodies import common_module_stack
from dovetail.passes.fold_constants import Concatenated, GraphRewriter, chain_of
from dovetail.passes.merge_parallel.merge_plan import Guard, Joint, MergePlan, make_plan, pays
from dovetail.passes.merge_parallel.sibling_groups import (
    Missing,
    Row,
    product_arguments,
    row_arguments,
    source_of,
)
from dovetail.passes.pass_manager import Finding, Pass, require_fuel

_aten = torch.ops.aten
_NAMES = {"_native_batch_norm_legit_no_training": "batch_norm"}


class _MergeRewriter(GraphRewriter):
    """Writes a graph in which each planned group is one product, all else unchanged."""

    def __init__(self, index: Index, plan: MergePlan, materialise: bool) -> None:
        super().__init__(index.gm)
        self.index, self.plan, self.materialise = index, plan, materialise
        self.stem = ""
        self.about: Sequence[Node] = ()
        self.parts_used: list[Node] = []

    def write(self) -> Program:
        joints = {joint.group.anchor: joint for joint in self.plan.joints}
        members = {node for joint in self.plan.joints for node in joint.group.members}
        for i, node in enumerate(self.index.nodes):
            if i in joints:
                self._joint(joints[i])
            if node not in members and node not in self.env:
                self.copy(node)
        self._drop_unused()
        return self.program()

    def copy(self, node: Node) -> Node:
        new = super().copy(node)
        if node in self.plan.values:
            new.meta["val"] = self.plan.values[node]
        return new

    def _fetch(self, node: Node) -> Node:
        """Return the image of a node in the new graph; a parameter that comes later is written now."""
        chain: list[Node] = []
        while node not in self.env:
            chain.append(node)
            if not node.all_input_nodes:
                break
            node = node.all_input_nodes[0]
        for late in reversed(chain):
            self.copy(late)
        return self.env[chain[0] if chain else node]

    def _joint(self, joint: Joint) -> None:
        rows: list[Node] = []
        for number, row in enumerate(joint.group.rows):
            self.about = row.operations
            self.stem = f"merged_{_NAMES.get(name := op_name(row.operations[0].target), name)}"
            if number == 0:
                args, kwargs = product_arguments(joint.group, self._fetch, self._joined)
            else:
                args, kwargs = row_arguments(row, rows.__getitem__, self._fetch, self._joined)
            rows.append(self._operation(joint, number, row, args, kwargs))
            if number in joint.slices:
                self._slice(joint, number, row, rows[-1])

    def _operation(self, joint: Joint, number: int, row: Row, args: Any, kwargs: Any) -> Node:
        value = joint.tuples[number] if row.inner else joint.values[number]
        new = self._call(self.stem, row.operations[0].target, args, kwargs, value)
        if row.inner:
            self.about = row.nodes
            return self._call(f"{self.stem}_value", operator.getitem, (new, 0), {}, joint.values[number])
        return new

    def _slice(self, joint: Joint, number: int, row: Row, source: Node) -> None:
        arguments = (source, joint.group.widths, joint.group.dim)
        parts = self._call("merged_split", _aten.split_with_sizes.default, arguments, {}, joint.parts[number])
        for branch, cut in joint.slices[number].items():
            node = row.nodes[branch]
            if cut.copied is None:
                self.env[node] = self._replacement(node, operator.getitem, (parts, branch), {}, cut.value)
                continue
            self.about = (node,)
            part = self._call("merged_part", operator.getitem, (parts, branch), {}, cut.value)
            options = {"memory_format": cut.copied}
            self.env[node] = self._replacement(node, _aten.clone.default, (part,), options, cut.copy)

    def _replacement(self, node: Node, target: Any, args: Any, kwargs: dict[str, Any], value: Any) -> Node:
        """Return a node with the name and the meta of the one that it replaces."""
        new = self.graph.create_node("call_function", target, args, kwargs, node.name, node.type)
        new.meta = {**node.meta, "val": value}
        return new

    def _joined(self, parts: Sequence[Node | Missing], dim: int, role: str) -> Node:
        """Return a node for the concatenated parameters: computed at each call, or once."""
        fixed = all(isinstance(p, Missing) or source_of(p).op == "get_attr" for p in parts)
        given = [p for p in parts if isinstance(p, Node)]
        self.parts_used += given
        if self.materialise and fixed:
            return self._constant(parts, dim, role)
        swaps = [_untransposed(p) for p in given]
        if len(given) == len(parts) and all(s is not None for s in swaps):
            inner = self._joined([cast("Node", s) for s in swaps], 1 - dim, role)
            return self._transposed(given[0], inner)
        nodes = [self._zeros(p) if isinstance(p, Missing) else self._fetch(p) for p in parts]
        value = torch.cat([n.meta["val"] for n in nodes], dim)
        return self._call(f"{self.stem}_{role}", _aten.cat.default, (nodes, dim), {}, value)

    def _transposed(self, like: Node, inner: Node) -> Node:
        args = (inner, *like.args[1:])
        value = cast("Any", like.target)(inner.meta["val"], *like.args[1:], **like.kwargs)
        return self._call(f"{self.stem}_turned", like.target, args, dict(like.kwargs), value)

    def _zeros(self, missing: Missing) -> Node:
        options = {"dtype": missing.like.dtype, "device": missing.like.device}
        return self._call(
            f"{self.stem}_zeros", _aten.zeros.default, ([missing.width],), options, missing.zeros()
        )

    def _constant(self, parts: Sequence[Node | Missing], dim: int, role: str) -> Node:
        value = torch.cat([p.zeros() if isinstance(p, Missing) else p.meta["val"] for p in parts], dim)

        given = [p.width if isinstance(p, Missing) else chain_of(p)[1] for p in parts]
        sources = [chain_of(p)[0] for p in parts if isinstance(p, Node)]
        (target,) = self.constants.derive([f"{self.stem}_{role}"], sources, Concatenated(dim, tuple(given)))
        new = self.graph.create_node("get_attr", target, name=target)
        new.meta["val"] = value
        return new

    def _call(self, stem: str, target: Any, args: Any, kwargs: dict[str, Any], value: Any) -> Node:
        """Return a new node with the meta that the operations it replaces have in common."""
        new = self.graph.create_node("call_function", target, args, kwargs, self.names.new(stem))
        new.meta["val"] = value
        traces = [t for node in self.about if (t := node.meta.get("stack_trace"))]
        if traces:
            new.meta["stack_trace"] = traces[0]
        stack = common_module_stack(node.meta for node in self.about if "nn_module_stack" in node.meta)
        if stack:
            new.meta["nn_module_stack"] = stack
        return new

    def _drop_unused(self) -> None:
        """Remove parameters and views of them that only the merged products read."""
        for node in self.parts_used:
            at: Node | None = node
            while at is not None and at.op != "placeholder":
                new = self.env.get(at)
                if new is None or new.users or new._erased:
                    break
                self.graph.erase_node(new)
                at = at.all_input_nodes[0] if at.all_input_nodes else None


def _untransposed(node: Node) -> Node | None:
    """Return the matrix that a node is the transpose of, None if it is not a transpose."""
    if node.op != "call_function" or not isinstance(node.args[0], Node):
        return None
    value = node.args[0].meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2:
        return None
    name, arguments = op_name(node.target), named_arguments(node)
    if name == "t":
        return node.args[0]
    if name == "transpose" and {arguments.get("dim0"), arguments.get("dim1")} in ({0, 1}, {-1, -2}):
        return node.args[0]
    if name == "permute" and [d % 2 for d in arguments["dims"]] == [1, 0]:
        return node.args[0]
    return None


@checked_init()
@dataclass(frozen=True, repr=False)
class MergeParallel(Pass):
    """Run sibling linears or convolutions as one wider product.

    Needs: a graph with values, and products that read the same value and agree in everything but their width; their
    weights are parameters, buffers, constants or inputs. Operations of a region are not changed. Run `Cleanup` first
    if the shared value may be computed twice.

    Leaves: one product of the concatenated weights, and each result as a slice of it. Operations that follow every
    branch alike and work column by column (activations, batch norm in eval mode, a scale for each column) run before
    slicing. A slice is copied if it must have its own memory: returned, written, read by a region. Values are equal
    within float tolerance, not bit for bit: a wider product may sum in another order.

    Weights are concatenated by a `cat` in the graph at each call, so parameters, `state_dict` and training are not
    affected. Frozen weights are not joined with trained ones. A branch that no loss reaches gets gradients of zero
    instead of none. With `materialise` weights are joined once, into buffers that are not in the `state_dict`: for
    inference, where the cost is reading the weights. They are joined again before the next call after a weight was
    written, and within `weight_check_interval` calls if no version counter shows it; gradients do not reach the
    parameters.

    `guard` takes the branches (`Branch`) and returns None or a `Decline`; None for no guard. The default, `pays`,
    declines where merging clearly saves nothing. `fuel` is the largest number of merges.
    """

    min_branches: int = 2
    guard: Guard | None = pays
    materialise: bool = False
    fuel: int | None = None

    def __post_init__(self) -> None:
        least = self.min_branches
        if not isinstance(least, int) or isinstance(least, bool) or least < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"min_branches {least!r}: give the least number of siblings, 2 and more.")
        if self.guard is not None and not callable(self.guard):
            raise InvalidArgument(f"guard {self.guard!r} is not a function of the branches.")
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with sibling products merged; the input graph itself if it has no such products."""
        with pause_gc():
            index = Index(require_graph(gm))
            index.require_order()
            plan = self._plan(index)
            if not plan.joints:
                return gm
            with fake_inference(fake_mode(index.nodes)):
                return _MergeRewriter(index, plan, self.materialise).write()

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Return which products would be merged, and why others that read the same value would not."""
        return tuple(self._plan(Index(require_graph(gm))).findings)

    def _plan(self, index: Index) -> MergePlan:
        return make_plan(index, self.min_branches, self.guard, self.fuel, self.materialise)
