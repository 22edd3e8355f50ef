"""MLP with pre-norm residual blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick


@dataclass(frozen=True)
class Config:
    features: int = 16
    width: int = 32
    hidden: int = 64
    layers: int = 2
    classes: int = 10
    dropout: float = 0.1


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(features=128, width=256, hidden=1024, layers=6, classes=100),
    "base": Config(features=1024, width=2048, hidden=8192, layers=12, classes=1000),
}


class Block(nn.Module):
    """x + down(dropout(gelu(up(norm(x)))))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.act = nn.GELU(approximate="tanh")
        self.drop = nn.Dropout(config.dropout)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class ResidualMLP(nn.Module):
    """Maps features `[batch, features]` to class scores `[batch, classes]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = nn.Linear(config.features, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(self.blocks(x))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the MLP of a size."""
    return build_model(ResidualMLP, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random features."""
    config = pick(SIZES, size)
    return Inputs((torch.randn(batch, config.features, generator=generator(seed)),), {})
