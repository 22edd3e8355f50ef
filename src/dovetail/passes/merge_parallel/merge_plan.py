"""The plan of `MergeParallel`: which groups are merged, their values, and where slices are copied."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from dovetail.errors import PassError
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import PURE
from dovetail.ir.nodes import nbytes, storage_keys
from dovetail.ir.op_traits import target_name
from dovetail.ir.schema import same_geometry
from dovetail.ir.shape_prop import call_with_values, fake_inference, fake_mode, same_layout
from dovetail.passes.merge_parallel.sibling_groups import (
    WRITTEN_BEFORE,
    Missing,
    Product,
    Row,
    SiblingGroup,
    is_product,
    lift,
    may_move,
    product_arguments,
    read_product,
    row_arguments,
    source_of,
    value_read,
)
from dovetail.passes.pass_manager import Finding
from dovetail.rules.rule import Decline

# Both measured on an H200 in bfloat16: beyond the first, merged products took 0.95 to 1.14 of the time of single
# ones. Joining as much as the second at each call took as long as merging three products saved.
_FILLS_A_DEVICE = 10**10
_TOO_MUCH_TO_JOIN = 16 * 2**20


@dataclass(frozen=True)
class Branch:
    """One of the products to be merged, by its sizes: `rows` × `depth` times `depth` × `width`.

    For a convolution `rows` are the positions it computes and `depth` is the number of terms of each. Symbolic sizes
    are given by their hints, None if they have none. `each_call` is whether its weight, of `weight_bytes`, will be
    joined with the others at each call instead of once.
    """

    name: str
    operator: str
    rows: int | None
    depth: int | None
    width: int
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int | None = None
    each_call: bool = False

    @property
    def work(self) -> int | None:
        """The number of multiplications."""
        if self.rows is None or self.depth is None:
            return None
        return self.rows * self.depth * self.width


Guard = Callable[[Sequence[Branch]], Decline | None]


def pays(branches: Sequence[Branch]) -> Decline | None:
    """Decline where merging clearly saves nothing: products that each fill a device, or too many bytes to join.

    Merging saves launches and reads the shared value once. On an H200, q, k and v of a width of 2048 take a third of
    their time as one product with 16 rows, half with 512 and nine tenths with 2048; gate and up six and nine tenths
    with 16 and 512 rows. Products of more than 10¹⁰ multiplications gain nothing. Large weights that are joined at each
    call cost more than that: gate and up with 16 rows then take two and a half times as long.
    """
    work = [branch.work for branch in branches]
    if all(amount is not None and amount >= _FILLS_A_DEVICE for amount in work):
        return Decline("each product is large enough by itself: merging them saves almost nothing")
    joined = sum(branch.weight_bytes or 0 for branch in branches if branch.each_call)
    if joined > _TOO_MUCH_TO_JOIN:
        return Decline(
            f"joining {joined / 2**20:.0f} MiB of weights at each call costs more than merging saves; "
            f"materialise=True joins them once, for inference"
        )
    return None


_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class Slice:
    """One branch's part of a joint value.

    If the part must have its own memory, `copied` is the memory format of the copy and `copy` its value.
    """

    value: Any
    copied: torch.memory_format | None = None
    copy: Any = None


@dataclass
class Joint:
    """A group with the values of each of its rows.

    `values` are the joint ones, `tuples` those of operations that return a tuple, `parts` the results of the split, and
    `slices` the parts that are used, by branch.
    """

    group: SiblingGroup
    values: list[Any] = field(default_factory=list[Any])
    tuples: dict[int, Any] = field(default_factory=dict[int, Any])
    parts: dict[int, Any] = field(default_factory=dict[int, Any])
    slices: dict[int, dict[int, Slice]] = field(default_factory=dict[int, dict[int, Slice]])


@dataclass
class MergePlan:
    """The groups to merge, and the findings about all candidates. `values` are those that change downstream."""

    joints: list[Joint] = field(default_factory=list[Joint])
    findings: list[Finding] = field(default_factory=list[Finding])
    values: dict[Node, Any] = field(default_factory=dict[Node, Any])


def make_plan(
    index: Index, min_branches: int, guard: Guard | None, fuel: int | None, materialise: bool
) -> MergePlan:
    """Return the plan; the graph is not changed."""
    planner = _Planner(index, guard, materialise)
    with fake_inference(fake_mode(index.nodes)):
        for candidates in _siblings(index):
            planner.consider(candidates, min_branches, fuel)
    return planner.plan


def _siblings(index: Index) -> list[list[int]]:
    """Return the positions of products that read the same value, in groups of two or more, by the first position."""
    readers: dict[Node, list[int]] = {}
    for i, node in enumerate(index.nodes):
        if is_product(node) and node.users:
            value = value_read(node)
            if value is not None:
                readers.setdefault(value, []).append(i)
    return [positions for positions in readers.values() if len(positions) > 1]


class _Planner:
    def __init__(self, index: Index, guard: Guard | None, materialise: bool) -> None:
        self.index, self.guard, self.materialise = index, guard, materialise
        self.plan = MergePlan()
        self.claimed: set[Node] = set()
        self.trial: dict[Node, Any] = {}

    def consider(self, positions: list[int], min_branches: int, fuel: int | None) -> None:
        """Plan merges among the products that read one value."""
        groups: dict[Any, list[Product]] = {}
        known: dict[Any, Product] = {}
        for i in positions:
            read = read_product(self.index, i, by_training=not self.materialise)
            if isinstance(read, str):
                self._decline([self.index.nodes[i]], read)
                continue
            first = known.setdefault((read.facts, read.weight, read.bias), read)
            if first is not read:
                words = f"it computes the same as '{first.node.name}', and Cleanup makes them one"
                self._decline([read.node], words)
                continue
            groups.setdefault(read.facts, []).append(read)
        for products in groups.values():
            nodes = [p.node for p in products]
            if len(products) < min_branches:
                others = max((g for g in groups.values() if g is not products), key=len, default=())
                self._decline(nodes, _why_too_few(products, others, min_branches))
                continue
            reason = self._why_not(products)
            if not reason and fuel is not None and len(self.plan.joints) >= fuel:
                reason = f"the fuel of {fuel} is spent"
            reason = reason or self._join(products)
            if reason:
                self._decline(nodes, reason)
            else:
                names = tuple(n.name for n in nodes)
                self.plan.findings.append(Finding(names, f"{len(nodes)} products become one"))

    def _decline(self, nodes: Sequence[Node], reason: str) -> None:
        self.plan.findings.append(Finding(tuple(n.name for n in nodes), "", reason))

    def _why_not(self, products: Sequence[Product]) -> str:
        anchor = products[0].position
        biases = [p.bias for p in products if p.bias is not None]
        if len({bias.meta["val"].dtype for bias in biases}) > 1:
            return "their biases have different dtypes"
        if not all(may_move(self.index, n, anchor) for p in products for n in (p.weight, p.bias) if n):
            return "one of their weights is not available where the first of them is computed"
        if self.guard is None:
            return ""
        return _guard_reason(self.guard, tuple(self._branch(product) for product in products))

    def _branch(self, product: Product) -> Branch:
        weight: Tensor = product.weight.meta["val"]
        return Branch(
            name=product.node.name,
            operator=target_name(product.node),
            rows=product.rows,
            depth=product.depth,
            width=product.width,
            dtype=weight.dtype,
            device=weight.device,
            weight_bytes=nbytes(weight),
            each_call=not self.materialise or source_of(product.weight).op != "get_attr",
        )

    def _join(self, products: Sequence[Product]) -> str:
        """Plan the joint values and slices of a group; return the reason if it is impossible."""
        group = lift(self.index, products, self.claimed, by_training=not self.materialise)
        joint = Joint(group)
        self.trial = {}
        try:
            for number in range(len(group.rows)):
                joint.values.append(self._value(joint, number))
        except Exception as error:  # an operator may reject these values
            return f"the joint product does not work on its values: {_first_line(error)}"
        for number, row in enumerate(group.rows):
            if not self._slice(joint, number, row):
                return "a slice that must be memory of its own would have other strides than the product had"
        self.claimed |= group.members
        self.plan.values |= self.trial
        self.plan.joints.append(joint)
        return ""

    def _of(self, node: Node) -> Any:
        if node in self.trial:
            return self.trial[node]
        return self.plan.values.get(node, node.meta.get("val"))

    def _value(self, joint: Joint, number: int) -> Any:
        row = joint.group.rows[number]
        if number == 0:
            args, kwargs = product_arguments(joint.group, self._of, self._joined)
            return cast("Any", row.nodes[0].target)(*args, **kwargs)
        args, kwargs = row_arguments(row, joint.values.__getitem__, self._of, self._joined)
        result = cast("Any", row.operations[0].target)(*args, **kwargs)
        if row.inner:
            joint.tuples[number] = result
            return result[0]
        return result

    def _joined(self, parts: Sequence[Node | Missing], dim: int, role: str) -> Any:
        values = [part.zeros() if isinstance(part, Missing) else self._of(part) for part in parts]
        return torch.cat(values, dim)

    def _slice(self, joint: Joint, number: int, row: Row) -> bool:
        """Plan the slices of a row: for every branch whose value is read outside the group."""
        members = joint.group.members
        used = [i for i, node in enumerate(row.nodes) if any(u not in members for u in node.users)]
        if not used:
            return True
        joint_value = joint.values[number]
        parts = torch.ops.aten.split_with_sizes.default(joint_value, joint.group.widths, joint.group.dim)
        joint.parts[number] = parts
        slices = joint.slices[number] = {}
        for i in used:
            node, part = row.nodes[i], cast("Tensor", parts[i])
            if self._may_be_slice(node, part, members):
                slices[i] = Slice(part)
                continue
            original = self._of(node)
            format = next((f for f in _FORMATS if _copies_to(part, f, original)), None)
            if format is None:
                return False
            slices[i] = Slice(part, format, original)
        return True

    def _may_be_slice(self, node: Node, part: Tensor, members: set[Node]) -> bool:
        """Whether all readers of a value can read a slice instead; if so, their new values are recorded.

        A slice has other strides and shares memory. Both propagate through views up to operations that allocate their
        results. What is returned, written, random or computed by a sub-graph must not be affected.
        """
        at, nodes = self.index.position, self.index.nodes
        if at[node] in self.index.dependencies.written:
            return False
        trial: dict[Node, Any] = {node: part}
        touched = storage_keys(part)
        waiting = [at[user] for user in node.users if user not in members]
        heapq.heapify(waiting)
        done: set[int] = set()
        while waiting:
            i = heapq.heappop(waiting)
            if i in done:
                continue
            done.add(i)
            if not self._is_recomputable(i):
                return False
            try:
                new = call_with_values(nodes[i], lambda n: trial[n] if n in trial else self._of(n))
            except Exception:  # such as a view that these strides do not allow
                return False
            if touched.isdisjoint(storage_keys(new)) and same_layout(new, self._of(nodes[i])):
                continue
            trial[nodes[i]] = new
            touched |= storage_keys(new)
            for user in nodes[i].users:
                heapq.heappush(waiting, at[user])
        self.trial |= trial
        return True

    def _is_recomputable(self, position: int) -> bool:
        node = self.index.nodes[position]
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            return False
        if isinstance(node.target, OpOverload):
            known = node.target.namespace in ("aten", "prims")  # custom kernels may rely on strides
        else:
            known = node.target is operator.getitem
        if not known or node.meta.get("val") is None or "unbacked_bindings" in node.meta:
            return False
        return self.index.dependencies.effects.get(position, PURE).pure


def _why_too_few(products: Sequence[Product], others: Sequence[Product], least: int) -> str:
    """Return why products are not merged with the largest group of siblings: the first property that differs."""
    if not others:
        alike = f"{len(products)} such products read" if len(products) > 1 else "no other such product reads"
        return f"{alike} this value, and the minimum is {least}"
    for (name, mine), (_, theirs) in zip(products[0].facts, others[0].facts, strict=False):
        if mine != theirs and name == WRITTEN_BEFORE:
            return f"memory is written or a mode is switched between it and '{others[0].node.name}'"
        if mine != theirs:
            return f"{name}: it differs from '{others[0].node.name}': {mine} and {theirs}"
    return "it takes other options than its siblings"


def _guard_reason(guard: Guard, branches: Sequence[Branch]) -> str:
    try:
        answer: object = guard(branches)
    except Exception as error:
        names = ", ".join(branch.name for branch in branches)
        raise PassError(
            "MergeParallel", f"has a guard that raised on {names}: {_first_line(error)}"
        ) from error
    if answer is None:
        return ""
    if not isinstance(answer, Decline):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PassError("MergeParallel", f"has a guard that returned {answer!r}; return None or a Decline")
    return answer.reason


def _copies_to(part: Tensor, memory_format: torch.memory_format, original: Any) -> bool:
    if memory_format is torch.channels_last and part.dim() != 4:
        return False
    if memory_format is torch.channels_last_3d and part.dim() != 5:
        return False
    return isinstance(original, Tensor) and same_geometry(part.clone(memory_format=memory_format), original)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
