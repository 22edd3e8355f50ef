"""BERT-like encoder: post-norm blocks, attention written out, GELU, pooler."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .common import Inputs, build_model, generator, pick, require_multiple


@dataclass(frozen=True)
class Config:
    vocab: int = 64
    positions: int = 16
    types: int = 2
    width: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    seq: int = 8
    eps: float = 1e-12
    dropout: float = 0.1

    def __post_init__(self) -> None:
        require_multiple("width", self.width, "heads", self.heads)


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(vocab=1024, positions=128, width=256, hidden=1024, layers=4, heads=8, seq=64),
    "base": Config(vocab=30522, positions=512, width=768, hidden=3072, layers=12, heads=12, seq=128),
}


class Embeddings(nn.Module):
    """Sum of word, position and type embeddings, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.types = nn.Embedding(config.types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.types(token_type_ids) + self.positions(positions)
        return self.drop(self.norm(x))


class Attention(nn.Module):
    """Scaled dot-product attention from its single steps, with a mask added to the scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_width).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_width)
        weights = self.drop(torch.softmax(scores + bias, dim=-1))
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Attention and MLP, each added to the stream and then normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.up = nn.Linear(config.width, config.hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(config.hidden, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x, bias)))
        return self.mlp_norm(x + self.drop(self.down(self.act(self.up(x)))))


class Bert(nn.Module):
    """Maps token ids `[batch, seq]` to hidden states and to one pooled vector per row."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x: Tensor = self.embeddings(input_ids, token_type_ids)
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pooler(x[:, 0]))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the encoder of a size."""
    return build_model(Bert, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random token ids and a mask that hides a random tail of each row."""
    config, source = pick(SIZES, size), generator(seed)
    input_ids = torch.randint(config.vocab, (batch, config.seq), generator=source)
    lengths = torch.randint(config.seq // 2, config.seq + 1, (batch, 1), generator=source)
    mask = (torch.arange(config.seq) < lengths).long()
    return Inputs((input_ids,), {"attention_mask": mask})
