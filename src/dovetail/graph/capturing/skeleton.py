"""The parameters and buffers of a model, under their own names, on plain modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from dovetail.errors import CaptureError

_RESERVED = frozenset(dir(GraphModule)) - frozenset(dir(nn.Module)) | {"meta", "shape_env", "generate"}


def mirror(model: nn.Module) -> nn.Module:
    """Modules with the names, parameters, buffers, persistence and modes of `model`, and none of its code.

    The parameters and buffers are the very same objects. A module that hangs in two places does so here too.
    """
    made: dict[int, nn.Module] = {}
    root = _bare(model, made)
    for module in list(model.modules()):
        new = made[id(module)]
        for name, child in module._modules.items():
            new._modules[name] = None if child is None else made.get(id(child)) or _bare(child, made)
    return root


def _bare(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    for part in module.modules():
        if id(part) in made:
            continue
        new = nn.Module()
        new.training = part.training
        new._parameters.update(part._parameters)
        new._buffers.update(part._buffers)
        new._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        made[id(part)] = new
    return made[id(module)]


def refuse_reserved(model: nn.Module) -> None:
    """Raise if a name at the top of the model is one that a GraphModule needs for itself."""
    for name in (*model._parameters, *model._buffers, *model._modules):
        if name in _RESERVED:
            raise CaptureError(
                f"the model's own '{name}' has the name of something that every FX GraphModule has. "
                f"Rename it, or wrap the model in another module."
            )


def from_program(program: ExportedProgram, training: bool) -> nn.Module:
    """The same for a program whose model is not at hand: its state and constants tell the names."""
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
    """The module that holds the last part of a dotted path, made where missing, and that part."""
    *parents, name = path.split(".")
    for parent in parents:
        child = root._modules.get(parent)
        if child is None:
            child = nn.Module()
            child.training = root.training
            root.add_module(parent, child)
        root = child
    return root, name


def attach(root: nn.Module, wanted: str, value: object) -> str:
    """Hang a constant, an opaque object or a sub-graph on `root` under a free name; returns the name."""
    path = base = wanted
    count = 0
    while _is_taken(root, path):
        count += 1
        path = f"{base}_{count}"
    owner, name = reach(root, path)
    if isinstance(value, nn.Module):
        owner.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        raise CaptureError(
            f"the model uses a parameter that it does not own (traced as '{wanted}'). "
            f"Pass a module that has it as an attribute."
        )
    elif isinstance(value, Tensor):
        owner.__dict__[name] = value
    else:
        setattr(owner, name, value)
    return path


def _is_taken(root: nn.Module, path: str) -> bool:
    *parents, name = path.split(".")
    at: Any = root
    for parent in parents:
        at = at._modules.get(parent) if isinstance(at, nn.Module) else None
        if at is None:
            return False
    return hasattr(at, name) or (at is root and name in _RESERVED)
