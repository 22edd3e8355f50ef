"""How many files of the source each step of a small model goes through.

    python -m benchmarks.call_paths [--list capture]

The model is two equal blocks, each a Linear, a ReLU and a LayerNorm, in eval mode; `outline` gets the three operations
of the first block, and `compile` the backend "eager". A file of `src/dovetail` counts where one of its functions is
entered, in any thread; running the body of a module or a class does not count, nor does the zoo. A call is traced after
the compiled model was called twice. All steps are done for two models of different widths, one after the other: the
first of them is what a process does once, and the second what it does every time.

`--list` prints the files of one step in the order in which they are entered.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

SOURCE = Path(dovetail.__file__).resolve().parent
ZOO = SOURCE / "zoo"
STEPS = ("capture", "outline", "fuse", "compile", "call")
WIDTHS = (8, 16)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(x)))


class TwoBlocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


Entered = dict[str, None]
"""Files in the order in which they were entered first, relative to the source."""


@contextmanager
def traced() -> Iterator[Entered]:
    """The files whose functions are entered meanwhile."""
    entered: Entered = {}
    known: dict[str, str] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The bodies of modules and classes are not optimised as functions are.
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        name = known.get(code.co_filename)
        if name is None:
            name = known[code.co_filename] = _in_source(code.co_filename)
        if name:
            entered.setdefault(name)

    before = sys.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def _in_source(file: str) -> str:
    path = Path(file)
    if not path.is_relative_to(SOURCE) or path.is_relative_to(ZOO):
        return ""
    return str(path.relative_to(SOURCE))


def paths(width: int) -> dict[str, Entered]:
    """The files that each step enters."""
    torch.manual_seed(0)
    model, x = TwoBlocks(width).eval(), torch.randn(4, width)
    by_step: dict[str, Entered] = {}

    def step(name: str, do: Callable[[], Any]) -> Any:
        with traced() as by_step[name]:
            return do()

    with torch.no_grad():
        gm = step("capture", lambda: dovetail.capture(model, (x,)))
        names = [node.name for node in gm.graph.nodes if node.op == "call_function"][:3]
        step("outline", lambda: dovetail.outline(gm, names, kind="block"))
        step("fuse", lambda: dovetail.fuse(gm))
        fast = step("compile", lambda: dovetail.compile(model, (x,), backends=["eager"]))
        for _ in range(2):
            fast(x)
        step("call", lambda: fast(x))
    return by_step


def table(first: dict[str, Entered], later: dict[str, Entered]) -> str:
    files = [path for path in SOURCE.rglob("*.py") if not path.is_relative_to(ZOO)]
    zoo = list(ZOO.rglob("*.py"))
    rows = [
        "| | files | lines |",
        "|---|---|---|",
        _row("src/dovetail", files + zoo),
        _row("without the zoo", files),
        _row("without the zoo and `__init__`s", [path for path in files if path.stem != "__init__"]),
        "",
        "| files entered by | the first time | every time |",
        "|---|---|---|",
    ]
    rows += [f"| {name} | {len(first[name])} | {len(later[name])} |" for name in STEPS]
    rows.append(f"| all of them | {_together(first)} | {_together(later)} |")
    return "\n".join(rows)


def _row(name: str, files: list[Path]) -> str:
    return f"| {name} | {len(files)} | {sum(len(path.read_text().splitlines()) for path in files):,} |"


def _together(entered: dict[str, Entered]) -> int:
    return len({name for files in entered.values() for name in files})


def listing(first: Entered, later: Entered) -> str:
    once = [name for name in first if name not in later]
    return "\n".join([*later, *(f"{name}  (only the first time)" for name in once)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_paths", description=__doc__)
    parser.add_argument("--list", choices=STEPS, help="print the files that this step enters, in order")
    options = parser.parse_args()
    warnings.simplefilter("error", RuntimeWarning)  # a rule that fails is left out, and its files with it
    first, later = (paths(width) for width in WIDTHS)
    print(listing(first[options.list], later[options.list]) if options.list else table(first, later))


if __name__ == "__main__":
    main()
