"""Large programs of known shapes as plain lists, so that every peer is given the very same one.

A step is an operation and the numbers of the steps it reads; -1 is the input. `mm` is a product with a weight.
"""

from __future__ import annotations

from collections.abc import Callable

Step = tuple[str, tuple[int, ...]]
Program = list[Step]

WIDTH = 64
BLOCK = 8


def _row(program: Program, at: int, count: int, *, every: int = BLOCK) -> int:
    """Operations one after the other, each `every`-th a product."""
    for _ in range(count):
        program.append(("mm" if len(program) % every == 0 else "mul", (at,)))
        at = len(program) - 1
    return at


def chain(n: int) -> Program:
    """One operation after the other."""
    program: Program = []
    _row(program, -1, n)
    return program


def residual(n: int, *, every: int = BLOCK) -> Program:
    """Blocks of eight with a skip around each."""
    program: Program = []
    at = -1
    while len(program) < n:
        start = at
        at = _row(program, at, BLOCK - 1, every=every)
        program.append(("add", (at, start)))
        at = len(program) - 1
    return program


def branches(n: int) -> Program:
    """Branches listed in turns, so that what belongs together does not stand together."""
    program: Program = []
    ends = [-1] * WIDTH
    while len(program) < n:
        for step in range(BLOCK):
            for b in range(WIDTH):
                program.append(("mul" if step else "mm", (ends[b],)))
                ends[b] = len(program) - 1
    while len(ends) > 1:
        pairs = [ends[i : i + 2] for i in range(0, len(ends), 2)]
        ends = []
        for pair in pairs:
            program.append(("add", tuple(pair)))
            ends.append(len(program) - 1)
    return program


def nested_skips(n: int) -> Program:
    """Skips within skips: what is made first is read last."""
    program: Program = []
    saved: list[int] = []
    at = -1
    while len(program) < n // 2:
        at = _row(program, at, 4)
        saved.append(at)
    while len(program) < n:
        at = _row(program, at, 3)
        if saved:
            program.append(("add", (at, saved.pop())))
            at = len(program) - 1
    return program


def long_skip(n: int) -> Program:
    """A chain whose first value is read again at the very end."""
    program: Program = []
    at = _row(program, -1, n)
    program.append(("add", (at, 0)))
    return program


def partial(n: int) -> Program:
    """Residual blocks in which every fourth operation is a product."""
    return residual(n, every=4)


def quarters(n: int) -> Program:
    """A product, then what a pattern of three operations is about, again and again."""
    program: Program = []
    at = -1
    while len(program) < n:
        program.append(("mm", (at,)))
        at = len(program) - 1
        program += [("sigmoid", (at,)), ("times", (at, at + 1)), ("add", (at + 2, at))]
        at += 3
    return program


QUARTERS = "quarters"
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "chain": chain,
    "residual": residual,
    "branches": branches,
    "nested skips": nested_skips,
    "one long skip": long_skip,
    "partial": partial,
    QUARTERS: quarters,
}
