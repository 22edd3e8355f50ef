"""Inner values computed again in backward: less is kept, everything else is equal."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import mlp, net


class Tower(nn.Module):
    """Blocks with dropout and no state that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def tower() -> tuple[Tower, Tensor]:
    torch.manual_seed(0)
    return Tower(), torch.randn(64, 8)


def stepped(model: nn.Module, x: Tensor) -> tuple[list[Any], int]:
    """Result, gradients and random numbers of a training step, and how many numbers were kept for backward."""
    kept: dict[int, int] = {}
    model.zero_grad()

    def keep(value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter):
            kept[value.data_ptr()] = value.numel()
        return value

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        result = model(x)
    result.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [result.detach(), *gradients, torch.rand(1)], sum(kept.values())


def test_a_module_keeps_less_and_is_equal() -> None:
    model, x = tower()
    expected, before = stepped(model, x)
    s = schedule(model, (x,))
    s["blocks.*"].checkpoint()
    built, after = stepped(s.build(), x)
    assert after < before / 3
    torch.testing.assert_close(built, expected)
    assert [step["do"] for step in s.history] == ["schedule", "checkpoint"]
    s.undo()
    assert stepped(model, x)[1] == before


def test_a_region_keeps_less_and_is_equal_drawn_numbers_included() -> None:
    model, x = tower()
    expected, before = stepped(model, x)
    s = schedule(model, (x,))
    regions = s.fuse(s.find(r"^blocks\.\d$"), kind="block")
    s.checkpoint(regions)
    assert [r.backend for r in s.regions] == ["checkpoint"] * 3
    built, after = stepped(s.build(), x)
    assert after < before / 3
    torch.testing.assert_close(built, expected)
    # Another batch size is checkpointed too.
    y = torch.randn(5, 8)
    model(y)
    ours, kept = stepped(model, y)
    theirs, all_kept = stepped(s.release(), y)
    torch.testing.assert_close(ours, theirs)
    assert kept < all_kept / 3


def test_one_region_of_many_and_steps_after_it() -> None:
    model, x = tower()
    expected, before = stepped(model, x)
    s = schedule(model, (x,))
    regions = s.fuse(s.find(r"^blocks\.\d$"), kind="block")
    s.checkpoint(regions[1])
    s.annotate(regions[0], stage=1)
    s.decompose(regions[2])
    assert [(r.name, r.backend) for r in s.regions] == [("block_0", None), ("block_1", "checkpoint")]
    built, after = stepped(s.build(), x)
    assert after < before
    torch.testing.assert_close(built, expected)


def test_a_region_that_calls_a_module_of_the_users_is_refused() -> None:
    model, x = tower()
    s = schedule(model, (x,))
    s.replace(lambda v: F.gelu(v), s.find(nn.GELU)[0], check=True)  # pyright: ignore[reportUnknownLambdaType]
    region = s.fuse(s.find(r"^blocks\.0$"), kind="block")[0]
    assert region.effects == ("random",)
    with pytest.raises(
        ScheduleError, match=r"'block_0' is not lowered: .*calls <lambda>, which is not a graph"
    ):
        s.checkpoint(region)
    assert s.regions[0].backend is None


def test_effects_of_a_region_are_refused() -> None:
    model, x = net()
    s = schedule(model, (x,))
    block = s["blocks.0"]
    region = block.fuse(block.find(nn.BatchNorm1d)[0], kind="stats")
    before = s.text()
    with pytest.raises(
        ScheduleError, match=r"'stats_0' is not lowered: .* effects \(writes\) that would happen twice"
    ):
        s.checkpoint(region)
    assert s.text() == before
    assert len(s.history) == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_effects_of_a_module_are_refused(training: bool, known: bool) -> None:
    model, x = net(training=training)
    s = schedule(model, (x,)) if known else schedule(model)
    state = copy.deepcopy(model.state_dict())
    before = s.text()
    with pytest.raises(ScheduleError, match=r"'blocks\.0' cannot be checkpointed: it writes .*running_mean"):
        s.checkpoint("blocks.0")
    assert s.text() == before
    torch.testing.assert_close(model.state_dict(), state)
    s.checkpoint("blocks.*.norm")


class Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * 2


def test_a_buffer_that_forward_writes_is_noticed_by_trying() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    s = schedule(model, (torch.randn(2, 4),))
    with pytest.raises(ScheduleError, match="'1' cannot be checkpointed: it writes 'seen'"):
        s.checkpoint("1")
    assert model.get_buffer("1.seen") == 0


def test_what_is_no_region_and_no_module_is_refused() -> None:
    model, x = net()
    s = schedule(model, (x,))
    with pytest.raises(InvalidArgument, match="checkpoint takes regions or the paths of modules; fuse Match"):
        s.checkpoint(s["blocks.0"].find(mlp))
    with pytest.raises(
        ScheduleError, match=r"'blocks' is a ModuleList and is never called itself.*'blocks\.\*'"
    ):
        s.checkpoint("blocks")
    s["blocks.0"].fuse(s["blocks.0"].find(mlp))
    with pytest.raises(ScheduleError, match=r"'blocks\.0\.norm' is traced; make a region of it"):
        s.checkpoint("blocks.0.norm")
    s.checkpoint("head")
    with pytest.raises(ScheduleError, match="'head' is checkpointed as a module, which tracing would lose"):
        s.find(mlp)
