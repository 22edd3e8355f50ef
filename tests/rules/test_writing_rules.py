"""The guide to writing rules tells the truth: its examples run and print what is shown."""

import contextlib
import io

from dovetail.rules import library
from dovetail.rules.rule import RuleSet
from tests.test_readme import ROOT, examples

GUIDE = ROOT / "docs" / "writing-rules.md"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_examples_print_what_is_shown() -> None:
    found = examples(GUIDE.read_text())
    assert len(found) > 10
    scope: dict[str, object] = {"__name__": "guide"}
    for example in found:
        # Blank lines in front make a traceback point at the line of the guide.
        code = compile("\n" * (example.line - 1) + example.code, str(GUIDE), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        assert lines(printed.getvalue()) == lines(example.shown), f"writing-rules.md:{example.line}"


def test_every_set_and_kind_of_the_library_is_named() -> None:
    text = GUIDE.read_text()
    sets = {name: value for name, value in vars(library).items() if isinstance(value, RuleSet)}
    assert not [name for name in sets if f"`{name}`" not in text]
    assert not [rule.kind for rule in library.ALL if f"`{rule.kind}`" not in text]
