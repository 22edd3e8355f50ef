"""What speaks against a region by itself: limits, and how it would nest."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.fusion.figures import Figures
from dovetail.graph.module import attribute
from dovetail.outlining.outline import DEEPEST
from dovetail.outlining.record import call_of, clone_of, walk
from dovetail.outlining.requests import Draft, is_projection
from dovetail.rules.scene import Scene


def over_limits(scene: Scene, figures: Figures, draft: Draft) -> str:
    """Which limit a settled draft breaks, in words; empty if it keeps to all."""
    limits, index = scene.limits, scene.index
    if limits.unlimited:
        return ""
    if limits.nodes is not None:
        count = _originals(scene, draft)
        if count > limits.nodes:
            return too_many(count, limits.nodes)
    if limits.outputs is not None and len(draft.outputs) > limits.outputs:
        return f"it returns {len(draft.outputs)} values, and the limit is {limits.outputs}"
    inside = draft.members | draft.clones
    operands = {j for i in inside for j in index.data[i] if j not in inside}
    if limits.operands is not None and len(operands) > limits.operands:
        return f"it reads {len(operands)} values, and the limit is {limits.operands}"
    if limits.bytes is not None:
        ends = [*sorted(operands), *draft.outputs]
        unknown = next((i for i in ends if not figures.known(i)), None)
        if unknown is not None:
            name = index.nodes[unknown].name
            return f"the size of '{name}' is not known, so the limit on bytes could not be kept"
        total = sum(figures.bytes(i) for i in ends)
        if total > limits.bytes:
            return f"it reads and returns {total} bytes, and the limit is {limits.bytes}"
    return ""


def too_many(count: int, most: int) -> str:
    return f"it computes {count} operations, and the limit is {most}"


def _originals(scene: Scene, draft: Draft) -> int:
    """How many operations it computes, counted as `Region.nodes` lists them."""
    calls, nodes = scene.calls, scene.nodes
    inner = [i for i in draft.inside if i in calls] if calls else []
    if not inner:
        return len(draft.members) + len(draft.clones)
    names = {clone_of(nodes[i]) or nodes[i].name for i in draft.inside if i not in calls}
    for i in inner:
        names.update(m.original for m in walk(calls[i]) if call_of(m.meta) is None)
    return len(names)


def nesting_obstacle(scene: Scene, draft: Draft, operations: int) -> str:
    """Why regions cannot be taken in as a draft does, empty if they can. `operations` is how many it has in all."""
    calls, kind = scene.calls, draft.identity.kind
    inner = [i for i in draft.inside if i in calls]
    if any(calls[i].depth >= DEEPEST for i in inner):
        return f"it would nest more than {DEEPEST} deep"
    for i in draft.outputs:
        if i in calls:
            name = scene.nodes[i].name
            return f"the results of '{name}' are used as one, so they cannot leave a region"
    if len(inner) == operations == 1 and kind in _wrapped_kinds(scene.gm, scene.nodes[inner[0]]):
        return f"it is a region of kind '{kind}' already"
    return ""


def _wrapped_kinds(root: nn.Module, node: Node) -> set[str]:
    """The kinds of a call and of what it does nothing but wrap."""
    kinds: set[str] = set()
    call = call_of(node.meta)
    while call is not None:
        kinds.add(call.identity.kind)
        body = attribute(root, cast("str", node.target))
        if not isinstance(body, GraphModule):
            break
        inside = [
            n for n in body.graph.nodes if n.op not in ("placeholder", "output") and not is_projection(n)
        ]
        if len(inside) != 1:
            break
        root, node = body, inside[0]
        call = call_of(node.meta)
    return kinds
