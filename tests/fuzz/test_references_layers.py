"""A few random spellings of each layer, compared with the references of their kinds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random

import pytest

from dovetail.rules.library import ATTENTION, CONVOLUTION, GRADIENTS, LOSSES, MIX_FFN, POOLING, ROTARY

from .references import Coverage, Family, check
from .spellings_layers import FAMILIES, WITHOUT_SPELLINGS

RULES = ATTENTION + ROTARY + CONVOLUTION + POOLING + LOSSES + MIX_FFN + GRADIENTS
SPELLINGS, MOST = 3, 12
# Patterns are traced once more for these, which takes longer than all the rest.
SLOW = frozenset({"make_fx", "decomposed", "bf16", "f64"})


def test_every_rule_has_a_family_or_a_reason() -> None:
    assert sorted([*(f.rule for f in FAMILIES), *WITHOUT_SPELLINGS]) == sorted(rule.name for rule in RULES)


def seeds(family: Family) -> Iterator[str]:
    """Seeds of spellings that are quick to check."""
    for i in count():
        if not family.draw(Random(f"{family.rule}/{i}")).variations & SLOW:
            yield str(i)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.rule)
def test_references(family: Family) -> None:
    total = Coverage()
    for seed in islice(seeds(family), MOST):
        total.add(check(family, seed))
        if total.matches and total.spellings >= SPELLINGS:
            break
    assert total.matches
