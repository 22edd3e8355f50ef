"""What random schedules found, each as small as it could be made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail

_aten = torch.ops.aten


class Of(nn.Module):
    """A module of a function of it and its inputs, with two buffers and a layer."""

    a: Tensor
    b: Tensor

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.arange(3.0))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def agree(one: Callable[..., Any], other: Callable[..., Any], *inputs: Tensor) -> None:
    """The same results, inputs, buffers and random numbers, twice in a row."""
    for _ in range(2):
        seen: list[Any] = []
        for model in (one, other):
            given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
            torch.manual_seed(3)
            results = pytree.tree_leaves(model(*given))
            buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
            seen.append([v.detach().clone() for v in (*results, *given, *buffers)] + [torch.get_rng_state()])
        assert all(map(torch.equal, *seen))


def gradient(model: Callable[..., Any], x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    (model(leaf) * torch.arange(1.0, 4.0)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


# Buffers of inner modules that forward gives another tensor: export itself sees only those of the model.


def counted(m: Any, x: Tensor) -> Tensor:
    m.a = m.a + 1
    return x * m.a


def returns_the_old(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    old = m.a
    m.a = m.a + x[0]
    return old, old[1:]


def swapped(m: Any, x: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    return x + m.a


def written_after(m: Any, x: Tensor) -> Tensor:
    m.a = m.a + 1
    m.a.mul_(3)
    return x * m.a


@pytest.mark.parametrize("function", [counted, returns_the_old, swapped, written_after])
def test_a_buffer_that_is_given_another_tensor_is_written(function: Callable[..., Any]) -> None:
    model = Of(lambda m, x: m.inner(x), inner=Of(function))
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    s.fuse(s.find(lambda node: True))
    agree(s.build(), twin, x)


def longer(m: Any, x: Tensor) -> Tensor:
    m.a = torch.cat([m.a, x[0]])
    return m.a.sum()


def test_a_buffer_that_is_given_another_form_is_refused() -> None:
    model = Of(lambda m, x: m.inner(x), inner=Of(longer))
    with pytest.raises(dovetail.CaptureError, match=r"'inner\.a' a tensor of another shape or dtype"):
        dovetail.capture(model, (torch.randn(2, 3),))


# Capture


def test_numbers_are_drawn_though_only_a_write_reads_them() -> None:
    dropped = nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True))
    model = Of(lambda m, x: (m.dropped(x), torch.tanh(x))[1], dropped=dropped)
    x = torch.randn(2, 3)
    agree(dovetail.capture(model, (x,)), model, x)


def test_a_block_without_gradients_beside_what_nobody_reads() -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        torch.add(y, x)
        with torch.no_grad():
            return y - y

    model = Of(lambda m, x: (m.second(m.first(x)), x)[1], first=Of(block), second=Of(block))
    x = torch.randn(2, 3)
    agree(dovetail.capture(model, (x,)), model, x)


@pytest.mark.parametrize("write", [Tensor.copy_, Tensor.add_])
def test_a_write_after_a_block_without_gradients_has_gradients(write: Callable[..., Any]) -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * x
        write(y, x)
        return y

    x = torch.randn(2, 3)
    gm = dovetail.capture(model, (x.clone().requires_grad_(),))
    assert torch.equal(gradient(gm, x), gradient(model, x))


def rows(x: Tensor) -> Tensor:
    y = torch.zeros(2, 3)
    y[0] = x[0] * 2
    return y


def turned(x: Tensor) -> Tensor:
    y = torch.zeros(3, 2).t()
    y.copy_(x * 2)
    return y


def spread(x: Tensor) -> Tensor:
    y = x * 2
    y.copy_(x[0])
    return y


def of_another_dtype(x: Tensor) -> Tensor:
    y = torch.zeros(2, 3, dtype=torch.double)
    y.copy_(x * 2)
    return y.float()


def a_single_number(x: Tensor) -> Tensor:
    y = torch.zeros(())
    y.copy_(x.sum())
    return y.expand(3)


@pytest.mark.parametrize("model", [rows, turned, spread, of_another_dtype, a_single_number])
def test_what_is_written_as_a_whole_has_a_gradient(model: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3)
    gm = dovetail.capture(model, (x.clone().requires_grad_(),))
    assert torch.equal(gradient(gm, x), gradient(model, x))
    assert torch.equal(gm(x), model(x))
    assert gm(x).stride() == model(x).stride()


def test_dropout_that_drops_nothing_is_its_input() -> None:
    def model(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, training=False)
        y.relu_()
        return x + y

    x = torch.randn(2, 3)
    agree(dovetail.capture(model, (x,)), model, x)
    idle = dovetail.capture(nn.Dropout().eval(), (x,))
    agree(lambda x: idle(x).relu_() + x, lambda x: x.relu_() + x, x)


def test_one_of_many_views_of_a_written_input_is_returned_as_a_view() -> None:
    def model(x: Tensor) -> Tensor:
        left = x.chunk(2, -1)[0]
        left.add_(1)
        return left

    x = torch.randn(2, 4)
    gm = dovetail.capture(model, (x,))
    agree(lambda x: gm(x).mul_(2), lambda x: model(x).mul_(2), x)


# Schedules


def test_a_checkpointed_module_is_not_traced_because_it_was_looked_into_before() -> None:
    model = Of(lambda m, x: torch.relu(m.inner(x)), inner=Of(lambda m, x: torch.tanh(x)))
    s = dovetail.schedule(model, (torch.randn(2, 3),))
    s.find(_aten.relu.default)
    s.checkpoint("inner")
    with pytest.raises(dovetail.ScheduleError, match="checkpointed as a module"):
        s.fuse(s.find(_aten.relu.default))


def test_a_part_that_writes_one_tensor_given_twice_is_refused() -> None:
    inner = Of(lambda m, x, y: (y.fill_(0.5), x)[1])
    s = dovetail.schedule(Of(lambda m, x: m.inner(x, x) + 1, inner=inner), (torch.randn(2, 3),))
    with pytest.raises(dovetail.CaptureError, match="share memory"):
        s["inner"].find(lambda node: True)


def test_verifying_leaves_no_history_on_a_buffer() -> None:
    layer = nn.Linear(3, 3)
    model = Of(lambda m, x: m.a.mul_(m.layer(x).sum(0)).clone(), layer=layer)
    s = dovetail.schedule(model, (torch.randn(2, 3),))
    s.fuse(s.find(_aten.linear.default))
    s.verify()
    s.verify()
    assert not model.a.requires_grad


@pytest.mark.parametrize("backend", [None, "eager", "torchscript"])
def test_a_checkpointed_module_around_a_part_has_its_gradients(backend: str | None) -> None:
    # In eval mode the part is captured anew while the module is run, and run again in backward.
    inner = Of(lambda m, x: torch.tanh(m.layer(x)), layer=nn.Linear(3, 3))
    model = Of(lambda m, x: m.inner(x) * 2, inner=inner)
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    s["inner"].fuse(s["inner"].find(_aten.tanh.default), backends=backend)
    s.checkpoint("")
    for training in (True, False):
        built = s.build().train(training)
        torch.testing.assert_close(gradient(built, x), gradient(twin.train(training), x))


def test_lowered_code_is_run_again_by_checkpointing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh())
    x = torch.randn(2, 3)
    fast = dovetail.compile(model, (x.clone().requires_grad_(),), backends=["eager"])
    actual = gradient(lambda x: checkpoint(fast, x, use_reentrant=False), x)
    torch.testing.assert_close(actual, gradient(model, x))


def test_a_region_that_reads_what_is_written_later_is_not_checkpointed() -> None:
    model = Of(lambda m, x: (torch.tanh(x + m.a), m.a.mul_(2))[0])
    s = dovetail.schedule(model, (torch.randn(2, 3),))
    region = s.fuse(s.find(lambda x, y: torch.tanh(x + y)))[0]
    before = s.text()
    with pytest.raises(dovetail.ScheduleError, match="reads 'a', which is written later"):
        s.checkpoint(region)
    assert s.text() == before


def test_a_new_module_keeps_norms_that_are_not_trained() -> None:
    norm = nn.BatchNorm1d(3).eval()
    model = Of(lambda m, x: m.inner(x), inner=Of(lambda m, x: m.norm(x), norm=norm))
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    s.replace(copy.deepcopy(model.get_submodule("inner")), "inner", check=True)
    agree(s.build(), twin, x)


def test_a_new_module_around_the_old_one_starts_from_the_same_state() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return x + m.a.add_(1)

    model = Of(lambda m, x: m.inner(x), inner=Of(step))
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    old = model.get_submodule("inner")
    s = dovetail.schedule(model, (x,))
    s.replace(nn.Sequential(old), "inner", check=True)
    torch.testing.assert_close(s.build()(x), twin(x))


def test_a_module_in_two_parts_is_traced_in_each_as_it_is() -> None:
    def quiet(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            square = x * y
        return torch.relu(x), square

    shared = Of(quiet)
    first = Of(lambda m, x: m.shared(x, x)[1] + 1, shared=shared)
    second = Of(lambda m, x: m.shared(x * 2, x)[1] + m.shared(x, x)[0], shared=shared)
    model = Of(lambda m, x: m.second(m.first(x)), first=first, second=second)
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    s["second"].fuse(s["second"].find(_aten.relu.default))
    s["first.shared"].fuse(s["first.shared"].find(_aten.mul.Tensor))
    for rows in (2, 5):
        agree(s.build(), twin, torch.randn(rows, 3))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return y, torch.tanh(y)


def test_what_replaces_many_results_is_not_taken_for_fewer() -> None:
    # Seen from the part both results are used, and from the model around it only the second.
    model = Of(lambda m, x: torch.neg(m.part(x)[1]), part=Pair())
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    region = s["part"].fuse(s["part"].find(Pair)[0])
    s.replace(region.body, region, check=True)
    with pytest.raises(dovetail.ScheduleError, match="2 results are used, and here 1 are"):
        s.find(_aten.neg.default)
    agree(s.build(), twin, x)


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        zeros, negative = torch.zeros_like(x), torch.neg(x)
        return zeros, zeros, negative


class Bounds(nn.Module):
    """Returns what it computes last first; both are equal where the input is positive."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = torch.abs(x)
        return torch.relu(x), size


