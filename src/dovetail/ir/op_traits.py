"""Operator traits: what calling a target may do, by its schema, its tags and tables of names.

A target is anything that an FX node may call: an ATen overload, a packet, `torch.relu`, `operator.iadd`, the name of a
Tensor method, `F.dropout`. All of them resolve to `OpTraits`, so that analyses need no lists of names of their own.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail import torch_compat


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What calling a target may do. `parameters` are the names of its arguments, in order.

    It writes, or draws, unless an argument named in `writes_if`, or `random_if`, is false, zero or None.
    """

    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] | None = None
    writes: tuple[str, ...] = ()
    writes_if: tuple[str, ...] = ()
    aliases: tuple[str, ...] | None = ()  # arguments the result may share storage with; None: any of them
    reads_data: bool = True  # False for a view, which depends on the shape of its operand only
    reshapes_in_place: bool = False
    random: bool = False
    random_if: tuple[str, ...] = ()
    host_effect: str = ""
    barrier: bool = False
    opaque: bool = False  # may do anything: write its arguments, draw, act on the host
    higher_order: bool = False
    pointwise: bool = False
    returns_tuple: bool = False  # returns a tuple or list
    gathers: bool = False  # of lists, returns a list that holds the same tensors
    composite: bool = False  # decomposes: its result may be an operand, schema or not
    pure: bool = False  # computes a new value and does nothing else, whatever the arguments

    def argument(self, node: Node, name: str) -> Any:
        """Return the argument of this name at a call, its default if it is not given."""
        if name in node.kwargs:
            return node.kwargs[name]
        if name in self.parameters:
            index = self.parameters.index(name)
            if index < len(node.args):
                return node.args[index]
        return (self.defaults or {}).get(name)

    def writes_at(self, node: Node) -> bool:
        return bool(self.writes) and self._holds(self.writes_if, node)

    def draws_at(self, node: Node) -> bool:
        return self.random and self._holds(self.random_if, node)

    def _holds(self, names: tuple[str, ...], node: Node) -> bool:
        for name in names:
            if name not in self.parameters and name not in node.kwargs:
                continue
            value = self.argument(node, name)
            # An argument that is computed may have any value, and native_dropout(train=None) means train.
            if not isinstance(value, Node) and not value and not (value is None and name == "train"):
                return False
        return True


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COLLECTIVES = _names("_c10d_functional _c10d_functional_autograd c10d_functional c10d symm_mem _dtensor")
_ASSERTS = _names(
    """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
    sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _async_error
    """
)

# Schemas that do not declare the running statistics they update.
_UPDATES_STATISTICS = _names(
    "batch_norm native_batch_norm instance_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index"
)
_UNDECLARED_VIEWS = _names("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk")
_UNTAGGED_RANDOM = frozenset({"_no_grad_normal_", "_no_grad_uniform_"})


# An unknown target may do anything.
_OPAQUE = OpTraits(host_effect="an unknown Python call", opaque=True, aliases=None)
_PURE = OpTraits(pure=True)
_PRINT = OpTraits(host_effect="a print")
_ASSERTION = OpTraits(host_effect="an assertion")
_HIGHER_ORDER = OpTraits(higher_order=True, aliases=None)


def overload_traits(op: OpOverload) -> OpTraits:
    """Return the traits of an operator, by its schema, its tags and the effect it is registered with."""
    traits = _schema_traits(op)
    # Effects may be registered at any time, unlike the schema: looked up each time.
    if not traits.host_effect and op.namespace not in ("aten", "prim", "prims") and _is_effectful(op):
        return replace(traits, host_effect="registered as effectful", pure=False)
    return traits


