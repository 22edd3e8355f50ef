"""Encodes arguments, meta, fake tensors, symbolic sizes and calling conventions as JSON, without code or pickle.

A value without a JSON type is an object with one short key for its type: `{"t": [...]}` is a tuple. Fake tensors, long
strings and equal metas are written once, in tables, and referred to by number. The first half of the file is the
allow list: which functions, methods and operators a graph in a file may call.
"""

from __future__ import annotations

import builtins
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from dovetail.errors import InvalidArgument
from dovetail.frontend.calling_convention import Convention, Slot
from dovetail.frontend.input_guards import ConstantInput, ObjectInput, SymbolInput, TensorInput
from dovetail.ir.nodes import SYMBOLIC
from dovetail.ir.tensor_spec import Symbolic, describe_symbolic, tensor_row

_ATTRIBUTES_NAMES = """
    shape dtype device layout ndim T mT H mH real imag requires_grad is_cuda
"""
ATTRIBUTES = frozenset(_ATTRIBUTES_NAMES.split())
"""The attributes that `getattr` may read: traced code reads these of tensors, and nothing else may be reached."""
_OPERATORS = """
    getitem setitem add sub mul truediv floordiv mod pow matmul neg pos abs invert not_ and_ or_ xor lshift rshift
    eq ne lt le gt ge iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor is_ is_not truth index contains
"""
_BUILTINS = "abs bool float getattr int len max min pow round sum"
_SPACES = ("torch", "torch.nn.functional", "torch.functional", "torch.linalg", "torch.special", "torch.fft")


@functools.cache
def _always_allowed() -> dict[str, Any]:
    """Return arithmetic, and the functions of symbolic sizes and modes that exporters write."""
    functions: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    functions |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS.split()}
    functions |= {
        f"math.{name}": value for name, value in vars(math).items() if callable(value) and name[0] != "_"
    }
    functions |= {
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if name.startswith(("sym_", "_sym_")) and callable(value)
    }
    functions["torch._C._set_grad_enabled"] = torch._C._set_grad_enabled
    for name in ("_enter_autocast", "_exit_autocast"):
        functions[f"torch.amp.autocast_mode.{name}"] = getattr(autocast_mode, name)
    return functions


@functools.cache
def _tensor_functions() -> dict[str, Any]:
    """Return torch's own functions of tensors and factories, which a tracer may leave as they are."""
    # All that torch generates from its operators; `from_file` reads any file.
    functions: dict[str, Any] = {
        f"torch.{name}": getattr(torch, name)
        for name in dir(vars(torch._C)["_VariableFunctions"])
        if not name.startswith("_") and name != "from_file" and hasattr(torch, name)
    }
    overridable = torch.overrides.get_overridable_functions()
    known = {id(function) for group in overridable.values() for function in group}
    for space in _SPACES:
        module = functools.reduce(getattr, space.split(".")[1:], torch)
        for name, value in vars(module).items():
            if id(value) in known and callable(value):
                functions[f"{space}.{name}"] = value
    functions["torch._assert"] = torch._assert
    return functions


@functools.cache
def _names() -> dict[int, str]:
    named: dict[int, str] = {}
    for name, function in (*_always_allowed().items(), *_tensor_functions().items()):
        named.setdefault(id(function), name)
    return named


def function_name(function: Any) -> str | None:
    """Return the name of a function in a file, or None if a graph that calls it cannot be saved."""
    return _names().get(id(function))


def function_named(name: str) -> Callable[..., Any] | None:
    """Return the function of a name, or None if no graph in a file may call it."""
    return _always_allowed().get(name) or _tensor_functions().get(name)


def is_method(name: str) -> bool:
    """Whether tensors have a method of this name that a graph in a file may call."""
    return (
        name.isidentifier()
        and not name.startswith("_")
        and name not in _METHODS_REFUSED.split()
        and callable(getattr(torch.Tensor, name, None))
    )


