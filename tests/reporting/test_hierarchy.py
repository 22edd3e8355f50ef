"""Hierarchies: every operation once, levels of at most a hundred boxes, equal layers folded, equal parts one template."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail.fusion.coverage import coverage
from dovetail.reporting.findings import template_sizes
from dovetail.reporting.hierarchy import HierarchyBuilder
from dovetail.reporting.level_templates import MOST_BOXES, Box
from tests.reporting.programs import GatedLayers, X, fused_gated, gated, large_graph
from tests.zoo_graphs import zoo_graph

Records = list[dict[str, Any]]


def built(gm: GraphModule) -> tuple[Records, Box]:
    builder = HierarchyBuilder()
    box = builder.build(gm)
    return builder.templates.records, box


def walked(records: Records, number: int) -> list[tuple[int, dict[str, Any]]]:
    """Every occurrence of a template inside another, itself included, with the offset of its names."""
    sizes = template_sizes(records)
    occurrences: list[tuple[int, dict[str, Any]]] = []
    stack = [(number, 0)]
    while stack:
        at, offset = stack.pop()
        occurrences.append((offset, records[at]))
        offset += int(records[at]["t"] == "region")
        for row in records[at].get("c", ()):
            stack.append((row[0], offset))
            offset += sizes[row[0]]
    return occurrences


@pytest.mark.parametrize("name", ["llama", "inception", "lstm", "moe"])
def test_every_operation_and_region_has_one_name_at_its_offset(name: str) -> None:
    gm = dovetail.fuse(zoo_graph(name))
    records, box = built(gm)
    operations = [box.names[offset] for offset, r in walked(records, box.template) if r["t"] == "op"]
    regions = {box.names[offset]: r["r"] for offset, r in walked(records, box.template) if r["t"] == "region"}
    expected = [name for region in dovetail.regions(gm) for name in region.nodes]
    assert len(operations) == len(set(operations))
    assert set(operations) <= {n.name for n in dovetail.inline(gm).graph.nodes}
    assert set(expected) - set(operations) <= {
        n.name for n in dovetail.inline(gm).graph.nodes if "getitem" in str(n.target)
    }
    assert regions == {region.name: region.kind for region in dovetail.regions(gm)}


@pytest.mark.parametrize("layers", [True, False])
def test_levels_have_at_most_a_hundred_boxes_and_edges_point_down(layers: bool) -> None:
    records, box = built(large_graph(3000, layers=layers))
    assert sum(r["t"] == "op" for _, r in walked(records, box.template)) == 3000
    for record in records:
        rows = record.get("c", ())
        assert len(rows) <= MOST_BOXES
        for i, row in enumerate(rows):
            refs = [ref[0] if isinstance(ref, list) else ref for ref in row[1] if not isinstance(ref, str)]
            assert all(ref < i for ref in refs)


def test_equal_layers_are_one_fold_with_one_unit() -> None:
    records, box = built(gated(6, None))
    [fold] = [r for _, r in walked(records, box.template) if r["t"] == "fold"]
    assert fold["n"] == 6
    assert records[fold["u"]]["t"] == "module"
    assert [row[2] for row in fold["c"]] == list("012345")
    assert {row[0] for row in fold["c"]} == {fold["u"]}


def test_a_layer_that_differs_divides_the_fold() -> None:
    records, box = built(fused_gated(6, 3))
    folds = [r for _, r in walked(records, box.template) if r["t"] == "fold"]
    assert sorted(r["n"] for r in folds) == [2, 3]


def test_many_equal_layers_are_folds_of_folds() -> None:
    records, box = built(large_graph(50 * 250, layers=True))
    outer = max((r for _, r in walked(records, box.template) if r["t"] == "fold"), key=lambda r: r["n"])
    assert outer["n"] >= 248
    assert all(records[row[0]]["t"] == "fold" for row in outer["c"])
    assert records[outer["u"]]["t"] == "module"
    assert len(records) < 100


def test_equal_bodies_are_one_template_with_weights_by_relative_path() -> None:
    records, box = built(fused_gated(6, None))
    numbers = {row[0] for r in records for row in r.get("c", ()) if records[row[0]]["t"] == "region"}
    assert len(numbers) == 1
    refs = [row[1] for r in records for row in r.get("c", ()) if row[0] in numbers]
    assert {ref for row in refs for ref in row if isinstance(ref, str)} == {".gate.weight", ".up.weight"}
    assert len({name for name in box.names if name.startswith("swiglu_")}) == 6


class Twice(nn.Module):
    """A module that is called twice, with another call between that depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.between = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.between(self.shared(x)))


def test_a_module_that_would_make_a_cycle_is_divided_into_its_runs() -> None:
    records, box = built(dovetail.capture(Twice().eval(), (X,)))
    labels = [row[2] for row in records[box.template]["c"] if len(row) > 2]
    assert labels == ["shared", "between", "shared"]


def test_two_programs_share_what_is_equal() -> None:
    builder = HierarchyBuilder()
    first = builder.build(fused_gated(6, 3))
    count = len(builder.templates.records)
    again = builder.build(dovetail.fuse(dovetail.capture(GatedLayers().eval(), (X,)), []))
    assert builder.build(fused_gated(6, 3)).template == first.template
    assert again.template != first.template
    assert len(builder.templates.records) < 2 * count


def test_time_is_linear_in_the_operations() -> None:
    seconds: list[float] = []
    for count in (4000, 16000):
        gm = large_graph(count, layers=False)
        start = time.thread_time()
        built(gm)
        seconds.append(time.thread_time() - start)
    # Quadratic time would be sixteen times as long.
    assert seconds[1] < 4 * 2.5 * seconds[0] + 3


def nested() -> GraphModule:
    fused = dovetail.fuse(zoo_graph("llama"))
    return dovetail.fuse(fused, dovetail.rules.modules("layers.*", kind="layer"))


class Folded(nn.Module):
    """A product of folded rows, as some models write a projection, with elementwise work after it is unfolded again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, 8), self.weight).reshape(x.shape)
        return torch.tanh(y) * 2


@pytest.mark.parametrize("name", ["gated", "llama", "mamba", "vit", "nested", "folded"])
def test_totals_are_those_of_the_ledger_and_of_the_coverage(name: str) -> None:
    """Copies, regions within regions and reshapes that are views are not counted twice."""
    if name == "nested":
        gm = nested()
    elif name == "gated":
        gm = fused_gated(6, 3)
    elif name == "folded":
        gm = dovetail.fuse(dovetail.capture(Folded().eval(), (torch.ones(2, 4, 8),)), dovetail.rules.groups())
    else:
        gm = dovetail.fuse(zoo_graph(name))
    builder = HierarchyBuilder()
    totals = builder.templates.totals[builder.build(gm).template]
    ledger, covered = dovetail.explain(gm), coverage(gm)
    assert (totals.operations, totals.fused) == (covered.total.operations, covered.inside.operations)
    assert (totals.bytes_before, totals.flops) == (covered.total.bytes, covered.total.flops)
    assert totals.launches_before == covered.total.launches
    assert totals.bytes_before - totals.bytes_after == ledger.bytes_saved
    assert totals.launches_before - totals.launches_after == ledger.launches_saved
