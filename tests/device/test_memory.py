"""Memory of a GPU is released with the compiled model that used it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dovetail

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cuda_graphs"])
def test_nothing_is_held_after_the_compiled_model_is_dropped(backend: str) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval().cuda().bfloat16()
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    model(x)
    before = allocated()
    for _ in range(3):
        fast = dovetail.compile(model, (x,), backends="eager", cache=False, cuda_graphs=True)
        if backend == "cuda_graphs":
            fast = dovetail.lower(
                dovetail.fuse(dovetail.capture(model, (x,)), dovetail.rules.repeats()),
                [dovetail.backends.CudaGraphs("eager")],
                cache=False,
            )
        expected = model(x)
        for _ in range(4):
            torch.testing.assert_close(fast(x), expected)
        del fast, expected
    assert allocated() <= before


@torch.no_grad()
def test_recordings_replayed_at_the_same_time_share_no_workspace() -> None:
    # Long sums, which cuBLAS splits and adds up in its workspace.
    models = [nn.Linear(1 << 15, 64, bias=False).eval().cuda().bfloat16() for _ in range(2)]
    inputs = [torch.randn(16, 1 << 15, device="cuda", dtype=torch.bfloat16) for _ in models]
    fast = [
        dovetail.compile(m, (x,), backends="eager", cache=False, cuda_graphs=True)
        for m, x in zip(models, inputs, strict=True)
    ]
    expected = [f(x).clone() for f, x in zip(fast, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for f, x, stream in zip(fast, inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append([f(x) for _ in range(4)])
        torch.cuda.synchronize()
        for group, value in zip(results, expected, strict=True):
            assert all(torch.equal(result, value) for result in group)
