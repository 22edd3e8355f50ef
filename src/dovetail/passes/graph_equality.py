"""Graph equality: whether two graphs are the same, and whether a graph was edited in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from dovetail.ir.effects import declared_targets
from dovetail.ir.graph_module import attribute
from dovetail.ir.meta_keys import REGION
from dovetail.ir.nodes import SYMBOLIC, storage_key, value_signature
from dovetail.ir.schema import same_size
from dovetail.outlining.region import call_of


def same_graph(a: GraphModule, b: GraphModule) -> bool:
    """Whether two graphs have the same nodes, meta, bodies and state, in the same order.

    Names of nodes, attribute names of bodies and the graph's own meta are not compared: a pass that only renames or
    records something changes nothing. Linear in the number of nodes.
    """
    if a is b:
        return True
    if _state(a) != _state(b) or declared_targets(a) != declared_targets(b):
        return False
    compared: set[tuple[int, int]] = set()
    pairs: list[tuple[GraphModule, GraphModule]] = [(a, b)]
    while pairs:
        left, right = pairs.pop()
        if left is right or (id(left), id(right)) in compared:
            continue
        compared.add((id(left), id(right)))
        if not _same_nodes(left, right, pairs):
            return False
    return True


def _state(gm: GraphModule) -> dict[str, int]:
    parameters = gm.named_parameters(remove_duplicate=False)
    buffers = gm.named_buffers(remove_duplicate=False)
    return {name: id(tensor) for named in (parameters, buffers) for name, tensor in named}


def _same_nodes(a: GraphModule, b: GraphModule, pairs: list[tuple[GraphModule, GraphModule]]) -> bool:
    """Whether two node lists agree; bodies still to be compared are added to `pairs`."""
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    image: dict[Node, Node] = {}
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
        if x.op != y.op or not _same_callee(a, b, x, y, pairs):
            return False
        if not _same_value(x.args, y.args, image) or not _same_value(x.kwargs, y.kwargs, image):
            return False
        if not _same_meta(x.meta, y.meta):
            return False
        image[x] = y
    return True


def _same_callee(
    a: GraphModule, b: GraphModule, x: Node, y: Node, pairs: list[tuple[GraphModule, GraphModule]]
) -> bool:
    if x.op not in ("get_attr", "call_module"):
        return x.target == y.target
    left, right = attribute(a, cast("str", x.target)), attribute(b, cast("str", y.target))
    if isinstance(left, GraphModule) and isinstance(right, GraphModule):
        pairs.append((left, right))
        return True
    return left is right and x.target == y.target


def _same_meta(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(_same_entry(key, value, b[key]) for key, value in a.items() if value is not b[key])


def _same_entry(key: str, a: Any, b: Any) -> bool:
    if key == REGION:
        # Ranks and names of members are history; identity, backend and body are compared.
        one, other = call_of({REGION: a}), call_of({REGION: b})
        if one is None or other is None:
            return False
        return one.identity == other.identity and one.backend == other.backend
    return _same_value(a, b)


def _same_value(a: Any, b: Any, image: Mapping[Node, Node] | None = None) -> bool:
    """Whether two values are equal; with `image`, nodes of the first are compared by their images."""
    if image is not None and isinstance(a, Node):
        return image.get(a) is b
    if a is b and image is None:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return value_signature(a) == value_signature(b)
    if isinstance(a, float):
        return repr(a) == repr(b)  # NaN is NaN, and -0.0 is not 0.0
    if isinstance(a, SYMBOLIC):
        return same_size(a, b) if isinstance(a, torch.SymInt) else str(a) == str(b)
    if isinstance(a, slice):
        return _same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step), image)
    if isinstance(a, (tuple, list)):
        left, right = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        return len(left) == len(right) and all(
            _same_value(x, y, image) for x, y in zip(left, right, strict=True)
        )
    if isinstance(a, dict):
        one, other = cast("dict[Any, Any]", a), cast("dict[Any, Any]", b)
        return one.keys() == other.keys() and all(_same_value(one[k], other[k], image) for k in one)
    try:
        return a is b or bool(a == b)
    except Exception:  # values that other tools store in meta may not support comparison
        return False


class Snapshot:
    """The identity of a graph at one moment: its nodes, what they refer to, and the state it owns."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._facts = list(_facts(gm))

    def edited(self) -> str | None:
        """Return what was edited since, in a few words; None if nothing was."""
        now = _facts(self._gm)
        for old in self._facts:
            new = next(now, None)
            if new is None or len(old) != len(new) or not all(map(_is_same, old, new)):
                return f"node '{old[1]}'" if isinstance(old[0], Node) else str(old[0])
        return None if next(now, None) is None else "something new in it"


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, str)) and a == b)


def _facts(gm: GraphModule) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each thing that a pass must not edit, equal item by item while it is not edited."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                values = node.meta.values()
                # Values are compared by identity, containers by their size as well.
                sizes = [len(cast("Any", v)) for v in values if isinstance(v, (list, dict))]
                yield (node, node.name, node.op, node.target, node.args, node.kwargs, *values, *sizes)
            yield ("its signature", module.graph._codegen)
            yield ("its meta", *module.meta.values())
        yield ("its mode", module.training)
        yield ("a sub-module", *module._modules.values())
        unregistered = [v for v in module.__dict__.values() if isinstance(v, torch.Tensor)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *unregistered):
            if tensor is not None:
                # Every write in place raises the version, but replacing the storage does not.
                version = 0 if tensor.is_inference() else tensor._version
                yield ("its state", tensor, version, storage_key(tensor))
