"""A file as `save` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.formats.archive.save import save


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": torch.relu(self.linear(x) + self.offset)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=8)}}
    graph = dovetail.fuse(dovetail.capture(Small().eval(), (torch.ones(2, 3),), dynamic_shapes=sizes))
    path = tmp_path_factory.mktemp("files") / "graph.pt2"
    save(graph, path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    path = tmp_path / "graph.pt2"
    path.write_bytes(original.read_bytes())
    return path
