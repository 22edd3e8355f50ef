"""A model that is changed after it was compiled: what was baked into a capture is never used when it is no longer so."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.lowering.lowered_state import lowered_state_of
from tests.lowering.helpers import Counting


class Scaled(nn.Module):
    """A few layers, with a number and a tensor that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.drop = nn.Dropout(0.0)
        self.scale = 2.0
        self.table = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)) * self.scale + x * self.table)
        return x


X = torch.randn(3, 8)


def replace_layer(model: Scaled) -> None:
    model.layers[0] = nn.Linear(8, 8)


def append_layer(model: Scaled) -> None:
    model.layers.append(nn.Linear(8, 8))


def set_number(model: Scaled) -> None:
    model.scale = 3.0


def set_tensor(model: Scaled) -> None:
    model.table = torch.zeros(8)


def write_tensor(model: Scaled) -> None:
    model.table.mul_(3)


def set_probability(model: Scaled) -> None:
    model.drop.p = 1.0


def hook_a_layer(model: Scaled) -> None:
    model.layers[1].register_forward_hook(lambda module, args, result: result * 3)


@pytest.mark.parametrize(
    "change",
    [replace_layer, append_layer, set_number, set_tensor, write_tensor, set_probability, hook_a_layer],
)
@pytest.mark.parametrize("calls", [1, 6])
def test_changes_are_noticed(change: Callable[[Scaled], None], calls: int) -> None:
    torch.manual_seed(0)
    model = Scaled()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    before = X
    for _ in range(calls):
        before = fast(X)
    assert torch.equal(before, model(X))
    change(model)
    assert torch.equal(fast(X), model(X))
    assert not torch.equal(fast(X), before)


def test_a_number_that_comes_back_is_no_new_capture() -> None:
    model = Scaled().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    fast.scale = 3.0  # set through the compiled module it is set on the model
    assert model.scale == 3.0
    assert torch.equal(fast(X), model(X))
    fast.scale = 2.0
    assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 2


def test_torch_compile_of_the_same_model_is_no_new_capture() -> None:
    """It marks the module with attributes of its own."""
    model = Scaled().eval()
    compiled = dovetail.compile(model, (X,), backends=[])
    torch.compile(model, backend="eager")(X)
    model.compile(backend="eager")
    assert torch.equal(compiled(X), model(X))
    assert len(compiled.graphs) == 1
    assert not compiled.diagnostics


def test_equal_numbers_of_other_types_are_others() -> None:
    class Times(nn.Module):
        factor: float = 2

        def __init__(self) -> None:
            super().__init__()
            self.factor = 2

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor + x

    model, x = Times(), torch.arange(4)
    fast = dovetail.compile(model, (x,), backends="eager", cache=False)
    model.factor = 2.0
    assert fast(x).dtype is model(x).dtype is torch.float32


def test_the_mode_is_the_models() -> None:
    model = Scaled()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    model.eval()
    assert not fast.training
    fast.train()
    assert model.training
    assert model.drop.training


