"""The drawing of a program in a browser: opened, folded, searched, moved by mouse and keys, with details of what is selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from tests.reporting.browsing import box, overlaps
from tests.reporting.conftest import Opener
from tests.reporting.programs import X, fused_gated, gated
from tests.zoo_graphs import zoo_graph


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dovetail.report(dovetail.fuse(zoo_graph("llama")), tmp_path_factory.mktemp("page") / "llama.html")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dovetail.report(fused_gated(), tmp_path_factory.mktemp("page") / "layers.html")


def selected(page: Any) -> str:
    return page.locator(".panel h2").inner_text()


def test_regions_open_in_place(llama: Path, open_report: Opener) -> None:
    page = open_report(llama)
    before = page.locator(".box").count()
    region = box(page, "swiglu")
    region.locator(":scope > .toggle").click()
    assert page.locator(".box").count() == before + 4
    assert not overlaps(page)
    box(page, "swiglu").locator(":scope > .toggle").click()
    assert page.locator(".box").count() == before


def test_repeated_layers_are_folded_and_can_be_leafed_through_and_unfolded(
    layers: Path, open_report: Opener
) -> None:
    page = open_report(layers)
    fold = page.locator(".box.fold").first
    assert "×3" in fold.locator(":scope > text").first.text_content()
    fold.locator(':scope > [aria-label="next"]').click()
    page.locator(".box.fold").first.locator(".box.region").first.click()
    assert selected(page) == "swiglu_1"
    page.locator(".box.fold").first.locator(':scope > [aria-label="show each of them"]').click()
    units = page.locator(".box.fold").first.locator(".box.module").all()
    assert len(units) == 3
    assert not overlaps(page)


def test_details_of_an_operation_have_its_line_its_module_and_its_operands(
    layers: Path, open_report: Opener
) -> None:
    page = open_report(layers)
    page.keyboard.press("/")
    page.keyboard.type("silu")
    page.keyboard.press("Enter")
    text = page.locator(".panel").inner_text()
    assert selected(page) == "silu"
    assert "layers.0" in text
    assert "f32[4, 16]" in text
    assert "programs.py:" in text
    assert (
        page.locator(".panel .hit")
        .inner_text()
        .split(maxsplit=1)[1]
        .startswith("return x + self.down(F.silu(")
    )
    page.locator(".panel .link").filter(has_text="linear").first.click()
    assert selected(page) == "linear"


def test_details_of_a_region_have_its_body_as_python_that_runs(layers: Path, open_report: Opener) -> None:
    page = open_report(layers)
    page.keyboard.press("/")
    page.keyboard.type("swiglu_2")
    page.keyboard.press("Enter")
    body = page.locator(".panel .code").inner_text()
    scope: dict[str, Any] = {"aten": torch.ops.aten}
    exec(body, scope)
    gate, up = torch.randn(16, 8), torch.randn(16, 8)
    expected = torch.nn.functional.silu(X @ gate.T) * (X @ up.T)
    torch.testing.assert_close(scope["swiglu_2"](X, gate, up), expected)
    assert "run by\nits operations" in page.locator(".panel dl").first.inner_text().replace("\t", "\n")
    key = next(region.key for region in dovetail.regions(fused_gated()))
    assert key[:16] in page.locator(".panel").inner_text()


def test_keys_move_open_go_back_and_zoom(llama: Path, open_report: Opener) -> None:
    page = open_report(llama)
    page.locator(".drawing").first.focus()
    page.keyboard.press("ArrowDown")
    first = selected(page)
    page.keyboard.press("ArrowDown")
    assert selected(page) != first
    page.keyboard.press("/")
    page.keyboard.type("swiglu_0")
    page.keyboard.press("Enter")
    count = page.locator(".box").count()
    page.keyboard.press("Enter")
    assert page.locator(".box").count() > count
    page.keyboard.press("Escape")
    assert page.locator(".box").count() == count
    page.keyboard.press("Escape")
    assert selected(page) != "swiglu_0"
    stage = page.locator(".stage").first
    before = stage.get_attribute("transform")
    page.keyboard.press("+")
    zoomed = stage.get_attribute("transform")
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert len({before, zoomed, stage.get_attribute("transform")}) == 3
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    assert page.locator("#view-decisions").is_visible()


def test_the_mouse_moves_and_zooms_the_drawing(llama: Path, open_report: Opener) -> None:
    page = open_report(llama)
    stage = page.locator(".stage").first
    states = [stage.get_attribute("transform")]
    page.mouse.move(400, 700)
    page.mouse.down()
    page.mouse.move(440, 640, steps=4)
    page.mouse.up()
    states.append(stage.get_attribute("transform"))
    page.mouse.wheel(0, 120)
    page.wait_for_function(
        "t => document.querySelector('.stage').getAttribute('transform') !== t", arg=states[-1]
    )
    states.append(stage.get_attribute("transform"))
    assert len(set(states)) == 3


def test_search_offers_regions_modules_kinds_and_operations(llama: Path, open_report: Opener) -> None:
    page = open_report(llama)
    for text, expected in (
        ("attention_1", "attention_1"),
        ("layers.1.mlp", "layers.1.mlp"),
        ("rotary", "rotary"),
        ("silu_1", "silu_1"),
    ):
        page.locator(".search").fill(text)
        assert expected in page.locator(".results").inner_text()
    page.locator(".search").fill("nothing like it")
    assert "Nothing matches" in page.locator(".results").inner_text()


def test_regions_are_colored_by_backend_on_request(open_report: Opener, tmp_path: Path) -> None:
    gm = dovetail.lower(dovetail.fuse(zoo_graph("llama")), {"rms_norm": "torchscript", "*": "eager"})
    page = open_report(dovetail.report(gm, tmp_path / "report.html"))
    page.locator(".switch button", has_text="backend").click()
    assert {"eager", "torchscript"} <= set(page.locator(".legend li").all_inner_texts())
    colors = {
        name: box(page, name).get_attribute("class").split()[-1]
        for name in ("rms_norm", "swiglu", "linear_residual")
    }
    assert colors["swiglu"] == colors["linear_residual"] != colors["rms_norm"]


def test_text_of_a_model_is_text(open_report: Opener, tmp_path: Path) -> None:
    hostile = "<script>document.title='x'</script><img src=x onerror=\"document.title='y'\">"
    gm = dovetail.outline(gated(2, None), ["silu", "mul"], kind="kind", attrs={"text": hostile})
    node = next(n for n in gm.graph.nodes if n.name == "linear")
    node.name = "<script>alert(1)</script>"
    node.meta["nn_module_stack"] = {"k": ("layers.<b>0</b>", "Class<img src=x>")}
    page = open_report(dovetail.report(gm, tmp_path / "report.html"))
    page.locator(".search").fill("<script>")
    page.keyboard.press("Enter")
    assert selected(page) == "<script>alert(1)</script>"
    page.locator(".search").fill("kind_0")
    page.keyboard.press("Enter")
    assert "<img src=x onerror" in page.locator(".panel").inner_text()
    assert page.locator("#report script, #report img, #report b").count() == 0
    assert page.title() == "GatedLayers"


def test_a_program_of_one_large_module_is_opened(tmp_path: Path, open_report: Opener) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Long()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(13):
                x = torch.relu(x + i) if i % 2 else torch.tanh(x * i) @ x.T @ x
            return x

    gm = dovetail.capture(Outer().eval(), (X,))
    page = open_report(dovetail.report(gm, tmp_path / "one.html"))
    assert page.locator(".box").count() > 12


def test_equal_layers_are_leafed_through_and_unfolded_by_keys(layers: Path, open_report: Opener) -> None:
    page = open_report(layers)
    fold = page.locator(".box.fold").first
    fold.dispatch_event("click")

    def shown() -> str:
        return (
            page.locator('.box.fold .tool[aria-label="the one that is shown"] .label').first.text_content()
            or ""
        )

    first = shown()
    page.keyboard.press("]")
    assert shown() != first
    page.keyboard.press("[")
    assert shown() == first
    before = page.locator(".box").count()
    page.keyboard.press("u")
    assert page.locator(".box").count() != before
    assert page.locator('.tool[aria-label="show one for all"]').count() == 1
    page.keyboard.press("u")
    assert page.locator(".box").count() == before
