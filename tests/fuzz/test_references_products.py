"""A few random spellings for each rule of products, gates, norms, embeddings, activations and samples."""

from __future__ import annotations

import pytest

from dovetail.rules import library

from . import spellings_norms, spellings_pointwise, spellings_products
from .references import Family, check

FAMILIES = {
    family.rule: family
    for subject in (spellings_products, spellings_norms, spellings_pointwise)
    for family in subject.FAMILIES
}


def test_every_rule_has_a_family() -> None:
    sets = (
        library.LINEAR,
        library.GATES,
        library.NORMS,
        library.EMBEDDINGS,
        library.ACTIVATIONS,
        library.SAMPLING,
    )
    assert sorted(FAMILIES) == sorted(rule.name for rules in sets for rule in rules)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_references(family: Family) -> None:
    matches = 0
    for seed in range(9):
        matches += check(family, str(seed)).matches
        if matches and seed >= 2:
            break
    assert matches