@functools.cache
def _schema_traits(op: OpOverload) -> OpTraits:
    schema = op._schema
    namespace, _, rest = op.name().partition("::")
    name = rest.partition(".")[0]
    parameters = tuple(a.name for a in schema.arguments)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    returned = {s for r in schema.returns if r.alias_info is not None for s in r.alias_info.before_set}
    # An argument that becomes part of a list of views, as that of split, is annotated in its after set.
    aliases: tuple[str, ...] | None = tuple(
        a.name
        for a in schema.arguments
        if a.alias_info is not None and (a.alias_info.before_set & returned or "*" in a.alias_info.after_set)
    )
    writes_if: tuple[str, ...] = ()
    if namespace == "aten" and name in _UPDATES_STATISTICS:
        writes, writes_if = ("running_mean", "running_var"), ("training", "use_input_stats")
    if name in _UNDECLARED_VIEWS:
        aliases = ("self",)
    if name == "set_" and "source" in parameters:
        aliases = ("self", "source")
    if namespace in _COLLECTIVES and name == "wait_tensor":
        # Until then the result may not be read: it counts as written by the wait.
        writes = aliases = parameters[:1]
    tags = set(op.tags)
    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if torch_compat.ALIASING_TAG.value in tags and not aliases:
        # Its result may be the operand itself; fake values of a decomposition may not show it.
        aliases = tuple(a.name for a in schema.arguments if "Tensor" in str(a.type))
    random = torch.Tag.nondeterministic_seeded in tags or name in _UNTAGGED_RANDOM
    random_if = tuple(p for p in ("train", "training", "dropout_p", "dropout") if p in parameters)
    host_effect = _host_effect(namespace, name, has_results=bool(schema.returns), writes=bool(writes))
    returns_tuple = len(schema.returns) > 1 or any(str(r.type).startswith("List[") for r in schema.returns)
    makes_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    return OpTraits(
        parameters=parameters,
        defaults=defaults,
        writes=writes,
        writes_if=writes_if,
        aliases=aliases if makes_tensors else (),
        # Autograd refuses views out of a list after a write to their base: they must not be moved behind one.
        reads_data=not aliases or composite or bool(writes) or returns_tuple,
        reshapes_in_place=torch.Tag.inplace_view in tags,
        random=random,
        random_if=random_if,
        host_effect=host_effect,
        pointwise=torch.Tag.pointwise in tags,
        returns_tuple=returns_tuple,
        composite=composite and makes_tensors,
        pure=not (writes or random or host_effect or aliases or (composite and makes_tensors)),
    )


def _host_effect(namespace: str, name: str, *, has_results: bool, writes: bool) -> str:
    if namespace in _COLLECTIVES:
        return "a collective"
    if name in _ASSERTS:
        return "an assertion"
    if name == "_print":
        return "a print"
    if not has_results and not writes:
        return "an effect: it returns nothing"
    return ""


def _is_effectful(op: OpOverload) -> bool:
    effect_of = torch_compat.EFFECT_OF_OPERATOR.value
    return effect_of is not None and effect_of(op) is not None


@functools.cache
def packet_traits(packet: OpOverloadPacket) -> OpTraits:
    """Return the union of the traits of all overloads; one that writes `out` counts only where `out` is given."""
    overloads = [getattr(packet, o) for o in packet.overloads()]
    # Overloads of TorchScript for numbers and lists are included, but not registered with the dispatcher.
    each = [overload_traits(o) for o in overloads if torch._C._dispatch_has_kernel(o.name())]
    if not each:
        return _OPAQUE
    each = [t for t in each if "out" not in t.writes] or each
    first = each[0]
    parameters = max((t.parameters for t in each), key=len)
    aliases = {"out"}
    for t in each:
        aliases.update(t.aliases or ())
    unions = ("reads_data", "reshapes_in_place", "random", "composite")
    traits = {field: any(getattr(t, field) for t in each) for field in unions}
    writes = tuple(dict.fromkeys(w for t in each for w in t.writes))
    return OpTraits(
        parameters=parameters,
        defaults={k: v for t in reversed(each) for k, v in (t.defaults or {}).items()},
        writes=(*writes, "out"),
        writes_if=first.writes_if,
        aliases=tuple(sorted(aliases)),
        random_if=first.random_if,
        host_effect=first.host_effect,
        pointwise=all(t.pointwise for t in each),
        returns_tuple=all(t.returns_tuple for t in each),
        pure=False,
        **traits,
    )


_IN_PLACE_OPERATORS = _names(
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift iconcat"
)
_NUMBER_BUILTINS = frozenset({len, int, float, bool, slice, range, isinstance, type, str, complex})

# The result of these may be one of the operands, or hold it.
_GATHERING_BUILTINS = frozenset(
    {tuple, list, dict, zip, sorted, max, min, sum, abs, round, divmod, pow, all, any}
)
_MODE_SWITCHES = _names(
    """
    _set_grad_enabled set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode
    _exit_inference_mode _autograd_set_grad_enabled _vmap_increment_nesting _vmap_decrement_nesting
    _grad_increment_nesting _grad_decrement_nesting _record_function_enter_new set_stream
    """
)
_CHECKS = _names("_assert _check _check_is_size _check_value _check_with _check_index")

