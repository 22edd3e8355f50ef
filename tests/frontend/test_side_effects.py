"""Draws into views, writes through detach, generators and changed tensors: captured exactly, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.torch_compat import GENERATOR_METACLASS
from tests.fuzz.observe import Snapshot, difference, observe

Forward = Callable[[Any, Tensor], Any]


class Small(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.linspace(0, 1, 48).reshape(6, 8).clone())
        self.generator = torch.Generator().manual_seed(5)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def model_of(forward: Forward) -> Small:
    torch.manual_seed(0)
    return Small(forward)


def matrix() -> Tensor:
    return torch.linspace(-1, 1, 48).reshape(6, 8)


def assert_alike(forward: Forward, x: Tensor) -> torch.fx.GraphModule:
    """Two calls in a row of the graph and of the model: values, writes, streams and gradients."""
    twin, model = model_of(forward), model_of(forward)
    want = observe(twin, Snapshot(twin), [x], runs=2, gradients=True)
    assert not want[-1].error
    graph = dovetail.capture(model, (x,))
    got = observe(graph, Snapshot(model), [x], runs=2, gradients=True)
    assert difference(want, got, gradients=True, aliasing=False) == ("", "")
    return graph


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda y: y[1:5, 1:7],
    "transpose": lambda y: y.t(),
    "column": lambda y: y[:, 2],
    "diagonal": lambda y: y.diagonal(),
    "steps": lambda y: y[:, ::2],
    "permuted": lambda y: y.view(2, 3, 8).permute(2, 0, 1),
    "whole": lambda y: y,
}
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda v: v.normal_(),
    "uniform_": lambda v: v.uniform_(-1, 2),
    "bernoulli_": lambda v: v.bernoulli_(0.3),
    "bernoulli_tensor": lambda v: v.bernoulli_(torch.full_like(v, 0.4)),
    "exponential_": lambda v: v.exponential_(),
    "random_": lambda v: v.random_(10),
    "cauchy_": lambda v: v.cauchy_(),
    "log_normal_": lambda v: v.log_normal_(),
    "geometric_": lambda v: v.geometric_(0.4),
    "dropout": lambda v: F.dropout(v, 0.4, True, inplace=True),
    "alpha_dropout": lambda v: torch.alpha_dropout_(v, 0.4, True),
    "rrelu": lambda v: F.rrelu(v, 0.1, 0.5, True, inplace=True),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("draw", ["normal_", "bernoulli_", "dropout"])
def test_draws_into_views_are_the_models(draw: str, view: str, grad: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x * 1
        v = VIEWS[view](y)
        DRAWS[draw](v)
        return y * x, v, torch.rand(3)

    assert_alike(forward, matrix().requires_grad_(grad))


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_goes_over_values_with_gradients(draw: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        DRAWS[draw](y.t())
        DRAWS[draw](y[1:3])
        return y * x, torch.rand(3)

    assert_alike(forward, matrix())


@pytest.mark.skipif(GENERATOR_METACLASS.value is None, reason="this torch has no graphs with generators")
def test_a_generator_of_the_model_draws_into_a_view_of_an_input() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x[:5, 1:7].normal_(generator=m.generator)
        return x * 2

    assert_alike(forward, matrix())


def test_a_draw_stays_functional_where_memory_is_contiguous() -> None:
    graph = assert_alike(lambda m, x: x + torch.empty(6, 8).normal_(), matrix())
    assert not [n for n in graph.graph.nodes if str(n.target).startswith("aten.normal_.")]


def test_a_strided_draw_can_be_outlined() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = x * 1
        y[1:5, 1:7].normal_()
        return y * 2

    graph = assert_alike(forward, matrix())
    names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    outlined = dovetail.outline(graph, names, kind="all")
    torch.manual_seed(1)
    want = graph(matrix())
    torch.manual_seed(1)
    assert torch.equal(outlined(matrix()), want)


def into_detached(m: Any, x: Tensor) -> Any:
    y = m.linear(x).detach()
    y[0] = m.linear(x)[0]
    return y * 2


def into_alias_of_zeros(m: Any, x: Tensor) -> Any:
    y = torch.zeros(6, 8)
    z = y.detach()
    z[0] = m.linear(x)[0]
    return y * 2, z * 2


def into_alias_of_input(m: Any, x: Tensor) -> Any:
    y = x.detach()
    y[0] = m.linear(torch.ones(6, 8))[0]
    return y * 2


def into_alias_of_buffer(m: Any, x: Tensor) -> Any:
    d = m.mean.detach()
    d.mul_(m.linear(x))
    return d * 2, m.mean * 3


def into_input(m: Any, x: Tensor) -> Any:
    y = x * 2
    x.detach().add_(1)
    return y


def average(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(m.linear(x), alpha=0.1)
    return m.linear(x) + m.mean


def detached_in_place(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.detach_()
    return y * 2 + m.linear(x)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize(
    "forward",
    [
        into_detached,
        into_alias_of_zeros,
        into_alias_of_input,
        into_alias_of_buffer,
        into_input,
        average,
        detached_in_place,
    ],
)
def test_writes_through_detach_keep_the_gradients(forward: Forward, grad: bool) -> None:
    assert_alike(forward, matrix().requires_grad_(grad))


def test_a_buffer_written_without_gradients_is_still_guarded() -> None:
    graph = assert_alike(average, matrix())
    with pytest.raises(dovetail.CallMismatch, match="shares memory with the model's 'mean'"):
        graph(graph.mean)


def test_an_input_captured_without_gradients_is_not_called_with_them() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x.detach().add_(1)
        return x * 2

    graph = assert_alike(forward, matrix())
    with pytest.raises(dovetail.CallMismatch, match="requires gradients, and did not when"):
        graph(matrix().requires_grad_())


def expanded() -> Tensor:
    return torch.linspace(0, 1, 8).expand(6, 8)


def test_a_graph_that_writes_refuses_inputs_that_overlap_themselves() -> None:
    graph = assert_alike(lambda m, x: x[0].add_(1) * 2, matrix())
    with pytest.raises(dovetail.CallMismatch, match="overlap in memory"):
        graph(expanded())
    reading = dovetail.capture(model_of(lambda m, x: x * 2), (expanded(),))
    assert torch.equal(reading(expanded()), expanded() * 2)


def _written_after(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.detach().mul_(2)
    return y * 2


def _written_without_grad(m: Any, x: Tensor) -> Any:
    y = m.linear(x) * 1
    with torch.no_grad():
        y[0] = 0.0
    return y * 2


def _strided_scatter(m: Any, x: Tensor) -> Any:
    y = m.linear(x) * 1
    y.as_strided((3, 5), (8, 1), 9).mul_(2)
    return y


def _transposes(m: Any, x: Tensor) -> Any:
    x.add_(1)
    x.t_()
    return x * 2


def _squeezes_buffer(m: Any, x: Tensor) -> Any:
    m.mean.unsqueeze_(0)
    return x * 2


def _sets_data(m: Any, x: Tensor) -> Any:
    x.data = torch.zeros(6, 8)
    return x * 2


def _writes_data(m: Any, x: Tensor) -> Any:
    (x * 2).data.add_(1)
    return x * 2


def _requires_grad(m: Any, x: Tensor) -> Any:
    x.requires_grad_()
    return x * 2


def _leaf(m: Any, x: Tensor) -> Any:
    return x.detach().requires_grad_() * 2


def _new_leaf(m: Any, x: Tensor) -> Any:
    return torch.zeros(6, 8, requires_grad=True) + x


def _retains(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.retain_grad()
    return y


def _own_generator(m: Any, x: Tensor) -> Any:
    return x + torch.rand(6, 8, generator=torch.Generator().manual_seed(0))


def _seeds_generator(m: Any, x: Tensor) -> Any:
    m.generator.manual_seed(5)
    return x + torch.rand(6, 8, generator=m.generator)


def _seeds(m: Any, x: Tensor) -> Any:
    torch.manual_seed(0)
    return x + torch.rand(6, 8)


def _forks(m: Any, x: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        y = torch.rand(6, 8)
    return x + y


def _python_random(m: Any, x: Tensor) -> Any:
    import random

    return x * random.random()


def _random_range(m: Any, x: Tensor) -> Any:
    return (x * 1).random_(3, 17)


def _in_a_list_twice(m: Any, x: Tensor) -> Any:
    torch._foreach_add_([x, x], 0.5)
    return x


def _fills_expanded(m: Any, x: Tensor) -> Any:
    x.expand(2, 6, 8).zero_()
    return x * 2


def _seeds_default(m: Any, x: Tensor) -> Any:
    torch.default_generator.manual_seed(0)
    return x + torch.rand(6, 8)


def _sets_default_state(m: Any, x: Tensor) -> Any:
    torch.default_generator.set_state(m.generator.get_state())
    return x + torch.rand(6, 8)


def _goes_back(m: Any, x: Tensor) -> Any:
    state = torch.default_generator.get_state()
    y = x + torch.rand(6, 8)
    torch.default_generator.set_state(state)
    return y + torch.rand(6, 8)


def _goes_back_at_the_end(m: Any, x: Tensor) -> Any:
    state = m.generator.get_state()
    y = F.dropout(x, 0.4, True) + torch.rand(6, 8)
    m.generator.set_state(state)
    return y


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_written_after, "gradient history does not know"),
        (_written_without_grad, "gradient history does not know"),
        (_strided_scatter, "as_strided"),
        (_transposes, r"changes an input itself by `t_\(\)`"),
        (_squeezes_buffer, r"changes 'mean' itself by `unsqueeze_\(\)`"),
        (_sets_data, "`data =`"),
        (_writes_data, "`.data`"),
        (_requires_grad, "sets requires_grad of an input"),
        (_leaf, "only because of it"),
        (_new_leaf, "only because of it"),
        (_retains, "retain_grad"),
        (_own_generator, "not an attribute of the model"),
        (_seeds_generator, "seeds a random generator"),
        (_seeds, "seeds a random generator"),
        (_seeds_default, "seeds a random generator"),
        (_sets_default_state, "seeds a random generator"),
        (_goes_back, "seeds a random generator"),
        (_goes_back_at_the_end, "seeds a random generator"),
        (_forks, "seeds a random generator"),
        (_python_random, "Python's or NumPy's random"),
        (_random_range, r"random_\(from, to\)"),
        (_in_a_list_twice, "share memory"),
        (_fills_expanded, "overlap in memory"),
    ],
)
def test_what_no_graph_can_hold_is_refused_with_the_line(forward: Forward, reason: str) -> None:
    model, stream = model_of(forward), torch.get_rng_state()
    state = model.generator.get_state()
    with pytest.raises(dovetail.CaptureError, match=reason) as raised:
        dovetail.capture(model, (matrix(),))
    assert f"\n  at {__file__}" in str(raised.value)
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(model.generator.get_state(), state)


def test_an_expanded_input_that_is_written_is_refused() -> None:
    with pytest.raises(dovetail.CaptureError, match="overlap in memory"):
        dovetail.capture(model_of(lambda m, x: x[0].add_(1) * 2), (expanded(),))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x + torch.rand(6, 8, generator=torch.default_generator),
        lambda m, x: m.linear(x).requires_grad_() * 2,
        lambda m, x: torch.autograd.grad((y := x.detach().requires_grad_()).square().sum(), y)[0],
        lambda m, x: (x * 2).t_() + 1,
    ],
    ids=["default", "flag set already", "gradient inside", "own tensor"],
)
def test_what_a_graph_can_hold_is_not_refused(forward: Forward) -> None:
    assert_alike(forward, matrix())


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x + torch.rand(6, 8, generator=m.generator),
        lambda m, x: x + torch.empty(6, 8).normal_(generator=m.generator),
        lambda m, x: torch.bernoulli(x.sigmoid(), generator=m.generator),
    ],
    ids=["rand", "normal_", "bernoulli"],
)
def test_a_generator_of_the_model_is_drawn_from_or_refused(forward: Forward) -> None:
    if hasattr(torch._C, "_set_generator_metaclass"):
        assert_alike(forward, matrix())
        return
    model = model_of(forward)
    state = model.generator.get_state()
    with pytest.raises(dovetail.CaptureError, match="cannot lift into a graph") as raised:
        dovetail.capture(model, (matrix(),))
    assert f"\n  at {__file__}" in str(raised.value)
    assert torch.equal(model.generator.get_state(), state)


def test_python_numbers_in_eval_mode_are_left_alone() -> None:
    model = model_of(_python_random).eval()
    assert dovetail.capture(model, (matrix(),)) is not None
