"""Horizontal fusion: the `siblings` rule, operations that apply the same operator to one value.

The problem is to find sets of isomorphic, pairwise independent consumers of a value, as for packing in superword-level
parallelism (Larsen and Amarasinghe 2000) or XLA's horizontal fusion. The readers of each value are bucketed by the form of
their call (operator, literals, dtype and rank of the other operands), which replaces pairwise comparison by hashing.
Each bucket is cut in structural order wherever a member depends on an earlier one; a backward search bounded by the rank of
the first member decides that. With `follow`, branches grow by one operation at a time while all next operations have
equal forms. Hashing is linear in edges; the searches share a budget of 16 steps per node and at least 2^18.

Reference: Larsen and Amarasinghe, "Exploiting Superword Level Parallelism with Multimedia Instruction Sets", PLDI 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_call
from dovetail.ir.effects import PURE
from dovetail.ir.graph_module import attribute
from dovetail.ir.op_traits import is_commutative
from dovetail.rules.fusion_units import (
    OpSet,
    Predicate,
    UnitPlan,
    UnitRule,
    as_op_predicate,
    by_rank,
    check_rule_options,
    predicate_name,
    verdict,
)
from dovetail.rules.op_classes import OpClass, classify, describe_class
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext

CallForm = tuple[Any, ...]
_SHARED = "the shared value"


def call_form(node: Node, shared: Node, root: nn.Module, same: Callable[[Node], Any]) -> CallForm:
    """Return the form of a call that reads `shared`; calls are alike if their forms are equal.

    Literals count as they are, the shared value by its place among the arguments, other operands by `same`.
    """
    args = [_argument_form(a, shared, same) for a in node.args]
    if len(args) > 1 and is_commutative(node):
        args[:2] = sorted(args[:2], key=repr)
    kwargs = tuple((k, _argument_form(v, shared, same)) for k, v in sorted(node.kwargs.items()))
    return (_callee(node, root), tuple(args), kwargs)


def operand_signature(node: Node) -> Any:
    """Return what two operands must agree on: dtype and rank, None if unknown."""
    value = node.meta.get("val")
    return (str(value.dtype), value.dim()) if isinstance(value, torch.Tensor) else None


def difference(first: CallForm, second: CallForm) -> str:
    """Describe how two forms of one operation differ."""
    for a, b in zip((*first[1], *first[2]), (*second[1], *second[2]), strict=False):
        if a != b:
            return f"{_describe_form(a)} here and {_describe_form(b)} there"
    return "other arguments"


def _describe_form(part: Any) -> str:
    if isinstance(part, tuple):
        items = cast("tuple[Any, ...]", part)
        if len(items) == 2 and items[0] == "operand":
            known = items[1]
            return f"a {known[0].removeprefix('torch.')} of rank {known[1]}" if known else "an operand"
        return f"({', '.join(_describe_form(p) for p in items)})"
    return str(part)


def _callee(node: Node, root: nn.Module) -> Any:
    """Return what is called: the target, or for a leaf module its class, parameters and settings."""
    if node.op != "call_module":
        return (node.op, node.target)
    module = attribute(root, cast("str", node.target))
    if not isinstance(module, nn.Module) or isinstance(module, GraphModule):
        return (node.op, node.target)
    weights = tuple((n, str(p.dtype), p.dim()) for n, p in module.named_parameters())
    # A linear layer's extra_repr has nothing but its sizes.
    return (type(module), weights, "" if isinstance(module, nn.Linear) else module.extra_repr())


def _argument_form(value: Any, shared: Node, same: Callable[[Node], Any]) -> Any:
    if value is shared:
        return _SHARED
    if isinstance(value, Node):
        return ("operand", same(value))
    if isinstance(value, (tuple, list)):
        return tuple([_argument_form(v, shared, same) for v in cast("list[Any]", value)])
    if isinstance(value, slice):
        return ("slice", *(_argument_form(v, shared, same) for v in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return ("dict", *((k, _argument_form(v, shared, same)) for k, v in items))
    return f"{type(value).__name__} {value!r}"


_STEPS_PER_NODE = 16
_MIN_STEPS = 1 << 18
_MAX_SHOWN = 6
Branch = list[int]


class SiblingSearch(UnitPlan):
    """The sets of siblings of one graph: for each, its branches as positions, in structural order."""

    def __init__(self, context: RuleContext, rule: Siblings) -> None:
        super().__init__(context, rule)
        self.rule, self.of, self.alike = rule, rule.of, rule.alike
        self.classes = classify(context, self.excluded)
        self.budget = max(_MIN_STEPS, _STEPS_PER_NODE * len(context.nodes))
        self._reasons: dict[int, str] = {}
        self.sets: list[list[Branch]] = []
        for shared in self._values():
            for heads in self._heads(shared):
                branches = [[unit] for unit in heads]
                if rule.follow:
                    self._follow(branches)
                self._add(branches)

    def _values(self) -> Iterator[int]:
        """Yield values with enough readers, in structural order; not weights, since tied layers are not siblings."""
        for i in by_rank(self.context.order):
            node = self.context.nodes[i]
            if len(node.users) >= self.rule.min_branches and node.op not in ("get_attr", "output"):
                yield i

    def _heads(self, shared: int) -> Iterator[list[int]]:
        """Yield sets of independent readers of a value with equal forms."""
        nodes, at, order = self.context.nodes, self.context.index.position, self.context.order
        node = nodes[shared]
        unit_of = self.units.unit_of
        units = sorted({unit_of[at[u]] for u in node.users} - {unit_of[shared]}, key=order.__getitem__)
        forms: dict[CallForm, list[int]] = {}
        for unit in units:
            if self._why_unfit(unit):
                continue
            key = self._form(unit, node) if self.alike else ()
            forms.setdefault(key, []).append(unit)
        self._refuse_unlike(forms)
        for alike in forms.values():
            if len(alike) >= self.rule.min_branches:
                yield from self._independent(alike)

    def _form(self, unit: int, shared: Node) -> CallForm:
        return call_form(self.context.nodes[unit], shared, self.context.gm, operand_signature)

    def _why_unfit(self, unit: int) -> str:
        """Return why an operation cannot be a sibling, "" if it can; logged as a refusal if the rule applies to it."""
        if unit not in self._reasons:
            applies, self._reasons[unit] = self._check(unit)
            if applies and self._reasons[unit]:
                self.refuse((unit,), self._reasons[unit], unit)
        return self._reasons[unit]

    def _check(self, unit: int) -> tuple[bool, str]:
        """Return whether the rule applies to an operation, and why it may still not be taken."""
        name = self.context.nodes[unit].name
        excluded = self.why_excluded(unit)
        if self.context.nodes[unit].op == "output":
            return False, excluded
        effects = self.context.index.dependencies.effects.get(unit, PURE)
        if self.of is None:
            applies = self.classes[unit] is OpClass.ANCHOR
            if effects.aliases and not effects.assumed_aliases:
                return False, f"'{name}' is a view: no value is computed"
        else:
            accepted = verdict(self.of, self.context, unit, self.rule.name)
            if isinstance(accepted, Decline):
                return True, accepted.reason
            if not accepted:
                return False, f"'{name}' is not accepted by {predicate_name(self.of)}"
            applies = True
        if excluded or self.excluded[unit]:
            return applies, excluded or f"'{name}' is ordered after an effect"
        if not effects.pure:
            what = effects.host_effect or ("it draws at random" if effects.random else "it writes memory")
            return True, f"'{name}' has an effect: {what}"
        if self.of is None and self.classes[unit] is OpClass.OPAQUE:
            return False, f"'{name}' is {describe_class(self.context, unit, OpClass.OPAQUE)}"
        return applies, ""

    def _refuse_unlike(self, forms: Mapping[CallForm, list[int]]) -> None:
        """Refuse pairs that apply the same operator to the same value with different arguments."""
        if len(forms) < 2 or not self.alike or self.refused_enough:
            return
        first: dict[object, tuple[CallForm, int]] = {}
        for own, units in forms.items():
            known = first.setdefault(own[0], (own, units[0]))
            if known[0] is not own:
                reason = f"not alike: {difference(known[0], own)}"
                self.refuse((known[1], units[0]), reason, units[0])

    def _independent(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Yield the units in sets of consecutive ones without a path between members, each as long as possible."""
        most = self.context.limits.nodes or len(units)
        current: dict[int, None] = {}
        for unit in units:
            path = self._path(current, unit) if current else []
            if path:
                names = [self.context.nodes[i].name for i in path]
                shown = names if len(names) <= _MAX_SHOWN else [*names[: _MAX_SHOWN - 1], "...", names[-1]]
                self.refuse((path[0], unit), f"one depends on the other: {' -> '.join(shown)}", unit)
            if path or path is None or len(current) == most:
                yield list(current)
                current = {}
            current[unit] = None
        yield list(current)

    def _path(self, sources: Mapping[int, None], target: int) -> list[int] | None:
        """Return a path of dependencies from one of the sources to the target, [] without one, None if unknown.

        Sources are in structural order.
        """
        before, order, unit_of = self.context.index.before, self.context.order, self.units.unit_of
        first = next(iter(sources))
        low = order[first]
        successor: dict[int, int] = {}
        stack = [target, *self.units.projections.get(target, ())]
        visited = set(stack)
        while stack:
            at = stack.pop()
            for j in sorted(before[at], key=order.__getitem__):
                self.budget -= 1
                if self.budget <= 0:
                    reason = (
                        "whether one depends on the other is unknown: the budget of the search is exhausted"
                    )
                    self.refuse((first, target), reason, target)
                    return None
                if j in visited or order[j] < low:
                    continue
                visited.add(j)
                successor[j] = at
                if unit_of[j] in sources:
                    path = [unit_of[j]]
                    while j in successor:
                        j = successor[j]
                        path.append(j)
                    return path
                stack.append(j)
        return []

    def _follow(self, branches: list[Branch]) -> None:
        """Extend each branch by the operation after it, while these have the same form in all of them."""
        limit = self.context.limits.nodes
        members = {unit for branch in branches for unit in branch}
        while limit is None or len(members) + len(branches) <= limit:
            tips = [branch[-1] for branch in branches]
            units = [unit for tip in tips if (unit := self._next(tip)) is not None]
            if len(set(units)) < len(branches) or members.intersection(units):
                return
            nodes = self.context.nodes
            if len({self._form(u, nodes[tip]) for u, tip in zip(units, tips, strict=True)}) > 1:
                return
            for branch, unit in zip(branches, units, strict=True):
                branch.append(unit)
            members.update(units)

    def _next(self, tip: int) -> int | None:
        """Return the only reader of a branch's end, if it is pure and reads nothing else but inputs and attributes."""
        readers = self.units.readers[tip]
        if tip in self.units.projections or len(readers) != 1:
            return None
        unit = readers[0]
        effects = self.context.index.dependencies.effects.get(unit, PURE)
        if self.excluded[unit] or not effects.pure or self.classes[unit] is OpClass.OPAQUE:
            return None
        nodes = self.context.nodes
        others = [j for j in self.context.index.before[unit] if j != tip]
        return unit if all(nodes[j].op in ("placeholder", "get_attr") for j in others) else None

    def _add(self, branches: list[Branch]) -> None:
        if len(branches) < self.rule.min_branches:
            return
        projections = self.units.projections
        self.sets.append(
            [[p for unit in branch for p in (unit, *projections.get(unit, ()))] for branch in branches]
        )

    def why_not(self, early: int, late: int) -> list[str]:
        """Return why two units are not branches of one set, empty if they are."""
        nodes = self.context.nodes
        if early == late or any(all(any(u in b for b in s) for u in (early, late)) for s in self.sets):
            return []
        reasons = [why for unit in (early, late) if (why := self._why_unfit(unit))]
        common = [
            n for n in nodes[early].all_input_nodes if n in nodes[late].all_input_nodes and n.op != "get_attr"
        ]
        if not common:
            return [*reasons, f"'{nodes[early].name}' and '{nodes[late].name}' read no value in common"]
        forms = [(self._form(early, n), self._form(late, n)) for n in common]
        if self.alike and all(a != b for a, b in forms):
            a, b = forms[0]
            reasons.append(f"not alike: {difference(a, b) if a[0] == b[0] else 'other operators'}")
        path = self.context.index.path(early, late)
        if path:
            names = " -> ".join(nodes[i].name for i in path)
            reasons.append(f"one depends on the other: {names}")
        return reasons or [
            f"there are fewer than {self.rule.min_branches} branches, or they are in sets of their own"
        ]


