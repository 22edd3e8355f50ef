"""What each node of a graph does besides making a value: reads, writes, draws at random, acts on the world."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.graph.module import Body, attribute, copy_graph, rebuild
from dovetail.graph.operators import Traits
from dovetail.graph.spellings import traits as traits_of
from dovetail.graph.storages import storages

DECLARED = "dovetail.effects"
"""The `gm.meta` key of what users declared; written by `declare` alone."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one node. `writes` and `aliases` are inputs; tensors stand for state that no input names."""

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    state_read: tuple[torch.Tensor, ...] = ()
    state_written: tuple[torch.Tensor, ...] = ()
    state_shared: tuple[torch.Tensor, ...] = ()  # state that the result may share memory with
    looks: bool = True
    random: bool = False
    world: str = ""
    barrier: bool = False
    reshapes_in_place: bool = False
    doubtful_aliases: bool = False  # no schema says so, only that it cannot be ruled out

    @property
    def pure(self) -> bool:
        """Nothing but a value: may be cloned, moved and dropped as far as data allows."""
        return not (self.writes or self.state_written or self.random or self.world or self.barrier)


PURE = Effects()


def effects(node: Node, root: nn.Module) -> Effects:
    """The effects of running `node` of a graph owned by `root`."""
    if node.op in ("placeholder", "get_attr", "output"):
        return PURE
    declared = cast("dict[str, str] | None", getattr(root, "meta", {}).get(DECLARED))
    if declared:
        word = declared.get(target_name(node))
        if word == "pure":
            return Effects(aliases=tuple(node.all_input_nodes), doubtful_aliases=True)
        if word == "ordered":
            return Effects(
                world="declared as ordered", aliases=tuple(node.all_input_nodes), doubtful_aliases=True
            )
    if node.op == "call_module":
        return _of_module_call(node, root)
    traits = traits_of(node)
    if traits.plain:
        return PURE
    if traits.higher_order:
        return _of_higher_order(node, root)
    return _of_call(node, traits)


def declare(gm: GraphModule, what: Mapping[Any, str]) -> GraphModule:
    """A graph in which calls of the given targets count as "ordered" (an effect) or "pure".

    For operators and Python functions whose schema does not tell. The declaration travels with the graph.
    """
    known = dict(cast("dict[str, str]", gm.meta.get(DECLARED, {})))
    for target, word in what.items():
        if word not in ("ordered", "pure"):
            raise InvalidArgument(f"'{word}' for {target}: a call is declared 'ordered' or 'pure'.")
        known[target if isinstance(target, str) else _qualified(target)] = word
    return rebuild(gm, copy_graph(gm.graph), meta={**gm.meta, DECLARED: known})


def target_name(node: Node) -> str:
    """The name of what a node calls, the same in every process: `aten.add.Tensor`, `torch.relu`, `.view`."""
    target: Any = node.target
    if isinstance(target, str):
        return f".{target}" if node.op == "call_method" else target
    return _qualified(target)


def _qualified(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", None) or getattr(
        getattr(target, "__self__", None), "__module__", "torch"
    )
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    name = name.removeprefix("_VariableFunctionsClass.").removeprefix("_VariableFunctions.")
    return f"{'operator' if module == '_operator' else module}.{name}"


def _tensor_nodes(value: Any) -> Iterator[Node]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Node):
            yield item
        elif isinstance(item, (tuple, list)):
            stack.extend(cast("Iterable[Any]", item))
        elif isinstance(item, dict):
            stack.extend(cast("dict[Any, Any]", item).values())


def _of_call(node: Node, traits: Traits) -> Effects:
    writes: tuple[Node, ...] = ()
    if traits.writes and traits.holds(traits.writes_if, node):
        found: list[Node] = []
        for name in traits.writes:
            found.extend(_tensor_nodes(traits.argument(node, name)))
        writes = tuple(dict.fromkeys(found))
    doubtful = False
    if traits.opaque:
        writes = aliases = tuple(node.all_input_nodes)
    elif traits.aliases is None:
        aliases, doubtful = tuple(node.all_input_nodes), node.target is not operator.getitem
    else:
        named = [n for name in traits.aliases for n in _tensor_nodes(traits.argument(node, name))]
        aliases = tuple(dict.fromkeys(named))
        if not aliases and traits.composite:
            aliases, doubtful = tuple(node.all_input_nodes), True
    return Effects(
        writes=writes,
        aliases=aliases,
        looks=traits.looks and not (node.target is operator.getitem and _is_basic(node.args[1])),
        random=traits.opaque or (traits.random and traits.holds(traits.random_if, node)),
        world=traits.world,
        barrier=traits.barrier,
        reshapes_in_place=traits.reshapes_in_place,
        doubtful_aliases=doubtful,
    )


def _is_basic(index: Any) -> bool:
    """Whether indexing by this takes a part of a tuple or a view of a tensor, and so reads no data."""
    items = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items)


@dataclass(frozen=True, slots=True)
class BodySummary:
    """What calling a sub-graph does, in terms of its placeholders."""

    writes: frozenset[int]
    returns: frozenset[int]  # placeholders that a result may share memory with
    state_read: tuple[torch.Tensor, ...]
    state_written: tuple[torch.Tensor, ...]
    state_shared: tuple[torch.Tensor, ...]
    random: bool
    world: str
    barrier: bool

    @property
    def acts(self) -> bool:
        return bool(self.writes or self.state_written or self.random or self.world or self.barrier)


