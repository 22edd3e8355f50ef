"""How a captured graph is called, as JSON: its parameters, the trees they come in, and what is expected of them."""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import fields
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._pytree import TreeSpec

from dovetail.errors import InvalidArgument
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
from dovetail.graph.capturing.trees import Carried, find_caches
from dovetail.graph.expressions import require_arithmetic, require_symbol
from dovetail.interop.decoding import Absent, Decoder, Unreadable, index, rows, table, take
from dovetail.interop.encoding import Encoder, Unwritable

_INPUTS: dict[str, Any] = {
    "tensor": TensorInput,
    "symbol": SymbolInput,
    "constant": ConstantInput,
    "object": ObjectInput,
}
# A model's arguments that are neither tensors nor symbols are compared with these when a graph is called.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_FORMS: dict[str, tuple[Any, ...]] = {
    "tensor": (str, torch.dtype, torch.device, tuple, bool, bool, tuple),
    "symbol": (str, str),
    "constant": (str, _CONSTANTS),
    "object": (str,),
}
_MAPPINGS = frozenset({"builtins.dict", "collections.OrderedDict", "collections.defaultdict"})
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def write(convention: Convention, encoder: Encoder) -> dict[str, Any]:
    """A convention as JSON. Raises Unwritable where a type or a default has no form in a file."""
    expectations = convention.expectations
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
        "function": expectations.function,
        "graded": list(expectations.graded),
        "training": convention.training,
        "carried": [[one.slot, one.start, one.count] for one in convention.carried],
        "appended": convention.appended,
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
        # Not in files of earlier versions.
        take(str, written.get("function", "")),
        tuple(take(str, name) for name in rows(written.get("graded", []))),
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
    for pair in expectations.twins:
        for i in pair:
            index(i, expectations.inputs)
    inspect.Signature([slot.parameter() for slot in slots])
    return Convention(
        slots,
        in_spec,
        order,
        out_spec,
        expectations,
        None if training is None else take(bool, training),
        _read_carried(carried, slots, out_spec),
        _read_appended(written.get("appended", 0), out_spec),
    )


def _read_carried(written: Any, slots: tuple[Slot, ...], out_spec: TreeSpec) -> tuple[Carried, ...]:
    caches = find_caches(out_spec)
    carried: list[Carried] = []
    # Files of earlier versions have one or none.
    one = isinstance(written, list) and bool(written) and isinstance(written[0], int)
    for row in [written] if one else rows(written or []):
        slot, start, count = (take(int, n) for n in rows(row))
        if not slots[index(slot, slots)].captured or (start, count) not in caches:
            raise Unreadable("the results have no cache where one is updated")
        carried.append(Carried(slot, start, count))
    return tuple(carried)


def _read_appended(written: Any, out_spec: TreeSpec) -> int:
    appended = take(int, written)
    if appended and (out_spec.type is not tuple or len(children(out_spec)) != appended + 1):
        raise Unreadable("the results lack caches that are updated")
    return appended


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
    known, forms = [decoder.value(value) for value in values], _FORMS[kind]
    if kind == "tensor":
        known += (TensorInput.ungraded, TensorInput.strides)[
            len(known) - 5 :
        ]  # not in files of earlier versions
    if len(known) != len(forms) or not all(map(isinstance, known, forms)):
        raise Unreadable(f"an input that is a {kind} with other facts")
    if kind == "tensor" and not all(isinstance(n, str) or (type(n) is int and n >= 0) for n in known[3]):
        raise Unreadable("an input with a size that is neither a number nor an expression")
    if kind == "tensor" and not _are_strides(known[6], len(known[3])):
        raise Unreadable("an input with strides that are no numbers, or not one for each dimension")
    return made(*known)


def _are_strides(strides: tuple[Any, ...], dimensions: int) -> bool:
    numbers = all(n is None or (type(n) is int and n >= 0) for n in strides)
    return numbers and len(strides) in (0, dimensions)


def _bound(value: Any) -> int | None:
    return None if value is None else take(int, value)


def _require_arithmetic(written: dict[str, Any]) -> None:
    """Conditions on sizes are compiled when a graph is called: each must be arithmetic over symbols of its inputs."""
    stated = [text for row in rows(written["inputs"]) for text in _stated(rows(row))]
    solved = [[take(str, text) for text in rows(row)] for row in rows(written["solved"])]
    symbols = {text for text in stated if text.isidentifier()}
    try:
        for name, text, inverse in solved:
            require_arithmetic(inverse, {"size"})
            if text in stated:
                symbols.add(name)
        for name in symbols | {take(str, rows(row)[0]) for row in rows(written["ranges"])}:
            require_symbol(name)
        for text in dict.fromkeys([*stated, *rows(written["guards"])]):
            require_arithmetic(take(str, text), symbols)
    except InvalidArgument as error:
        raise Unreadable(str(error).removesuffix(".")) from error


def _stated(row: list[Any]) -> list[str]:
    """The expressions that an input has in place of numbers."""
    if row[0] == "symbol":
        return [take(str, row[2])]
    if row[0] != "tensor":
        return []
    return [take(str, size) for size in rows(table(row[4])["t"]) if not isinstance(size, int)]


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
        context, inside = spec["context"], rows(spec["children_spec"])
        _require_no_enumeration(context)
        keys = context
        if isinstance(context, dict) and "default_factory_module" in context:
            where = (context["default_factory_module"], context["default_factory_name"])
            if where[0] != "builtins" or where[1] not in _FACTORIES:
                raise Unreadable("a defaultdict among the arguments or results has a factory of its own")
            keys = context["dict_context"]
        if spec["type"] in _MAPPINGS:
            keys = json.loads(keys) if isinstance(keys, str) else keys
            if len(rows(keys)) != len(inside):
                raise Unreadable("a dict among the arguments or results has other keys than values")
        stack.extend(inside)


def _require_no_enumeration(context: Any) -> None:
    """Contexts are JSON, often JSON inside text: what torch decodes is decoded here before it is searched."""
    stack = [context]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            with contextlib.suppress(ValueError):
                inner = json.loads(item)
                stack += [inner] if isinstance(inner, str | list | dict) else []
        elif isinstance(item, list):
            stack += cast("list[Any]", item)
        elif isinstance(item, dict):
            if "__enum__" in item:
                raise Unreadable("an enumeration among the arguments or results has no form in a file")
            stack += cast("dict[str, Any]", item).values()
