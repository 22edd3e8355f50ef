"""The operations that are in no region: where they come from, what they cost, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Node

from dovetail.fusion.coverage import Coverage, OutsideOperation
from dovetail.fusion.ledger_entries import matched_text
from dovetail.ir.module_paths import join_path_list, path_of
from dovetail.ir.op_traits import base_name, target_name
from dovetail.ir.text_tables import align, amount, counted, cut, generic, magnitude, percent

VIEW = "a view or a size: nothing is launched for it"
NEVER_FUSED = "no rules were applied to this graph"
NO_RULE = "no rule asked for it"
_MOST_ROWS = 60
_WIDTH = 140


class RefusalEntry(Protocol):
    """What is read here of a refusal in the ledger."""

    @property
    def rule(self) -> str: ...
    @property
    def nodes(self) -> tuple[str, ...]: ...
    @property
    def reason(self) -> str: ...
    @property
    def place(self) -> str | None: ...
    @property
    def matched(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def folded(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outside:
    """An operation in no region: its module path, what it moves and computes, and the first reason why.

    `rule` is the rule whose reason it is, None if it is not that of a rule.
    """

    name: str
    operator: str
    module: str
    bytes: int
    flops: int
    reason: str
    rule: str | None = None
    is_free: bool = False

    @property
    def explanation(self) -> str:
        """The reason, with the rule that gave it."""
        return self.reason if self.rule is None else f"rule '{self.rule}': {self.reason}"


class OutsideOperations(tuple[Outside, ...]):
    """Operations in no region, in execution order; printed as a table with repeated modules folded."""

    __slots__ = ()

    def grouped(self) -> list[OutsideGroup]:
        """Return the operations by reason, those that move and compute the most first and views last."""
        groups: dict[tuple[str | None, str], list[Outside]] = {}
        for operation in self:
            groups.setdefault((operation.rule, generic(operation.reason)), []).append(operation)
        total_bytes, total_flops = _sums(self)

        def weight(group: Sequence[Outside]) -> tuple[bool, float, int]:
            moved, flops = _sums(group)
            share = max(moved / (total_bytes or 1), flops / (total_flops or 1))
            return group[0].is_free, -share, -len(group)

        return [OutsideGroup(tuple(group)) for group in sorted(groups.values(), key=weight)]

    def __str__(self) -> str:
        if not self:
            return "every operation is in a region"
        rows = [("count", "operation", "bytes", "flops", "module", "reason, of the first")]
        folded = self._folded()
        for alike in folded[:_MOST_ROWS]:
            moved, flops = _sums(alike)
            modules = join_path_list((o.module for o in alike), most=2)
            shown = cut(alike[0].explanation, _WIDTH)
            rows.append((str(len(alike)), alike[0].operator, amount(moved), magnitude(flops), modules, shown))
        lines = align(rows, right=(0, 2, 3))
        if len(folded) > _MOST_ROWS:
            rest = sum(map(len, folded[_MOST_ROWS:]))
            lines.append(f"  and {counted(rest, 'more operation')}; iterate over it for all")
        return "\n".join([counted(len(self), "operation") + " in no region", *lines])

    def _folded(self) -> list[list[Outside]]:
        """Return operations that differ in the index of their module and in names alone, in order of appearance."""
        folded: dict[tuple[str, str, str | None, str], list[Outside]] = {}
        shapes: dict[str, str] = {}
        for operation in self:
            shape = shapes.get(operation.module)
            if shape is None:
                shape = shapes[operation.module] = path_shape(operation.module)
            key = (shape, operation.operator, operation.rule, generic(operation.reason))
            folded.setdefault(key, []).append(operation)
        return list(folded.values())


@dataclass(frozen=True, slots=True)
class OutsideGroup:
    """Operations that are in no region for the same reason."""

    operations: tuple[Outside, ...]

    @property
    def is_free(self) -> bool:
        """Whether nothing is launched for them."""
        return self.operations[0].is_free

    def lines(self, coverage: Coverage) -> list[str]:
        """Return which operations these are and where, and the reason of one of them, in at most two lines."""
        names: dict[str, int] = {}
        for operation in self.operations:
            names[operation.operator] = names.get(operation.operator, 0) + 1
        ranked = sorted(names.items(), key=lambda item: -item[1])
        what = ", ".join(name for name, _ in ranked[:3]) + (
            f" and {len(ranked) - 3} more" if len(ranked) > 3 else ""
        )
        count = f"  {len(self.operations):>5}  "
        if self.is_free:
            return [f"{count}{what}: views and sizes, for which nothing is launched"]
        moved, flops = _sums(self.operations)
        shares = [
            f"{percent(part, whole)} of {name}"
            for part, whole, name in (
                (moved, coverage.total.bytes, "bytes"),
                (flops, coverage.total.flops, "flops"),
            )
            if part
        ]
        cost = f" ({', '.join(shares)})" if shares else ""
        modules = {o.module for o in self.operations}
        where = (
            f" in {join_path_list((o.module for o in self.operations), most=2)}" if modules != {""} else ""
        )
        return [
            cut(f"{count}{what}{cost}{where}", _WIDTH),
            cut(f"         {self.operations[0].explanation}", _WIDTH),
        ]


def path_shape(path: str) -> str:
    """Return a module path with `*` for each index: equal for the same module of repeated layers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _sums(operations: Iterable[Outside]) -> tuple[int, int]:
    moved = flops = 0
    for operation in operations:
        moved, flops = moved + operation.bytes, flops + operation.flops
    return moved, flops