_SUMMARIES: WeakKeyDictionary[GraphModule, BodySummary] = WeakKeyDictionary()


def summary(body: GraphModule) -> BodySummary:
    """What calling `body` does. Remembered for bodies of regions, which never change."""
    if body in _SUMMARIES:
        return _SUMMARIES[body]
    nodes = list(body.graph.nodes)
    each = [effects(node, body) for node in nodes]
    placeholders = [n for n in nodes if n.op == "placeholder"]
    classes = storages(body, nodes, each)
    touched = {classes.of(w) for e in each for w in e.writes}
    returned = {classes.of(n) for n in body.graph.output_node().all_input_nodes}
    state_written = [t for e in each for t in e.state_written]
    state_read = [t for e in each for t in e.state_read]
    for node in nodes:
        if node.op == "get_attr":
            named = _attribute_tensors(body, cast("str", node.target))
            state_read.extend(named)
            if classes.of(node) in touched:
                state_written.extend(named)
    worlds = [e.world for e in each if e.world]
    found = BodySummary(
        writes=frozenset(i for i, p in enumerate(placeholders) if classes.of(p) in touched),
        returns=frozenset(i for i, p in enumerate(placeholders) if classes.of(p) in returned),
        state_read=tuple(state_read),
        state_written=tuple(state_written),
        state_shared=tuple(t for t in state_read if classes.of_state(t) in returned),
        random=any(e.random for e in each),
        world=worlds[0] if worlds else "",
        barrier=any(e.barrier for e in each),
    )
    if isinstance(body, Body):
        _SUMMARIES[body] = found
    return found


def _attribute_tensors(root: nn.Module, target: str) -> list[torch.Tensor]:
    value = attribute(root, target)
    return [value] if isinstance(value, torch.Tensor) else []


def _of_module_call(node: Node, root: nn.Module) -> Effects:
    module = attribute(root, cast("str", node.target))
    if isinstance(module, GraphModule):
        found = summary(module)
        operands = list(node.args)
        written = [n for i in found.writes if i < len(operands) for n in _tensor_nodes(operands[i])]
        returned = [n for i in found.returns if i < len(operands) for n in _tensor_nodes(operands[i])]
        if node.kwargs:
            written, returned = list(node.all_input_nodes) if found.writes else [], list(node.all_input_nodes)
        return Effects(
            writes=tuple(dict.fromkeys(written)),
            aliases=tuple(dict.fromkeys(returned)),
            state_read=found.state_read,
            state_written=found.state_written,
            state_shared=found.state_shared,
            random=found.random,
            world=found.world,
            barrier=found.barrier,
        )
    if isinstance(module, nn.Module):
        return _of_leaf(node, module)
    return Effects(writes=tuple(node.all_input_nodes), random=True, world="a module that is not there")


def _of_leaf(node: Node, module: nn.Module) -> Effects:
    """A module that was not traced into. Those of torch.nn are known; any other may do anything."""
    inputs = tuple(node.all_input_nodes)
    read = (*module.parameters(), *module.buffers())
    random = in_place = False
    written: list[torch.Tensor] = []
    for part in module.modules():
        known = type(part).__module__.startswith("torch.nn.modules.") or isinstance(part, GraphModule)
        if not known:
            return Effects(inputs, inputs, read, read, read, random=True, world="an unknown module")
        if isinstance(part, (nn.modules.dropout._DropoutNd, nn.RReLU)):
            random |= part.training
        dropout = getattr(part, "dropout", 0)
        random |= part.training and isinstance(dropout, float) and dropout > 0
        random |= isinstance(part, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
        in_place |= bool(getattr(part, "inplace", False))
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats:
            written.extend(part.buffers(recurse=False))
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            written.append(part.weight)
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    return Effects(
        writes=inputs if in_place else (),
        aliases=inputs,
        state_read=read,
        state_written=tuple(written),
        random=random or hooked,
        world="a module with hooks" if hooked else "",
        doubtful_aliases=not in_place,
    )


def _of_higher_order(node: Node, root: nn.Module) -> Effects:
    """The union of what the sub-graphs do; operands are not told apart, so one write is a write to each."""
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr" or not is_subgraph(root, n)]
    graphs = [attribute(root, cast("str", n.target)) for n in node.all_input_nodes if is_subgraph(root, n)]
    name = traits_of(node).name
    if not graphs:
        pure = name.startswith("auto_functionalized") or name.endswith("_functional")
        if pure:
            return Effects(aliases=tuple(inputs), doubtful_aliases=True)
        mutates = "mutation" in name
        return Effects(
            writes=tuple(inputs),
            aliases=tuple(inputs),
            random=not mutates,
            world="" if mutates else f"higher-order operator {name}",
        )
    found = [summary(g) for g in graphs]
    return Effects(
        writes=tuple(inputs) if any(s.writes for s in found) else (),
        aliases=tuple(inputs),
        state_read=tuple(t for s in found for t in s.state_read),
        state_written=tuple(t for s in found for t in s.state_written),
        state_shared=tuple(t for s in found for t in s.state_shared),
        random=any(s.random for s in found),
        world=next((s.world for s in found if s.world), "a token of order" if name == "with_effects" else ""),
        barrier=any(s.barrier for s in found),
        doubtful_aliases=True,
    )


def is_subgraph(root: nn.Module, node: Node) -> bool:
    """Whether a node is the sub-graph of a higher-order operator: it cannot be an operand."""
    return node.op == "get_attr" and isinstance(attribute(root, cast("str", node.target)), GraphModule)
