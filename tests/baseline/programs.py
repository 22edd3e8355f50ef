"""Random programs of the fuzzer, and random spellings of what the library knows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

import dovetail
from tests.fuzz.generate import FLAVOURS
from tests.fuzz.plan import carry_out, draw_case
from tests.fuzz.program import Case, Do, NotAProgram, make_inputs
from tests.fuzz.references import families
from tests.fuzz.scheduling import CHECKS, Play
from tests.fuzz.units import given, known_classes, maker

from .dump import describe, regions, section, tried, whole

Entries = Iterator[tuple[str, str]]
PROGRAMS = 500
SPELLINGS = 4
"""Of each rule of the library."""

_SHARES = [
    f.name for i in range(max(f.share for f in FLAVOURS.values())) for f in FLAVOURS.values() if i < f.share
]


def program_entries(number: int) -> Entries:
    """What the stages of a case make of its graph, and what capture and the default rules do."""
    flavour = FLAVOURS[_SHARES[number % len(_SHARES)]]
    try:
        case, gm = draw_case(Random(f"baseline/{number}"), flavour)
    except NotAProgram:  # in words of torch, which lists sets in any order
        yield "", "not a program\n"
        return
    text = section("flavour", flavour.name)
    if gm is not None:
        text += _staged(case, gm) + section("fused as it is", tried(lambda: whole(dovetail.fuse(gm))))
        text += _captured(gm, tuple(make_inputs(case.program)), {})
    else:
        if case.stages:
            text += _scheduled(case)
        args, kwargs = given(case, make_inputs(case.program))
        text += _captured(maker(case)(), args, kwargs)
    yield "", text


def _captured(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def both() -> str:
        gm = dovetail.capture(model, args, kwargs)
        return section("capture", dovetail.text(gm)) + tried(lambda: whole(dovetail.fuse(gm)))

    return section("captured and fused", tried(both))


def _staged(case: Case, gm: Any) -> str:
    text = section("graph", dovetail.text(gm))
    for number, stage in enumerate(case.stages):
        title = f"stage {number}: {stage}"
        try:
            gm = carry_out(gm, stage)
        except Exception as error:
            text += section(title, describe(error))
        else:
            text += section(title, dovetail.text(gm)) + section("regions", regions(gm))
    return text


def _scheduled(case: Case) -> str:
    args, kwargs = given(case, make_inputs(case.program))
    play = Play(maker(case)(), args, kwargs, known_classes(case))
    text = ""
    for number, do in enumerate(case.stages):
        if not isinstance(do, Do) or do.what in CHECKS:
            continue
        try:
            play.carry_out(do)
            text += section(f"step {number}: {do}", str(play.schedule))
        except Exception as error:
            text += section(f"step {number}: {do}", describe(error))
    history = [repr(entry) for entry in play.schedule.history]
    return text + section("schedule", play.schedule.text()) + section("history", history)


def spelling_entries(rule: str) -> Entries:
    """Spellings of one rule, fused with the whole library."""
    family = families()[rule]
    for number in range(SPELLINGS):
        rng = Random(f"baseline/{rule}/{number}")
        torch.manual_seed(rng.randrange(2**31))
        try:
            spelling = family.draw(rng)
        except RuntimeError as error:  # torch itself does not run it
            yield f"{number}", f"not a program: {describe(error)}\n"
            continue
        tags = " ".join(sorted(spelling.variations))
        yield f"{number}", section("variations", tags) + tried(functools.partial(_fused, spelling))


def _fused(spelling: Any) -> str:
    gm = dovetail.capture(spelling.program, spelling.inputs, dynamic_shapes=spelling.dynamic_shapes)
    return whole(dovetail.fuse(gm))


SUBJECTS: dict[str, Callable[[], Entries]] = {
    f"fuzz/{number:03}": functools.partial(program_entries, number) for number in range(PROGRAMS)
}
SUBJECTS |= {f"spelling/{rule}": functools.partial(spelling_entries, rule) for rule in families()}
