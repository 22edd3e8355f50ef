"""The options of a lowering: the same ones wherever they are given, and checked there."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail import InvalidArgument
from dovetail.lowering.options import Options
from dovetail.runtime.torch_compile import backend
from tests.lowering.helpers import Blocks, fused

WRONG = [
    ("plan", ["eager"], "a mapping from the keys of bodies to backends"),
    ("on_error", "explode", "'fallback' or 'raise'"),
    ("verify", 1, "True or False"),
    ("granularity", "middle", "'outer' or 'inner'"),
    ("smallest", 0, "1 or more"),
    ("smallest", True, "1 or more"),
    ("recompile_limit", 0, "1 or more, or None for dovetail.config.recompile_limit"),
    ("timeout", 0, "seconds, or None for the backend's own"),
    ("timeout", float("nan"), "seconds, or None for the backend's own"),
    ("cache", None, "True, False or a folder"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_is_wrong_is_reported_where_it_is_given(name: str, value: Any, expected: str) -> None:
    model, gm = Blocks(), GraphModule(nn.Module(), Graph())
    given: dict[str, Any] = {name: value}
    for give in (
        lambda: dovetail.lower(gm, "eager", **given),
        lambda: dovetail.Lower("eager", **given),
        lambda: dovetail.compile(model, backends="eager", **given),
        lambda: backend(gm, (), options={"backends": "eager", **given}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            give()
        assert str(caught.value) == f"{name} {value!r}; give {expected}."


def test_every_option_can_be_given_everywhere_with_the_same_default() -> None:
    options = {f.name: f.default for f in fields(Options)}
    for function, without in (
        (dovetail.lower, set[str]()),
        (dovetail.Lower, set[str]()),
        (dovetail.compile, {"grad"}),
    ):
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items() if n in options}
        assert defaults == {n: v for n, v in options.items() if n not in without}


def test_a_lowered_graph_keeps_no_plan() -> None:
    gm = fused(Blocks().eval(), torch.randn(3, 8))
    (key,) = {r.key for r in dovetail.regions(gm)}
    lowered = dovetail.lower(gm, [], plan={key: "eager"}, cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {"eager"}
    assert lowered.meta["dovetail.lowering"].options.plan is None
