"""Models with products, and whether a call ran in integers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail.backends.int8.int8_backend import Int8
from dovetail.backends.int8.int8_kernels import why_not_here
from tests.lowering.helpers import events

needs_int8 = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))


class Layers(nn.Module):
    """Two linear layers, each with something behind it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + x


class Images(nn.Module):
    """Convolutions with batch norms, one of them added to what it was given."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        for norm in self.norms:
            nn.init.normal_(norm.get_buffer("running_mean"))
            nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(x)) + x)


def lowered(model: nn.Module, *args: Any, backend: Any = None, **options: Any) -> GraphModule:
    """A model with the regions that int8 wants, given to it."""
    mine = Int8(calibrate=2) if backend is None else backend
    graph = dovetail.fuse(dovetail.capture(model, args, **options.pop("capture", {})), Int8().rules)
    return dovetail.lower(graph, options.pop("chain", [mine]), cache=False, **options)


def integers(run: Any, *args: Any) -> int:
    """How many integer products a call runs, as the profiler tells."""
    with torch.autograd.profiler.profile() as seen:
        run(*args)
    assert seen is not None
    integer_ops = ("onednn::qlinear_pointwise", "onednn::qconv_pointwise")
    return sum(e.count for e in seen.key_averages() if e.key in integer_ops)


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def reasons(gm: GraphModule, outcome: str) -> list[str]:
    return [e.reason for e in events(gm) if e.outcome == outcome]
