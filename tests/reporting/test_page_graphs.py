"""Graphs of every origin: each has a report that opens, with all its boxes, in which everything can be selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail import rules
from tests.reporting.browsing import overlaps
from tests.reporting.conftest import Opener
from tests.reporting.programs import fused_gated, gated
from tests.zoo_graphs import zoo_graph

X = torch.randn(3, 8)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return {"a": [torch.relu(self.first(x)), x.sum()], "b": self.second(x).split(4, 1)}


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))


class Effects(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return nn.functional.dropout(x, 0.5, training=True) * self.total


class Many(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors).sum(0)


class Nothing(nn.Module):
    def forward(self) -> None:
        return None


def nested() -> GraphModule:
    gm = dovetail.fuse(zoo_graph("llama"))
    return dovetail.fuse(gm, rules.repeats(min_size=2))


def of_dynamo() -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Any) -> GraphModule:
        graphs.append(gm)
        return gm

    torch.compile(Branches(), backend=keep)(X)
    return graphs[0]


def dynamic() -> GraphModule:
    return dovetail.fuse(dovetail.capture(Branches(), (X,), dynamic_shapes=({0: torch.export.Dim("b")},)))


GRAPHS: dict[str, Callable[[], GraphModule]] = {
    "nested regions": nested,
    "symbolic_trace": lambda: torch.fx.symbolic_trace(Branches()),
    "make_fx": lambda: make_fx(Branches())(X),
    "dynamo": of_dynamo,
    "dynamic sizes": dynamic,
    "higher-order operators": lambda: dovetail.fuse(dovetail.capture(Conditional(), (X,))),
    "effects": lambda: dovetail.fuse(dovetail.capture(Effects(), (X,))),
    "training": lambda: dovetail.fuse(zoo_graph("resnet", training=True)),
    "many inputs": lambda: dovetail.capture(Many(), tuple(torch.randn(2) for _ in range(30))),
    "an input returned": lambda: torch.fx.symbolic_trace(nn.Identity()),
    "nothing": lambda: torch.fx.symbolic_trace(Nothing()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_report_of_it_opens_and_everything_can_be_selected(
    name: str, tmp_path: Path, open_report: Opener
) -> None:
    page = open_report(dovetail.report(GRAPHS[name](), tmp_path / "report.html"))
    for tab in page.locator("[role=tab]").all():
        tab.click()
    page.locator("#tab-program").click()
    page.evaluate(
        """() => {
          for (let i = 0; i < 20; i++) {
            const toggle = document.querySelector('.toggle[aria-label="open"]');
            if (toggle) toggle.dispatchEvent(new MouseEvent("click", { bubbles: true }));
          }
          for (const box of document.querySelectorAll(".box")) box.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        }"""
    )
    assert page.locator(".box").count() > 1
    assert overlaps(page) == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (gated, nested),
        (nested, lambda: dovetail.fuse(zoo_graph("llama"))),
        (lambda: zoo_graph("inception"), lambda: dovetail.fuse(zoo_graph("inception"))),
        (fused_gated, lambda: fused_gated(6, None)),
    ],
)
def test_each_difference_leads_to_both_programs(
    left: Callable[[], GraphModule], right: Callable[[], GraphModule], tmp_path: Path, open_report: Opener
) -> None:
    page = open_report(dovetail.report(left(), tmp_path / "report.html", compare=right()), 1920, 1080)
    page.locator("#tab-compare").click()
    links = page.locator(".difference .link")
    assert links.count() > 0
    for link in links.all()[:8]:
        link.click()
        assert page.locator(".side-pane .selected").count() >= 1
    assert overlaps(page) == []
