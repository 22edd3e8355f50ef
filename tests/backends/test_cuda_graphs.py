"""CUDA graphs around another backend, as far as that shows without a device; tests/device has the rest."""

from __future__ import annotations

import contextlib
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.backends.cuda_graphs import CudaGraphs, RecordedGraph
from dovetail.errors import InvalidArgument
from dovetail.lowering.backend_protocol import by_name, identity
from dovetail.lowering.failures import LoweringFailure
from tests.lowering.helpers import Blocks, Counting, events, fused


def test_it_is_named_after_what_it_goes_around() -> None:
    assert CudaGraphs().name == "cuda_graphs(inductor)"
    assert by_name("cuda_graphs").name == "cuda_graphs(inductor)"
    assert by_name("cuda_graphs(eager)").inner.name == "eager"
    with pytest.raises(InvalidArgument, match="there is no backend 'nobody'"):
        by_name("cuda_graphs(nobody)")
    with pytest.raises(InvalidArgument, match="there is no backend 'eager"):
        by_name("eager(torchscript)")
    with pytest.raises(InvalidArgument, match="wrap one backend, and 2 were given"):
        CudaGraphs(["eager", "torchscript"])


def test_it_is_what_the_other_one_is() -> None:
    assert CudaGraphs("torchscript").can_save
    assert not CudaGraphs("eager").can_save
    assert identity(CudaGraphs("eager")) != identity(CudaGraphs("eager", reuse_outputs=True))
    again = pickle.loads(pickle.dumps(CudaGraphs("torchscript", reuse_outputs=True)))
    assert (again.inner.name, again.reuse_outputs) == ("torchscript", True)

    class Library(dovetail.Backend):
        name = "library"
        kernels = {"rms_norm": torch.relu}  # noqa: RUF012

    assert CudaGraphs(Library()).kernels is Library.kernels


def test_off_the_device_it_declines_and_the_next_one_takes_over() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Counting()
    lowered = dovetail.lower(fused(model, x), [CudaGraphs(mine), mine], cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {"counting"}
    assert events(lowered)[0].reason == (
        "CUDA graphs need all operands on a CUDA device, and some are on cpu"
    )
    with torch.no_grad():
        assert torch.equal(lowered(x), model(x))


class Pretended:
    """Stands for a CUDA graph: what is recorded is run again, into the very memory it was recorded into."""

    latest: Pretended

    def __init__(self) -> None:
        Pretended.latest = self
        self.recorded: Any = None

    def replay(self) -> None:
        run, static, outputs = self.recorded
        for old, new in zip(outputs, run(*static), strict=True):
            if old.untyped_storage()._cdata not in {s.untyped_storage()._cdata for s in static}:
                old.copy_(new)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of torch.cuda that recording needs, on the CPU."""
    nothing: Any = lambda *args, **options: contextlib.nullcontext()  # noqa: E731
    stream = types.SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    for name, value in {
        "Stream": lambda device: stream,
        "Event": lambda: types.SimpleNamespace(record=lambda stream: None),
        "graph_pool_handle": lambda: 0,
        "current_stream": lambda: stream,
        "is_current_stream_capturing": lambda: False,
        "stream": nothing,
        "device": nothing,
        "graph": nothing,
        "CUDAGraph": Pretended,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def recorded(
    run: Any, *operands: Tensor, constants: frozenset[int] = frozenset(), **options: Any
) -> RecordedGraph:
    graph = RecordedGraph(run, operands, constants, **options)
    Pretended.latest.recorded = (run, graph.static, graph.results)
    return graph


@pytest.mark.usefixtures("pretended")
def test_results_are_copies_unless_asked() -> None:
    x, y, w = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x * w, x.sum(0)

    for reuse in (False, True):
        graph = recorded(run, x, w, constants=frozenset({1}), reuse_outputs=reuse)
        first = graph(x, w)
        kept = [v.clone() for v in first]
        second = graph(y, w)
        assert all(torch.equal(a, b) for a, b in zip(second, run(y, w), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)) is not reuse
        assert all((a.data_ptr() == b.data_ptr()) is reuse for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("pretended")
def test_constants_are_read_where_they_lie_and_other_operands_are_copied() -> None:
    x, w = torch.randn(3, 4), torch.randn(4)
    graph = recorded(lambda x, w: (x * w,), x, w, constants=frozenset({1}))
    assert graph.static[1] is w
    assert graph.static[0].data_ptr() != x.data_ptr()
    w.mul_(2)
    assert torch.equal(graph(x, w)[0], x * w)


@pytest.mark.usefixtures("pretended")
def test_views_of_operands_are_views_of_the_caller_s() -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    graph = recorded(lambda x, w: (x[1:, 2:], w.t(), x + 1), x, w, constants=frozenset({1}))
    y = torch.randn(12, 4)[3:9]
    part, turned, more = graph(y, w)
    assert torch.equal(part, y[1:, 2:])
    assert torch.equal(turned, w.t())
    assert torch.equal(more, y + 1)
    y.zero_()
    assert not part.any()


@pytest.mark.usefixtures("pretended")
def test_operands_that_lie_over_themselves_or_have_gaps() -> None:
    wide, narrow = torch.randn(4).expand(3, 4), torch.randn(3, 8)[:, :4]
    graph = recorded(lambda a, b: (a + b,), wide, narrow)
    assert [s.stride() for s in graph.static] == [(0, 1), (8, 1)]
    other = torch.randn(4).expand(3, 4)
    assert torch.equal(graph(other, narrow)[0], other + narrow)


@pytest.mark.usefixtures("pretended")
def test_what_copies_would_not_be_is_not_recorded() -> None:
    x = torch.randn(3, 4)

    def share(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return y, y[0]

    with pytest.raises(LoweringFailure, match="two of its results share memory"):
        recorded(share, x)
    with pytest.raises(LoweringFailure, match="has strides that a copy of it would not have"):
        recorded(lambda x: ((x + 1)[:1].expand(3, 4),), x)
