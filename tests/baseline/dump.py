"""Graphs, regions, ledgers and errors as text that is the same in every process, wherever the source lies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import dovetail

ROOT = Path(__file__).resolve().parents[2]

_PLACES = (
    (str(Path(sys.prefix).resolve()), "<env>"),
    (sys.prefix, "<env>"),
    (str(ROOT), "<root>"),
    (sys.base_prefix, "<python>"),
    (tempfile.gettempdir(), "<tmp>"),
)
_SCRUBBED = (
    # Files of dovetail will move, and lines of any file of ours.
    (
        re.compile(r'<root>/src/dovetail/[\w./-]+\.py(:\d+( in [\w.<>]+)?|", line \d+, in [\w.<>]+)?'),
        "<source>",
    ),
    (re.compile(r'(<root>/[\w./-]+\.py)(:\d+|", line \d+)'), r"\1:N"),
    # Modules of dovetail that are not public: what they have is told by its name alone.
    (
        re.compile(r"\bdovetail\.(?!(?:zoo|rules|backends|config)[.:])(?:\w+\.)*\w+([.:]\w+)"),
        r"dovetail.<...>\1",
    ),
    (re.compile(r"\bdovetail\.(?:rules|backends)(?:\.\w+)+([.:]\w+)"), r"dovetail.<...>\1"),
    (re.compile(r"<tmp>/tmp\w+"), "<tmp>"),
    (re.compile(r"\b0x[0-9a-f]{5,}\b"), "0xN"),
    (re.compile(r"\b1[34]\d{13}\b"), "N"),
    (re.compile(r"\bin \d+\.\d+ s\b"), "in N s"),
    (re.compile(r"\b\d+\.\d+ (ms|seconds)\b"), r"N \1"),
)
_LONGEST = 4000


def scrubbed(text: str) -> str:
    """Text without addresses, times, folders of this machine and places in the source of dovetail."""
    for place, name in _PLACES:
        text = text.replace(place + os.sep, name + "/")
    for pattern, name in _SCRUBBED:
        text = pattern.sub(name, text)
    return text


def describe(error: BaseException) -> str:
    """An exception as its type and message; of the notes and the cause nothing."""
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def tried(make: Callable[[], str]) -> str:
    """What a function returns, or the exception that it raises."""
    try:
        return make()
    except Exception as error:
        return describe(error) + "\n"


def section(title: str, lines: Iterable[str] | str) -> str:
    body = lines if isinstance(lines, str) else "\n".join(lines)
    return f"== {title}\n{body.rstrip()}\n"


def whole(gm: Any) -> str:
    """All that can be read of a graph or a compiled model: its text, its regions and its ledger."""
    return section("text", dovetail.text(gm)) + section("regions", regions(gm)) + ledger(gm)


def regions(gm: Any) -> list[str]:
    """Each region with those nested in it, field by field."""
    return [_region(region) for region in dovetail.regions(gm, nested=True)]


def _region(region: dovetail.Region) -> str:
    rows = {
        "identity": f"{region.kind} v{region.version} {json.dumps(region.attrs, sort_keys=True)}",
        "key": region.key,
        "made by": f"{region.rule}, round {region.round}",
        "backend": region.backend,
        "effects": " ".join(region.effects),
        "nodes": " ".join(region.nodes),
        "inputs": " ".join(node.name for node in region.inputs),
        "outputs": " ".join(node.name for node in region.outputs),
        "escapes": "; ".join(f"{name}: {e.policy}, {e.reason}" for name, e in region.escapes.items()),
        "arguments": " ".join(f"{name}={at}" for name, at in region.arguments.items()),
        "results": " ".join(map(str, region.results)),
    }
    return "\n".join([region.name, *(f"  {name}: {value}" for name, value in rows.items() if value)])


def ledger(gm: Any) -> str:
    """The ledger as it is printed, and entry by entry."""
    decisions = dovetail.explain(gm)
    data = json.loads(decisions.to_json())
    for entry in data["lowered"]:
        del entry["seconds"]
    for entry in data["errors"]:
        del entry["traceback"]
    text = section("ledger", str(decisions))
    for name, value in sorted(data.items()):
        rows = value if isinstance(value, list) else [value]
        text += section(name, [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows])
    return text


class Counting(dovetail.Backend):
    """Runs bodies as they are, and counts what it compiles and how often that is called."""

    trains = True

    def __init__(self, name: str = "counting", kinds: Sequence[str] = ()) -> None:
        self.name, self.kinds = name, kinds
        self.compiled: list[str] = []
        self.calls = 0

    def supports(self, region: dovetail.Region) -> Any:
        if self.kinds and region.kind not in self.kinds:
            return dovetail.Decline(f"{self.name} does not take {region.kind}")
        return True

    def compile(self, region: dovetail.Region, examples: Sequence[Any]) -> Callable[..., Any]:
        self.compiled.append(f"{region.name} ({len(region.nodes)} operations, {len(examples)} operands)")

        def run(*operands: Any) -> Any:
            self.calls += 1
            return region.body(*operands)

        return run

    def so_far(self, when: str) -> str:
        """What was compiled and called since the last time this was asked."""
        text = section(
            f"{self.name}, {when}: {len(self.compiled)} compiled, {self.calls} calls", self.compiled
        )
        self.compiled, self.calls = [], 0
        return text


@contextlib.contextmanager
def folder() -> Any:
    """A new folder, removed again; its name is not in what is told."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        yield Path()
