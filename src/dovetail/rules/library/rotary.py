"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.ir.schema import static_size
from dovetail.rules.library.library_rule import (
    combine_halves,
    has_op,
    kind,
    library_rule,
    nearest_consumer,
    shapes_differ,
)
from dovetail.rules.patterns.alternatives import either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext, RuleSet

_PRODUCT_OPS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
_TRANSPARENT_OPS = frozenset(
    {
        "unsqueeze",
        "expand",
        "reshape",
        "view",
        "transpose",
        "permute",
        "clone",
        "cat",
        "mul",
        "div",
        "_to_copy",
    }
)
Angles = Annotated[Tensor | None, "[..., width], or [..., width / 2] with half_angles, broadcast over x"]


@kind("rotary", version=2)
def rotary_kind(
    x: Annotated[Tensor, "[..., width]"],
    cos: Angles = None,
    sin: Angles = None,
    angles: Annotated[Tensor | None, "[..., width / 2, 2]: cosines and sines side by side"] = None,
    turns: Annotated[Tensor | None, "[..., width / 2], complex: cos + i sin"] = None,
    other: Annotated[Tensor | None, "[..., width], turned by the same angles"] = None,
    *,
    layout: str,
    half_angles: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Pairs of x turned by angles; of `other` too, as a second result.

    A pair is (x[i], x[i + width / 2]) in the layout "halves", (x[2 i], x[2 i + 1]) in "interleaved". With
    `half_angles` there is a cosine and a sine for each pair, otherwise one for each element.
    """
    if angles is not None:
        cos, sin = angles[..., 0], angles[..., 1]
    elif turns is not None:
        cos, sin = turns.real, turns.imag
    c, s = cast("Tensor", cos), cast("Tensor", sin)

    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1) if layout == "halves" else (x[..., ::2], x[..., 1::2])
        if half_angles:
            a, b = a * c - b * s, b * c + a * s
        else:
            a, b = -b, a
        joined = torch.cat((a, b), -1) if layout == "halves" else torch.stack((a, b), -1).flatten(-2)
        return (joined if half_angles else x * c + joined * s).to(x.dtype)

    return rotate_half(x) if other is None else (rotate_half(x), rotate_half(other))


def _rotary_attrs(match: Match) -> dict[str, Any]:
    layout = "interleaved" if has_op(match, "stack", "view_as_complex") else "halves"
    return {"layout": layout, "half_angles": match.rule != "rotary"}


def _combine_interleaved(x: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What is made of the even and the odd places of the last dimension, however they are told apart."""

    def pairs() -> Tensor:
        return x.reshape(*x.shape[:-1], -1, 2)

    def unbound() -> Tensor:
        a, b = pairs().unbind(-1)
        return join(a, b)

    def selected() -> Tensor:
        both = pairs()
        return join(both[..., 0], both[..., 1])

    return either(unbound, selected, lambda: join(x[..., ::2], x[..., 1::2]))


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    """Values of even and odd places in one dimension again."""
    return torch.stack((a, b), dim=-1).flatten(-2)


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) made (-b, a): a and b the halves of the last dimension, or its even and odd places."""
    return either(
        lambda: combine_halves(x, lambda a, b: torch.cat((-b, a), dim=-1)),
        lambda: _combine_interleaved(x, lambda a, b: _interleave(-b, a)),
    )


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by the angles whose cosines and sines are given."""
    wide = either(lambda: x, lambda: x.float())
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


