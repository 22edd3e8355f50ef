"""The ledger of a schedule: that of the graphs of its parts, with the modules of the model."""

import pytest
import torch
from torch import nn

import dovetail
from tests.fusion.test_ledger_report import Layers

X = torch.randn(4, 8)


def test_the_parts_of_a_schedule_are_explained_together() -> None:
    s = dovetail.schedule(Layers(3), (X,))
    with pytest.raises(dovetail.InvalidArgument, match="no part of the schedule is traced yet"):
        dovetail.explain(s)
    for part in ("layers.0", "layers.2"):
        s.fuse(s[part].find(nn.Linear), kind="product")
    ledger = dovetail.explain(s)
    assert len(ledger.graphs) == 2
    lines = str(ledger).splitlines()
    assert lines[0].startswith("4 regions of 2 graphs: 4 of 14 operations")
    assert lines[2].split()[:2] == ["product", "4"]
    assert lines[2].endswith("layers.0,2.{up,down}")
    assert {o.module for o in ledger.outside()} == {"layers.0", "layers.2"}
    assert ledger.why_not("layers.2.down") == ("'linear_1' is in region 'product_1' (kind 'product').",)
    assert not ledger.declined(module="layers.2")


def test_explaining_changes_nothing() -> None:
    s = dovetail.schedule(Layers(2), (X,))
    s.fuse(s["layers.0"].find(nn.Linear), kind="product")
    before = [dovetail.text(graph) for _, graph in s.part_graphs]
    metas = [[dict(node.meta) for node in graph.graph.nodes] for _, graph in s.part_graphs]
    str(dovetail.explain(s))
    assert [dovetail.text(graph) for _, graph in s.part_graphs] == before
    assert [[dict(node.meta) for node in graph.graph.nodes] for _, graph in s.part_graphs] == metas
    s.verify()
