"""Writes that reach a tensor by way of others: nested detach, idle dropout, `out=`; exact, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import dovetail
from dovetail.frontend import detached_writes, export_fixups
from dovetail.frontend.export_aliases import returned_operand
from tests.frontend.test_side_effects import Forward, assert_alike, matrix, model_of


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
    assert_alike(forward, matrix().requires_grad_(grad))


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
    assert_alike(forward, matrix())


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
    assert_alike(forward, matrix())


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
        dovetail.capture(model_of(forward), (matrix(),))
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
        dovetail.capture(model_of(forward), (matrix(),))
    assert "\n  at " in str(raised.value)


def test_an_empty_input_is_not_resized() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return torch.exp(m.mean, out=x)

    with pytest.raises(dovetail.CaptureError):
        dovetail.capture(model_of(forward), (torch.empty(0),))


DIAGONALS: dict[str, Callable[[Tensor], Any]] = {
    "square": lambda y: (y @ y.t()).fill_diagonal_(-3.0),
    "wide": lambda y: y.fill_diagonal_(2),
    "tall": lambda y: y.t().contiguous().fill_diagonal_(-3.0),
    "transposed": lambda y: y.t().fill_diagonal_(-3.0),
    "integers": lambda y: (y * 9).long().fill_diagonal_(7),
    "cube": lambda y: (y.view(-1)[:27] * 2).view(3, 3, 3).fill_diagonal_(1.5),
    "permuted": lambda y: (y.view(-1)[:16] * 2).view(2, 2, 2, 2).permute(3, 1, 0, 2).fill_diagonal_(1.5),
    "wrapped": lambda y: (y * 2).view(16, 3).fill_diagonal_(1.5, wrap=True),
    "wrapped, wide": lambda y: y.fill_diagonal_(1.5, wrap=True),
    "wrapped, next to square": lambda y: (y.view(-1)[:42] * 2).view(7, 6).fill_diagonal_(1.5, wrap=True),
    "wrapped, permuted": lambda y: (y.view(-1)[:44] * 2).view(4, 11).t()[:10].fill_diagonal_(1.5, wrap=True),
    "part": lambda y: y[1:5, 2:].fill_diagonal_(0.5),
    "through detach": lambda y: y.detach().fill_diagonal_(0.5),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_are_filled_with_the_gradients_of_eager_mode(name: str, grad: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x * 2
        z = DIAGONALS[name](y)
        return (z.float() * 3).logsumexp(0), z, x * 2 if name == "through detach" else y * 3

    graph = assert_alike(forward, matrix().requires_grad_(grad))
    assert "as_strided" not in graph.code


def test_diagonals_of_inputs_and_in_blocks_are_filled() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x.t().fill_diagonal_(2)
        with torch.no_grad():
            m.mean.fill_diagonal_(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.linear(x).fill_diagonal_(4)
        return y.float(), m.mean * 2

    assert_alike(forward, matrix())


@pytest.mark.parametrize(("least", "most", "rows"), [(2, 8, 6), (10, 64, 12)], ids=["wide", "tall"])
def test_a_diagonal_is_filled_whatever_the_sizes_of_the_call(least: int, most: int, rows: int) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        # torch.export cannot trace a diagonal that wraps around a dynamic size.
        return (x * 2).fill_diagonal_(1, wrap=most <= 8), (x * 3).fill_diagonal_(1)

    def inputs(rows: int) -> Tensor:
        return torch.linspace(-1, 1, rows * 8).reshape(rows, 8)

    batch = torch.export.Dim("batch", min=least, max=most)
    graph = dovetail.capture(model_of(forward), (inputs(rows),), dynamic_shapes=({0: batch},))
    for size in (least, least + 1, most - 1, most):
        pairs = zip(graph(inputs(size)), forward(None, inputs(size)), strict=True)
        assert all(torch.equal(actual, expected) for actual, expected in pairs)


def test_a_diagonal_is_filled_whatever_the_strides_of_the_call() -> None:
    graph = dovetail.capture(model_of(lambda m, x: (x * 2).fill_diagonal_(1)), (matrix(),))
    x = torch.linspace(-1, 1, 48).reshape(8, 6).t()
    assert torch.equal(graph(x), (x * 2).fill_diagonal_(1))


def test_a_diagonal_that_wraps_around_memory_with_gaps_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return x.view(12, 4)[:, :2].fill_diagonal_(1, wrap=True)

    with pytest.raises(dovetail.CaptureError, match=r"wraps a diagonal(.|\n)*at .*test_aliased_writes.py"):
        dovetail.capture(model_of(forward), (matrix(),))


def test_strided_scatters_that_decomposition_introduces_are_refused_over_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise no decomposition of this version of torch introduces one.
    monkeypatch.setattr(export_fixups, "_fill_diagonals", lambda program: False)

    def forward(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        y.fill_diagonal_(2)
        return y

    with pytest.raises(dovetail.CaptureError, match=r"as_strided_scatter(.|\n)*at .*test_aliased_writes.py"):
        dovetail.capture(model_of(forward), (matrix(),))
    frozen = model_of(forward).requires_grad_(False)
    assert torch.equal(dovetail.capture(frozen, (matrix(),))(matrix()), frozen(matrix()))


def test_a_strided_scatter_of_forward_itself_is_kept() -> None:
    assert_alike(lambda m, x: torch.as_strided_scatter(m.linear(x), torch.ones(6), (6,), (9,)) * 2, matrix())


def test_tensors_detached_in_place_are_looked_at_once_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: Tensor) -> Tensor:
        total = x * 1
        for i in range(20):
            y = x * float(i)
            y.detach_()
            total = total + y
        return total

    calls: list[Any] = []
    grouped = detached_writes.grouped
    monkeypatch.setattr(detached_writes, "grouped", lambda *args: calls.append(args) or grouped(*args))
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    assert torch.equal(dovetail.capture(forward, (x,))(x), forward(x))
    assert len(calls) < 5


@pytest.mark.parametrize(
    ("schema", "is_returned"),
    [
        ("f(Tensor(a!) x, Tensor y) -> Tensor(a!)", True),
        ("f(Tensor(a!) x, Tensor y) -> Tensor", False),
        ("f(Tensor(a!) x, Tensor(b) y) -> Tensor(b)", False),
        ("f(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", True),
    ],
)
def test_an_operand_is_returned_where_the_schema_declares_it(schema: str, is_returned: bool) -> None:
    with torch.library._scoped_library("dovetail_returned", "DEF") as library:
        library.define(schema)
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        args, kwargs = ((x,), {"out": y}) if "out" in schema else ((x, y), {})
        node = graph.call_function(torch.ops.dovetail_returned.f.default, args, kwargs)
        expected = (y if "out" in schema else x) if is_returned else None
        assert returned_operand(node) is expected


def test_dropout_of_everything_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    x[0, 0] = float("inf")
    graph = dovetail.capture(model, (x,), check_capture=True)
    torch.manual_seed(0)
    expected, stream = model(x), torch.get_rng_state()
    torch.manual_seed(0)
    torch.testing.assert_close(graph(x), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), stream)
