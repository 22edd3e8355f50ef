"""What bounds the reading of files does not stand in the way of large graphs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import dovetail

_aten = torch.ops.aten
_STEPS = [
    (_aten.relu.default, ()),
    (_aten.mul.Tensor, (1.5,)),
    (_aten.sin.default, ()),
    (_aten.add.Tensor, (0.5,)),
]


def chain(length: int) -> tuple[GraphModule, list[Node]]:
    """A captured graph with this many operations in a row."""

    def model(x: Tensor) -> Tensor:
        return x + 1

    gm = dovetail.capture(model, (torch.randn(4),))
    *_, last, output = gm.graph.nodes
    nodes: list[Node] = [last]
    with gm.graph.inserting_before(output):
        for i in range(length):
            target, args = _STEPS[i % len(_STEPS)]
            node = gm.graph.call_function(target, (nodes[-1], *args))
            node.meta["val"] = last.meta["val"]
            nodes.append(node)
    output.replace_input_with(last, nodes[-1])
    gm.recompile()
    return gm, nodes[1:]


@pytest.mark.parametrize("length", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_nodes_and_regions(length: int, tmp_path: Path) -> None:
    gm, nodes = chain(length)
    gm = dovetail.outline(gm, [dovetail.Request(nodes[i : i + 4], kind="quad") for i in range(0, length, 8)])
    dovetail.save(gm, tmp_path / "large.pt2")
    start = time.thread_time()
    loaded = dovetail.load(tmp_path / "large.pt2")
    assert time.thread_time() - start < 5 + length / 2_000
    assert len(dovetail.regions(loaded)) == length // 8
    x = torch.randn(4)
    assert torch.equal(loaded(x), gm(x))
