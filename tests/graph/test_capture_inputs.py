"""Example inputs that are easily mistaken for each other, and programs with odd names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dovetail


def test_one_tensor_given_twice_is_two_inputs():
    x, a, b = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    gm = dovetail.capture(lambda a, b: a - b, (x, x))
    assert torch.equal(gm(a, b), a - b)
    assert torch.equal(gm(x, x), x - x)
    nested = dovetail.capture(lambda a, more: a - more["b"][0], (x, {"b": [x]}))
    assert torch.equal(nested(a, {"b": [b]}), a - b)


def test_one_tensor_given_twice_and_written_is_refused():
    x = torch.randn(2, 3)
    with pytest.raises(dovetail.CaptureError, match="share memory"):
        dovetail.capture(lambda a, b: a.add_(b), (x, x))


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())]
)
def test_an_exported_program_whose_input_is_called_like_a_builtin(model):
    x = torch.randn(4, 3)
    model.eval()
    program = torch.export.export(model, (x,))
    before = str(program.graph)
    gm = dovetail.capture(program)
    assert torch.equal(gm(x), model(x))
    assert str(program.graph) == before
