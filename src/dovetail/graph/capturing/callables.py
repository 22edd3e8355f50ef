"""Functions, methods and partials as modules, so that what they close over keeps its identity."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from dovetail.errors import CaptureError, InvalidArgument
from dovetail.graph.capturing import specs


def refuse_distributed(model: nn.Module) -> None:
    """CaptureError for a model that communicates around its calls, or whose parameters are spread over processes."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = tuple(
        getattr(fsdp, name) for name in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, name)
    )
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    for path, module in model.named_modules():
        where = f"'{path}' of the model" if path else "the model"
        # The hooks with which `fully_shard` gathers parameters run around the calls of a compiled module.
        gathered = not path and isinstance(module, sharded[:1]) and not module._forward_pre_hooks
        if isinstance(module, (*parallel, *sharded)) and not gathered:
            wrapper = "fully_shard" if isinstance(module, sharded[:1]) else type(module).__name__
            raise CaptureError(
                f"{where} is wrapped by {wrapper}, which communicates around each call; a graph cannot hold that. Compile "
                f"what is wrapped instead: {wrapper}(dovetail.compile(model))."
            )
        for name, parameter in module._parameters.items():
            if tensors is not None and isinstance(parameter, getattr(tensors, "DTensor", ())):
                raise CaptureError(
                    f"'{name}' of {where} is a DTensor, spread over several processes; a graph of dovetail is for one. "
                    f"Compile the modules before they are sharded."
                )


def refuse_scripted(model: Any) -> None:
    """InvalidArgument for a model that is, or holds, compiled by TorchScript, which no tracer sees into."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            what = f"'{path}' of the model" if path else "the model"
            raise InvalidArgument(
                f"{what} is a {type(module).__name__} of TorchScript, whose operations cannot be traced. Give the Python "
                f"module that torch.jit.script or torch.jit.trace was called with, or run it as it is."
            )


def signature_of(model: Callable[..., Any], positional: int, keywords: Sequence[str]) -> inspect.Signature:
    """The signature a model is called by; where it has none to show, that of the example call."""
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        names = [f"arg{i}" for i in range(positional)]
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        rest = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
        return inspect.Signature([*first, *rest])


def signature_of_program(program: ExportedProgram) -> inspect.Signature:
    """The signature of an exported program: its arguments by name, in the form they were exported."""
    in_spec = program.call_spec.in_spec
    if in_spec is None:
        return specs.generic_signature()
    args_spec, kwargs_spec = specs.children(in_spec)
    keys = list(kwargs_spec.context or ())
    count = len(specs.children(args_spec))
    entries = [entry.signature for entry in program.module_call_graph if entry.fqn == ""]
    names = list(getattr(entries[0], "forward_arg_names", None) or ()) if entries else []
    if len(names) != count + len(keys) or len(set(names)) != len(names):
        return specs.generic_signature()
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count + [inspect.Parameter.KEYWORD_ONLY] * len(keys)
    if not all(name.isidentifier() for name in names) or names[count:] != keys:
        return specs.generic_signature()
    return inspect.Signature([inspect.Parameter(n, kind) for n, kind in zip(names, kinds, strict=True)])


class _Calling(nn.Module):
    """A module whose forward is a function, and whose children are what that function closes over."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        super().__init__()
        self.__dict__["_function"] = function

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        # The exporter names inputs, and finds their dynamic sizes, by the signature of forward.
        forward.__dict__["__signature__"] = signature
        self.__dict__["forward"] = forward

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_function"](*args, **kwargs)


