"""What a call target does, however it is spelled.

A target is whatever an FX node may call: an ATen overload, a packet, `torch.relu`, `operator.iadd`, the name of a
Tensor method, `F.dropout`. All of them resolve to `Traits`, so that analyses need no second list of names.
"""

from __future__ import annotations

import builtins
import functools
import math
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
_PURE_BUILTINS = frozenset(
    {
        *(
            getattr(builtins, n)
            for n in [
                "len",
                "int",
                "float",
                "bool",
                "abs",
                "max",
                "min",
                "sum",
                "slice",
                "tuple",
                "list",
                "range",
                "round",
            ]
        ),
        *(
            getattr(builtins, n)
            for n in [
                "isinstance",
                "type",
                "str",
                "dict",
                "zip",
                "complex",
                "divmod",
                "pow",
                "all",
                "any",
                "sorted",
            ]
        ),
    }
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


@functools.cache
def of_function(function: Any) -> Traits:
    """What a Python callable does; one we know nothing of may do anything."""
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
        return _python(_named(function), pointwise=name != "matmul", plain=True)
    if module == "math" or function in (math.sqrt, math.ceil) or function in _PURE_BUILTINS:
        return _python(_named(function), plain=True)
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


_PURE_METHODS = frozenset(
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
        "backward_hooks",
        "is_cuda",
    ]
)


@functools.cache
def of_method(name: str) -> Traits:
    """What a Tensor method of this name does; one that torch does not have may do anything."""
    if name in _PURE_METHODS:
        return _python(name, plain=True)
    packet = _packet(name)
    if packet is not None:
        return of_packet(packet)
    if name in ("__setitem__", "__delitem__"):
        return of_function(operator.setitem)
    if name == "__getitem__":
        return of_function(operator.getitem)
    if hasattr(torch.Tensor, name):
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or (
            name.startswith("__i") and name[3:-2] in ("add", "sub", "mul", "truediv", "pow")
        )
        return _python(name, parameters=("self",), writes=("self",) if in_place else (), aliases=None)
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