@checked_call()
def siblings(
    of: Predicate | Iterable[Any] | None = None,
    kind: str = "siblings",
    *,
    name: str | None = None,
    priority: int = 0,
    min_branches: int = 2,
    follow: bool = False,
    alike: bool = True,
    nests: bool = False,
) -> Rule:
    """A rule for operations that read the same value in parallel: the q, k and v projections of an attention.

    Siblings are alike: the same operator with equal literals, whose other operands agree in dtype and rank; with
    `alike` off, whatever `of` accepts. `of` is a predicate or a set of operators, as for `capability`; without it, any
    operation that computes a value and has no effect. `follow` extends the branches for as long as the next operations
    are alike and read nothing else that is computed. No branch depends on another; a value may have more than one such
    set. Members are branch by branch in structural order. Sets of different values may overlap or depend on each other
    in a cycle: the selection among candidates resolves both.
    """
    if of is None and not alike:
        raise InvalidArgument("siblings that need not be alike must be named: give `of`.")
    checked = None if of is None else as_op_predicate(of)
    return Siblings(
        checked, kind, kind if name is None else name, priority, min_branches, follow, alike, nests
    )


@dataclass(frozen=True, repr=False)
class Siblings(UnitRule):
    """The rule that `siblings` returns."""

    of: OpSet | Predicate | None
    kind: str
    name: str
    priority: int = 0
    min_branches: int = 2
    follow: bool = False
    alike: bool = True
    nests: bool = False

    def __post_init__(self) -> None:
        check_rule_options(self.name, self.kind, self.priority, min_branches=(self.min_branches, 2))

    def __repr__(self) -> str:
        of = "" if self.of is None else f"{predicate_name(self.of)}, "
        return f"siblings({of}kind={self.kind!r}, name={self.name!r})"

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Yield a candidate for each set of siblings, and refusals of readers of one value that are not in one set."""
        search = context.analysis(self.plan)
        for branches in search.sets:
            members = tuple(dict.fromkeys(i for branch in branches for i in branch))
            yield Candidate(self.name, self.kind, members, escapes="output", priority=self.priority)
        yield from search.refusals

    def plan(self, context: RuleContext) -> SiblingSearch:
        return SiblingSearch(context, self)
