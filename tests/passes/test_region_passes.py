"""The passes that are a function with its options: Fuse, Outline and Inline."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx import GraphModule

import dovetail
from dovetail.errors import InvalidArgument, UnknownRegion
from dovetail.fusion.fuse import fuse
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.pass_manager import Pipeline, Repeat
from dovetail.passes.region_passes import Fuse, Inline, Outline
from dovetail.rules.rule import Limits
from dovetail.rules.vertical import groups

from .helpers import applied, captured
from .models import QKV, X


@functools.cache
def graph() -> GraphModule:
    return captured(lambda x: (x.sin().cos() + x.exp().tanh()).sum(0), torch.randn(2, 3))


Y = torch.linspace(-1, 1, 6).reshape(2, 3)


# Fuse


def test_fuse_does_what_the_function_does() -> None:
    gm = graph()
    new = applied(Fuse(groups()), gm, Y, tolerance=0)
    assert dovetail.text(new) == dovetail.text(fuse(gm, groups()))
    assert len(dovetail.regions(Fuse(groups(), fuel=0)(gm))) == 0
    assert all(len(r.nodes) <= 2 for r in dovetail.regions(Fuse(groups(), limits=Limits(nodes=2))(gm)))


def test_fuse_is_a_value() -> None:
    assert Fuse(groups()) == Fuse([groups()])
    assert Fuse(groups()) != Fuse(groups(), fuel=1)
    one = Fuse(groups(), never=["sin"], priorities={"groups": 3})
    assert one == Fuse(groups(), never=("sin",), priorities={"groups": 3})
    assert hash(one) == hash(Fuse(groups(), never=("sin",), priorities={"groups": 3}))
    assert repr(one) == "Fuse(rules=RuleSet(groups), never=('sin',), priorities={'groups': 3})"


@pytest.mark.parametrize(
    "options", [{"rounds": -1}, {"fuel": 1.5}, {"limits": 3}, {"priorities": {"other": 1}}, {"cost": 3}]
)
def test_bad_options_are_refused_when_the_pass_is_created(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Fuse(groups(), **options)  # type: ignore[arg-type]


def test_fusing_again_changes_nothing_and_is_recorded_so() -> None:
    pipe = Pipeline([Fuse(groups()), Fuse(groups()), Repeat(Inline(), Fuse(groups()))])
    run = pipe.trace(graph(), check=True)
    assert [step.changed for step in run.steps[:2]] == [True, False]
    assert run.steps[0].regions[1] == len(dovetail.regions(run.graph))
    assert [step.place for step in run.steps[2:]] == ["3.1 round 1", "3.2 round 1"]  # there and back


def test_rounds_with_another_pass_in_between() -> None:
    gm = captured(QKV(), X)
    new = Pipeline([MergeParallel(), Fuse(groups()), Inline(), Fuse(groups())])(gm, check=True)
    assert dovetail.regions(new)
    torch.testing.assert_close(new(X), gm(X))


# Outline


def test_outline_by_request() -> None:
    pair = dovetail.Request(["sin", "cos"], "pair")
    new = Outline(pair, [dovetail.Request(["exp", "tanh"], "other")])(graph())
    assert [r.kind for r in dovetail.regions(new)] == ["pair", "other"]
    assert Outline(pair) == Outline([dovetail.Request(("sin", "cos"), "pair")])
    assert repr(Outline(pair)).startswith("Outline(requests=(Request(nodes=('sin', 'cos'), kind='pair'")


def test_outline_wants_requests_by_name() -> None:
    node = next(n for n in graph().graph.nodes if n.name == "sin")
    with pytest.raises(InvalidArgument, match="lists nodes of one graph; give their names"):
        Outline(dovetail.Request([node], "one"))
    for wrong in ("sin", 3, []):
        with pytest.raises(InvalidArgument, match="Outline"):
            Outline(wrong)  # type: ignore[arg-type]


# Inline


def test_inline_opens_what_it_is_asked_to() -> None:
    gm = graph()
    requests = [dovetail.Request(["sin", "cos"], "pair"), dovetail.Request(["exp", "tanh"], "other")]
    regions = Outline(*requests)(gm)
    assert dovetail.text(Inline()(regions)) == dovetail.text(gm)
    assert [r.kind for r in dovetail.regions(Inline(kind="pair")(regions))] == ["other"]
    assert [r.kind for r in dovetail.regions(Inline("other_0")(regions))] == ["pair"]
    nested = dovetail.outline(regions, ["pair_0", "add"], kind="outer")
    assert [r.kind for r in dovetail.regions(Inline(depth=1)(nested), nested=True)] == ["pair"]
    assert [r.kind for r in dovetail.regions(Inline(kind="pair")(nested), nested=True)] == ["other", "outer"]


def test_inline_has_nothing_to_do_or_names_what_is_missing() -> None:
    gm = graph()
    assert Inline()(gm) is gm
    assert Inline(kind="pair")(gm) is gm
    with pytest.raises(UnknownRegion, match="no region named 'pair_0'"):
        Inline("pair_0")(gm)
    assert Inline() != Inline(depth=1)
    assert repr(Inline(kind="pair")) == "Inline(kind='pair')"
