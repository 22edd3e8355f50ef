"""Passes and pipelines as values, what is recorded of them, and what happens to one that breaks the rules."""

from __future__ import annotations

import copy
import functools
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

import dovetail
from dovetail.errors import InvalidArgument, InvalidGraph, PassError
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.pass_manager import Pass, Pipeline, Repeat

from .helpers import Nothing, Rename, aten, called, captured, copied

RELU, TANH, SIN, COS = aten.relu.default, aten.tanh.default, aten.sin.default, aten.cos.default


@functools.cache  # passes never edit it
def graph() -> GraphModule:
    return captured(lambda x: torch.relu(x).sin(), torch.randn(2, 3))


# Values


def test_passes_and_pipelines_print_compare_and_hash_by_value() -> None:
    pipe = Pipeline([Cleanup(), Repeat(MergeParallel(min_branches=3), most=2), Pipeline([Nothing()])])
    same = Pipeline((Cleanup(), Repeat([MergeParallel(3)], most=2), Pipeline([Nothing()])))
    assert pipe == same
    assert hash(pipe) == hash(same)
    assert pipe != Pipeline([Cleanup(), Repeat(MergeParallel(min_branches=2), most=2), Pipeline([Nothing()])])
    assert pipe != Pipeline([*pipe][::-1])
    assert repr(pipe) == (
        "Pipeline([Cleanup(), Repeat(MergeParallel(min_branches=3), most=2), Pipeline([Nothing()])])"
    )
    assert len({pipe, same}) == 1
    assert [p.name for p in pipe] == ["Cleanup", "Repeat", "Pipeline"]


def test_a_pipeline_is_taken_apart_and_put_together() -> None:
    pipe = Pipeline([Cleanup(), MergeParallel()])
    assert replace(pipe, passes=pipe.passes[:1]) == Pipeline([Cleanup()])
    assert copy.deepcopy(pipe) == pipe
    with pytest.raises(FrozenInstanceError):
        pipe.passes = ()  # type: ignore[misc]


def test_options_that_are_functions_are_shown_by_name() -> None:
    assert repr(MergeParallel()) == "MergeParallel()"
    assert repr(MergeParallel(guard=None)) == "MergeParallel(guard=None)"
    shown = repr(MergeParallel(guard=_guard))
    assert shown.endswith("test_pass_manager._guard)")
    assert "0x" not in shown


def _guard(branches: Any) -> None:
    return None


# Running


def test_a_pipeline_runs_its_passes_in_order() -> None:
    gm = graph()
    before = dovetail.text(gm)
    pipe = Pipeline([Rename(RELU, TANH), Pipeline([Rename(TANH, COS)]), Rename(SIN, RELU)])
    assert called(pipe(gm)) == ["cos", "relu"]
    assert dovetail.text(gm) == before
    assert called(Pipeline([Rename(TANH, COS), Rename(RELU, TANH)])(gm)) == ["tanh", "sin"]
    assert Pipeline([])(gm) is gm


def test_a_run_records_each_pass() -> None:
    pipe = Pipeline([Rename(RELU, TANH), Repeat(Nothing(), Rename(TANH, COS))])
    run = pipe.trace(graph(), explain=True)
    assert [(s.number, s.place, s.name, s.changed) for s in run.steps] == [
        (1, "1", "Rename", True),
        (2, "2.1 round 1", "Nothing", False),
        (3, "2.2 round 1", "Rename", True),
        (4, "2.1 round 2", "Nothing", False),
        (5, "2.2 round 2", "Rename", False),
    ]
    assert all(s.nodes == (4, 4) and s.regions == (0, 0) and s.seconds >= 0 for s in run.steps)
    assert run.changed
    assert [str(f) for f in run.steps[0].findings] == ["relu: renamed"]
    lines = str(run).splitlines()
    assert lines[0].split() == ["place", "pass", "nodes", "regions", "time"]
    assert len(lines) == 6
    assert lines[2].endswith("unchanged")
    assert "->" not in lines[1]


