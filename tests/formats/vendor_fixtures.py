"""The network that the tests of the vendor's compiler start from: import the names and pytest finds the fixtures."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from examples.vendor_backend import Net


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(name="model")
def network() -> nn.Module:
    return Net().eval()


@pytest.fixture(name="x")
def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


@pytest.fixture(name="gm")
def captured(model: nn.Module, x: Tensor) -> GraphModule:
    return dovetail.capture(model, (x,))
