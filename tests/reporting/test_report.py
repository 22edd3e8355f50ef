"""`dovetail.report`: one file, written whole or not at all, in which nothing of a model can run or be fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dovetail
from dovetail.fusion.ledger import ledger_of, write_ledger
from dovetail.fusion.ledger_entries import Measured
from tests.reporting.documents import document_of
from tests.reporting.programs import GatedLayers, X, fused_gated, gated, large_graph, narrow_swiglu

ROOT = Path(__file__).parents[2]


def test_the_path_of_the_file_is_returned_and_progress_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dovetail"):
        path = dovetail.report(fused_gated(), str(tmp_path / "report.html"))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: dovetail.report(torch.nn.ReLU(), p), "GraphModule"),
        (lambda p: dovetail.report(fused_gated(), p, compare=3), "GraphModule"),
        (lambda p: dovetail.report(fused_gated(), p, plan="plan.json"), "dovetail.Plan"),
        (lambda p: dovetail.report(fused_gated(), p, profile=object()), "torch.profiler"),
        (lambda p: dovetail.report(fused_gated(), p, profile=p.parent / "none.json"), "cannot be read"),
        (lambda p: dovetail.report(dovetail.schedule(GatedLayers()), p), "traced yet"),
        (lambda p: dovetail.report(fused_gated(), p.parent / "no" / "report.html"), "no folder"),
        (lambda p: dovetail.report(fused_gated(), 3), "path"),
        (lambda p: dovetail.report(fused_gated(), p, theme="dark"), "theme"),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_no_file(call: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(dovetail.DovetailError, match=words):
        call(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_report_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(dovetail.InvalidArgument):
        dovetail.report(fused_gated(), path, profile=object())
    assert path.read_text() == "old"


def test_text_of_a_model_cannot_end_the_element_it_is_in(tmp_path: Path) -> None:
    gm = gated(2, None)
    hostile = "</script><script>alert(1)</script><!--"
    copied = dovetail.outline(gm, ["silu", "mul"], kind="kind", attrs={"text": hostile + "\u2028"})
    page = dovetail.report(copied, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    templates = document_of(tmp_path / "report.html")["templates"]
    [attrs] = [json.loads(t["h"]) for t in templates if t["t"] == "region"]
    assert attrs["text"] == hostile + "\u2028"


def test_the_policy_allows_the_one_script_and_the_one_style_sheet(tmp_path: Path) -> None:
    page = dovetail.report(fused_gated(), tmp_path / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    for pattern in (r"<script>(.*?)</script>", r"<style>(.*?)</style>"):
        [content] = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "unsafe" not in policy[1]


def test_graphs_compiled_models_and_schedules_are_taken(tmp_path: Path) -> None:
    model = GatedLayers().eval()
    compiled = dovetail.compile(model, (X,), backends="eager")
    schedule = dovetail.schedule(GatedLayers().eval(), (X,))
    schedule.fuse(schedule.find(torch.nn.Linear), kind="projection")
    for x, title in ((gated(), "GatedLayers"), (compiled, "GatedLayers"), (schedule, "Schedule")):
        document = document_of(dovetail.report(x, tmp_path / "report.html"))
        assert document["title"] == title
        assert document["graphs"]


def test_a_compiled_model_with_two_graphs_has_both(tmp_path: Path) -> None:
    compiled = dovetail.compile(GatedLayers().eval(), (X,), backends="eager", dynamic=False)
    with torch.no_grad():
        compiled(X[:3])
    labels = [page["label"] for page in document_of(dovetail.report(compiled, tmp_path / "r.html"))["graphs"]]
    assert labels == ["graph 1", "graph 2"]


@pytest.mark.parametrize("exported", [False, True])
def test_times_of_a_profile_are_those_of_its_ranges(exported: bool, tmp_path: Path) -> None:
    gm = fused_gated()
    names = [region.name for region in dovetail.regions(gm)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            for name in names:
                with torch.profiler.record_function(f"dovetail::swiglu {name}"):
                    torch.randn(64, 64) @ torch.randn(64, 64)
            with torch.profiler.record_function("dovetail::swiglu another_0"):
                pass
    given: Any = profile
    if exported:
        given = tmp_path / "trace.json"
        profile.export_chrome_trace(str(given))
    document = document_of(dovetail.report(gm, tmp_path / "report.html", profile=given))
    measured = document["graphs"][0]["measured"]
    assert sorted(row["region"] for row in measured) == sorted(names)
    assert all(row["seconds"] > 0 and row["calls"] == 2 for row in measured)
    slowest = max(measured, key=lambda row: row["seconds"])["region"]
    assert any(
        f["text"].startswith(f"{slowest} takes the most time") for f in document["graphs"][0]["findings"]
    )


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    for label, words in (
        ("anything", "no ranges of regions"),
        ("dovetail::swiglu other_0", "other regions only"),
    ):
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            torch.profiler.record_function(label),
        ):
            torch.ones(2)
        with pytest.raises(dovetail.InvalidArgument, match=words):
            dovetail.report(fused_gated(), tmp_path / "report.html", profile=profile)


def test_a_profile_of_the_graph_itself_has_the_times_of_its_regions(tmp_path: Path) -> None:
    for gm in (fused_gated(), dovetail.lower(fused_gated(), "torchscript")):
        with torch.no_grad():
            gm(X)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                gm(X)
        page = document_of(dovetail.report(gm, tmp_path / "report.html", profile=profile))["graphs"][0]
        assert {row["region"] for row in page["measured"]} == {r.name for r in dovetail.regions(gm)}


def test_a_llama_of_32_layers_is_well_under_a_megabyte(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    gm = dovetail.fuse(dovetail.capture(model, (torch.randint(0, 100, (2, 16)),), {"use_cache": False}))
    path = dovetail.report(gm, tmp_path / "report.html")
    assert path.stat().st_size < 1_000_000


def test_equal_programs_give_equal_files(tmp_path: Path) -> None:
    gm = large_graph(400, layers=True)
    pages = [dovetail.report(gm, tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]


def test_the_committed_bundle_is_what_the_sources_give(tmp_path: Path) -> None:
    folder = ROOT / "report-ui"
    if shutil.which("node") is None or not (folder / "node_modules").is_dir():
        pytest.skip("node, or what `make report-assets` installs with npm, is not there")
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=folder, check=True, timeout=120)
    for name in ("report.js", "report.css"):
        committed = ROOT / "src" / "dovetail" / "reporting" / "assets" / name
        assert committed.read_text() == (tmp_path / name).read_text()


def test_the_time_that_a_plan_measured_of_a_whole_graph_is_that_of_its_one_region(tmp_path: Path) -> None:
    operations = [n.name for n in gated(2, None).graph.nodes if n.op == "call_function"]
    whole = dovetail.outline(gated(2, None), operations, kind="whole")
    measured = Measured("graph", "GatedLayers", "one region by eager", 2e-4, "the parts", 3e-4)
    for gm, names in ((whole, ["whole_0"]), (dovetail.fuse(gated(2, None), narrow_swiglu()), [])):
        write_ledger(gm, replace(ledger_of(gm), measured=(measured,)))
        page = document_of(dovetail.report(gm, tmp_path / "report.html"))["graphs"][0]
        assert [(row["region"], row["seconds"]) for row in page["measured"]] == [(n, 2e-4) for n in names]
        assert [(row["choice"], row["runner_up_seconds"]) for row in page["planned"]] == [
            ("one region by eager", 3e-4)
        ]


def test_a_plan_that_measured_no_region_of_the_graph_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="none of the plan's measurements is of a region of this graph"):
        dovetail.report(fused_gated(), tmp_path / "report.html", plan=dovetail.Plan())


def test_times_that_may_be_those_of_another_graph_say_so(tmp_path: Path) -> None:
    compiled = dovetail.compile(GatedLayers(2, None).eval(), (X,), backends="torchscript", dynamic=False)
    with torch.no_grad():
        compiled(X[:3])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(X)
    document = document_of(dovetail.report(compiled, tmp_path / "report.html", profile=profile))
    rows = [row for page in document["graphs"] for row in page["measured"]]
    assert rows
    assert all("several graphs" in row["source"] for row in rows)