@pytest.mark.parametrize("check", [True, False])
def test_results_of_a_replaced_module_are_distinguished_by_their_bits(check: bool) -> None:
    # In the second call both results are zeros, of different sign.
    model = Of(lambda m, x: m.part(m.part(x)[0])[2], part=Zeros())
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    s = dovetail.schedule(model, (x,))
    s.fuse(s.find(_aten.neg.default))
    s["part"].replace(Zeros(), check=check)
    built = s.build()
    assert torch.equal(torch.signbit(built(x)), torch.signbit(twin(x)))


@pytest.mark.parametrize("check", [True, False])
def test_results_that_are_equal_for_the_example_are_distinguished_by_other_inputs(check: bool) -> None:
    model = Of(lambda m, x: torch.stack(m.part(x)), part=Bounds())
    twin, x = copy.deepcopy(model), torch.rand(2, 3) + 1
    s = dovetail.schedule(model, (x,))
    s.fuse(s.find(_aten.stack.default))
    s["part"].replace(Bounds(), check=check)
    agree(s.build(), twin, x)
    agree(s.build(), twin, -x)


class Drawn(nn.Module):
    """Writes a buffer, so that its capture is made again, and returns random indices beside results of a module."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.linspace(-1, 1, 6).reshape(2, 3))
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        written = self.count.add_(x)
        result = torch.tanh(self.inner(self.count))
        return torch.relu(written) + result, torch.randint(5, [2])


def test_calls_while_a_part_is_captured_are_not_recorded() -> None:
    part = Drawn()
    first, second = (Of(lambda m, x: m.part(x)[1], part=part) for _ in range(2))
    model = Of(lambda m, x: (m.first(x), m.second(x)), first=first, second=second)
    s = dovetail.schedule(model, (torch.linspace(2, -2, 6).reshape(2, 3),))
    s["first.part"].fuse(s["first.part"].find(_aten.relu.default))
    with pytest.raises(dovetail.ScheduleError, match=r"'second\.part\.inner' was not called"):
        s["second.part.inner"].replace(nn.GELU(), check=True)
