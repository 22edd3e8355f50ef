"""Example inputs that are easily mistaken for each other, and programs with odd names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dovetail


def test_one_tensor_given_twice_must_be_given_twice_again():
    x, a, b = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    gm = dovetail.capture(lambda a, b: a * 2 - b, (x, x))
    assert torch.equal(gm(a, a), a * 2 - a)
    with pytest.raises(dovetail.CallMismatch, match="'a' and 'b' were one and the same tensor"):
        gm(a, b)
    apart = dovetail.capture(lambda a, b: a * 2 - b, (x, x.clone()))
    assert torch.equal(apart(a, b), a * 2 - b)
    assert torch.equal(apart(a, a), a * 2 - a)
    nested = dovetail.capture(lambda a, more: a - more["b"][0], (x, {"b": [x]}))
    with pytest.raises(dovetail.CallMismatch):
        nested(a, {"b": [b]})


def test_three_times_too():
    x, other = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    gm = dovetail.capture(model, (x, x, x))
    assert torch.equal(gm(other, other, other)[0], model(other, other, other)[0])
    for wrong in ((other, x, x), (x, other, x), (x, x, other)):
        with pytest.raises(dovetail.CallMismatch):
            gm(*wrong)


def test_an_input_that_is_not_read_is_no_twin():
    x, y = torch.randn(2), torch.randn(2)
    gm = dovetail.capture(lambda a, b: b + 1, (x, y))
    assert torch.equal(gm(y, x), x + 1)


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
