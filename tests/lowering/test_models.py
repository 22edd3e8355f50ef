"""The zoo through `compile`, by each backend, in eval and train mode: values, gradients, buffers, other shapes."""

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import dovetail
from dovetail import zoo

# A dropout draws other numbers once it is compiled; these models are compared without.
STILL = 0.0


def built(name: str, *, training: bool) -> tuple[nn.Module, nn.Module, zoo.Inputs]:
    entry = zoo.get(name)
    torch.manual_seed(0)
    model = entry.build().train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = STILL
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = STILL
    return model, copy.deepcopy(model), entry.example_inputs()


def tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def close(made: Any, wanted: Any) -> None:
    for a, b in zip(tensors(made), tensors(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def agrees(name: str, backends: Any, *, training: bool) -> None:
    model, twin, inputs = built(name, training=training)
    fast = dovetail.compile(model, inputs.args, inputs.kwargs, backends=backends)
    if not training:
        with torch.no_grad():
            close(fast(*inputs.args, **inputs.kwargs), twin(*inputs.args, **inputs.kwargs))
    else:
        for one in (fast, twin):
            torch.manual_seed(1)
            sum(t.float().square().mean() for t in tensors(one(*inputs.args, **inputs.kwargs))).backward()  # type: ignore[union-attr]
        for (path, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), path
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=path)
        for a, b in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    used = {r.backend for g in fast.graphs for r in dovetail.regions(g)}
    assert used - {None}, "nothing was lowered"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", zoo.names())
def test_eager(name: str, training: bool) -> None:
    agrees(name, "eager", training=training)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_inductor(name: str) -> None:
    agrees(name, "inductor", training=False)


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", zoo.names())
def test_inductor_on_all(name: str, training: bool) -> None:
    agrees(name, "inductor", training=training)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "llama", "bert", "resnet"])
def test_inductor_in_training_behind_dynamo(name: str) -> None:
    model, twin, inputs = built(name, training=True)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="dovetail")
    for one in (fast, twin):
        sum(t.float().square().mean() for t in tensors(one(*inputs.args, **inputs.kwargs))).backward()  # type: ignore[union-attr]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


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
