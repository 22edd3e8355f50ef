"""Writes through views of every kind: values, gradients and strides as in the model, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.frontend.test_side_effects import Forward, assert_alike, matrix, model_of

INFINITE = float("inf")


def extreme(x: Tensor) -> Tensor:
    y = x * 2
    y[0, 0], y[2, 3] = -INFINITE, INFINITE
    return y


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda y: y.expand(6, 8),
    "expand, kept sizes": lambda y: y.expand(-1, 8),
    "expand_as": lambda y: y.expand_as(torch.ones(6, 8)),
    "broadcast_to": lambda y: torch.broadcast_to(y, (6, 8)),
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, torch.ones(1, 8))[0],
    "added dimension": lambda y: y.expand(1, 6, 8),
    "added dimensions": lambda y: torch.broadcast_to(y, (1, 1, 6, 8)),
    "of a view": lambda y: y[:, :1].expand(6, 1),
    "twice": lambda y: y.t().expand(8, 6)[1:].expand(1, 7, 6),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(3),
    "setitem": lambda v: v.__setitem__((..., slice(0, 1)), 0.3),
    "normal_": lambda v: v.normal_(),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_an_expansion_that_repeats_nothing_is_written_exactly(expansion: str, write: str, grad: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = extreme(x)
        view = EXPANSIONS[expansion](y)
        WRITES[write](view)
        return y, view * 2

    assert_alike(forward, matrix().requires_grad_(grad))


def test_a_mask_is_expanded_to_a_batch_of_one_and_written() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        mask = torch.full((1, 4, 4), -INFINITE).triu(1)
        mask = mask.expand(x.shape[0], 4, 4)
        mask[:, :, 0] = 0.0
        with torch.no_grad():
            again = mask.expand(1, 1, 4, 4)
            again[..., 1:].sub_(1)
        return (x + mask).softmax(-1), mask

    assert_alike(forward, torch.linspace(-1, 1, 16).reshape(1, 4, 4))


def test_an_expansion_to_dynamic_sizes_is_written_exactly() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x * 1
        y.expand(x.shape[0], 8)[:, 0] = 3.0
        return y

    batch = torch.export.Dim("batch", min=2, max=64)
    graph = dovetail.capture(model_of(forward), (matrix(),), dynamic_shapes=({0: batch},))
    x = extreme(torch.ones(9, 8))
    assert torch.equal(graph(x), forward(None, x))


def test_an_expansion_that_nobody_writes_is_kept() -> None:
    graph = assert_alike(lambda m, x: (x * 2).expand(3, 6, 8) + (x * 3).expand(1, 6, 8), matrix())
    assert [n.args[1] for n in graph.graph.nodes if str(n.target) == "aten.expand.default"] == [
        [3, 6, 8],
        [1, 6, 8],
    ]


def _part_of_an_expanded(m: Any, x: Tensor) -> Any:
    y = x * 2
    y[:1].expand(4, 8)[0].mul_(3)
    return y


def _part_of_a_broadcast(m: Any, x: Tensor) -> Any:
    y = x * 2
    torch.broadcast_tensors(y, torch.ones(3, 6, 8))[0][1, 2:].mul_(3)
    return y


def _windows_with_gaps(m: Any, x: Tensor) -> Any:
    y = x * 2
    y.unfold(1, 2, 3).mul_(3)
    return y


def _windows_without_the_end(m: Any, x: Tensor) -> Any:
    y = x * 2
    y.unfold(1, 3, 3).mul_(3)
    return y


def _one_of_windows_that_overlap(m: Any, x: Tensor) -> Any:
    y = x * 2
    y.unfold(1, 3, 1)[:, 0].mul_(3)
    return y


def _integers_of_floats(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.view(torch.int32)[0].zero_()
    return y


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_part_of_an_expanded, "overlap in memory"),
        (_part_of_a_broadcast, "overlap in memory"),
        (_windows_with_gaps, "do not cover it"),
        (_windows_without_the_end, "do not cover it"),
        (_one_of_windows_that_overlap, "overlap in memory"),
        (_integers_of_floats, "gradient history does not know"),
    ],
)
def test_views_that_functionalisation_does_not_write_exactly_are_refused(
    forward: Forward, reason: str
) -> None:
    with pytest.raises(dovetail.CaptureError, match=reason) as raised:
        dovetail.capture(model_of(forward), (matrix(),))
    assert "\n  at " in str(raised.value)


def _windows(m: Any, x: Tensor) -> Any:
    y = extreme(x)
    y.unfold(1, 2, 2)[:, 1].mul_(3)
    return y


def _integers_without_gradients(m: Any, x: Tensor) -> Any:
    y = extreme(x)
    y.view(torch.int32)[1].zero_()
    return y


@pytest.mark.parametrize("forward", [_windows, _integers_without_gradients])
def test_views_that_functionalisation_writes_exactly_are_not_refused(forward: Forward) -> None:
    assert_alike(forward, matrix())


_ROWS = torch.tensor([[1, 2, 3], [0, 0, 0]])
REORDERING: dict[str, Callable[[Tensor], Any]] = {
    "scatter_": lambda v: v.scatter_(0, _ROWS, 1.0),
    "scatter_add_": lambda v: v.scatter_add_(0, _ROWS, torch.ones(2, 3)),
    "cumsum_": lambda v: v.cumsum_(0),
    "index_add_": lambda v: v.index_add_(0, torch.tensor([1]), torch.ones(1, v.shape[1])),
    "index_copy_": lambda v: v.index_copy_(0, torch.tensor([1]), torch.ones(1, v.shape[1])),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 1.0),
    "masked_scatter_": lambda v: v.masked_scatter_(v > 0, torch.ones(48)),
    "tril_": lambda v: v.tril_(),
    "pow_": lambda v: v.pow_(2),
}
PERMUTED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "transpose": lambda y: (y, y.t()),
    "transpose of an alias": lambda y: (y, y.detach().t()),
    "itself": lambda y: (z := y.t().contiguous().t(), z),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("permuted", PERMUTED)
@pytest.mark.parametrize("write", REORDERING)
def test_what_is_written_keeps_its_strides(write: str, permuted: str, grad: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        base, view = PERMUTED[permuted](x * 2)
        REORDERING[write](view)
        return view if permuted == "transpose of an alias" else (base, base.as_strided((5,), (3,)) * 2)

    x = matrix().requires_grad_(grad)
    graph = assert_alike(forward, x)
    results, expected = (
        f(x) if isinstance(f(x), tuple) else (f(x),) for f in (graph, lambda x: forward(None, x))
    )
    assert [r.stride() for r in results] == [e.stride() for e in expected]


def test_a_base_that_is_written_through_a_transpose_is_viewed_afterwards() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x * 2
        y.t().masked_fill_(y.t() > 0, 1.0)
        return y.view(4, 12)

    assert_alike(forward, matrix())
    batch = torch.export.Dim("batch", min=2, max=64)
    graph = dovetail.capture(
        model_of(lambda m, x: (x * 2).t().cumsum_(0).t().view(-1)), (matrix(),), dynamic_shapes=({0: batch},)
    )
    x = torch.linspace(-1, 1, 72).reshape(9, 8)
    assert torch.equal(graph(x), (x * 2).t().cumsum_(0).t().view(-1))


@pytest.mark.parametrize("written", ["input", "buffer"])
def test_an_assignment_to_all_of_a_tensor_is_returned(written: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x if written == "input" else m.mean
        y[:] = torch.ones(8, 6).t() * 3
        return y, y * 2

    assert_alike(forward, matrix())


def _detached_and_written(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.detach_()
    y.add_(m.linear(x))
    return y[0] * 2, y


def _detached_and_viewed(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.add_(1)
    y.detach_()
    rows = y[1:]
    rows.mul_(2)
    return rows, y.t().mul_(m.linear(x).t())


def _resized(m: Any, x: Tensor) -> Any:
    y = x.detach().clone()
    first = y[0]
    y.resize_(4, 4).add_(1)
    y[1] = 3.0
    y.resize_as_(torch.ones(2, 5))
    return y, first, y * 2


def _turned_in_place(m: Any, x: Tensor) -> Any:
    y = (x * 2).t().contiguous().t()
    base = y[:]
    y.t_().mul_(3)
    y.transpose_(0, 1).unsqueeze_(0).cumsum_(1)
    return y, base


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("forward", [_detached_and_written, _detached_and_viewed, _resized, _turned_in_place])
def test_tensors_that_are_detached_or_resized_in_place_are_written(forward: Forward, grad: bool) -> None:
    assert_alike(forward, matrix().requires_grad_(grad))


def _detached_under_a_view(m: Any, x: Tensor) -> Any:
    y = m.linear(x) * 1
    part = y[1:]
    y.detach_()
    return part * 2


def _resized_to_more(m: Any, x: Tensor) -> Any:
    return x.detach().clone().resize_(7, 8)[:6] * 1


def _resized_transpose(m: Any, x: Tensor) -> Any:
    return x.detach().clone().t().resize_(4, 4)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_detached_under_a_view, "others are views of"),
        (_resized_to_more, "changes the storage of a tensor by resize_"),
        (_resized_transpose, "changes the storage of a tensor by resize_"),
    ],
)
def test_other_changes_of_tensors_in_place_are_refused(forward: Forward, reason: str) -> None:
    with pytest.raises(dovetail.CaptureError, match=reason):
        dovetail.capture(model_of(forward), (matrix(),))
