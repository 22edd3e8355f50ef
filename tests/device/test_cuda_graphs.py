"""Regions recorded as CUDA graphs: the same values, results that stay, streams, threads, random numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.backends.cuda_graphs import CudaGraphs, RecordedGraph
from tests.device.test_cuda import moved
from tests.lowering.helpers import Blocks, Counting, events, fused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def recorded(lowered: Any) -> list[RecordedGraph]:
    """What each call site runs; a site that could not record runs the code itself, and no result shows which."""
    from dovetail.lowering.lowered_state import lowered_state_of

    lowering = lowered_state_of(lowered)
    assert lowering is not None
    return [run for site in lowering.sites.values() for run, _ in site._prepared.values()]


@torch.no_grad()
def test_calls_are_replayed_and_results_stay() -> None:
    model, x = Blocks().eval().cuda(), torch.randn(3, 8, device="cuda")
    mine = Counting()
    lowered = dovetail.lower(fused(model, x), [CudaGraphs(mine)], cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {"cuda_graphs(counting)"}
    assert torch.equal(lowered(x), model(x))
    assert not [e for e in events(lowered) if e.outcome == "prepare"]
    assert all(isinstance(r, RecordedGraph) for r in recorded(lowered))
    calls = mine.calls
    first = lowered(x)
    kept = first.clone()
    other = torch.randn_like(x)
    assert torch.equal(lowered(other), model(other))
    assert torch.equal(first, kept)
    assert mine.calls == calls


@torch.no_grad()
def test_results_are_overwritten_where_that_was_asked_for() -> None:
    model, x = Blocks(depth=2).eval().cuda(), torch.randn(3, 8, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs("eager", reuse_outputs=True)], cache=False)
    first = lowered(x)
    second = lowered(torch.randn_like(x))
    assert second.data_ptr() == first.data_ptr()
    third = lowered(torch.zeros_like(x))
    assert third.data_ptr() == second.data_ptr()
    assert torch.equal(third, model(torch.zeros_like(x)))


@torch.no_grad()
def test_weights_that_are_written_or_replaced() -> None:
    model, x = Blocks(depth=2).eval().cuda(), torch.randn(3, 8, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs("eager")], cache=False)
    lowered(x)
    model.layers[0].weight.mul_(2)  # type: ignore[operator,union-attr]
    assert torch.equal(lowered(x), model(x))
    lowered.get_submodule("layers.1").weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
    reference = dovetail.inline(lowered)
    assert torch.equal(lowered(x), reference(x))


def test_calls_that_need_gradients_go_to_the_next_backend() -> None:
    model, x = Blocks(depth=2).cuda(), torch.randn(3, 8, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs("eager"), Counting()], cache=False)
    lowered(x).sum().backward()
    has = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).sum().backward()
    for a, p in zip(has, model.parameters(), strict=True):
        assert p.grad is not None
        assert torch.allclose(a, p.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(lowered(x), model(x))


@torch.no_grad()
def test_random_numbers_go_on_from_call_to_call_and_follow_the_seed() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x * 2 + 1, 0.5) + 1

    x = torch.ones(64, 64, device="cuda")
    gm = dovetail.capture(noisy, (x,))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    lowered = dovetail.lower(dovetail.outline(gm, calls, kind="noisy"), [CudaGraphs("eager")], cache=False)
    lowered(x)
    assert all(isinstance(r, RecordedGraph) for r in recorded(lowered))
    torch.cuda.manual_seed(3)
    first, second = lowered(x), lowered(x)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(3)
    assert torch.equal(lowered(x), first)
    torch.cuda.manual_seed(3)
    assert torch.equal(noisy(x), first)


@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_was_compiled() -> None:
    class Synchronizes(Counting):
        def compile(self, region: Any, examples: Any) -> Any:
            run = super().compile(region, examples)

            def synchronizing(*operands: Tensor) -> Any:
                result = run(*operands)
                result[0].sum().item()
                return result

            return synchronizing

    model, x = Blocks(depth=2).eval().cuda(), torch.randn(3, 8, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs(Synchronizes())], cache=False)
    for _ in range(2):
        assert torch.equal(lowered(x), model(x))
    assert {e.outcome for e in events(lowered) if e.reason} == {"prepare"}
    # A recording that failed is in nobody's way.
    sound = dovetail.lower(fused(model, x), [CudaGraphs("eager")], cache=False)
    assert torch.equal(sound(x), model(x))
    assert all(isinstance(r, RecordedGraph) for r in recorded(sound))


@torch.no_grad()
def test_streams_and_threads() -> None:
    model = Blocks(width=256).eval().cuda()
    x = torch.randn(64, 256, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs("eager")], cache=False)
    lowered(x)
    inputs = [torch.randn_like(x) for _ in range(4)]
    expected = [model(i) for i in inputs]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def calls(number: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    result = lowered(inputs[number])
                    if not torch.equal(result, expected[number]):
                        wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_inside_a_recording_of_the_caller_it_is_recorded_flat() -> None:
    model, x = Blocks(depth=2).eval().cuda(), torch.randn(3, 8, device="cuda")
    lowered = dovetail.lower(fused(model, x), [CudaGraphs("eager")], cache=False)
    lowered(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = lowered(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(result, model(x))


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
@torch.no_grad()
def test_models_of_the_zoo(name: str) -> None:
    entry = zoo.get(name)
    inputs = entry.example_inputs("tiny")
    args, kwargs = moved(inputs.args), moved(inputs.kwargs)
    model = entry.build("tiny").eval().cuda()
    gm = dovetail.fuse(dovetail.capture(model, args, kwargs))
    lowered = dovetail.lower(gm, ["cuda_graphs(eager)"], cache=False)
    expected = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    for _ in range(2):
        results = torch.utils._pytree.tree_leaves(lowered(*args, **kwargs))
        for a, b in zip(results, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)
    assert not [e for e in events(lowered) if e.outcome == "prepare"]


class Scaled(nn.Module):
    """A layer and a number that is baked into captures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * self.scale


@torch.no_grad()
def test_what_was_begun_for_another_model_is_thrown_away() -> None:
    model = Scaled().cuda().eval()
    x = torch.randn(4, 8, device="cuda")
    fast = dovetail.compile(model, (x,), backends="eager")
    kept = [fast(x) for _ in range(3)]
    expected = model(x)
    model.scale = 3.0
    torch.testing.assert_close(fast(x), model(x))
    model.layer = nn.Linear(8, 8).cuda()
    torch.testing.assert_close(fast(x), model(x))
    model.layer.weight.data = torch.zeros(8, 8, device="cuda")
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(x[:2]), model(x[:2]))
    for result in kept:
        torch.testing.assert_close(result, expected)