@library_rule(rotary_kind, needs="cat|stack neg|sub", attrs_of=_rotary_attrs)
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of queries or of keys."""
    return apply_rotary(x, cos, sin)


class RotaryPair(Rule):
    """Proposes the rotary embeddings of the queries and the keys that one attention reads, by the same angles."""

    def __init__(self) -> None:
        self.name, self.kind, self.reference = "rotary_pair", "rotary", rotary_kind

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        shadow = context.analysis(normalized_graph_of)
        by_place: dict[int, Node] = {i: n for n, places in shadow.origins.items() for i in places}
        waiting: dict[Node, Candidate] = {}
        for found in rotary.propose(context):
            if not isinstance(found, Candidate):
                continue
            meeting = nearest_consumer([by_place[i] for i in found.members], _PRODUCT_OPS, _TRANSPARENT_OPS)
            if meeting is None:
                continue
            other = waiting.pop(meeting, None)
            if other is None or other.attrs != found.attrs or not _same_angles(found, other):
                waiting[meeting] = found
                continue
            members = tuple(sorted({*found.members, *other.members}))
            arguments = {**(other.arguments or {}), "other": (found.arguments or {})["x"]}
            results = (*other.results, *found.results)
            yield replace(other, rule=self.name, members=members, arguments=arguments, results=results)


def _same_angles(first: Candidate, second: Candidate) -> bool:
    mine, theirs = first.arguments or {}, second.arguments or {}
    return all(mine[name] == theirs[name] for name in ("cos", "sin"))


rotary_pair = RotaryPair()


@library_rule(rotary_kind, name="rotary_split", needs="cat|stack sub", attrs_of=_rotary_attrs)
def rotary_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding half by half, or even and odd places apart: angles are given for one of them."""
    wide = either(lambda: x, lambda: x.float())

    def turn(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: join(a * cos - b * sin, b * cos + a * sin)

    made = either(
        lambda: combine_halves(wide, turn(lambda a, b: torch.cat((a, b), dim=-1))),
        lambda: _combine_interleaved(wide, turn(_interleave)),
    )
    return made.to(x.dtype)


@library_rule(
    rotary_kind,
    needs="stack select sub",
    attrs_of=_rotary_attrs,
    examples=[(torch.empty(2, 4, 8, 16, device="meta"), torch.empty(8, 8, 2, device="meta"))],
)
def rotary_cached(x: Tensor, angles: Tensor) -> Tensor:
    """The same where cosines and sines come side by side in one tensor, each picked out wherever it is needed."""
    wide = either(lambda: x, lambda: x.float())
    both = wide.reshape(*x.shape[:-1], -1, 2)
    rotate_half = torch.stack(
        (
            both[..., 0] * angles[..., 0] - both[..., 1] * angles[..., 1],
            both[..., 1] * angles[..., 0] + both[..., 0] * angles[..., 1],
        ),
        dim=-1,
    )
    return rotate_half.flatten(-2).to(x.dtype)


@library_rule(
    rotary_kind,
    name="rotary_complex",
    needs="view_as_complex view_as_real",
    attrs_of=_rotary_attrs,
    examples=[
        (torch.empty(2, 4, 8, 16, device="meta"), torch.empty(4, 8, 8, dtype=torch.complex64, device="meta"))
    ],
)
def rotary_complex(x: Tensor, turns: Tensor) -> Tensor:
    """A rotary embedding as a product of complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(x.dim() - 1).to(x.dtype)


@rotary_complex.guard
def turns_are_complex(match: Match) -> Decline | None:
    turns = match["turns"]
    return None if turns.dtype.is_complex else Decline(f"'{turns.name}' only scales: it is real", at=turns)


def rotates_every_pair(match: Match) -> Decline | None:
    """Refuse a width that is odd, or not known, and angles for more than there is to be turned."""
    x, width = match["x"], static_size(match["x"].shape[-1])
    if width is None or width % 2:
        # A chunk cuts an odd width above the middle, slices below it.
        return Decline(f"the last dimension of '{x.name}' is not known to be even", at=x)
    if shapes_differ(match.outputs[0].meta["val"].shape, x.shape):
        return Decline(f"the angles enlarge '{x.name}'", at=x)
    return None


for _rule in (rotary, rotary_split, rotary_cached, rotary_complex):
    _rule.guard(rotates_every_pair)
ROTARY = RuleSet(rotary, rotary_pair, rotary_split, rotary_cached, rotary_complex)
