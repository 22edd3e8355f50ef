"""What notebooks show: well-formed HTML, all text escaped, no scripts, the notebook's colors."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail import Plan
from tests.fusion.test_ledger_report import Layers

X = torch.randn(4, 8)


class Reader(HTMLParser):
    """Checks that tags are balanced and collects tags and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def fused() -> Any:
    return dovetail.fuse(dovetail.capture(Layers(2).eval(), (X,)))


def schedule() -> Any:
    s = dovetail.schedule(Layers(2), (X,))
    s.fuse(s["layers.0"].find(nn.Linear), kind="product")
    return s


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fused, ["graph of", "linear_activation", "region group @group"]),
        (lambda: dovetail.regions(fused())[0], ["region linear_activation_0", "rule", "aten.gelu.default"]),
        (lambda: dovetail.explain(fused()), ["4 regions in 1 round", "operations in no region", "declined"]),
        (Plan, ["Plan"]),
        (schedule, ["schedule", "product"]),
    ],
    ids=["graph", "region", "ledger", "plan", "schedule"],
)
def test_it_is_small_html_with_the_colors_of_the_notebook(make: Any, words: list[str]) -> None:
    source = make()._repr_html_()
    reader = Reader(source)
    assert not [word for word in words if word not in reader.text]
    assert reader.tags <= {"div", "strong", "pre", "details", "summary", "table", "tr", "th", "td"}
    assert not re.search(r"#[0-9a-f]{3,6}|rgb\(|black|white(?!-space)", source)
    assert len(source) < 20_000


def test_names_are_text() -> None:
    gm = dovetail.capture(torch.exp, (X,))
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    node.name = "<script>alert(1)</script>"
    reader = Reader(gm._repr_html_())
    assert "script" not in reader.tags
    assert "<script>" in reader.text
    ledger = dovetail.explain(fused())
    object.__setattr__(ledger, "unmatched", ("<img src=x>",))
    assert "img" not in Reader(ledger._repr_html_()).tags


def test_what_was_lost_from_a_ledger_read_from_json_is_left_out() -> None:
    ledger = dovetail.Ledger.from_json(dovetail.explain(fused()).to_json())
    assert "operations in no region" not in Reader(ledger._repr_html_()).text
