"""The guide to writing backends: its table of built-in ones is right."""

import pytest

from dovetail.lowering.backend_protocol import by_name
from tests.guides import ROOT

GUIDE = ROOT / "docs" / "writing-backends.md"


@pytest.mark.parametrize("name", ["eager", "torchscript", "inductor", "aoti", "cuda_graphs(inductor)"])
def test_the_table_of_built_in_backends(name: str) -> None:
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    backend = by_name(name)
    assert backend.name == name
    assert row.endswith("| yes |") is backend.trains
