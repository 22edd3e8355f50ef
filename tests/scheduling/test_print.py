"""A schedule as text: the tree of modules, and what was done where."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.scheduling.schedule import schedule

from .models import is_gelu, mlp, net


def shrunk(x: Tensor) -> Tensor:
    return F.gelu(x) / 2


def halves(x: Tensor) -> Tensor:
    return x[..., :2]


def show(text: str) -> str:
    return "\n" + text


def test_a_model_on_which_nothing_was_done() -> None:
    model, x = net()
    assert (
        show(str(schedule(model, (x,))))
        == """
Net
  blocks: ModuleList
    0-2: Block
      up, down: Linear
      norm: LayerNorm
      stats: BatchNorm1d
      drop: Dropout
  head: Linear"""
    )


def test_what_was_done_is_printed_where_it_was_done() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp), backends="eager")
    s.checkpoint(s["blocks.0"].regions)
    s["blocks.*"].annotate(stage=1)
    s["head"].replace(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    s.checkpoint("head")
    assert (
        show(str(s))
        == """
Net
  blocks: ModuleList
    0: Block  <- traced, mlp checkpointed, stage=1
    1, 2: Block  <- traced, mlp by eager, stage=1
  head: Sequential  <- in place of Linear, checkpointed
    0, 1: Linear"""
    )


def test_within_a_traced_model_regions_stand_at_their_modules() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s.find(mlp))
    s.fuse(s["blocks.2"].find(torch.ops.aten.layer_norm.default))
    assert (
        show(str(s))
        == """
Net  <- traced
  blocks: ModuleList
    0, 1: Block  <- mlp
    2: Block  <- mlp
      norm: LayerNorm  <- layer_norm"""
    )


def test_what_replaces_operations_and_modules_is_printed_by_its_name() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.replace(shrunk, s["blocks.1"].find(where=is_gelu))
    s["head"].replace(halves)
    assert (
        show(str(s))
        == """
Net
  blocks: ModuleList
    0: Block
      up, down: Linear
      norm: LayerNorm
      stats: BatchNorm1d
      drop: Dropout
    1: Block  <- traced, calls shrunk
    2: Block
      up, down: Linear
      norm: LayerNorm
      stats: BatchNorm1d
      drop: Dropout
  head: halves  <- in place of Linear"""
    )


def test_a_piece_of_what_was_replaced_is_printed_by_what_it_was() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s["head"].replace(nn.Sequential(nn.Linear(8, 2), nn.Tanh()))
    s["head.1"].replace(nn.Identity())
    assert str(s).splitlines()[-3:] == [
        "  head: Sequential  <- in place of Linear",
        "    0: Linear",
        "    1: Identity  <- in place of Tanh",
    ]


class Twice(nn.Module):
    """One layer under two names, called in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.again(x[0]).sum()


def test_ways_of_calling_and_what_was_done_in_one_of_them() -> None:
    s = schedule(Twice(), (torch.randn(2, 4),))
    matches = s["first"].find(torch.ops.aten.gelu.default)
    assert [m.form for m in matches] == [0, 1]
    s.fuse(matches[1])
    assert (
        show(str(s))
        == """
Twice
  first: Sequential  <- traced, 2 ways of calling
    1: GELU  <- gelu in call 1
  again: Sequential
    0: Linear
    1: GELU"""
    )
    s.fuse(matches[0])
    assert "    1: GELU  <- gelu\n" in str(s)


def test_the_text_has_the_graphs_and_is_the_same_whatever_ran(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(mlp), backends="eager")
    text = s.text()
    assert text.startswith(str(s))
    assert "blocks.0, call 0:\ngraph:\n" in text
    s.verify()
    s.build()(x).sum().backward()
    with torch.no_grad():
        model(x[:2])
    assert s.text() == text
    s.release()
    assert s.text() == text
    s.print()
    assert capsys.readouterr().out == f"{s}\n"
