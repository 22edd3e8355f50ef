"""Operands of regions arrive as capture expects them, on a GPU: after `compile` the first call compiles nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Interpreter, Node

import dovetail
from tests.runtime.test_expected_operands import LAYOUTS, Images, compiled_later

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _Strides(Interpreter):
    """Records the values whose strides differ from those in the graph."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.differing: list[str] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.stride() != n.meta["val"].stride():
            self.differing.append(f"{n.name}: {n.meta['val'].stride()} expected, {value.stride()}")
        return value


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images(layout: Any, dtype: torch.dtype) -> None:
    model = Images().eval().to(dtype).to(memory_format=layout)
    x = torch.randn(2, 3, 29, 29, dtype=dtype).to(memory_format=layout)
    with torch.no_grad():
        assert compiled_later(model, x, device="cuda") == []
        strides = _Strides(dovetail.capture(model.cuda(), (x.cuda(),)))
        strides.run(x.cuda())
    assert strides.differing == []


def test_a_copy_that_changes_the_layout_is_captured() -> None:
    """Without cuDNN the result of the convolution would be contiguous, and the copy nothing."""
    model = torch.nn.Conv2d(3, 8, 3).eval().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        gm = dovetail.capture(lambda x: model(x).contiguous().view(2, -1), (x,))
        assert torch.equal(gm(x), model(x).contiguous().view(2, -1))
