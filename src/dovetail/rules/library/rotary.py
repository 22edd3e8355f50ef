"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
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
    meta_tensor,
    nearest_consumer,
    shapes_differ,
)
from dovetail.rules.patterns.alternatives import either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.rule import Candidate, Decline, Proposal, Rule, RuleContext, RuleSet

_PRODUCT_OPS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
_VIEW_OPS = frozenset({"unsqueeze", "expand", "reshape", "view", "transpose", "permute"})
_TRANSPARENT_OPS = _VIEW_OPS | {"clone", "cat", "mul", "div", "_to_copy"}
_X = meta_tensor(2, 4, 8, 16)
Angles = Annotated[Tensor | None, "[..., width], or [..., width / 2] with half_angles, broadcast over x"]


@kind("rotary", version=2)
def rotary_kind(
    x: Annotated[Tensor, "[..., width]"],
    cos: Angles = None,
    sin: Angles = None,
    angles: Annotated[Tensor | None, "[..., width / 2, 2]: cosines and sines side by side"] = None,
    turns: Annotated[Tensor | None, "[..., width / 2], complex: cos + i sin"] = None,
    other: Annotated[Tensor | None, "[..., width], rotated by the same angles"] = None,
    *,
    layout: str,
    half_angles: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate pairs of x by angles, and those of `other` as a second result.

    A pair is (x[i], x[i + width / 2]) in the layout "halves", (x[2 i], x[2 i + 1]) in "interleaved". With
    `half_angles` there is a cosine and a sine for each pair, otherwise one for each element.
    """
    if angles is not None:
        cos, sin = angles[..., 0], angles[..., 1]
    elif turns is not None:
        cos, sin = turns.real, turns.imag
    c, s = cast("Tensor", cos), cast("Tensor", sin)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1) if layout == "halves" else (x[..., ::2], x[..., 1::2])
        if half_angles:
            a, b = a * c - b * s, b * c + a * s
        else:
            a, b = -b, a
        joined = torch.cat((a, b), -1) if layout == "halves" else torch.stack((a, b), -1).flatten(-2)
        return (joined if half_angles else x * c + joined * s).to(x.dtype)

    return rotate(x) if other is None else (rotate(x), rotate(other))


def _rotary_attrs(match: Match) -> dict[str, Any]:
    layout = "interleaved" if has_op(match, "stack", "view_as_complex") else "halves"
    return {"layout": layout, "half_angles": match.rule != "rotary"}


def _combine_interleaved(x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the even and the odd elements of the last dimension, from an unbind, selects or strided slices."""

    def pairs() -> Tensor:
        return x.reshape(*x.shape[:-1], -1, 2)

    def selected() -> Tensor:
        both = pairs()
        return combine(both[..., 0], both[..., 1])

    return either(lambda: combine(*pairs().unbind(-1)), selected, lambda: combine(x[..., ::2], x[..., 1::2]))


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), dim=-1).flatten(-2)


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) to (-b, a): a and b are the halves of the last dimension, or its even and odd elements."""
    return either(
        lambda: combine_halves(x, lambda a, b: torch.cat((-b, a), dim=-1)),
        lambda: _combine_interleaved(x, lambda a, b: _interleave(-b, a)),
    )


def turns_are_complex(match: Match) -> Decline | None:
    """Refuse real factors of complex numbers."""
    turns = match["turns"]
    if turns.dtype.is_complex:
        return None
    return Decline(f"'{turns.name}' is real, and scales without rotating", at=turns)


def rotates_every_pair(match: Match) -> Decline | None:
    """Refuse a width that is not known to be even, and angles that broadcast x."""
    x, width = match["x"], static_size(match["x"].shape[-1])
    if width is None or width % 2:
        # A chunk splits an odd width above the middle, slices below it.
        return Decline(f"the last dimension of '{x.name}' is not known to be even", at=x)
    if shapes_differ(match.outputs[0].meta["val"].shape, x.shape):
        return Decline(f"the angles enlarge '{x.name}'", at=x)
    return None


_rotary_rule = partial(library_rule, rotary_kind, attrs_of=_rotary_attrs, guards=[rotates_every_pair])


@_rotary_rule(needs="cat|stack neg|sub")
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of queries or of keys."""
    wide = either(lambda: x, lambda: x.float())
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


class RotaryPair(Rule):
    """Proposes the rotary embeddings of the queries and the keys that one attention reads, by the same angles."""

    name, kind, reference = "rotary_pair", "rotary", rotary_kind

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        origins = context.analysis(normalized_graph_of).origins
        by_position: dict[int, Node] = {i: n for n, positions in origins.items() for i in positions}
        unpaired: dict[Node, Candidate] = {}
        for candidate in rotary.propose(context):
            if not isinstance(candidate, Candidate):
                continue
            nodes = [by_position[i] for i in candidate.members]
            product = nearest_consumer(nodes, _PRODUCT_OPS, _TRANSPARENT_OPS)
            if product is None:
                continue
            other = unpaired.pop(product, None)
            if other is None or other.attrs != candidate.attrs or not _same_angles(candidate, other):
                unpaired[product] = candidate
                continue
            members = tuple(sorted({*candidate.members, *other.members}))
            arguments = {**(other.arguments or {}), "other": (candidate.arguments or {})["x"]}
            results = (*other.results, *candidate.results)
            yield replace(other, rule=self.name, members=members, arguments=arguments, results=results)


def _same_angles(first: Candidate, second: Candidate) -> bool:
    a, b = first.arguments or {}, second.arguments or {}
    return all(a[name] == b[name] for name in ("cos", "sin"))


rotary_pair = RotaryPair()


@_rotary_rule(needs="cat|stack sub")
def rotary_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of halves, or of even and odd elements, with one angle for each pair."""
    wide = either(lambda: x, lambda: x.float())

    def rotate(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: join(a * cos - b * sin, b * cos + a * sin)

    rotated = either(
        lambda: combine_halves(wide, rotate(lambda a, b: torch.cat((a, b), dim=-1))),
        lambda: _combine_interleaved(wide, rotate(_interleave)),
    )
    return rotated.to(x.dtype)


@_rotary_rule(needs="stack select sub", examples=[(_X, meta_tensor(8, 8, 2))])
def rotary_cached(x: Tensor, angles: Tensor) -> Tensor:
    """A rotary embedding with cosines and sines in one tensor, selected where they are used."""
    wide = either(lambda: x, lambda: x.float())
    pairs = wide.reshape(*x.shape[:-1], -1, 2)
    rotated = _interleave(
        pairs[..., 0] * angles[..., 0] - pairs[..., 1] * angles[..., 1],
        pairs[..., 1] * angles[..., 0] + pairs[..., 0] * angles[..., 1],
    )
    return rotated.to(x.dtype)


@_rotary_rule(
    needs="view_as_complex view_as_real",
    examples=[(_X, meta_tensor(4, 8, 8, dtype=torch.complex64))],
    guards=[turns_are_complex, rotates_every_pair],
)
def rotary_complex(x: Tensor, turns: Tensor) -> Tensor:
    """A rotary embedding as a product of complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(x.dim() - 1).to(x.dtype)


ROTARY = RuleSet(rotary, rotary_pair, rotary_split, rotary_cached, rotary_complex)
