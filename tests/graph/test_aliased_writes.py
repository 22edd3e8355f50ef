"""Writes that reach a tensor by way of others: nested detach, idle dropout, `out=`; exact, or refused with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from tests.graph.test_capture_effects import Forward, assert_alike, model_of, plain


def detached_twice(m: Any, x: Tensor) -> Any:
    first = x.detach()
    second = first.copy_(m.linear(torch.ones(6, 8))).detach()
    torch.relu_(second)
    return m.linear(torch.ones(6, 8))


def detached_twice_from_a_local(m: Any, x: Tensor) -> Any:
    y = torch.zeros(6, 8)
    first = y.detach()
    first.copy_(m.linear(x))
    second = first[2:].detach()
    second.relu_()
    return y * 2, second * 3


def every_alias_with_gradients(m: Any, x: Tensor) -> Any:
    first = m.mean.detach()
    first.mul_(m.linear(x))
    second = first.detach()
    second.mul_(m.linear(x))
    third = second[1:].detach()
    third.mul_(m.linear(x)[1:])
    third.detach()[0].relu_()
    return x * 2


def inner_alias_first(m: Any, x: Tensor) -> Any:
    first = m.mean.detach()
    second = first.detach()
    second.relu_()
    first.mul_(m.linear(x))
    return first * 2, second * 3


def without_gradients_after(m: Any, x: Tensor) -> Any:
    y = m.mean.detach()
    y.copy_(m.linear(x))
    with torch.no_grad():
        y[0].mul_(3)
    return x * 2


def another_part_keeps_its_history(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    part = y[1]
    y[0].detach().mul_(2)
    return part * 2


def a_buffer_gets_gradients_last(m: Any, x: Tensor) -> Any:
    mean = torch.zeros(6, 8).add_(m.mean)
    with torch.no_grad():
        mean.mul_(0.5)
    return mean.mul_(m.linear(x)) * 2


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize(
    "forward",
    [
        detached_twice,
        detached_twice_from_a_local,
        every_alias_with_gradients,
        inner_alias_first,
        without_gradients_after,
        another_part_keeps_its_history,
        a_buffer_gets_gradients_last,
    ],
)
def test_writes_through_nested_aliases_reach_the_first(forward: Forward, grad: bool) -> None:
    assert_alike(forward, plain().requires_grad_(grad))


def idle(x: Tensor) -> Tensor:
    return F.dropout(x, p=0.5, training=False)


def idle_before_a_block(m: Any, x: Tensor) -> Any:
    y = idle(x)
    with torch.no_grad():
        y.mul_(m.linear(x))
    return -y, x


def idle_in_a_block(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = idle(idle(x))
        y.mul_(2)
    return -y


def idle_view_in_a_block(m: Any, x: Tensor) -> Any:
    y = idle(x[:, ::2])
    with torch.no_grad():
        z = y.t()[1:]
        z.add_(1)
    return z * 2, y.sum()


def idle_and_autocast(m: Any, x: Tensor) -> Any:
    y = idle(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = idle(y).view(-1)
        z.add_(1)
        w = m.linear(y)
    return z * 2, w.float()


@pytest.mark.parametrize(
    "forward", [idle_before_a_block, idle_in_a_block, idle_view_in_a_block, idle_and_autocast]
)
def test_idle_dropout_is_an_alias_in_blocks(forward: Forward) -> None:
    assert_alike(forward, plain())


def out_in_a_block(m: Any, x: Tensor) -> Any:
    y = torch.zeros(6, 8)
    with torch.no_grad():
        torch.exp(x, out=y)
    return y * 2


def out_permuted(m: Any, x: Tensor) -> Any:
    y = torch.zeros(8, 6, dtype=torch.float64).t()
    return torch.exp(x, out=y) * 2, y * 3


def out_from_permuted(m: Any, x: Tensor) -> Any:
    y = torch.zeros(8, 6)
    torch.exp(x.t(), out=y)
    return y, y.view(-1)


def out_of_two(m: Any, x: Tensor) -> Any:
    y, i = torch.zeros(12)[::2], torch.zeros(6, dtype=torch.long)
    torch.max(x, 1, out=(y, i))
    return y * 2, i + 1


def out_column(m: Any, x: Tensor) -> Any:
    torch.sum(x, dim=1, out=m.mean[:, 2])
    return m.mean * 2


def out_empty(m: Any, x: Tensor) -> Any:
    y, z = torch.empty(0), torch.empty(0)
    torch.exp(x, out=y)
    with torch.no_grad():
        torch.neg(x, out=z)
    y[0].add_(1)
    return y * 2, z * 3


@pytest.mark.parametrize(
    "forward", [out_in_a_block, out_permuted, out_from_permuted, out_of_two, out_column, out_empty]
)
def test_out_is_written_as_it_is(forward: Forward) -> None:
    assert_alike(forward, plain())


def _stale_alias(m: Any, x: Tensor) -> Any:
    y = torch.zeros(6, 8)
    alias = y.detach()
    alias.copy_(m.linear(x))
    y.add_(3)
    return alias.detach() * 2


def _stale_inner_alias(m: Any, x: Tensor) -> Any:
    y = torch.zeros(6, 8)
    alias = y.detach()
    alias.copy_(m.linear(x))
    inner = alias.detach()
    y.detach().add_(3)
    return inner * 2


def _history_of_another_part(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    part = y[1]
    y.detach()[0].mul_(2)
    return part * 2


def _history_of_a_buffer(m: Any, x: Tensor) -> Any:
    m.mean.mul_(m.linear(x))
    m.mean.detach().relu_()
    return m.mean * 2


def _history_of_an_alias(m: Any, x: Tensor) -> Any:
    alias = m.mean.detach()
    alias.mul_(m.linear(x))
    alias.detach().relu_()
    return alias * 2


@pytest.mark.parametrize(
    "forward",
    [_stale_alias, _stale_inner_alias, _history_of_another_part, _history_of_a_buffer, _history_of_an_alias],
)
def test_reads_that_no_functional_graph_has_are_refused(forward: Forward) -> None:
    with pytest.raises(dovetail.CaptureError, match="gradient history does not know") as raised:
        dovetail.capture(model_of(forward), (plain(),))
    assert "\n  at " in str(raised.value)


def _resizes_slice(m: Any, x: Tensor) -> Any:
    torch.ops.aten.exp.out(x, out=x[:2, :2])
    return x


def _resizes_local(m: Any, x: Tensor) -> Any:
    y = torch.zeros(3)
    with torch.no_grad():
        torch.exp(x, out=y)
    return y


def _resizes_second(m: Any, x: Tensor) -> Any:
    y, i = torch.zeros(6), torch.zeros(3, dtype=torch.long)
    torch.max(x, 1, out=(y, i))
    return y, i


def _resizes_empty_slice(m: Any, x: Tensor) -> Any:
    return torch.exp(m.mean, out=x[:0])


def _resizes_in_autocast(m: Any, x: Tensor) -> Any:
    y = torch.zeros(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.exp(x, out=y)
        z = m.linear(x)
    return y, z


@pytest.mark.parametrize(
    "forward", [_resizes_slice, _resizes_local, _resizes_second, _resizes_empty_slice, _resizes_in_autocast]
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_shape_is_refused(forward: Forward) -> None:
    with pytest.raises(dovetail.CaptureError, match="a graph cannot resize a tensor") as raised:
        dovetail.capture(model_of(forward), (plain(),))
    assert "\n  at " in str(raised.value)


def test_an_empty_input_is_not_resized() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return torch.exp(m.mean, out=x)

    with pytest.raises(dovetail.CaptureError):
        dovetail.capture(model_of(forward), (torch.empty(0),))
