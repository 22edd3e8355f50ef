"""Models and operations that every backend is tried with that hands regions to another project's compiler."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import dovetail


def whole(function: Any, *args: Any, **options: Any) -> GraphModule:
    """A graph all of whose operations are one region."""
    gm = dovetail.capture(function, args, **options)
    return dovetail.outline(gm, [n for n in gm.graph.nodes if n.op == "call_function"], kind="whole")


class Layers(nn.Module):
    """A convolution and what comes after it, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        return y, self.head(y.mean((2, 3)))


class Chain(nn.Module):
    """Products one after the other, in which rounding to fewer bits would show."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.conv(x.mT).mT @ x.mT


class Applied(nn.Module):
    """Functions of the same arguments, all their results in order."""

    def __init__(self, functions: Sequence[Any]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(one for f in self.functions for one in pytree.tree_leaves(f(*args)))


OPERATORS: list[Any] = [
    lambda x, y, w, image, i: x + y * 2 - 1,
    lambda x, y, w, image, i: 1 - x / (y * y + 1),
    lambda x, y, w, image, i: torch.exp(x).sqrt().log() + x.abs().add(1).rsqrt() + (x * x + 1).reciprocal(),
    lambda x, y, w, image, i: torch.sin(x) + torch.cos(y) + torch.tanh(x) + torch.sigmoid(y),
    lambda x, y, w, image, i: torch.erf(x) + x.floor() + y.ceil() + x.round() + x.sign(),
    lambda x, y, w, image, i: x.clamp(-0.5, 0.7) + x.clamp(min=0.1),
    lambda x, y, w, image, i: torch.maximum(x, y) - torch.minimum(x, y),
    lambda x, y, w, image, i: (F.relu(x), F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh")),
    lambda x, y, w, image, i: (F.leaky_relu(x, 0.2), F.elu(x), F.softplus(x), F.hardswish(x), F.relu6(x)),
    lambda x, y, w, image, i: (x**2, x**3, x.abs() ** 0.5, torch.square(x)),
    lambda x, y, w, image, i: (x > y, x <= 0, (x > 0) & (y > 0), ~(x > 0), (x < 0) | (y < 0)),
    lambda x, y, w, image, i: (torch.where(x > 0, x, y), x.masked_fill(y > 0, -1.5)),
    lambda x, y, w, image, i: (x.sum(), x.sum(1), x.mean((0, 2)), x.mean(-1, keepdim=True)),
    lambda x, y, w, image, i: (x.amax(1), x.amin(2, keepdim=True), x.argmax(2)),
    lambda x, y, w, image, i: (x.max(), x.min(), x.var(1), x.std(2, correction=0)),
    lambda x, y, w, image, i: (F.softmax(x, 1), F.log_softmax(x, -1), x.logsumexp(1)),
    lambda x, y, w, image, i: (x.transpose(1, 2) * 1, x.permute(2, 0, 1) + 1, x.reshape(8, 6) * 2),
    lambda x, y, w, image, i: (x[:, 1:3] + 1, x[0] * 2, x[..., ::2] - 1, x.unsqueeze(1) + y.unsqueeze(0)),
    lambda x, y, w, image, i: (torch.cat([x, y], 1), torch.stack([x, y], 2), x.flip(1), x.roll(1, 0)),
    lambda x, y, w, image, i: (
        [p + 1 for p in x.split(2, 1)],
        [p * 2 for p in x.unbind(0)],
        x.repeat(1, 2, 1),
    ),
    lambda x, y, w, image, i: (x.expand(2, 4, 6) + 1, x.squeeze(0) * 3, torch.tril(x), torch.triu(x, 1)),
    lambda x, y, w, image, i: (
        x @ y.mT,
        F.linear(x, w),
        torch.einsum("bij,kj->bki", x, w),
        torch.bmm(x, y.mT),
    ),
    lambda x, y, w, image, i: (F.layer_norm(x, (6,)), F.rms_norm(x, (6,)), F.group_norm(image, 2)),
    lambda x, y, w, image, i: F.scaled_dot_product_attention(x, y, y, is_causal=True),
    lambda x, y, w, image, i: F.scaled_dot_product_attention(x, y, x, attn_mask=(x @ y.mT) > 0),
    lambda x, y, w, image, i: F.conv2d(image, image[:, :, :3, :3] * 1, padding=1, stride=2),
    lambda x, y, w, image, i: F.conv2d(image, image[:1, :1, :3, :3].repeat(4, 1, 1, 1), groups=4, dilation=2),
    lambda x, y, w, image, i: F.conv1d(x, x[:, :, :3] * 1, padding="same"),
    lambda x, y, w, image, i: (F.max_pool2d(image, 3, 2, 1), F.adaptive_avg_pool2d(image, 1)),
    lambda x, y, w, image, i: (F.avg_pool2d(image, 2), F.adaptive_avg_pool2d(image, 4)),
    lambda x, y, w, image, i: (F.pad(image, (1, 0, 2, 1)), F.pixel_shuffle(image, 2)),
    lambda x, y, w, image, i: (F.embedding(i, w), w[i], w.index_select(0, i[0]), x[:, 0].gather(1, i)),
    lambda x, y, w, image, i: torch.zeros_like(x[:, 0]).scatter(1, i, 2.5),
    lambda x, y, w, image, i: (x.topk(3, -1)[0], x.sort(-1)[0], x.cumsum(1), i.cumsum(1)),
    lambda x, y, w, image, i: (torch.arange(6) * x, x + torch.full((6,), 0.5), torch.ones(4, 1) * y),
    lambda x, y, w, image, i: (i.float() * 2, i + 1, x.double().float(), (i > 0).to(torch.int64)),
]
"""What models are made of."""
