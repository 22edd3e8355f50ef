"""Small models of convolutions, norms and activations, called in ways that names do not tell."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail.scheduling.fuse_modules import fused_forward_of

CONV_BN_RELU = [["conv", "bn", "relu"]]


class Net(nn.Module):
    """A convolution, a norm and a ReLU, called as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.other = nn.Conv2d(4, 4, 1)
        self.other_bn = nn.BatchNorm2d(4)
        awaken(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class SharedReLU(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return self.relu(self.other_bn(self.other(y)) - 1)


class SharedConv(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.other(self.conv(x))
        return self.bn(y) + self.other_bn(self.other(torch.tanh(y)))


class EscapingConv(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.relu(self.bn(y)) + y


class EscapingNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return torch.relu(y) * 2 + self.other(y)


class Between(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x) * 2))


class NormFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(self.bn(self.other(x[:, [0, 1, 2, 0]])))[:, :3])


class CalledTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.relu(self.bn(self.conv(y))) for y in (x, -x)])


def awaken(model: nn.Module) -> None:
    """Norms that do something: other statistics than a new one has."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            with torch.no_grad():
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.normal_()
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.uniform_(0.5, 2.0)


def image() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 6, 6)


def evaluated(model: nn.Module, *args: Tensor) -> Tensor:
    with torch.no_grad():
        return model(*args)


def targets(gm: Any) -> list[str]:
    flat = dovetail.inline(gm)
    return [str(node.target) for node in flat.graph.nodes if node.op == "call_function"]


def fused_graphs(model: nn.Module) -> dict[str, list[GraphModule]]:
    """The graphs that `fuse_modules` made so far, by the path of the module that runs them.

    Those with folded batch norms come first. Without example inputs there are none before the first call.
    """
    return {
        path: [form.program for forms in (fusing.folded, fusing.unfolded) for form in forms.captures]
        for path, module in model.named_modules()
        if (fusing := fused_forward_of(module)) is not None
    }


def norms(model: nn.Module) -> int:
    """How many batch norms are left in the graphs that fold."""
    return sum("batch_norm" in t for graphs in fused_graphs(model).values() for t in targets(graphs[0]))


def regions_of(model: nn.Module) -> list[dovetail.Region]:
    return [region for graphs in fused_graphs(model).values() for region in dovetail.regions(graphs[0])]


def by_torch(model: nn.Module, groups: Any, x: Tensor) -> Tensor:
    """What torch's function of this name makes of a model in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torch.ao.quantization")
        return evaluated(quantization.fuse_modules(model, groups), x)
