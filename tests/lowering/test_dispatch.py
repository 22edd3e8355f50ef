"""Calls that differ from those that code was made for: compiled again, or run as they are; right in any case."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import dovetail
from dovetail import Backend, Region
from tests.lowering.helpers import Counting, events


class Work(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) * 2 + 1


def outlined(*args: Any, model: nn.Module | None = None, **options: Any) -> GraphModule:
    gm = dovetail.capture(model or Work(), args, **options)
    return dovetail.outline(gm, [n for n in gm.graph.nodes if n.op == "call_function"], kind="work")


def body_call(gm: GraphModule) -> Callable[..., Tensor]:
    """The lowered region itself: the captured graph around it refuses inputs that it was not captured for."""
    gm.generate()  # type: ignore[operator]
    site = next(iter(gm.meta["dovetail.lowering"].sites.values()))
    return lambda *args: site(*args)[0]


X, W = torch.randn(4, 8), torch.randn(8, 8)


def test_what_differs_compiles_again_and_what_came_back_does_not() -> None:
    mine = Counting()
    run = body_call(dovetail.lower(outlined(X, W), [mine]))
    assert len(mine.compiled) == 1
    for x, w in (
        (X, W),
        (X.double(), W.double()),
        (torch.randn(5, 8), W),
        (torch.randn(8, 4).t(), W),
        (X, W.t()),
    ):
        for _ in range(2):
            assert torch.equal(run(x, w), Work()(x, w))
    assert len(mine.compiled) == 5
    assert torch.equal(run(X, W), Work()(X, W))
    assert len(mine.compiled) == 5


def test_gradients() -> None:
    mine = Counting()
    run = body_call(dovetail.lower(outlined(X, W), [mine]))
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    result = run(x, w)
    assert result.requires_grad
    result.sum().backward()
    leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
    Work()(*leaves).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip((x, w), leaves, strict=True))  # type: ignore[arg-type]
    assert [e.requires_grad for e in mine.examples[-1]] == [True, True]
    count = len(mine.compiled)
    with torch.no_grad():
        assert not run(x, w).requires_grad
    assert not run(x.detach(), w.detach()).requires_grad
    assert len(mine.compiled) == count  # without gradients it is the first code again
    assert run(x.detach(), w).requires_grad
    assert len(mine.compiled) == count + 1


def test_a_backend_that_cannot_be_differentiated_is_not_used_for_it() -> None:
    class Opaque(Counting):
        trains = False

    mine = Opaque("opaque")
    gm = dovetail.lower(outlined(X, W), [mine])
    run = body_call(gm)
    assert run(X.clone().requires_grad_(), W).requires_grad
    assert len(mine.compiled) == 1
    assert "gradients are needed" in events(gm)[-1].reason


def test_autocast_runs_the_body() -> None:
    mine = Counting()
    run = body_call(dovetail.lower(outlined(X, W), [mine]))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(X, W).dtype is Work()(X, W).dtype
        assert torch.equal(run(X, W), Work()(X, W))
    assert len(mine.compiled) == 1


def test_a_written_operand_that_is_another_one_runs_the_body() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x * y

    a, b = torch.randn(4), torch.randn(4)
    gm = outlined(a.clone(), b.clone(), model=Writes())
    mine = Counting()
    run = body_call(dovetail.lower(gm, [mine]))
    mine.calls = 0
    x = a.clone()
    assert torch.equal(run(x, b), (a + 1) * b)
    assert torch.equal(x, a + 1)
    assert mine.calls == 1
    both = a.clone()
    dovetail.lower(gm, [])
    run(both, both)
    assert mine.calls == 1
    assert torch.equal(both, a + 1)


def test_more_ways_than_allowed_run_the_body_and_are_reported_once() -> None:
    mine = Counting()
    run = body_call(dovetail.lower(outlined(X, W), [mine], recompile_limit=2))
    assert torch.equal(run(X, W), Work()(X, W))
    assert torch.equal(run(torch.ones(2, 8), W), Work()(torch.ones(2, 8), W))
    with pytest.warns(UserWarning, match="recompile limit of 2"):
        assert torch.equal(run(torch.ones(3, 8), W), Work()(torch.ones(3, 8), W))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.ones(6, 8), W)
    assert len(mine.compiled) == 2


def test_sizes_that_vary_are_one_specialisation() -> None:
    rows = Dim("rows", min=2, max=64)
    mine = Counting()
    gm = dovetail.lower(outlined(X, W, dynamic_shapes={"x": {0: rows}, "w": None}), [mine])
    for n in (4, 2, 64, 7):
        x = torch.randn(n, 8)
        assert torch.equal(gm(x, W), Work()(x, W))
    assert len(mine.compiled) == 1
    run = body_call(gm)
    x = torch.randn(65, 8)  # past what the symbol may be
    assert torch.equal(run(x, W), Work()(x, W))
    assert len(mine.compiled) == 2


def test_threads_calling_at_once() -> None:
    mine = Counting()
    run = body_call(dovetail.lower(outlined(X, W), [mine]))
    inputs = [torch.randn(n, 8) for n in (1, 2, 3, 4) * 8]
    agreed: list[bool] = []

    def work(x: Tensor) -> None:
        agreed.append(torch.equal(run(x, W), Work()(x, W)))

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [True] * len(inputs)
    assert len(mine.compiled) == 4


class Packing(Backend):
    """Keeps the weight transposed for each call site."""

    name = "packing"

    def __init__(self) -> None:
        self.packed = 0

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Callable[..., Any]:
        return region.body

    def prepare(self, site: Any) -> Callable[..., Any]:
        self.packed += 1
        kept = {i: site.operands[i].detach().clone() for i in site.constants}
        return lambda *args: site.compiled(*[kept.get(i, a) for i, a in enumerate(args)])


def test_prepared_state_is_per_site_and_follows_the_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]).eval(), X
    gm = dovetail.fuse(dovetail.capture(model, (x,)), dovetail.rules.repeats(min_size=2))
    mine = Packing()
    lowered = dovetail.lower(gm, [mine])
    with torch.no_grad():
        assert torch.equal(lowered(x), model(x))
        lowered(x)
        assert mine.packed == 3
        model[1][0].weight.mul_(2)
        assert torch.equal(lowered(x), model(x))
        assert mine.packed == 4


def test_a_kernel_for_one_size_only() -> None:
    """Used at 4, not used at 5, both right."""

    class OnlyFour(Counting):
        def compile(self, region: Region, examples: Sequence[Any]) -> Callable[..., Any]:
            if examples[0].shape[-1] != 4:
                raise ValueError("the last dimension is not 4")
            return super().compile(region, examples)

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 2

    mine = OnlyFour("only_four")
    gm = dovetail.lower(outlined(torch.randn(2, 4), model=Twice()), [mine])
    run = body_call(gm)
    four, five = torch.randn(2, 4), torch.randn(2, 5)
    mine.calls = 0
    assert torch.equal(run(four), Twice()(four))
    assert mine.calls == 1
    assert torch.equal(run(five), Twice()(five))
    assert mine.calls == 1
    assert "the last dimension is not 4" in events(gm)[-1].reason


@pytest.mark.parametrize("rows", [3, "any"])
def test_a_conjugate_that_is_not_written_out_runs_the_body(rows: int | str) -> None:
    """Compiled code reads memory as it lies."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + x

    x = torch.randn(3, 4, dtype=torch.complex64)
    dynamic = None if rows == 3 else {"x": {0: Dim("rows", min=2, max=64)}}
    mine = Counting()
    run = body_call(dovetail.lower(outlined(x, model=Twice(), dynamic_shapes=dynamic), [mine]))
    for _ in range(2):
        mine.calls = 0
        assert torch.equal(run(x), Twice()(x))
        assert mine.calls == 1
        assert torch.equal(run(x.conj()), Twice()(x.conj()))
        assert mine.calls == 1
