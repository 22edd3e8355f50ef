"""Every model of the zoo, captured and trained beside the original."""

from __future__ import annotations

import copy

import pytest
import torch

from dovetail import zoo
from tests.frontend.test_capture_agreement import assert_alike


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_zoo_models_run_and_train_alike(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model = zoo.MODELS[name].build(size="tiny").train(mode == "train")
    inputs = zoo.MODELS[name].example_inputs("tiny")
    assert_alike(model, lambda step: copy.deepcopy(inputs.args), dict(inputs.kwargs), tolerance=1e-4)