def test_counts_of_nodes_and_regions_are_recorded() -> None:
    @dataclass(frozen=True)
    class Region(Pass):
        def run(self, gm: GraphModule) -> GraphModule:
            return dovetail.outline(gm, ["relu", "sin"], kind="pair")

    step = Pipeline([Region()]).trace(graph()).steps[0]
    assert step.nodes == (4, 4)  # two operations become a call and its result
    assert step.regions == (0, 1)
    assert step.changed


def test_steps_are_dumped_to_a_folder(tmp_path: Path) -> None:
    gm = graph()
    folder = tmp_path / "deep" / "down"
    new = Pipeline([Rename(RELU, TANH), Nothing()])(gm, dump=folder)
    assert sorted(p.name for p in folder.iterdir()) == ["000_input.txt", "001_Rename.txt", "002_Nothing.txt"]
    assert (folder / "000_input.txt").read_text() == dovetail.text(gm)
    assert (folder / "002_Nothing.txt").read_text() == dovetail.text(new)


def test_a_dump_takes_the_place_of_an_earlier_one_and_of_nothing_else(tmp_path: Path) -> None:
    gm = graph()
    Pipeline([Nothing(), Nothing()])(gm, dump=tmp_path)
    (tmp_path / "003_notes.txt").write_text("mine")
    (tmp_path / "notes.md").write_text("graph: mine too")
    Pipeline([Rename(RELU, TANH)])(gm, dump=str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "000_input.txt",
        "001_Rename.txt",
        "003_notes.txt",
        "notes.md",
    ]


@pytest.mark.parametrize("where", ["file", "file/below", 3])
def test_a_folder_that_cannot_be_one_is_reported_before_anything_runs(tmp_path: Path, where: Any) -> None:
    (tmp_path / "file").write_text("taken")
    ran: list[str] = []

    @dataclass(frozen=True)
    class Notes(Pass):
        def run(self, gm: GraphModule) -> GraphModule:
            ran.append("ran")
            return gm

    with pytest.raises(InvalidArgument, match="dump"):
        Pipeline([Notes()])(graph(), dump=tmp_path / where if isinstance(where, str) else where)
    assert not ran


# Repeating


@dataclass(frozen=True)
class Count(Pass):
    """Takes one more relu away each time, until there are none."""

    def run(self, gm: GraphModule) -> GraphModule:
        new = copied(gm)
        for n in new.graph.nodes:
            if n.target is RELU:
                n.target = SIN
                break
        return new


def test_repeat_stops_when_a_round_changes_nothing() -> None:
    gm = captured(lambda x: x.relu().relu().relu(), torch.randn(2))
    run = Pipeline([Repeat(Count())]).trace(gm)
    assert [s.changed for s in run.steps] == [True, True, True, False]
    assert called(run.graph) == ["sin", "sin", "sin"]
    assert called(Repeat(Count(), most=2)(gm)) == ["sin", "sin", "relu"]
    fixed = Repeat(Count(), until_unchanged=False, most=5)
    assert len(Pipeline([fixed]).trace(gm).steps) == 5


def test_a_round_that_undoes_itself_is_the_end() -> None:
    gm = graph()
    there_and_back = Repeat(Rename(RELU, TANH), Rename(TANH, RELU))
    assert called(there_and_back(gm)) == ["relu", "sin"]
    with pytest.raises(PassError, match="still changes the graph after 100 rounds"):
        Repeat(Flip())(gm)


@dataclass(frozen=True)
class Flip(Pass):
    def run(self, gm: GraphModule) -> GraphModule:
        has_relu = any(n.target is RELU for n in gm.graph.nodes)
        return Rename(RELU, TANH).run(gm) if has_relu else Rename(TANH, RELU).run(gm)


# Whoever breaks the rules is named


