"""A backward that is itself differentiated: through compiled code it gives what the model gives, or refuses."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dovetail
from dovetail import Backend, LoweringError, Region
from dovetail.lowering.lower import lower
from dovetail.outlining.inline import flat
from tests.backends.external_models import whole


class Aot(Backend):
    """Differentiates regions as torch.compile does, and compiles nothing, so that tests are quick."""

    name = "aot"
    trains = True

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        run = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(
            flat(region.body), list(examples)
        )
        return lambda *operands: tuple(run(*operands))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sin(x) * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        with torch.no_grad():
            return grad * torch.cos(x) * w, grad * torch.sin(x)


class _Once(_Square):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * torch.cos(x) * w, grad * torch.sin(x)


class Kernel(Backend):
    """A hand-written kernel with a backward of its own."""

    name = "kernel"
    trains = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Callable[..., Any]:
        return lambda *operands: (self.function(*operands),)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(F.silu(self.first(x)))) * 2 + x


class Views(nn.Module):
    """Several results over one intermediate, one that is a view of an input, and an input that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.inner(torch.tanh(x)).chunk(3, -1)
        return q, k.transpose(0, 1), v * x, x.view(-1)


def penalty(model: Any, parameters: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """The gradients of a loss with a gradient penalty."""
    x = x.clone().requires_grad_()
    result = model(x)
    results = result if isinstance(result, tuple) else (result,)
    loss = sum((r.square() * (i + 1)).sum() for i, r in enumerate(results))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (grad.square().sum() + loss).backward()
    gradients = [p.grad.clone() for p in parameters] + [x.grad]
    for p in parameters:
        p.grad = None
    return gradients


def check(model: nn.Module, fast: Any, x: Tensor) -> None:
    parameters = list(model.parameters())
    expected = penalty(model, parameters, x)
    for got, needed in zip(penalty(fast, parameters, x), expected, strict=True):
        torch.testing.assert_close(got, needed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["inductor", "torchscript", "eager", Aot()], ids=str)
@pytest.mark.parametrize("model", [Net, Views])
def test_a_gradient_penalty(backend: Any, model: type[nn.Module]) -> None:
    net, x = model(), torch.randn(3, 4)
    fast = dovetail.compile(net, backends=[backend], cache=False)
    check(net, fast, x)
    taken = {r.backend for r in dovetail.regions(fast.graphs[0])}
    assert taken == {backend if isinstance(backend, str) else backend.name}
    check(net, fast, x)


def test_behind_torch_compile() -> None:
    net, x = Net(), torch.randn(3, 4)
    check(net, torch.compile(net, backend="dovetail", options={"backends": [Aot()]}), x)


class _Interior(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x) * w


@pytest.mark.parametrize("function", [_Square.apply, _Once.apply])
def test_a_kernel_with_a_backward_of_its_own(function: Any) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    lowered = lower(whole(_Interior(), x, w), Kernel(function), cache=False, on_error="raise", grad=True)
    results = []
    for run in (lowered, _Interior()):
        # One tensor for both operands is one place in the graph, or two.
        for operands in ((x, w), (x, x), (x * 2, x)):
            (grad,) = torch.autograd.grad(run(*operands).sum(), x, create_graph=True)
            results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    for got, expected in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(got, expected)


def test_a_kernel_of_many_nodes_refuses() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    kernel = Kernel(lambda x, w: _Square.apply(x * 1, w) * 1)
    gm = whole(_Interior(), x, w)
    lowered = lower(gm, kernel, cache=False, on_error="raise", grad=True)
    (once,) = torch.autograd.grad(lowered(x, w).sum(), x)
    torch.testing.assert_close(once, torch.cos(x) * w)
    with pytest.raises(LoweringError, match=r"cannot be differentiated \(create_graph=True\)"):
        torch.autograd.grad(lowered(x, w).sum(), x, create_graph=True)
    # What its author declares is believed; of plain operations autograd sees all.
    undeclared = lower(gm, Kernel(lambda x, w: x.sin() * w), cache=False, on_error="raise", grad=True)
    (grad,) = torch.autograd.grad(undeclared(x, w).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], -torch.sin(x) * w)
    kernel.double_backward = True
    lowered = lower(gm, kernel, cache=False, on_error="raise", grad=True)
    torch.autograd.grad(lowered(x, w).sum(), x, create_graph=True)


@pytest.fixture
def pair() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Net()
    return net, dovetail.compile(net, (torch.randn(3, 4),), backends=[Aot()], cache=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functional_derivatives(pair: tuple[nn.Module, Any]) -> None:
    net, fast = pair
    x, v = torch.randn(3, 4), torch.randn(3, 4)

    def scalar(model: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: model(x).square().sum()

    derivatives: list[Callable[[Any], Any]] = [
        lambda m: torch.autograd.functional.hessian(scalar(m), x),
        lambda m: torch.autograd.functional.hessian(scalar(m), x, vectorize=True),
        lambda m: torch.autograd.functional.jacobian(m, x, vectorize=True),
        lambda m: torch.autograd.functional.jacobian(m, x, create_graph=True),
        lambda m: torch.autograd.functional.hvp(scalar(m), x, v),
        lambda m: torch.autograd.functional.vhp(scalar(m), x, v),
        lambda m: torch.autograd.functional.jvp(m, x, v),
        lambda m: torch.func.grad(scalar(m))(x),
        lambda m: torch.func.hessian(scalar(m))(x),
        lambda m: torch.func.jvp(m, (x,), (v,)),
        lambda m: torch.func.vmap(m)(x),
    ]
    for number, derivative in enumerate(derivatives):
        torch.testing.assert_close(derivative(fast), derivative(net), msg=lambda m, n=number: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode(pair: tuple[nn.Module, Any]) -> None:
    net, fast = pair
    x, v = torch.randn(3, 4), torch.randn(3, 4)
    tangents = []
    for model in (fast, net):
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)))
            tangents.append(result.tangent)
    assert tangents[0] is not None
    torch.testing.assert_close(tangents[0], tangents[1])


