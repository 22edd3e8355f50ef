"""`torch.compile(model, backend="dovetail")`: Dynamo's graphs fused and lowered."""

import copy
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.interop.torch_compile import backend
from tests.lowering.helpers import Blocks, Counting


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, mine: Any = "eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"backends": mine, **options})


def test_it_is_known_by_name() -> None:
    found = {point.name: point.value for point in entry_points(group="torch_dynamo_backends")}
    assert found["dovetail"] == "dovetail.interop.torch_compile:backend"


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
        ({"backends": 3}, "is no backend"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(torch.sin, backend=backend, options=options)(x)  # type: ignore[arg-type]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mode='reduce-overhead' is Inductor's"):
        torch.compile(torch.sin, backend=backend, mode="reduce-overhead")(x)
