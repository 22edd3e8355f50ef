"""A captured graph is called as its model is, and only as it was captured."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail
from dovetail.errors import CallMismatch
from dovetail.frontend.calling_convention import convention_of
from dovetail.frontend.capture import capture
from dovetail.ir.process_state import suppress_torch_warnings

X, Y = torch.randn(3, 4), torch.randn(3, 4)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"y": y if mask is None else y * mask, "scale": scale}


class Nested(nn.Module):
    def forward(self, x: Tensor, d: dict[str, Any], *rest: Tensor, flag: bool = True, **more: Any) -> Any:
        return {"o": [x + d["a"] + d["b"][0], *rest], "z": more["z"], "flag": flag}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a["y"], b["y"]) and a["scale"] == b["scale"]


def test_positional_keyword_and_defaults_in_any_order() -> None:
    model = Masked()
    graph = capture(model, (X,), {"mask": Y})
    expected = model(X, Y)
    assert same(graph(X, Y), expected)
    assert same(graph(mask=Y, x=X), expected)
    assert same(graph(X, mask=Y, scale=2.0), expected)
    positional = capture(model, (X,))
    assert same(positional(X), model(X))
    assert same(positional(x=X, mask=None), model(X))


def test_nested_arguments_in_another_order() -> None:
    model, d = Nested(), {"a": X, "b": [X, None]}
    graph = capture(model, (X, d, X, Y), {"z": Y, "flag": False})
    result = graph(X, {"b": [X, None], "a": X}, X, Y, flag=False, z=Y)
    leaves, expected = pytree.tree_leaves(result), pytree.tree_leaves(model(X, d, X, Y, flag=False, z=Y))
    assert all(a is b or torch.equal(a, b) for a, b in zip(leaves, expected, strict=True))


@dataclasses.dataclass
class Pair:
    a: Tensor
    b: Tensor


pytree.register_dataclass(Pair)


def test_registered_dataclasses() -> None:
    def swap(pair: Pair) -> Pair:
        return Pair(pair.b * 2, pair.a)

    result = capture(swap, (Pair(X, Y),))(Pair(X, Y))
    assert isinstance(result, Pair)
    assert torch.equal(result.a, Y * 2)
    assert result.b is X


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {"mask": Y}, "missing 1 required positional argument: 'x'"),
        ((X, Y, X), {}, "takes from 2 to 3 positional arguments"),
        ((X, Y), {"more": 1}, "unexpected keyword argument 'more'"),
        ((X,), {}, "'mask' was captured as a tensor and is None"),
        ((X, Y), {"scale": 3.0}, "'scale' was left out"),
        ((X.double(), Y), {}, "float32 and is torch.float64"),
        ((X[:2], Y), {}, r"shape \(3, 4\) and has \(2, 4\)"),
        ((X[None], Y), {}, "shape"),
        (([X], Y), {}, "a list"),
        ((X.to("meta"), Y), {}, "on cpu and is on meta"),
    ],
)
def test_another_call_than_captured(args: Any, kwargs: Any, words: str) -> None:
    graph = capture(Masked(), (X,), {"mask": Y})
    with pytest.raises(CallMismatch, match=words):
        graph(*args, **kwargs)


def test_the_guard_alone_accepts_and_refuses_what_forward_does() -> None:
    model, d = Nested(), {"a": X, "b": [X, None]}
    graph = capture(model, (X, d, X, Y), {"z": Y, "flag": False})
    odd = capture(lambda device, torch, inf=float("inf"): device + torch, (X, Y))
    for gm, args, kwargs in (
        (graph, (X, d, X, Y), {"z": Y, "flag": False}),
        (graph, (X, {"b": [X, None], "a": X}, X, Y), {"flag": False, "z": Y}),
        (graph, (X, d, X, Y), {"z": Y}),
        (graph, (X, d, X, Y), {"z": Y[:2], "flag": False}),
        (graph, (X, d, X), {"z": Y, "flag": False}),
        (graph, (), {"z": Y}),
        (graph.train(False), (X, d, X, Y), {"z": Y, "flag": False}),
        (odd, (X, Y), {}),
        (odd, (X, Y, 2.0), {}),
        (odd, (X,), {"torch": Y.double()}),
    ):
        convention = convention_of(gm)
        assert convention is not None
        outcomes: list[str] = []
        for call in (gm, convention.guard(gm)):
            try:
                call(*args, **kwargs)
                outcomes.append("")
            except CallMismatch as error:
                outcomes.append(str(error))
        assert outcomes[0].replace("forward()", "check()") == outcomes[1]


def test_a_baked_value_is_compared() -> None:
    graph = capture(Masked(), (X,), {"scale": 3.0})
    assert graph(X, scale=3.0)["scale"] == 3.0
    with pytest.raises(CallMismatch, match=r"'scale' was 3.0 .* and is 2.0"):
        graph(X)
    with pytest.raises(CallMismatch, match="'mask' was left out"):
        graph(X, Y, scale=3.0)
    nan = capture(lambda x, k: x * 2, (X, float("nan")))
    nan(X, float("nan"))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, {"a": X, "b": [X, None]}, X), {"flag": False, "z": Y}),
        ((X, {"a": X}, X, Y), {"flag": False, "z": Y}),
        ((X, {"a": X, "b": (X, None)}, X, Y), {"flag": False, "z": Y}),
        ((X, {"a": X, "b": [X, None]}, X, Y), {"flag": False}),
        ((X, {"a": X, "b": [X, X]}, X, Y), {"flag": False, "z": Y}),
        ((X, {"a": X, "b": [X, None]}, X, Y), {"flag": True, "z": Y}),
    ],
)
def test_another_nesting_than_captured(args: Any, kwargs: Any) -> None:
    graph = capture(Nested(), (X, {"a": X, "b": [X, None]}, X, Y), {"z": Y, "flag": False})
    with pytest.raises(CallMismatch, match="Capture the model again"):
        graph(*args, **kwargs)


@pytest.mark.parametrize("captured", [True, False], ids=["train", "eval"])
def test_another_mode_than_captured(captured: bool) -> None:
    graph = capture(Masked().train(captured), (X,))
    graph.train(not captured)
    with pytest.raises(CallMismatch, match="mode"):
        graph(X)
    graph.train(captured)
    graph(X)


def halves(a: Tensor, b: Tensor) -> Tensor:
    return a + b[: a.shape[0]]


def test_dynamic_sizes_have_a_range_and_relations() -> None:
    batch = torch.export.Dim("batch", min=2, max=49)
    shapes = {"a": {0: batch}, "b": {0: batch + 1}}
    graph = capture(halves, (torch.ones(4, 6), torch.ones(5, 6)), dynamic_shapes=shapes)
    for n in (2, 7, 49):
        assert graph(torch.ones(n, 6), torch.ones(n + 1, 6)).shape == (n, 6)
    for m, n, words in [
        (50, 51, "size 0 of 'a' is 50, outside the captured range 2 to 49"),
        (1, 2, "outside the captured range"),
        (4, 6, r"size 0 of 'b' is 6, but must be 5"),
    ]:
        with pytest.raises(CallMismatch, match=words):
            graph(torch.ones(m, 6), torch.ones(n, 6))
    with pytest.raises(CallMismatch, match="size 6 in dimension 1 and has 7"):
        graph(torch.ones(4, 7), torch.ones(5, 7))
    with pytest.raises(CallMismatch, match="2 dimensions and has 1"):
        graph(torch.ones(4), torch.ones(5, 6))


def test_one_symbol_for_two_sizes() -> None:
    auto = {0: torch.export.Dim.AUTO}
    graph = capture(torch.add, (torch.ones(4, 6), torch.ones(4, 6)), dynamic_shapes=(auto, auto))
    graph(torch.ones(5, 6), torch.ones(5, 6))
    with pytest.raises(CallMismatch, match="must be 5"):
        graph(torch.ones(5, 6), torch.ones(1, 6))


def test_a_size_that_only_shows_doubled() -> None:
    half = torch.export.Dim("half", min=2, max=20)
    graph = capture(torch.neg, (torch.ones(8),), dynamic_shapes=({0: 2 * half},))
    graph(torch.ones(10))
    for size in (9, 42):
        with pytest.raises(CallMismatch):
            graph(torch.ones(size))


def test_conditions_the_exporter_relied_on_are_checked() -> None:
    def halve(x: Tensor, k: int) -> Tensor:
        return x.view(2, -1) if x.shape[0] % 2 == 0 and x.shape[0] * k > 6 else x

    auto = torch.export.Dim.AUTO
    graph = capture(halve, (torch.ones(4, 6), 3), dynamic_shapes={"x": {0: auto}, "k": auto})
    assert graph(torch.ones(6, 6), 2).shape == (2, 18)
    for args in ((torch.ones(5, 6), 3), (torch.ones(6, 6), 1)):
        with pytest.raises(CallMismatch, match="captured for inputs with"):
            graph(*args)


def test_runtime_assertions_stay_in_the_graph() -> None:
    def take(x: Tensor, n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= x.shape[0])
        return x[:size]

    graph = capture(take, (torch.ones(8), torch.tensor(3)))
    assert graph(torch.ones(8), torch.tensor(5)).shape == (5,)
    with pytest.raises(RuntimeError, match="assertion"):
        graph(torch.ones(8), torch.tensor(1))


def write(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


def test_inputs_that_share_memory_where_one_is_written() -> None:
    graph = capture(write, (torch.zeros(3), torch.ones(3)))
    both = torch.zeros(6)
    graph(both[:3], both[3:])
    for x, y in ((both[:3], both[:3]), (both[:3], both[2:5])):
        with pytest.raises(CallMismatch, match="'x' and 'y' share memory"):
            graph(x, y)
    reading = capture(torch.add, (X, Y))
    assert torch.equal(reading(X, X), X + X)


def test_copies_and_pickles_are_called_alike() -> None:
    model = Masked()
    graph = capture(model, (X,), {"mask": Y})
    expected = model(X, Y)
    for other in (copy.deepcopy(graph), copy.copy(graph), pickle.loads(pickle.dumps(graph))):
        assert same(other(X, mask=Y), expected)
        assert other.code == graph.code
        with pytest.raises(CallMismatch):
            other(X)
    convention = convention_of(graph)
    assert copy.deepcopy(convention) is convention


def test_other_tools_still_work() -> None:
    model = Masked()
    graph = capture(model, (X,), {"mask": Y})
    expected = model(X, Y)
    assert same(torch.fx.Interpreter(graph).run(X, Y), expected)
    assert same(torch.fx.GraphModule(graph, graph.graph)(X, mask=Y), expected)
    assert "linear" in graph.print_readable(print_output=False)
    assert "def forward(self, x, mask=None, *, scale=2.0):" in graph.code
    with suppress_torch_warnings():
        compiled = torch.compile(graph, backend="eager", fullgraph=True)
        assert same(compiled(X, mask=Y), expected)
        again = torch.export.export(graph, (X,), {"mask": Y})
        assert same(again.module()(X, mask=Y), expected)
    twice = capture(capture(nn.Sequential(model.linear), (X,)), (X,))
    assert torch.equal(twice(X), model.linear(X))


def test_fake_tensors_pass_unchecked() -> None:
    graph = capture(Masked(), (X,))
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert graph(mode.from_tensor(torch.ones(5, 4)))["y"].shape == (5, 4)


def test_parameter_names_that_cannot_be_written_down() -> None:
    class Odd(nn.Module):
        def forward(self, torch: Tensor, device: Tensor) -> Tensor:
            return torch - device

    graph = capture(Odd(), (X, Y))
    assert torch.equal(graph(device=Y, torch=X), X - Y)
    with pytest.raises(CallMismatch, match="missing a required argument: 'device'"):
        graph(X)


class Stateful(nn.Module):
    """Counts in one buffer, reads another, and may write what it is given."""

    def __init__(self, *, writes_input: bool = False) -> None:
        super().__init__()
        self.writes_input = writes_input
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes_input:
            x.add_(1)
            return x * self.scale
        self.count.add_(1)
        return x * 2 + self.scale


@pytest.mark.parametrize(
    ("writes_input", "name", "reason"),
    [
        (False, "count", "shares memory with the model's 'count', and the model writes to that"),
        (True, "scale", "shares memory with the model's 'scale', and the model writes to it"),
    ],
)
def test_a_model_given_its_own_state_is_reported_before_anything_runs(
    writes_input: bool, name: str, reason: str
) -> None:
    model, eager = (Stateful(writes_input=writes_input) for _ in range(2))
    graph = capture(model, (torch.ones(4),))
    for own in (getattr(graph, name), getattr(graph, name)[:4].view(4)):
        with pytest.raises(CallMismatch, match=reason):
            graph(own)
    assert torch.equal(graph.count, torch.zeros(4))
    assert torch.equal(graph(graph.get_buffer(name).clone()), eager(getattr(eager, name).clone()))
    # Read by both and written by none, it may be one memory.
    free = "scale" if name == "count" else "count"
    assert torch.equal(graph(graph.get_buffer(free)), eager(getattr(eager, free)))


def test_a_compiled_model_given_its_own_state_runs_its_own_forward() -> None:
    model, eager = Stateful(), Stateful()
    compiled = dovetail.compile(model, backends=["eager"])
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(4)), eager(torch.ones(4)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it tells that the call cannot be captured
            assert torch.equal(compiled(model.count), eager(eager.count))
    assert len(compiled.graphs) == 1
    with pytest.raises(dovetail.CaptureError, match="shares memory with the model's own 'count'"):
        dovetail.compile(model, (model.count,), backends=["eager"], on_error="raise")
