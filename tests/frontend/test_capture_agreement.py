"""A captured graph does what its model does: values, writes, random stream, gradients and training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.frontend.capture import capture


def assert_alike(
    model: nn.Module,
    make_args: Callable[[int], tuple[Any, ...]],
    kwargs: dict[str, Any] | None = None,
    steps: int = 3,
    tolerance: float = 1e-6,
) -> torch.fx.GraphModule:
    """Capture the model, then run and train both it and a copy of the original, side by side."""
    kwargs = kwargs or {}
    original = copy.deepcopy(model)
    example = make_args(0)
    before = copy.deepcopy((example, kwargs))
    random_state = torch.get_rng_state()
    graph = capture(model, example, kwargs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_leaves((example, kwargs), before)
    assert_same_leaves(model.state_dict(), original.state_dict())
    assert list(graph.state_dict()) == list(model.state_dict())
    assert [n for n, _ in graph.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(graph.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(graph.buffers(), model.buffers(), strict=True))
    assert all("val" in node.meta for node in graph.graph.nodes)

    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (graph, original) if list(m.parameters())]
    kept: list[Any] = []
    for step in range(steps):
        args = make_args(step)
        sides = []
        for runs in (graph, original):
            given = copy.deepcopy((args, kwargs))
            torch.manual_seed(step)
            result = runs(*given[0], **given[1])
            sides.append((given, result, torch.get_rng_state(), _addresses(result, given)))
        (mine, my_result, my_state, my_memory), (theirs, result, state, memory) = sides
        assert torch.equal(my_state, state)
        assert_same_leaves(mine, theirs)
        assert_same_leaves(my_result, result)
        assert my_memory == memory, "results share memory with inputs differently"
        losses = [_loss(my_result), _loss(result)]
        if losses[1] is not None:
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for (name, a), b in zip(graph.named_parameters(), original.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), name
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, atol=tolerance, rtol=1e-4)
                    b.grad = a.grad.clone()  # rounding must not add up: the next step compares values exactly
            for optimizer in optimizers:
                optimizer.step()
        assert_same_leaves(dict(graph.named_buffers()), dict(original.named_buffers()))
        kept.append((my_result, result))
    for mine, theirs in kept:
        assert_same_leaves(mine, theirs)  # what was returned early must not change under later calls
    return graph


def assert_same_leaves(mine: Any, theirs: Any) -> None:
    """Equal nesting, values, dtypes and strides, bit for bit."""
    a, spec_a = pytree.tree_flatten(mine)
    b, spec_b = pytree.tree_flatten(theirs)
    assert spec_a == spec_b
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, Tensor):
            assert x.dtype == y.dtype
            assert x.stride() == y.stride()
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
            assert x.requires_grad == y.requires_grad
        else:
            assert x == y


def _addresses(result: Any, given: Any) -> list[list[bool]]:
    tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    return [
        [r.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors]
        + [r is t for t in tensors]
        for r in pytree.tree_leaves(result)
        if isinstance(r, Tensor)
    ]


def _loss(result: Any) -> Any:
    terms = [t.float().square().sum() for t in pytree.tree_leaves(result) if _differentiable(t)]
    return sum(terms[1:], terms[0]) if terms else None


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def small(forward: Callable[..., Any]) -> nn.Module:
    """A module with a linear layer, two buffers and the given forward."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.ones(4), persistent=False)
            self.fixed = torch.full((4,), 3.0)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

    torch.manual_seed(0)
    return Small()


def one(step: int) -> tuple[Any, ...]:
    return (torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 10)),)


