"""Mamba-like stack: causal depthwise convolution, selective scan, gate."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import Inputs, RMSNorm, build_model, generator, pick


@dataclass(frozen=True)
class Config:
    vocab: int = 64
    width: int = 16
    expand: int = 2
    state: int = 4
    rank: int = 2
    kernel: int = 4
    layers: int = 2
    seq: int = 6

    @property
    def inner(self) -> int:
        return self.expand * self.width


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(vocab=1024, width=192, state=16, rank=12, layers=4, seq=16),
    "base": Config(vocab=32000, width=768, state=16, rank=48, layers=24, seq=32),
}


def step_bias(width: int, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """Draw biases whose softplus is spread evenly over the orders of magnitude from low to high."""
    steps = torch.exp(torch.empty(width).uniform_(math.log(low), math.log(high)))
    return torch.log(torch.expm1(steps))


class SelectiveScan(nn.Module):
    """A linear recurrence over time whose step, input and readout depend on the input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.parts = (config.rank, config.state, config.state)
        self.select = nn.Linear(config.inner, sum(self.parts), bias=False)
        self.step = nn.Linear(config.rank, config.inner)
        self.step.bias = nn.Parameter(step_bias(config.inner))
        rates = torch.arange(1, config.state + 1).float().log()
        self.log_rate = nn.Parameter(rates.repeat(config.inner, 1))
        self.skip = nn.Parameter(torch.ones(config.inner))

    def forward(self, x: Tensor) -> Tensor:
        step, write, read = self.select(x).split(self.parts, dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.log_rate))
        drive = (step * x)[..., None] * write[:, :, None, :]
        state = torch.zeros_like(drive[:, 0])
        outputs: list[Tensor] = []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + drive[:, time]
            outputs.append((state * read[:, time, None, :]).sum(-1))
        return torch.stack(outputs, dim=1) + x * self.skip


class Mixer(nn.Module):
    """Convolution and scan on one half of the channels, gated by the other half."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inputs = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.conv = nn.Conv1d(
            config.inner, config.inner, config.kernel, groups=config.inner, padding=config.kernel - 1
        )
        self.scan = SelectiveScan(config)
        self.outputs = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.inputs(x).chunk(2, dim=-1)
        # Padding reaches both ends; cutting the far one keeps each output from seeing later inputs.
        x = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.outputs(self.scan(F.silu(x)) * F.silu(gate))


class Layer(nn.Module):
    """Pre-norm mixer added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width)
        self.mixer = Mixer(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Mamba(nn.Module):
    """Maps token ids `[batch, seq]` to next-token scores `[batch, seq, vocab]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(input_ids))))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the Mamba stack of a size."""
    return build_model(Mamba, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random token ids; the scan unrolls over their length, so it is short."""
    config = pick(SIZES, size)
    return Inputs((torch.randint(config.vocab, (batch, config.seq), generator=generator(seed)),), {})
