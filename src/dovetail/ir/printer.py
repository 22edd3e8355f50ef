"""A graph as text: one line per node, each distinct body once below, the same in every run."""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_call
from dovetail.ir.graph_module import GraphOwner, attribute, graphs_of
from dovetail.ir.meta_keys import REGION
from dovetail.ir.nodes import SYMBOLIC, format_type
from dovetail.ir.op_traits import target_name


@checked_call()
def text(gm: GraphModule | GraphOwner) -> str:
    """Return the graph as text, then the bodies it calls, then theirs, each distinct body once with its number of calls.

    Regions show their kind, version and attrs. Symbolic sizes are numbered by first appearance. The graphs of a
    compiled model follow each other.
    """
    written = ["\n".join(_Printer().write(graph)) + "\n" for graph in graphs_of(gm)]
    return "\n".join(written)


class _Printer:
    def __init__(self) -> None:
        self.symbols: dict[str, str] = {}
        self.labels: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.calls: dict[int, int] = {}
        self.queue: list[tuple[str, GraphModule]] = []

    def write(self, gm: GraphModule) -> list[str]:
        sections = [self._section("graph", gm)]
        done = 0
        while done < len(self.queue):
            label, body = self.queue[done]
            sections.append(self._section(f"body @{label}", body))
            done += 1
        lines: list[str] = []
        for n, (head, rows) in enumerate(sections):
            if n:
                count = self.calls[id(self.queue[n - 1][1])]
                head = f"\n{head}" + (f" ×{count}" if count > 1 else "")
            lines += [head + ":", *rows]
        return lines

    def _section(self, head: str, gm: GraphModule) -> tuple[str, list[str]]:
        return head, [f"  {self._line(gm, node)}" for node in gm.graph.nodes]

    def _line(self, gm: GraphModule, node: Node) -> str:
        if node.op == "output":
            return f"return {format_argument(node.args[0], self.symbols)}"
        type_of = format_type(node.meta.get("val"), self.symbols)
        left = f"%{node.name}: {type_of}" if type_of else f"%{node.name}"
        if node.op == "placeholder":
            default = f" = {format_argument(node.args[0], self.symbols)}" if node.args else ""
            return f"{left} = input{default}"
        if node.op == "get_attr":
            return f"{left} = {self._attribute(gm, node)}"
        arguments = [format_argument(a, self.symbols) for a in node.args]
        arguments += [f"{k}={format_argument(v, self.symbols)}" for k, v in node.kwargs.items()]
        return f"{left} = {self._callee(gm, node)}({', '.join(arguments)})"

    def _attribute(self, gm: GraphModule, node: Node) -> str:
        target = cast("str", node.target)
        value = attribute(gm, target)
        if isinstance(value, GraphModule):
            return f"graph {self._label(value, target)}"
        word = "param" if isinstance(value, nn.Parameter) else "buffer" if _is_buffer(gm, target) else "const"
        return f"{word} {target}"

    def _callee(self, gm: GraphModule, node: Node) -> str:
        if node.op != "call_module":
            return target_name(node)
        target = cast("str", node.target)
        module = attribute(gm, target)
        if not isinstance(module, GraphModule):
            return f"module {target} <{type(module).__name__}>"
        label = self._label(module, target)
        record = node.meta.get(REGION)
        return f"graph {label}" if record is None else f"region {record.headline} @{label}"

    def _label(self, body: GraphModule, target: str) -> str:
        """Return a body's name in the text: its attribute's, numbered where two bodies share it."""
        key = id(body)
        self.calls[key] = self.calls.get(key, 0) + 1
        if key not in self.labels:
            number = self.numbers[target] = self.numbers.get(target, 0) + 1
            label = target if number == 1 else f"{target}'{number}"
            self.labels[key] = label
            self.queue.append((label, body))
        return self.labels[key]


def _is_buffer(gm: nn.Module, target: str) -> bool:
    path, _, name = target.rpartition(".")
    owner = attribute(gm, path) if path else gm
    return isinstance(owner, nn.Module) and name in owner._buffers