class Wide(nn.Module):
    """Asks for dtypes that autocast and `.to` change: a cast that does nothing when captured is not in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, i: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(self.table(i))
        return torch.softmax(h.to(torch.float32), -1), torch.zeros(3, dtype=h.dtype) + h.sum()


def same(model: nn.Module, fast: nn.Module, *args: Tensor) -> bool:
    pairs = list(zip(fast(*args), model(*args), strict=True))
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


def test_another_dtype_of_the_weights() -> None:
    model, i = Wide().eval(), torch.arange(4)
    fast = dovetail.compile(model, (i,), backends="eager", cache=False)
    model.to(torch.bfloat16)
    assert same(model, fast, i)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_data_of_another_dtype_is_noticed_after_many_calls(name: str, dtype: torch.dtype) -> None:
    model = Affine().requires_grad_(False)
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    for _ in range(6):
        fast(X)
    (captured,) = fast.graphs
    parameter = model.get_parameter(name)
    # At the same address where the sizes of elements are equal.
    parameter.data = parameter.data.view(dtype) if dtype.itemsize == 4 else parameter.data.to(dtype)
    assert same(model, fast, X)
    assert captured not in fast.graphs


def test_gradient_flags_and_inference_mode_are_no_new_captures() -> None:
    model = Scaled()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    for flag in (True, False, True):
        model.requires_grad_(flag)
        for _ in range(3):
            assert fast(X).requires_grad is flag
        with torch.inference_mode():
            assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1


def test_autocast_when_compiling_and_when_calling() -> None:
    model, i = Wide().eval(), torch.arange(4)
    early = dovetail.compile(model, (i,), backends="eager", cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        late = dovetail.compile(model, (i,), backends="eager", cache=False)
    for fast in (early, late, pickle.loads(pickle.dumps(late)), copy.deepcopy(late)):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert same(model, fast, i)
                assert torch.is_autocast_enabled("cpu")
        assert same(model, fast, i)
        assert len(fast.graphs) == 3


def test_compiled_code_is_used_under_autocast() -> None:
    model, mine = Scaled().eval(), Counting()
    fast = dovetail.compile(model, backends=mine, cache=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fast(X)
        mine.calls = 0
        assert torch.equal(fast(X), model(X))
    assert mine.calls > 0


def test_tensors_in_the_place_of_parameters_run_the_model() -> None:
    model = Scaled().eval()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    others = {name: value * 2 for name, value in model.named_parameters()}
    result = torch.func.functional_call(fast, others, (X,))
    assert torch.equal(result, torch.func.functional_call(model, others, (X,)))
    assert torch.equal(fast(X), model(X))
    assert len(fast.graphs) == 1


class Choosy(nn.Module):
    def forward(self, x: Tensor, limited: bool = False) -> Tensor:
        y = torch.relu(x) * 2 + 1
        if limited:
            print("limited")
        return y


def test_a_call_that_cannot_be_captured_after_others_could(capsys: pytest.CaptureFixture[str]) -> None:
    model = Choosy()
    fast = dovetail.compile(model, (X,), backends="eager", cache=False)
    with pytest.warns(UserWarning, match=r"cannot be captured: forward prints"):
        assert torch.equal(fast(X, limited=True), model(X))
    assert capsys.readouterr().out == "limited\n"
    assert torch.equal(fast(X), model(X))
    strict = dovetail.compile(model, (X,), backends="eager", cache=False, on_error="raise")
    with pytest.raises(dovetail.CaptureError, match="forward prints"):
        strict(X, limited=True)
    with pytest.raises(dovetail.CaptureError, match="forward prints"):
        dovetail.compile(model, (X, True), backends="eager", cache=False, on_error="raise")


def test_a_call_that_the_model_refuses_raises_the_models_error() -> None:
    fast = dovetail.compile(Scaled().eval(), (X,), backends="eager", cache=False)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        fast()


@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_retained_graphs_and_double_backward(backend: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fast = dovetail.compile(model, (X,), backends=backend, cache=False)
    grads: list[Tensor] = []
    for run in (fast, model):
        x = X.clone().requires_grad_()
        loss = run(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    assert {r.backend for g in fast.graphs for r in dovetail.regions(g)} == {backend}
    assert not [
        e for g in fast.graphs for e in getattr(lowered_state_of(g), "events", []) if e.outcome == "call"
    ]


@pytest.mark.long
def test_inductor_retains_graphs_and_goes_backward_twice() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fast = dovetail.compile(model, (X,), backends="inductor")
    grads: list[Tensor] = []
    for run in (fast, model):
        x = X.clone().requires_grad_()
        loss = run(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    second: list[Tensor] = []
    for run in (fast, model):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        second += torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(*second)


def test_calls_that_the_model_refuses_do_not_use_up_the_recompile_limit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(2, 4)
    compiled = dovetail.compile(model, (x,), backends=["torchscript"], recompile_limit=2)
    with torch.no_grad():
        for dtype in (torch.float64, torch.float16, torch.int64, torch.float64):
            with pytest.raises(RuntimeError, match="same dtype"):
                compiled(x.to(dtype))
        assert torch.equal(compiled(x), model(x))
        compiled.half()
        assert torch.equal(compiled(x.half()), model(x.half()))
    assert not [event for event in dovetail.explain(compiled).diagnostics if event.startswith("limit")]


def test_a_call_that_raised_once_is_captured_the_next_time() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bound", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            torch._assert_async(x.sum() > self.bound, "too small")
            return x * 2

    model, x = Fails().eval(), torch.ones(3)
    compiled = dovetail.compile(model, recompile_limit=1, check_capture=False)
    model.bound.fill_(100.0)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="too small"):
                compiled(x)
        model.bound.fill_(0.0)
        for _ in range(3):
            assert torch.equal(compiled(x), x * 2)
    assert len(dovetail.explain(compiled).diagnostics) == 0
