"""The decisions of a report: candidates in order with their costs, near-misses beside the pattern, what stands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from tests.reporting.documents import document_of
from tests.reporting.programs import X, fused_gated, gated


def page_of(gm: Any, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return document_of(dovetail.report(gm, tmp_path / "report.html", **options))["graphs"][0]


def test_candidates_are_in_order_with_costs_before_and_after(tmp_path: Path) -> None:
    gm = fused_gated()
    page = page_of(gm, tmp_path)
    accepted = [row for row in page["decisions"] if row["ok"]]
    assert [row["reason"] for row in accepted] == [region.name for region in dovetail.regions(gm)]
    ledger = dovetail.explain(gm)
    assert sum(row["before"][0] - row["after"][0] for row in accepted) == ledger.bytes_saved
    assert sum(row["before"][1] - row["after"][1] for row in accepted) == ledger.launches_saved
    places = [page["names"].split("\n").index(row["nodes"][0]) for row in page["decisions"]]
    assert places == sorted(places)


def test_a_refused_candidate_has_its_reason_and_what_it_would_cost(tmp_path: Path) -> None:
    [row] = [row for row in page_of(fused_gated(), tmp_path)["decisions"] if not row["ok"]]
    assert row["reason"] == "wider than my kernel takes"
    assert (row["matched"], row["wanted"]) == (4, 4)
    assert row["before"][0] > row["after"][0]
    assert (row["before"][1], row["after"][1]) == (4, 1)


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Absolute(nn.Module):
    """Almost what the pattern computes: magnitudes where it has squares, which the graph has elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.pow(2)
        return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6) * self.weight


def near_miss() -> Any:
    rule = dovetail.rule(kind="normalized")(normalized)
    return dovetail.fuse(dovetail.capture(Absolute().eval(), (X,)), rule)


def test_a_near_miss_has_pattern_and_graph_side_by_side_with_the_difference_marked(tmp_path: Path) -> None:
    page = page_of(near_miss(), tmp_path)
    [row] = page["decisions"]
    near = page["near"][row["near"]]
    rows = list(zip(near["pattern"], near["graph"], strict=True))
    assert [(p[0], g[0]) for p, g in rows if p[1] or g[2]] == [("aten.pow.Tensor_Scalar", "aten.abs.default")]
    assert all(p[0] == g[0] for p, g in rows if not (p[1] or g[2]))


def test_a_ledger_without_rules_has_the_reason_alone(tmp_path: Path) -> None:
    dovetail.save(near_miss(), tmp_path / "g.pt2")
    page = page_of(dovetail.load(tmp_path / "g.pt2"), tmp_path)
    [row] = page["decisions"]
    assert "near" not in row
    assert row["reason"]


def test_neighbors_that_are_apart_have_the_reasons_of_why_not(tmp_path: Path) -> None:
    gm = fused_gated()
    pairs = {(row["a"], row["b"]): row["reasons"] for row in page_of(gm, tmp_path)["apart"]}
    wide = next(pair for pair in pairs if pair[0].startswith("silu"))
    assert any("wider than my kernel takes" in reason for reason in pairs[wide])
    assert pairs[wide] == list(dovetail.explain(gm).why_not(*wide))


def test_layers_that_are_not_fused_like_the_others_are_named_with_the_reason(tmp_path: Path) -> None:
    [finding] = [f for f in page_of(fused_gated(), tmp_path)["findings"] if f["sort"] == "differs"]
    assert finding["text"].startswith("layers.3 is not fused like layers.0–2,4,5: no swiglu.")
    assert "wider than my kernel takes" in finding["text"]
    assert finding["at"] == ["module:layers.3"]


def test_equal_layers_and_layers_without_regions_stand_out_in_nothing(tmp_path: Path) -> None:
    for gm in (fused_gated(6, None), gated()):
        assert not [f for f in page_of(gm, tmp_path)["findings"] if f["sort"] == "differs"]


def test_the_region_that_moves_the_most_is_named_with_those_equal_to_it(tmp_path: Path) -> None:
    [finding] = [f for f in page_of(fused_gated(6, None), tmp_path)["findings"] if f["sort"] == "cost"]
    assert finding["text"].endswith("% with 5 equal regions.")
    [finding] = [f for f in page_of(fused_gated(1, None), tmp_path)["findings"] if f["sort"] == "cost"]
    assert finding["text"].endswith("of the bytes, modelled.")


def test_what_backends_failed_at_is_shown(tmp_path: Path) -> None:
    class Failing(dovetail.Backend):
        name = "failing"

        def compile(self, region: Any, examples: Any) -> Any:
            raise RuntimeError("no such luck")

        def supports(self, region: Any) -> Any:
            return True

    lowered = dovetail.lower(fused_gated(), [Failing(), "eager"])
    page = page_of(lowered, tmp_path)
    assert any("failing" in line and "no such luck" in line for line in page["fell_back"])
    assert any(label == "fell back" and value != "0" for label, value, _ in page["figures"])


def test_a_near_miss_by_an_operand_has_no_operation_of_the_pattern_beside_it(tmp_path: Path) -> None:
    @dovetail.rule(kind="scaled")
    def scaled(x: Tensor) -> Tensor:
        return torch.tanh(x * 0.5)

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * torch.exp(x))

    page = page_of(dovetail.fuse(dovetail.capture(Scaled().eval(), (X,)), scaled), tmp_path)
    [row] = page["decisions"]
    near = page["near"][row["near"]]
    pairs = list(zip(near["pattern"], near["graph"], strict=True))
    assert [(p[0], g[1]) for p, g in pairs if g[2]] == [("(an operand)", "exp")]
