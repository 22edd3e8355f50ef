"""Comparisons: parts are lined up by structure, differences of equal layers are one line with their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.tuning.decisions import BackendChoice, BodyDecision, Spread
from tests.reporting.documents import document_of, item_at
from tests.reporting.programs import GatedLayers, X, fused_gated, gated
from tests.tuning.plans import Layers, block_of, captured, plan_for
from tests.tuning.plans import X as PLAN_X
from tests.zoo_graphs import zoo_graph


def compared(a: Any, b: Any, tmp_path: Path) -> dict[str, Any]:
    return document_of(dovetail.report(a, tmp_path / "report.html", compare=b))


def test_before_and_after_fusing_differ_in_the_regions(tmp_path: Path) -> None:
    document = compared(gated(), fused_gated(), tmp_path)
    rows = document["comparisons"][0]["differences"]
    assert {
        "sort": "kinds",
        "text": "regions of kind swiglu: 0 → 5",
        "left": None,
        "right": None,
        "times": 1,
    } in rows
    [change] = [row for row in rows if row["sort"] == "changed"]
    assert change["times"] == 5
    assert item_at(document, change["left"]) == "linear"
    assert item_at(document, change["right"], "other") == "swiglu_0"


def test_what_fusing_changed_reads_from_before_to_after_on_either_side(tmp_path: Path) -> None:
    sides = gated(), fused_gated()
    texts = [
        [(row["sort"], row["text"]) for row in document["comparisons"][0]["differences"]]
        for document in (compared(*sides, tmp_path), compared(*reversed(sides), tmp_path))
    ]
    assert texts[0] == texts[1]


def test_a_program_does_not_differ_from_itself(tmp_path: Path) -> None:
    comparison = compared(fused_gated(), fused_gated(), tmp_path)["comparisons"][0]
    assert comparison["differences"] == []
    assert comparison["same"] == 6 * 7


def test_other_backends_are_differences(tmp_path: Path) -> None:
    lowered = dovetail.lower(fused_gated(6, None), "eager")
    [row] = compared(fused_gated(6, None), lowered, tmp_path)["comparisons"][0]["differences"]
    assert (row["text"], row["times"]) == ("swiglu_0: run by its operations → eager", 6)


def test_an_added_layer_is_on_one_side_only(tmp_path: Path) -> None:
    longer = dovetail.capture(GatedLayers(7, None).eval(), (X,))
    comparison = compared(gated(6, None), longer, tmp_path)["comparisons"][0]
    [row] = comparison["differences"]
    assert comparison["same"] == 6 * 7
    assert row["sort"] == "right"
    assert row["text"].startswith("only on the right: 6 (")


def test_decisions_of_two_plans_are_compared_and_their_times_are_measured(tmp_path: Path) -> None:
    model = Layers().eval()
    key = block_of(captured(model)).key
    spread = Spread(2e-3, 1e-3, 3e-3, 9)

    def compiled(backend: str) -> Any:
        decision = BodyDecision("layer", seconds=spread, backend=BackendChoice(backend))
        plan = plan_for(model, PLAN_X, bodies={key: decision})
        with torch.no_grad():
            return dovetail.compile(model, (PLAN_X,), plan=plan, backends="eager")

    document = compared(compiled("eager"), compiled("torchscript"), tmp_path)
    [line] = document["comparisons"][0]["plans"]
    assert "eager" in line
    assert "torchscript" in line
    measured = document["graphs"][0]["measured"]
    assert [row["seconds"] for row in measured] == [2e-3] * 3
    assert "plan" in measured[0]["source"]


@pytest.mark.parametrize("name", ["llama", "bert", "lstm", "moe"])
def test_operations_that_a_region_took_are_on_both_sides(name: str, tmp_path: Path) -> None:
    """Regions across modules leave levels with boxes that have no counterpart there, but elsewhere."""
    unfused, fused = zoo_graph(name), dovetail.fuse(zoo_graph(name))
    for sides in ((unfused, fused), (fused, unfused)):
        rows = compared(*sides, tmp_path)["comparisons"][0]["differences"]
        assert [row["text"] for row in rows if "only on the" in row["text"]] == []


def test_what_a_region_took_from_another_module_leads_to_the_region(tmp_path: Path) -> None:
    unfused, fused = zoo_graph("llama"), dovetail.fuse(zoo_graph("llama"))
    text = "attention_norm (6 operations) → region embedding_norm_0 in layers.0"
    for sides, labels in (
        ((unfused, fused), ["before fusing", "after fusing"]),
        ((fused, unfused), ["after fusing", "before fusing"]),
    ):
        document = compared(*sides, tmp_path)
        assert [document["comparisons"][0][side] for side in ("left", "right")] == labels
        [row] = [row for row in document["comparisons"][0]["differences"] if row["text"] == text]
        region = row["right"] if sides[1] is fused else row["left"]
        assert item_at(document, region, "other" if sides[1] is fused else "graphs") == "embedding_norm_0"


def test_an_operation_of_another_operator_is_only_on_its_side(tmp_path: Path) -> None:
    class Activated(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            return self.function(y) if self.function else y

    without, extra = (dovetail.capture(Activated(f), (X,)) for f in (None, torch.tanh))
    [row] = compared(extra, without, tmp_path)["comparisons"][0]["differences"]
    assert (row["sort"], row["text"]) == ("left", "only on the left: tanh")
