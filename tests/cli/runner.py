"""Runs commands in this process, as the entry point does, with a terminal or without."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.cli.entry_point import main

MODELS = """\
import torch
import torch.nn.functional as F
from torch import nn

import dovetail


class Gated(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 16), nn.Linear(width, 16)

    def forward(self, x, scale=None):
        y = F.silu(self.gate(x)) * self.up(x)
        return y if scale is None else y * scale


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def gated(width=8):
    print("made by the factory")
    return Gated(width), (torch.randn(4, width),)


def scaled():
    return Gated(), (torch.randn(4, 8),), {"scale": torch.ones(4, 16)}


def alone(width=8):
    return Gated(width)


class Needs(Gated):
    def __init__(self, width):
        super().__init__(width)


def leaving():
    raise SystemExit(0)


def branching():
    return Branching(), (torch.randn(3),)


def broken():
    raise ValueError("no weights here\\nand more")


def unloadable():
    gated = Gated()
    gated.load_state_dict({})


def number():
    return 3


model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


@dovetail.rule(kind="gate")
def gate(x, weight, bias):
    return F.silu(F.linear(x, weight, bias))
"""


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Result:
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error, without progress."""
        lines = [line for line in self.err.splitlines() if not line.endswith(" ...")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("dovetail: error: ")
        return lines[0].removeprefix("dovetail: error: ")


def dovetail(*arguments: str, terminal: bool = False) -> Result:
    out, err = (Terminal(), Terminal()) if terminal else (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*arguments])
    return Result(code, out.getvalue(), err.getvalue())


def write_models(folder: Path) -> None:
    (folder / "models.py").write_text(MODELS)


def environment(**values: str) -> dict[str, str]:
    """The variables of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **values}
