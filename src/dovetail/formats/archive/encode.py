"""Values of a graph as JSON: arguments, meta, fake tensors and symbolic sizes, without code and without pickle.

What JSON has no form for is an object with one short key that says what it is: `{"t": [...]}` is a tuple. Fake tensors,
long texts and equal metas are written once, in tables, and named by their number.
"""

from __future__ import annotations

import builtins
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.fx import Node

from dovetail.errors import InvalidArgument
from dovetail.ir.tensor_spec import Symbolic, describe_symbolic, tensor_row

ATTRIBUTES = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "requires_grad",
        "is_cuda",
    )
)
"""What `getattr` may ask a value for: traced code asks tensors for these, and nothing else may be reached with it."""
_OPERATORS = """
    getitem setitem add sub mul truediv floordiv mod pow matmul neg pos abs invert not_ and_ or_ xor lshift rshift
    eq ne lt le gt ge iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor is_ is_not truth index contains
"""
_BUILTINS = "abs bool float getattr int len max min pow round sum"
_SPACES = ("torch", "torch.nn.functional", "torch.functional", "torch.linalg", "torch.special", "torch.fft")


@functools.cache
def _plain() -> dict[str, Any]:
    """What every graph may have: arithmetic, and what exporters write of symbolic sizes and modes."""
    found: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    found |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS.split()}
    found |= {
        f"math.{name}": value for name, value in vars(math).items() if callable(value) and name[0] != "_"
    }
    found |= {
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if name.startswith(("sym_", "_sym_")) and callable(value)
    }
    found["torch._C._set_grad_enabled"] = torch._C._set_grad_enabled
    for name in ("_enter_autocast", "_exit_autocast"):
        found[f"torch.amp.autocast_mode.{name}"] = getattr(autocast_mode, name)
    return found


@functools.cache
def _of_tensors() -> dict[str, Any]:
    """torch's own functions of tensors and those that make them: what a tracer writes that keeps them as they are."""
    # All that torch generates from its operators; one of them reads any file that it is told to.
    found: dict[str, Any] = {
        f"torch.{name}": getattr(torch, name)
        for name in dir(vars(torch._C)["_VariableFunctions"])
        if not name.startswith("_") and name != "from_file" and hasattr(torch, name)
    }
    listed = torch.overrides.get_overridable_functions()
    known = {id(function) for functions in listed.values() for function in functions}
    for space in _SPACES:
        module = functools.reduce(getattr, space.split(".")[1:], torch)
        for name, value in vars(module).items():
            if id(value) in known and callable(value):
                found[f"{space}.{name}"] = value
    found["torch._assert"] = torch._assert
    return found


@functools.cache
def _names() -> dict[int, str]:
    named: dict[int, str] = {}
    for name, function in (*_plain().items(), *_of_tensors().items()):
        named.setdefault(id(function), name)
    return named


def name_of(function: Any) -> str | None:
    """The name a function goes by in a file; None if a graph that calls it cannot be saved."""
    return _names().get(id(function))


def function_named(name: str) -> Callable[..., Any] | None:
    """The function of a name; None if no graph in a file may call it."""
    return _plain().get(name) or _of_tensors().get(name)


def is_method(name: str) -> bool:
    """Whether tensors have a method of this name that a graph in a file may call."""
    return (
        name.isidentifier()
        and not name.startswith("_")
        and name not in _METHODS_REFUSED.split()
        and callable(getattr(torch.Tensor, name, None))
    )


# They call a function that they are given, give access to memory itself, or share it with other processes.
_METHODS_REFUSED = """
    apply_ map_ map2_ as_subclass register_hook register_post_accumulate_grad_hook module_load share_memory_ storage
    untyped_storage data_ptr const_data_ptr from_file
"""
_NAMESPACES = frozenset({"aten", "prims"})

# TorchScript keeps its own builtins among the operators of ATen (text, dicts, files, random state): they have arguments
# of other types, or no tensor at all.
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

# Control flow and modes around graphs that are in the file too. Others hold compiled code, or call what they are given.
_HIGHER_ORDER = """
    cond while_loop while_loop_stack_output scan associative_scan map map_impl wrap wrap_with_set_grad_enabled
    wrap_with_autocast wrap_activation_checkpoint tag_activation_checkpoint auto_functionalized auto_functionalized_v2
    out_dtype invoke_subgraph hints_wrapper strict_mode flex_attention flex_attention_backward with_effects
    run_and_save_rng_state run_with_rng_state
    """


