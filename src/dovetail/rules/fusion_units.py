"""What the vertical, horizontal and partition rules share: fusion units, the operations they take, and option checks.

Which operations a rule takes is given by a predicate on nodes, or by a set of operators, compared by target or by name.
"""

from __future__ import annotations

import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, RuleError, did_you_mean, misspelled
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection
from dovetail.ir.op_traits import target_name
from dovetail.outlining.region import make_identity
from dovetail.rules.op_classes import all_op_names, aten_name, function_name, operation_name, registered_ops
from dovetail.rules.rule import Decline, Refusal, Rule, RuleContext

_MAX_REFUSALS = 2000


@dataclass(frozen=True)
class FusionUnits:
    """The operations of a graph, each taken as one unit with the getitems that project its tuple.

    `unit_of` maps a position to its unit: itself, or the operation whose tuple it projects. `projections` are those
    positions by unit, `readers` the units that read any value of a unit, `ordered` the units in structural order.
    """

    unit_of: list[int]
    projections: dict[int, list[int]]
    readers: list[list[int]]
    ordered: list[int]

    def positions(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of units and of their projections, in the graph's order."""
        return tuple(sorted([*units, *(p for u in units for p in self.projections.get(u, ()))]))


def fusion_units(context: RuleContext) -> FusionUnits:
    """Return the units of a context's graph, computed once."""
    return context.analysis(_compute_units)


def _compute_units(context: RuleContext) -> FusionUnits:
    nodes, position = context.nodes, context.index.position
    unit_of = list(range(len(nodes)))
    projections: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.target is operator.getitem and is_projection(node):
            unit_of[i] = unit_of[position[cast("Node", node.args[0])]]
            projections.setdefault(unit_of[i], []).append(i)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(context.index.data):
        unit = unit_of[i]
        for j in reads:
            source = unit_of[j]
            if source != unit and (not readers[source] or readers[source][-1] != unit):
                readers[source].append(unit)
    ordered = [i for i in by_rank(context.order) if unit_of[i] == i]
    return FusionUnits(unit_of, projections, readers, ordered)


def by_rank(order: Sequence[int]) -> list[int]:
    """Return the positions sorted by rank, given the rank of each."""
    positions = [0] * len(order)
    for i, rank in enumerate(order):
        positions[rank] = i
    return positions


class UnitPlan(ABC):
    """The regions of one rule in one graph, which it builds from fusion units, and the first refusals.

    Positions `excluded` from regions are inputs, attributes and the output, those barred by the context, regions of
    the rule's own kind unless it nests, and without `grows` all regions. A position counts for its weight against the
    limit `max_weight`: for a region, the number of operations inside.
    """

    def __init__(self, context: RuleContext, rule: Rule, *, grows: bool = True) -> None:
        self.context = context
        self.units = fusion_units(context)
        self._name, self._kind, self._nests, self._grows = rule.name, rule.kind, rule.nests, grows
        self.excluded = self._excluded_positions()
        self.weights = [1] * len(context.nodes)
        for i, call in context.calls.items():
            self.weights[i] = call.size
        self.max_weight = context.limits.nodes or sum(self.weights)
        self.refusals: list[Refusal] = []

    @abstractmethod
    def why_not(self, early: int, late: int) -> list[str]:
        """Return why two units, in structural order, are not in one region; empty if they are."""

    def _excluded_positions(self) -> list[bool]:
        context, units = self.context, self.units
        excluded = [node.op in ("placeholder", "get_attr", "output") for node in context.nodes]
        for i in context.barred:
            excluded[i] = excluded[units.unit_of[i]] = True
        effects = context.index.dependencies.before
        for unit, projections in units.projections.items() if effects else ():
            # A projection ordered after an effect that its tuple is not ordered after cannot be in one unit with it.
            if any(not set(effects.get(p, ())) <= set(effects.get(unit, ())) for p in projections):
                excluded[unit] = True
        for i, call in context.calls.items():
            if not self._grows or (not self._nests and call.identity.kind == self._kind):
                excluded[i] = True
        return excluded

    def why_excluded(self, position: int) -> str:
        """Return why a position is excluded, "" if it is not or if an effect is the reason."""
        context, node = self.context, self.context.nodes[position]
        if node.op in ("placeholder", "get_attr", "output"):
            return f"'{node.name}' is the graph's {node.op}, not an operation"
        if position in context.barred:
            return f"'{node.name}' may not be taken: {context.barred[position]}"
        if not self._nests and context.kind_of(position) == self._kind:
            return f"'{node.name}' is a region of kind '{self._kind}' already"
        if not self._grows and position in context.calls:
            return f"'{node.name}' is a region, and regions are left as they are"
        return ""

    @property
    def refused_enough(self) -> bool:
        """Whether further refusals are dropped."""
        return len(self.refusals) >= _MAX_REFUSALS

    def refuse(self, members: tuple[int, ...], reason: str, at: int | None = None) -> None:
        """Record a refusal."""
        if not self.refused_enough:
            self.refusals.append(Refusal(self._name, members, reason, at))


class UnitRule(Rule):
    """A rule on fusion units, with a plan that is computed once per context."""

    @abstractmethod
    def plan(self, context: RuleContext) -> UnitPlan:
        """Return the plan for a graph, as an analysis."""

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        unit_of = fusion_units(context).unit_of
        early, late = sorted((unit_of[first], unit_of[second]), key=context.order.__getitem__)
        return context.analysis(self.plan).why_not(early, late)


def check_rule_options(name: object, kind: object, priority: object, **least: tuple[object, int]) -> None:
    """Raise InvalidArgument for options of the wrong type; `least` maps an option to its value and lower bound."""
    make_identity(kind, 1, None)
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"name {name!r} of a rule for '{kind}' is not a text.")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidArgument(f"priority {priority!r} of rule '{name}' is not an int.")
    for argument, (value, lowest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InvalidArgument(f"{argument}={value!r} of rule '{name}' is not an int of {lowest} or more.")


_PYTHON_ALIASES = frozenset({"F", "nn", "functional", "np", "numpy"})
Predicate: TypeAlias = Callable[[Node], bool | Decline]


@dataclass(frozen=True)
class OpSet:
    """A set of operators: `targets` are compared with what is called, `names` with the ATen name of the call."""

    targets: frozenset[Any]
    names: frozenset[str]

    def has(self, node: Node, root: nn.Module, kind: str | None) -> bool:
        """Whether a node calls one of the operators; a region is looked up by its kind."""
        if kind is not None:
            return kind in self.names
        if node.op == "call_module":
            module = attribute(root, cast("str", node.target))
            if isinstance(module, GraphModule):
                return False
            if any(isinstance(t, type) and isinstance(module, t) for t in self.targets):
                return True
            return operation_name(node, root) in self.names
        target: Any = node.target
        if target in self.targets or getattr(target, "overloadpacket", None) in self.targets:
            return True
        if operation_name(node, root) in self.names or target_name(node) in self.names:
            return True
        return isinstance(target, OpOverload) and str(target.overloadpacket) in self.names

    def __repr__(self) -> str:
        targets = (t.__name__ if isinstance(t, type) else str(t) for t in self.targets)
        return f"{{{', '.join(sorted([*self.names, *targets]))}}}"


def as_op_predicate(accepts: Any) -> OpSet | Predicate:
    """Return a predicate as it is and operators as an `OpSet`; InvalidArgument for anything else."""
    if isinstance(accepts, OpSet):
        return accepts
    if isinstance(accepts, (str, type, Rule)) or _is_operator(accepts):
        accepts = [accepts]
    if isinstance(accepts, nn.Module):
        raise InvalidArgument(
            f"a {type(accepts).__name__} is a module; give its class, or a predicate on nodes."
        )
    if callable(accepts):
        return cast("Predicate", accepts)
    if not isinstance(accepts, Iterable):
        raise InvalidArgument(
            f"expected a predicate on nodes or a set of operators, got {type(accepts).__name__}."
        )
    targets, names = set[Any](), set[str]()
    for op in cast("Iterable[Any]", accepts):
        if isinstance(op, str):
            names |= _resolve_names(op)
        elif isinstance(op, Rule):
            names.add(op.kind)
        elif isinstance(op, (OpOverload, HigherOrderOperator)) or (
            isinstance(op, type) and issubclass(op, nn.Module)
        ):
            targets.add(op)
        elif _is_operator(op) and function_name(op):
            targets.add(op)
            if not isinstance(op, OpOverloadPacket) or op._qualified_op_name.startswith("aten::"):
                names.add(function_name(op))
        else:
            raise InvalidArgument(f"{op!r} is not an operator: give an overload, a torch function or a name.")
    if not targets and not names:
        raise InvalidArgument("the set of operators is empty and accepts nothing.")
    return OpSet(frozenset(targets), frozenset(names))


def _is_operator(op: Any) -> bool:
    if isinstance(op, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return True
    if not isinstance(op, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)):
        return False
    return bool(function_name(op))


def _resolve_names(op: str) -> set[str]:
    """Return the names under which calls of an operator may appear; InvalidArgument if the name is misspelled."""
    if not op.strip():
        raise InvalidArgument("the name of an operator is empty.")
    space, dot, rest = op.replace("::", ".").partition(".")
    if not dot:
        # The library takes a while to build and is imported on first use.
        from dovetail.rules.library import KINDS

        # A name that resembles none may be a kind of regions.
        known = all_op_names().union(KINDS)
        meant = None if op in known else misspelled(op, known)
        if meant is not None:
            raise InvalidArgument(
                f"no operator is called '{op}'. Did you mean '{meant}'? If it is a kind of regions, "
                f"give the rule that proposes it."
            )
        return {op, aten_name(op)}
    if space in _PYTHON_ALIASES:
        raise InvalidArgument(
            f"'{op}' is not an operator: '{space}' is an alias of a Python module. Give '{rest.rpartition('.')[2]}', "
            f"or the function itself."
        )
    if rest not in registered_ops(space):
        registered_ops.cache_clear()  # operators may have been registered since
    registered = {f"{space}.{name}" for name in registered_ops(space)}
    if space == "torch":
        scope: Any = torch
        for atom in rest.split("."):
            if not hasattr(scope, atom):
                hint = did_you_mean(atom, dir(scope))
                raise InvalidArgument(f"torch has no function '{op}'. {hint}".rstrip())
            scope = getattr(scope, atom)
    # A namespace without registered operators may be a vendor's, one of kinds, or of a library not yet imported.
    elif registered and f"{space}.{rest}" not in registered:
        title = "ATen" if space == "aten" else f"'{space}'"
        raise InvalidArgument(f"{title} has no operator '{op}'. {did_you_mean(op, registered)}".rstrip())
    return {op}


def verdict(accepts: OpSet | Predicate, context: RuleContext, position: int, rule: str) -> bool | Decline:
    """Whether an operation is accepted; RuleError if a predicate returns neither a bool nor a `Decline`."""
    node = context.nodes[position]
    if isinstance(accepts, OpSet):
        return accepts.has(node, context.gm, context.kind_of(position))
    result = accepts(node)
    if not isinstance(result, (bool, Decline)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(
            rule,
            f"the predicate returned {type(result).__name__} for '{node.name}'; "
            f"it must return True, False or a Decline with the reason",
        )
    return result


def verdicts(
    accepts: OpSet | Predicate, context: RuleContext, positions: Iterable[int], rule: str
) -> dict[int, bool | Decline]:
    """Return the verdict on each of many operations; a set of operators is evaluated once per target."""
    if not isinstance(accepts, OpSet):
        return {i: verdict(accepts, context, i, rule) for i in positions}
    by_target: dict[Any, bool] = {}
    results: dict[int, bool | Decline] = {}
    for i in positions:
        node = context.nodes[i]
        key = (node.op, node.target, context.kind_of(i))
        if key not in by_target:
            by_target[key] = accepts.has(node, context.gm, key[2])
        results[i] = by_target[key]
    return results


def predicate_name(accepts: OpSet | Predicate) -> str:
    """Return a predicate's name or the operators of a set, for messages."""
    return repr(accepts) if isinstance(accepts, OpSet) else getattr(accepts, "__qualname__", repr(accepts))
