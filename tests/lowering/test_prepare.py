"""What a backend prepares for one call: used while its weights are what they were, never in the way of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import LoweringError
from dovetail.lowering.backend_protocol import CallSite
from dovetail.lowering.lowered_state import lowered_state_of
from tests.lowering.helpers import Blocks, Counting, events, fused


class Packs(Counting):
    """Adds up the weights beforehand and notes for which call."""

    def __init__(self) -> None:
        super().__init__("packs")
        self.packed: list[str] = []

    def prepare(self, site: CallSite) -> Callable[..., Any]:
        self.packed.append(site.name)
        assert all(isinstance(site.operands[i], Tensor) for i in site.constants)
        return site.compiled


@torch.no_grad()
def test_each_call_is_prepared_once_and_again_after_a_weight_was_written() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Packs()
    lowered = dovetail.lower(fused(model, x), [mine], cache=False)
    for _ in range(3):
        assert torch.equal(lowered(x), model(x))
    assert mine.packed == ["block_0", "block_1", "block_2", "block_3"]
    model.layers[2].weight.mul_(2)  # type: ignore[union-attr,operator]
    assert torch.equal(lowered(x), model(x))
    assert mine.packed[4:] == ["block_2"]


class Fails(Packs):
    def prepare(self, site: CallSite) -> Callable[..., Any]:
        super().prepare(site)
        if site.name == "block_1":
            return 5  # type: ignore[return-value]
        raise ValueError("no room")


@torch.no_grad()
def test_what_cannot_be_prepared_runs_as_it_was_compiled() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Fails()
    lowered = dovetail.lower(fused(model, x), [mine], cache=False)
    for _ in range(2):
        assert torch.equal(lowered(x), model(x))
    assert mine.packed == ["block_0", "block_1", "block_2", "block_3"]
    failures = [(e.region, e.reason) for e in events(lowered) if e.outcome == "prepare"]
    assert failures[0] == ("block_0", "ValueError: no room")
    assert failures[1] == ("block_1", "it returned a int, not a callable")
    strict = dovetail.lower(fused(model, x), [Fails()], cache=False, on_error="raise")
    with pytest.raises(LoweringError, match="prepare: ValueError: no room"):
        strict(x)


class Sized(Counting):
    """Code that is wrong for any sizes but its own."""

    def compile(self, region: dovetail.Region, examples: Any) -> Callable[..., Any]:
        sizes = [tuple(e.shape) for e in examples]

        def run(*operands: Tensor) -> Any:
            assert [tuple(o.shape) for o in operands] == sizes, "the code of other sizes"
            return region.body(*operands)

        return run


@torch.no_grad()
def test_a_call_that_overtakes_does_not_change_the_code_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    lowered = dovetail.lower(fused(Blocks().eval(), x), [Sized()], cache=False, on_error="raise")
    lowered(x)
    lowering = lowered_state_of(lowered)
    assert lowering is not None
    site = lowering.sites["block_0"]
    three, five = ([torch.randn(_sizes(v, n)) for v in site.dispatcher.unit.values] for n in (3, 5))
    site(*five)
    site(*three)
    overtaken: list[int] = []

    def aliased(args: Any) -> bool:
        # Between the guard and the call, as another thread may: the site is called with other sizes.
        if not overtaken:
            overtaken.append(1)
            site(*five)
        return False

    monkeypatch.setattr(site.dispatcher, "has_aliased_writes", aliased)
    assert site(*three)[0].shape == (3, 8)
    assert overtaken


def _sizes(value: Tensor, rows: int) -> list[int]:
    return [rows if n == 3 else n for n in value.shape]


class Keeps(Counting):
    """Keeps what the constants were when it prepared."""

    def prepare(self, site: CallSite) -> Callable[..., Any]:
        run, kept = site.compiled, {i: site.operands[i].clone() for i in site.constants}
        return lambda *operands: run(*[kept.get(i, operand) for i, operand in enumerate(operands)])


class Viewed(torch.nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.view = torch.nn.Parameter(torch.randn(4, 4)), view

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.view(self.weight)) + 1


def transposed(weight: Tensor) -> Tensor:
    return weight.t()


def copied(weight: Tensor) -> Tensor:
    return weight.t().reshape(16)


@torch.no_grad()
@pytest.mark.parametrize(("view", "held"), [(transposed, {1}), (copied, set[int]())])
def test_views_of_weights_are_constants_and_what_may_be_a_copy_is_not(
    view: Callable[[Tensor], Tensor], held: set[int]
) -> None:
    model = Viewed(view).eval()
    x = torch.randn_like(view(model.weight))
    gm = dovetail.outline(dovetail.capture(model, (x,)), ["mul", "relu", "add"], kind="piece")
    lowered = dovetail.lower(gm, [Keeps("keeps")], cache=False)
    for _ in range(4):  # a copy soon lies where the one before it lay
        assert torch.equal(lowered(x), model(x))
        model.weight.mul_(2)
    lowering = lowered_state_of(lowered)
    assert lowering is not None
    assert lowering.sites["piece_0"].constants == held