_DROPOUTS = _names("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu")
_ALWAYS_RANDOM = _names(
    """
    gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices
    """
)

# Python functions of torch.nn.functional, by the argument that makes them draw or write.
_FUNCTIONAL: dict[str, dict[str, Any]] = {
    **{name: {"random": True, "random_if": ("training",)} for name in _DROPOUTS},
    **{name: {"random": True} for name in _ALWAYS_RANDOM},
    "multi_head_attention_forward": {"random": True, "random_if": ("training", "dropout_p")},
    "scaled_dot_product_attention": {"random": True, "random_if": ("dropout_p",)},
    "batch_norm": {"writes": ("running_mean", "running_var"), "writes_if": ("training",)},
    "instance_norm": {"writes": ("running_mean", "running_var"), "writes_if": ("use_input_stats",)},
    "embedding": {"writes": ("weight",), "writes_if": ("max_norm",)},
    "embedding_bag": {"writes": ("weight",), "writes_if": ("max_norm",)},
}


def function_traits(function: Any) -> OpTraits:
    """Return the traits of a Python callable; an unknown one may do anything."""
    module = getattr(function, "__module__", None) or ""
    # A cache of all functions would keep those of users alive.
    known = module.partition(".")[0] in ("torch", "operator", "_operator", "math", "builtins", "")
    return _known_function_traits(function) if known else _OPAQUE


@functools.cache
def _known_function_traits(function: Any) -> OpTraits:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if function is operator.getitem or function is getattr:
        return OpTraits(aliases=None, reads_data=function is operator.getitem)
    if function is operator.setitem or function is operator.delitem:
        return OpTraits(("self", "index", "value"), writes=("self",), aliases=("self",))
    if module in ("_operator", "operator"):
        if name in _IN_PLACE_OPERATORS:
            return OpTraits(("self", "other"), writes=("self",), aliases=("self",), pointwise=True)
        if name == "pos":
            return OpTraits(("self",), aliases=("self",))
        if name in ("add", "mul", "concat"):
            return OpTraits(pointwise=True, gathers=True)
        return OpTraits(pointwise=name != "matmul", pure=True)
    if module == "math" or function in _NUMBER_BUILTINS:
        return _PURE
    if function in _GATHERING_BUILTINS:
        return OpTraits(aliases=None)
    if name in _MODE_SWITCHES and module.startswith("torch"):
        return OpTraits(barrier=True, host_effect="a switch of modes")
    if function is print:
        return _PRINT
    if name in _CHECKS and module.startswith("torch"):
        return _ASSERTION
    if (module.startswith("torch") and name.startswith("sym_")) or name.startswith("_sym_"):
        return _PURE
    if getattr(F, name, None) is function and isinstance(function, types.FunctionType):
        return _functional(name, function)
    packet = _packet(name)
    if packet is not None and isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return packet_traits(packet)
    if getattr(torch, name, None) is function and packet is not None:
        return packet_traits(packet)
    return _OPAQUE


def _functional(name: str, function: Any) -> OpTraits:
    inner = getattr(function, "__wrapped__", function)
    code = inner.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = inner.__defaults__ or ()
    defaults = dict(zip(parameters[code.co_argcount - len(values) : code.co_argcount], values, strict=True))
    defaults.update(inner.__kwdefaults__ or {})
    traits = dict(_FUNCTIONAL.get(name, {}))
    if "inplace" in parameters and "writes" not in traits:
        traits.update(writes=(parameters[0],), writes_if=("inplace",))
    elif name.endswith("_"):
        traits.update(writes=(parameters[0],))
    return OpTraits(parameters, defaults, aliases=None, **traits)


def _packet(name: str) -> OpOverloadPacket | None:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return packet if isinstance(packet, OpOverloadPacket) else None


_NUMBER_METHODS = _names(
    """
    size dim numel stride storage_offset element_size ndimension item tolist nelement is_contiguous get_device
    is_floating_point is_complex data_ptr __len__ __bool__ __int__ __float__ is_cuda is_signed
    """
)

# Methods of Tensor that are not operators and only return a value, which may be the tensor itself.
_VALUE_METHODS = _names(
    """
    float double half bfloat16 int long short char byte bool cpu cuda type to split unique unique_consecutive
    unflatten norm stft istft lu new_tensor new expand_as view_as reshape_as type_as numpy refine_names
    align_to rename contiguous
    """
)


