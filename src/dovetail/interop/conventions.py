"""How a captured graph is called, as JSON: its parameters, the trees they come in, and what is expected of them."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import fields
from typing import Any, cast

import torch.utils._pytree as pytree
from torch.utils._pytree import TreeSpec

from dovetail.graph.capturing.calling import MISSING, Convention
from dovetail.graph.capturing.expecting import (
    ConstantInput,
    Expectations,
    ObjectInput,
    SymbolInput,
    TensorInput,
)
from dovetail.graph.capturing.sharing import Owned
from dovetail.graph.capturing.specs import Slot, children
from dovetail.graph.capturing.trees import Carried
from dovetail.interop.decoding import Absent, Decoder, Unreadable, rows, table, take
from dovetail.interop.encoding import Encoder, Unwritable

_INPUTS: dict[str, Any] = {
    "tensor": TensorInput,
    "symbol": SymbolInput,
    "constant": ConstantInput,
    "object": ObjectInput,
}
_CALLED = frozenset({"max", "min", "abs", "round", "int"})
_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Name,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def write(convention: Convention, encoder: Encoder) -> dict[str, Any]:
    """A convention as JSON. Raises Unwritable where a type or a default has no form in a file."""
    expectations = convention.expectations
    carried = convention.carried
    written: dict[str, Any] = {
        "slots": [_slot(slot, encoder) for slot in convention.slots],
        "in": write_tree(convention.in_spec),
        "order": list(convention.order),
        "out": write_tree(convention.out_spec),
        "inputs": [_input(expected, encoder) for expected in expectations.inputs],
        "ranges": [list(row) for row in expectations.ranges],
        "solved": [list(row) for row in expectations.solved],
        "guards": list(expectations.guards),
        "twins": [list(pair) for pair in expectations.twins],
        "written": list(expectations.owned.written),
        "read": list(expectations.owned.read),
        "training": convention.training,
        "carried": None if carried is None else [carried.slot, carried.start, carried.count],
    }
    try:
        _require_arithmetic(written)
    except Unreadable as reason:
        raise Unwritable(f"a condition on sizes that is more than arithmetic: {reason}") from reason
    return written


def read(written: dict[str, Any], decoder: Decoder) -> Convention:
    """The convention that `write` wrote."""
    _require_arithmetic(written)
    expectations = Expectations(
        tuple(_read_input(row, decoder) for row in rows(written["inputs"])),
        tuple((take(str, n), _bound(low), _bound(high)) for n, low, high in rows(written["ranges"])),
        tuple((take(str, n), take(str, s), take(str, i)) for n, s, i in rows(written["solved"])),
        tuple(take(str, guard) for guard in rows(written["guards"])),
        tuple((take(int, i), take(int, j)) for i, j in rows(written["twins"])),
        Owned(*(tuple(take(str, target) for target in rows(written[key])) for key in ("written", "read"))),
    )
    carried, training = written["carried"], written["training"]
    slots = tuple(_read_slot(row, decoder) for row in rows(written["slots"]))
    in_spec, out_spec = read_tree(written["in"]), read_tree(written["out"])
    order = tuple(take(int, i) for i in rows(written["order"]))
    inside = children(in_spec)
    if len(inside) != sum(slot.captured for slot in slots) or sorted(order) != list(
        range(in_spec.num_leaves)
    ):
        raise Unreadable("the inputs and the parameters they come by do not fit together")
    return Convention(
        slots,
        in_spec,
        order,
        out_spec,
        expectations,
        None if training is None else take(bool, training),
        None if carried is None else Carried(*[take(int, n) for n in rows(carried)]),
    )


def _slot(slot: Slot, encoder: Encoder) -> list[Any]:
    try:
        default = encoder.value(slot.default)
    except Unwritable:
        # Whoever leaves the argument out need not be able to name it.
        default = {"missing": 0}
    return [slot.name, int(slot.kind), slot.has_default, default, slot.captured, slot.by_name]


def _read_slot(row: Any, decoder: Decoder) -> Slot:
    name, kind, has_default, default, captured, by_name = rows(row)
    known = MISSING if default == {"missing": 0} else decoder.value(default)
    return Slot(
        _name(name),
        inspect._ParameterKind(take(int, kind)),
        take(bool, has_default),
        known,
        take(bool, captured),
        take(bool, by_name),
    )


def _name(name: Any) -> str:
    if not take(str, name).isidentifier():
        raise Unreadable(f"{name!r} is no name of a parameter")
    return cast("str", name)


def _input(expected: Any, encoder: Encoder) -> list[Any]:
    kind = next(name for name, known in _INPUTS.items() if type(expected) is known)
    return [kind, *(encoder.value(getattr(expected, f.name)) for f in fields(expected))]


def _read_input(row: Any, decoder: Decoder) -> Any:
    kind, *values = rows(row)
    made = _INPUTS[take(str, kind)]
    if len(values) != len(fields(made)):
        raise Unreadable(f"an input that is a {kind} with {len(values)} facts")
    return made(*[decoder.value(value) for value in values])


def _bound(value: Any) -> int | None:
    return None if value is None else take(int, value)


def _require_arithmetic(written: dict[str, Any]) -> None:
    """Conditions on sizes are compiled when a graph is called: they must be arithmetic over names and nothing else."""
    texts: list[Any] = [text for row in written["solved"] for text in row] + list(written["guards"])
    texts += [row[0] for row in written["ranges"]]
    for row in written["inputs"]:
        if row[0] == "symbol":
            texts.append(row[2])
        elif row[0] == "tensor":
            # The sizes are a tuple of numbers and expressions.
            texts += [size for size in rows(table(row[4])["t"]) if not isinstance(size, int)]
    for text in texts:
        _require_expression(take(str, text))


def _require_expression(text: str) -> None:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{text[:60]!r} is no expression: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, _ARITHMETIC) or (
            isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        ):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED:
            continue
        raise Unreadable(f"{text[:60]!r} has a {type(node).__name__} in it")


def write_tree(spec: TreeSpec) -> str:
    """A tree of arguments or results as torch writes it."""
    try:
        written = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise Unwritable(
            f"a type among its arguments or results that has no name in files: {error} "
            f"Register it with `serialized_type_name` (torch.utils._pytree.register_pytree_node)"
        ) from error
    try:
        _require_plain(json.loads(written)[1])
    except Unreadable as reason:
        raise Unwritable(str(reason)) from reason
    return written


def read_tree(written: Any) -> TreeSpec:
    """The tree that `write_tree` wrote, of types that are registered here."""
    try:
        _, tree = json.loads(take(str, written))
        _require_plain(tree)
        return pytree.treespec_loads(written)
    except NotImplementedError as error:
        raise Absent(
            f"returns or takes a type that is not known here: {error} Import the module that registers it first."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"a tree of arguments or results: {type(error).__name__}: {error}") from error


def _require_plain(tree: Any) -> None:
    """Two contexts make torch import whatever they name: enumerations, and what a dict takes for a missing key."""
    stack = [tree]
    while stack:
        spec = table(stack.pop())
        context = spec["context"]
        if "__enum__" in json.dumps(context):
            raise Unreadable("an enumeration among the arguments or results has no form in a file")
        if isinstance(context, dict) and "default_factory_module" in context:
            where = (context["default_factory_module"], context["default_factory_name"])
            if where[0] != "builtins" or where[1] not in _FACTORIES:
                raise Unreadable("a defaultdict among the arguments or results has a factory of its own")
        stack.extend(rows(spec["children_spec"]))