# They call a function argument, give access to raw memory, or share it with other processes.
_METHODS_REFUSED = """
    apply_ map_ map2_ as_subclass register_hook register_post_accumulate_grad_hook module_load share_memory_ storage
    untyped_storage data_ptr const_data_ptr from_file
"""
_NAMESPACES = frozenset({"aten", "prims"})

# TorchScript registers its own builtins under aten (strings, dicts, files, random state): they have arguments of other
# types, or no tensor at all.
_TYPES = "Tensor int bool float number complex str Device Generator QScheme None NoneType"
_WITHOUT_TENSORS = (
    "sym_constrain_range sym_constrain_range_for_size _assert_scalar maximum_value minimum_value"
)
_UNCHECKED = """
    _reshape_alias _reshape_alias_copy _index_put_impl _index_put_impl_ _coalesced _coalesced_ _sparse_coo_tensor_unsafe
    _sparse_compressed_tensor_unsafe _sparse_csr_tensor_unsafe _sparse_csc_tensor_unsafe _sparse_bsr_tensor_unsafe
    _sparse_bsc_tensor_unsafe _nested_view_from_buffer _nested_view_from_buffer_copy _nested_view_from_jagged
    _nested_view_from_jagged_copy
"""
_REFUSED = {
    "from_file": "opens a file by its name",
    **dict.fromkeys(_UNCHECKED.split(), "does not check whether it stays within the memory of its operands"),
}

# Control flow and modes around graphs that are in the file too. Others hold compiled code, or call an argument.
_HIGHER_ORDER = """
    cond while_loop while_loop_stack_output scan associative_scan map map_impl wrap wrap_with_set_grad_enabled
    wrap_with_autocast wrap_activation_checkpoint tag_activation_checkpoint auto_functionalized auto_functionalized_v2
    out_dtype invoke_subgraph hints_wrapper strict_mode flex_attention flex_attention_backward with_effects
    run_and_save_rng_state run_with_rng_state
    """


class Trust:
    """Which operators a file may name beside the allow list: all, or those of these names or namespaces."""

    def __init__(self, trust: bool | Collection[str]) -> None:
        names: Any = () if isinstance(trust, bool) else trust
        valid = isinstance(names, Collection) and not isinstance(names, str)
        if not valid or not all(isinstance(name, str) for name in cast("Collection[Any]", names)):
            raise InvalidArgument(
                f"trust={trust!r} is neither True nor a collection of operators ('acme::mix') or namespaces ('acme')."
            )
        self._all, self._names = trust is True, frozenset(map(qualified_name, names))

    def permits(self, name: str) -> bool:
        """Whether an operator of a qualified name is trusted, whatever its overload."""
        qualified = qualified_name(name)
        return self._all or qualified in self._names or qualified.split("::")[0] in self._names


def qualified_name(name: str) -> str:
    """Return `acme::mix` for any way to write an operator, `acme` for a namespace."""
    space, _, rest = name.removeprefix("torch.ops.").replace("::", ".").partition(".")
    return f"{space}::{rest.split('.')[0]}" if rest else space


def why_not_call(called: Any) -> str | None:
    """Return why a graph in a file may not call an operator without `trust`, or None if it may."""
    if isinstance(called, torch._ops.HigherOrderOperator):
        return (
            None if called.name() in _HIGHER_ORDER.split() else "is not on the list of higher-order operators"
        )
    packet = called.overloadpacket if isinstance(called, torch._ops.OpOverload) else called
    space, _, name = packet._qualified_op_name.partition("::")
    if space not in _NAMESPACES:
        return "is not one of torch's own"
    if name in _REFUSED:
        return _REFUSED[name]
    overloads = (
        [called]
        if isinstance(called, torch._ops.OpOverload)
        else [getattr(packet, overload) for overload in packet.overloads()]
    )
    computes = any(_is_of_tensors(overload._schema, name) for overload in overloads)
    return None if computes else "is not an operator of tensors and numbers"


