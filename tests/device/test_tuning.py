"""Tuning on a GPU: events, CUDA graphs or not, and a plan that is applied there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dovetail

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Block(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 1024), nn.Linear(1024, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.timeout(400)
def test_a_plan_of_a_gpu_is_measured_and_applied_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block()).cuda().eval()
    x = torch.randn(32, 256, device="cuda")
    plan = dovetail.tune(
        model, (x,), budget=100, store=tmp_path / "s.db", backends=["inductor"], progress=False
    )
    (environment,) = plan.environments.values()
    assert environment.device.startswith("cuda")
    ((_, decision),) = next(iter(plan.graphs.values())).items()
    considered = [decision.choice, *(a.choice for a in decision.rejected)]
    assert any("without CUDA graphs" in text for text in considered)
    plan.check(model, (x,))
    with torch.no_grad():
        fast = dovetail.compile(model, (x,), plan=plan)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
