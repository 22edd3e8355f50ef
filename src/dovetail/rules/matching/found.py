"""What an attempt to match has found, and how far it got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from dovetail.rules.matching.choices import Site
from dovetail.rules.matching.template import Where

Pair = tuple[Any, Any, Where]
"""A part of the template, the part of the graph it is to be, and the argument of the template that it is."""


@dataclass
class Found:
    """Nodes of the graph by nodes of the template; operands by name; captured literals; what was looked through.

    `skipped` are casts of the template that the graph does without.
    """

    nodes: dict[Node, Node] = field(default_factory=dict[Node, Node])
    operands: dict[Node, Node] = field(default_factory=dict[Node, Node])
    literals: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: set[Node] = field(default_factory=set[Node])
    through: list[Node] = field(default_factory=list[Node])
    joined: dict[Node, Node] = field(default_factory=dict[Node, Node])
    sites: dict[Site, int] = field(default_factory=dict[Site, int])
    skipped: set[Node] = field(default_factory=set[Node])

    def copy(self) -> Found:
        return Found(
            dict(self.nodes),
            dict(self.operands),
            dict(self.literals),
            set(self.taken),
            list(self.through),
            dict(self.joined),
            dict(self.sites),
            set(self.skipped),
        )


@dataclass(frozen=True)
class Taken:
    """On an agenda: this alternative is the one that is tried."""

    site: Site
    number: int


@dataclass(frozen=True)
class Cast:
    """On an agenda: this cast of the template is one of the graph's, or is not there."""

    node: Node
    kept: bool


@dataclass(frozen=True)
class Miss:
    """How far an attempt got, and what stopped it."""

    found: tuple[Node, ...]
    reason: str
    at: Node | None
    sites: Mapping[Site, int]


def same_pairs(left: list[Pair], right: list[Pair]) -> bool:
    return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(left, right, strict=True))