def no_grad_block(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.linear(x)
    return m.linear(x) * y


def no_grad_then_grad_inside(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.linear(x)
        with torch.enable_grad():
            z = m.linear(y)
        y = y + z
    return y * z


def no_grad_in_place(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m.a.mul_(0.9).add_(m.linear(x).mean(0))
    return m.a * m.linear(x)


def no_grad_new_buffer(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m.a = m.a * 0.9 + m.linear(x).mean(0)
    return m.a * m.linear(x)


def no_grad_function(m: Any, x: Tensor) -> Any:
    inner = torch.no_grad()(lambda t: m.linear(t))
    return m.linear(inner(x)), inner(x)


def autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.relu(m.linear(x) @ m.linear(x).T)
    return y.float()


def batch_norm(m: Any, x: Tensor) -> Any:
    return m.norm(m.linear(x))


def dropout(m: Any, x: Tensor) -> Any:
    return F.dropout(m.linear(x), 0.3, m.training) + torch.rand(4) + torch.bernoulli(torch.full((4,), 0.5))


def unused_draws(m: Any, x: Tensor) -> Any:
    torch.rand(3) * 2
    F.dropout(x, 0.5, True)
    torch.native_dropout(x, 0.5, True)
    torch.empty(4).uniform_()
    return m.linear(x) + torch.rand(4)


def write_input(m: Any, x: Tensor) -> Any:
    y = x.view(-1)
    before = y * 2
    x.mul_(m.b)
    return y, before, x.t(), x, m.linear(x)


def write_what_backward_needs(m: Any, x: Tensor) -> Any:
    y = m.linear(x) * m.a.view(2, 2).view(4)
    m.a = m.a + 1
    return y


def counter(m: Any, x: Tensor) -> Any:
    m.a += 1
    return x * m.a, m.a, m.a[:2]


def new_buffer(m: Any, x: Tensor) -> Any:
    m.a = torch.tanh(m.a + x.mean(0))
    return m.a


def old_buffer(m: Any, x: Tensor) -> Any:
    old = m.a
    m.a = m.a + x.mean(0)
    return old.view(2, 2), m.a


def views(m: Any, x: Tensor) -> Any:
    return x.view(2, 6), x, x[0], x.clone(), x.detach(), x[:, -1:], x[-2:], x[..., None], x[0:100]


def python_values(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return {"a": [y, (y, y)], "b": None, "c": 3, "d": "text", "e": True, "f": 2.5}


def constants(m: Any, x: Tensor) -> Any:
    return x + m.fixed + torch.ones(4) * torch.arange(4) + torch.tensor([1.0, 2.0, 3.0, float("nan")])


def in_place_inside(m: Any, x: Tensor) -> Any:
    y = x.clone()
    y[0] = 5
    y[:, 1] += 2
    return F.relu(m.linear(y), inplace=True)


def detached(m: Any, x: Tensor) -> Any:
    return m.linear(m.linear(x).detach())


def own_parameter(m: Any, x: Tensor) -> Any:
    return m.linear.weight, m.a, m.b


def data_sized(m: Any, x: Tensor) -> Any:
    return x.nonzero(), x[x > 0], x * x.sum().item()


def choice(m: Any, x: Tensor) -> Any:
    def first(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.linear(x)
        return m.linear(x) * y

    return torch.cond(x.sum() > 0, first, lambda x: x * 2, (x,))


def loop(m: Any, x: Tensor) -> Any:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, m.b * x), (torch.tensor(0), x))


def scanned(m: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: (c + y, c * y + 0), torch.zeros(4), x)


def mapped(m: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as over

    return over(lambda a, b: a * b, x, m.b + 2)


FORWARDS = [
    no_grad_block, no_grad_then_grad_inside, no_grad_in_place, no_grad_new_buffer, no_grad_function, autocast,
    batch_norm, dropout, unused_draws, write_input, write_what_backward_needs, counter, new_buffer, old_buffer, views,
    python_values, constants, in_place_inside, detached, own_parameter, data_sized, choice, loop, scanned, mapped,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_small_models_agree(forward: Callable[..., Any], mode: str) -> None:
    assert_alike(small(forward).train(mode == "train"), one, tolerance=1e-2 if forward is autocast else 1e-6)


def test_batch_norm_statistics_and_count_follow_the_model() -> None:
    model = small(batch_norm)
    graph = assert_alike(model, one, steps=3)
    assert graph.norm.num_batches_tracked.item() == 3
    assert not torch.equal(graph.norm.running_mean, torch.zeros(4))


def test_a_model_without_inputs() -> None:
    assert_alike(small(lambda m: m.linear.weight * 2), lambda step: ())


def test_tied_shared_and_unused_parameters_keep_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.again = self.a
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.again(x)

    model = Tied()
    graph = assert_alike(model, one)
    assert graph.b.weight is model.a.weight
    assert graph.again is graph.a


def test_constants_stay_out_of_the_state() -> None:
    graph = capture(small(constants), one(0))
    names = {n.target for n in graph.graph.find_nodes(op="get_attr")}
    assert "fixed" in names
    assert "fixed" not in dict(graph.named_buffers())
    assert dict(graph.named_buffers()).keys() == dict(small(constants).named_buffers()).keys()


def test_provenance_and_clean_graph() -> None:
    graph = capture(small(lambda m, x: m.norm(m.linear(x)).to(torch.float64)).eval(), one(0))
    linear = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert any(path == "linear" for path, _ in linear.meta["nn_module_stack"].values())
    assert "test_capture_agreement.py" in linear.meta["stack_trace"]
    assert not any(
        "_assert_tensor_metadata" in str(n.target) or "_guards" in n.name for n in graph.graph.nodes
    )
    assert all(n.meta["val"] is None for n in graph.graph.find_nodes(op="output"))


def test_copies_of_the_state_are_not_taken_and_flags_stay() -> None:
    model = small(batch_norm)
    model.linear.bias.requires_grad_(False)
    model.linear.weight.grad = torch.ones(4, 4)
    with torch.no_grad():
        graph = capture(model, one(0))
        assert not torch.is_grad_enabled()
    assert model.training
    assert not graph.linear.bias.requires_grad
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
