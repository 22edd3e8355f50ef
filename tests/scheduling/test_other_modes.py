"""A scheduled part in a mode in which its steps cannot be done runs as it was, also if its buffers are others by then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Part(nn.Module):
    """Something to fuse in eval mode alone, and a buffer that is rebound in every call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count if self.training else torch.relu(x) * self.count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + 1


def scheduled() -> Any:
    s = dovetail.schedule(Model().eval(), (X,))
    s["part"].fuse(s["part"].find(torch.ops.aten.relu.default))
    return s


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("copied", [False, True])
def test_its_own_forward_runs_with_a_warning(calls: int, copied: bool) -> None:
    model, twin = scheduled().build(), Model().eval()
    if copied:
        model = copy.deepcopy(model)
    for _ in range(calls):
        assert torch.equal(model(X), twin(X))
    model.train()
    twin.train()
    with pytest.warns(UserWarning, match="steps of the schedule cannot be done for this call"):
        assert torch.equal(model(X), twin(X))
    assert torch.equal(model(X), twin(X))


@pytest.mark.filterwarnings("ignore:a call runs the model as it is")
def test_verify_compares_what_runs_there() -> None:
    s = scheduled()
    assert s.verify(train=True).runs
    assert s.verify().runs
    s.build()(X)
    assert s.verify(train=True).runs


def test_compile_runs_a_model_that_was_captured_before() -> None:
    class Branching(Part):
        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            if self.training and x.sum() > 0:
                return x
            return torch.relu(x) * self.count

    model, twin = Branching().eval(), Branching().eval()
    compiled = dovetail.compile(model, (X,), backends=["eager"])
    assert torch.equal(compiled(X), twin(X))
    model.count = model.count + 1
    twin.count = twin.count + 1
    compiled.train()
    twin.train()
    with pytest.warns(UserWarning, match="a call runs the model as it is, for it cannot be captured"):
        assert torch.equal(compiled(X), twin(X))


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


@pytest.mark.parametrize("replaced", [False, True])
def test_hooks_on_all_modules_are_run_or_refused(replaced: bool) -> None:
    s = dovetail.schedule(Model().eval(), (X,))
    match = s["part"].find(torch.ops.aten.relu.default)[0]
    if replaced:
        s.replace(tanh, match, check=False)
    else:
        s["part"].fuse(match)
    model, classes = s.build(), list[str]()
    model(X)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: classes.append(type(m).__name__))
    try:
        if replaced:
            with pytest.raises(dovetail.ScheduleError, match="hooks are registered for all modules"):
                model(X)
        else:
            model(X)
            assert classes == ["Part", "Model"]
    finally:
        handle.remove()
    model(X)
