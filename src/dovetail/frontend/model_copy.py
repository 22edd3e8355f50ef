"""Copies of a model's modules that share its parameters and buffers, and any callable as a module.

- `mirror` and `from_program` return the skeleton that a captured graph is built on: empty modules with the names,
  parameters and buffers of the model.
- `signature_of` and `as_module` let a function, method, partial or callable object be exported like a module.
- `structural_copy` returns a model with modules of its own, so that another thread can call the model while the copy is
  traced.

Models that cannot be traced at all are refused by the `refuse_` functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from dovetail.errors import CaptureError, InvalidArgument
from dovetail.frontend import calling_convention

_RESERVED = frozenset(dir(GraphModule)) - frozenset(dir(nn.Module)) | {"meta", "shape_env", "generate"}


def mirror(model: nn.Module) -> nn.Module:
    """Return modules with the names, parameters, buffers, persistence and modes of `model`, without its code.

    The parameters and buffers are the same objects. A module with two parents has two parents here too.
    """
    copies: dict[int, nn.Module] = {}
    root = _skeleton(model, copies)
    for module in list(model.modules()):
        new = copies[id(module)]
        for name, child in module._modules.items():
            new._modules[name] = None if child is None else copies.get(id(child)) or _skeleton(child, copies)
    return root


def _skeleton(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    for part in module.modules():
        if id(part) in copies:
            continue
        new = nn.Module()
        new.training = part.training
        new._parameters.update(part._parameters)
        new._buffers.update(part._buffers)
        new._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        copies[id(part)] = new
    return copies[id(module)]


def refuse_reserved(model: nn.Module) -> None:
    """Raise CaptureError if an attribute of the model has the name of an attribute of GraphModule."""
    for name in (*model._parameters, *model._buffers, *model._modules):
        if name in _RESERVED:
            raise CaptureError(
                f"the model's own '{name}' has the name of something that every FX GraphModule has. "
                f"Rename it, or wrap the model in another module."
            )


def from_program(program: ExportedProgram, training: bool) -> nn.Module:
    """Return the same for an exported program, from the names of its state and constants."""
    root = nn.Module()
    root.training = training
    signature = program.graph_signature
    volatile = set(signature.non_persistent_buffers)
    buffers = set(signature.buffers)
    values: Mapping[str, Any] = {**program.state_dict, **{k: program.constants[k] for k in sorted(volatile)}}
    for path, value in values.items():
        owner, name = reach(root, path)
        if isinstance(value, nn.Parameter) and path not in buffers:
            owner.register_parameter(name, value)
        else:
            owner.register_buffer(name, value, persistent=path not in volatile)
    refuse_reserved(root)
    return root


def reach(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that holds the last part of a dotted path, created if missing, and that part."""
    *parents, name = path.split(".")
    for parent in parents:
        child = root._modules.get(parent)
        if child is None:
            child = nn.Module()
            child.training = root.training
            root.add_module(parent, child)
        root = child
    return root, name


def attach(root: nn.Module, base: str, value: object) -> str:
    """Add a constant, an opaque object or a sub-graph to `root` under an unused name, and return that."""
    path, count = base, 0
    while _is_used(root, path):
        count += 1
        path = f"{base}_{count}"
    owner, name = reach(root, path)
    if isinstance(value, nn.Module):
        owner.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        raise CaptureError(
            f"the model uses a parameter that it does not own (traced as '{base}'). "
            f"Pass a module that has it as an attribute."
        )
    elif isinstance(value, Tensor):
        owner.__dict__[name] = value
    else:
        setattr(owner, name, value)
    return path


def _is_used(root: nn.Module, path: str) -> bool:
    *parents, name = path.split(".")
    at: Any = root
    for parent in parents:
        at = at._modules.get(parent) if isinstance(at, nn.Module) else None
        if at is None:
            return False
    return hasattr(at, name) or (at is root and name in _RESERVED)


def refuse_distributed(model: nn.Module) -> None:
    """Raise CaptureError for a model that communicates around its calls, or whose parameters are distributed."""
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
                    f"'{name}' of {where} is a DTensor, distributed over several processes; a captured graph runs in one. "
                    f"Compile the modules before they are sharded."
                )


