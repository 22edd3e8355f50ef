"""ResNet of basic blocks in stages, with BatchNorm and in-place ReLU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick


@dataclass(frozen=True)
class Config:
    channels: int = 3
    width: int = 16
    stages: tuple[int, ...] = (1, 1)
    classes: int = 10
    image: int = 16
    large_images: bool = False


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(width=32, stages=(2, 2, 2), classes=100, image=32),
    "base": Config(width=64, stages=(3, 4, 6, 3), classes=1000, image=224, large_images=True),
}


class Block(nn.Module):
    """Two 3x3 convolutions added to their input, which is projected where the shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def stem(config: Config) -> nn.Sequential:
    """Make the first layers: they quarter the resolution of large images and keep that of small ones."""
    if not config.large_images:
        conv = nn.Conv2d(config.channels, config.width, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(config.width), nn.ReLU(inplace=True))
    conv = nn.Conv2d(config.channels, config.width, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(config.width), nn.ReLU(inplace=True), pool)


class ResNet(nn.Module):
    """Maps images `[batch, channels, height, width]` to class scores `[batch, classes]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = stem(config)
        stages: list[nn.Module] = []
        inputs = config.width
        for index, depth in enumerate(config.stages):
            outputs, stride = config.width * 2**index, 1 if index == 0 else 2
            first = Block(inputs, outputs, stride)
            stages.append(nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(depth - 1))))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(torch.flatten(self.pool(x), 1))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the ResNet of a size."""
    return build_model(ResNet, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random images."""
    config = pick(SIZES, size)
    shape = (batch, config.channels, config.image, config.image)
    return Inputs((torch.randn(shape, generator=generator(seed)),), {})
