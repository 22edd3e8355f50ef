"""Traced regions: the same values and gradients, for the sizes seen, without a word of deprecation."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.backends.torchscript import TorchScript, Traced
from dovetail.lowering.lowered_state import lowered_state_of
from tests.lowering.helpers import Blocks, events, fused


def gradients(model: nn.Module, x: Tensor, *, twice: bool = False) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    leaves = [x, *model.parameters()]
    if not twice:
        return list(torch.autograd.grad(out.square().sum(), leaves))
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))


def test_values_in_inference() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    lowered = dovetail.lower(fused(model, x), ["torchscript"], verify=True, cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {"torchscript"}
    with torch.no_grad():
        for _ in range(4):
            result = lowered(x)
            assert torch.allclose(result, model(x), atol=1e-6)
            assert not result.requires_grad


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_gradients_and_their_gradients(twice: bool) -> None:
    model, x = Blocks(), torch.randn(3, 8)
    lowered = dovetail.lower(fused(model, x), ["torchscript"], verify=True, cache=False)
    for _ in range(3):
        for has, expected in zip(
            gradients(lowered, x, twice=twice), gradients(model, x, twice=twice), strict=True
        ):
            assert torch.allclose(has, expected, atol=1e-5)
    assert {e.backend for e in events(lowered) if e.outcome == "compiled"} == {"torchscript"}


def test_detached_parts_stay_detached() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).relu()
        return y + 1, y.detach() * 3

    x = torch.randn(4)
    gm = dovetail.capture(model, (x,))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    lowered = dovetail.lower(dovetail.outline(gm, calls, kind="both"), ["torchscript"], cache=False)
    for _ in range(4):
        first, second = lowered(x.clone().requires_grad_())
        assert first.requires_grad
        assert not second.requires_grad
    with torch.no_grad():
        assert not lowered(x.clone().requires_grad_())[0].requires_grad


def test_written_operands_are_written() -> None:
    def update(total: Tensor, x: Tensor) -> Tensor:
        total.mul_(0.5).add_(x)
        return total.relu() * 2

    a, x = torch.randn(4), torch.randn(4)
    gm = dovetail.capture(torch.fx.symbolic_trace(update), (a, x))
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    lowered = dovetail.lower(
        dovetail.outline(gm, calls, kind="update"), ["torchscript"], verify=True, cache=False
    )
    assert dovetail.regions(lowered)[0].backend == "torchscript"
    mine, theirs = a.clone(), a.clone()
    assert torch.equal(lowered(mine, x), update(theirs, x))
    assert torch.equal(mine, theirs)


def test_what_it_compiles_is_saved_and_loaded() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    region = dovetail.regions(gm)[0]
    backend = TorchScript()
    operands = [torch.randn(n.meta["val"].shape) for n in region.body.graph.nodes if n.op == "placeholder"]
    for grad in (False, True):
        given = [o.clone().requires_grad_(grad) for o in operands]
        with torch.set_grad_enabled(grad):
            code = backend.compile(region, given)
            assert isinstance(code, Traced)
            again = backend.load(backend.save(code), region)
            assert again.grad is grad
            (has,), (expected,) = again(*given), region.body(*given)
        assert torch.allclose(has, expected, atol=1e-6)
        assert has.requires_grad is expected.requires_grad


def test_the_disk_cache_serves_a_second_lowering(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    gm = fused(Blocks().eval(), x)
    first = dovetail.lower(gm, [TorchScript()], cache=tmp_path)
    second = dovetail.lower(gm, [TorchScript()], cache=tmp_path)
    assert [e.outcome for e in events(first)] == ["compiled"]
    assert [e.outcome for e in events(second)] == ["disk"]
    with torch.no_grad():
        assert torch.equal(first(x), second(x))
    lowering = lowered_state_of(pickle.loads(pickle.dumps(first)))
    assert lowering is not None
    assert {b.name for chain in lowering.assigned.values() for b in chain} == {"torchscript"}


def declined(function: Any, *args: Any, **options: Any) -> str:
    gm = dovetail.capture(function, args, **options)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    answer = TorchScript().supports(dovetail.regions(dovetail.outline(gm, calls, kind="whole"))[0])
    assert isinstance(answer, dovetail.Decline)
    return answer.reason


def test_what_it_does_not_take() -> None:
    x = torch.randn(4, 8)
    assert "(random)" in declined(lambda x: F.dropout(x.relu(), 0.5), x)
    dynamic = {"x": {0: torch.export.Dim("rows", min=2)}}
    assert (
        declined(lambda x: x.relu() + 1, x, dynamic_shapes=dynamic) == "the sizes of its operand 'x' may vary"
    )


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_models_of_the_zoo(name: str) -> None:
    entry = zoo.get(name)
    inputs = entry.example_inputs("tiny")
    model = entry.build("tiny").eval()
    gm = dovetail.fuse(dovetail.capture(model, inputs.args, inputs.kwargs))
    lowered = dovetail.lower(gm, ["torchscript"], verify=True, cache=False)
    outcomes = {e.outcome for e in events(lowered)}
    assert outcomes <= {"compiled", "supports"}, [
        e for e in events(lowered) if e.outcome not in ("compiled", "supports")
    ]
    with torch.no_grad():
        has, expected = lowered(*inputs.args, **inputs.kwargs), model(*inputs.args, **inputs.kwargs)
    for a, b in zip(
        torch.utils._pytree.tree_leaves(has), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)