class _Method(_Calling):
    """A method of a module as a forward of its own, on the very parameters of that module."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any], signature: inspect.Signature) -> None:
        super().__init__(function, signature)
        self.training = owner.training
        self._parameters = owner._parameters
        self._buffers = owner._buffers
        self._modules = owner._modules
        self._non_persistent_buffers_set = owner._non_persistent_buffers_set


class _Closure(_Calling):
    """A function with the tensors it closes over as parameters and buffers of this module."""

    def __init__(self, function: types.FunctionType, signature: inspect.Signature) -> None:
        super().__init__(function, signature)
        self.__dict__["_names"] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        function = cast(types.FunctionType, self.__dict__["_function"])
        current = {var: getattr(self, name) for var, name in self.__dict__["_names"].items()}
        return rebound(function, current)(*args, **kwargs)


def as_module(function: Callable[..., Any], signature: inspect.Signature) -> nn.Module:
    """A module that calls `function` and owns the modules and parameters it reaches.

    Looked for: a bound method's module, closure cells, globals named in the code, attributes of a callable
    object, arguments of a partial.
    """
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    owner = getattr(bare, "__self__", None)
    if isinstance(owner, nn.Module) and not isinstance(function, functools.partial):
        return _Method(owner, function, signature)
    reached = _reached(function)
    modules = {k: v for k, v in reached.items() if isinstance(v, nn.Module)}
    weights = {k: v for k, v in reached.items() if isinstance(v, Tensor) and v.requires_grad}
    if isinstance(function, types.FunctionType) and weights:
        module: _Calling = _Closure(function, signature)
    else:
        module = _Calling(function, signature)
    for name, child in modules.items():
        module.add_module(_free(module, name), child)
    for name, weight in weights.items():
        free = _free(module, name)
        if isinstance(weight, nn.Parameter):
            module.register_parameter(free, weight)
        else:
            module.register_buffer(free, weight, persistent=False)
        if isinstance(module, _Closure):
            module.__dict__["_names"][name] = free
    if modules:
        module.training = any(child.training for child in modules.values())
    return module


def _free(module: nn.Module, name: str) -> str:
    name = name.replace(".", "_")
    while hasattr(module, name) or name in ("graph", "code", "meta"):
        name += "_"
    return name


def _reached(function: Callable[..., Any]) -> dict[str, Any]:
    """What a callable can see without being given it, by the name it sees it under."""
    found: dict[str, Any] = {}
    queue: list[Any] = [function]
    visited: set[int] = set()
    while queue:
        at = queue.pop(0)
        if id(at) in visited:
            continue
        visited.add(id(at))
        if isinstance(at, functools.partial):
            queue.append(at.func)
            names = {f"arg{i}": value for i, value in enumerate(at.args)} | dict(at.keywords)
        elif isinstance(at, types.MethodType):
            queue.append(at.__func__)
            names = {"owner": at.__self__} if isinstance(at.__self__, nn.Module) else dict(vars(at.__self__))
        elif isinstance(at, types.FunctionType):
            names = _visible(at)
        elif hasattr(at, "__dict__") and callable(at) and not isinstance(at, (nn.Module, type)):
            names = dict(vars(at))
        else:
            continue
        for name, value in _unpacked(names).items():
            if isinstance(value, (nn.Module, Tensor)):
                found.setdefault(name, value)
            elif isinstance(value, (types.FunctionType, functools.partial, types.MethodType)):
                queue.append(value)
    return found


def _unpacked(names: dict[str, Any]) -> dict[str, Any]:
    """The names, and modules that lie one level down in a list or dict under one of them."""
    found = dict(names)
    for name, value in names.items():
        items: Any = ()
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast("list[Any]", value))
        found.update({f"{name}_{k}": v for k, v in items if isinstance(v, nn.Module)})
    return found


def _visible(function: types.FunctionType) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet holds nothing
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            names.setdefault(name, function.__globals__[name])
    return names


def rebound(function: types.FunctionType, values: dict[str, Any]) -> Callable[..., Any]:
    """The function with other values for some of the names it closes over."""
    cells = tuple(
        types.CellType(values[name]) if name in values else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    )
    scope = {**function.__globals__, **{k: v for k, v in values.items() if k in function.__globals__}}
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
