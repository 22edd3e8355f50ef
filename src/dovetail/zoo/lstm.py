"""LSTM written from its gates and unrolled over the sequence."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick


@dataclass(frozen=True)
class Config:
    features: int = 8
    width: int = 16
    layers: int = 2
    outputs: int = 4
    seq: int = 6
    dropout: float = 0.1


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(features=32, width=128, layers=4, outputs=16, seq=16),
    "base": Config(features=256, width=1024, layers=4, outputs=256, seq=32),
}


class Cell(nn.Module):
    """One step: the next hidden and cell state from an input and the last two."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates: Tensor = self.from_input(x) + self.from_hidden(hidden)
        write, forget, candidate, read = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(write) * torch.tanh(candidate)
        return torch.sigmoid(read) * torch.tanh(cell), cell


class Layer(nn.Module):
    """A cell run over `[batch, seq, inputs]` from a zero state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.cell = Cell(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], self.width)
        steps: list[Tensor] = []
        for step in x.unbind(1):
            hidden, cell = self.cell(step, hidden, cell)
            steps.append(hidden)
        return torch.stack(steps, dim=1)


class LSTM(nn.Module):
    """Maps a series `[batch, seq, features]` to a value per step, `[batch, seq, outputs]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.features] + [config.width] * (config.layers - 1)
        self.layers = nn.ModuleList(Layer(inputs, config.width) for inputs in widths)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.head(x)


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the LSTM of a size."""
    return build_model(LSTM, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random series; the layers unroll over their length, so it is short."""
    config = pick(SIZES, size)
    return Inputs((torch.randn(batch, config.seq, config.features, generator=generator(seed)),), {})
