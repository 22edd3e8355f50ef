"""What the writers of ONNX and StableHLO share: calls of regions in a graph or a body, and unique names."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dovetail.outlining.region import RegionCall, call_of


def calls_in(owner: GraphModule, caller: RegionCall | None = None) -> dict[Node, RegionCall | None]:
    """Return the operations of a graph in order, each with the region that it calls, if any.

    A body is shared by many calls: the regions inside it are recorded in its `caller`, not in its own nodes.
    """
    nodes = [n for n in owner.graph.nodes if n.op not in ("placeholder", "output")]
    metas = [n.meta for n in nodes] if caller is None else [m.meta for m in caller.members]
    return {node: call_of(meta) for node, meta in zip(nodes, metas, strict=True)}


def unique_name(stem: str, used: dict[str, int]) -> str:
    """Return `stem`, or `stem` with the first free number, and record it in `used`."""
    name = stem
    while name in used:
        used[stem] += 1
        name = f"{stem}_{used[stem]}"
    used[name] = 0
    return name
