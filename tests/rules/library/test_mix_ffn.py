"""Mix-FFN: found on any grid, and not where the convolution is no depthwise one that keeps the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import dovetail
from dovetail.rules.library import ALL, MIX_FFN
from dovetail.rules.rule import Refusal
from tests.rules.library.helpers import candidates, graph_of, match_attrs, proposals

RULE = ALL["mix_ffn"]
B, H, W, IN, HIDDEN = 2, 3, 5, 8, 12
X = torch.randn(B, H * W, IN)
FIRST, FIRST_BIAS = torch.randn(HIDDEN, IN), torch.randn(HIDDEN)
CONV, CONV_BIAS = torch.randn(HIDDEN, 1, 3, 3), torch.randn(HIDDEN)
LAST, LAST_BIAS = torch.randn(IN, HIDDEN), torch.randn(IN)


def segformer(
    x: Tensor, *, act: Callable[[Tensor], Tensor] = F.gelu, biased: bool = True, **conv: Any
) -> Tensor:
    bias = (FIRST_BIAS, CONV_BIAS, LAST_BIAS) if biased else (None, None, None)
    hidden = F.linear(x, FIRST, bias[0])
    settings = {"weight": CONV, "padding": 1, "groups": HIDDEN, **conv}
    image = hidden.transpose(1, 2).view(B, HIDDEN, H, W)
    image = F.conv2d(image, bias=bias[1], **settings)
    return F.linear(act(image.flatten(2).transpose(1, 2)), LAST, bias[2])


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({}, "gelu"),
        ({"biased": False}, "gelu"),
        ({"act": torch.relu}, "relu"),
        ({"act": lambda x: F.gelu(x, approximate="tanh")}, "gelu_tanh"),
        ({"weight": torch.randn(HIDDEN, 1, 5, 3), "padding": (2, 1)}, "gelu"),
    ],
)
def test_on_a_grid(settings: dict[str, Any], activation: str) -> None:
    attrs = match_attrs(RULE, lambda x: segformer(x, **settings), X)
    assert attrs == {"grid": [H, W], "activation": activation}


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": torch.randn(HIDDEN, HIDDEN // 4, 3, 3), "groups": 4},
        {"dilation": 2, "padding": 2},
        {"act": lambda x: torch.sin(x)},
        {"act": lambda x: F.gelu(x) + 1},
    ],
)
def test_what_only_resembles_it(settings: dict[str, Any]) -> None:
    assert not candidates(RULE, graph_of(lambda x: segformer(x, **settings), (X,)))


def test_grids_of_two_sizes_and_a_grid_laid_out_otherwise() -> None:
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        image = F.linear(y, FIRST).permute(0, 2, 1).reshape(B, HIDDEN, 2, 2)
        image = F.conv2d(image, CONV, padding=1, groups=HIDDEN)
        return segformer(x), F.linear(F.gelu(image.flatten(2).permute(0, 2, 1)), LAST)

    graph = graph_of(two, (X, torch.randn(B, 4, IN)))
    assert not [p for p in proposals(MIX_FFN, graph) if isinstance(p, Refusal)]
    fused = dovetail.fuse(graph, MIX_FFN)
    assert sorted(r.attrs["grid"] for r in dovetail.regions(fused)) == [[2, 2], [H, W]]

    def twisted(x: Tensor) -> Tensor:
        image = F.linear(x, FIRST).reshape(B, HIDDEN, H, W)
        image = F.conv2d(image, CONV, padding=1, groups=HIDDEN)
        return F.linear(F.gelu(image.flatten(2).transpose(1, 2)), LAST)

    assert not candidates(RULE, graph_of(twisted, (X,)))


def test_a_dynamic_grid_is_refused_with_the_reason() -> None:
    class Image(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            batch, _, height, width = image.shape
            hidden = F.linear(image.flatten(2).transpose(1, 2), FIRST)
            mixed = F.conv2d(
                hidden.transpose(1, 2).reshape(batch, HIDDEN, height, width), CONV, padding=1, groups=HIDDEN
            )
            return F.linear(F.gelu(mixed.flatten(2).transpose(1, 2)), LAST)

    sizes = {"image": {2: Dim("height", min=2, max=64), 3: Dim("width", min=2, max=64)}}
    graph = dovetail.capture(Image(), (torch.randn(B, IN, H, W),), dynamic_shapes=sizes)
    (refusal,) = proposals(MIX_FFN, graph)
    assert isinstance(refusal, Refusal)
    assert "sizes of its grid are dynamic" in refusal.reason
