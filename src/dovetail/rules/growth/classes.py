"""What kind of work each operation does, as far as fusing is concerned."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail import torch_compat
from dovetail.graph.effects import PURE, Effects
from dovetail.graph.module import Body, attribute
from dovetail.outlining.requests import is_projection
from dovetail.rules.growth import optables
from dovetail.rules.growth.opnames import operation_name, packet
from dovetail.rules.scene import Scene


class OpClass(IntEnum):
    """Kinds of work, from what fuses with most to what fuses with nothing.

    Normalisations and poolings count as reductions: producers may fuse in, nothing fuses behind them. An anchor is a
    product, a convolution or an attention: elementwise operations may follow it, and nothing fuses in front of it.
    """

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    ANCHOR = 4
    OPAQUE = 5

    @property
    def words(self) -> str:
        """The class with its article: "an anchor"."""
        name = self.name.lower()
        if self in (OpClass.REDUCTION, OpClass.ANCHOR):
            return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        return name


def classify(scene: Scene, closed: Sequence[bool] | None = None) -> list[OpClass]:
    """The class of each position. What is no operation is opaque; a part of a tuple is what made the tuple.

    Effects other than drawing at random elementwise make an operation opaque. Where values are not known, shapes
    are taken to agree. With `closed`, the bodies of regions that are are not looked into: those are opaque.
    """
    reader = scene.fact(_classify)
    if not reader.calls:
        return reader.found
    found = list(reader.found)
    for i, body in reader.calls.items():
        if closed is None or not closed[i]:
            found[i] = class_of_body(body)
            for user in scene.nodes[i].users:
                if is_projection(user):
                    found[scene.index.position[user]] = found[i]
    return found


def _classify(scene: Scene) -> _Classes:
    effects = scene.index.dependencies.effects
    reader = _Classes(scene.gm, scene.index.position)
    for i, node in enumerate(scene.nodes):
        reader.add(node, effects.get(i, PURE))
    return reader


class _Classes:
    """Classes of the nodes of one graph, in its order. What depends on the target alone is asked once.

    `calls` has the sub-graphs that are called, by position; they count as opaque here.
    """

    def __init__(self, root: nn.Module, position: Mapping[Node, int]) -> None:
        self.root, self.position = root, position
        self.found: list[OpClass] = []
        self.calls: dict[int, GraphModule] = {}
        self._targets: dict[tuple[str, Any], tuple[OpClass, str]] = {}
        self._sizes: dict[int, tuple[Any, ...] | None] = {}

    def add(self, node: Node, told: Effects) -> None:
        self.found.append(self._of(node, told))

    def _of(self, node: Node, told: Effects) -> OpClass:
        if node.op in ("placeholder", "get_attr", "output"):
            return OpClass.OPAQUE
        if told is not PURE and (told.writes or told.state_written or told.world or told.barrier):
            return OpClass.OPAQUE
        if node.target is operator.getitem and is_projection(node):
            return self.found[self.position[cast("Node", node.args[0])]]
        if node.op == "call_module":
            called = attribute(self.root, cast("str", node.target))
            if isinstance(called, GraphModule):
                self.calls[len(self.found)] = called
                return OpClass.OPAQUE
        key = (node.op, node.target)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = self._of_target(node)
        found, name = known
        if found is OpClass.OPAQUE or (told.random and name not in optables.RANDOM_ELEMENTWISE):
            return OpClass.OPAQUE
        return found if found is OpClass.ANCHOR else self._at(node, found, name)

    def _of_target(self, node: Node) -> tuple[OpClass, str]:
        """The class by what is called, and the name of that."""
        name = operation_name(node, self.root)
        if isinstance(node.target, OpOverload):
            return _of_overload(node.target), name
        return (_of_name(name) if name else OpClass.OPAQUE), name

    def _at(self, node: Node, found: OpClass, name: str) -> OpClass:
        """The class at one call, by its arguments and the shapes."""
        value = node.meta.get("val")
        if value is not None and not isinstance(value, (torch.Tensor, tuple, list)):
            return OpClass.OPAQUE  # a size or a number: there is nothing to fuse
        if found is OpClass.REDUCTION and name in ("max", "min") and _of_two(node):
            found = OpClass.ELEMENTWISE
        if name in ("getitem", "index", "_unsafe_index") and _depends_on_data(node):
            return OpClass.OPAQUE
        if name in optables.CASTS and _moves(node):
            return OpClass.OPAQUE
        if found is not OpClass.ELEMENTWISE:
            return found
        own = self._known_sizes(node)
        for operand in node.all_input_nodes if own is not None else ():
            theirs = self._known_sizes(operand)
            if theirs is not None and theirs != own:
                return OpClass.BROADCAST
        return found

    def _known_sizes(self, node: Node) -> tuple[Any, ...] | None:
        value = node.meta.get("val")
        key = id(value)
        if key not in self._sizes:
            self._sizes[key] = sizes(value)
        return self._sizes[key]


def sizes(value: Any) -> tuple[Any, ...] | None:
    """The sizes of a tensor, or of the first of several, to be compared without settling any symbol."""
    if isinstance(value, (tuple, list)):
        several = cast("list[Any]", value)
        value = next((v for v in several if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return None
    shape = cast("Iterable[Any]", value.shape)
    return tuple([s if type(s) is int else s.node.expr for s in shape])


def _of_two(node: Node) -> bool:
    """Whether `max` or `min` is of two tensors, which is elementwise; an overload's tags tell by themselves."""
    overloaded = isinstance(node.target, OpOverload)
    return not overloaded and len(node.args) > 1 and isinstance(node.args[1], Node)


