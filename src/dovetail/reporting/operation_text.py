"""What operations look like in a report: their calls as text, the types of their results, costs, and lines of source.

Each node of a body, each type and each place in a source file is written once, however often it occurs.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dovetail.fusion.cost import Figures, Traffic
from dovetail.fusion.coverage import GraphCosts
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import format_type, is_projection, nbytes
from dovetail.ir.op_traits import target_name
from dovetail.ir.printer import format_argument
from dovetail.ir.source_location import of_stack_trace
from dovetail.outlining.escapes import RegionDraft
from dovetail.outlining.region import make_identity, results
from dovetail.reporting.level_templates import Totals

_AROUND = 2
_MOST_EXCERPTS = 5000
_MOST_LETTERS = 200

OPERAND_MARK = "¤"
"""Stands before the number of an operand in the text of arguments."""


@dataclass(frozen=True, slots=True)
class NodeText:
    """What an operation looks like in any call of its body: all but its name and what its operands are."""

    target: str
    arguments: str
    types: tuple[int, ...]
    totals: Totals
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class _OperandMark:
    """Stands for an operand in the text of arguments."""

    number: int

    def __repr__(self) -> str:
        return f"{OPERAND_MARK}{self.number}"


class OperationTexts:
    """Texts, types and costs of the operations of all programs of a report."""

    def __init__(self) -> None:
        self.sources = SourceExcerpts()
        self.types: dict[str, int] = {}
        self.type_bytes: list[int] = []
        # Graphs and nodes are keys, and so kept alive.
        self._costs: dict[GraphModule, GraphCosts] = {}
        self._saved: dict[tuple[GraphModule, frozenset[str]], tuple[int, int]] = {}
        self._texts: dict[Node, NodeText] = {}

    def type_number(self, value: Any) -> int:
        """Return the number of a value's type among all types of the report."""
        text = format_type(value) or "?"
        if text not in self.types:
            self.types[text] = len(self.types)
            self.type_bytes.append(nbytes(value) or 0)
        return self.types[text]

    def text(self, owner: GraphModule, node: Node) -> NodeText:
        """Return what an operation looks like in any call of its body."""
        text = self._texts.get(node)
        if text is None:
            text = self._texts[node] = self._make(owner, node)
        return text

    def _make(self, owner: GraphModule, node: Node) -> NodeText:
        if owner not in self._costs:
            self._costs[owner] = GraphCosts(owner)
        cost = self._costs[owner].cost(node)
        number: dict[Node, Any] = {operand: _OperandMark(k) for k, operand in enumerate(node.all_input_nodes)}
        args: Any = map_arg(node.args, number.__getitem__)
        kwargs: Any = map_arg(node.kwargs, number.__getitem__)
        written = [format_argument(a) for a in args]
        written += [f"{k}={format_argument(v)}" for k, v in kwargs.items() if v is not None]
        target = target_name(node)
        if node.op == "call_module":
            module = attribute(owner, cast("str", node.target))
            target = f"module {type(module).__name__}"
        value = node.meta.get("val")
        parts = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) and value else [value]
        launches = int(not cost.is_free)
        totals = Totals(1, 0, cost.flops, cost.bytes, cost.bytes, launches, launches)
        types = tuple(self.type_number(part) for part in parts)
        return NodeText(target, ", ".join(written), types, totals, cost.bytes_read, cost.bytes_written)

    def saved(self, body: GraphModule, copies: Collection[str]) -> tuple[int, int]:
        """Return the bytes and launches that a body saves as one kernel, by the estimate that the ledger has.

        `copies` are the names of operations that are also elsewhere: what they read again is subtracted.
        """
        key = (body, frozenset(copies))
        known = self._saved.get(key)
        if known is None:
            index = Index(body)
            inside = {i for i, n in enumerate(index.nodes) if n.op not in ("placeholder", "output")}
            clones = {i for i in inside if _of_copy(index.nodes[i], copies)}
            outputs = [index.position[n] for n in results(body)]
            identity = make_identity("body", 1, None)
            draft = RegionDraft(
                identity, "body", inside - clones, {}, "output", clones=clones, outputs=outputs
            )
            gain = Traffic().gain(Figures(index), draft)
            known = self._saved[key] = (gain.bytes_saved - gain.bytes_recomputed, gain.launches_saved)
        return known


def _of_copy(node: Node, copies: Collection[str]) -> bool:
    """Whether a node of a body is a copy, or an element of the tuple that one returns."""
    while is_projection(node):
        node = cast("Node", node.args[0])
    return node.name in copies


class SourceExcerpts:
    """Collects places in source files, numbered by first appearance."""

    def __init__(self) -> None:
        self._by_trace: dict[str, int | None] = {}
        self._places: dict[tuple[str, int, str], int] = {}
        self._files: dict[str, int] = {}
        self._lines: dict[tuple[int, int], str] = {}

    def at(self, stack_trace: str) -> int | None:
        """Return the number of the deepest line of user code in a stack trace; None if it has none."""
        if not stack_trace:
            return None
        if stack_trace not in self._by_trace:
            self._by_trace[stack_trace] = self._place(stack_trace)
        return self._by_trace[stack_trace]

    def _place(self, stack_trace: str) -> int | None:
        line = of_stack_trace(stack_trace)
        if line is None:
            return None
        place = (line.file, line.number, line.function)
        if place not in self._places:
            self._places[place] = len(self._places)
            file = self._files.setdefault(line.file, len(self._files))
            if len(self._places) <= _MOST_EXCERPTS:
                for number in range(max(1, line.number - _AROUND), line.number + _AROUND + 1):
                    text = linecache.getline(line.file, number).rstrip()
                    if text:
                        self._lines[file, number] = text[:_MOST_LETTERS]
        return self._places[place]

    def as_document(self) -> dict[str, Any]:
        """Return the files, the places in them, and the lines that are shown."""
        lines: dict[int, dict[int, str]] = {}
        for (file, number), text in self._lines.items():
            lines.setdefault(file, {})[number] = text
        places = [[self._files[file], number, function] for file, number, function in self._places]
        return {"files": list(self._files), "places": places, "lines": lines}
