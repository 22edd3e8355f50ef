"""The other views in a browser, and how all of them look: nothing overlaps at any size, in light and in dark, on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import dovetail
from tests.reporting.browsing import overlaps
from tests.reporting.conftest import Opener
from tests.reporting.documents import document_of
from tests.reporting.programs import GatedLayers, X, fused_gated, gated, large_graph, narrow_swiglu
from tests.zoo_graphs import zoo_graph


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dovetail.report(gated(), tmp_path_factory.mktemp("page") / "compared.html", compare=fused_gated())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("page")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
    )
    bert = dovetail.capture(transformers.BertModel(config).eval(), (torch.randint(0, 50, (2, 8)),))
    llama = dovetail.fuse(zoo_graph("llama"))
    graphs = {
        "llama": llama,
        "bert": dovetail.fuse(bert),
        "inception": dovetail.fuse(zoo_graph("inception")),
        "random": large_graph(2000, layers=False),
    }
    paths = {name: dovetail.report(gm, folder / f"{name}.html") for name, gm in graphs.items()}
    lowered = dovetail.lower(llama, {"rms_norm": "torchscript", "*": "eager"})
    return paths | {"lowered": dovetail.report(lowered, folder / "lowered.html", compare=llama)}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1920, "dark")])
@pytest.mark.parametrize("name", ["llama", "bert", "inception", "random", "lowered"])
def test_nothing_overlaps_in_any_view(
    name: str, width: int, scheme: str, reports: dict[str, Path], open_report: Opener
) -> None:
    page = open_report(reports[name], width, width * 9 // 16, scheme)
    for tab in page.locator("[role=tab]").all():
        tab.click()
        assert overlaps(page) == []
    page.locator("#tab-program").click()
    # Everything that is drawn opened once more, and something selected.
    for toggle in page.locator('.toggle[aria-label="open"]').all()[:4]:
        toggle.dispatch_event("click")
    page.locator(".box.op, .box.region").first.dispatch_event("click")
    assert overlaps(page) == []


def test_candidates_are_filtered_by_rule_outcome_reason_and_module(
    open_report: Opener, reports: dict[str, Path]
) -> None:
    page = open_report(reports["llama"])
    page.locator("#tab-decisions").click()
    rows = page.locator("tbody tr")
    everything = rows.count()
    page.get_by_label("Outcome", exact=True).select_option("accepted")
    accepted = rows.count()
    assert 0 < accepted < everything
    assert set(page.locator(".verdict").all_inner_texts()) == {"accepted"}
    page.get_by_label("Rule", exact=True).select_option("rms_norm")
    assert 0 < rows.count() < accepted
    page.get_by_label("Module contains").fill("layers.0")
    assert rows.count() == 1
    page.get_by_label("Module contains").fill("")
    page.get_by_label("Rule", exact=True).select_option("all rules")
    page.get_by_label("Outcome", exact=True).select_option("refused")
    page.get_by_label("Reason contains").fill("anchor")
    assert all("anchor" in text for text in page.locator("td.reason").all_inner_texts())


def test_a_near_miss_is_shown_beside_its_pattern(open_report: Opener, reports: dict[str, Path]) -> None:
    page = open_report(reports["llama"])
    page.locator("#tab-decisions").click()
    page.get_by_label("Outcome", exact=True).select_option("near-misses")
    # Those whose operations are all in regions are shown if asked for.
    page.get_by_label("also what adds nothing").check()
    page.locator("tbody tr").first.click()
    assert page.locator(".sides .side").count() == 2
    assert page.locator(".sides .miss .flag").all_inner_texts() == ["differs"]
    assert overlaps(page) == []


def test_bars_are_of_bytes_launches_and_flops_and_labelled_as_modelled(
    open_report: Opener, reports: dict[str, Path]
) -> None:
    page = open_report(reports["llama"])
    page.locator("#tab-time").click()
    texts = []
    for figure in ("bytes", "launches", "flop"):
        page.get_by_label("Figure", exact=True).select_option(figure)
        assert "not measured" in page.locator("#view-time").inner_text()
        texts.append(page.locator(".bar-figure").first.inner_text())
    assert len(set(texts)) == 3
    page.locator(".bar-row .link").first.click()
    assert page.locator("#view-program").is_visible()
    assert page.locator(".box.selected").count() == 1


def test_two_programs_move_and_open_in_step(compared: Path, open_report: Opener) -> None:
    page = open_report(compared, 1920, 1080)
    page.locator("#tab-compare").click()
    panes = page.locator(".side-pane .pane").all()
    page.locator(".difference .link").first.click()
    tops = [pane.locator(".selected").first.bounding_box()["y"] for pane in panes]
    assert abs(tops[0] - tops[1]) < 60
    before = [pane.locator(".stage").get_attribute("transform") for pane in panes]
    panes[0].hover(position={"x": 60, "y": 500})
    page.mouse.wheel(0, 90)
    # The browser handles a wheel when it draws next.
    page.wait_for_function(
        "t => document.querySelector('.side-pane .stage').getAttribute('transform') !== t", arg=before[0]
    )
    after = [pane.locator(".stage").get_attribute("transform") for pane in panes]
    assert before[0] != after[0]
    assert before[1] != after[1]
    module = panes[0].locator('.box.module[aria-label*="norm"]').first
    if module.count():
        module.dispatch_event("dblclick")
    assert overlaps(page) == []


def test_levels_that_one_program_has_open_are_open_in_the_other(tmp_path: Path, open_report: Opener) -> None:
    unfused, fused = gated(), fused_gated()
    page = open_report(dovetail.report(unfused, tmp_path / "report.html", compare=fused), 1920, 1080)
    page.locator("#tab-compare").click()
    titles = [
        {box.get_attribute("aria-label").split(" ")[1] for box in pane.locator(".box.module.open").all()}
        for pane in page.locator(".side-pane .pane").all()
    ]
    assert "layers" in titles[0]
    assert titles[1] <= titles[0]
    assert overlaps(page) == []


def test_each_graph_is_compared_with_its_counterpart(tmp_path: Path, open_report: Opener) -> None:
    example, other = X, torch.cat([X, X])
    compiled = [
        dovetail.compile(GatedLayers(2, None).eval(), (example,), backends=backend, dynamic=False)
        for backend in ("eager", "torchscript")
    ]
    with torch.no_grad():
        compiled[0](other)
        for x in (other, other[:6]):
            compiled[1](x)
    path = dovetail.report(compiled[0], tmp_path / "report.html", compare=compiled[1])
    first, second = document_of(path)["comparisons"]
    assert (first["right"], second["right"]) == ("second, graph 1", "second, graph 2")
    page = open_report(path)
    page.locator("#tab-compare").click()
    for number, label in enumerate(("graph 1", "graph 2")):
        page.get_by_label("graph", exact=True).select_option(label)
        texts = page.locator(".difference").all_inner_texts()
        shown = document_of(path)["comparisons"][number]["differences"]
        assert [text.partition(" ×")[0] for text in texts] == [row["text"] for row in shown]
        assert page.locator(".pane-title strong").all_inner_texts() == [f"first, {label}", f"second, {label}"]
        assert any("only on the right: graph 3" in text for text in texts)
        sizes = [pane.locator(".box.in").first.text_content() for pane in page.locator(".side-pane").all()]
        assert sizes[0] == sizes[1]


def test_printed_it_has_the_view_without_controls(open_report: Opener, reports: dict[str, Path]) -> None:
    page = open_report(reports["llama"])
    page.emulate_media(media="print")
    assert page.locator(".drawing").first.is_visible()
    assert not page.locator(".search").is_visible()
    assert not page.locator(".zoom").first.is_visible()
    assert len(page.pdf(print_background=True)) > 5000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str, open_report: Opener, reports: dict[str, Path]) -> None:
    page = open_report(reports["llama"], scheme=scheme)
    ratios = page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const light = (name) => {
            canvas.fillStyle = style.getPropertyValue(name).trim();
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
          const pairs = [["--ink", "--paper"], ["--ink", "--level"], ["--soft", "--paper"], ["--soft", "--back"], ["--soft", "--level"], ["--accent", "--paper"], ["--warn", "--paper"], ["--good", "--paper"], ["--ink", "--hit"]];
          return Object.fromEntries(pairs.map(([a, b]) => [a + " on " + b, ratio(a, b)]));
        }"""
    )
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def test_on_paper_the_whole_program_is_drawn_wherever_the_screen_was(
    open_report: Opener, reports: dict[str, Path]
) -> None:
    page = open_report(reports["lowered"])
    page.locator("#tab-compare").click()
    page.locator("#tab-program").click()
    page.mouse.move(600, 400)
    page.mouse.wheel(900, 900)
    before = page.locator("#view-program .stage").get_attribute("transform")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for svg in page.locator("svg.drawing").all():
        left, top, width, height = map(float, svg.get_attribute("viewBox").split())
        box = svg.locator(".stage").evaluate(
            "e => { const b = e.getBBox(); return [b.x, b.y, b.width, b.height] }"
        )
        assert left <= box[0]
        assert top <= box[1]
        assert left + width >= box[0] + box[2] - 1
        assert top + height >= box[1] + box[3] - 1
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#view-program .stage").get_attribute("transform") == before
    page.emulate_media(media="print")
    assert page.locator("#report").evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"


def test_kinds_of_which_there_is_no_region_have_no_color(open_report: Opener, tmp_path: Path) -> None:
    page = open_report(dovetail.report(gated(), tmp_path / "none.html"))
    page.locator("#tab-decisions").click()
    assert "No candidate was recorded" in page.locator("tbody").inner_text()
    page.locator("#tab-time").click()
    assert "operations in no region" in page.locator("#view-time").inner_text()
    page = open_report(dovetail.report(dovetail.fuse(gated(2), narrow_swiglu()), tmp_path / "one.html"))
    page.locator("#tab-decisions").click()
    assert page.locator("tr.accepted .swatch.none").count() == 0
