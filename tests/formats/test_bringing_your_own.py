"""The guide to bringing one's own compiler: its table of compilers is right."""

import tomllib

import pytest
import torch
from torch.export import Dim

import dovetail
from dovetail.lowering.backend_protocol import by_name
from tests.guides import ROOT

GUIDE = ROOT / "docs" / "bringing-your-own-compiler.md"
COMPILERS = ("onnxruntime", "openvino", "tvm", "xla")


@pytest.mark.parametrize("name", COMPILERS)
def test_the_table_of_compilers(name: str) -> None:
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    _, _, install, _, vary, _ = (cell.strip() for cell in row.split("|"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert install == f"`pip install 'dovetail[{name}]'`"
    assert name in extras
    missing = by_name(name).missing()
    if missing:
        pytest.skip(missing)
    function, x = lambda x: torch.relu(x * 2), torch.randn(4, 3)
    for sizes, accepted in ((None, True), (({0: Dim("rows", min=2)},), vary == "yes")):
        gm = dovetail.fuse(dovetail.capture(function, (x,), dynamic_shapes=sizes))
        (region,) = dovetail.regions(gm)
        backend = by_name(name)
        assert not backend.trains
        assert (backend.supports(region) is True) is accepted