@dataclass(frozen=True)
class Edits(Pass):
    what: str = "node"

    def run(self, gm: GraphModule) -> GraphModule:
        relu = next(n for n in gm.graph.nodes if n.target is RELU)
        if self.what == "target":
            relu.target = TANH
        elif self.what == "meta":
            relu.meta["val"] = None
        elif self.what == "new":
            with gm.graph.inserting_after(relu):
                gm.graph.call_function(TANH, (relu,))
        elif self.what == "state":
            with torch.no_grad():
                next(gm.parameters()).add_(1)
        elif self.what == "graph meta":
            gm.meta["mine"] = 1
        elif self.what == "what meta holds":
            relu.meta["nn_module_stack"].clear()
        elif self.what == "other memory":
            parameter = next(gm.parameters())
            parameter.data = parameter.data + 1
        elif self.what == "mode":
            gm.train(not gm.training)
        elif self.what == "signature":
            gm.graph.set_codegen(CodeGen())
        return copied(gm)


@pytest.mark.parametrize(
    "what",
    [
        "target",
        "meta",
        "new",
        "state",
        "graph meta",
        "what meta holds",
        "other memory",
        "mode",
        "signature",
    ],
)
def test_a_pass_that_edits_its_input_is_named(what: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    gm = captured(model, torch.randn(2, 3))
    with pytest.raises(PassError, match="pass 'Edits' edited the graph it was given"):
        Edits(what)(gm)
    assert Edits("nothing")(captured(model, torch.randn(2, 3)))


@dataclass(frozen=True)
class Returns(Pass):
    value: object = None

    def run(self, gm: GraphModule) -> GraphModule:
        return self.value  # type: ignore[return-value]


def test_a_pass_that_returns_something_else_is_named() -> None:
    with pytest.raises(PassError, match="pass 'Returns' returned NoneType instead of a GraphModule"):
        Returns()(graph())
    with pytest.raises(InvalidArgument, match="GraphModule"):
        Nothing()(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fails(Pass):
    def run(self, gm: GraphModule) -> GraphModule:
        raise KeyError("what the pass says")


def test_an_error_inside_a_pass_names_which_pass_it_was() -> None:
    gm = graph()
    before = dovetail.text(gm)
    pipe = Pipeline([Nothing(), Repeat(Pipeline([Nothing(), Fails()]))])
    with pytest.raises(KeyError, match="what the pass says") as caught:
        pipe(gm)
    assert caught.value.__notes__ == ["in pass 2.1.2 round 1 of the pipeline: Fails()"]
    assert dovetail.text(gm) == before


@dataclass(frozen=True)
class Breaks(Pass):
    def run(self, gm: GraphModule) -> GraphModule:
        new = copied(gm)
        del next(n for n in new.graph.nodes if n.target is SIN).meta["val"]
        return new


def test_a_pipeline_checks_after_every_pass_when_asked() -> None:
    gm = graph()
    pipe = Pipeline([Nothing(), Breaks(), Nothing()])
    pipe.trace(gm)
    with pytest.raises(
        PassError, match="pass 'Breaks' left a graph that does not hold together: node"
    ) as caught:
        pipe(gm, check=True)
    assert isinstance(caught.value.__cause__, InvalidGraph)
    assert "in pass 2 of the pipeline" in caught.value.__notes__[0]
    with pytest.raises(InvalidGraph):  # no pass is blamed for what it was given
        Pipeline([Nothing()])(Breaks()(gm), check=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline([Cleanup]), "is not a Pass; `Cleanup\\(\\)` makes one"),
        (lambda: Pipeline(Cleanup()), "takes a list of passes"),
        (lambda: Pipeline([lambda gm: gm]), "number 1 is"),
        (lambda: Repeat(Cleanup(), most=0), "most=0"),
        (lambda: Repeat(Cleanup(), until_unchanged=False), "needs `most`"),
        (lambda: Repeat(3), "is not a Pass"),
        (lambda: MergeParallel(min_branches=1), "min_branches 1"),
        (lambda: MergeParallel(guard=3), "guard 3"),
        (lambda: MergeParallel(fuel=-1), "fuel -1"),
    ],
)
def test_bad_options_are_refused_when_a_pass_is_created(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make()
