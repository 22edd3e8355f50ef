"""Folded weights on a GPU, where whole calls are replayed, follow what they were computed from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.lowering.helpers import Counting
from tests.runtime.weight_writes import COUNTED, X, data, load, net, other_data, same, train_forward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FOLDS = [dovetail.FoldConvBatchNorm(), dovetail.MergeParallel(materialise=True, guard=None)]


@torch.no_grad()
@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
@pytest.mark.parametrize("write", [w for w in COUNTED if w not in (load, train_forward, other_data)])
def test_counted_writes_are_noticed_at_once(write: Callable[[Any], None], cuda_graphs: Any) -> None:
    model, x = net().cuda(), X.cuda()
    fast = dovetail.compile(
        model, (x,), backends="eager", pipeline=FOLDS, cache=False, cuda_graphs=cuda_graphs
    )
    before = [fast(x) for _ in range(4)][-1]
    if write.__name__ == "train_one_norm":
        model.norm.train()(torch.randn(8, 7, 4, 4, device="cuda") * 3 + 2)
        model.norm.eval()
    else:
        write(model)
    assert same(fast(x), model(x), 1e-4)
    assert not same(model(x), before, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
def test_other_writes_are_noticed_within_the_interval(cuda_graphs: Any) -> None:
    model, x = net().cuda(), X.cuda()
    fast = dovetail.compile(
        model,
        (x,),
        backends="eager",
        pipeline=FOLDS,
        cache=False,
        cuda_graphs=cuda_graphs,
        weight_check_interval=4,
    )
    for _ in range(5):
        fast(x)
    data(model)
    results = [fast(x) for _ in range(4)]
    assert same(results[-1], model(x), 1e-4)
    data(model)
    assert dovetail.refresh(fast) > 0
    assert same(fast(x), model(x), 1e-4)


class Copies(Counting):
    """Goes by copies of the weights."""

    def prepare(self, site: Any) -> Callable[..., Any]:
        run, kept = site.compiled, {i: site.operands[i].clone() for i in site.constants}
        return lambda *operands: run(*[kept.get(i, operand) for i, operand in enumerate(operands)])


@torch.no_grad()
def test_a_recording_of_copies_is_repeated() -> None:
    model, x = net().cuda(), X.cuda()
    fast = dovetail.compile(model, (x,), backends=Copies(), cache=False)
    for _ in range(4):
        fast(x)
    model.conv.weight.mul_(1.5)
    for _ in range(3):
        assert same(fast(x), model(x), 1e-4)