def refuse_scripted(model: Any) -> None:
    """Raise InvalidArgument for a model that is, or has, a module compiled by TorchScript, which cannot be traced."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            what = f"'{path}' of the model" if path else "the model"
            raise InvalidArgument(
                f"{what} is a {type(module).__name__} of TorchScript, whose operations cannot be traced. Give the Python "
                f"module that torch.jit.script or torch.jit.trace was called with, or run it as it is."
            )


def signature_of(model: Callable[..., Any], positional: int, keywords: Sequence[str]) -> inspect.Signature:
    """Return the signature a model is called by; if Python cannot tell it, that of the example call."""
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        names = [f"arg{i}" for i in range(positional)]
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        rest = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
        return inspect.Signature([*first, *rest])


def signature_of_program(program: ExportedProgram) -> inspect.Signature:
    """Return the signature of an exported program: its arguments by name, as they were exported."""
    in_spec = program.call_spec.in_spec
    if in_spec is None:
        return _generic_signature()
    args_spec, kwargs_spec = calling_convention.children(in_spec)
    keys = list(kwargs_spec.context or ())
    count = len(calling_convention.children(args_spec))
    entries = [entry.signature for entry in program.module_call_graph if entry.fqn == ""]
    names = list(getattr(entries[0], "forward_arg_names", None) or ()) if entries else []
    if len(names) != count + len(keys) or len(set(names)) != len(names):
        return _generic_signature()
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count + [inspect.Parameter.KEYWORD_ONLY] * len(keys)
    if not all(name.isidentifier() for name in names) or names[count:] != keys:
        return _generic_signature()
    return inspect.Signature([inspect.Parameter(n, kind) for n, kind in zip(names, kinds, strict=True)])


def _generic_signature() -> inspect.Signature:
    """Return the signature `(*args, **kwargs)`, for a model whose own is not known."""
    return inspect.Signature(
        [
            inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    )


class _FunctionModule(nn.Module):
    """A module whose forward is a function, and whose children are the modules that the function refers to."""

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


class _MethodModule(_FunctionModule):
    """A module whose forward is a method of another, with the same parameters."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any], signature: inspect.Signature) -> None:
        super().__init__(function, signature)
        self.training = owner.training
        self._parameters = owner._parameters
        self._buffers = owner._buffers
        self._modules = owner._modules
        self._non_persistent_buffers_set = owner._non_persistent_buffers_set


class _ClosureModule(_FunctionModule):
    """A function with the tensors it closes over as parameters and buffers of this module."""

    def __init__(self, function: types.FunctionType, signature: inspect.Signature) -> None:
        super().__init__(function, signature)
        self.__dict__["_names"] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        function = cast(types.FunctionType, self.__dict__["_function"])
        current = {var: getattr(self, name) for var, name in self.__dict__["_names"].items()}
        return rebound(function, current)(*args, **kwargs)


def as_module(function: Callable[..., Any], signature: inspect.Signature) -> nn.Module:
    """Return a module that calls `function` and owns the modules and parameters that it refers to.

    These are a bound method's module, closure cells, globals named in the code, attributes of a callable object, and
    arguments of a partial.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and not isinstance(function, functools.partial):
        return _MethodModule(owner, function, signature)
    referenced = _references(function)
    modules = {k: v for k, v in referenced.items() if isinstance(v, nn.Module)}
    weights = {k: v for k, v in referenced.items() if isinstance(v, Tensor) and v.requires_grad}
    if isinstance(function, types.FunctionType) and weights:
        module: _FunctionModule = _ClosureModule(function, signature)
    else:
        module = _FunctionModule(function, signature)
    for name, child in modules.items():
        module.add_module(_unused_name(module, name), child)
    for name, weight in weights.items():
        unused = _unused_name(module, name)
        if isinstance(weight, nn.Parameter):
            module.register_parameter(unused, weight)
        else:
            module.register_buffer(unused, weight, persistent=False)
        if isinstance(module, _ClosureModule):
            module.__dict__["_names"][name] = unused
    if modules:
        module.training = any(child.training for child in modules.values())
    return module


def _unused_name(module: nn.Module, name: str) -> str:
    name = name.replace(".", "_")
    while hasattr(module, name) or name in ("graph", "code", "meta"):
        name += "_"
    return name


def _references(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the modules and tensors that a callable refers to other than by its arguments, by name."""
    referenced: dict[str, Any] = {}
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
                referenced.setdefault(name, value)
            elif isinstance(value, (types.FunctionType, functools.partial, types.MethodType)):
                queue.append(value)
    return referenced


def _unpacked(names: dict[str, Any]) -> dict[str, Any]:
    """Return the names, and the modules in a list or dict under one of them."""
    unpacked = dict(names)
    for name, value in names.items():
        items: Any = ()
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast("list[Any]", value))
        unpacked.update({f"{name}_{k}": v for k, v in items if isinstance(v, nn.Module)})
    return unpacked


def _visible(function: types.FunctionType) -> dict[str, Any]:
    names = _closure(function)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            names.setdefault(name, function.__globals__[name])
    return names


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function closes over, by name."""
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet holds nothing
            values[name] = cell.cell_contents
    return values


def rebound(function: types.FunctionType, values: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with other values for some of the names it closes over."""
    cells = tuple(
        types.CellType(values[name]) if name in values else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    )
    scope = {**function.__globals__, **{k: v for k, v in values.items() if k in function.__globals__}}
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


