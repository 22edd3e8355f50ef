"""What an engineer asks of a report, each answered in at most three clicks from opening it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.tuning.decisions import BackendChoice, BodyDecision
from tests.reporting.browsing import Reader
from tests.reporting.conftest import Opener
from tests.reporting.programs import fused_gated
from tests.tuning.plans import Layers, block_of, captured, plan_for
from tests.tuning.plans import X as PLAN_X

MOST_CLICKS = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with measured times: the fourth region takes the most."""
    folder = tmp_path_factory.mktemp("questions")
    names = [region.name for region in dovetail.regions(fused_gated())]
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"dovetail::swiglu {name}",
            "dur": 900 if i == 3 else 100 + i,
        }
        for i, name in enumerate(names)
    ]
    trace = folder / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    return dovetail.report(fused_gated(), folder / "report.html", profile=trace)


def test_which_layers_were_not_fused_like_the_others(written: Path, open_report: Opener) -> None:
    reader = Reader(open_report(written))
    assert "layers.3 is not fused like layers.0–2,4,5: no swiglu." in reader.reads(".sidebar")
    assert "wider than my kernel takes" in reader.reads(".sidebar")
    reader.click(".findings .link", "layers.3")
    assert reader.reads(".panel h2") == "layers.3"
    assert reader.clicks <= MOST_CLICKS


def test_why_silu_and_mul_are_apart(written: Path, open_report: Opener) -> None:
    reader = Reader(open_report(written))
    reader.search("silu_3")
    assert "mul_3" in reader.reads(".panel .apart")
    assert "wider than my kernel takes" in reader.reads(".panel .apart")
    assert reader.clicks <= MOST_CLICKS


def test_why_two_operations_are_apart_is_answered_for_any_two(written: Path, open_report: Opener) -> None:
    reader = Reader(open_report(written))
    reader.click("#tab-decisions")
    for label, name in (("an operation", "silu_3"), ("another one", "mul_3")):
        reader.clicks += 1
        reader.page.get_by_label(label).fill(name)
    assert "wider than my kernel takes" in reader.reads(".answer")
    assert reader.clicks <= MOST_CLICKS
    reader.page.get_by_label("another one").fill("mul_1")
    assert "mul_1 is in region swiglu_1" in reader.reads(".answer")


def test_which_region_takes_the_most_time(written: Path, open_report: Opener) -> None:
    reader = Reader(open_report(written))
    slowest = dovetail.regions(fused_gated())[3].name
    assert f"{slowest} takes the most time" in reader.reads(".sidebar")
    reader.click("#tab-time")
    assert slowest in reader.page.locator(".columns > :last-child .bar-row").first.inner_text()
    assert "900 µs" in reader.page.locator(".columns > :last-child .bar-row").first.inner_text()
    assert "Measured: a profile" in reader.reads("#view-time")
    assert reader.clicks <= MOST_CLICKS


def test_what_changed_between_two_plans(tmp_path: Path, open_report: Opener) -> None:
    model = Layers().eval()
    key = block_of(captured(model)).key

    def compiled(backend: str) -> Any:
        plan = plan_for(model, PLAN_X, bodies={key: BodyDecision("layer", backend=BackendChoice(backend))})
        with torch.no_grad():
            return dovetail.compile(model, (PLAN_X,), plan=plan, backends="eager")

    path = dovetail.report(compiled("eager"), tmp_path / "plans.html", compare=compiled("torchscript"))
    reader = Reader(open_report(path))
    reader.click("#tab-compare")
    assert "layer: eager -> torchscript" in reader.reads(".differences")
    assert "run by eager → torchscript" in reader.reads(".differences")
    reader.click(".difference .link")
    assert reader.reads(".panel h2").startswith("block_")
    assert reader.clicks <= MOST_CLICKS


def test_which_line_of_the_model_a_region_comes_from(written: Path, open_report: Opener) -> None:
    reader = Reader(open_report(written))
    reader.search("swiglu_4")
    assert "F.silu(self.gate(y)) * self.up(y)" in reader.reads(".panel .hit")
    assert "programs.py:" in reader.reads(".panel .place")
    assert reader.clicks <= MOST_CLICKS
