"""Decodes values, meta and calling conventions from untrusted JSON, the inverse of `encode`. Nothing in it is run."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch.fx import Node
from torch.utils._pytree import TreeSpec

from dovetail.errors import InvalidArgument
from dovetail.formats.archive import encode
from dovetail.formats.archive.encode import INPUTS, TYPES, Unwritable
from dovetail.frontend.calling_convention import MISSING, Carried, Convention, Slot, children, find_caches
from dovetail.frontend.input_guards import GuardedState, InputGuards, TensorInput
from dovetail.ir.meta_keys import CLONE, DECLARED, DIM_NAMES
from dovetail.ir.nodes import SYMBOLIC
from dovetail.ir.pickling import higher_order_by_name, overload_by_name, packet_by_name
from dovetail.ir.symbolic_expr import require_arithmetic, require_symbol
from dovetail.ir.tensor_spec import Symbolic, SymbolicEnv

_KINDS = ("SymInt", "SymFloat", "SymBool")
_OPERATOR = re.compile(r"([A-Za-z_]\w*::)?[A-Za-z_]\w*(\.\w+)?", re.ASCII)

# Arguments of operators are lists of lists at most; what users put in `meta["custom"]` may be deeper.
_DEEPEST = 64

# The limit of torch's kernels.
_MOST_DIMENSIONS = 64

# Entries of all metas together, which nodes share by number, and long texts: some ten for each of a million nodes.
_MOST_WORK = 2**23

# The cost of parsing distinct expressions over sizes (`parse_expression`): about three thousand usual ones, in about a
# second; more if a file has more values than that.
_MOST_READING = 2**19


class Unreadable(Exception):
    """A file is inconsistent; the message names the place."""


class Decoder:
    """Decodes values with the tables they refer to."""

    def __init__(self, tables: Mapping[str, Any], trust: encode.Trust) -> None:
        self.trust = trust
        self._work = 0
        self._decoded_metas: dict[tuple[int, frozenset[str]], tuple[dict[str, Any], dict[str, Any]]] = {}
        self._targets: dict[tuple[str, str], Any] = {}
        self.texts: list[str] = [expect(str, text) for text in as_list(tables["texts"])]
        self.symbols: Mapping[str, Any] = as_dict(tables["symbols"])
        self.metas: list[Any] = as_list(tables["metas"])
        values = as_list(tables["values"])
        self.symbolic_env = SymbolicEnv(budget=max(_MOST_READING, len(values) << 4))
        self.values = [self._decode_fake(row) for row in values]

    def spend(self, amount: int) -> None:
        """Count the work of entries that a file can refer to any number of times; raise Unreadable beyond a bound."""
        self._work += amount
        if self._work > _MOST_WORK:
            raise Unreadable("its entries refer to more than a graph can hold")

    def value(self, written: Any, nodes: Sequence[Node] | None = None, depth: int = 0) -> Any:
        """Return a value; an argument of a node may refer to the preceding `nodes` by number."""
        if written is None or isinstance(written, bool | float | str):
            return written
        if isinstance(written, int):
            return expect(int, written)
        if depth > _DEEPEST:
            raise Unreadable(f"a value is nested more than {_DEEPEST} deep")
        depth += 1
        if isinstance(written, list):
            return [self.value(v, nodes, depth) for v in cast("list[Any]", written)]
        if not isinstance(written, dict) or len(cast("dict[str, Any]", written)) != 1:
            raise Unreadable(f"a {type(written).__name__} that is not a value")
        ((tag, content),) = cast("dict[str, Any]", written).items()
        if tag == "n":
            return (nodes or ())[as_index(content, nodes or ())]
        if tag == "t":
            return tuple(self.value(v, nodes, depth) for v in as_list(content))
        if tag == "d":
            return {self.value(k): self.value(v, nodes, depth) for k, v in as_list(content)}
        if tag == "sl":
            return slice(*[self.value(v, nodes, depth) for v in as_list(content)])
        return self._object(tag, content, nodes is not None)

    def _object(self, tag: str, content: Any, is_argument: bool) -> Any:
        if tag == "v":
            value = self.values[as_index(content, self.values)]
            if is_argument and isinstance(value, torch.Tensor):
                raise Unreadable("an argument of a node is a tensor instead of a node")
            return value
        if tag == "s":
            text = self.texts[as_index(content, self.texts)]
            self.spend(len(text) >> 6)
            return text
        if tag == "sz":
            return torch.Size([self.value(v) for v in as_list(content)])
        if tag == "f":
            return float(expect(str, content))
        if tag == "c":
            real, imaginary = as_list(content)
            return complex(float(expect(str, real)), float(expect(str, imaginary)))
        if tag == "e":
            return Ellipsis
        if tag == "torch":
            return _torch(content)
        if tag == "dev":
            return torch.device(expect(str, content))
        if tag in ("op", "pk", "ho", "fn"):
            return self.target(tag, content)
        raise Unreadable(f"the tag {_short(tag)} is unknown")

    def target(self, tag: str, name: Any) -> Any:
        """Return the function or operator that a node calls, if a graph in a file may call it."""
        key = (tag, expect(str, name))
        if key not in self._targets:
            called = _named(*key)
            refusal = None if tag == "fn" or self.trust.permits(name) else encode.why_not_call(called)
            if refusal is not None:
                qualified = encode.qualified_name(name)
                raise MissingRequirement(
                    f"calls the operator '{name}', which {refusal}. If you trust its author, "
                    f"`dovetail.load(path, trust={{{qualified!r}}})` loads it; trust={{{qualified.split('::')[0]!r}}} is for all "
                    f"operators of that namespace, trust=True for any."
                )
            self._targets[key] = called
        return self._targets[key]

    def _decode_fake(self, row: Any) -> Any:
        if isinstance(row, dict):
            return self.symbolic_env.symbolic(self._symbolic(cast("dict[str, Any]", row)))
        storage, sizes, strides, start, dtype, device, grad, parameter = as_list(row)
        return self.symbolic_env.tensor(
            (
                expect(int, storage),
                tuple(self._size(s) for s in as_dims(sizes)),
                None if strides is None else tuple(self._size(s) for s in as_dims(strides)),
                self._size(start),
                as_dtype(dtype),
                torch.device(expect(str, device)),
                expect(bool, grad),
                expect(bool, parameter),
            )
        )

    def _size(self, size: Any) -> Any:
        return self._symbolic(cast("dict[str, Any]", size)) if isinstance(size, dict) else as_size(size)

    def _symbolic(self, row: Mapping[str, Any]) -> Symbolic:
        kind, text, names = as_list(row["x"])
        if kind not in _KINDS:
            raise Unreadable(f"{_short(kind)} is not a kind of symbolic number")
        facts: list[tuple[str, int | None, int | None, int | None]] = []
        for name in as_list(names):
            known = [None if fact is None else expect(int, fact) for fact in as_list(self.symbols[name])]
            facts.append(
                (expect(str, name), *cast("tuple[int | None, int | None, int | None]", tuple(known)))
            )
        return Symbolic(kind, expect(str, text), tuple(facts))

    def type(self, name: Any) -> Any:
        """Return the type annotation of a node."""
        return None if name is None else TYPES[expect(str, name)]

    def meta(self, number: Any, owned: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a node's meta, and its `owned` entries, which are not values, as they were written."""
        key = (as_index(number, self.metas), owned)
        if key not in self._decoded_metas:
            row: dict[str, Any] = as_dict(self.metas[key[0]])
            meta = {name: None if name in owned else self._entry(name, value) for name, value in row.items()}
            self._decoded_metas[key] = meta, {name: row[name] for name in owned & row.keys()}
        meta, written = self._decoded_metas[key]
        # Each node has its own dict, with the keys in the order in which they were written.
        self.spend(1 + len(meta))
        return dict(meta), written

    def _entry(self, name: str, written: Any) -> Any:
        """Return one entry of a meta, checked if dovetail or torch reads it."""
        if name.startswith("dovetail.") and name not in _META_CHECKS:
            raise Unreadable(f"a node has the meta {_short(name)}, which a file may not set")
        value = self.value(written)
        check = _META_CHECKS.get(name)
        if check is not None and not check(value):
            raise Unreadable(f"{_short(value)} is not the meta '{name}' of a node")
        return value


