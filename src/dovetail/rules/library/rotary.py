"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.rules.library.known import ahead_of, has, known
from dovetail.rules.matching.choices import either
from dovetail.rules.matching.match import Match
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleSet
from dovetail.rules.scene import Scene

_MEETINGS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
_BETWEEN = frozenset(
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


def _layout(match: Match) -> dict[str, Any]:
    return {"layout": "interleaved" if has(match, "stack", "view_as_complex") else "halves"}


def turned(x: Tensor) -> Tensor:
    """(a, b) made (-b, a): a and b the halves of the last dimension, or its even and odd places."""
    middle = x.shape[-1] // 2

    def halves() -> Tensor:
        a, b = x[..., :middle], x[..., middle:]
        return torch.cat((-b, a), dim=-1)

    def chunks() -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def places() -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return either(halves, chunks, places)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by the angles whose cosines and sines are given."""
    wide = either(lambda: x, lambda: x.float())
    return (wide * cos + turned(wide) * sin).to(x.dtype)


@known(kind="rotary", needs="cat|stack neg|sub", says=_layout)
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of queries or of keys."""
    return rotated(x, cos, sin)


class RotaryPair(Rule):
    """Proposes the rotary embeddings of the queries and the keys that one attention reads, by the same angles."""

    def __init__(self) -> None:
        self.name, self.kind = "rotary_pair", "rotary"

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        shadow = scene.fact(shadow_of)
        by_place: dict[int, Node] = {i: n for n, places in shadow.origins.items() for i in places}
        waiting: dict[Node, Candidate] = {}
        for found in rotary.propose(scene):
            if not isinstance(found, Candidate):
                continue
            meeting = ahead_of([by_place[i] for i in found.members], _MEETINGS, _BETWEEN)
            if meeting is None:
                continue
            other = waiting.pop(meeting, None)
            if other is None or other.attrs != found.attrs or not _same_angles(scene, found, other):
                waiting[meeting] = found
                continue
            members = tuple(sorted({*found.members, *other.members}))
            yield replace(found, rule=self.name, members=members)


def _same_angles(scene: Scene, first: Candidate, second: Candidate) -> bool:
    def read(found: Candidate) -> set[Node]:
        inside = {scene.nodes[i] for i in found.members}
        return {used for node in inside for used in node.all_input_nodes} - inside

    return len(read(first) & read(second)) == 2


rotary_pair = RotaryPair()


@known(kind="rotary", name="rotary_split", needs="cat sub", says=_layout)
def rotary_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding half by half: angles are given for one half."""
    middle = x.shape[-1] // 2

    def chunks() -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return joined(a, b)

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return either(chunks, lambda: joined(x[..., :middle], x[..., middle:]))


@known(
    kind="rotary",
    name="rotary_complex",
    needs="view_as_complex view_as_real",
    says=_layout,
    examples=[
        (torch.empty(2, 4, 8, 16, device="meta"), torch.empty(4, 8, 8, dtype=torch.complex64, device="meta"))
    ],
)
def rotary_complex(x: Tensor, turns: Tensor) -> Tensor:
    """A rotary embedding as a product of complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(x.dim() - 1).to(x.dtype)


ROTARY = RuleSet(rotary, rotary_pair, rotary_split, rotary_complex)
