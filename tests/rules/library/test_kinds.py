"""Kinds as contracts: every rule has a reference, names do not collide, and the page that shows them is current."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from dovetail.errors import RuleError
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.verify_region import reference_mismatch
from dovetail.outlining.outline import Request
from dovetail.rules.library import ALL, KINDS
from dovetail.rules.library.library_rule import Kind, kind, library_rule
from tests.guides import ROOT


def test_every_rule_of_the_library_has_a_reference() -> None:
    assert len(ALL) == 68
    assert all(isinstance(rule.reference, Kind) for rule in ALL)
    assert {rule.kind for rule in ALL} == set(KINDS)
    assert all(rule.reference is KINDS[rule.kind] for rule in ALL)


@pytest.mark.parametrize("name", KINDS)
def test_arguments_and_attributes_do_not_share_names(name: str) -> None:
    contract = KINDS[name]
    assert contract.arguments
    assert not contract.arguments.keys() & contract.attrs.keys()
    assert contract.reference.__doc__


def test_the_page_of_kinds_is_current() -> None:
    specification = importlib.util.spec_from_file_location(
        "generate_kinds", ROOT / "docs" / "generate_kinds.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.page() == (ROOT / "docs" / "kinds.md").read_text(), "run `make docs`"
    assert module.guide() == (ROOT / "docs" / "writing-backends.md").read_text(), "run `make docs`"


def test_a_rule_whose_arguments_are_not_those_of_the_kind_is_an_error() -> None:
    @kind("doubled")
    def doubled_kind(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(RuleError, match="'y' is not an argument of the kind 'doubled'"):
        library_rule(doubled_kind, needs="mul")(lambda y: y * 2)


def lying(attrs: dict[str, object], version: int = 2) -> str | None:
    """The mismatch of relu(x @ w), said to be a linear activation with these attributes."""
    x, w = torch.randn(3, 16), torch.randn(16, 16)
    gm = dovetail.capture(lambda x, w: F.relu(x @ w), (x, w))
    nodes = {node.name: node for node in gm.graph.nodes}
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    named = {"x": nodes["x"], "weight": nodes["w"]}
    request = Request(calls, "linear_activation", version, attrs, arguments=named, results=(calls[-1],))
    (region,) = dovetail.regions(dovetail.outline(gm, [request]))
    unit = unit_of(region)
    return reference_mismatch(unit, unit.values)


def test_a_mismatch_is_seen_and_only_where_the_contract_applies() -> None:
    attrs = {"activation": "relu", "slope": None}
    assert lying({**attrs, "weight_layout": "in_out"}) is None
    assert "off the reference by up to" in (lying({**attrs, "weight_layout": "out_in"}) or "")
    assert "the reference raised KeyError" in (
        lying({**attrs, "weight_layout": "in_out", "activation": "x"}) or ""
    )
    # Another version, or other attributes, are somebody else's kind of the same name.
    assert lying({**attrs, "weight_layout": "out_in"}, version=1) is None
    assert lying(attrs) is None
