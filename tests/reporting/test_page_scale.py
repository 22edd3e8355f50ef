"""Large programs in a browser: usable within seconds of a processor after opening, and a level unfolds at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import dovetail
from tests.reporting.browsing import ProcessorClock, overlaps
from tests.reporting.conftest import Opener
from tests.reporting.programs import large_graph


@pytest.mark.parametrize(
    ("count", "layers", "seconds"),
    [(10_000, False, 2), pytest.param(100_000, True, 5, marks=pytest.mark.long)],
)
def test_a_large_program_is_usable_within_seconds(
    count: int, layers: bool, seconds: float, tmp_path: Path, open_report: Opener
) -> None:
    path = dovetail.report(large_graph(count, layers=layers), tmp_path / "large.html")
    page = open_report(path)
    clock = ProcessorClock(page)
    page.reload()
    page.wait_for_selector("[data-ready]")
    page.locator(".box").first.click()
    assert 0 < clock.seconds() < seconds
    assert f"{count:,}" in page.locator(".figures").first.inner_text()
    assert not overlaps(page)
    page.locator("#tab-time").click()
    assert (
        sum(
            int(text.split()[0].replace(",", ""))
            for text in page.locator(".columns > :first-child .muted").all_inner_texts()
        )
        == count
    )
    page.locator("#tab-program").click()
    # Each level in sight, drawing included.
    for number in range(6):
        start = clock.seconds()
        is_there = page.evaluate(
            """async number => {
              const toggle = document.querySelectorAll('.toggle[aria-label="open"]')[number];
              toggle?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
              await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
              return toggle !== undefined;
            }""",
            number,
        )
        assert clock.seconds() - start < 0.5
        assert is_there or number
    start = clock.seconds()
    page.locator(".search").fill("neg_default_3")
    page.keyboard.press("Enter")
    page.wait_for_selector(".selected")
    assert clock.seconds() - start < 2
    assert page.locator(".panel h2").inner_text() == "neg_default_3"
    assert not overlaps(page)


def test_modules_and_operations_are_searched_in_all_of_many_equal_layers(
    tmp_path: Path, open_report: Opener
) -> None:
    graph = large_graph(50 * 200, layers=True)
    last = [node.name for node in graph.graph.nodes if node.op == "call_function"][-1]
    page = open_report(dovetail.report(graph, tmp_path / "report.html"))
    for text in ("layers.150", "layers.199.mlp", last):
        page.locator(".search").fill(text)
        assert page.locator(".results .name").first.inner_text() == text
        page.keyboard.press("Enter")
        module = "layers.199.mlp" if text == last else text
        page.locator(".panel dd code").get_by_text(module, exact=True).wait_for()
