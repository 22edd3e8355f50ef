"""Random spellings of every library kind: what a rule matches must be what the kind's reference computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.fx import GraphModule

import dovetail
from dovetail.lowering.backend_protocol import contract_of
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.verify_region import reference_mismatch
from dovetail.rules.library import ALL
from dovetail.rules.rule import Candidate, RuleContext
from tests.rules.library.helpers import request_for


@dataclass(frozen=True)
class Spelling:
    """A program that a rule may match, the variations in it, and its inputs.

    `program` is a function of `inputs`, or a graph. A spelling is not promised to match; `variations` that appear in
    no match at all are missing from the coverage of the rule.
    """

    program: Callable[..., Any] | GraphModule
    inputs: tuple[Any, ...]
    variations: frozenset[str] = frozenset()
    dynamic_shapes: Any = None


Draw = Callable[[Random], Spelling]


@dataclass(frozen=True)
class Family:
    """How spellings for one rule are drawn, and the variations that some match must have."""

    rule: str
    draw: Draw
    variations: frozenset[str]


@dataclass
class Coverage:
    """What the matches of one rule covered."""

    spellings: int = 0
    matches: int = 0
    variations: Counter[str] = field(default_factory=Counter)

    def add(self, other: Coverage) -> None:
        self.spellings += other.spellings
        self.matches += other.matches
        self.variations.update(other.variations)


class ReferenceMismatch(AssertionError):
    """A rule matched something that the reference of its kind does not compute."""


def families() -> Mapping[str, Family]:
    """The families by the name of their rule; every rule of the library that matches has one."""
    from . import spellings_layers, spellings_norms, spellings_pointwise, spellings_products

    subjects = (spellings_products, spellings_norms, spellings_pointwise, spellings_layers)
    return {f.rule: f for subject in subjects for f in subject.FAMILIES}


def check(family: Family, seed: str) -> Coverage:
    """Draw one spelling, and compare each match of the rule with the reference of its kind."""
    rng = Random(f"{family.rule}/{seed}")
    torch.manual_seed(rng.randrange(2**31))
    try:
        spelling = family.draw(rng)
    except RuntimeError:  # torch itself does not run it: an operator of integers, a product of two dtypes
        return Coverage(spellings=1)
    coverage = Coverage(spellings=1)
    try:
        graph = dovetail.capture(spelling.program, spelling.inputs, dynamic_shapes=spelling.dynamic_shapes)
    except dovetail.CaptureError:
        try:
            spelling.program(*spelling.inputs)
        except RuntimeError:
            return coverage
        raise
    rule = ALL[family.rule]
    for proposal in rule.propose(RuleContext(graph)):
        if isinstance(proposal, Candidate) and _compare(graph, proposal, family.rule, seed, spelling):
            coverage.matches += 1
            coverage.variations.update(spelling.variations)
    return coverage


def _compare(graph: GraphModule, match: Candidate, rule: str, seed: str, spelling: Spelling) -> bool:
    """Compare a match with the reference; False where an operand is no value that can be drawn, a dtype say."""
    (region,) = dovetail.regions(dovetail.outline(graph, [request_for(graph, match)]))
    unit = unit_of(region)
    if any(value is None for value in unit.values):
        return False
    where = (
        f"{rule}, seed {seed!r}, {sorted(spelling.variations)}, {region.attrs}, {sorted(region.arguments)}"
    )
    if contract_of(unit.region) is None:
        if spelling.variations & {"make_fx", "aot"}:
            # Behind a view that changes nothing an operand may have no name there; no kernel is given such a region.
            return False
        raise ReferenceMismatch(f"an operand without a name: {where}\n{graph.graph}")
    reason = reference_mismatch(unit, unit.values)
    if reason is not None:
        raise ReferenceMismatch(f"{reason}: {where}\n{graph.graph}")
    return True
