"""Which operations a rule is about: a predicate of the user's, or a set of operators however they are spelled."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, RuleError, did_you_mean, misspelled
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection
from dovetail.ir.op_traits import target_name
from dovetail.outlining.region_call import make_identity
from dovetail.rules.op_classes import function_name, known_names, operation_name, operators_of, plain_name
from dovetail.rules.rule import Decline, Refusal, Rule, RuleContext

_ABBREVIATED = frozenset({"F", "nn", "functional", "np", "numpy"})
Predicate: TypeAlias = Callable[[Node], bool | Decline]


@dataclass(frozen=True)
class Ops:
    """A set of operators: `targets` must be called as such, `names` in any spelling."""

    targets: frozenset[Any]
    names: frozenset[str]

    def has(self, node: Node, root: nn.Module, kind: str | None) -> bool:
        """Whether a call is of one of them; a region is by its kind."""
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
        each = sorted([*self.names, *(_spelled(t) for t in self.targets)])
        return f"{{{', '.join(each)}}}"


def _spelled(target: Any) -> str:
    return target.__name__ if isinstance(target, type) else str(target)


def as_accepts(given: Any) -> Ops | Predicate:
    """What a rule was given as a predicate or as operators, checked."""
    if isinstance(given, Ops):
        return given
    if isinstance(given, (str, type, Rule)) or _is_operator(given):
        given = [given]
    if isinstance(given, nn.Module):
        raise InvalidArgument(
            f"a {type(given).__name__} is a module; give its class, or a predicate on nodes."
        )
    if callable(given):
        return cast("Predicate", given)
    if not isinstance(given, Iterable):
        raise InvalidArgument(
            f"expected a predicate on nodes or a set of operators, got {type(given).__name__}."
        )
    targets, names = set[Any](), set[str]()
    for op in cast("Iterable[Any]", given):
        if isinstance(op, str):
            names |= _names(op)
        elif isinstance(op, Rule):
            names.add(op.kind)
        elif isinstance(op, (OpOverload, HigherOrderOperator)) or _is_module_class(op):
            targets.add(op)
        elif _is_operator(op) and function_name(op):
            targets.add(op)
            if not isinstance(op, OpOverloadPacket) or op._qualified_op_name.startswith("aten::"):
                names.add(function_name(op))
        else:
            raise InvalidArgument(f"{op!r} is no operator: give an overload, a torch function or a name.")
    if not targets and not names:
        raise InvalidArgument("an empty set of operators accepts nothing.")
    return Ops(frozenset(targets), frozenset(names))


def _is_module_class(op: Any) -> bool:
    return isinstance(op, type) and issubclass(op, nn.Module)


def _is_operator(op: Any) -> bool:
    if isinstance(op, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return True
    if not isinstance(op, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)):
        return False
    return bool(function_name(op))


def _library_kinds() -> Collection[str]:
    # The library is only made when somebody asks for it.
    from dovetail.rules.library import KINDS

    return KINDS


def _names(op: str) -> set[str]:
    """The names by which calls of a named operator are met; InvalidArgument where a name is misspelled."""
    if not op.strip():
        raise InvalidArgument("an operator has a name; got an empty one.")
    space, dot, rest = op.replace("::", ".").partition(".")
    if not dot:
        # What is less alike may be a kind of regions.
        known = known_names().union(_library_kinds())
        meant = None if op in known else misspelled(op, known)
        if meant is not None:
            raise InvalidArgument(
                f"no operator is called '{op}'. Did you mean '{meant}'? A kind of regions that is written so is given "
                f"as the rule that makes it."
            )
        return {op, plain_name(op)}
    if space in _ABBREVIATED:
        raise InvalidArgument(
            f"'{op}' names no operator: '{space}' is a name for a module in Python code. Give '{rest.rpartition('.')[2]}', "
            f"or the function itself."
        )
    if rest not in operators_of(space):
        operators_of.cache_clear()  # operators may have been registered since
    spelled = {f"{space}.{name}" for name in operators_of(space)}
    if space == "torch":
        there: Any = torch
        for atom in rest.split("."):
            if not hasattr(there, atom):
                hint = did_you_mean(atom, dir(there))
                raise InvalidArgument(f"torch has no function '{op}'. {hint}".rstrip())
            there = getattr(there, atom)
    # A namespace without operators is a vendor's, of kinds, or of a library that is not imported.
    elif spelled and f"{space}.{rest}" not in spelled:
        title = "ATen" if space == "aten" else f"'{space}'"
        raise InvalidArgument(f"{title} has no operator '{op}'. {did_you_mean(op, spelled)}".rstrip())
    return {op}


def verdict(accepts: Ops | Predicate, context: RuleContext, position: int, rule: str) -> bool | Decline:
    """Whether an operation is accepted; RuleError if a predicate says neither yes nor no."""
    node = context.nodes[position]
    if isinstance(accepts, Ops):
        return accepts.has(node, context.gm, context.kind_of(position))
    said = accepts(node)
    if not isinstance(said, (bool, Decline)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(
            rule,
            f"the predicate returned {type(said).__name__} for '{node.name}'; "
            f"it must say True, False or a Decline with the reason",
        )
    return said


def verdicts(
    accepts: Ops | Predicate, context: RuleContext, positions: Iterable[int], rule: str
) -> dict[int, bool | Decline]:
    """The same for many operations; a set of operators is asked once per target."""
    if not isinstance(accepts, Ops):
        return {i: verdict(accepts, context, i, rule) for i in positions}
    known: dict[Any, bool] = {}
    found: dict[int, bool | Decline] = {}
    for i in positions:
        node = context.nodes[i]
        key = (node.op, node.target, context.kind_of(i))
        if key not in known:
            known[key] = accepts.has(node, context.gm, key[2])
        found[i] = known[key]
    return found


def spelled(accepts: Ops | Predicate) -> str:
    """The predicate's name, or the operators."""
    return repr(accepts) if isinstance(accepts, Ops) else getattr(accepts, "__qualname__", repr(accepts))


