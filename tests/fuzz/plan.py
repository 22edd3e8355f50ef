"""Drawing what to outline: sets of nodes of every shape, policies, several regions at once, stage after stage."""

from __future__ import annotations

from random import Random
from typing import Any

from torch.fx import GraphModule, Node

import dovetail

from .program import Asked, Case, Program, Stage, build

POLICIES = ("auto", "output", "duplicate", "leave", "refuse")
KINDS = ("fused", "fused", "pair", "npu.pool", "a_b")
ATTRS: tuple[dict[str, Any] | None, ...] = (None, None, {"eps": 1e-5}, {"axes": (0, 1), "name": "ä"})


def draw_case(rng: Random, program: Program) -> tuple[Case, GraphModule]:
    """A program with one to three stages, and the graph it was built as.

    What comes in a stage depends on the graph that the last one left.
    """
    gm = original = build(program)
    stages: list[Stage] = []
    for _ in range((1, 1, 2, 3)[rng.randrange(4)]):
        stage = _draw_stage(rng, gm)
        if not stage:
            break
        stages.append(stage)
        try:
            gm = outline(gm, stage)
        except dovetail.DovetailError:
            continue
        except Exception:  # the properties will meet it again and report it
            break
    case = Case(program, tuple(stages), thorough=rng.randrange(4) == 3, salt=rng.randrange(1 << 16))
    return case, original


def outline(gm: GraphModule, stage: Stage) -> GraphModule:
    """Carry out one stage: the plain form for one request, the list form for several."""
    by_name = {node.name: node for node in gm.graph.nodes}

    def listed(asked: Asked) -> list[Node | str]:
        return [by_name.get(n, n) if asked.by_node else n for n in asked.nodes]

    if len(stage) == 1:
        one = stage[0]
        return dovetail.outline(
            gm, listed(one), kind=one.kind, version=one.version, attrs=one.attrs, escapes=one.escapes
        )
    return dovetail.outline(
        gm, [dovetail.Request(listed(a), a.kind, a.version, a.attrs, a.escapes) for a in stage]
    )


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
    """A window of the listing, a connected set, a window with holes, or any set."""
    way = rng.randrange(8)
    size = 1 + rng.randrange(min(8, len(nodes)))
    at = rng.randrange(len(nodes))
    if way <= 2:
        return nodes[at : at + size]
    if way <= 5:
        return _grow(rng, nodes, nodes[at], size)
    if way == 6:
        window = nodes[at : at + 2 * size]
        return [n for n in window if rng.randrange(3)] or window[:1]
    return [nodes[rng.randrange(len(nodes))] for _ in range(size)]


def _grow(rng: Random, nodes: list[Node], seed: Node, size: int) -> list[Node]:
    allowed = set(nodes)
    chosen = [seed]
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
        escapes = {n: POLICIES[rng.randrange(5)] for n in dict.fromkeys(names) if rng.randrange(2)}
    elif way >= 2:
        escapes = POLICIES[rng.randrange(5)]
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
