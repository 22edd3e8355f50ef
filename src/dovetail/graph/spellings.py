"""What a call target does, however it is spelled.

A target is whatever an FX node may call: an ATen overload, a packet, `torch.relu`, `operator.iadd`, the name of a
Tensor method, `F.dropout`. All of them resolve to `Traits`, so that analyses need no second list of names.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail.graph.operators import Flag, Traits, of_overload, of_packet, unknown


def _python(name: str, **facts: Any) -> Traits:
    return Traits(name=name, **facts)


def _named(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or ''}.{getattr(function, '__name__', repr(function))}"


_IN_PLACE_OPERATORS = frozenset(
    f"i{name}"
    for name in (
        "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()  # noqa: SIM905
    )
)
_NUMBER_BUILTINS = frozenset({len, int, float, bool, slice, range, isinstance, type, str, complex})
# What these return may be one of the tensors they were given, or hold it.
_GATHERING_BUILTINS = frozenset(
    {tuple, list, dict, zip, sorted, max, min, sum, abs, round, divmod, pow, all, any}
)
_MODE_SWITCHES = frozenset(
    {
        "_set_grad_enabled",
        "set_grad_enabled",
        "_enter_autocast",
        "_exit_autocast",
        "_enter_inference_mode",
        "_exit_inference_mode",
        "_autograd_set_grad_enabled",
        "_vmap_increment_nesting",
        "_vmap_decrement_nesting",
        "_grad_increment_nesting",
        "_grad_decrement_nesting",
        "_record_function_enter_new",
        "set_stream",
    }
)
_CHECKS = frozenset({"_assert", "_check", "_check_is_size", "_check_value", "_check_with", "_check_index"})
# Python functions of torch.nn.functional, by the argument that makes them draw or write.
_FUNCTIONAL: dict[str, dict[str, Any]] = {
    **{
        name: {"random": True, "random_if": Flag(("training",))}
        for name in (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
            "rrelu",
        )
    },
    "gumbel_softmax": {"random": True},
    "fractional_max_pool2d": {"random": True},
    "fractional_max_pool3d": {"random": True},
    "fractional_max_pool2d_with_indices": {"random": True},
    "fractional_max_pool3d_with_indices": {"random": True},
    "multi_head_attention_forward": {"random": True, "random_if": Flag(("training", "dropout_p"))},
    "scaled_dot_product_attention": {"random": True, "random_if": Flag(("dropout_p",))},
    "batch_norm": {"writes": ("running_mean", "running_var"), "writes_if": Flag(("training",))},
    "instance_norm": {"writes": ("running_mean", "running_var"), "writes_if": Flag(("use_input_stats",))},
    "embedding": {"writes": ("weight",), "writes_if": Flag(("max_norm",))},
    "embedding_bag": {"writes": ("weight",), "writes_if": Flag(("max_norm",))},
}


def of_function(function: Any) -> Traits:
    """What a Python callable does; one we know nothing of may do anything."""
    module = getattr(function, "__module__", None) or ""
    # A cache of everything ever asked about would keep users' functions alive.
    known = module.partition(".")[0] in ("torch", "operator", "_operator", "math", "builtins", "")
    return _of_known_function(function) if known else unknown(_named(function))


@functools.cache
def _of_known_function(function: Any) -> Traits:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if function is operator.getitem or function is getattr:
        return _python(_named(function), aliases=None, looks=function is operator.getitem)
    if function is operator.setitem or function is operator.delitem:
        return _python(
            _named(function), parameters=("self", "index", "value"), writes=("self",), aliases=("self",)
        )
    if module in ("_operator", "operator"):
        if name in _IN_PLACE_OPERATORS:
            return _python(
                _named(function),
                parameters=("self", "other"),
                writes=("self",),
                aliases=("self",),
                pointwise=True,
            )
        if name == "pos":
            return _python(_named(function), parameters=("self",), aliases=("self",))
        if name in ("add", "mul", "concat"):
            return _python(_named(function), pointwise=True, gathers=True)
        return _python(_named(function), pointwise=name != "matmul", plain=True)
    if module == "math" or function in _NUMBER_BUILTINS:
        return _python(_named(function), plain=True)
    if function in _GATHERING_BUILTINS:
        return _python(_named(function), aliases=None)
    if name in _MODE_SWITCHES and module.startswith("torch"):
        return _python(_named(function), barrier=True, world="a switch of modes")
    if function is print:
        return _python("print", world="a print")
    if name in _CHECKS and module.startswith("torch"):
        return _python(_named(function), world="an assertion")
    if (module.startswith("torch") and name.startswith("sym_")) or name.startswith("_sym_"):
        return _python(_named(function), plain=True)
    if getattr(F, name, None) is function and isinstance(function, types.FunctionType):
        return _functional(name, function)
    packet = _packet(name)
    if packet is not None and isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return of_packet(packet)
    if getattr(torch, name, None) is function and packet is not None:
        return of_packet(packet)
    return unknown(_named(function))


def _functional(name: str, function: Any) -> Traits:
    inner = getattr(function, "__wrapped__", function)
    code = inner.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = inner.__defaults__ or ()
    defaults = dict(zip(parameters[code.co_argcount - len(given) : code.co_argcount], given, strict=True))
    defaults.update(inner.__kwdefaults__ or {})
    facts = dict(_FUNCTIONAL.get(name, {}))
    if "inplace" in parameters and "writes" not in facts:
        facts.update(writes=(parameters[0],), writes_if=Flag(("inplace",)))
    elif name.endswith("_"):
        facts.update(writes=(parameters[0],))
    return Traits(
        name=f"torch.nn.functional.{name}", parameters=parameters, defaults=defaults, aliases=None, **facts
    )


def _packet(name: str) -> OpOverloadPacket | None:
    found = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return found if isinstance(found, OpOverloadPacket) else None


_NUMBER_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "stride",
        "storage_offset",
        "element_size",
        "ndimension",
        "item",
        "tolist",
        "nelement",
        "is_contiguous",
        "get_device",
        "is_floating_point",
        "is_complex",
        "data_ptr",
        "__len__",
        "__bool__",
        "__int__",
        "__float__",
        "is_cuda",
        "is_signed",
    ]
)
# Methods that Tensor has beside its operators and that do nothing but return a value, perhaps the tensor itself.
_VALUE_METHODS = frozenset(
    [
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "short",
        "char",
        "byte",
        "bool",
        "cpu",
        "cuda",
        "type",
        "to",
        "split",
        "unique",
        "unique_consecutive",
        "unflatten",
        "norm",
        "stft",
        "istft",
        "lu",
        "new_tensor",
        "new",
        "expand_as",
        "view_as",
        "reshape_as",
        "type_as",
        "numpy",
        "refine_names",
        "align_to",
        "rename",
        "contiguous",
    ]
)


@functools.cache
def of_method(name: str) -> Traits:
    """What a Tensor method of this name does; one that torch does not have may do anything."""
    if name in _NUMBER_METHODS:
        return _python(name, plain=True)
    if name == "backward":
        # It writes gradients of tensors that no argument names.
        return _python(name, world="a backward pass", barrier=True, opaque=True, aliases=None)
    packet = _packet(name)
    if packet is not None:
        return of_packet(packet)
    if name in ("__setitem__", "__delitem__"):
        return of_function(operator.setitem)
    if name == "__getitem__":
        return of_function(operator.getitem)
    operator_name = name.removeprefix("__").removesuffix("__")
    if name.startswith("__i") and operator_name in _IN_PLACE_OPERATORS:
        return _python(name, parameters=("self",), writes=("self",), aliases=("self",))
    if name in _VALUE_METHODS or (
        name.startswith("__") and hasattr(operator, operator_name.removeprefix("r"))
    ):
        return _python(name, aliases=None)
    return unknown(name)


def traits(node: Node) -> Traits:
    """What the target of a call does. Module calls and higher-order operators need more than their target."""
    target: Any = node.target
    if node.op == "call_method":
        return of_method(target)
    if isinstance(target, OpOverload):
        return of_overload(target)
    if isinstance(target, OpOverloadPacket):
        return of_packet(target)
    if isinstance(target, HigherOrderOperator):
        return _higher_order(target)
    return of_function(target)


@functools.cache
def _higher_order(target: HigherOrderOperator) -> Traits:
    if target.name() == "print":
        return Traits(name="print", world="a print")
    return Traits(name=target.name(), higher_order=True, aliases=None)


def target_name(node: Node) -> str:
    """The name of what a node calls, the same in every process: `aten.add.Tensor`, `torch.relu`, `.view`."""
    target: Any = node.target
    if isinstance(target, str):
        return f".{target}" if node.op == "call_method" else target
    return qualified_name(target)


def qualified_name(target: Any) -> str:
    """The name of an operator or function, the same in every process."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", None) or getattr(
        getattr(target, "__self__", None), "__module__", "torch"
    )
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    name = name.removeprefix("_VariableFunctionsClass.").removeprefix("_VariableFunctions.")
    return f"{'operator' if module == '_operator' else module}.{name}"
