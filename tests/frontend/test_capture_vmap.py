"""Writes in place inside of vmap, whose tensors have no storage of their own."""

import torch
from torch import Tensor, nn

from dovetail import capture


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            total = row.new_zeros(3)
            total += row
            total[1:].mul_(2)
            return total + row.expand(3)

        return torch.vmap(one)(x)


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def element(value: Tensor) -> Tensor:
            return torch.zeros_like(value).add_(value).sin_()

        return torch.vmap(torch.vmap(element))(x)


def test_writes_inside_of_vmap() -> None:
    for model in (Rows(), Nested()):
        x, y = (torch.arange(6.0).view(2, 3).requires_grad_() for _ in range(2))
        graph = capture(model, (x,))
        assert torch.equal(graph(x), model(y))
        graph(x).sum().backward()
        model(y).sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
