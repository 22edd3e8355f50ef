"""What an operation is called, whatever it was spelled as: `div` for `aten.div.Tensor`, `/`, `.div` and `torch.div`."""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import Any, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail.graph.module import attribute

_OURS = ("aten", "prims")
# Python's words for what ATen calls otherwise.
_RENAMED = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "_threshold": "threshold",
    "logsigmoid": "log_sigmoid",
    "cross_entropy": "cross_entropy_loss",
}
_MODULES = {
    "LeakyReLU": "leaky_relu",
    "LogSigmoid": "log_sigmoid",
    "RMSNorm": "rms_norm",
    "Dropout1d": "feature_dropout",
    "Dropout2d": "feature_dropout",
    "Dropout3d": "feature_dropout",
    "Softmax2d": "softmax",
    "CrossEntropyLoss": "cross_entropy_loss",
    "NLLLoss": "nll_loss",
}


def operation_name(node: Node, root: nn.Module) -> str:
    """The ATen name of what a node calls, "" for a sub-graph, a module of the user's or a higher-order operator.

    An operator of another library is called by its qualified name, `mylib::op`.
    """
    target: Any = node.target
    if node.op == "call_function":
        return function_name(target)
    if node.op == "call_method":
        return _plain(target)
    if node.op == "call_module":
        module = attribute(root, cast("str", target))
        return module_name(module) if isinstance(module, nn.Module) else ""
    return ""


def function_name(target: Any) -> str:
    """The same for a call target alone."""
    if isinstance(target, OpOverload):
        return _plain(target.overloadpacket.__name__) if target.namespace in _OURS else target.name()
    if isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name
        return _plain(target.__name__) if name.partition("::")[0] in _OURS else name
    if isinstance(target, HigherOrderOperator):
        return ""
    module = getattr(target, "__module__", None) or ""
    known = module.partition(".")[0] in ("torch", "operator", "_operator", "math", "builtins", "")
    return _plain(getattr(target, "__name__", "")) if known else ""


def module_name(module: nn.Module) -> str:
    """What a leaf module of torch.nn computes, "" for any other module."""
    kind = type(module)
    if isinstance(module, GraphModule) or not kind.__module__.startswith("torch.nn.modules."):
        return ""
    return _of_class(kind.__name__)


@functools.cache
def _of_class(name: str) -> str:
    if name in _MODULES:
        return _MODULES[name]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    # BatchNorm2d is batch_norm, while Conv2d is conv2d.
    for spelled in (name.lower(), snake, re.sub(r"\d+d$", "", snake)):
        if packet(spelled) is not None:
            return spelled
    return snake


@functools.cache
def _plain(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if packet(name) is None and name.startswith("r"):
            name = name[1:]
    return _RENAMED.get(name, name)


def plain_name(name: str) -> str:
    """What ATen calls an operation that Python or torch has another name for."""
    return _plain(name)


@functools.cache
def operators_of(namespace: str) -> frozenset[str]:
    """The registered operators of a namespace, with and without their overloads; empty where it has none."""
    names: set[str] = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        if space == namespace:
            base, _, overload = rest.partition(".")
            names.update((base, f"{base}.{overload or 'default'}"))
    return frozenset(names)


@functools.cache
def known_names() -> frozenset[str]:
    """Every plain name that an operation can have: of ATen, and of functions, methods and modules of torch."""
    spaces: tuple[Any, ...] = (torch, nn.functional, torch.Tensor, operator, math)
    names = {name for space in spaces for name in dir(space)}
    modules = {_of_class(name) for name in dir(nn) if name[0].isupper()}
    return frozenset({*names, *operators_of("aten"), *operators_of("prims"), *modules, *_MODULES.values()})


def packet(name: str) -> OpOverloadPacket | None:
    """ATen's operator of a name."""
    found = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return found if isinstance(found, OpOverloadPacket) else None
