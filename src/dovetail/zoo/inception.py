"""Inception-like network: parallel 1x1, 3x3, 5x5 and pool branches, concatenated."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick


@dataclass(frozen=True)
class Branches:
    """Channels of the branches; a `reduce` is the 1x1 convolution that comes before a wider one."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool: int

    @property
    def total(self) -> int:
        return self.one + self.three + self.five + self.pool


@dataclass(frozen=True)
class Config:
    channels: int = 3
    stem: int = 16
    blocks: tuple[Branches, ...] = (Branches(8, 8, 16, 4, 8, 8), Branches(16, 8, 16, 4, 8, 8))
    halve_before: tuple[int, ...] = (1,)
    classes: int = 10
    image: int = 16
    large_images: bool = False
    dropout: float = 0.1


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(
        stem=32,
        blocks=(
            Branches(16, 24, 32, 8, 16, 16),
            Branches(32, 32, 48, 8, 24, 24),
            Branches(48, 48, 64, 16, 32, 32),
            Branches(64, 64, 96, 16, 32, 32),
        ),
        halve_before=(1, 3),
        classes=100,
        image=32,
    ),
    "base": Config(
        stem=192,
        blocks=(
            Branches(64, 96, 128, 16, 32, 32),
            Branches(128, 128, 192, 32, 96, 64),
            Branches(192, 96, 208, 16, 48, 64),
            Branches(160, 112, 224, 24, 64, 64),
            Branches(128, 128, 256, 24, 64, 64),
            Branches(112, 144, 288, 32, 64, 64),
            Branches(256, 160, 320, 32, 128, 128),
            Branches(256, 160, 320, 32, 128, 128),
            Branches(384, 192, 384, 48, 128, 128),
        ),
        halve_before=(2, 7),
        classes=1000,
        image=224,
        large_images=True,
    ),
}


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution that keeps the image size at stride 1, with BatchNorm and ReLU."""
    weight = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(weight, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def halve() -> nn.MaxPool2d:
    """Make a pool that halves the resolution."""
    return nn.MaxPool2d(3, stride=2, padding=1)


def stem(config: Config) -> nn.Sequential:
    """Make the first layers: they cut large images to an eighth of the resolution, small ones not."""
    if not config.large_images:
        return conv(config.channels, config.stem, 3)
    narrow = config.stem // 3
    first = conv(config.channels, narrow, 7, stride=2)
    return nn.Sequential(first, halve(), conv(narrow, narrow, 1), conv(narrow, config.stem, 3), halve())


class Block(nn.Module):
    """Four branches over the same input, joined along the channels."""

    def __init__(self, inputs: int, widths: Branches) -> None:
        super().__init__()
        self.one = conv(inputs, widths.one, 1)
        self.three = nn.Sequential(
            conv(inputs, widths.three_reduce, 1), conv(widths.three_reduce, widths.three, 3)
        )
        self.five = nn.Sequential(
            conv(inputs, widths.five_reduce, 1), conv(widths.five_reduce, widths.five, 5)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(inputs, widths.pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Inception(nn.Module):
    """Maps images `[batch, channels, height, width]` to class scores `[batch, classes]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = stem(config)
        body: list[nn.Module] = []
        inputs = config.stem
        for index, widths in enumerate(config.blocks):
            if index in config.halve_before:
                body.append(halve())
            body.append(Block(inputs, widths))
            inputs = widths.total
        self.body = nn.Sequential(*body)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.head(self.drop(torch.flatten(self.pool(x), 1)))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the Inception network of a size."""
    return build_model(Inception, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random images."""
    config = pick(SIZES, size)
    shape = (batch, config.channels, config.image, config.image)
    return Inputs((torch.randn(shape, generator=generator(seed)),), {})
