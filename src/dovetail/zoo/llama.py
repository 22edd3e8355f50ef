"""Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    seq: int = 8
    eps: float = 1e-6
    theta: float = 10000.0
    tie: bool = True

    def __post_init__(self) -> None:
        require_multiple("width", self.width, "2 * heads", 2 * self.heads)
        require_multiple("heads", self.heads, "kv_heads", self.kv_heads)


SIZES: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(vocab=1024, width=256, hidden=704, layers=4, heads=8, kv_heads=4, seq=64),
    "base": Config(vocab=32000, width=2048, hidden=5632, layers=16, heads=32, kv_heads=8, seq=512),
}


class Rotary(nn.Module):
    """Cosines and sines of the position angles, each `[seq, head_width]`."""

    inv_freq: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width // config.heads
        exponents = torch.arange(0, width, 2).float() / width
        self.register_buffer("inv_freq", config.theta**-exponents, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Turn (a, b) into (-b, a), where a and b are the halves of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        kv_width = config.kv_heads * self.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_width).transpose(1, 2)

    def share(self, x: Tensor) -> Tensor:
        batch, kv_heads, seq, width = x.shape
        group = self.heads // kv_heads
        return x[:, :, None].expand(batch, kv_heads, group, seq, width).reshape(batch, self.heads, seq, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.split(self.q_proj(x), self.heads)
        k = self.split(self.k_proj(x), self.kv_heads)
        v = self.split(self.v_proj(x), self.kv_heads)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        mixed = F.scaled_dot_product_attention(q, self.share(k), self.share(v), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Maps token ids `[batch, seq]` to next-token scores `[batch, seq, vocab]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        # At this scale a tied head gives scores of unit size.
        nn.init.normal_(self.embed.weight, std=config.width**-0.5)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tie:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def build(size: str = "tiny", **overrides: Any) -> nn.Module:
    """Make the decoder of a size; `tie=False` gives the head its own weight."""
    return build_model(Llama, SIZES, size, overrides)


def example_inputs(size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Make a batch of random token ids."""
    config = pick(SIZES, size)
    return Inputs((torch.randint(config.vocab, (batch, config.seq), generator=generator(seed)),), {})
