"""Kernels for kinds of the library: names, defaults, symbolic sizes and memory layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail import Backend
from dovetail.lowering.backend_protocol import misfit
from dovetail.rules.library import ALL, KINDS
from tests.lowering.helpers import events

WEIGHT = torch.randn(16)


class Library(Backend):
    name = "library"
    trains = True

    def __init__(self, **kernels: Callable[..., Any]) -> None:
        self.kernels = kernels  # type: ignore[misc]


def fused(function: Callable[..., Any], *args: Any, **options: Any) -> GraphModule:
    return dovetail.fuse(dovetail.capture(function, args, **options), ALL)


def lowered(gm: GraphModule, **kernels: Callable[..., Any]) -> GraphModule:
    return dovetail.lower(gm, [Library(**kernels)], cache=False, verify=True)


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (16,), WEIGHT)


def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def misnamed_eps(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-2) -> Tensor:
    return F.layer_norm(x, (16,), weight, bias, epsilon)


def misnamed_causal(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def without_a_near_name(q: Tensor, k: Tensor, v: Tensor, *, p: float = 0.5) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


@pytest.mark.parametrize(
    ("function", "inputs", "kernel", "reason"),
    [
        (normed, torch.randn(3, 16), misnamed_eps, "'epsilon' may be meant for 'eps'"),
        (attend, torch.randn(2, 4, 8, 16), misnamed_causal, "'is_causal' may be meant for 'causal'"),
        (
            attend,
            torch.randn(2, 4, 8, 16),
            without_a_near_name,
            "parameter 'p' does not belong to the kind 'attention'",
        ),
    ],
)
def test_a_parameter_that_the_kind_does_not_have_may_be_an_attribute(
    function: Callable[..., Any], inputs: Tensor, kernel: Callable[..., Any], reason: str
) -> None:
    gm = fused(function, inputs)
    (kind,) = [r.kind for r in dovetail.regions(gm)]
    new = lowered(gm, **{kind: kernel})
    assert [r.backend for r in dovetail.regions(new)] == [None]
    assert reason in events(new)[0].reason
    assert torch.equal(new(inputs), function(inputs))


def test_a_parameter_of_its_own_is_no_matter_where_every_attribute_is_taken() -> None:
    def kernel(x: Tensor, weight: Tensor, *, eps: float, dims: int, out_dtype: str, block: int = 8) -> Tensor:
        assert (dims, out_dtype, block) == (1, "promoted", 8)
        return F.layer_norm(x, (16,), weight, None, eps)

    x = torch.randn(3, 16)
    new = lowered(fused(normed, x), layer_norm=kernel)
    assert [r.backend for r in dovetail.regions(new)] == ["library"]
    # So is one that is bound, which nobody does by mistake.
    bound = functools.partial(lambda x, weight, *, eps, block: x, block=8)
    assert misfit(bound, dovetail.regions(fused(normed, x))[0]) is None
    # What is left over goes into keywords that a kernel has for that.
    assert misfit(lambda x, weight, block=8, **rest: x, dovetail.regions(fused(normed, x))[0]) is None


def test_an_argument_that_is_absent_is_none_whatever_the_kernel_has_for_it() -> None:
    def kernel(x: Tensor, weight: Tensor, bias: Any = WEIGHT, *, eps: float) -> Tensor:
        return F.layer_norm(x, (16,), weight, bias, eps)

    x = torch.randn(3, 16)
    new = lowered(fused(normed, x), layer_norm=kernel)
    assert [r.backend for r in dovetail.regions(new)] == ["library"]
    torch.testing.assert_close(new(x), normed(x))


def of_heads(x: Tensor) -> Tensor:
    heads = x.view(2, 8, 4, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 8, 32)


def test_results_are_laid_out_as_the_body_has_them() -> None:
    x = torch.randn(2, 8, 32, requires_grad=True)
    new = lowered(fused(of_heads, x), attention=KINDS["attention"].reference)
    assert [r.backend for r in dovetail.regions(new)] == ["library"]
    for result, expected in zip(_with_gradient(new, x), _with_gradient(of_heads, x), strict=True):
        torch.testing.assert_close(result, expected)

    def images(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(F.conv2d(x, weight))

    last = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 4, 3, 3)

    def kernel(x: Tensor, weight: Tensor, **attrs: Any) -> Tensor:
        return torch.relu(F.conv2d(x, weight)).contiguous()

    new = lowered(fused(images, last, weight), conv_bn_act=kernel)
    assert [r.backend for r in dovetail.regions(new)] == ["library"]
    assert new(last, weight).stride() == images(last, weight).stride()


def _with_gradient(function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
    result = function(x)
    return result, torch.autograd.grad(result.sin().sum(), x)[0]


def repeated(k: Tensor, times: int) -> Tensor:
    b, h, s, d = k.shape
    return k[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def grouped(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k, 2), repeated(k, 2), is_causal=True)


def causal_by_hand(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -1e9), -1) @ k


def product_of_rows(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.addmm(w[0], x.reshape(-1, x.shape[-1]), w)
    return torch.relu(rows.reshape(*x.shape[:-1], w.shape[-1]))


def blocks(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).mean((3, 5))


BATCH, LENGTH = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)


@pytest.mark.parametrize(
    ("function", "inputs", "shapes", "kind"),
    [
        (grouped, ((2, 4, 8, 16), (2, 2, 8, 16)), ({0: BATCH, 2: LENGTH},) * 2, "attention"),
        (causal_by_hand, ((2, 4, 8, 16), (2, 4, 8, 16)), ({0: BATCH, 2: LENGTH},) * 2, "attention"),
        (product_of_rows, ((2, 8, 16), (16, 16)), ({0: BATCH, 1: LENGTH}, None), "linear_activation"),
        (blocks, ((2, 3, 8, 8),), ({0: BATCH},), "avg_pool"),
    ],
)
def test_sizes_that_a_region_gets_are_no_arguments(
    function: Callable[..., Any], inputs: tuple[tuple[int, ...], ...], shapes: Any, kind: str
) -> None:
    args = [torch.randn(size) for size in inputs]
    gm = fused(function, *args, dynamic_shapes=shapes)
    new = lowered(gm, **{kind: KINDS[kind].reference})
    assert [(r.kind, r.backend) for r in dovetail.regions(new) if r.kind == kind] == [(kind, "library")]
    other = [
        torch.randn(3, *size[1:]) if shape else torch.randn(size)
        for size, shape in zip(inputs, shapes, strict=True)
    ]
    torch.testing.assert_close(new(*other), function(*other))


def test_hints_name_what_is_missing() -> None:
    (region,) = dovetail.regions(fused(attend, torch.randn(2, 4, 8, 16)))
    reason = misfit(lambda query, key, value, scale: query, region) or ""
    assert "'query' may be meant for 'q', 'key' may be meant for 'k', 'value' may be meant for 'v'" in reason


@pytest.mark.parametrize("name", ["layernorm", "LayerNorm", "layer_norms"])
def test_a_kind_that_is_nearly_right_is_named_for_a_single_operation_too(name: str) -> None:
    x = torch.randn(3, 16)
    new = lowered(fused(normed, x), **{name: misnamed_eps})
    assert f"it has one for '{name}': did you mean 'layer_norm'?" in events(new)[0].reason
    other = lowered(fused(normed, x), softmax=misnamed_eps)
    assert "did you mean" not in events(other)[0].reason


SCALAR, SINK, OFFSET = torch.tensor(2.5), torch.randn(2, 4, 8, 1), torch.randn(8, 8)
UNUSUAL: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "divisor": (lambda q: (q @ q.mT / SCALAR).softmax(-1) @ q, "divisor"),
    "factor": (lambda q: (q @ q.mT * SCALAR).softmax(-1) @ q, "factor"),
    "sinks": (lambda q: torch.cat([q @ q.mT, SINK], -1).softmax(-1)[..., :-1] @ q, "sink_column"),
    "scaled bias": (lambda q: ((q @ q.mT + OFFSET) * 0.3).softmax(-1) @ q, "bias"),
    "subtracted mask": (lambda q: (q @ q.mT - OFFSET).softmax(-1) @ q, "mask"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_kernel_is_not_given_attention_that_it_does_not_know(name: str) -> None:
    function, argument = UNUSUAL[name]

    def unscaled(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, scale: float | None, causal: bool
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    q = torch.randn(2, 4, 8, 16)
    gm = fused(function, q)
    (region,) = [r for r in dovetail.regions(gm) if r.kind == "attention"]
    assert argument in region.arguments
    assert misfit(unscaled, region) is not None
    new = lowered(gm, attention=unscaled)
    assert [r.backend for r in dovetail.regions(new)] == [None]
    whole = lowered(gm, attention=KINDS["attention"].reference)
    assert [r.backend for r in dovetail.regions(whole)] == ["library"]
    torch.testing.assert_close(whole(q), function(q))
