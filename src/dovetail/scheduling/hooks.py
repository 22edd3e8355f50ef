"""Hooks that a step would lose, or that tracing would bake into a graph."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_modules

from dovetail.errors import ScheduleError

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hook_on(module: nn.Module) -> str | None:
    """The kind of a hook that a module has, in words."""
    kind = next((kind for kind in _KINDS if module.__dict__.get(kind)), None)
    return None if kind is None else kind.strip("_").removesuffix("s").replace("_", " ")


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise where a hook would become part of a graph, or be lost: one on a module inside of a part, or on all."""
    where = f"'{path}'" if path else "the model"
    for name, inner in module.named_modules():
        what = hook_on(inner) if name else None
        if what is not None:
            raise ScheduleError(
                f"module '{name}' within {where} has a {what}; tracing would bake it into the graph. "
                f"Remove it, or schedule smaller parts that do not hold the module"
            )
    for kind in _KINDS:
        if getattr(torch_modules, f"_global{kind}"):
            raise ScheduleError(
                f"a hook is set on all modules (torch.nn.modules.module._global{kind}); tracing {where} would bake it into "
                f"the graph. Remove it, and set it again when the model is built"
            )
