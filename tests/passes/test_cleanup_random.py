"""Cleanup on random programs with writes, draws and acts, and proof that a careless one would be caught."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import dovetail
from dovetail.ir.effects import PURE
from dovetail.passes import cleanup
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.graph_equality import same_graph
from tests.fuzz.generate import FLAVOURS, draw_program
from tests.fuzz.observe import Snapshot, difference, observe
from tests.fuzz.plan import carry_out, draw_case
from tests.fuzz.program import NotAProgram, build, make_inputs
from tests.fuzz.properties import identity
from tests.fuzz.soundness import watch

PROGRAMS = {
    "pure": 120,
    "memory": 150,
    "world": 120,
    "modules": 80,
    "sizes": 50,
    "everything": 80,
    "traced": 15,
}


def examine(seed: int, flavour: str, counts: Counter[str]) -> str:
    """What can be seen of cleaning up a random program, empty if nothing can."""
    try:
        program = draw_program(Random(seed), FLAVOURS[flavour])
        gm = build(program)
    except NotAProgram:
        return ""
    state, inputs = Snapshot(gm), make_inputs(program)
    gradients = program.grads or any(t.requires_grad for t in state.tensors.values())
    expected = observe(gm, state, inputs, runs=2, gradients=gradients)
    if expected[-1].error:
        return ""
    before = identity(gm)
    new = Cleanup()(gm)
    assert identity(gm) == before, "the input graph was edited"
    counts["programs"] += 1
    counts["smaller"] += len(new.graph.nodes) < len(gm.graph.nodes)
    observed = observe(new, state, inputs, runs=2, gradients=gradients)
    which, words = difference(expected, observed, gradients=gradients)
    if which:
        return f"{which}: {words}\n{dovetail.text(gm)}\n{dovetail.text(new)}"
    dovetail.check(new)
    assert list(new.state_dict()) == list(gm.state_dict())
    assert same_graph(Cleanup()(new), new), dovetail.diff(new, Cleanup()(new))
    watch(new, state, inputs)  # what is said of memory is still true
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavour", PROGRAMS)
def test_nothing_can_be_seen_of_it(flavour: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(PROGRAMS[flavour]):
        mismatch = examine(seed, flavour, counts)
        assert not mismatch, f"seed {seed}: {mismatch}"
    assert counts["smaller"] > PROGRAMS[flavour] // 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavour", ["pure", "memory", "world", "nested"])
def test_nothing_can_be_seen_of_it_in_graphs_with_regions(flavour: str) -> None:
    smaller = 0
    for seed in range(60):
        try:
            case, gm = draw_case(Random(seed), FLAVOURS[flavour])
        except NotAProgram:
            continue
        for stage in case.stages:
            with contextlib.suppress(dovetail.DovetailError):
                gm = carry_out(gm, stage)
        state, inputs = Snapshot(gm), make_inputs(case.program)
        expected = observe(gm, state, inputs, runs=2)
        if expected[-1].error or not dovetail.regions(gm):
            continue
        new = Cleanup()(gm)
        dovetail.check(new)
        smaller += len(new.graph.nodes) < len(gm.graph.nodes)
        assert difference(expected, observe(new, state, inputs, runs=2)) == ("", ""), dovetail.text(gm)
        assert same_graph(Cleanup()(new), new)
        opened = dovetail.inline(new)
        dovetail.check(opened)
        # Cloned as asked, two views do not share memory any more once the clone is all there is.
        mismatch = difference(expected, observe(opened, state, inputs, runs=2), aliasing=False)
        assert mismatch == ("", ""), dovetail.text(gm)
    assert smaller > 10


# Mistakes planted into the pass, each into the function that would have it.


def _drops_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(index: Any) -> list[bool]:
        kept = [node.op in ("placeholder", "output") for node in index.nodes]
        for i in range(len(index) - 1, -1, -1):
            for j in index.data[i] if kept[i] else ():
                kept[j] = True
        return kept

    monkeypatch.setattr(cleanup, "_live", live)


def _shares_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup._ValueNumbering, "_may_share", lambda *_: True)


def _ignores_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cleanup._ValueNumbering._key

    def blind(self: Any, i: int, node: Any) -> Any:
        self.effects, self.written = {i: PURE}, set[int]()
        return key(self, i, node)

    monkeypatch.setattr(cleanup._ValueNumbering, "_key", blind)


def _takes_any_view_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(self: Any, i: int, node: Any) -> Any:
        names = {"view", "reshape", "transpose", "contiguous", "clone", "alias"}
        fits = node.op == "call_function" and cleanup.base_name(node) in names
        return self.env[node.args[0]] if fits else None

    monkeypatch.setattr(cleanup._ValueNumbering, "_unchanged", unchanged)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mistake", "flavour"),
    [
        (_drops_anything, "world"),
        (_shares_anything, "pure"),
        (_ignores_effects, "world"),
        (_takes_any_view_for_none, "pure"),
    ],
)
def test_a_careless_one_is_caught(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None], flavour: str
) -> None:
    mistake(monkeypatch)
    counts: Counter[str] = Counter()
    assert any(_caught(seed, flavour, counts) for seed in range(300))


def _caught(seed: int, flavour: str, counts: Counter[str]) -> bool:
    try:
        return bool(examine(seed, flavour, counts))
    except Exception:
        return True
