"""State of the process that steps leave as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dovetail.ir.process_state import get_rng_state


def test_generators_of_a_device_are_read_while_a_model_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fake mode refuses operators on real tensors, and the state of a generator is one.
    state = torch.arange(16, dtype=torch.uint8)
    module = SimpleNamespace(get_rng_state=lambda device: state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with FakeTensorMode():
        states = get_rng_state([torch.device("cuda", 0)])
    assert list(states) == ["cpu", "cuda:0"]
    assert not any(isinstance(one, FakeTensor) for one in states.values())
    assert states["cuda:0"].tolist() == list(range(16))
