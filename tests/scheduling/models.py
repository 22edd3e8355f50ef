"""Small models and patterns for the tests of schedules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail


class Block(nn.Module):
    """A residual MLP with everything that has state: norms, running statistics, random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.stats = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.stats(self.norm(x + self.down(F.gelu(self.up(x))))))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(*, training: bool = True) -> tuple[Net, Tensor]:
    """The model and an input for it, always the same ones."""
    torch.manual_seed(0)
    return Net().train(training), torch.randn(4, 8)


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)


def relu_plus_one(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def is_gelu(node: Any) -> bool:
    return node.target == torch.ops.aten.gelu.default


@dovetail.rule(kind="act")
def activation(x: Tensor) -> Tensor:
    return F.gelu(x)


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """The last loss and all state after a few steps of training from one seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.zeros(())
    for i in range(steps):
        optimizer.zero_grad()
        loss = model(x * (i + 1)).square().sum()
        loss.backward()
        optimizer.step()
    return loss.detach(), {k: v.clone() for k, v in model.state_dict().items()}
