"""Bisecting a lowered graph finds the regions whose code breaks it, without compiling anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail.errors import InvalidArgument
from dovetail.lowering.bisect_lowering import bisect_lowering
from dovetail.lowering.lowered_state import lowered_state_of
from tests.lowering.helpers import Blocks, Counting, events, fused

X = torch.randn(3, 8)


class Wide(nn.Module):
    """Blocks of which no two are equal."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * (i + 2) / 9 + x
        return x


def regions_of(model: nn.Module) -> GraphModule:
    """One region for each block."""
    gm = dovetail.capture(model, (X,))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    size = 2 * len(calls) // len(list(model.parameters()))
    requests = [dovetail.Request(calls[i : i + size], kind="block") for i in range(0, len(calls), size)]
    return dovetail.outline(gm, requests)


class Spoils(Counting):
    """Runs the body, and adds something to what some regions return."""

    def __init__(self, *names: str, much: float = 1.0) -> None:
        super().__init__("spoils")
        self.names, self.much = names, much

    def compile(self, region: dovetail.Region, examples: Sequence[Any]) -> Callable[..., Any]:
        run = super().compile(region, examples)
        if region.name not in self.names:
            return run
        return lambda *operands: tuple(v + self.much for v in run(*operands))


def close_to(model: nn.Module, tolerance: float = 1e-4) -> Callable[[GraphModule], bool]:
    return lambda gm: bool((gm(X) - model(X)).abs().max() < tolerance)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("guilty", ["block_0", "block_5", "block_7"])
def test_the_region_is_identified_and_nothing_is_compiled_for_it(guilty: str) -> None:
    model = Wide().eval()
    backend = Spoils(guilty)
    lowered = dovetail.lower(regions_of(model), [backend])
    assert len(backend.compiled) == 8
    before = dovetail.text(lowered)
    verdict = bisect_lowering(lowered, close_to(model))
    assert verdict.regions == (guilty,)
    assert verdict.backends == ("spoils",)
    assert len(backend.compiled) == 8
    assert verdict.evaluations <= 2 + 3 + 2
    assert dovetail.text(lowered) == before
    assert str(verdict).startswith(f"region '{guilty}', lowered by 'spoils': breaks it")
    good = close_to(model)
    assert good(verdict.before)
    assert not good(verdict.after)
    assert [r.name for r in dovetail.regions(verdict.after) if r.backend] == [guilty]
    assert [r.name for r in dovetail.regions(verdict.before) if not r.backend] == [guilty]


def test_two_that_each_break_it_are_both_identified() -> None:
    model = Wide().eval()
    lowered = dovetail.lower(regions_of(model), [Spoils("block_2", "block_6")])
    verdict = bisect_lowering(lowered, close_to(model))
    assert [b.regions for b in verdict.breakages] == [("block_2",), ("block_6",)]


def test_two_that_only_break_it_together_are_one_breakage() -> None:
    model = Wide().eval()
    lowered = dovetail.lower(regions_of(model), [Spoils("block_3", "block_6")])

    def good(gm: GraphModule) -> bool:
        lowering = lowered_state_of(gm)
        assigned = set() if lowering is None else set(lowering.assigned)
        return not {"block_3", "block_6"} <= assigned

    verdict = bisect_lowering(lowered, good)
    assert [b.regions for b in verdict.breakages] == [("block_3", "block_6")]
    assert verdict.backends == ("spoils", "spoils")
    assert "together they break it" in str(verdict)


def test_regions_that_run_the_same_code_are_named_beside() -> None:
    model = Blocks().eval()
    lowered = dovetail.lower(fused(model, X), [Spoils("block_0")])
    verdict = bisect_lowering(lowered, close_to(model))
    (breakage,) = verdict.breakages
    assert breakage.regions == ("block_0",)
    assert breakage.same_code == ("block_1", "block_2", "block_3")
    assert "which run the same code" in str(verdict)


def test_nested_regions() -> None:
    model = Blocks().eval()
    gm = fused(model, X)
    calls = [r.name for r in dovetail.regions(gm)]
    outer = dovetail.outline(gm, calls[2:], kind="half")
    spoils = Spoils("half_0/block_2")
    lowered = dovetail.lower(outer, {"block_2": [spoils], "*": [Counting()]}, granularity="inner")
    assert events(lowered)
    verdict = bisect_lowering(lowered, close_to(model))
    assert verdict.regions == ("half_0/block_2",)
    assert verdict.backends == ("spoils",)


def test_a_check_that_raises_has_judged_it_bad_unless_asked() -> None:
    model = Wide().eval()
    lowered = dovetail.lower(regions_of(model), [Spoils("block_1")])

    def check(gm: GraphModule) -> bool:
        torch.testing.assert_close(gm(X), model(X))
        return True

    verdict = bisect_lowering(lowered, check)
    assert verdict.regions == ("block_1",)
    assert isinstance(verdict.error, AssertionError)
    assert "AssertionError" in str(verdict)
    with pytest.raises(AssertionError):
        bisect_lowering(lowered, check, errors="raise")


def test_what_cannot_be_bisected_is_reported() -> None:
    model = Wide(2).eval()
    gm = regions_of(model)
    lowered = dovetail.lower(gm, [Counting()])
    with pytest.raises(InvalidArgument, match="the lowered graph is good"):
        bisect_lowering(lowered, close_to(model))
    with pytest.raises(InvalidArgument, match="bad with nothing lowered too"):
        bisect_lowering(lowered, lambda gm: False)
    with pytest.raises(InvalidArgument, match="takes a lowered graph"):
        bisect_lowering(gm, close_to(model))
    with pytest.raises(InvalidArgument, match="still_good is a int"):
        bisect_lowering(lowered, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="returned None"):
        bisect_lowering(lowered, lambda gm: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidArgument, match="errors 'maybe'"):
        bisect_lowering(lowered, close_to(model), errors="maybe")
