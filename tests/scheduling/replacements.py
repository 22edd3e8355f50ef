"""Right and wrong things to put in the place of others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.scheduling.schedule import Schedule

from .models import activation


class Negated(torch.autograd.Function):
    """The right value with a gradient that is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def right(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def wrong(x: Tensor) -> Tensor:
    return F.gelu(x) * 1.01


def wrong_gradient(x: Tensor) -> Tensor:
    return Negated.apply(x)  # pyright: ignore


def without_gradient(x: Tensor) -> Tensor:
    return F.gelu(x.detach())


def drawing(x: Tensor) -> Tensor:
    torch.rand(1)
    return F.gelu(x)


def with_other_momentum(old: nn.Module) -> nn.Module:
    result = nn.BatchNorm1d(8, momentum=0.5).train(old.training)
    result.load_state_dict(old.state_dict())
    return result


def copied(old: nn.Module) -> nn.Module:
    assert isinstance(old, nn.Linear)
    result = nn.Linear(old.in_features, old.out_features)
    result.load_state_dict(old.state_dict())
    return result


def is_replaced(node: Any) -> bool:
    return node.op == "call_module"


def on_gelu(s: Schedule, new: Callable[..., Any], block: int = 1) -> None:
    s.replace(new, s[f"blocks.{block}"].find(activation)[0])
