"""Writes to buffers, inputs and lists of tensors that have gradients: as in the model, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from tests.fuzz.observe import Snapshot, difference, observe

Forward = Callable[[Any, Tensor, Tensor], Any]


class Writer(nn.Module):
    mean: Tensor
    scale: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 3))
        self.register_buffer("mean", torch.linspace(0, 1, 6).reshape(2, 3).clone())
        self.register_buffer("scale", torch.tensor(0.5))
        self.run = forward

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


def assert_alike(forward: Forward, x: Tensor | None = None, y: Tensor | None = None) -> None:
    inputs = [
        torch.linspace(-1, 1, 6).reshape(2, 3) if x is None else x,
        torch.linspace(2, 3, 6).reshape(2, 3) if y is None else y,
    ]
    twin, model = Writer(forward), Writer(forward)
    want = observe(twin, Snapshot(twin), inputs, runs=2, gradients=True)
    assert not want[-1].error
    graph = dovetail.capture(model, tuple(i.clone() for i in inputs))
    got = observe(graph, Snapshot(model), inputs, runs=2, gradients=True)
    assert difference(want, got, gradients=True, aliasing=False) == ("", "")


OVERWRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda v: v.copy_(torch.ones_like(v)),
    "zero_": lambda v: v.zero_(),
    "setitem": lambda v: v.__setitem__(..., torch.ones(())),
    "log_normal_": lambda v: v.log_normal_(),
    "bernoulli_": lambda v: v.bernoulli_(0.5),
    "gt_": lambda v: v.gt_(0.25),
    "_foreach_zero_": lambda v: torch._foreach_zero_([v]),
}
HIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "no_grad": torch.no_grad()(lambda v: v.add_(v)),
    "no_grad draw": torch.no_grad()(lambda v: v.normal_()),
    "no_grad setitem": torch.no_grad()(lambda v: v.__setitem__(0, 1.0)),
    "detach": lambda v: v.detach().mul_(2),
}
WRITTEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "buffer": lambda m, y: m.mean,
    "input": lambda m, y: y,
    "scalar buffer": lambda m, y: m.scale,
    "own": lambda m, y: y * 1,
}


def _written(where: str, by: Callable[[Tensor], Any], *, returned: bool) -> Forward:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        tensor = WRITTEN[where](m, y)
        tensor.mul_(m.weight.sum())
        by(tensor)
        return tensor if returned else x * m.weight

    return forward


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("where", WRITTEN)
@pytest.mark.parametrize("name", OVERWRITES)
def test_what_is_written_over_keeps_that_it_has_gradients(name: str, where: str, returned: bool) -> None:
    assert_alike(_written(where, OVERWRITES[name], returned=returned))


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("where", ["buffer", "input"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_write_that_the_history_does_not_know_of_is_refused(name: str, where: str, returned: bool) -> None:
    with pytest.raises(dovetail.CaptureError, match="history does not know") as caught:
        dovetail.capture(
            Writer(_written(where, HIDDEN[name], returned=returned)), (torch.ones(2, 3), torch.ones(2, 3))
        )
    assert "test_export_fixups.py" in str(caught.value)


def _cleared_first(m: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        m.mean.zero_()
    m.mean.add_(x * m.weight)
    return m.mean * 2


def _moving_average(m: Any, x: Tensor, y: Tensor) -> Any:
    h = x * m.weight
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h, alpha=0.1)
    return h - m.mean


def _read_without_grad(m: Any, x: Tensor, y: Tensor) -> Any:
    m.mean.copy_(x * m.weight)
    with torch.no_grad():
        doubled = m.mean * 2
    return doubled + x


@pytest.mark.parametrize("forward", [_cleared_first, _moving_average, _read_without_grad])
def test_buffers_without_history_are_written_in_no_grad(forward: Forward) -> None:
    assert_alike(forward)


@pytest.mark.parametrize(
    "y",
    [
        torch.arange(3.0),
        torch.arange(6).reshape(2, 3),
        torch.arange(6.0).double().reshape(2, 3) / 7,
        torch.arange(6.0).reshape(3, 2).t(),
    ],
    ids=["broadcast", "integers", "double", "transposed"],
)
def test_a_buffer_keeps_its_form_when_another_is_copied_into_it(y: Tensor) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        m.mean.copy_(y)
        return m.mean.sum(), m.mean + 1, m.mean.view(-1) * 2

    assert_alike(forward, y=y)


@pytest.mark.parametrize("name", ["logical_not_", "logical_and_"])
def test_logical_operators_over_values_with_gradients_are_refused(name: str) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        h = x * m.weight
        return getattr(h, name)(*[y] * (name == "logical_and_"))

    with pytest.raises(dovetail.CaptureError, match=f"over a value with gradients by aten.{name}"):
        dovetail.capture(Writer(forward), (torch.ones(2, 3), torch.ones(2, 3)))


def _scalar(h: Tensor, y: Tensor) -> None:
    torch._foreach_add_([y, h], 0.5)


def _list_of_tensors(h: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([y, h], [y, h])


def _scalars(h: Tensor, y: Tensor) -> None:
    torch._foreach_addcmul_([h, y], [h, y], [h, y], [0.5, 0.25])


def _weighted(h: Tensor, y: Tensor) -> None:
    torch._foreach_add_([h, y], [torch.ones(3), torch.ones(3)], alpha=0.5)


@pytest.mark.parametrize("write", [_scalar, _list_of_tensors, _scalars, _weighted])
def test_each_tensor_of_a_list_has_a_history_of_its_own(write: Callable[[Tensor, Tensor], None]) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        h = x * m.weight
        write(h, y)
        return h, y

    assert_alike(forward)


def test_a_list_that_reads_what_it_wrote_is_refused() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        h = x * m.weight
        torch._foreach_add_([y, h], [h, y])
        return h

    with pytest.raises(dovetail.CaptureError, match="that the same call writes before"):
        dovetail.capture(Writer(forward), (torch.ones(2, 3), torch.ones(2, 3)))
