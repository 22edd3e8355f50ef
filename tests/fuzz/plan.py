"""Drawing what to outline: sets of nodes of every shape, policies, several regions at once, stage after stage."""

from __future__ import annotations

from random import Random
from typing import Any

from torch.fx import GraphModule, Node

import dovetail

from .capture_drawing import draw_captured
from .fusing import draw_fusion, fused
from .generate import Flavour, draw_program
from .program import Asked, Case, Do, Fused, Opened, Stage, build
from .schedule_drawing import draw_schedule

POLICIES = ("auto", "output", "duplicate", "duplicate", "leave", "refuse")
KINDS = ("fused", "fused", "pair", "npu.pool", "a_b")
ATTRS: tuple[dict[str, Any] | None, ...] = (None, None, {"eps": 1e-5}, {"axes": (0, 1), "name": "ä"})


def draw_case(rng: Random, flavour: Flavour) -> tuple[Case, GraphModule | None]:
    """A program with what is done to it stage by stage, and the graph it was built as, if it was.

    What comes in a stage depends on the graph that the last one left.
    """
    if flavour.captures:
        return draw_captured(rng), None
    if flavour.schedules:
        return draw_schedule(rng, flavour.stages), None
    program = draw_program(rng, flavour)
    gm = original = build(program)
    stages: list[Stage] = []
    for _ in range(flavour.stages[rng.randrange(len(flavour.stages))]):
        if flavour.fuses and rng.randrange(3):
            stage = draw_fusion(rng)
        else:
            stage = _draw_opening(rng, gm) if stages and rng.randrange(4) == 3 else _draw_stage(rng, gm)
        if not stage:
            break
        stages.append(stage)
        try:
            gm = carry_out(gm, stage)
        except dovetail.DovetailError:
            continue
        except Exception:  # the properties will meet it again and report it
            break
    thorough = rng.randrange(flavour.thorough) == flavour.thorough - 1
    return Case(program, tuple(stages), thorough, salt=rng.randrange(1 << 16)), original


def carry_out(gm: GraphModule, stage: Stage) -> GraphModule:
    """Outline, inline or fuse: the plain form for one request, the list form for several."""
    if isinstance(stage, Opened):
        return dovetail.inline(gm, **{stage.how: stage.what})
    if isinstance(stage, Fused):
        return fused(gm, stage)
    if isinstance(stage, Do):
        raise TypeError("a step of a schedule is done on a model, not on a graph")
    by_name = {node.name: node for node in gm.graph.nodes}

    def members(asked: Asked) -> list[Node | str]:
        return [by_name.get(n, n) if asked.by_node else n for n in asked.nodes]

    if len(stage) == 1:
        one = stage[0]
        return dovetail.outline(
            gm, members(one), kind=one.kind, version=one.version, attrs=one.attrs, escapes=one.escapes
        )
    return dovetail.outline(
        gm, [dovetail.Request(members(a), a.kind, a.version, a.attrs, a.escapes) for a in stage]
    )


def _draw_opening(rng: Random, gm: GraphModule) -> Stage:
    known = dovetail.regions(gm, nested=True)
    if not known:
        return ()
    one = known[rng.randrange(len(known))]
    return (Opened("name", one.name), Opened("kind", one.kind), Opened("depth", 1))[rng.randrange(3)]


def _draw_stage(rng: Random, gm: GraphModule) -> Stage:
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    if not nodes:
        return ()
    count = (1, 1, 1, 2, 3)[rng.randrange(5)]
    free = list(nodes)
    asked: list[Asked] = []
    for _ in range(count):
        chosen = _draw_nodes(rng, free if free and rng.randrange(12) else nodes)
        asked.append(_draw_request(rng, chosen, gm))
        taken = set(chosen)
        free = [n for n in free if n not in taken]
        if not free:
            break
    return tuple(asked)


def _draw_nodes(rng: Random, nodes: list[Node]) -> list[Node]:
    """A window of the listing, a connected set, a window with holes, any set, or around something of interest."""
    way = rng.randrange(11)
    size = 1 + rng.randrange(min(8, len(nodes)))
    at = rng.randrange(len(nodes))
    if way <= 2:
        return nodes[at : at + size]
    if way <= 5:
        return _grow(rng, nodes, [nodes[at]], size)
    if way == 6:
        window = nodes[at : at + 2 * size]
        return [n for n in window if rng.randrange(3)] or window[:1]
    if way == 7:
        return [nodes[rng.randrange(len(nodes))] for _ in range(size)]
    if way == 8:
        calls = [n for n in nodes if "dovetail.region" in n.meta] or nodes
        return _grow(rng, nodes, [calls[rng.randrange(len(calls))]], size)
    return _grow(rng, nodes, _shared(rng, nodes), rng.randrange(4))


def _shared(rng: Random, nodes: list[Node]) -> list[Node]:
    """A value with several users, and one of these: it is needed both inside and outside."""
    allowed = set(nodes)
    pairs = [(n, u) for n in nodes if len(n.users) > 1 for u in n.users if u in allowed]
    return list(pairs[rng.randrange(len(pairs))]) if pairs else nodes[:1]


def _grow(rng: Random, nodes: list[Node], seeds: list[Node], size: int) -> list[Node]:
    """Neighbours of what is chosen, one after the other."""
    allowed = set(nodes)
    chosen = list(seeds)
    for _ in range(size):
        at = chosen[rng.randrange(len(chosen))]
        around = [n for n in (*at.all_input_nodes, *at.users) if n in allowed and n not in chosen]
        if around:
            chosen.append(around[rng.randrange(len(around))])
    return chosen


def _draw_request(rng: Random, chosen: list[Node], gm: GraphModule) -> Asked:
    names = [n.name for n in chosen]
    if rng.randrange(3) == 0:
        names.reverse()
        names.append(names[rng.randrange(len(names))])
    if rng.randrange(60) == 59:
        names.append(_wrong_name(rng, gm))
    escapes: str | dict[str, str] = "auto"
    way = rng.randrange(6)
    if way == 5:
        escapes = {
            n: POLICIES[rng.randrange(len(POLICIES))] for n in dict.fromkeys(names) if rng.randrange(2)
        }
    elif way >= 2:
        escapes = POLICIES[rng.randrange(len(POLICIES))]
    return Asked(
        tuple(names),
        kind=KINDS[rng.randrange(len(KINDS))],
        version=1 + (rng.randrange(8) == 7),
        attrs=ATTRS[rng.randrange(len(ATTRS))],
        escapes=escapes,
        by_node=rng.randrange(3) == 2,
    )


def _wrong_name(rng: Random, gm: GraphModule) -> str:
    """Something that is not an operation of the graph."""
    return ("nowhere", next(iter(gm.graph.nodes)).name, gm.graph.output_node().name)[rng.randrange(3)]
