"""Vision transformer: patches by convolution, class token, pre-norm blocks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick, require_multiple


@dataclass(frozen=True)
class Config:
    channels: int = 3
    image: int = 16
    patch: int = 8
    width: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    classes: int = 10
    eps: float = 1e-6
    dropout: float = 0.1

    def __post_init__(self) -> None:
        require_multiple("width", self.width, "heads", self.heads)
        require_multiple("image", self.image, "patch", self.patch)

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(image=64, width=192, hidden=768, layers=6, heads=6, classes=100),
    "base": Config(image=224, patch=16, width=768, hidden=3072, layers=12, heads=12, classes=1000),
}


class Attention(nn.Module):
    """Self-attention whose query, key and value come from one product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.width),
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class VisionTransformer(nn.Module):
    """Maps images `[batch, channels, image, image]` to class scores `[batch, classes]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, config.width))
        self.positions = nn.Parameter(torch.randn(1, 1 + config.patches, config.width))
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.patch(x).flatten(2).transpose(1, 2)
        token = self.class_token.expand(x.shape[0], -1, -1)
        tokens = self.drop(torch.cat((token, patches), dim=1) + self.positions)
        return self.head(self.norm(self.layers(tokens))[:, 0])


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the vision transformer of a size."""
    return build_model(VisionTransformer, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random images."""
    config = pick(SIZES, size)
    shape = (batch, config.channels, config.image, config.image)
    return Inputs((torch.randn(shape, generator=generator(seed)),), {})