def operator_name(node: Node) -> str:
    """Return the short name of what a node calls."""
    if node.op == "call_module":
        return str(node.target)
    return base_name(node) or target_name(node)


def outside_operations(
    parts: Iterable[Coverage], declined: Iterable[RefusalEntry], never: Mapping[str, str], *, is_fused: bool
) -> OutsideOperations:
    """Return the operations that are in no region, given the coverage of each graph, each with one reason.

    Of the reasons, what the user excluded comes first, then the near-miss of a pattern that got furthest, then what a
    rule reported of the operation and its readers, then anything else that names it. The ledger keeps a limited number of
    refusals: an operation that none of them names has the reason of one like it in another layer.
    """
    operations = [operation for part in parts for operation in part.outside]
    reasons = _best_refusals(declined, {operation.node.name for operation in operations})
    borrowed: dict[tuple[str, str], RefusalEntry] = {}
    for operation in operations:
        refusal = reasons.get(operation.node.name)
        if refusal is not None:
            borrowed.setdefault(_signature(operation), refusal)
    default = NO_RULE if is_fused else NEVER_FUSED
    return OutsideOperations(
        _described(o, never, reasons.get(o.node.name) or borrowed.get(_signature(o)), default)
        for o in operations
    )


def _signature(operation: OutsideOperation) -> tuple[str, str]:
    return operator_name(operation.node), path_shape(path_of(operation.node.meta))


def _described(
    operation: OutsideOperation, never: Mapping[str, str], refusal: RefusalEntry | None, default: str
) -> Outside:
    node, cost = operation.node, operation.cost
    reason, rule = default, None
    if node.name in never:
        reason = never[node.name]
    elif cost.is_free:
        reason = VIEW
    elif refusal is not None:
        near = ""
        if refusal.wanted:
            joint = ", but " if refusal.matched >= refusal.wanted else ", then: "
            near = matched_text(refusal.matched, refusal.wanted) + joint
        reason, rule = f"{near}{refusal.reason}", refusal.rule
    is_free = cost.is_free and node.name not in never
    name, path = operator_name(node), path_of(node.meta)
    return Outside(node.name, name, path, cost.bytes, cost.flops, reason, rule, is_free)


def _best_refusals(declined: Iterable[RefusalEntry], names: set[str]) -> dict[str, RefusalEntry]:
    """Return by operation the refusal that explains best why it is in no region."""
    best: dict[str, tuple[tuple[int, int], RefusalEntry]] = {}
    for entry in declined:
        place = () if entry.place is None or entry.place in entry.nodes else (entry.place,)
        for k, name in enumerate((*entry.nodes, *place)):
            if name not in names:
                continue
            is_near = entry.matched > 1 and 2 * entry.matched >= entry.wanted > 0
            weight = 2 if is_near else int(k == 0)
            rank = (weight - 3 * entry.folded, entry.matched)
            if name not in best or rank > best[name][0]:
                best[name] = (rank, entry)
    return {name: entry for name, (_, entry) in best.items()}
