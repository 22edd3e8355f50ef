"""Horizontal fusion: operations that do the same with one value."""

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
from dovetail.rules.op_classes import OpClass, classify
from dovetail.rules.op_predicate import (
    Ops,
    Predicate,
    Refusals,
    as_accepts,
    closed,
    ground,
    require_rule,
    spelled,
    verdict,
    why_closed,
)
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext

Form = tuple[Any, ...]
_SHARED = "the shared value"


def form(node: Node, shared: Node, root: nn.Module, same: Callable[[Node], Any]) -> Form:
    """What an operation does with a value that it reads; equal for operations that are alike.

    Literals count as they are, the shared value by its place among the arguments, anything else by what `same` says.
    """
    args = [_form(a, shared, same) for a in node.args]
    if len(args) > 1 and is_commutative(node):
        args[:2] = sorted(args[:2], key=repr)
    kwargs = tuple((k, _form(v, shared, same)) for k, v in sorted(node.kwargs.items()))
    return (_called(node, root), tuple(args), kwargs)


def kind_of_operand(node: Node) -> Any:
    """What two operands must agree on: dtype and rank, None where they are not known."""
    value = node.meta.get("val")
    return (str(value.dtype), value.dim()) if isinstance(value, torch.Tensor) else None


def difference(first: Form, second: Form) -> str:
    """In words how two forms of one operation differ."""
    for a, b in zip((*first[1], *first[2]), (*second[1], *second[2]), strict=False):
        if a != b:
            return f"{_words(a)} here and {_words(b)} there"
    return "other arguments"


def _words(part: Any) -> str:
    if isinstance(part, tuple):
        items = cast("tuple[Any, ...]", part)
        if len(items) == 2 and items[0] == "operand":
            known = items[1]
            return f"a {known[0].removeprefix('torch.')} of rank {known[1]}" if known else "an operand"
        return f"({', '.join(_words(p) for p in items)})"
    return str(part)


def _called(node: Node, root: nn.Module) -> Any:
    """What is called: the target itself, or for a leaf module what kind of module it is."""
    if node.op != "call_module":
        return (node.op, node.target)
    module = attribute(root, cast("str", node.target))
    if not isinstance(module, nn.Module) or isinstance(module, GraphModule):
        return (node.op, node.target)
    weights = tuple((n, str(p.dtype), p.dim()) for n, p in module.named_parameters())
    # A linear layer says nothing but its sizes.
    return (type(module), weights, "" if isinstance(module, nn.Linear) else module.extra_repr())