def format_argument(value: Any, symbols: dict[str, str] | None = None) -> str:
    """Return an argument as text: nodes as `%name`, literals as in Python, torch's own without the prefix."""
    walk: Callable[[Any], str] = lambda v: format_argument(v, symbols)  # noqa: E731
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        items = [walk(v) for v in cast("Sequence[Any]", value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {walk(v)}" for k, v in cast("dict[Any, Any]", value).items()) + "}"
    if isinstance(value, slice):
        return f"{walk(value.start)}:{walk(value.stop)}:{walk(value.step)}"
    if isinstance(value, SYMBOLIC):
        return format_type(value, symbols)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return f"tensor<{format_type(value)}>"
    if value is Ellipsis:
        return "..."
    return repr(value) if isinstance(value, (str, int, float, bool, complex, type(None))) else _object(value)


def _object(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return name
    written = repr(value)
    return type(value).__name__ if " at 0x" in written else written


@checked_call()
def diff(a: GraphModule | GraphOwner, b: GraphModule | GraphOwner, *, context: int = 3) -> str:
    """Return the difference of two graphs, line by line; empty if they compute the same in the same order.

    Lines are paired by what they compute, not by name: a renamed value alone is not a difference, and where names
    differ the newer ones are shown.
    """
    if not isinstance(context, int) or context < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"context {context!r}: give the number of unchanged lines to show, 0 or more.")
    left, right = text(a).splitlines(), text(b).splitlines()
    renamed: dict[str, str] = {}
    rows: list[tuple[str, str]] = []
    for i1, i2, j1, j2 in pair_sequences(list(map(_shape, left)), list(map(_shape, right)), (left, right)):
        if i2 - i1 != 1 or j2 - j1 != 1 or _shape(left[i1]) != _shape(right[j1]):
            rows += [("-", line) for line in left[i1:i2]] + [("+", line) for line in right[j1:j2]]
            continue
        old, new = left[i1], right[j1]
        if _is_head(new):
            renamed.clear()
        same = _rename(_computation(old), renamed) == _computation(new)
        rows += [(" ", new)] if same else [("-", old), ("+", new)]
        names = _NAME.match(old.strip()), _NAME.match(new.strip())
        if names[0] and names[1]:
            renamed[names[0].group()] = names[1].group()
    return _with_context(rows, context)


def pair_sequences(
    left: Sequence[Hashable],
    right: Sequence[Hashable],
    names: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield corresponding ranges of two sequences: equal items one by one, or ranges that were replaced.

    As in patience diff, items that are unique on both sides are aligned first, by `names` where these distinguish more
    of them; only the short ranges between them are compared item by item, in time quadratic in their length.
    """
    once = [_positions_of_unique(items) for items in names or (left, right)]
    anchors = [(i, once[1][item]) for item, i in once[0].items() if item in once[1]]
    i = j = 0
    for to_i, to_j in [*_increasing(anchors), (len(left), len(right))]:
        long = max(to_i - i, to_j - j) > 2000
        matcher = difflib.SequenceMatcher(None, left[i:to_i], right[j:to_j], autojunk=False)
        codes = [("replace", 0, to_i - i, 0, to_j - j)] if long else matcher.get_opcodes()
        for tag, i1, i2, j1, j2 in codes:
            if tag == "equal":
                yield from ((i + i1 + k, i + i1 + k + 1, j + j1 + k, j + j1 + k + 1) for k in range(i2 - i1))
            else:
                yield i + i1, i + i2, j + j1, j + j2
        if to_i < len(left):
            yield to_i, to_i + 1, to_j, to_j + 1
        i, j = to_i + 1, to_j + 1


def _positions_of_unique(items: Sequence[Hashable]) -> dict[Hashable, int]:
    seen: dict[Hashable, int] = {}
    for i, item in enumerate(items):
        seen[item] = -1 if item in seen else i
    return {item: i for item, i in seen.items() if i >= 0}


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a longest subsequence of pairs whose second sides increase, as the first sides do."""
    tails: list[int] = []
    at: list[int] = []
    before: list[int] = [-1] * len(pairs)
    for k, (_, j) in enumerate(pairs):
        place = bisect.bisect_left(tails, j)
        before[k] = at[place - 1] if place else -1
        if place == len(tails):
            tails.append(j)
            at.append(k)
        else:
            tails[place], at[place] = j, k
    chain: list[tuple[int, int]] = []
    k = at[-1] if at else -1
    while k >= 0:
        chain.append(pairs[k])
        k = before[k]
    return chain[::-1]


def _computation(line: str) -> str:
    """Return a line without the name of its result."""
    return line.partition(" = ")[2] or line


_NAME = re.compile(r"%\w+")


def _shape(line: str) -> str:
    """Return a line without names: the operation, its literals and its type."""
    return _NAME.sub("%", line)


def _rename(line: str, renamed: dict[str, str]) -> str:
    return _NAME.sub(lambda match: renamed.get(match.group(), match.group()), line)


def _is_head(line: str) -> bool:
    return line.endswith(":") and not line.startswith(" ")


def _with_context(rows: list[tuple[str, str]], context: int) -> str:
    """Return the changed rows with a few unchanged ones around them, and a mark where some are left out."""
    changed = [i for i, (mark, _) in enumerate(rows) if mark != " "]
    shown = {j for i in changed for j in range(max(0, i - context), min(len(rows), i + context + 1))}
    lines: list[str] = []
    last = -1
    for i in sorted(shown):
        if i != last + 1:
            lines.append("...")
        lines.append(f"{rows[i][0]} {rows[i][1]}".rstrip())
        last = i
    return "\n".join(lines) + ("\n" if lines else "")
