"""Process groups of ranks that are threads or turns of one process, and backends that ranks could choose differently."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from dovetail.lowering.backend_protocol import Backend
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline


@contextmanager
def rank_groups(store: Any, size: int) -> Iterator[list[Any]]:
    """A group with a store as each of its ranks sees it."""
    groups = tuple(dist.ProcessGroup(store, rank, size) for rank in range(size))
    stores = distributed_c10d._pg_map
    for group in groups:
        stores[group] = ("gloo", store)
    try:
        yield list(groups)
    finally:
        for group in groups:
            del stores[group]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _OnRanks(Backend):
    """Takes bodies only in processes where `is_active` is set."""

    trains = True
    is_active = True
    factor = 1.0

    def supports(self, region: Region) -> Any:
        return True if type(self).is_active else Decline("this process does not use it")

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        factor, run = self.factor, region.body.forward
        return lambda *operands: tuple(factor * result for result in run(*operands))

    def save(self, compiled: Any) -> bytes:
        return b"saved"

    def load(self, data: bytes, region: Region) -> Any:
        return self.compile(region, ())


class First(_OnRanks):
    """Its results are those of the body, but for their last bits, so that another choice shows in the results."""

    name = "first"
    factor = 1.0 + 2**-20


class Second(_OnRanks):
    name = "second"


def backends_of(compiled: Any) -> list[str | None]:
    """The backend of each region of each graph, in order."""
    import dovetail

    return [region.backend for graph in compiled.graphs for region in dovetail.regions(graph)]


def events_of(compiled: Any) -> list[str]:
    return [str(event) for event in compiled.diagnostics]