def _form(value: Any, shared: Node, same: Callable[[Node], Any]) -> Any:
    if value is shared:
        return _SHARED
    if isinstance(value, Node):
        return ("operand", same(value))
    if isinstance(value, (tuple, list)):
        return tuple([_form(v, shared, same) for v in cast("list[Any]", value)])
    if isinstance(value, slice):
        return ("slice", *(_form(v, shared, same) for v in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return ("dict", *((k, _form(v, shared, same)) for k, v in items))
    return f"{type(value).__name__} {value!r}"


_STEPS_PER_NODE = 16
_LEAST_STEPS = 1 << 18
_SHOWN = 6
Branch = list[int]


class Branching:
    """The sets of siblings of one context: for each, its branches as positions, in structural order."""

    def __init__(
        self,
        context: RuleContext,
        of: Ops | Predicate | None,
        name: str,
        kind: str,
        least: int,
        follow: bool,
        alike: bool,
        nests: bool,
    ) -> None:
        self.context, self.of, self.name, self.kind, self.nests = context, of, name, kind, nests
        self.least, self.alike = least, alike
        self.on = ground(context)
        self.closed = closed(context, kind, nests)
        self.classes = classify(context, self.closed)
        self.refused = Refusals(name)
        self.left = max(_LEAST_STEPS, _STEPS_PER_NODE * len(context.nodes))
        self._said: dict[int, str] = {}
        self.sets: list[list[Branch]] = []
        for shared in self._values():
            for heads in self._heads(shared):
                branches = [[unit] for unit in heads]
                if follow:
                    self._follow(branches)
                self._add(branches)

    def _values(self) -> Iterator[int]:
        """Values that several operations read, in structural order. Weights are not: tied layers are no siblings."""
        places = [0] * len(self.context.nodes)
        for i, place in enumerate(self.context.order):
            places[place] = i
        for i in places:
            node = self.context.nodes[i]
            if len(node.users) >= self.least and node.op not in ("get_attr", "output"):
                yield i

    def _heads(self, shared: int) -> Iterator[list[int]]:
        """Sets of independent readers of a value that are alike."""
        nodes, at, order = self.context.nodes, self.context.index.position, self.context.order
        node = nodes[shared]
        readers = [at[u] for u in node.users if self.on.home[at[u]] != self.on.home[shared]]
        units = sorted({self.on.home[r] for r in readers}, key=order.__getitem__)
        forms: dict[Form, list[int]] = {}
        for unit in units:
            if self._why_closed(unit):
                continue
            key = self._form(unit, node) if self.alike else ()
            forms.setdefault(key, []).append(unit)
        self._refuse_unlike(forms)
        for alike in forms.values():
            if len(alike) >= self.least:
                yield from self._independent(alike)

    def _form(self, unit: int, shared: Node) -> Form:
        return form(self.context.nodes[unit], shared, self.context.gm, kind_of_operand)

    def _why_closed(self, unit: int) -> str:
        """Why an operation is no sibling of anything, "" if it may be; a refusal unless it was never asked for."""
        if unit not in self._said:
            wanted, self._said[unit] = self._ask(unit)
            if wanted and self._said[unit]:
                self.refused.add((unit,), self._said[unit], unit)
        return self._said[unit]

    def _ask(self, unit: int) -> tuple[bool, str]:
        """Whether the rule is about an operation at all, and why that may still not be taken."""
        name = self.context.nodes[unit].name
        shut = why_closed(self.context, self.kind, self.nests, unit)
        if self.context.nodes[unit].op == "output":
            return False, shut
        told = self.context.index.dependencies.effects.get(unit, PURE)
        if self.of is None:
            wanted = self.classes[unit] is OpClass.ANCHOR
            if told.aliases and not told.assumed_aliases:
                return False, f"'{name}' is a view: no value is computed"
        else:
            said = verdict(self.of, self.context, unit, self.name)
            if isinstance(said, Decline):
                return True, said.reason
            if not said:
                return False, f"'{name}' is not accepted by {spelled(self.of)}"
            wanted = True
        if shut or self.closed[unit]:
            return wanted, shut or f"'{name}' waits for an effect"
        if not told.pure:
            what = told.host_effect or ("it draws at random" if told.random else "it writes memory")
            return True, f"'{name}' has an effect: {what}"
        if self.of is None and self.classes[unit] is OpClass.OPAQUE:
            return False, f"'{name}' is opaque"
        return wanted, ""

    def _refuse_unlike(self, forms: Mapping[Form, list[int]]) -> None:
        """The same operator on the same value, but not in the same way."""
        if len(forms) < 2 or not self.alike or self.refused.full:
            return
        first: dict[object, tuple[Form, int]] = {}
        for own, units in forms.items():
            known = first.setdefault(own[0], (own, units[0]))
            if known[0] is not own:
                reason = f"not alike: {difference(known[0], own)}"
                self.refused.add((known[1], units[0]), reason, units[0])

    def _independent(self, units: Sequence[int]) -> Iterator[list[int]]:
        """The units in sets without a path between members, each as long a stretch as possible."""
        most = self.context.limits.nodes or len(units)
        current: dict[int, None] = {}
        for unit in units:
            path = self._path(current, unit) if current else []
            if path:
                names = [self.context.nodes[i].name for i in path]
                shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "...", names[-1]]
                self.refused.add((path[0], unit), f"one depends on the other: {' -> '.join(shown)}", unit)
            if path or path is None or len(current) == most:
                yield list(current)
                current = {}
            current[unit] = None
        yield list(current)

    def _path(self, sources: Mapping[int, None], target: int) -> list[int] | None:
        """A chain of dependencies from one of the sources to the target, [] if there is none, None if not known.

        Sources are in structural order.
        """
        before, order, home = self.context.index.before, self.context.order, self.on.home
        first = next(iter(sources))
        low = order[first]
        came: dict[int, int] = {}
        stack = [target, *self.on.parts.get(target, ())]
        seen = set(stack)
        while stack:
            at = stack.pop()
            for j in sorted(before[at], key=order.__getitem__):
                self.left -= 1
                if self.left <= 0:
                    reason = "too far apart to tell whether one depends on the other"
                    self.refused.add((first, target), reason, target)
                    return None
                if j in seen or order[j] < low:
                    continue
                seen.add(j)
                came[j] = at
                if home[j] in sources:
                    chain = [home[j]]
                    while j in came:
                        j = came[j]
                        chain.append(j)
                    return chain
                stack.append(j)
        return []

    def _follow(self, branches: list[Branch]) -> None:
        """Take in what comes after each branch while it is the same in all of them."""
        most = self.context.limits.nodes
        taken = {unit for branch in branches for unit in branch}
        while most is None or len(taken) + len(branches) <= most:
            tips = [branch[-1] for branch in branches]
            found = [self._next(tip) for tip in tips]
            units = [unit for unit in found if unit is not None]
            if len(set(units)) < len(branches) or taken.intersection(units):
                return
            nodes = self.context.nodes
            if len({self._form(u, nodes[tip]) for u, tip in zip(units, tips, strict=True)}) > 1:
                return
            for branch, unit in zip(branches, units, strict=True):
                branch.append(unit)
            taken.update(units)

    def _next(self, tip: int) -> int | None:
        """The one reader of a branch's end, if it is pure and everything else it reads is there from the start."""
        readers = self.on.readers[tip]
        if tip in self.on.parts or len(readers) != 1:
            return None
        unit = readers[0]
        told = self.context.index.dependencies.effects.get(unit, PURE)
        if self.closed[unit] or not told.pure or self.classes[unit] is OpClass.OPAQUE:
            return None
        nodes = self.context.nodes
        others = [j for j in self.context.index.before[unit] if j != tip]
        return unit if all(nodes[j].op in ("placeholder", "get_attr") for j in others) else None

    def _add(self, branches: list[Branch]) -> None:
        if len(branches) < self.least:
            return
        parts = self.on.parts
        self.sets.append(
            [[p for unit in branch for p in (unit, *parts.get(unit, ()))] for branch in branches]
        )

    def why_not(self, first: int, second: int) -> list[str]:
        """Why two positions are not in one set, empty if they are."""
        nodes, home = self.context.nodes, self.on.home
        one, two = sorted((home[first], home[second]), key=self.context.order.__getitem__)
        if one == two or any(all(any(u in b for b in s) for u in (one, two)) for s in self.sets):
            return []
        found = [why for unit in (one, two) if (why := self._why_closed(unit))]
        common = [
            n for n in nodes[one].all_input_nodes if n in nodes[two].all_input_nodes and n.op != "get_attr"
        ]
        if not common:
            return [*found, f"'{nodes[one].name}' and '{nodes[two].name}' read no value in common"]
        forms = [(self._form(one, n), self._form(two, n)) for n in common]
        if self.alike and all(a != b for a, b in forms):
            a, b = forms[0]
            found.append(f"not alike: {difference(a, b) if a[0] == b[0] else 'other operators'}")
        path = self.context.index.path(one, two)
        if path:
            names = " -> ".join(nodes[i].name for i in path)
            found.append(f"one depends on the other: {names}")
        return found or [f"there are fewer than {self.least} branches, or they are in sets of their own"]


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
    """A rule for operations that read one value, side by side: the q, k and v projections of an attention.

    They are alike: the same operator with equal literals, whose other operands agree in dtype and rank; with `alike`
    off, whatever `of` accepts. `of` is a predicate or a set of operators, as for `capability`; without it, whatever
    does work and has no effect. `follow` takes in what comes after each branch for as long as it is the same in all and
    needs nothing else that is computed. No branch depends on another; a value may have several such sets. Members are
    branch by branch in structural order. Sets of different values may overlap, or depend on each other in a circle: the
    choice among candidates settles both.
    """
    if of is None and not alike:
        raise InvalidArgument("siblings that need not be alike must be named: give `of`.")
    checked = None if of is None else as_accepts(of)
    return Siblings(
        checked, kind, kind if name is None else name, priority, min_branches, follow, alike, nests
    )


@dataclass(frozen=True, repr=False)
class Siblings(Rule):
    """The rule that `siblings` makes."""

    of: Ops | Predicate | None
    kind: str
    name: str
    priority: int = 0
    min_branches: int = 2
    follow: bool = False
    alike: bool = True
    nests: bool = False

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_branches=(self.min_branches, 2))

    def __repr__(self) -> str:
        of = "" if self.of is None else f"{spelled(self.of)}, "
        return f"siblings({of}kind={self.kind!r}, name={self.name!r})"

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """One candidate for each set of siblings, and what reads the same value and had to stay apart."""
        plan = context.analysis(self._plan)
        for branches in plan.sets:
            members = tuple(dict.fromkeys(i for branch in branches for i in branch))
            yield Candidate(self.name, self.kind, members, escapes="output", priority=self.priority)
        yield from plan.refused.found

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        """Why two positions are not branches of one set."""
        return context.analysis(self._plan).why_not(first, second)

    def _plan(self, context: RuleContext) -> Branching:
        return Branching(
            context, self.of, self.name, self.kind, self.min_branches, self.follow, self.alike, self.nests
        )
