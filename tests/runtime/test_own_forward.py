"""Calls that a compiled model leaves to the model's own forward: its hooks run around that as around any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import dovetail
from dovetail.runtime.compiled_module import CompiledModule

Call = Callable[[CompiledModule, Tensor], Any]


class Branches(nn.Module):
    """Decides by its data what to do with two rows, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2 and bool(x.sum() > 1e9):
            return x
        return torch.relu(self.layer(x)) * 2


def traced(fast: CompiledModule, x: Tensor) -> Any:
    return make_fx(fast)(x)(x)


def exported(fast: CompiledModule, x: Tensor) -> Any:
    return torch.export.export(fast, (x,), strict=False).module()(x)


def vectorised(fast: CompiledModule, x: Tensor) -> Any:
    return torch.vmap(fast)(x)


def counted(fast: CompiledModule, x: Tensor) -> Any:
    with FlopCounterMode(display=False) as flops:
        result = fast(x)
    assert flops.get_total_flops() > 0
    return result


def in_one_way_too_many(fast: CompiledModule, x: Tensor) -> Any:
    with pytest.warns(UserWarning, match="recompile limit of 1"):
        return fast(x)


def not_captured(fast: CompiledModule, x: Tensor) -> Any:
    with pytest.warns(UserWarning, match="cannot be captured"):
        return fast(x)


@torch.no_grad()
@pytest.mark.parametrize(
    ("call", "rows", "ways"),
    [
        (traced, 3, 8),
        (exported, 3, 8),
        (vectorised, 3, 8),
        (counted, 3, 8),
        (in_one_way_too_many, 5, 1),
        (not_captured, 2, 8),
    ],
)
def test_hooks_run_once(call: Call, rows: int, ways: int) -> None:
    model, x = Branches().eval(), torch.randn(rows, 8)
    seen: list[str] = []

    def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        seen.append("before")
        return (args[0] + 1,)

    def after(module: nn.Module, args: tuple[Tensor], result: Tensor) -> Tensor:
        seen.append("after")
        return result * 3

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    fast = dovetail.compile(model, (torch.randn(3, 8),), backends="eager", recompile_limit=ways)
    expected = model(x)
    assert torch.equal(fast(torch.ones(3, 8)), model(torch.ones(3, 8)))
    seen.clear()
    torch.testing.assert_close(call(fast, x), expected)
    assert seen == ["before", "after"]
    assert len(fast.graphs) == 1