@functools.cache
def method_traits(name: str) -> OpTraits:
    """Return the traits of a Tensor method; one that torch does not have may do anything."""
    if name in _NUMBER_METHODS:
        return _PURE
    if name == "backward":
        # It writes gradients of tensors that no argument names.
        return OpTraits(host_effect="a backward pass", barrier=True, opaque=True, aliases=None)
    packet = _packet(name)
    if packet is not None:
        return packet_traits(packet)
    if name in ("__setitem__", "__delitem__"):
        return function_traits(operator.setitem)
    if name == "__getitem__":
        return function_traits(operator.getitem)
    operator_name = name.removeprefix("__").removesuffix("__")
    if name.startswith("__i") and operator_name in _IN_PLACE_OPERATORS:
        return OpTraits(("self",), writes=("self",), aliases=("self",))
    if name in _VALUE_METHODS or (
        name.startswith("__") and hasattr(operator, operator_name.removeprefix("r"))
    ):
        return OpTraits(aliases=None)
    return _OPAQUE


def traits_of(node: Node) -> OpTraits:
    """Return the traits of a call's target. Module calls and higher-order operators need more than their target."""
    target: Any = node.target
    if node.op == "call_method":
        return method_traits(target)
    if isinstance(target, OpOverload):
        return overload_traits(target)
    if isinstance(target, OpOverloadPacket):
        return packet_traits(target)
    if isinstance(target, HigherOrderOperator):
        return _PRINT if target.name() == "print" else _HIGHER_ORDER
    return function_traits(target)


def target_name(node: Node) -> str:
    """Return the name of a node's target, the same in every process: `aten.add.Tensor`, `torch.relu`, `.view`."""
    target: Any = node.target
    if isinstance(target, str):
        return f".{target}" if node.op == "call_method" else target
    return qualified_name(target)


def qualified_name(target: Any) -> str:
    """Return the name of an operator or function, the same in every process."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", None) or getattr(
        getattr(target, "__self__", None), "__module__", "torch"
    )
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    name = name.removeprefix("_VariableFunctionsClass.").removeprefix("_VariableFunctions.")
    return f"{'operator' if module == '_operator' else module}.{name}"


_COMMUTATIVE = _names(
    """
    add mul eq ne maximum minimum max min fmax fmin logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor and_ or_ xor hypot logaddexp logaddexp2 __and__ __or__ __xor__ __add__ __mul__ __radd__ __rmul__
    """
)


def base_name(node: Node) -> str:
    """Return the name of a call's target without namespace and overload: `add` for an operator, function or method."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    return str(getattr(getattr(target, "overloadpacket", None) or target, "__name__", ""))


def is_commutative(node: Node) -> bool:
    """Whether the first two operands may be swapped without changing the value."""
    if node.op not in ("call_function", "call_method") or base_name(node) not in _COMMUTATIVE:
        return False
    if len(node.args) < 2 or (len(node.args) > 2 and node.args[2] != 1):
        return False
    if node.kwargs.get("alpha", 1) != 1:
        return False
    if base_name(node) in ("max", "min") and not all(isinstance(a, Node) for a in node.args):
        return False  # the second is a dim
    return traits_of(node).writes in ((), ("out",))


_ARITHMETIC = frozenset(
    getattr(operator, name)
    for name in _names("getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_ not_")
)
MAY_RETURN_OPERAND = _names(
    """
    view reshape _unsafe_view expand permute transpose t slice squeeze unsqueeze alias flatten unflatten
    expand_as view_as contiguous to lift_fresh numpy_T movedim swapaxes narrow as_strided dropout
    """
)
"""Operations that change nothing for some arguments. Not `detach`: autograd distinguishes it from its operand."""


def is_removable(node: Node) -> bool:
    """Whether a node may be dropped when nothing reads its result, by its target alone.

    Only arithmetic of Python and operators of torch are: others may have effects that no schema declares.
    """
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        is_arithmetic = target in _ARITHMETIC or getattr(target, "__module__", "") == "math"
        return node.op == "get_attr" or (node.op == "call_function" and is_arithmetic)
    traits, schema = overload_traits(target), target._schema
    writes = schema.is_mutable or not schema.returns or traits.writes_at(node)
    has_effect = writes or traits.random or bool(traits.host_effect)
    return target.namespace in ("aten", "prims") and not has_effect
