"""An over-match must be impossible: every match of a made-up pattern computes what the pattern does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.rules.patterns.pattern_rule import PatternRule, rule
from dovetail.rules.rule import RuleContext
from tests.rules.match_semantics import wrong

Step = tuple[str, tuple[Any, ...]]
_UNARY: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "neg": torch.neg,
    "double": lambda x: x * 2,
    "triple": lambda x: 3.0 * x,
    "plus": lambda x: x + 0.5,
    "rows": lambda x: torch.softmax(x, -1),
    "columns": lambda x: torch.softmax(x, 0),
    "mean": lambda x: x.mean(-1, keepdim=True).expand(4, 4),
    "total": lambda x: x - x.sum(0, keepdim=True),
    "turned": lambda x: x.transpose(0, 1),
    "halves": lambda x: torch.cat([x[:, 2:], x[:, :2]], -1),
    "clamped": lambda x: x.clamp(-1, 1),
}
_BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: y * x,
    "product": torch.matmul,
    "larger": torch.maximum,
}


def steps(rng: random.Random, inputs: int, count: int) -> list[Step]:
    """A program: each step reads inputs (negative) or earlier steps."""
    program: list[Step] = []
    for i in range(count):
        choices = [*range(-inputs, 0), *range(max(0, i - 4), i), *range(max(0, i - 4), i)]
        if rng.random() < 0.5:
            program.append((rng.choice(list(_UNARY)), (rng.choice(choices),)))
        else:
            program.append((rng.choice(list(_BINARY)), (rng.choice(choices), rng.choice(choices))))
    return program


def run(program: list[Step], chosen: list[int], results: list[int], given: dict[int, Any]) -> Any:
    values = dict(given)
    for i in chosen:
        name, reads = program[i]
        function = _UNARY.get(name) or _BINARY[name]
        values[i] = function(*(values[r] for r in reads))
    return tuple(values[r] for r in results) if len(results) > 1 else values[results[0]]


def part(rng: random.Random, program: list[Step]) -> tuple[list[int], int]:
    """The steps that one step needs, a few generations back."""
    root = rng.randrange(len(program) // 2, len(program))
    inner, edge = {root}, [root]
    for _ in range(rng.randrange(1, 5)):
        edge = [r for i in edge for r in program[i][1] if r >= 0 and rng.random() < 0.8]
        inner.update(edge)
    return sorted(inner), root


def pattern_of(program: list[Step], inner: list[int], root: int) -> PatternRule:
    """A rule whose pattern is those steps, on operands named after what they read from outside."""
    outside = sorted({r for i in inner for r in program[i][1] if r not in inner})
    names = [f"in_{r}".replace("-", "m") for r in outside]

    def body(operands: tuple[Any, ...]) -> Any:
        return run(program, inner, [root], dict(zip(outside, operands, strict=True)))

    scope: dict[str, Any] = {"body": body}
    exec(f"def pattern({', '.join(names)}): return body(({', '.join(names)},))", scope)
    return rule(kind="made_up", examples=[[torch.empty(4, 4)] * len(names)])(scope["pattern"])


@pytest.mark.parametrize("seed", range(24))
def test_a_part_of_a_program_is_matched_in_it_and_every_match_means_it(seed: int) -> None:
    rng = random.Random(seed)
    program = steps(rng, 3, 14)
    used = {r for _, reads in program for r in reads}
    last = [i for i in range(len(program)) if i not in used]
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + k)) for k in range(3)]
    gm = dovetail.capture(
        lambda a, b, c: run(program, list(range(len(program))), last, {-1: a, -2: b, -3: c}), tuple(inputs)
    )
    for _ in range(3):
        inner, root = part(rng, program)
        pattern = pattern_of(program, inner, root)
        matches = pattern.matches(RuleContext(gm))
        outside = {r for i in inner for r in program[i][1] if r not in inner}
        # Where an operand is itself computed from the match, there is no place for it outside.
        needs = {i for r in outside if r >= 0 for i in _ancestors(program, r)}
        if not needs & set(inner):
            assert matches, (program, inner)
        assert wrong(pattern, gm, inputs) == []


def _ancestors(program: list[Step], at: int) -> set[int]:
    ancestors, stack = set(), [at]
    while stack:
        i = stack.pop()
        if i >= 0 and i not in ancestors:
            ancestors.add(i)
            stack.extend(program[i][1])
    return ancestors