def _is_of_tensors(schema: Any, name: str) -> bool:
    types = {
        word
        for item in (*schema.arguments, *schema.returns)
        for word in re.findall(r"[\w.]+", str(item.type))
    } - {"List", "Optional", "Tuple"}
    return types <= set(_TYPES.split()) and ("Tensor" in types or name in _WITHOUT_TENSORS.split())


_LONG = 40
TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
}

# The source of a node is in its stack trace and modules; these are the tracer's own notes, or follow from `val`.
_NOTES = frozenset({"from_node", "desc", "tensor_meta", "unbacked_bindings", "eager_input_vals"})


class Unwritable(Exception):
    """A value cannot be saved; the message describes it."""


class Encoder:
    """Encodes values, and collects the tables they refer to."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.values: list[Any] = []
        self.symbols: dict[str, list[Any]] = {}
        self.metas: list[Any] = []
        self.dropped: dict[str, str] = {}
        self._meta_numbers: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        # Numbers are assigned by identity, so that numbered objects must stay alive.
        self._alive: list[Any] = []

    def tables(self) -> dict[str, Any]:
        """Return the tables that values refer to by number."""
        return {
            "texts": list(self.texts),
            "symbols": self.symbols,
            "values": self.values,
            "metas": self.metas,
        }

    def value(self, value: Any, nodes: Mapping[Node, int] | None = None) -> Any:
        """Return a value as JSON, with nodes by their numbers; raise Unwritable."""
        if value is None or value is True or value is False or type(value) is int:
            return value
        if isinstance(value, Node):
            if nodes is None or value not in nodes:
                raise Unwritable(f"the node '{value.name}', which is not in its graph")
            return {"n": nodes[value]}
        kind = type(value)
        if kind is float:
            return value if math.isfinite(value) else {"f": repr(value)}
        if kind is str:
            return self._text(value)
        if isinstance(value, torch.Size):
            return {"sz": [self.value(v) for v in value]}
        if isinstance(value, (tuple, list)) and not hasattr(kind, "_fields"):
            items = [self.value(v, nodes) for v in cast("Sequence[Any]", value)]
            return items if isinstance(value, list) else {"t": items}
        if isinstance(value, dict):
            rows = cast("dict[Any, Any]", value).items()
            return {"d": [[self.value(k), self.value(v, nodes)] for k, v in rows]}
        if isinstance(value, (FakeTensor, *SYMBOLIC)):
            return {"v": self._number(value)}
        return self._object(value, nodes)

    def _object(self, value: Any, nodes: Mapping[Node, int] | None) -> Any:
        if isinstance(value, slice):
            return {"sl": [self.value(v, nodes) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, torch._ops.OpOverload):
            return {"op": value.name()}
        if isinstance(value, torch._ops.OpOverloadPacket):
            return {"pk": value._qualified_op_name}
        if isinstance(value, torch._ops.HigherOrderOperator):
            return {"ho": value.name()}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"dev": str(value)}
        if type(value) is complex:
            return {"c": [repr(value.real), repr(value.imag)]}
        if value is Ellipsis:
            return {"e": 0}
        if isinstance(value, bool | int | float | str):
            raise Unwritable(f"a {type(value).__name__}, a subclass of {type(value).__mro__[1].__name__}")
        name = function_name(value) if callable(value) else None
        if name is not None:
            return {"fn": name}
        raise Unwritable(f"a {type(value).__name__}")

    def _text(self, text: str) -> Any:
        if len(text) < _LONG:
            return text
        return {"s": self.texts.setdefault(text, len(self.texts))}

    def _number(self, value: Any) -> int:
        known = self._numbers.get(id(value))
        if known is None:
            row = (
                self._fake(value)
                if isinstance(value, FakeTensor)
                else self._symbolic(describe_symbolic(value))
            )
            self.values.append(row)
            self._alive.append(value)
            known = self._numbers[id(value)] = len(self.values) - 1
        return known

    def _fake(self, value: FakeTensor) -> list[Any]:
        storage, sizes, strides, start, dtype, device, grad, parameter = tensor_row(value, self._storages)

        def encode_size(size: Any) -> Any:
            return self._symbolic(size) if isinstance(size, Symbolic) else size

        return [
            storage,
            [encode_size(s) for s in sizes],
            None if strides is None else [encode_size(s) for s in strides],
            encode_size(start),
            str(dtype).removeprefix("torch."),
            str(device),
            bool(grad),
            parameter,
        ]

    def _symbolic(self, described: Symbolic) -> dict[str, Any]:
        for name, *facts in described.symbols:
            self.symbols.setdefault(name, facts)
        return {"x": [described.kind, described.expr, [name for name, *_ in described.symbols]]}

    def type(self, kind: Any) -> str | None:
        """Return the name of a common type annotation of a node; others are dropped."""
        return next((name for name, known in TYPES.items() if known is kind), None)

    def meta(self, meta: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> int:
        """Return the number of a node's meta, with `extra` entries that are JSON already; drop what cannot be saved."""
        row: dict[str, Any] = {}
        for key, value in meta.items():
            if extra is not None and key in extra:
                row[key] = extra[key]
            elif key not in _NOTES:
                try:
                    row[key] = self._stack(value) if key == "nn_module_stack" else self.value(value)
                except Unwritable as reason:
                    self.dropped.setdefault(key, str(reason))
        key_text = json.dumps(row)
        if key_text not in self._meta_numbers:
            self._meta_numbers[key_text] = len(self.metas)
            self.metas.append(row)
        return self._meta_numbers[key_text]

    def _stack(self, stack: Mapping[str, tuple[str, Any]]) -> Any:
        """Return the module stack of an operation with classes by name, as exporters write it."""
        return self.value(
            {
                key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
                for key, (path, kind) in stack.items()
            }
        )