def test_gradgradcheck() -> None:
    net = Net(2).double()
    fast = dovetail.compile(net, backends=[Aot()], cache=False)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fast, (x,))
    assert torch.autograd.gradgradcheck(fast, (x,))


def test_backward_twice_and_once_more_is_an_error(pair: tuple[nn.Module, Any]) -> None:
    _, fast = pair
    x = torch.randn(3, 4, requires_grad=True)
    result = fast(x)
    first = torch.autograd.grad(result.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    torch.testing.assert_close(again, first[0])
    torch.testing.assert_close(
        torch.autograd.grad(again.square().sum(), x, retain_graph=True)[0],
        torch.autograd.grad(again.square().sum(), x)[0],
    )
    result = fast(x)
    torch.autograd.grad(result.sum(), x)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result.sum(), x, create_graph=True)


def test_an_operand_written_meanwhile_is_refused_and_costs_ordinary_backward_nothing() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x) * 2 + w

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    lowered = lower(whole(model, x, w), Aot(), cache=False, on_error="raise", grad=True)
    shifted = w * 1
    result = lowered(x, shifted)
    with torch.no_grad():
        shifted.add_(1)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x, retain_graph=True)[0], 2 * torch.cos(x))
    with pytest.raises(LoweringError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), x, create_graph=True)


def test_operands_are_freed_after_backward() -> None:
    import weakref

    x = torch.randn(3, 4, requires_grad=True)
    lowered = lower(whole(lambda x: torch.sin(x) * 2, x), Aot(), cache=False, on_error="raise", grad=True)
    operand = x * 1
    seen = weakref.ref(operand)
    result = lowered(operand)
    del operand
    result.sum().backward()
    assert seen() is None
    assert result is not None


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.sin(x), 0.5) * x


def test_random_numbers_are_refused() -> None:
    net = Noisy()
    fast = dovetail.compile(net, backends=[Aot()], cache=False)
    x = torch.randn(3, 4, requires_grad=True)
    torch.autograd.grad(fast(x).sum(), x)
    with pytest.raises(LoweringError, match="it draws random numbers"):
        torch.autograd.grad(fast(x).sum(), x, create_graph=True)
    eager = dovetail.compile(net, backends=["eager"], cache=False)
    torch.autograd.grad(eager(x).sum(), x, create_graph=True)


def test_statistics_of_a_batch_norm_are_written_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    other = copy.deepcopy(net)
    fast = dovetail.compile(other, backends=[Aot()], cache=False)
    x = torch.randn(5, 4)
    expected = penalty(net, list(net.parameters()), x)
    for got, needed in zip(penalty(fast, list(other.parameters()), x), expected, strict=True):
        torch.testing.assert_close(got, needed, rtol=1e-4, atol=1e-5)
    for got, needed in zip(other.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(got, needed)


def test_what_depends_on_a_written_operand_is_refused() -> None:
    def update(total: Tensor, x: Tensor) -> Tensor:
        result = torch.sin(x) * total
        total.add_(1)
        return result

    total, x = torch.randn(3), torch.randn(3, requires_grad=True)
    lowered = lower(whole(update, total, x), Aot(), cache=False, on_error="raise", grad=True)
    torch.autograd.grad(lowered(total, x).sum(), x)
    with pytest.raises(LoweringError, match="depend on an operand that it has written"):
        torch.autograd.grad(lowered(total, x).sum(), x, create_graph=True)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def reentrant(function: Any, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def early(function: Any, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def whole_way(function: Any, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def nested(function: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(function, y * 2, use_reentrant=False) + 1, x, use_reentrant=False)


def offloaded(function: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.mark.parametrize("backend", ["inductor", "torchscript", "eager", Aot()], ids=str)
@pytest.mark.parametrize("way", [reentrant, early, whole_way, nested, offloaded])
def test_checkpoints_and_hooks_on_saved_tensors(backend: Any, way: Any) -> None:
    net, x = Stack(), torch.randn(3, 4)
    fast = dovetail.compile(net, backends=[backend], cache=False)
    gradients: list[list[Tensor]] = []
    for model in (net, fast, fast):
        y = x.clone().requires_grad_()
        way(model, y).square().sum().backward()
        gradients.append([p.grad.clone() for p in (*net.parameters(), y)])
        net.zero_grad()
    for got in gradients[1:]:
        for a, b in zip(got, gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if way is not reentrant:  # torch itself does not differentiate that twice
        parameters = list(net.parameters())
        expected = penalty(lambda y: way(net, y), parameters, x)
        for a, b in zip(penalty(lambda y: way(fast, y), parameters, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