class Trust:
    """Which operators a file may name beside those on the list: all, or those of these names or namespaces."""

    def __init__(self, trust: bool | Collection[str]) -> None:
        listed: Any = () if isinstance(trust, bool) else trust
        is_listing = isinstance(listed, Collection) and not isinstance(listed, str)
        if not is_listing or not all(isinstance(name, str) for name in cast("Collection[Any]", listed)):
            raise InvalidArgument(
                f"trust={trust!r} is neither True nor a collection of operators ('acme::mix') or namespaces ('acme')."
            )
        self._all, self._names = trust is True, frozenset(map(plain_name, listed))

    def permits(self, name: str) -> bool:
        """Whether an operator of a qualified name is trusted, whatever its overload."""
        qualified = plain_name(name)
        return self._all or qualified in self._names or qualified.split("::")[0] in self._names


def plain_name(name: str) -> str:
    """`acme::mix` for an operator however it is written, `acme` for a namespace."""
    space, _, rest = name.removeprefix("torch.ops.").replace("::", ".").partition(".")
    return f"{space}::{rest.split('.')[0]}" if rest else space


def why_not_call(called: Any) -> str | None:
    """Why a graph in a file may not call an operator without being trusted; None if it may."""
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
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
}

# Where a node came from is told by its stack trace and modules; these are the tracer's own notes, or follow from `val`.
_NOTES = frozenset({"from_node", "desc", "tensor_meta", "unbacked_bindings", "eager_input_vals"})


class Unwritable(Exception):
    """A value has no form in a file; the text says which and why."""


class Encoder:
    """Writes values, and keeps the tables they refer to."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.values: list[Any] = []
        self.symbols: dict[str, list[Any]] = {}
        self.metas: list[Any] = []
        self.dropped: dict[str, str] = {}
        self._meta_numbers: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        # A number is given by identity: what has one must not make room for another.
        self._kept: list[Any] = []

    def tables(self) -> dict[str, Any]:
        """What values refer to by number."""
        return {
            "texts": list(self.texts),
            "symbols": self.symbols,
            "values": self.values,
            "metas": self.metas,
        }

    def value(self, value: Any, nodes: Mapping[Node, int] | None = None) -> Any:
        """A value as JSON; nodes by their numbers. Raises Unwritable."""
        if value is None or value is True or value is False or type(value) is int:
            return value
        if isinstance(value, Node):
            if nodes is None or value not in nodes:
                raise Unwritable(f"the node '{value.name}', which is none of its graph")
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
            raise Unwritable(
                f"a {type(value).__name__}, which is more than a plain {type(value).__mro__[1].__name__}"
            )
        name = name_of(value) if callable(value) else None
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
            self._kept.append(value)
            known = self._numbers[id(value)] = len(self.values) - 1
        return known

    def _fake(self, value: FakeTensor) -> list[Any]:
        storage, sizes, strides, start, dtype, device, grad, parameter = tensor_row(value, self._storages)

        def plain(size: Any) -> Any:
            return self._symbolic(size) if isinstance(size, Symbolic) else size

        return [
            storage,
            [plain(s) for s in sizes],
            None if strides is None else [plain(s) for s in strides],
            plain(start),
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
        """The name of a node's type where it is a common one; others only annotate."""
        return next((name for name, known in TYPES.items() if known is kind), None)

    def meta(self, meta: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> int:
        """The number of a node's meta, with `extra` entries that are JSON already. What has no form is left out."""
        row: dict[str, Any] = {}
        for key, value in meta.items():
            if extra is not None and key in extra:
                row[key] = extra[key]
            elif key not in _NOTES:
                try:
                    row[key] = self._stack(value) if key == "nn_module_stack" else self.value(value)
                except Unwritable as reason:
                    self.dropped.setdefault(key, str(reason))
        told = json.dumps(row)
        if told not in self._meta_numbers:
            self._meta_numbers[told] = len(self.metas)
            self.metas.append(row)
        return self._meta_numbers[told]

    def _stack(self, stack: Mapping[str, tuple[str, Any]]) -> Any:
        """The modules that an operation comes from, classes by their names, as exporters write them."""
        return self.value(
            {
                key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
                for key, (path, kind) in stack.items()
            }
        )


_ATOM = r"[^.\"'\\{}\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]+"
PATH = re.compile(rf"{_ATOM}(\.{_ATOM})*")
"""Where a graph keeps something: it is written into generated code, so what ends a text there has no place in it."""
