"""Which operations a rule applies to: a predicate on nodes, or a set of operators accepts by target or by name."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, RuleError, did_you_mean, misspelled
from dovetail.ir.graph_module import attribute
from dovetail.ir.op_traits import target_name
from dovetail.rules.op_classes import all_op_names, aten_name, function_name, operation_name, registered_ops
from dovetail.rules.rule import Decline, Rule, RuleContext

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