MOST_REFUSALS = 2000


@dataclass(frozen=True)
class GrowthContext:
    """The operations of a graph with the parts of their tuples, so that each is one unit.

    `home` has for each position its unit: itself, or the operation whose tuple it takes a part of. `parts` are those
    positions by unit, `readers` the units that read anything of a unit, `listed` the units in structural order.
    """

    home: list[int]
    parts: dict[int, list[int]]
    readers: list[list[int]]
    listed: list[int]

    def positions(self, units: Sequence[int]) -> tuple[int, ...]:
        """The units with their parts, in the graph's order."""
        if not self.parts:
            return tuple(sorted(units))
        return tuple(sorted([*units, *(p for u in units for p in self.parts.get(u, ()))]))


def ground(context: RuleContext) -> GrowthContext:
    """The units of a context, worked out once."""
    return context.analysis(_ground)


def _ground(context: RuleContext) -> GrowthContext:
    nodes, data, at = context.nodes, context.index.data, context.index.position
    home = list(range(len(nodes)))
    parts: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.target is operator.getitem and is_projection(node):
            home[i] = home[at[cast("Node", node.args[0])]]
            parts.setdefault(home[i], []).append(i)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(data):
        unit = home[i]
        for j in reads:
            source = home[j]
            if source != unit and (not readers[source] or readers[source][-1] != unit):
                readers[source].append(unit)
    places = [0] * len(nodes)
    for i, place in enumerate(context.order):
        places[place] = i
    listed = [i for i in places if home[i] == i] if parts else places
    return GrowthContext(home, parts, readers, listed)


def closed(context: RuleContext, kind: str, nests: bool, grows: bool = True) -> list[bool]:
    """Which positions a rule of a kind may not take: what is barred, regions of the kind, what is no operation.

    A rule that does not grow leaves all regions alone.
    """
    found = [node.op in ("placeholder", "get_attr", "output") for node in context.nodes]
    home = ground(context).home
    for i in context.barred:
        found[i] = found[home[i]] = True
    effects = context.index.dependencies.before
    for unit, parts in ground(context).parts.items() if effects else ():
        # A part that waits for an effect which its tuple does not wait for cannot be one with it.
        if any(not set(effects.get(p, ())) <= set(effects.get(unit, ())) for p in parts):
            found[unit] = True
    for i, call in context.calls.items():
        if not grows or (not nests and call.identity.kind == kind):
            found[i] = True
    return found


def why_closed(context: RuleContext, kind: str, nests: bool, position: int, grows: bool = True) -> str:
    """The reason for the same of one position, "" if it may be taken."""
    node = context.nodes[position]
    if node.op in ("placeholder", "get_attr", "output"):
        return f"'{node.name}' is a graph's {node.op}, no operation"
    if position in context.barred:
        return f"'{node.name}' may not be taken: {context.barred[position]}"
    if not nests and context.kind_of(position) == kind:
        return f"'{node.name}' is a region of kind '{kind}' already"
    if not grows and position in context.calls:
        return f"'{node.name}' is a region, and regions are left as they are"
    return ""


def weight(context: RuleContext, unit: int) -> int:
    """How many operations a unit counts for against a limit."""
    call = context.calls.get(unit)
    return call.size if call is not None else 1


@dataclass
class Refusals:
    """Refusals of one rule, the first few thousand of them."""

    rule: str
    found: list[Refusal] = field(default_factory=list[Refusal])

    @property
    def full(self) -> bool:
        return len(self.found) >= MOST_REFUSALS

    def add(self, members: tuple[int, ...], reason: str, at: int | None = None) -> None:
        if not self.full:
            self.found.append(Refusal(self.rule, members, reason, at))


def require_rule(name: object, kind: object, priority: object, **least: tuple[object, int]) -> None:
    """Refuse a rule made with arguments of the wrong form; `least` has a number and its lowest value by name."""
    make_identity(kind, 1, None)
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"name {name!r} of a rule for '{kind}' is not a text.")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidArgument(f"priority {priority!r} of rule '{name}' is not an int.")
    for argument, (value, lowest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InvalidArgument(f"{argument}={value!r} of rule '{name}' is not an int of {lowest} or more.")
