"""A region as a script of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import dovetail
from dovetail import zoo
from dovetail.frontend.capture import capture
from tests.outlining.helpers import trace


def run(path):
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False
    )


def test_it_runs_alone(tmp_path):
    model = zoo.get("llama").build("tiny").eval()
    inputs = zoo.get("llama").example_inputs("tiny")
    gm = capture(model, inputs.args, inputs.kwargs)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    inner = dovetail.outline(gm, calls[20:24], kind="inner")
    kept = [n.name for n in calls[16:28] if n.name not in {m.name for m in calls[20:24]}]
    new = dovetail.outline(inner, [*kept, "inner_0"], kind="piece", attrs={"a": 1})
    region = dovetail.regions(new)[0]
    path = region.reproducer(tmp_path / "deep" / "piece.py")
    text = path.read_text()
    assert "piece" in text
    assert "dovetail" not in text
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") == len(region.outputs) + done.stdout.count("tensor(")


def test_constants_and_strides_are_kept(tmp_path):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(3.0)

        def forward(self, x):
            return x.t().contiguous() * self.table

    gm = capture(M(), (torch.randn(3, 5),))
    inside = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr")]
    region = dovetail.regions(dovetail.outline(gm, inside, kind="k"))[0]
    path = region.reproducer(tmp_path / "k.py")
    assert "[0.0, 1.0, 2.0]" in path.read_text()
    assert run(path).returncode == 0


def test_what_cannot_be_written_is_refused(tmp_path):
    gm = trace(lambda x: x.exp())
    region = dovetail.regions(dovetail.outline(gm, ["exp"], kind="k"))[0]
    with pytest.raises(dovetail.RegionError, match="meta"):
        region.reproducer(tmp_path / "k.py")
    leaf = trace(None, nn.Sequential(nn.Linear(2, 2)))
    region = dovetail.regions(dovetail.outline(leaf, ["_0"], kind="k"))[0]
    with pytest.raises(dovetail.RegionError, match="Linear"):
        region.reproducer(tmp_path / "k.py")
    assert not (tmp_path / "k.py").exists()
