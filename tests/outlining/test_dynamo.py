"""Graphs as Dynamo hands them to a backend: not functional, never captured."""

from __future__ import annotations

import copy

import pytest
import torch

import dovetail
from dovetail import zoo
from tests.outlining.test_models import leaves, scattered


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "moe"])
def test_regions_inside_a_compile_backend(name, training):
    entry = zoo.get(name)
    model, inputs = entry.build("tiny").train(training), entry.example_inputs("tiny")
    reference = copy.deepcopy(model)
    outlined = []

    def backend(gm, examples):
        before = dovetail.text(gm)
        new = scattered(gm, 1, count=20)
        dovetail.check(new)
        assert dovetail.text(gm) == before
        assert dovetail.text(dovetail.inline(new)) == before
        outlined.extend(dovetail.regions(new))
        return new

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.manual_seed(0)
    expected = reference(*inputs.args, **inputs.kwargs)
    torch.manual_seed(0)
    got = compiled(*inputs.args, **inputs.kwargs)
    assert outlined
    assert all(torch.equal(a, b) for a, b in zip(leaves(got), leaves(expected), strict=True))
    after, reference_state = model.state_dict(), reference.state_dict()
    assert all(torch.equal(after[k], reference_state[k]) for k in reference_state)
