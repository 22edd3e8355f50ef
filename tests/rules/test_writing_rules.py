"""The guide to writing rules names everything that the library has."""

from dovetail.rules import library
from dovetail.rules.rule import RuleSet
from tests.guides import ROOT

GUIDE = ROOT / "docs" / "writing-rules.md"


def test_every_set_and_kind_of_the_library_is_named() -> None:
    text = GUIDE.read_text()
    sets = {name: value for name, value in vars(library).items() if isinstance(value, RuleSet)}
    assert not [name for name in sets if f"`{name}`" not in text]
    assert not [rule.kind for rule in library.ALL if f"`{rule.kind}`" not in text]