def _depends_on_data(node: Node) -> bool:
    """Whether an index takes a size out of a shape, or picks as many elements as a mask says."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and (source.target is getattr or source.target in ("size", "stride")):
        return True
    values = [n.meta.get("val") for n in node.all_input_nodes[1:]]
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)


def _moves(node: Node) -> bool:
    """Whether a cast moves to another device."""
    value = node.meta.get("val")
    operands = [n.meta.get("val") for n in node.all_input_nodes[:1]]
    both = [v for v in (value, *operands) if isinstance(v, torch.Tensor)]
    return len({v.device for v in both}) > 1


@functools.cache
def _of_overload(op: OpOverload) -> OpClass:
    namespace, _, name = op.name().partition("::")
    name = name.partition(".")[0]
    if torch.Tag.pointwise in op.tags:
        return OpClass.ELEMENTWISE
    if torch_compat.REDUCTION_TAG.value in op.tags:
        return OpClass.REDUCTION
    parameters = [a.name for a in op._schema.arguments]
    if name in ("max", "min") and "other" in parameters:
        return OpClass.ELEMENTWISE
    if torch.Tag.dynamic_output_shape in op.tags and name not in ("index", "_unsafe_index"):
        return OpClass.OPAQUE
    return _of_name(name) if namespace in ("aten", "prims") else _of_schema([op])


@functools.cache
def _of_name(name: str) -> OpClass:
    """The class of an operator by its ATen name, from the tables and the tags and schemas of its overloads."""
    for names, known in (
        (optables.ANCHORS, OpClass.ANCHOR),
        (optables.REDUCTIONS, OpClass.REDUCTION),
        (optables.BROADCASTS, OpClass.BROADCAST),
        (optables.INJECTIVES, OpClass.INJECTIVE),
        (optables.ELEMENTWISES, OpClass.ELEMENTWISE),
    ):
        if name in names:
            return known
    found = packet(name)
    if found is None:
        return OpClass.OPAQUE
    if found in _counted():
        return OpClass.ANCHOR
    overloads = [getattr(found, o) for o in found.overloads()]
    # TorchScript's own overloads for plain numbers and lists are listed too, but no dispatcher knows them.
    real = [o for o in overloads if torch._C._dispatch_has_kernel(o.name()) and not o._schema.is_mutable]
    # Not every overload of a pointwise operator is tagged.
    if any(torch.Tag.pointwise in o.tags for o in real):
        return OpClass.ELEMENTWISE
    return _of_schema(real)


@functools.cache
def _counted() -> frozenset[OpOverloadPacket]:
    """The operators whose flops torch counts: products, convolutions and attentions."""
    from torch.utils.flop_counter import flop_registry

    return frozenset(op for op in flop_registry if isinstance(op, OpOverloadPacket))


def _of_schema(overloads: Iterable[OpOverload]) -> OpClass:
    """Views are injective, and what makes a tensor of no tensor is elementwise."""
    schemas = [op._schema for op in overloads]
    if not schemas:
        return OpClass.OPAQUE
    if any(r.alias_info is not None for s in schemas for r in s.returns):
        return OpClass.INJECTIVE
    made = all(len(s.returns) == 1 and str(s.returns[0].type) == "Tensor" for s in schemas)
    read = any("Tensor" in str(a.type) for s in schemas for a in s.arguments)
    return OpClass.ELEMENTWISE if made and not read else OpClass.OPAQUE


_BODIES: WeakKeyDictionary[GraphModule, OpClass] = WeakKeyDictionary()


def class_of_body(body: GraphModule) -> OpClass:
    """The class of a sub-graph called as one: of what it computes, and of how its results hang on its anchor.

    A sub-graph with two anchors, with an anchor and a reduction, or with other than elementwise work behind its
    anchor is opaque. Remembered for bodies of regions, which never change.
    """
    known = _BODIES.get(body)
    if known is None:
        known = _of_graph(Scene(body))
        if isinstance(body, Body):
            _BODIES[body] = known
    return known


def _of_graph(scene: Scene) -> OpClass:
    classes = classify(scene)
    inside = [i for i, n in enumerate(scene.nodes) if n.op not in ("placeholder", "get_attr", "output")]
    worst = max((classes[i] for i in inside), default=OpClass.OPAQUE)
    if worst is not OpClass.ANCHOR:
        return worst
    anchors = [i for i in inside if classes[i] is OpClass.ANCHOR and not is_projection(scene.nodes[i])]
    if len(anchors) > 1 or any(classes[i] is OpClass.REDUCTION for i in inside):
        return OpClass.OPAQUE
    behind = {anchors[0]}
    for i in inside:
        if not behind.isdisjoint(scene.index.data[i]):
            if classes[i] > OpClass.BROADCAST and not is_projection(scene.nodes[i]):
                return OpClass.OPAQUE
            behind.add(i)
    returned = scene.index.data[len(scene.nodes) - 1]
    return OpClass.ANCHOR if all(i in behind for i in returned) else OpClass.OPAQUE