_ATOM = r"[^.\"'\\{}\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]+"
PATH = re.compile(rf"{_ATOM}(\.{_ATOM})*")
"""The path of an attribute. It is written into generated code, so that it may not contain what ends a string there."""


INPUTS: dict[str, Any] = {
    "tensor": TensorInput,
    "symbol": SymbolInput,
    "constant": ConstantInput,
    "object": ObjectInput,
}
"""The name in a file of each kind of input guard."""


def encode_convention(convention: Convention, encoder: Encoder) -> dict[str, Any]:
    """Return a calling convention as JSON; raise Unwritable if a type cannot be saved."""
    input_guards = convention.input_guards
    return {
        "slots": [_slot(slot, encoder) for slot in convention.slots],
        "in": encode_tree(convention.in_spec),
        "order": list(convention.order),
        "out": encode_tree(convention.out_spec),
        "inputs": [_input(expected, encoder) for expected in input_guards.inputs],
        "ranges": [list(row) for row in input_guards.ranges],
        "solved": [list(row) for row in input_guards.solved],
        "guards": list(input_guards.guards),
        "twins": [list(pair) for pair in input_guards.twins],
        "written": list(input_guards.owned.written),
        "read": list(input_guards.owned.read),
        "function": input_guards.function,
        "graded": list(input_guards.graded),
        "training": convention.training,
        "carried": [[one.slot, one.start, one.count] for one in convention.carried],
        "appended": convention.appended,
    }


def _slot(slot: Slot, encoder: Encoder) -> list[Any]:
    try:
        default = encoder.value(slot.default)
    except Unwritable:
        # Callers that omit the argument do not need its value.
        default = {"missing": 0}
    return [slot.name, int(slot.kind), slot.has_default, default, slot.captured, slot.by_name]


def _input(expected: Any, encoder: Encoder) -> list[Any]:
    kind = next(name for name, known in INPUTS.items() if type(expected) is known)
    return [kind, *(encoder.value(getattr(expected, f.name)) for f in fields(expected))]


def encode_tree(spec: TreeSpec) -> str:
    """Return a tree of arguments or results as torch serializes it."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise Unwritable(
            f"a type among its arguments or results that has no serialized name: {error} "
            f"Register it with `serialized_type_name` (torch.utils._pytree.register_pytree_node)"
        ) from error
