"""`torch.compile(model, backend="dovetail")`: Dynamo's graphs fused and lowered."""

import copy
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail import zoo
from dovetail.runtime.torch_compile import backend
from tests.lowering.helpers import Blocks, Counting


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, mine: Any = "eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"backends": mine, **options})


def test_it_is_known_by_name() -> None:
    points = {point.name: point.value for point in entry_points(group="torch_dynamo_backends")}
    assert points["dovetail"] == "dovetail.runtime.torch_compile:backend"


def test_values_and_one_body_for_equal_layers() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Counting()
    fast = compiled(model, mine)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert mine.compiled == ["block_0"]


def test_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8))
    twin = copy.deepcopy(model)
    fast, x = compiled(model), torch.randn(4, 8)
    for _ in range(2):
        for one in (fast, twin):
            one(x).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert torch.equal(model[1].running_var, twin[1].running_var)
    assert model[1].num_batches_tracked == 2


def test_rules_match_as_in_a_captured_graph() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval(), torch.randn(4, 8)
    seen: list[str] = []
    mine = Counting(takes=lambda r: not seen.append(r.kind))  # type: ignore[func-returns-value]
    fast = compiled(model, mine, pipeline=dovetail.Fuse(dovetail.rules.DEFAULT), smallest=1)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert "linear_gelu" in seen or "linear_activation" in seen
    assert "layer_norm" in seen


def test_bodies_are_shared_across_graph_breaks() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Blocks(), Blocks()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken().eval(), torch.randn(3, 8)
    mine = Counting()
    fast = compiled(model, mine)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert mine.compiled == ["block_0"]


def test_sizes_that_vary() -> None:
    model = Blocks().eval()
    mine = Counting()
    fast = compiled(model, mine)
    with torch.no_grad():
        for n in (3, 4, 5, 6, 17):
            x = torch.randn(n, 8)
            assert torch.equal(fast(x), model(x))
    assert len(mine.compiled) == 2  # once for the first size, once for any


def test_a_graph_that_cannot_be_captured_runs_as_it_is() -> None:
    def derivative(x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: (z.sin() ** 2).sum())(x)

    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match=r"runs as it is: (forward uses a tensor|torch.export cannot trace)"):
        assert torch.equal(compiled(derivative)(x), derivative(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"forward uses a tensor|torch.export cannot trace"):
        compiled(derivative, on_error="raise")(x)


class Fivefold(torch.autograd.Function):
    """A derivative that is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 5


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_derivative_of_its_own_is_kept() -> None:
    def work(x: Tensor) -> Tensor:
        result: Any = Fivefold.apply(x)
        return result * 2 + x

    x = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match="whose own backward formula"):
        compiled(work)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 11.0))  # type: ignore[arg-type]
    torch._dynamo.reset()
    with torch.no_grad():  # nothing is lost without gradients
        assert torch.equal(compiled(work)(x), work(x))


def test_calls_that_the_capture_does_not_cover_run_the_graph() -> None:
    def shifted(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b

    fast, base = compiled(shifted), torch.randn(4, 8)
    mine, theirs = base.clone(), base.clone()
    fast(base.clone()[:3], base.clone()[1:])
    with pytest.warns(UserWarning, match="run it as it is: two example inputs share memory"):
        assert torch.equal(fast(mine[:3], mine[1:]), shifted(theirs[:3], theirs[1:]))
    assert torch.equal(mine, theirs)

    def first(x: Tensor, n: int) -> Tensor:
        return x * n + x[:n].sum()

    fast = compiled(first)
    for n in (1, 2, 3, 0):
        assert torch.equal(fast(base, n), first(base, n))


def test_autocast() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)

    def wide(x: Tensor) -> Tensor:
        return torch.softmax(linear(x).to(torch.float32), -1)

    fast, mine = compiled(wide, Counting()), Counting()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            result, expected = fast(x), wide(x)
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)
        assert torch.equal(fast(x), wide(x))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fast = compiled(wide, mine)
        fast(x)
        mine.calls = 0
        fast(x)
    assert mine.calls == 1


def test_odd_results_and_graphs_without_work() -> None:
    def odd(x: Tensor) -> Any:
        return x.sin() + 1, None, x, 3, (x.t(),)

    x = torch.randn(3, 8)
    result = compiled(odd)(x)
    assert torch.equal(result[0], x.sin() + 1)
    assert (result[1], result[3]) == (None, 3)
    assert result[2] is x
    assert result[4][0].data_ptr() == x.data_ptr()
    assert compiled(lambda x: x)(x) is x

    sized = torch.compile(
        lambda x: (x.shape[0] * 2, x * x.shape[0]),
        backend=backend,
        options={"backends": "eager"},
        dynamic=True,
    )
    for n in (3, 5, 9):
        double, product = sized(torch.ones(n, 4))
        assert double == 2 * n
        assert torch.equal(product, torch.full((n, 4), float(n)))


@pytest.mark.parametrize("name", ["llama", "resnet", "bert"])
def test_zoo(name: str) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build().eval(), entry.example_inputs()
    fast = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(
            fast(*inputs.args, **inputs.kwargs), model(*inputs.args, **inputs.kwargs), rtol=0, atol=0
        )


def test_bad_options() -> None:
    x = torch.randn(2)
    for options, words in (
        ({"bakends": "eager"}, "unknown option 'bakends'"),
        ({"backends": 3}, "is not a backend"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(torch.sin, backend=backend, options=options)(x)  # type: ignore[arg-type]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mode='reduce-overhead' is Inductor's"):
        torch.compile(torch.sin, backend=backend, mode="reduce-overhead")(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def _inner(self, x: Tensor) -> Tensor:
        return checkpoint(torch.tanh, self.linear(x), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(checkpoint(self._inner, x, use_reentrant=False))


def test_checkpoints_are_compiled_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Checkpointed(), torch.randn(2, 4)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    fast = compiled(model, on_error="raise")
    with caplog.at_level("WARNING", "dovetail"):
        fast(x).sum().backward()
    assert "checkpoints are not kept" in caplog.text
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)
