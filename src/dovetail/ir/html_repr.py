"""How graphs, regions, ledgers, plans and schedules are shown in notebooks: small HTML without scripts.

Colors follow the notebook, light or dark: text and lines have the current color. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from torch.fx import GraphModule

_BOX = (
    "border:1px solid color-mix(in srgb, currentColor 25%, transparent);border-radius:4px;padding:.5em .75em"
)
_TEXT = "margin:.4em 0;background:none;color:inherit;overflow-x:auto;white-space:pre;line-height:1.35;font-size:.9em"
_CELL = "padding:.1em .8em .1em 0;text-align:left;background:none;color:inherit"
_MOST_CHARACTERS = 200_000


def html_box(title: str, *parts: str) -> str:
    """Return a titled box around parts that are HTML."""
    return f'<div class="dovetail" style="{_BOX}"><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def html_text(text: str) -> str:
    """Return text with its line breaks and columns, cut where it is too long for a notebook."""
    shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}\n..."
    return f'<pre style="{_TEXT}">{escape(shown)}</pre>'


def html_details(summary: str, text: str) -> str:
    """Return text that is shown when its summary is clicked; nothing if there is none."""
    if not text:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{html_text(text)}</details>"


def html_table(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows of cells as a table, the first cell of each as its heading."""
    lines = [
        f'<tr><th style="{_CELL}">{escape(str(head))}</th>'
        + "".join(f'<td style="{_CELL}">{escape(str(cell))}</td>' for cell in cells)
        + "</tr>"
        for head, *cells in rows
    ]
    return f'<table style="border-collapse:collapse;margin:.4em 0">{"".join(lines)}</table>'


class HtmlGraph:
    """A graph in a notebook: what kinds of regions it calls, and its text."""

    def _repr_html_(self: Any) -> str:
        from dovetail.ir.meta_keys import REGION
        from dovetail.ir.printer import text

        nodes = list(self.graph.nodes)
        operations = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
        kinds: dict[str, int] = {}
        for node in nodes:
            call = node.meta.get(REGION)
            if call is not None:
                kinds[call.identity.kind] = kinds.get(call.identity.kind, 0) + 1
        title = f"graph of {len(operations):,} operations, {sum(kinds.values()):,} of them regions"
        ranked = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        return html_box(title, html_table(ranked) if ranked else "", html_details("text", text(self)))


class HtmlRegion:
    """A region in a notebook: its identity, its place, and the text of its body."""

    name: str
    kind: str
    body: GraphModule

    def _repr_html_(self: Any) -> str:
        from dovetail.ir.printer import text

        rows = [
            ("kind", self.kind if self.version == 1 else f"{self.kind} v{self.version}"),
            ("attrs", self.attrs or ""),
            ("rule", "" if self.rule is None else f"{self.rule}, round {self.round}"),
            ("backend", self.backend or "runs as it is"),
            ("effects", ", ".join(self.effects)),
            ("operations", ", ".join(self.nodes)),
        ]
        table = html_table(row for row in rows if row[1] != "")
        return html_box(f"region {self.name}", table, html_details("body", text(self.body)))
