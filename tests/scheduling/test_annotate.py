"""Attributes of regions, notes on modules."""

import pytest
import torch
from torch import nn

import dovetail
from dovetail.errors import InvalidArgument
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import mlp, net


def test_attributes_of_a_region_are_added_and_nothing_else_changes() -> None:
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    part = s["blocks.*"]
    regions = part.fuse(part.find(mlp), kind="mlp", attrs={"width": 8})
    part.annotate(regions[:2], tile=64, order=[1, 0])
    s.annotate(regions[0], tile=32)
    now = part.regions
    assert [r.attrs for r in now] == [
        {"width": 8, "tile": 32, "order": [1, 0]},
        {"width": 8, "tile": 64, "order": [1, 0]},
        {"width": 8},
    ]
    assert [(r.kind, r.version, r.key) for r in now] == [(r.kind, r.version, r.key) for r in regions]
    for gm in part.graphs:
        dovetail.check(gm)
    assert torch.equal(s.build()(x), expected)
    assert s.undo()[0]["attrs"] == {"tile": 32}
    assert part.regions[0].attrs["tile"] == 64


def test_regions_nested_or_replayed_keep_their_annotations() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    block = s["blocks.0"]
    region = block.fuse(block.find(mlp), kind="mlp")[0]
    s.annotate(region, tile=64)
    inside = block.find(where=lambda node: node.name in (region.name, "add"))
    outer = block.fuse(inside, kind="outer", together=True)
    assert outer.attrs == {}
    s.decompose(outer)
    assert block.regions[0].attrs == {"tile": 64}
    other, _ = net(training=False)
    again = schedule(other, (x,)).replay(list(s.history)[:3])
    assert again["blocks.0"].regions[0].attrs == {"tile": 64}


def test_notes_on_modules_are_shown_and_added_up() -> None:
    model, x = net()
    s = schedule(model)
    s.annotate("blocks.*", stage=1)
    s["blocks.0"].annotate(stage=2, owner="me")
    assert "stage=2, owner='me'" in str(s)
    assert str(s).count("stage=1") >= 1
    s.undo(2)
    assert "stage" not in str(s)
    assert torch.is_tensor(s.build()(x))


def test_what_cannot_be_annotated_is_refused() -> None:
    model, x = net()
    s = schedule(model, (x,))
    block = s["blocks.0"]
    region = block.fuse(block.find(mlp))[0]
    before = s.text()
    with pytest.raises(InvalidArgument, match=r"'tile'.*a Tensor has no JSON form"):
        s.annotate(region, tile=torch.ones(1))
    with pytest.raises(InvalidArgument, match=r"annotate needs attributes: annotate\(region, tile=64\)"):
        s.annotate(region)
    with pytest.raises(InvalidArgument, match="annotate takes regions or the paths of modules; fuse Match"):
        s.annotate(block.find(nn.LayerNorm)[0], tile=1)
    with pytest.raises(dovetail.DovetailError, match="nowhere"):
        s.annotate("nowhere", tile=1)
    assert s.text() == before
    s.undo()
    with pytest.raises(dovetail.DovetailError, match=r"no longer there|not there any more"):
        s.annotate(region, tile=1)
