"""The glossary has the words that messages use."""

import re

from dovetail.fusion.ledger_report import GLOSSARY
from tests.guides import ROOT


def test_the_glossary_is_sorted_and_has_the_words_of_the_field() -> None:
    terms = re.findall(r'^\| <a id="([a-z-]+)"></a>', (ROOT / GLOSSARY).read_text(), re.MULTILINE)
    assert terms == sorted(terms)
    needed = [
        "near-miss",
        "anchor",
        "injective",
        "post-dominator",
        "effect-order",
        "convex",
        "opaque",
        "region",
        "ledger",
        "coverage",
    ]
    assert not set(needed) - set(terms)
