"""The zoo through `compile`, by each backend, in eval and train mode, with fixed and open sizes.

Values, gradients of parameters and inputs, and what is written to buffers are those of the model as it is.
"""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail
from dovetail import zoo


def some(*quick: str) -> Any:
    """Every model of the zoo; those not named are for long runs."""
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in quick else pytest.mark.long) for n in zoo.names()]
    )


MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
# What TorchScript does not take, random blocks and sizes that vary, is somebody else's.
TORCHSCRIPT = ["torchscript", "eager"]


def built(name: str, *, training: bool, still: bool = True) -> tuple[nn.Module, nn.Module]:
    """A model twice. Some compilers draw other random numbers; with `still`, a dropout drops nothing."""
    torch.manual_seed(0)
    model = zoo.get(name).build().train(training)
    for module in model.modules() if still else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            setattr(module, "dropout", 0.0)  # noqa: B010
    return model, copy.deepcopy(model)


def calls(name: str, sizes: list[int]) -> list[zoo.Inputs]:
    return [zoo.get(name).example_inputs(batch=n, seed=n) for n in sizes]


def open_batch(model: nn.Module, inputs: zoo.Inputs) -> dict[str, Any]:
    """The first size of every tensor as one that varies."""
    batch = torch.export.Dim("batch", min=2, max=64)
    bound = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
    return {k: {0: batch} if isinstance(v, Tensor) else None for k, v in bound.items()}


def tensors(value: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]


def close(actual: Any, expected: Any, what: str = "values", rtol: float = 2e-4, atol: float = 2e-5) -> None:
    for i, (a, b) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, i=i: f"{what} {i}: {m}")


def trained(model: Any, inputs: zoo.Inputs) -> list[Tensor]:
    """One step without an optimizer: results, and gradients of parameters and of inputs that can have some."""
    leaves = [t for t in tensors((inputs.args, inputs.kwargs)) if t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_().grad = None
    model.zero_grad()
    torch.manual_seed(1)
    results = tensors(model(*inputs.args, **inputs.kwargs))
    torch.stack([t.float().square().mean() for t in results]).sum().backward()
    gradients = [p.grad for p in [*model.parameters(), *leaves]]
    assert any(g is not None for g in gradients)
    return [*results, *(torch.zeros(()) if g is None else g.clone() for g in gradients)]


def agrees(
    name: str, backends: Any, *, training: bool, still: bool = True, dynamic: bool = False, **options: Any
) -> set[str | None]:
    """Compile a model and compare a few calls of it; returns who ran its regions."""
    model, twin = built(name, training=training, still=still)
    sizes = [3, 5, 2] if dynamic else [2, 2]
    first, *_ = inputs = calls(name, sizes)
    options |= {"dynamic_shapes": open_batch(model, first)} if dynamic else {}
    fast = dovetail.compile(model, first.args, first.kwargs, backends=backends, **options)
    for given in inputs:
        if training:
            close(trained(fast, given), trained(twin, given), "result or gradient", rtol=1e-3, atol=1e-4)
            close(list(model.buffers()), list(twin.buffers()), "buffer")
        else:
            with torch.no_grad():
                close(fast(*given.args, **given.kwargs), twin(*given.args, **given.kwargs))
    assert len(fast.graphs) == 1
    return {r.backend for r in dovetail.regions(fast.graphs[0])}


@MODES
@some(*zoo.names())
def test_eager(name: str, training: bool) -> None:
    assert "eager" in agrees(name, "eager", training=training, still=False)


@MODES
@some("mlp", "bert", "resnet")
def test_torchscript(name: str, training: bool) -> None:
    assert "torchscript" in agrees(name, TORCHSCRIPT, training=training, still=False, cache=False)


@MODES
@some("mlp", "resnet")
def test_sizes_that_vary(name: str, training: bool) -> None:
    used = agrees(name, TORCHSCRIPT, training=training, still=False, dynamic=True, cache=False)
    assert "eager" in used


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_inductor(name: str) -> None:
    assert "inductor" in agrees(name, "inductor", training=False)


@pytest.mark.long
@MODES
@some(*zoo.names())
def test_inductor_on_all(name: str, training: bool) -> None:
    assert "inductor" in agrees(name, "inductor", training=training)


@pytest.mark.long
@MODES
@some(*zoo.names())
def test_inductor_on_all_with_sizes_that_vary(name: str, training: bool) -> None:
    assert "inductor" in agrees(name, "inductor", training=training, dynamic=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "llama", "bert", "resnet"])
def test_inductor_in_training_behind_dynamo(name: str) -> None:
    model, twin = built(name, training=True)
    (inputs,) = calls(name, [2])
    torch._dynamo.reset()
    close(
        trained(torch.compile(model, backend="dovetail"), inputs),
        trained(twin, inputs),
        "result or gradient",
        rtol=1e-3,
        atol=1e-4,
    )


def test_inductor_with_sizes_that_vary() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)).eval()
    rows = torch.export.Dim("rows", min=2, max=128)
    fast = dovetail.compile(model, (torch.randn(4, 8),), dynamic_shapes=({0: rows},))
    with torch.no_grad():
        for n in (4, 9, 100):
            x = torch.randn(n, 8)
            close(fast(x), model(x))
    log = dovetail.explain(fast.graphs[0]).lowered
    assert [entry.outcome for entry in log] in (["compiled"], ["disk"])


class Drops(nn.Module):
    """A share of its input, and a buffer that counts how much that was."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.drop(torch.tanh(x) + 2) * 3
        self.kept += (result != 0).sum()
        return result


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(
    "backend", ["eager", "torchscript", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_dropout_drops_its_share_and_gradients_the_same(backend: str, dynamic: bool) -> None:
    model, p = Drops(0.3), 0.3
    x = torch.randn(200, 50, requires_grad=True)
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=500)}} if dynamic else None
    chain = list(dict.fromkeys([backend, "eager"]))
    fast = dovetail.compile(model, (x,), backends=chain, dynamic_shapes=shapes, cache=False)
    torch.manual_seed(5)
    result = fast(x)
    assert model.kept == (result != 0).sum()
    share = (result == 0).float().mean().item()
    assert abs(share - p) < 0.03  # six times its deviation
    whole = (torch.tanh(x) + 2) * 3 / (1 - p)
    torch.testing.assert_close(result[result != 0], whole[result != 0])
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, result == 0)
    assert not torch.equal(fast(x), result), "every call draws anew"
    torch.manual_seed(5)
    assert torch.equal(fast(x), result), "from torch's own stream"
    with torch.no_grad():
        close(fast.eval()(x), model.eval()(x))
