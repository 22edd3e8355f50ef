"""Gradient kinds in graphs of whole training steps."""

from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail.rules import library

X, W, B = torch.randn(4, 8), torch.randn(8), torch.randn(8)
KERNEL, IMAGE = torch.randn(3, 2, 3, 3), torch.randn(2, 2, 6, 6)


def step(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    loss = (torch.softmax(F.layer_norm(x, (8,), w, b), -1) * x).sum()
    return torch.autograd.grad(loss, (x, w, b))


def kinds(gm: GraphModule) -> list[str]:
    return [r.kind for r in dovetail.regions(gm)]


def test_in_a_step_that_calls_grad() -> None:
    gm = make_fx(step)(X, W, B)
    fused = dovetail.fuse(gm, library.ALL)
    assert {"layer_norm_grad", "softmax_grad"} <= set(kinds(fused))
    norm = dovetail.regions(fused, kind="layer_norm_grad")[0]
    assert norm.attrs == {"shape": [8], "output_mask": [True, True, True]}
    assert {"grad", "x", "mean", "rstd", "weight", "bias"} <= set(norm.arguments)
    for a, b in zip(fused(X, W, B), gm(X, W, B), strict=True):
        assert torch.equal(a, b)


def test_in_the_graphs_of_aot_autograd() -> None:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm)

    def loss(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor) -> Tensor:
        images = F.conv2d(image, kernel).relu().sum()
        return F.log_softmax(F.layer_norm(x, (8,), w), -1).square().sum() + images

    leaves = [t.clone().requires_grad_() for t in (X, W, IMAGE, KERNEL)]
    aot_function(loss, fw_compiler=keep, bw_compiler=keep)(*leaves).backward()
    backward = dovetail.fuse(graphs[1], library.ALL)
    assert {"layer_norm_grad", "log_softmax_grad", "conv_grad"} <= set(kinds(backward))


def test_another_operation_of_that_name_is_none() -> None:
    def half(grad: Tensor, output: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data.default(grad, output, 1, torch.float16)

    gm = make_fx(half, tracing_mode="fake")(X, X)
    fused = dovetail.fuse(gm, library.ALL)
    assert kinds(fused) == []
    assert any(d.rule == "softmax_grad" for d in dovetail.explain(fused).declined)