_OWN_DICTS = ("_parameters", "_buffers", "_modules")
_BOOKKEEPING = frozenset(k for k, v in nn.Module().__dict__.items() if isinstance(v, (dict, set))) - {
    *_OWN_DICTS
}
"""Dicts and sets of hooks and buffer names in every module: what is registered with the copy is not with the model."""
_NUMBERS_AND_TEXT = (str, bytes, int, float, complex, type(None))
_OPAQUE = (Tensor, *_NUMBERS_AND_TEXT, torch.dtype, torch.device, torch.Size, type, types.ModuleType)
_DEPTH = 3
"""How far containers, functions and helper objects are followed for references to modules of the model."""


class _Uncopied(Exception):
    """Something refers to a module of the model in a way that cannot be redirected."""


def structural_copy(model: nn.Module) -> nn.Module:
    """Return a model with modules of its own that share parameters, buffers and all else with `model`.

    References between the modules (attributes, lists, bound methods, closures, hooks) lead to the copies. If an object
    of another kind has such a reference, or a module is implemented in C++, the model itself is returned.
    """
    modules = list(model.modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):  # pyright: ignore
        return model
    # A module that shares its children with another one, as without its hooks, is the same to those that refer to it.
    copies = {id(module._modules): object.__new__(type(module)) for module in modules}
    if len(copies) != len(modules):
        return model
    redirect = _Redirect(copies)
    try:
        for module in modules:
            redirect.fill(module, copies[id(module._modules)])
    except _Uncopied:
        return model
    return copies[id(model._modules)]


class _Redirect:
    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies
        self.tables: dict[int, Any] = {}

    def fill(self, module: nn.Module, copy: Any) -> None:
        for name, value in module.__dict__.items():
            if name in _OWN_DICTS:
                # Modules may share one of these; what one registers the other then has.
                value = self.tables.setdefault(id(value), type(value)(value))
                if name == "_modules":
                    value.update({k: self.copy_of(v, v) for k, v in value.items()})
                copy.__dict__[name] = value
            else:
                value = value.copy() if name in _BOOKKEEPING else value
                copy.__dict__[name] = self.redirected(value)

    def copy_of(self, value: Any, otherwise: Any = None) -> Any:
        """Return the copy of a module of the model; `otherwise` for anything else."""
        own = value.__dict__.get("_modules") if isinstance(value, nn.Module) else None
        copy = None if own is None else self.copies.get(id(own))
        if copy is None:
            return otherwise
        if not (isinstance(copy, type(value)) or isinstance(value, type(copy))):
            raise _Uncopied  # a wrapper with the children of what it wraps
        return copy

    def redirected(self, value: Any, depth: int = 0) -> Any:
        """Return a value with references to modules of the model replaced; the same object if it has none."""
        if isinstance(value, _OPAQUE):
            return value
        if isinstance(value, nn.Module):
            return self.copy_of(value, value)
        if isinstance(value, weakref.ReferenceType):
            copy = self.copy_of(cast("Any", value)())
            return cast("Any", value) if copy is None else weakref.ref(copy)
        if depth > _DEPTH:
            return value
        if isinstance(value, types.MethodType):
            owner = self.redirected(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = new = tuple(self.redirected(part, depth + 1) for part in parts)
            if all(a is b for a, b in zip(new, parts, strict=True)):
                return value
            partial = functools.partial(function, *args, **keywords)
            partial.__dict__.update(value.__dict__)
            return partial
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            return self._container(cast("Any", value), depth)
        if depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
            held = list(vars(value).values())
            if any(self.redirected(one, depth + 1) is not one for one in held):
                raise _Uncopied
        return value

    def _function(self, value: types.FunctionType, depth: int) -> Any:
        held = _closure(value)
        redirected = {name: self.redirected(one, depth + 1) for name, one in held.items()}
        cells = {name: new for name, new in redirected.items() if new is not held[name]}
        if not cells:
            return value
        function: Any = rebound(value, cells)
        function.__dict__.update(value.__dict__)
        return function

    def _container(self, value: Any, depth: int) -> Any:
        """Copy containers of parameters too: some layers have a list of their weights, and assign to its elements."""
        items = list(value.values()) if isinstance(value, dict) else list(value)
        new = [self.redirected(one, depth + 1) for one in items]
        same = all(a is b for a, b in zip(items, new, strict=True))
        if same and not any(isinstance(one, nn.Parameter) for one in items):
            return value
        if type(value) in (list, tuple, set, frozenset, deque):
            return type(value)(new)
        if type(value) in (dict, OrderedDict, defaultdict):
            copy = value.copy()
            copy.update(zip(value, new, strict=True))
            return copy
        if same:
            return value
        raise _Uncopied
