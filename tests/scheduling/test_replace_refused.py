"""What is refused where something is to be replaced: nothing is changed by it."""

# pyright: reportUnknownLambdaType=false

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.errors import InvalidArgument
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import Block, net
from tests.scheduling.refusing import refused


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (lambda x: (x, x), "returns 2 values, and what it replaces returns 1"),
        (lambda x: x[:1], r"result 0 of .* is float32\[1, 8\], not float32\[4, 8\]"),
        (lambda x: x.double(), r"is float64\[4, 8\], not float32\[4, 8\]"),
        (lambda x: 3, "result 0 of .* is a int, not a tensor"),
        (lambda x, y: x, r"takes \(x, y\), and is given 1 values: missing a required argument: 'y'"),
        (lambda: 3, "too many positional arguments"),
        (lambda x: x @ x, r"does not accept its operands \(float32\[4, 8\]\): RuntimeError: (mm: )?mat1"),
        (nn.Linear(4, 4), "does not accept its operands"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["match", "path"])
def test_what_does_not_fit_is_refused(new: Any, reason: str, where: str) -> None:
    model, x = net()
    s = schedule(model, (x,))
    if where == "path":
        reason = reason.replace(", and what it replaces returns 1", ", not 1").split("given")[0]
        if "does not accept" in reason:
            reason = "does not accept the arguments of 'blocks.0.norm'"
        refused(s, reason, lambda: s.replace(new, "blocks.0.norm"))
    else:
        refused(s, reason, lambda: s.replace(new, s["blocks.0"].find(nn.LayerNorm)))
    if isinstance(new, nn.Module):
        assert new.training


def test_values_used_outside_are_refused_by_name() -> None:
    def inner(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    class Escaping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.line(x)
            return F.gelu(y) + y

    s = schedule(Escaping(), (torch.randn(3, 4),))
    matches = s.find(inner)
    refused(
        s,
        "inner values of what is replaced are used outside of it: linear",
        lambda: s.replace(inner, matches),
    )


def test_a_module_for_many_places_would_share_its_weights() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    refused(s, r"one LayerNorm would be in more than one place \('blocks.0.norm'", lambda: s.replace(nn.LayerNorm(8), "blocks.*.norm"))  # fmt: skip
    new = nn.LayerNorm(8)
    s.replace(new, "blocks.0.norm")
    refused(s, "would share its weights", lambda: s.replace(new, s["blocks.1"].find(nn.LayerNorm)))
    refused(s, "not the class LayerNorm", lambda: s.replace(nn.LayerNorm, "blocks.1.norm"), InvalidArgument)
    # What has none of its own may stand anywhere.
    s.replace(nn.Identity(), "blocks.*.drop", check=True)
    refused(s, "has no parameter 'scale'; there are weight, bias", lambda: s.replace(nn.LayerNorm(8), s["blocks.1"].find(nn.LayerNorm), params={"scale": "norm_weight"}))  # fmt: skip
    refused(s, "'w' is not an operand of what is replaced; the operands are", lambda: s.replace(nn.LayerNorm(8), s["blocks.1"].find(nn.LayerNorm), params={"weight": "w"}))  # fmt: skip
    refused(s, "a function is called with the values", lambda: s.replace(torch.neg, s["blocks.1"].find(nn.LayerNorm), params={"w": "norm_weight"}), InvalidArgument)  # fmt: skip


def test_hooks_of_what_is_replaced_would_be_lost() -> None:
    model, x = net()
    handle = model.head.register_forward_hook(lambda *_: None)
    s = schedule(model, (x,))
    refused(s, "'head' has a forward hook, which would be lost", lambda: s.replace(nn.Linear(8, 2), "head"))
    handle.remove()
    s.replace(nn.Linear(8, 2), "head")
    refused(s, "the model itself cannot be replaced", lambda: s.replace(Block(), ""), InvalidArgument)


def test_what_writes_to_its_operands_is_refused() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    matches = s["blocks.0"].find(torch.ops.aten.gelu)[0]
    refused(s, "'<lambda>' writes to its operands", lambda: s.replace(lambda x: x.relu_(), matches))
    s.replace(lambda x: x.clone().relu_(), matches)


class _ReadsSecondFirst(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(torch.where(y != 0.25, y, x))


class _ReadsFirstFirst(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x - y)


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(y.sin(), x)


@pytest.mark.parametrize("inner", [_ReadsSecondFirst, _ReadsFirstFirst])
def test_arguments_in_another_order_than_they_are_read_in(inner: type[nn.Module]) -> None:
    model, args = _Around(inner()), (torch.linspace(-1, 1, 6), torch.linspace(2, 3, 6))
    expected = model(*args)
    s = schedule(model, args)
    s.fuse(s.find(where=lambda n: n.target is torch.ops.aten.relu.default))
    if inner is _ReadsSecondFirst:
        refused(s, "which operand is which argument", lambda: s["inner"].replace(inner(), check=False))
        return
    s["inner"].replace(inner(), check=False)
    s.build()
    assert torch.equal(model(*args), expected)
