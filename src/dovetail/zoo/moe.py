"""Mixture-of-experts decoder: top-k routing over experts computed densely."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import Inputs, RMSNorm, build_model, generator, pick, require_multiple


@dataclass(frozen=True)
class Config:
    vocab: int = 64
    width: int = 32
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    experts: int = 4
    top_k: int = 2
    seq: int = 8

    def __post_init__(self) -> None:
        require_multiple("width", self.width, "heads", self.heads)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} is not between 1 and experts={self.experts}; change one")


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(vocab=1024, width=192, hidden=384, layers=4, heads=6, experts=8, seq=32),
    "base": Config(vocab=32000, width=768, hidden=2048, layers=12, heads=12, experts=8, seq=128),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        split = (batch, seq, self.heads, width // self.heads)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Experts(nn.Module):
    """SwiGLU experts with stacked weights, each run on every token and weighed by the router.

    In train mode `router_counts` grows by the number of tokens sent to each expert.
    """

    router_counts: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.width, config.experts, bias=False)
        inward = (config.experts, config.width, config.hidden)
        outward = (config.experts, config.hidden, config.width)
        self.gate = nn.Parameter(torch.randn(inward) * config.width**-0.5)
        self.up = nn.Parameter(torch.randn(inward) * config.width**-0.5)
        self.down = nn.Parameter(torch.randn(outward) * config.hidden**-0.5)
        self.register_buffer("router_counts", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x), dim=-1)
        chosen = torch.topk(scores, self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.router_counts += mask.sum(dim=(0, 1), dtype=torch.int64)
        weights = scores * mask
        weights = weights / weights.sum(dim=-1, keepdim=True)
        gate = torch.einsum("bsd,edh->bseh", x, self.gate)
        up = torch.einsum("bsd,edh->bseh", x, self.up)
        outputs = torch.einsum("bseh,ehd->bsed", F.silu(gate) * up, self.down)
        return torch.einsum("bsed,bse->bsd", outputs, weights)


class Layer(nn.Module):
    """Pre-norm attention and experts, each added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.experts_norm = RMSNorm(config.width)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(self.experts_norm(x))


class MixtureOfExperts(nn.Module):
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
    """Make the mixture-of-experts decoder of a size."""
    return build_model(MixtureOfExperts, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random token ids."""
    config = pick(SIZES, size)
    return Inputs((torch.randint(config.vocab, (batch, config.seq), generator=generator(seed)),), {})
