"""Drawing the steps of schedules: of every kind, in any part, with a few that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import dovetail

from .program import Case, Do, make_inputs
from .scheduling import CHECKS, EQUALS, FINDS, Play
from .units import draw_model, given, known_classes, maker


def draw_schedule(rng: Random, lengths: tuple[int, ...]) -> Case:
    """A model and the steps of a schedule of it."""
    case = draw_model(rng)
    model = maker(case)()
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    names = [unit.name for unit in case.units]
    play = Play(model, *given(case, make_inputs(case.program)), known_classes(case))
    stages: list[Do] = []
    for _ in range(_one(rng, lengths)):
        step, is_over = _drawn(rng, play, paths, names)
        stages.append(step)
        if is_over:
            break
    return replace(case, stages=tuple(stages))


def _drawn(rng: Random, play: Play, paths: list[str], names: list[str]) -> tuple[Do, bool]:
    """A step, of those that are refused only now and then one; and whether it is better to stop there."""
    while True:
        step = _draw(rng, paths, names)
        if step.what in CHECKS:
            return step, False
        try:
            play.carry_out(step)
        except dovetail.DovetailError:
            if rng.randrange(8) == 0:
                return step, False
        except Exception:  # the properties will meet it again and report it
            return step, True
        else:
            return step, False


def _one(rng: Random, items: Sequence[Any]) -> Any:
    return items[rng.randrange(len(items))]


def _draw_at(rng: Random, paths: list[str]) -> str:
    way = rng.randrange(10)
    if not paths or way < 3:
        return ""
    if way < 8:
        return str(_one(rng, paths))
    if way == 8:
        atoms = str(_one(rng, paths)).split(".")
        atoms[rng.randrange(len(atoms))] = "*"
        return ".".join(atoms)
    return str(_one(rng, ("**", "*", "**.m*", "p*", "nowhere")))


KINDS = (
    *["fuse"] * 20,
    *["replace"] * 5,
    *["replace_linear"] * 1,
    *["replace_region"] * 2,
    *["replace_module"] * 3,
    *["replace_all"] * 3,
    *["decompose"] * 4,
    *["annotate"] * 2,
    *["checkpoint"] * 3,
    *["lower"] * 2,
    *["undo"] * 3,
    *["build"] * 2,
    *["release"] * 1,
    *["apply"] * 1,
    *["verify"] * 2,
    *["replay"] * 2,
    *["copy"] * 2,
    *["mode"] * 2,
    *["batch"] * 1,
)


def _draw(rng: Random, paths: list[str], names: list[str]) -> Do:
    what, at = _one(rng, KINDS), _draw_at(rng, paths)
    picks = tuple(rng.randrange(6) for _ in range(rng.randrange(4)))
    check = ("check", rng.randrange(2) == 0)
    single = (("single", True),) if rng.randrange(3) == 0 else ()
    if what == "fuse":
        return Do(what, at, _draw_find(rng, names), picks, (*single, *_draw_fusion(rng)))
    if what == "lower":
        return Do(what, at, "regions", picks, (*single, _draw_backend(rng)))
    if what == "replace":
        if rng.randrange(5) == 0:
            return Do(what, at, "relu", picks, (("siblings", True), ("way", 0), check))
        find = _one(rng, [k for k in EQUALS if k != "siblings"])
        return Do(what, at, find, picks, (("way", rng.randrange(3)), check))
    if what == "replace_linear":
        return Do(what, at, "linear", picks, (check,))
    if what in ("replace_region", "replace_module"):
        return Do(what, at, "", picks, (check,))
    if what == "replace_all":
        known = ("Linear", "ReLU", "BatchNorm", "relu", "tanh", *names)
        return Do(what, at, _one(rng, known), (), (check,))
    if what == "decompose":
        find = _one(rng, ("regions", "regions", "", "linear", "softmax", "gelu", "stale"))
        return Do(what, at, find, picks, single)
    if what in ("annotate", "checkpoint"):
        options = (("tile", rng.randrange(3)),) if what == "annotate" else single
        return Do(what, at, _one(rng, ("regions", "regions", "")), picks, options)
    if what == "undo":
        return Do(what, options=(("steps", 1 + rng.randrange(2)),))
    if what == "verify":
        return Do(what, options=(("train", _one(rng, (None, None, True, False))),))
    if what == "apply":
        return Do(what, at)
    if what == "mode":
        return Do(what, options=(("train", rng.randrange(2) == 0),))
    return Do(what)


def _draw_find(rng: Random, names: list[str]) -> str:
    known = [*FINDS, "lambda", "stale", "anything", "every", "relu", "activation", "relu_sum", *names, *names]
    return str(_one(rng, known))


def _draw_backend(rng: Random) -> tuple[str, Any]:
    return "backends", _one(rng, ("eager", "eager", "torchscript"))


def _draw_fusion(rng: Random) -> tuple[tuple[str, Any], ...]:
    options: list[tuple[str, Any]] = []
    if rng.randrange(3) == 0:
        options.append(("kind", _one(rng, ("fused", "npu.pool", "relu_sum"))))
    if rng.randrange(4) == 0:
        options.append(_draw_backend(rng))
    if rng.randrange(4) == 0:
        options.append(("together", True))
    if rng.randrange(6) == 0:
        options.append(("escapes", _one(rng, ("output", "duplicate", "leave", "refuse"))))
    if rng.randrange(8) == 0:
        options.append(("attrs", {"eps": 1e-5}))
    return tuple(options)
