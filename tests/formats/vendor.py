"""What the tests of the vendor's compiler share: what it knows, said without rules, and variants it does not know."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

import dovetail
from dovetail.ir.schema import named_arguments, op_name
from examples.vendor_backend import KERNELS

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
KINDS = sorted(KERNELS)


def known(gm: GraphModule) -> list[tuple[str, tuple[str, ...]]]:
    """What the accelerator knows of a flat graph, said without any rule."""
    claims: list[tuple[str, tuple[str, ...]]] = []
    for node in gm.graph.nodes:
        name = op_name(node.target) if node.op == "call_function" else ""
        given = named_arguments(node) if name else {}
        users = list(node.users)
        if name == "conv2d" and given["groups"] == 1 and set(given["dilation"]) == {1}:
            after = [u for u in users if op_name(u.target) in ("relu", "gelu", "sigmoid")]
            if len(users) == 1 and after:
                claims.append(("npu.conv_act", (node.name, after[0].name)))
        elif name == "scaled_dot_product_attention" and given["attn_mask"] is None:
            claims.append(("npu.attention", (node.name,)))
        elif name == "sigmoid" and op_name(_source(node)) != "conv2d":
            claims.append(("npu.sigmoid", (node.name,)))
        elif name == "avg_pool2d" and not given["ceil_mode"]:
            claims.append(("npu.avg_pool", (node.name,)))
    return sorted(claims)


def _source(node: Node) -> Any:
    return node.args[0].target if isinstance(node.args[0], Node) else None


def claimed(gm: GraphModule) -> list[tuple[str, tuple[str, ...]]]:
    return sorted((r.kind, r.nodes) for r in dovetail.regions(gm, nested=True) if r.kind in KERNELS)


def attends(x: Tensor, **options: Any) -> Tensor:
    heads = x.flatten(2).unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads, heads, **options)


KERNEL = torch.linspace(-1, 1, 4 * 4 * 9).reshape(4, 4, 3, 3)
UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...], str]] = {
    "padding that does not count": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        ("avg_pool2d",),
        "padding always counts",
    ),
    "ceiling": (
        lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        ("avg_pool2d",),
        "windows that hang over the edge are not pooled",
    ),
    "dilation": (
        lambda x: torch.relu(F.conv2d(x, KERNEL, dilation=2)),
        ("conv2d", "relu"),
        "convolutions have neither dilation nor groups",
    ),
    "groups": (
        lambda x: F.gelu(F.conv2d(x, KERNEL[:, :1], groups=4)),
        ("conv2d", "gelu"),
        "convolutions have neither dilation nor groups",
    ),
    "activation": (lambda x: torch.tanh(F.conv2d(x, KERNEL)), ("conv2d", "tanh"), "there is no tanh"),
    "float mask": (
        lambda x: attends(x, attn_mask=torch.linspace(-2, 2, 4).expand(4, 4).contiguous()),
        ("scaled_dot_product_attention",),
        "nothing can be added to the scores",
    ),
    "bool mask": (
        lambda x: attends(x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()),
        ("scaled_dot_product_attention",),
        "nothing can be added to the scores",
    ),
}


@dovetail.rule(kind="npu.avg_pool")
def unguarded(
    x: Tensor,
    kernel: Any = dovetail.Const([2, 2]),
    stride: Any = dovetail.Const([2, 2]),
    padding: Any = dovetail.Const([0, 0]),
    ceil: Any = dovetail.Const(False),
    include_pad: Any = dovetail.Const(True),
) -> Tensor:
    return F.avg_pool2d(x, kernel, stride, padding, ceil, include_pad)
