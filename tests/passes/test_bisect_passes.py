"""Bisecting finds the pass that was seeded to break something, and the one fusion of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule

import dovetail
from dovetail.errors import InvalidArgument
from dovetail.passes.bisect_passes import bisect
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.pass_manager import Pass, Pipeline, Repeat
from dovetail.passes.region_passes import Fuse
from dovetail.rules.vertical import groups

from .helpers import Nothing, Rename, aten, captured, copied

RELU, TANH, SIN, COS, ABS = (
    aten.relu.default,
    aten.tanh.default,
    aten.sin.default,
    aten.cos.default,
    aten.abs.default,
)


@functools.cache
def graph() -> GraphModule:
    return captured(lambda x: x.relu().sin(), torch.randn(2, 3))


def targets(gm: GraphModule) -> set[object]:
    return {n.target for n in gm.graph.nodes}


def test_the_culprit_is_identified_in_nested_pipelines() -> None:
    culprit = Rename(RELU, TANH)
    pipe = Pipeline([Rename(SIN, COS), Pipeline([Nothing(), Repeat(culprit)]), Rename(COS, ABS)])
    verdict = bisect(pipe, graph(), lambda gm: TANH not in targets(gm))
    assert not verdict.good
    assert verdict.culprit == culprit
    assert verdict.place == "2.2.1 round 1"
    assert verdict.before is not None
    assert verdict.after is not None
    assert targets(verdict.after) - targets(verdict.before) == {TANH}
    assert str(verdict).startswith("pass 2.2.1 round 1 breaks it: Rename(")


def test_good_after_everything_is_the_verdict() -> None:
    pipe = Pipeline([Rename(RELU, TANH), Nothing()])
    verdict = bisect(pipe, graph(), lambda gm: True)
    assert verdict.good
    assert verdict.culprit is None
    assert str(verdict) == "still good after all of 2 passes (2 evaluations)"


def test_bad_before_anything_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="not good before any pass"):
        bisect(Pipeline([Nothing()]), graph(), lambda gm: False)
    with pytest.raises(InvalidArgument, match="not good before any pass") as caught:
        bisect(Pipeline([Nothing()]), graph(), _raises)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _raises(gm: GraphModule) -> bool:
    raise ZeroDivisionError("seeded")


@dataclass(frozen=True)
class Append(Pass):
    """One more operation at the end."""

    what: object = SIN

    def run(self, gm: GraphModule) -> GraphModule:
        new = copied(gm)
        out = new.graph.output_node()
        (last,) = out.all_input_nodes
        with new.graph.inserting_before(out):
            more = new.graph.call_function(self.what, (last,))  # type: ignore[arg-type]
        more.meta = dict(last.meta)
        out.args = ((more,),)
        return new


def test_evaluations_are_logarithmic_in_the_passes() -> None:
    pipe = Pipeline([Append(TANH if i == 41 else SIN) for i in range(64)])
    verdict = bisect(pipe, graph(), lambda gm: TANH not in targets(gm))
    assert verdict.place == "42"
    assert verdict.evaluations <= 2 + 6


def test_a_graph_that_heals_is_searched_in_order() -> None:
    back_and_forth = Pipeline([Rename(RELU, TANH), Rename(TANH, RELU), Append(), Append(), Append(TANH)])
    verdict = bisect(back_and_forth, graph(), lambda gm: TANH not in targets(gm))
    assert verdict.place in ("1", "5")
    first = bisect(back_and_forth, graph(), lambda gm: TANH not in targets(gm), in_order=True)
    assert first.place == "1"


def test_what_still_good_raises_counts_as_bad_unless_asked() -> None:
    def judge(gm: GraphModule) -> bool:
        if TANH in targets(gm):
            raise ZeroDivisionError("seeded")
        return True

    pipe = Pipeline([Rename(SIN, COS), Rename(RELU, TANH)])
    verdict = bisect(pipe, graph(), judge)
    assert verdict.place == "2"
    assert isinstance(verdict.error, ZeroDivisionError)
    assert "ZeroDivisionError: seeded" in str(verdict)
    with pytest.raises(ZeroDivisionError):
        bisect(pipe, graph(), judge, errors="raise")


@dataclass(frozen=True)
class Fails(Pass):
    def run(self, gm: GraphModule) -> GraphModule:
        raise ZeroDivisionError("seeded")


def test_a_pass_that_raises_is_the_culprit_if_all_before_is_good() -> None:
    pipe = Pipeline([Rename(RELU, TANH), Fails(), Rename(SIN, COS)])
    verdict = bisect(pipe, graph(), lambda gm: True)
    assert verdict.culprit == Fails()
    assert verdict.place == "2"
    assert isinstance(verdict.error, ZeroDivisionError)
    earlier = bisect(pipe, graph(), lambda gm: TANH not in targets(gm))
    assert earlier.culprit == Rename(RELU, TANH)


@functools.cache
def residual() -> GraphModule:
    def blocks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.tanh(x @ w) + x
        return x

    return captured(blocks, torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("first_bad", [0, 5, 11])
def test_fuel_finds_the_first_fusion_that_breaks(first_bad: int) -> None:
    gm = residual()
    fuse = Fuse(groups())
    names = [f"tanh_{first_bad}" if first_bad else "tanh"]
    assert len(dovetail.regions(fuse(gm))) == 12

    def good(graph: GraphModule) -> bool:
        return not any(name in r.nodes for r in dovetail.regions(graph) for name in names)

    verdict = bisect(Pipeline([Cleanup(), fuse]), gm, good)
    assert verdict.culprit == fuse
    assert verdict.place == "2"
    assert verdict.fuel is not None
    assert good(Fuse(groups(), fuel=verdict.fuel - 1)(gm))
    assert not good(Fuse(groups(), fuel=verdict.fuel)(gm))
    assert len(verdict.regions) == 1
    assert verdict.after is not None
    region = next(r for r in dovetail.regions(verdict.after) if r.name == verdict.regions[0])
    assert names[0] in region.nodes
    assert f"its change number {verdict.fuel}" in str(verdict)
    assert f"'{verdict.regions[0]}'" in str(verdict)
    assert verdict.evaluations <= 3 + 8


def test_fuel_that_was_given_is_not_exceeded() -> None:
    fuse = Fuse(groups(), fuel=3)
    verdict = bisect(fuse, residual(), lambda gm: len(dovetail.regions(gm)) < 3)
    assert verdict.fuel == 3
    assert verdict.place == "1"


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgument, match="returned None"):
        bisect(Pipeline([]), graph(), lambda gm: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidArgument, match="errors 'maybe'"):
        bisect(Pipeline([]), graph(), lambda gm: True, errors="maybe")
    with pytest.raises(InvalidArgument, match="a pass or a pipeline"):
        bisect([Nothing()], graph(), lambda gm: True)  # type: ignore[arg-type]


def test_a_judge_that_cannot_be_called_is_refused() -> None:
    gm = dovetail.capture(torch.relu, (torch.randn(3),))
    with pytest.raises(dovetail.InvalidArgument, match="still_good is a int"):
        dovetail.bisect(dovetail.Pipeline([]), gm, 3)  # type: ignore[arg-type]
