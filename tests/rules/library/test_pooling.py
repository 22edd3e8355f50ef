"""Average pooling by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.rules.library.pooling import avg_pool_blocks, avg_pool_global, avg_pool_slices, avg_pool_windows
from tests.rules.library.helpers import candidates, graph_of, match_attrs, match_attrs_each, refused_each, why

X = torch.randn(2, 3, 8, 12)
Pool = Callable[[Tensor], Tensor]

GLOBAL: list[Pool] = [
    lambda x: x.mean((2, 3)),
    lambda x: x.mean([-1, -2], keepdim=True),
    lambda x: x.mean(3).mean(2),
    lambda x: x.mean(2).mean(2),
    lambda x: x.mean(-1, keepdim=True).mean(-2, keepdim=True),
    lambda x: x.flatten(2).mean(-1),
    lambda x: torch.mean(x.view(2, 3, -1), dim=2),
]


def test_over_the_whole_image() -> None:
    attrs = match_attrs_each(avg_pool_global, GLOBAL, X)
    assert attrs == [{"kernel": "global", "stride": None, "keepdim": m(X).dim() == 4} for m in GLOBAL]


def test_what_is_no_mean_of_images() -> None:
    refused_each(avg_pool_global, [lambda x: x.mean((1, 2)), lambda x: x.sum((2, 3))], X)
    assert not candidates(avg_pool_global, graph_of(lambda x: x.mean((1, 2)), (X[0],)))
    mixed = graph_of(lambda x: (x.mean((2, 3)), x[0].mean((1, 2))), (X,))
    assert len(candidates(avg_pool_global, mixed)) == 1


BLOCKS: list[tuple[Pool, list[int]]] = [
    (lambda x: x.reshape(2, 3, 4, 2, 6, 2).mean((3, 5)), [2, 2]),
    (lambda x: x.view(2, 3, 2, 4, 4, 3).mean(dim=(-1, -3)), [4, 3]),
    (lambda x: x.reshape(2, 3, 4, 2, 6, 2).sum((3, 5)) / 4, [2, 2]),
    (lambda x: x.reshape(2, 3, 4, 2, 6, 2).mean(5).mean(3), [2, 2]),
]


def test_of_blocks_of_any_size() -> None:
    matches = match_attrs_each(avg_pool_blocks, [spelled for spelled, _ in BLOCKS], X)
    assert [attrs["kernel"] for attrs in matches] == [kernel for _, kernel in BLOCKS]


def test_what_is_no_mean_of_blocks() -> None:
    reason = why(avg_pool_blocks, lambda x: x.reshape(2, 3, 4, 2, 6, 2).mean((2, 4)), X)
    assert "its dtype or shape is not what the pattern would compute" in reason
    assert "5 where the pattern has 4" in why(
        avg_pool_blocks, lambda x: x.reshape(2, 3, 4, 2, 6, 2).sum((3, 5)) / 5, X
    )


SLICES: list[Pool] = [
    lambda x: (x[:, :, ::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, ::2] + x[:, :, 1::2, 1::2]) / 4,
    lambda x: 0.25 * (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]),
]


def test_of_slices() -> None:
    assert (
        match_attrs_each(avg_pool_slices, SLICES, X)
        == [{"kernel": [2, 2], "stride": [2, 2], "keepdim": True}] * 2
    )


def test_a_corner_taken_twice() -> None:
    def twice(x: Tensor) -> Tensor:
        return (x[:, :, ::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, ::2] + x[:, :, 1::2, ::2]) / 4

    assert "where the pattern has" in why(avg_pool_slices, twice, X)


def test_of_windows() -> None:
    match = match_attrs(avg_pool_windows, lambda x: x.unfold(2, 2, 2).unfold(3, 3, 1).mean((-2, -1)), X)
    assert match == {"kernel": [2, 3], "stride": [2, 1], "keepdim": True}
    refused_each(avg_pool_windows, [lambda x: x.unfold(1, 2, 2).unfold(3, 3, 1).mean((-2, -1))], X)