def _is_value(value: Any) -> bool:
    """Whether a value can be that of a node: tensors and numbers, in lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return all(_is_value(v) for v in cast("list[Any]", value))
    if isinstance(value, dict):
        return all(_is_value(v) for v in cast("dict[Any, Any]", value).values())
    return value is None or isinstance(value, _VALUES)


def _is_stack(value: Any) -> bool:
    """Whether a value can be the module stack of an operation."""
    return isinstance(value, dict) and all(
        isinstance(key, str)
        and isinstance(row, tuple)
        and len(cast("tuple[Any, ...]", row)) == 2
        and all(isinstance(part, str) for part in cast("tuple[Any, ...]", row))
        for key, row in cast("dict[Any, Any]", value).items()
    )


def _is_trace(value: Any) -> bool:
    # torch writes traces into the code it generates, as comments: a carriage return would end one.
    return value is None or (isinstance(value, str) and "\r" not in value and "\0" not in value)


_VALUES = (torch.Tensor, *SYMBOLIC, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_META_CHECKS: dict[str, Callable[[Any], bool]] = {
    "val": _is_value,
    "example_value": _is_value,
    "nn_module_stack": _is_stack,
    "stack_trace": _is_trace,
    "custom": lambda value: isinstance(value, dict),
    CLONE: lambda value: isinstance(value, str),
    DIM_NAMES: lambda value: (
        isinstance(value, dict)
        and all(isinstance(part, str) for row in cast("dict[Any, Any]", value).items() for part in row)
    ),
    DECLARED: lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(k, str) and v in ("ordered", "pure") for k, v in cast("dict[Any, Any]", value).items()
        )
    ),
}


def _named(tag: str, name: str) -> Any:
    """Return the function or operator of a name."""
    if tag == "fn":
        function = encode.function_named(name)
        if function is None:
            raise Unreadable(f"a graph may not call {_short(name)}")
        return function
    find, kind = {
        "op": (overload_by_name, torch._ops.OpOverload),
        "pk": (packet_by_name, torch._ops.OpOverloadPacket),
        "ho": (higher_order_by_name, torch._ops.HigherOrderOperator),
    }[tag]
    try:
        target = find(name) if _OPERATOR.fullmatch(name) else None
    except (AttributeError, ValueError, RuntimeError):
        target = None
    if not isinstance(target, kind):
        raise MissingRequirement(
            f"calls the operator {_short(name)}, which this torch does not have. Load the library that defines it first."
        )
    return target


class MissingRequirement(Exception):
    """A file is sound, but needs a library or device that this process does not have."""


def _torch(name: Any) -> Any:
    # Not by `getattr`: torch imports some of its parts when they are asked for.
    value = vars(torch).get(expect(str, name))
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise Unreadable(f"torch has no dtype, layout or memory format {_short(name)}")
    return value


def as_dtype(name: Any) -> torch.dtype:
    """Return the dtype of a name."""
    return expect(torch.dtype, _torch(name))


T = TypeVar("T")


def expect(kind: type[T], value: Any) -> T:
    """Return a value if it has this type; raise Unreadable otherwise."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Unreadable(f"{_short(value)} is not a {kind.__name__}")
    if kind is int and not -(2**63) <= cast("int", value) < 2**64:
        raise Unreadable(f"a number of {cast('int', value).bit_length()} bits")
    return value


