"""Mix-FFN: two products with a depthwise convolution over the grid of tokens between them, as in SegFormer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import as_number, by_name, op_name, value_of
from dovetail.rules.library.known import Known, kind, known
from dovetail.rules.library.steps import (
    Step,
    activate,
    activation_name,
    gelu_constants,
    real_numbers,
    with_gelu,
)
from dovetail.rules.matching.choices import either
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleSet
from dovetail.rules.scene import Scene

Grid = tuple[int, int]
_TURNS = frozenset({"transpose", "permute"})


@kind("mix_ffn")
def mix_ffn_kind(
    x: Annotated[Tensor, "[batch, height * width, in]"],
    weight: Annotated[Tensor, "[hidden, in]"],
    conv_weight: Annotated[Tensor, "[hidden, 1, rows, columns]"],
    out_weight: Annotated[Tensor, "[out, hidden]"],
    bias: Annotated[Tensor | None, "[hidden]"] = None,
    conv_bias: Annotated[Tensor | None, "[hidden]"] = None,
    out_bias: Annotated[Tensor | None, "[out]"] = None,
    *,
    grid: list[int],
    activation: str | None,
) -> Tensor:
    """A product, a convolution of each channel over the tokens as an image of `grid` sizes, and a second product.

    The convolution is padded by half its kernel, and the `activation` comes ahead of the second product.
    """
    hidden = F.linear(x, weight, bias)
    image = hidden.transpose(1, 2).reshape(x.shape[0], -1, *grid)
    padding = [size // 2 for size in conv_weight.shape[2:]]
    mixed = F.conv2d(image, conv_weight, conv_bias, padding=padding, groups=conv_weight.shape[0])
    return F.linear(activate(mixed.flatten(2).transpose(1, 2), activation), out_weight, out_bias)


@functools.cache
def _of_grid(height: int, width: int) -> Known:
    """The rule for one grid: a reshape has its sizes as numbers, not as operands."""
    tokens = torch.empty(2, height * width, 16, device="meta")
    square, vector = torch.empty(16, 16, device="meta"), torch.empty(16, device="meta")

    @known(
        mix_ffn_kind,
        name="mix_ffn",
        needs="linear conv2d transpose|permute",
        attrs_of=lambda m: {
            "grid": [height, width],
            "activation": activation_name(m),
        },
        examples=[
            (tokens, square, vector, torch.empty(16, 1, 3, 3, device="meta"), vector, square, vector),
        ],
    )
    @with_gelu
    def mix_ffn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        gelu: Step,
    ) -> Tensor:
        batch, channels = x.shape[0], weight.shape[0]
        hidden = either(lambda: F.linear(x, weight, bias), lambda: F.linear(x, weight))
        turned = either(lambda: hidden.transpose(1, 2), lambda: hidden.permute(0, 2, 1))
        image = turned.reshape(batch, channels, height, width)
        padding = [size // 2 for size in conv_weight.shape[2:]]
        mixed = either(
            lambda: F.conv2d(image, conv_weight, conv_bias, 1, padding, 1, channels),
            lambda: F.conv2d(image, conv_weight, None, 1, padding, 1, channels),
        )
        flat = mixed.flatten(2)
        rows = either(lambda: flat.transpose(1, 2), lambda: flat.permute(0, 2, 1))
        active = either(lambda: gelu(rows), lambda: torch.relu(rows))
        return either(lambda: F.linear(active, out_weight, out_bias), lambda: F.linear(active, out_weight))

    mix_ffn.guard(gelu_constants)
    mix_ffn.guard(real_numbers)
    return mix_ffn


class MixFFN(Rule):
    """Proposes every mix-FFN, whatever the sizes of its grid, as long as they are known."""

    def __init__(self) -> None:
        self.name, self.kind, self.reference = "mix_ffn", "mix_ffn", mix_ffn_kind

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        grids = scene.fact(_grids)
        known = sorted(grid for grid in grids.values() if grid is not None)
        proposals = [
            p for height, width in dict.fromkeys(known) for p in _of_grid(height, width).propose(scene)
        ]
        origins = scene.fact(shadow_of).origins
        for node, grid in grids.items():
            if grid is None and origins.get(node):
                reason = "the sizes of its grid are dynamic, and the kind has them as numbers"
                proposals.append(Refusal(self.name, tuple(origins[node]), reason, origins[node][-1]))
        matched = {p.members for p in proposals if isinstance(p, Candidate)}
        # What is refused for one grid may be of another.
        return [p for p in proposals if isinstance(p, Candidate) or p.members not in matched]


def _grids(scene: Scene) -> dict[Node, Grid | None]:
    """The sizes of images that depthwise convolutions read from a reshape of tokens; None where they are dynamic."""
    grids: dict[Node, Grid | None] = {}
    for node in scene.fact(shadow_of).nodes:
        if op_name(node.target) != "conv2d":
            continue
        arguments = by_name(node)
        image = value_of(arguments.get("input"))
        if not isinstance(image, Tensor) or arguments.get("groups") in (None, 1):
            continue
        source = arguments["input"]
        if op_name(source.target) != "reshape":
            continue
        height, width = (as_number(n) for n in image.shape[-2:])
        if height is not None and width is not None:
            grids[node] = (height, width)
        elif op_name(source.args[0].target) in _TURNS:
            grids[node] = None
    return grids


MIX_FFN = RuleSet(MixFFN())
