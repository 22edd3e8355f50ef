"""Weights that a pass has folded or joined follow what they were computed from."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail.ir.weight_guard import CHECK_INTERVAL
from tests.runtime.weight_writes import COUNTED, UNCOUNTED, X, net, same


def folded(model: nn.Module, **_: Any) -> GraphModule:
    """A graph that no backend runs."""
    gm = dovetail.MergeParallel(materialise=True, guard=None)(dovetail.capture(model, (X,)))
    return dovetail.FoldConvBatchNorm()(gm)


@torch.no_grad()
@pytest.mark.parametrize("write", COUNTED)
def test_what_version_counters_show_is_noticed_at_once(write: Callable[[Any], None]) -> None:
    model = net(write)
    gm = folded(model)
    before = gm(X)
    write(model)
    assert same(gm(X), model(X))
    assert not same(model(X), before)


@torch.no_grad()
@pytest.mark.parametrize("write", UNCOUNTED)
def test_anything_else_is_noticed_within_the_interval(write: Callable[[Any], None]) -> None:
    model = net(write)
    gm = folded(model)
    before = gm(X)
    write(model)
    results = [gm(X) for _ in range(CHECK_INTERVAL)]
    assert same(results[-1], model(X))
    assert not same(model(X), before)


@torch.no_grad()
@pytest.mark.parametrize("write", UNCOUNTED)
def test_refresh_notices_everything(write: Callable[[Any], None]) -> None:
    model = net(write)
    gm = folded(model)
    write(model)
    assert dovetail.refresh(gm) > 0
    assert same(gm(X), model(X))
    assert dovetail.refresh(gm) == 0


def pickled(gm: GraphModule) -> GraphModule:
    return pickle.loads(pickle.dumps(gm))


def saved(gm: GraphModule) -> GraphModule:
    with tempfile.TemporaryDirectory() as folder:
        dovetail.save(gm, f"{folder}/folded.pt2")
        return dovetail.load(f"{folder}/folded.pt2")


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
def test_copies_of_folded_graphs_follow_their_own_weights(copied: Callable[..., GraphModule]) -> None:
    gm = folded(net())
    before = gm(X)
    twin = copied(gm)
    assert same(twin(X), before)
    twin.get_parameter("left.weight").mul_(2)
    twin.get_buffer("norm.running_mean").add_(1)
    unfolded = dovetail.capture(net(), (X,))
    unfolded.load_state_dict(twin.state_dict())
    assert same(twin(X), unfolded(X))
    assert same(gm(X), twin(X) if copied is copy.copy else before)


@torch.no_grad()
def test_a_folded_graph_whose_sources_are_gone_keeps_what_it_has() -> None:
    gm = folded(net())
    before = gm(X)
    gm.delete_all_unused_submodules()
    assert not hasattr(gm.get_submodule("norm") if "norm" in gm._modules else gm, "running_mean")
    assert torch.equal(gm(X), before)
    assert dovetail.refresh(gm) == 0


@torch.no_grad()
def test_a_source_of_another_shape_is_refused() -> None:
    model = net()
    gm = folded(model)
    gm(X)
    model.left.weight.data = torch.randn(11, 7)
    with pytest.raises(
        dovetail.CallMismatch, match=r"computed from 'left.weight', 'right.weight'.*new capture"
    ):
        gm(X)


@torch.no_grad()
def test_a_folded_graph_built_before_a_write_and_called_after_it() -> None:
    model = net()
    gm = folded(model)
    model.left.weight.mul_(2)
    later = dovetail.fuse(gm, dovetail.rules.groups())
    assert same(gm(X), model(X))
    assert same(later(X), model(X))
    model.conv.weight.data.mul_(2)
    assert dovetail.refresh(later) > 0
    assert same(later(X), model(X))
