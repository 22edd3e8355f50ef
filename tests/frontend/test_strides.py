"""Inputs that lie in memory otherwise than the example inputs did: the model's results, or refused with the strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail


@torch.library.custom_op("dovetail_strides::raise_by", mutates_args={"x"})
def raise_by(x: Tensor, by: float) -> None:
    x.add_(by)


class Small(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def writes(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        raise_by(view(x), 0.5)
        return x * 2

    return forward


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.arange(20.0).reshape(5, 4),
    "transposed": lambda: torch.arange(20.0).reshape(4, 5).t(),
    "offset": lambda: torch.arange(40.0).reshape(10, 4)[5:],
    "gaps": lambda: torch.arange(40.0).reshape(5, 8)[:, ::2],
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:3],
    "every_second": lambda x: x[:, ::2],
    "transpose": lambda x: x.t(),
    "row": lambda x: x[2],
    "whole": lambda x: x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_that_custom_operators_write_do_not_depend_on_the_layout(view: str, layout: str) -> None:
    model = Small(writes(VIEWS[view]))
    if layout == "gaps" and view in ("every_second", "transpose", "row"):
        with pytest.raises(dovetail.CaptureError, match=r"memory has gaps\n  at .*test_strides.py"):
            dovetail.capture(model, (LAYOUTS[layout](),))
        return
    graph = dovetail.capture(model, (LAYOUTS[layout](),))
    for make in LAYOUTS.values():
        given, passed = make(), make()
        assert torch.equal(graph(passed), model(given))
        assert torch.equal(passed, given)


def test_views_that_custom_operators_write_follow_the_kernel_and_not_its_fake() -> None:
    def forward(x: Tensor) -> Tensor:
        # The fake result has the strides of the transpose, the real one is contiguous.
        y = F.batch_norm(x.t(), None, None, training=True)
        raise_by(y[:, ::2], 0.5)
        return y * 2

    x = torch.linspace(-1, 1, 16).reshape(4, 4) ** 2
    assert torch.equal(dovetail.capture(Small(forward), (x,))(x), forward(x))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "stride": lambda x: x * x.stride(0),
    "is_contiguous": lambda x: x + 1 if x.is_contiguous() else x - 1,
    "as_strided": lambda x: x.contiguous().as_strided((3,), (2,)) * 1,
    "drawn_over": lambda x: F.dropout(x * 1, 0.5, True, inplace=True),
    "drawn": lambda x: F.dropout(x.contiguous(), 0.5, True),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_model_that_reads_strides_is_called_with_those_it_was_captured_with(
    reader: str, tmp_path: Path
) -> None:
    model = Small(READERS[reader])
    graph = dovetail.capture(model, (LAYOUTS["contiguous"](),))
    dovetail.save(graph, tmp_path / "graph.pt2")
    for known in (graph, dovetail.load(tmp_path / "graph.pt2")):
        torch.manual_seed(0)
        expected = model(LAYOUTS["offset"]())
        torch.manual_seed(0)
        assert torch.equal(known(LAYOUTS["offset"]()), expected)
        with pytest.raises(dovetail.CallMismatch, match=r"captured with strides \(4, 1\) and has \(1, 5\)"):
            known(LAYOUTS["transposed"]())


READERS_OF_NONE: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: x.relu() * 2,
    "contiguous": lambda x: x.contiguous().view(-1)[:3] * 1,
    "copied": lambda x: x.clone(memory_format=torch.contiguous_format).as_strided((3,), (2,)) * 1,
    "dropout": lambda x: F.dropout(x, 0.5, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", READERS_OF_NONE)
def test_other_models_take_inputs_of_any_strides(reader: str, layout: str) -> None:
    model = Small(READERS_OF_NONE[reader])
    graph = dovetail.capture(model, (LAYOUTS["contiguous"](),))
    torch.manual_seed(0)
    expected = model(LAYOUTS[layout]())
    torch.manual_seed(0)
    assert torch.equal(graph(LAYOUTS[layout]()), expected)
