"""Embeddings and the norm after them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.rules.library import KINDS
from dovetail.rules.library.norms import embedding_layer_norm, embedding_rms_norm
from tests.rules.library.helpers import (
    assert_references,
    candidates,
    graph_of,
    match_attrs,
    refused_each,
    request_for,
    why,
)

V, W, S = 32, 16, 6
IDS = torch.randint(0, V, (2, S))


class Embeddings(nn.Module):
    """Words, and up to two more tables, normalised."""

    def __init__(self, tables: int, padding: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(V, W, padding_idx=padding)
        self.more = nn.ModuleList(nn.Embedding(V, W) for _ in range(tables - 1))
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(W, eps=1e-6)

    def forward(self, ids: Tensor, *others: Tensor) -> Tensor:
        x = self.words(ids)
        for table, other in zip(self.more, others, strict=True):
            x = x + table(other)
        return self.norm(self.drop(x))


DEFAULTS = {"eps": 1e-6, "offset": 0.0, "dropout": 0.0, "padding_idx": -1, "dims": 1, "out_dtype": "promoted"}


@pytest.mark.parametrize("tables", [1, 2, 3])
def test_tables_and_a_layer_norm(tables: int) -> None:
    others = [torch.randint(0, V, (S,)) for _ in range(tables - 1)]
    match = match_attrs(embedding_layer_norm, Embeddings(tables, padding=3).eval(), IDS, *others)
    assert match == {**DEFAULTS, "norm": "layer_norm", "tables": tables, "padding_idx": 3}


def test_with_dropout() -> None:
    match = match_attrs(embedding_layer_norm, Embeddings(2, dropout=0.25).train(), IDS, torch.arange(S))
    assert match["dropout"] == 0.25


def test_with_positions_from_elsewhere() -> None:
    class Model(Embeddings):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return self.norm(self.words(ids) + positions)

    assert match_attrs(embedding_layer_norm, Model(1), IDS, torch.randn(S, W))["tables"] == 1


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_table_and_an_rms_norm() -> None:
    match = match_attrs(
        embedding_rms_norm, lambda i, t, w: rms(F.embedding(i, t), w), IDS, torch.randn(V, W), torch.randn(W)
    )
    assert match == {**DEFAULTS, "norm": "rms_norm", "tables": 1}


def test_the_rows_come_out_too() -> None:
    class Model(Embeddings):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            rows = self.words(ids)
            return self.norm(rows), rows * 2

    model = Model(1)
    graph = graph_of(model, (IDS,))
    match = candidates(embedding_layer_norm, graph)[0]
    fused = dovetail.outline(graph, [request_for(graph, match)])
    (region,) = dovetail.regions(fused)
    assert sorted(region.results) == [0, 1]  # type: ignore[type-var]
    assert assert_references(fused) == 1
    assert all(torch.equal(a, b) for a, b in zip(fused(IDS), model(IDS), strict=True))


class Library(dovetail.Backend):
    name = "library"
    kernels: ClassVar = {"embedding_norm": KINDS["embedding_norm"].reference}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("tables", [1, 2, 3])
def test_a_kernel_takes_it_where_the_sum_goes_on(tables: int, dropout: float) -> None:
    class Model(Embeddings):
        def forward(self, ids: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.words(ids)
            for table, other in zip(self.more, others, strict=True):
                x = x + table(other)
            x = self.drop(x)
            return self.norm(x), x * 2

    model = Model(tables, dropout=dropout).requires_grad_(False)
    inputs = (IDS, *(torch.randint(0, V, (S,)) for _ in range(tables - 1)))
    graph = graph_of(model, inputs)
    fused = dovetail.outline(graph, [request_for(graph, candidates(embedding_layer_norm, graph)[0])])
    lowered = dovetail.lower(fused, [Library()], cache=False, verify=True)
    assert [r.backend for r in dovetail.regions(lowered)] == ["library"]
    if not dropout:
        torch.testing.assert_close(lowered(*inputs), model(*inputs))


def test_rows_that_the_sum_consists_of_are_no_result_of_the_kind() -> None:
    class Model(Embeddings):
        def forward(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            rows = self.words(ids)
            return self.norm(rows + positions), rows * 2

    graph = graph_of(Model(1), (IDS, torch.randn(S, W)))
    fused = dovetail.outline(graph, [request_for(graph, candidates(embedding_layer_norm, graph)[0])])
    assert sorted(map(str, dovetail.regions(fused)[0].results)) == ["0", "None"]
    assert assert_references(fused) == 1


def test_the_residual_of_a_layer_is_not_part_of_it() -> None:
    def layer(ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        rows = F.embedding(ids, table)
        return rms(rows + torch.tanh(rows), weight)

    reason = why(embedding_rms_norm, layer, IDS, torch.randn(V, W), torch.randn(W))
    assert "is computed from the embedding" in reason


def test_a_product_is_no_embedding() -> None:
    refused_each(
        embedding_layer_norm, [nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W))], torch.randn(2, S, W)
    )
