"""Activation checkpointing: of a region, as a backend that runs its body, and whether a module can be run twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dovetail.errors import ScheduleError
from dovetail.graph.effects import effects
from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline
from dovetail.scheduling.recording import Call, undisturbed


class Checkpoint(Backend):
    """Runs a body and keeps none of its inner values for backward: they are computed again, by torch's own means."""

    name = "checkpoint"
    version = "1"
    trains = True
    double_backward = True

    def supports(self, region: Region) -> Answer:
        if any(word != "random" for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that would happen twice")
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = region.body

        def run(*operands: Any) -> Any:
            return checkpoint(body, *operands, use_reentrant=False)

        return run


def not_repeatable(gm: GraphModule, names: Iterable[str]) -> dict[str, str]:
    """Which regions of a graph would be computed again from other numbers, and why: what they read is written later."""
    nodes = {node.name: node for node in gm.graph.nodes}
    written = {w for node in gm.graph.nodes for w in effects(node, gm).writes}
    found: dict[str, str] = {}
    for name in names:
        read = [source.name for source in nodes[name].all_input_nodes if source in written]
        if read:
            found[name] = (
                f"it reads '{read[0]}', which is written later, so that it would be computed again from other numbers. "
                f"Leave that out of the region"
            )
    return found


def require_repeatable(path: str, module: nn.Module, calls: Iterable[Call]) -> None:
    """Raise if a module does more than compute: what it writes when it is trained would be written twice."""
    if type(module).forward is nn.Module.forward:
        raise ScheduleError(
            f"'{path}' is a {type(module).__name__} and is never called itself; checkpoint the modules in it: '{path}.*'"
        )
    written = [name for call in calls for name in _written(module, call)] or _statistics(module)
    if written:
        raise ScheduleError(
            f"'{path or 'the model'}' cannot be checkpointed: it writes {', '.join(dict.fromkeys(written))}, which would "
            f"happen twice. Checkpoint the modules around that"
        )


def _statistics(module: nn.Module) -> list[str]:
    """Running statistics of norms, which are written in training whatever mode the module is in now."""
    norms = (
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
    )
    return [f"'{name}.running_mean'".replace("'.", "'") for name, part in norms if part.track_running_stats]


def _written(module: nn.Module, call: Call) -> list[str]:
    """What one run of a module changed: buffers, parameters, or what it was given."""
    example = call.example.copied()
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    watched: list[tuple[str, Tensor, int]] = [(f"'{n}'", value, value._version) for n, value in state.items()]
    given = [leaf for leaf in pytree.tree_leaves((example.args, example.kwargs)) if isinstance(leaf, Tensor)]
    watched += [(f"argument {i}", value, value._version) for i, value in enumerate(given)]
    with undisturbed(module), torch.no_grad():
        example.call(module.forward)
        replaced = [f"'{name}'" for name, value in module.named_buffers() if state.get(name) is not value]
        return [name for name, value, version in watched if value._version != version] + replaced
