"""Layers with state or kernels of their own, and custom operators, captured and trained beside the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frontend.test_capture_agreement import assert_alike, one, small


@torch.library.custom_op("dovetail_test::note", mutates_args=())
def note(x: Tensor) -> None:
    NOTED.append(x.sum().item())


@note.register_fake
def _(x: Tensor) -> None:
    return None


@torch.library.custom_op("dovetail_test::tally", mutates_args=("into",))
def tally(x: Tensor, into: Tensor) -> None:
    into.add_(x.sum())


NOTED: list[float] = []


def test_operators_that_return_nothing_are_kept() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        note(x)
        tally(x, m.a)
        return x * 2

    graph = assert_alike(small(forward), one, steps=2)
    NOTED.clear()
    graph(torch.ones(3, 4))
    assert NOTED == [12.0]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LSTM(4, 5, num_layers=2, dropout=0.3), (2, 3, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
        (nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (3, 4)),
    ],
    ids=["lstm", "transformer", "instance norm", "spectral norm"],
)
def test_layers_with_state_of_their_own(layer: nn.Module, shape: tuple[int, ...], mode: str) -> None:
    assert_alike(
        copy.deepcopy(layer).train(mode == "train"), lambda step: (torch.randn(shape),), tolerance=1e-4
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_norm_on_a_gpu_takes_the_same_kernel(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda().train(mode == "train")
    assert_alike(model, lambda step: (torch.randn(4, 3, 9, 9).cuda(),), tolerance=1e-3)
