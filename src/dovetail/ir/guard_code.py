"""Generated guard code: one Python function that tests the sizes of a call against expressions over symbols.

A symbol is bound where a size is that symbol alone, or solved from a size that is affine in it; every other size, every
range and every further condition is a test over the bound symbols. Compiled once, a guard costs a few comparisons per
call, without an interpreter of expressions. Guards of captured graphs and of specializations are both written with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Range = tuple[str, int | None, int | None]
Guard = Callable[[Any], bool]


class GuardCode:
    """Writes a guard on `values`, the arguments of a call. Early tests return before any symbol is bound."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = dict(names)
        self.bound: set[str] = set()
        self._lines = ["def guard(values):"]
        self._tests: list[str] = []
        self._equations: list[tuple[str, str]] = []

    def assign(self, name: str, expression: str) -> None:
        """Bind a local name."""
        self._lines.append(f"    {name} = {expression}")

    def require(self, *tests: str) -> None:
        """Return False here unless all tests hold."""
        if tests:
            self._lines.append(f"    if not ({' and '.join(tests)}): return False")

    def test(self, *tests: str) -> None:
        """Test at the end, over bound symbols."""
        self._tests += tests

    def match(self, expression: int | str, place: str) -> None:
        """Bind the symbol that an expression is, if it is unbound; otherwise test that the place equals it."""
        if isinstance(expression, str) and expression.isidentifier() and expression not in self.bound:
            self.bound.add(expression)
            self.assign(expression, place)
        else:
            self._equations.append((place, str(expression)))
            self.test(f"{place} == ({expression})")

    def solve(self, symbol: str) -> bool:
        """Bind a symbol from a matched size that is affine in it; return whether there is such a size."""
        for place, text in self._equations:
            names = set(re.findall(r"[A-Za-z_]\w*", text))
            if symbol not in names or not names <= {symbol, *self.bound}:
                continue
            code = compile(text, "<size>", "eval")
            others = [dict.fromkeys(names, n) for n in (3, 7)]
            try:
                samples = [[eval(code, {}, known | {symbol: n}) for n in (0, 1, 2, 1000)] for known in others]
            except (ArithmeticError, TypeError):
                continue
            slope = samples[0][1] - samples[0][0]
            is_affine = all(
                row[1] - row[0] == slope and row[2] - row[0] == 2 * slope and row[3] - row[0] == 1000 * slope
                for row in samples
            )
            if slope and is_affine:
                constant = re.sub(rf"\b{symbol}\b", "0", text)
                self.assign(symbol, f"({place} - ({constant})) // {slope}")
                self.bound.add(symbol)
                return True
        return False

    def test_ranges(self, ranges: Iterable[Range]) -> None:
        """Test that bound symbols are within their ranges."""
        for symbol, low, high in ranges:
            if symbol in self.bound:
                self.test(*([f"{low} <= {symbol}"] if low is not None else []))
                self.test(*([f"{symbol} <= {high}"] if high is not None else []))

    def compile(self) -> Guard:
        """Return the guard as a function."""
        exec("\n".join([*self._lines, f"    return {' and '.join(self._tests) or 'True'}"]), self.names)
        return self.names["guard"]
