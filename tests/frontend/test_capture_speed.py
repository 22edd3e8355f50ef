"""Capturing traces the model once, and takes little longer than torch.export."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.frontend import export


class Writing(nn.Module):
    """Writes in place to an activation, a view, a buffer, an input and the statistics of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        h = torch.relu_(self.norm(x)) + 0.5
        h[:, 1:].mul_(2)
        self.total.add_(h.detach().mean(0))
        state.copy_(h.detach())
        padded = torch.zeros(8, 6)
        padded[:, 1:5] = h
        return F.dropout(padded, 0.5, self.training, inplace=True)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are traced a second time, to be decomposed."""
    programs: list[Any] = []
    retraced = export.retraced

    def counted(program: Any, signature: Any) -> Any:
        programs.append(program)
        return retraced(program, signature)

    monkeypatch.setattr(export, "retraced", counted)
    return programs


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_model_that_writes_in_place_is_traced_once(mode: str, traces: list[Any]) -> None:
    torch.manual_seed(0)
    model = Writing().train(mode == "train")
    counts: list[int] = []
    model.register_forward_pre_hook(lambda module, args: counts.append(1))
    x, state = torch.randn(8, 4), torch.zeros(8, 4)
    graph = dovetail.capture(model, (x, state))
    assert len(counts) == 1
    assert traces == []
    dovetail.check(graph)


def test_a_program_that_cannot_be_walked_is_traced_a_second_time(traces: list[Any]) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.sin()
        y.view(torch.int32)[1].zero_()
        return y

    dovetail.capture(forward, (torch.ones(2, 3),))
    assert len(traces) == 1


# Of processor time, which the machine's other work disturbs still; a second trace takes two to four times the export.
_MOST, _TOLERANCE = 1.3, 0.1
# Batch norm is decomposed, so its fake kernel runs a second time, and in train mode its running statistics are written: a
# clone and a copy for each. That is most of what these models are.
_BATCH_NORM = {"zoo inception", "ResNet", "MobileNetV2"}
_MOST_WITH_BATCH_NORM = 1.55


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_capture_takes_little_longer_than_export() -> None:
    pytest.importorskip("transformers")
    from benchmarks import capture as bench

    slow: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, build in bench.models():
            most = _MOST_WITH_BATCH_NORM if name.partition(",")[0] in _BATCH_NORM else _MOST
            row = bench.measure(name, build(), 5)
            if row.export > 0.2 and row.ratio > most + _TOLERANCE:
                row = bench.measure(name, build(), 5)  # once more: the machine may have been busy
            if row.export > 0.2 and row.ratio > most + _TOLERANCE:
                slow.append(str(row))
    assert slow == []
