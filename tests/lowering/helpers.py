"""Small backends that tell what was asked of them, and small graphs to lower."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import Backend, Decline, Region
from dovetail.lowering.lowered_state import Event, lowered_state_of


class Counting(Backend):
    """Runs the body, and counts what it compiles and what it is called for."""

    name = "counting"
    trains = True

    def __init__(self, name: str = "counting", takes: Callable[[Region], bool] = lambda _: True) -> None:
        self.name, self.takes = name, takes
        self.compiled: list[str] = []
        self.examples: list[list[Any]] = []
        self.calls = 0

    def supports(self, region: Region) -> Any:
        return True if self.takes(region) else Decline(f"'{self.name}' does not take {region.kind}")

    def compile(self, region: Region, examples: Sequence[Any]) -> Callable[..., Any]:
        self.compiled.append(region.name)
        self.examples.append(list(examples))

        def run(*operands: Any) -> Any:
            self.calls += 1
            return region.body(*operands)

        return run


class Blocks(nn.Module):
    """Four equal blocks one after the other."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * 2 + x
        return x


def fused(model: nn.Module, *args: Any, rules: Any = None, **options: Any) -> GraphModule:
    return dovetail.fuse(dovetail.capture(model, args, **options), rules or dovetail.rules.repeats())


def events(gm: GraphModule) -> list[Event]:
    lowering = lowered_state_of(gm)
    assert lowering is not None
    return lowering.events
