"""What needs a GPU: values, randomness and the guards on devices."""

from __future__ import annotations

import copy

import pytest
import torch

import dovetail
from dovetail import zoo
from tests.outlining.test_models import runs, there_and_back

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def moved(value, device="cuda"):
    return torch.utils._pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "moe"])
def test_zoo_on_the_device(name, training):
    entry = zoo.get(name)
    inputs = entry.example_inputs("tiny")
    model = entry.build("tiny").train(training).cuda()
    torch.backends.cudnn.deterministic = True
    there_and_back(model, moved(inputs.args), moved(inputs.kwargs))


def test_another_device_than_captured_is_an_error():
    entry = zoo.get("mlp")
    inputs = entry.example_inputs("tiny")
    gm = dovetail.capture(entry.build("tiny").eval(), inputs.args, inputs.kwargs)
    new = dovetail.outline(gm, runs(gm))
    with pytest.raises(dovetail.CallMismatch):
        new(*moved(inputs.args))
    with pytest.raises(dovetail.CallMismatch):
        copy.deepcopy(new).cuda()(*moved(inputs.args))
