"""The guide to writing backends tells the truth: its examples run and print what is shown."""

import contextlib
import io

import pytest
import torch

from dovetail.lowering.backend import by_name
from tests.test_readme import ROOT, examples

GUIDE = ROOT / "docs" / "writing-backends.md"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.fixture(autouse=True)
def _grad_mode_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with torch.enable_grad():
        yield


def test_examples_print_what_is_shown() -> None:
    found = examples(GUIDE.read_text())
    assert len(found) > 8
    scope: dict[str, object] = {"__name__": "guide"}
    for example in found:
        # Blank lines in front make a traceback point at the line of the guide.
        code = compile("\n" * (example.line - 1) + example.code, str(GUIDE), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        assert lines(printed.getvalue()) == lines(example.shown), f"writing-backends.md:{example.line}"


@pytest.mark.parametrize("name", ["eager", "torchscript", "inductor", "aoti", "cuda_graphs(inductor)"])
def test_the_table_of_built_in_backends(name: str) -> None:
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    backend = by_name(name)
    assert backend.name == name
    assert row.endswith("| yes |") is backend.trains
