"""A small model, and every way of writing its weights after it was lowered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A convolution, two norms, and two products of one value; sizes that no alignment divides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.left, self.right = nn.Linear(7, 9), nn.Linear(7, 9)
        self.average = nn.BatchNorm1d(9, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.average(torch.relu(self.left(h)) + torch.sigmoid(self.right(h)))


def train_forward(model: Any) -> None:
    model.train()
    for _ in range(5):
        model(torch.randn(8, 3, 8, 8) * 3 + 2)
    model.eval()


def train_one_norm(model: Any) -> None:
    model.norm.train()(torch.randn(8, 7, 4, 4) * 3 + 2)
    model.norm.eval()


def in_place(model: Any) -> None:
    model.conv.weight.mul_(1.5)


def a_buffer(model: Any) -> None:
    model.norm.running_var.mul_(3)


def through_detach(model: Any) -> None:
    model.left.weight.detach().add_(0.5)


def other_data(model: Any) -> None:
    model.left.weight.data = model.left.weight.data * 2


def load(model: Any) -> None:
    torch.manual_seed(7)
    model.load_state_dict(Net().state_dict())


def optimizer(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.SGD(model.parameters(), 0.5).step()


def fused_optimizer(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.Adam(model.parameters(), 0.5, fused=True).step()


COUNTED = [
    train_forward,
    train_one_norm,
    in_place,
    a_buffer,
    through_detach,
    other_data,
    load,
    optimizer,
    fused_optimizer,
]


def data(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)


def one_element(model: Any) -> None:
    model.left.weight.data.view(-1)[3] = 40.0


def moving_average(model: Any) -> None:
    for p in model.parameters():
        p.data.lerp_(torch.randn_like(p), 0.5)


def array(model: Any) -> None:
    model.conv.weight.detach().numpy()[...] *= 2


def array_of_a_buffer(model: Any) -> None:
    model.norm.running_mean.numpy()[2] += 3


def two_swapped(model: Any) -> None:
    """The same bytes in another order."""
    weight = model.right.weight.data
    weight[0], weight[1] = weight[1].clone(), weight[0].clone()


def dlpack(model: Any) -> None:
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(model.left.weight.detach())).mul_(2)


def storage(model: Any) -> None:
    model.right.weight.untyped_storage().copy_(torch.randn(9, 7).untyped_storage())


def bare_batch_norm(model: Any) -> None:
    norm = model.norm
    F.batch_norm(
        torch.randn(8, 7, 4, 4) + 2, norm.running_mean, norm.running_var, training=True, momentum=0.9
    )


def one_vector(model: Any) -> None:
    model.flat.mul_(1.5)


UNCOUNTED = [
    data,
    one_element,
    moving_average,
    array,
    array_of_a_buffer,
    two_swapped,
    dlpack,
    storage,
    bare_batch_norm,
    one_vector,
]


def net(write: Any = None) -> Any:
    torch.manual_seed(0)
    model = Net().eval()
    nn.init.normal_(model.right.weight, std=5.0)
    if write is one_vector:
        flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(flat, model.parameters())
        model.__dict__["flat"] = flat
    return model


def same(a: Tensor, b: Tensor, off: float = 1e-5) -> bool:
    return bool((a - b).abs().max() <= off * b.abs().max())