def as_size(value: Any) -> int:
    """Return a value if it can be a size, a stride or an offset."""
    number = expect(int, value)
    if not 0 <= number < 2**63:
        raise Unreadable(f"a size of {number}")
    return number


def as_dims(value: Any) -> list[Any]:
    """Return a value if it is a list that is no longer than a tensor can have dimensions."""
    sizes = as_list(value)
    if len(sizes) > _MOST_DIMENSIONS:
        raise Unreadable(f"a tensor of {len(sizes)} dimensions")
    return sizes


def _short(value: Any) -> str:
    return repr(value[:60] if isinstance(value, str) else str(type(value).__name__))


def as_list(value: Any) -> list[Any]:
    """Return a value if it is a list."""
    return cast("list[Any]", expect(list, value))


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value if it is a JSON object."""
    return cast("dict[str, Any]", expect(dict, value))


def as_index(value: Any, items: Sequence[Any]) -> int:
    """Return a value if it is an index of `items`."""
    number = expect(int, value)
    if not 0 <= number < len(items):
        raise Unreadable(f"index {number} of {len(items)}")
    return number


# Arguments of a model that are neither tensors nor symbols are compared with these when a graph is called.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_INPUT_FIELDS: dict[str, tuple[Any, ...]] = {
    "tensor": (str, torch.dtype, torch.device, tuple, bool, bool, tuple),
    "symbol": (str, str),
    "constant": (str, _CONSTANTS),
    "object": (str,),
}
_MAPPINGS = frozenset({"builtins.dict", "collections.OrderedDict", "collections.defaultdict"})
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def decode_convention(written: dict[str, Any], decoder: Decoder) -> Convention:
    """Return the calling convention that `encode_convention` wrote."""
    _require_arithmetic(written)
    input_guards = InputGuards(
        tuple(_read_input(row, decoder) for row in as_list(written["inputs"])),
        tuple((expect(str, n), _bound(low), _bound(high)) for n, low, high in as_list(written["ranges"])),
        tuple((expect(str, n), expect(str, s), expect(str, i)) for n, s, i in as_list(written["solved"])),
        tuple(expect(str, guard) for guard in as_list(written["guards"])),
        tuple((expect(int, i), expect(int, j)) for i, j in as_list(written["twins"])),
        GuardedState(
            *(tuple(expect(str, target) for target in as_list(written[key])) for key in ("written", "read"))
        ),
        # Not in files of earlier versions.
        expect(str, written.get("function", "")),
        tuple(expect(str, name) for name in as_list(written.get("graded", []))),
    )
    carried, training = written["carried"], written["training"]
    slots = tuple(_read_slot(row, decoder) for row in as_list(written["slots"]))
    in_spec, out_spec = decode_tree(written["in"]), decode_tree(written["out"])
    order = tuple(expect(int, i) for i in as_list(written["order"]))
    inside = children(in_spec)
    if len(inside) != sum(slot.captured for slot in slots) or sorted(order) != list(
        range(in_spec.num_leaves)
    ):
        raise Unreadable("the inputs do not match the parameters")
    for pair in input_guards.twins:
        for i in pair:
            as_index(i, input_guards.inputs)
    inspect.Signature([slot.parameter() for slot in slots])
    return Convention(
        slots,
        in_spec,
        order,
        out_spec,
        input_guards,
        None if training is None else expect(bool, training),
        _read_carried(carried, slots, out_spec),
        _read_appended(written.get("appended", 0), out_spec),
    )


def _read_carried(written: Any, slots: tuple[Slot, ...], out_spec: TreeSpec) -> tuple[Carried, ...]:
    caches = find_caches(out_spec)
    carried: list[Carried] = []
    # Files of earlier versions have one or none.
    is_row = isinstance(written, list) and bool(written) and isinstance(written[0], int)
    for row in [written] if is_row else as_list(written or []):
        slot, start, count = (expect(int, n) for n in as_list(row))
        if not slots[as_index(slot, slots)].captured or (start, count) not in caches:
            raise Unreadable("there is no cache among the results where one is updated")
        carried.append(Carried(slot, start, count))
    return tuple(carried)


def _read_appended(written: Any, out_spec: TreeSpec) -> int:
    appended = expect(int, written)
    if appended and (out_spec.type is not tuple or len(children(out_spec)) != appended + 1):
        raise Unreadable("the results lack caches that are updated")
    return appended


def _read_slot(row: Any, decoder: Decoder) -> Slot:
    name, kind, has_default, default, captured, by_name = as_list(row)
    known = MISSING if default == {"missing": 0} else decoder.value(default)
    return Slot(
        _name(name),
        inspect._ParameterKind(expect(int, kind)),
        expect(bool, has_default),
        known,
        expect(bool, captured),
        expect(bool, by_name),
    )


def _name(name: Any) -> str:
    if not expect(str, name).isidentifier():
        raise Unreadable(f"{name!r} is not a name of a parameter")
    return cast("str", name)


def _read_input(row: Any, decoder: Decoder) -> Any:
    kind, *values = as_list(row)
    make = INPUTS[expect(str, kind)]
    known, types = [decoder.value(value) for value in values], _INPUT_FIELDS[kind]
    if kind == "tensor":
        known += (TensorInput.ungraded, TensorInput.strides)[
            len(known) - 5 :
        ]  # not in files of earlier versions
    if len(known) != len(types) or not all(map(isinstance, known, types)):
        raise Unreadable(f"an input of kind '{kind}' has the wrong fields")
    if kind == "tensor" and not all(isinstance(n, str) or (type(n) is int and n >= 0) for n in known[3]):
        raise Unreadable("an input has a size that is neither a number nor an expression")
    if kind == "tensor" and not _are_strides(known[6], len(known[3])):
        raise Unreadable("an input has strides that are not numbers, or not one for each dimension")
    return make(*known)


def _are_strides(strides: tuple[Any, ...], dimensions: int) -> bool:
    numbers = all(n is None or (type(n) is int and n >= 0) for n in strides)
    return numbers and len(strides) in (0, dimensions)


def _bound(value: Any) -> int | None:
    return None if value is None else expect(int, value)


def check_convention(written: dict[str, Any]) -> None:
    """Raise Unwritable if `decode_convention` would refuse a convention that was just encoded."""
    try:
        for tree in (written["in"], written["out"]):
            _require_safe_tree(json.loads(tree)[1])
    except Unreadable as reason:
        raise Unwritable(str(reason)) from reason
    try:
        _require_arithmetic(written)
    except Unreadable as reason:
        raise Unwritable(f"a guard on sizes that is more than arithmetic: {reason}") from reason


def _require_arithmetic(written: dict[str, Any]) -> None:
    """Check that guards on sizes, which are compiled when a graph is called, are arithmetic over symbols of its inputs."""
    expressions = [text for row in as_list(written["inputs"]) for text in _expressions(as_list(row))]
    solved = [[expect(str, text) for text in as_list(row)] for row in as_list(written["solved"])]
    symbols = {text for text in expressions if text.isidentifier()}
    try:
        for name, text, inverse in solved:
            require_arithmetic(inverse, {"size"})
            if text in expressions:
                symbols.add(name)
        for name in symbols | {expect(str, as_list(row)[0]) for row in as_list(written["ranges"])}:
            require_symbol(name)
        for text in dict.fromkeys([*expressions, *as_list(written["guards"])]):
            require_arithmetic(expect(str, text), symbols)
    except InvalidArgument as error:
        raise Unreadable(str(error).removesuffix(".")) from error


def _expressions(row: list[Any]) -> list[str]:
    """Return the symbolic sizes of an input."""
    if row[0] == "symbol":
        return [expect(str, row[2])]
    if row[0] != "tensor":
        return []
    return [expect(str, size) for size in as_list(as_dict(row[4])["t"]) if not isinstance(size, int)]


def decode_tree(written: Any) -> TreeSpec:
    """Return the tree that `encode_tree` wrote, whose types must be registered in this process."""
    try:
        _, tree = json.loads(expect(str, written))
        _require_safe_tree(tree)
        return pytree.treespec_loads(written)
    except NotImplementedError as error:
        raise MissingRequirement(
            f"returns or takes a type that is not registered: {error} Import the module that registers it first."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"a tree of arguments or results: {type(error).__name__}: {error}") from error


def _require_safe_tree(tree: Any) -> None:
    """Refuse the two contexts for which torch imports whatever they name: enumerations and factories of defaultdicts."""
    stack = [tree]
    while stack:
        spec = as_dict(stack.pop())
        context, inside = spec["context"], as_list(spec["children_spec"])
        _require_no_enumeration(context)
        keys = context
        if isinstance(context, dict) and "default_factory_module" in context:
            where = (context["default_factory_module"], context["default_factory_name"])
            if where[0] != "builtins" or where[1] not in _FACTORIES:
                raise Unreadable(
                    "a defaultdict among the arguments or results has a factory that is not a builtin"
                )
            keys = context["dict_context"]
        if spec["type"] in _MAPPINGS:
            keys = json.loads(keys) if isinstance(keys, str) else keys
            if len(as_list(keys)) != len(inside):
                raise Unreadable("a dict among the arguments or results has more or fewer keys than values")
        stack.extend(inside)


def _require_no_enumeration(context: Any) -> None:
    """Search a context, which may be JSON inside a JSON string, decoded as torch decodes it."""
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
                raise Unreadable("an enumeration among the arguments or results cannot be saved")
            stack += cast("dict[str, Any]", item).values()
