"""The guide to writing backends tells the truth: its examples run and print what is shown."""

import pytest
import torch

from dovetail.lowering.backend_protocol import by_name
from tests.guides import ROOT, check_examples

GUIDE = ROOT / "docs" / "writing-backends.md"


@pytest.fixture(autouse=True)
def _grad_mode_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with torch.enable_grad():
        yield


def test_examples_print_what_is_shown() -> None:
    check_examples(GUIDE, 9)


@pytest.mark.parametrize("name", ["eager", "torchscript", "inductor", "aoti", "cuda_graphs(inductor)"])
def test_the_table_of_built_in_backends(name: str) -> None:
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    backend = by_name(name)
    assert backend.name == name
    assert row.endswith("| yes |") is backend.trains
