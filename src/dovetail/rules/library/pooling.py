"""Average pooling from means, slices, unfolded windows and reshapes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.ir.schema import named_arguments, op_name, static_size, value_of
from dovetail.rules.library.library_rule import (
    LibraryRule,
    is_floating_point,
    kind,
    library_rule,
    meta_tensor,
    nodes_of,
)
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, Proposal, Rule, RuleContext, RuleSet

_IMAGES = meta_tensor(2, 3, 8, 8)


@kind("avg_pool", version=2)
def avg_pool_kind(
    x: Annotated[Tensor, "[batch, channels, height, width]"],
    *,
    kernel: list[int] | str,
    stride: list[int] | None = None,
    keepdim: bool = True,
) -> Tensor:
    """The means of windows of images, or of each whole one, as [batch, channels] without `keepdim`."""
    if kernel == "global":
        return x.mean((2, 3), keepdim=keepdim)
    return F.avg_pool2d(x, cast("list[int]", kernel), stride)


def is_batch_of_images(match: Match) -> Decline | None:
    x = match["x"]
    if x.ndim != 4:
        return Decline(f"'{x.name}' has {x.ndim} dimensions: not a batch of images", at=x)
    if any(static_size(n) == 0 for n in x.shape[1:]):
        return Decline(f"'{x.name}' is empty", at=x)
    return is_floating_point(match)


def sizes_are_even(match: Match) -> Decline | None:
    x = match["x"]
    sizes = [static_size(n) for n in x.shape[2:]]
    if all(n is not None and n % 2 == 0 for n in sizes):
        return None
    # With an odd number of rows the slices have different sizes: they broadcast, or fail.
    return Decline(f"'{x.name}' is not known to have an even number of rows and columns", at=x)


_pool_rule = partial(library_rule, avg_pool_kind, examples=[(_IMAGES,)], guards=[is_batch_of_images])


def _has_image_means(context: RuleContext) -> bool:
    """Return whether there is a mean over the last two of four dimensions, in one step or two."""
    return any(_is_image_mean(node) for node in nodes_of(context, "mean"))


def _is_image_mean(node: Node) -> bool:
    source = named_arguments(node).get("self")
    if not isinstance(source, Node):
        return False
    if op_name(source.target) in ("reshape", "view", "flatten", "mean"):
        first = value_of(named_arguments(source).get("self"))
        return isinstance(first, Tensor) and first.dim() == 4
    value, dims = value_of(source), named_arguments(node).get("dim")
    return isinstance(value, Tensor) and value.dim() == 4 and sorted(dims or ()) == [2, 3]


@_pool_rule(
    needs="mean",
    when=_has_image_means,
    attrs_of=lambda m: {"kernel": "global", "keepdim": m.outputs[0].meta["val"].dim() == 4},
)
def avg_pool_global(x: Tensor) -> Tensor:
    """The mean over height and width of images."""
    return either(
        lambda: x.mean((-2, -1), keepdim=True),
        lambda: x.mean((-1, -2), keepdim=True),
        lambda: x.mean(-1, keepdim=True).mean(-2, keepdim=True),
        lambda: x.mean((-2, -1)),
        lambda: x.mean((-1, -2)),
        lambda: x.mean(-1).mean(-1),
        lambda: x.mean(-2).mean(-1),
        lambda: x.flatten(2).mean(-1),
    )


def _has_strided_slices(context: RuleContext) -> bool:
    return any(named_arguments(node).get("step") == 2 for node in nodes_of(context, "slice"))


@_pool_rule(
    needs="slice add",
    when=_has_strided_slices,
    attrs_of=lambda m: {"kernel": [2, 2], "stride": [2, 2]},
    guards=[is_batch_of_images, sizes_are_even],
)
def avg_pool_slices(x: Tensor) -> Tensor:
    """The mean of each two by two block, as a sum of four slices with every other row and column."""

    def corner(row: int, column: int) -> Tensor:
        return x[:, :, row::2, column::2]

    total = either(
        lambda: corner(0, 0) + corner(0, 1) + corner(1, 0) + corner(1, 1),
        lambda: corner(0, 0) + corner(1, 0) + corner(0, 1) + corner(1, 1),
        lambda: (corner(0, 0) + corner(0, 1)) + (corner(1, 0) + corner(1, 1)),
        lambda: (corner(0, 0) + corner(1, 0)) + (corner(0, 1) + corner(1, 1)),
    )
    return either(lambda: total / 4, lambda: total * 0.25)


@_pool_rule(
    needs="unfold mean",
    attrs_of=lambda m: {"kernel": [m["height"], m["width"]], "stride": [m["down"], m["across"]]},
)
def avg_pool_windows(
    x: Tensor, height: Any = Const(2), width: Any = Const(2), down: Any = Const(1), across: Any = Const(1)
) -> Tensor:
    """The mean of windows that were unfolded from images."""
    windows = x.unfold(2, height, down).unfold(3, width, across)
    return either(
        lambda: windows.mean((-2, -1)), lambda: windows.mean((-1, -2)), lambda: windows.mean(-1).mean(-1)
    )


@functools.cache
def _rule_for_block(height: int, width: int) -> LibraryRule:
    """Return the rule for blocks of one size: the sizes of a reshape are literals."""

    @_pool_rule(
        name="avg_pool_blocks",
        needs="reshape|view mean|sum",
        attrs_of=lambda m: {"kernel": [height, width], "stride": [height, width]},
        examples=[(meta_tensor(2, 3, 2 * height, 2 * width),)],
    )
    def avg_pool(x: Tensor) -> Tensor:
        batch, channels, rows, columns = x.shape
        blocks = x.reshape(batch, channels, rows // height, height, columns // width, width)
        return either(
            lambda: blocks.mean((3, 5)),
            lambda: blocks.mean((5, 3)),
            lambda: blocks.mean(5).mean(3),
            lambda: blocks.mean(3).mean(4),
            lambda: blocks.sum((3, 5)) / (height * width),
            lambda: blocks.sum((5, 3)) / (height * width),
            lambda: blocks.sum((3, 5)) * (1 / (height * width)),
        )

    return avg_pool


class AveragePoolBlocks(Rule):
    """Proposes means over blocks that a reshape splits images into, for all sizes of blocks."""

    name, kind, reference = "avg_pool_blocks", "avg_pool", avg_pool_kind

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        for height, width in sorted(context.analysis(_block_sizes)):
            yield from _rule_for_block(height, width).propose(context)


def _block_sizes(context: RuleContext) -> set[tuple[int, int]]:
    sizes: set[tuple[int, int]] = set()
    for node in nodes_of(context, "reshape", "view"):
        before, after = value_of(named_arguments(node).get("self")), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            continue
        if before.dim() == 4 and after.dim() == 6:
            height, width = static_size(after.shape[3]), static_size(after.shape[5])
            if height is not None and width is not None:
                sizes.add((height, width))
    return sizes


avg_pool_blocks = AveragePoolBlocks()
POOLING = RuleSet(avg_pool_global, avg_pool_slices, avg_pool_windows, avg_pool_blocks)
