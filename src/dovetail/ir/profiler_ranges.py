"""Ranges of regions in profiles: `dovetail::rms_norm rms_norm_0` around what a region runs.

A lowered region opens its range itself. A region that runs as it is has none of its own code, so the code generated for the graph
opens it: one check for a profiler in a call of the graph, and a branch for each such region.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.profiler import record_function
from torch.fx import Graph
from torch.fx._symbolic_trace import is_fx_tracing

_ASSIGNMENT = re.compile(r"(\w+)(?:\s*:[^=]*)? = ")


def range_label(kind: str, name: str) -> str:
    """Return the name of a region's range in a profile."""
    return f"dovetail::{kind} {name}"


def is_traced() -> bool:
    """Return whether a dispatch mode, a transform or forward-mode AD is active, which must see each operation."""
    transforms = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or transforms.peek_interpreter_stack() is not None  # pyright: ignore[reportUnknownMemberType]
        or forward_ad._current_level >= 0
    )


def is_profiled() -> bool:
    """Return whether a profile is taken of this call, and nothing traces it, which would record the ranges."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return False
    is_scripted = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return not (is_traced() or is_scripted or is_fx_tracing())


def enter_range(label: str) -> record_function:
    """Open a range and return it."""
    opened = record_function(label)
    opened.__enter__()
    return opened


def exit_range(opened: record_function) -> None:
    """Close a range."""
    opened.__exit__(None, None, None)


class CodeRange(NamedTuple):
    """Consecutive operations of a graph, by the names of the first and the last, and the label of their range."""

    first: str
    last: str
    label: str


def install_ranges(graph: Graph, ranges: Iterable[CodeRange]) -> Callable[[], None]:
    """Let the code generated for a graph open ranges; return the function that removes this again.

    The code calls `_is_profiled`, `_enter_range` and `_exit_range` of the module that owns it.
    """
    starts = {r.first: r for r in ranges}
    before = graph._codegen._body_transformer

    def transform(body: list[str]) -> list[str]:
        lines = "".join(body if before is None else before(body)).split("\n")
        return ["\n".join(_with_ranges(lines, starts))]

    graph._codegen._body_transformer = transform if starts else before

    def remove() -> None:
        graph._codegen._body_transformer = before

    return remove


def _with_ranges(lines: list[str], starts: dict[str, CodeRange]) -> Iterable[str]:
    is_checked, last = False, None
    for line in lines:
        match = _ASSIGNMENT.match(line)
        name = match[1] if match else None
        opened = starts.get(name) if name is not None else None
        if opened is not None:
            if not is_checked:
                is_checked = True
                yield "_profiled = self._is_profiled()"
            yield f"if _profiled: _range = self._enter_range({opened.label!r})"
            last = opened.last
        yield line
        if last is not None and name == last:
            yield "if _profiled: self._exit_range(_range)"
            last = None
