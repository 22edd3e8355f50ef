"""Regions have ranges in profiles, as exported to a trace; and nothing that traces a graph sees them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import dovetail
from tests.fusion.test_ledger_report import Layers

X = torch.randn(4, 8)


def fused() -> GraphModule:
    return dovetail.fuse(dovetail.capture(Layers(2).eval(), (X,)))


def ranges(run: Any, folder: Path) -> Counter[str]:
    """The ranges of a call in the trace that the profiler exports."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        run(X)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(e["name"] for e in events if e.get("ph") == "X" and e["name"].startswith("dovetail::"))


EXPECTED = Counter(
    {
        "dovetail::linear_activation linear_activation_0": 1,
        "dovetail::linear_activation linear_activation_1": 1,
        "dovetail::group group_0": 1,
        "dovetail::group group_1": 1,
    }
)


def test_regions_that_run_as_they_are(tmp_path: Path) -> None:
    gm = fused()
    assert ranges(gm, tmp_path) == EXPECTED
    with torch.no_grad():
        assert torch.equal(gm(X), dovetail.inline(gm)(X))


def test_lowered_regions_and_what_is_left_of_them(tmp_path: Path) -> None:
    everything = dovetail.lower(fused(), ["torchscript"])
    everything(X)
    assert ranges(everything, tmp_path) == EXPECTED
    some = dovetail.lower(fused(), {"linear_activation": ["torchscript"]})
    some(X)
    assert ranges(some, tmp_path) == EXPECTED


def test_a_compiled_model(tmp_path: Path) -> None:
    fast = dovetail.compile(Layers(2).eval(), (X,), backends=["torchscript"], rules=dovetail.rules.DEFAULT)
    names = ranges(fast, tmp_path)
    assert {name.split()[1] for name in names} == {region.name for region in dovetail.regions(fast)}


def test_operations_are_inside_the_range_of_their_region(tmp_path: Path) -> None:
    gm = fused()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        gm(X)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    around = next(e for e in events if e["name"] == "dovetail::linear_activation linear_activation_0")
    gelus = [e for e in events if e["name"] == "aten::gelu"]
    assert [around["ts"] <= e["ts"] <= around["ts"] + around["dur"] for e in gelus] == [True, False]


def test_without_a_profiler_there_is_one_check_and_no_range(monkeypatch: Any) -> None:
    gm = fused()
    assert gm.code.count("_is_profiled()") == 1
    assert "_enter_range" not in dovetail.inline(gm).code
    monkeypatch.setattr(type(gm), "_enter_range", None)
    gm(X)


def test_the_graph_is_not_changed_by_its_ranges() -> None:
    gm = fused()
    before = dovetail.text(gm)
    gm(X)
    assert dovetail.text(gm) == before
    assert gm.graph._codegen._body_transformer is None
    assert "_range" not in str(GraphModule(gm, gm.graph).code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("lowered", [False, True])
def test_tracers_do_not_record_ranges(lowered: bool) -> None:
    gm = fused()
    if lowered:
        gm = dovetail.lower(gm, {"linear_activation": ["eager"]})
    gm(X)
    with profile(activities=[ProfilerActivity.CPU]):
        traced = [
            torch.fx.symbolic_trace(gm),
            make_fx(gm)(X),
            torch.export.export(gm, (X,)).graph_module,
        ]
        # Guards of lowered code read sizes, which torch.jit.trace makes tensors of.
        script = None if lowered else torch.jit.trace(gm, X, check_trace=False)
    assert not [n for graph in traced for n in graph.graph.nodes if "record_function" in str(n.target)]
    assert script is None or "record_function" not in str(script.inlined_graph)
