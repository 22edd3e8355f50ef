"""Small models with parallel branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class QKV(nn.Module):
    """CASES 27: q, k and v of one value, each followed by a permute."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 8, bias), nn.Linear(4, 4, bias), nn.Linear(4, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).permute(1, 0, 2) for p in (self.q, self.k, self.v))
        return torch.cat((q.sin(), (k * v).cos()), 2)


class Branches(nn.Module):
    """CASES 28: 1x1 convolutions of one input beside a 3x3, each with a norm and an activation."""

    def __init__(self, kernels: Sequence[int] = (1, 1, 3, 1)) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 2 + i, k, padding=k // 2), nn.BatchNorm2d(2 + i), nn.ReLU())
            for i, k in enumerate(kernels)
        )
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.get_buffer("running_mean"))
                nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x) for conv in self.convs], 1)


IMAGE = torch.linspace(-1, 1, 2 * 3 * 5 * 5).reshape(2, 3, 5, 5)
