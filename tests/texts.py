"""Graphs compared as text: what a transformation was given, and what it leaves."""

from __future__ import annotations

from textwrap import dedent

from torch.fx import GraphModule

import dovetail


def assert_text(gm: GraphModule, expected: str) -> None:
    """The graph prints as `expected`, which may be indented as a whole."""
    assert dovetail.text(gm).strip() == dedent(expected).strip()
