"""In-place draws into values whose strides in a call are not those of their fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from tests.frontend.test_side_effects import DRAWS, Forward, Small, assert_alike, matrix
from tests.fuzz.observe import Snapshot, difference, observe

LAYOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch_norm": lambda m, x: m.norm(x),
    "batch_norm and more": lambda m, x: F.relu(m.norm(x)) * 2,
    "logsigmoid": lambda m, x: F.logsigmoid(x),
    "logsigmoid and back": lambda m, x: F.logsigmoid(x).t(),
}


class Normed(Small):
    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.norm = nn.BatchNorm1d(8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", ["dropout", "alpha_dropout", "normal_", "bernoulli_"])
@pytest.mark.parametrize("is_permuted", [True, False], ids=["permuted", "contiguous"])
def test_draws_into_strides_that_fake_kernels_do_not_predict(
    layout: str, draw: str, is_permuted: bool
) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = LAYOUTS[layout](m, x)
        DRAWS[draw](y)
        return y, torch.rand(3)

    torch.manual_seed(0)
    twin = Normed(forward)
    torch.manual_seed(0)
    model = Normed(forward)
    x = torch.linspace(-1, 1, 48).reshape(8, 6).t() if is_permuted else matrix()
    want = observe(twin, Snapshot(twin), [x], runs=2, gradients=True)
    graph = dovetail.capture(model, (x,))
    got = observe(graph, Snapshot(model), [x], runs=2, gradients=True)
    assert difference(want, got, gradients=True, aliasing=False) == ("", "")


def test_what_is_created_like_such_a_value_is_drawn_into() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = F.logsigmoid(x)
        return y * y.new_empty(6, 1).bernoulli_(0.5), F.dropout(y, 0.5, True)

    assert_alike(forward, torch.linspace(-1, 1, 48).reshape(8, 6).t())


def test_batch_norm_keeps_channels_last() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return F.batch_norm(x, None, None, training=True).normal_() * 2, torch.rand(3)

    assert_alike(forward, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


def test_draws_that_out_is_written_over_still_happen() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = F.dropout(x, 0.5, True)
        z = F.dropout(torch.tanh(x), 0.4, True, inplace=True)
        torch.exp(x, out=y)
        torch.add(x, x, out=z)
        return torch.rand(3)

    assert_alike(forward, matrix())


def test_a_draw_without_in_place_stays_so_in_memory_that_is_not_contiguous() -> None:
    assert_alike(lambda m, x: torch.bernoulli(torch.empty_like(x.t()), 0.5), matrix())
