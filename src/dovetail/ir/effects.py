"""What each node of a graph does besides making a value: reads, writes, draws at random, acts on the world."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_call, did_you_mean
from dovetail.ir.alias_analysis import storages
from dovetail.ir.graph_module import Body, attribute, copy_graph, rebuild, require_graph
from dovetail.ir.meta_keys import DECLARED
from dovetail.ir.op_traits import Traits, qualified_name, target_name
from dovetail.ir.op_traits import traits as traits_of


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


@dataclass(frozen=True, slots=True)
class DeclaredEffects:
    """What a module that is not traced into says of its own calls, as its attribute `tells`.

    `writes` and `shares` are about what it is given, `state` about its parameters and buffers.
    """

    writes: bool = False
    shares: bool = False
    state: bool = False
    random: bool = False


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


def _attribute_tensors(root: nn.Module, target: str) -> list[torch.Tensor]:
    value = attribute(root, target)
    return [value] if isinstance(value, torch.Tensor) else []


def _of_leaf(node: Node, module: nn.Module) -> Effects:
    """A module that was not traced into. Those of torch.nn are known, some tell; any other may do anything.

    Its mode does not count: `train` and `eval` may be called after the region was made.
    """
    inputs = tuple(node.all_input_nodes)
    read = (*module.parameters(), *module.buffers())
    told = getattr(module, "tells", None)
    if isinstance(told, DeclaredEffects):
        return Effects(
            writes=inputs if told.writes else (),
            aliases=inputs,
            state_read=read,
            state_written=read if told.state else (),
            random=told.random,
            doubtful_aliases=not (told.writes or told.shares),
        )
    random = in_place = False
    written: list[torch.Tensor] = []
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules."):
            return Effects(inputs, inputs, read, read, read, random=True, world="an unknown module")
        random |= isinstance(part, (nn.modules.dropout._DropoutNd, nn.RReLU))
        dropout = getattr(part, "dropout", 0)
        random |= isinstance(dropout, float) and dropout > 0
        random |= isinstance(part, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
        in_place |= bool(getattr(part, "inplace", False))
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
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


def is_subgraph(root: nn.Module, node: Node) -> bool:
    """Whether a node is the sub-graph of a higher-order operator: it cannot be an operand."""
    return node.op == "get_attr" and isinstance(attribute(root, cast("str", node.target)), GraphModule)


class Reader:
    """Reads effects in one graph and in everything it calls; what users declared counts at every depth."""

    def __init__(self, root: nn.Module, declared: Mapping[str, str] | None = None) -> None:
        self.declared: Mapping[str, str] = declared if declared is not None else declared_in(root)
        self._seen: dict[int, BodySummary] = {}

    def effects(self, node: Node, root: nn.Module) -> Effects:
        """The effects of running `node` of a graph owned by `root`."""
        if node.op in ("placeholder", "get_attr", "output"):
            return PURE
        told = self._undeclared(node, root)
        word = self.declared.get(target_name(node)) if self.declared else None
        if word == "ordered":
            return replace(told, world=told.world or "declared as ordered")
        if word == "pure":
            # What the schema says is written stays so; only what was assumed for want of knowledge goes.
            writes = () if node.op != "call_module" and traits_of(node).opaque else told.writes
            return replace(told, writes=writes, random=False, world="", doubtful_aliases=True)
        return told

    def _undeclared(self, node: Node, root: nn.Module) -> Effects:
        if node.op == "call_module":
            return self._of_module_call(node, root)
        traits = traits_of(node)
        if traits.plain or (traits.gathers and not any(isinstance(a, (list, tuple)) for a in node.args)):
            return PURE
        if traits.gathers:
            return Effects(aliases=tuple(node.all_input_nodes))
        if traits.higher_order:
            return self._of_higher_order(node, root)
        return _of_call(node, traits)

    def _of_module_call(self, node: Node, root: nn.Module) -> Effects:
        module = attribute(root, cast("str", node.target))
        if isinstance(module, GraphModule):
            found = self.summary(module)
            operands = list(node.args)
            written = [n for i in found.writes if i < len(operands) for n in _tensor_nodes(operands[i])]
            returned = [n for i in found.returns if i < len(operands) for n in _tensor_nodes(operands[i])]
            if node.kwargs:
                written, returned = (
                    list(node.all_input_nodes) if found.writes else [],
                    list(node.all_input_nodes),
                )
            return Effects(
                writes=tuple(dict.fromkeys(written)),
                aliases=tuple(dict.fromkeys(returned)),
                state_read=found.state_read,
                state_written=found.state_written,
                state_shared=found.state_shared,
                random=found.random,
                world=found.world or ("hooks" if module._forward_hooks or module._forward_pre_hooks else ""),
                barrier=found.barrier,
            )
        if isinstance(module, nn.Module):
            return _of_leaf(node, module)
        return Effects(writes=tuple(node.all_input_nodes), random=True, world="a module that is not there")

    def _of_higher_order(self, node: Node, root: nn.Module) -> Effects:
        """The union of what the sub-graphs do; operands are not told apart, so one write is a write to each."""
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr" or not is_subgraph(root, n)]
        graphs = [
            attribute(root, cast("str", n.target)) for n in node.all_input_nodes if is_subgraph(root, n)
        ]
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
        found = [self.summary(g) for g in graphs]
        return Effects(
            writes=tuple(inputs) if any(s.writes for s in found) else (),
            aliases=tuple(inputs),
            state_read=tuple(t for s in found for t in s.state_read),
            state_written=tuple(t for s in found for t in s.state_written),
            state_shared=tuple(t for s in found for t in s.state_shared),
            random=any(s.random for s in found),
            world=next(
                (s.world for s in found if s.world), "a token of order" if name == "with_effects" else ""
            ),
            barrier=any(s.barrier for s in found),
            doubtful_aliases=True,
        )

    def summary(self, body: GraphModule) -> BodySummary:
        """What calling `body` does. Remembered for bodies of regions, which never change."""
        known = self._seen.get(id(body)) or (_SUMMARIES.get(body) if not self.declared else None)
        if known is not None:
            return known
        nodes = list(body.graph.nodes)
        each = [self.effects(node, body) for node in nodes]
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
        self._seen[id(body)] = found
        if isinstance(body, Body) and not self.declared:
            _SUMMARIES[body] = found
        return found


def effects(node: Node, root: nn.Module) -> Effects:
    """The effects of running `node` of a graph owned by `root`."""
    return Reader(root).effects(node, root)


def summary(body: GraphModule, declared: Mapping[str, str] | None = None) -> BodySummary:
    """What calling `body` does, given what users declared in the graph around it."""
    return Reader(body, declared or {}).summary(body)


def declared_in(root: nn.Module) -> Mapping[str, str]:
    """What users declared of targets in a graph, by qualified name."""
    return cast("dict[str, str]", getattr(root, "meta", {}).get(DECLARED, {}))


@checked_call()
def declare(gm: GraphModule, what: Mapping[Any, str]) -> GraphModule:
    """A graph in which calls of the given targets count as "ordered" (an effect) or "pure".

    Targets are operators (a packet means each of its overloads), functions, or names as `text` writes them. "ordered"
    is added to what is known; "pure" takes back what was assumed, never a write that a schema declares. Holds in
    regions too, and travels with the graph.
    """
    require_graph(gm)
    if not isinstance(what, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"declare takes a mapping from target to word, not a {type(what).__name__}.")
    known = dict(declared_in(gm))
    called = _called_names(gm)
    for target, word in what.items():
        if word not in ("ordered", "pure"):
            raise InvalidArgument(f"{word!r} for {target}: a call is declared 'ordered' or 'pure'.")
        names = _names(target)
        if not called.intersection(names):
            hint = did_you_mean(names[0], called, otherwise="`dovetail.text` shows the names.")
            raise InvalidArgument(f"no node of the graph calls {names[0]}. {hint}")
        known.update(dict.fromkeys(names, word))
    new = rebuild(gm, copy_graph(gm.graph), meta={**gm.meta, DECLARED: known})
    reader = Reader(new)
    for name, child in list(new._modules.items()):
        if isinstance(child, Body):
            new._modules[name] = _remarked(child, reader)
    return new


def _called_names(gm: GraphModule) -> set[str]:
    """What the nodes of a graph call, and those of the graphs it calls."""
    graphs = [m for m in gm.modules() if isinstance(m, GraphModule)]
    return {target_name(node) for graph in graphs for node in graph.graph.nodes}


def _names(target: Any) -> list[str]:
    if isinstance(target, str):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [str(target), *(f"{target}.{overload}" for overload in target.overloads())]
    if not callable(target):
        raise InvalidArgument(f"{target!r} cannot be called: declare an operator, a function, or its name.")
    return [qualified_name(target)]


def _remarked(body: Body, reader: Reader) -> Body:
    """The body, or a copy of it, with the mark that dead-code elimination asks for as it is to be now."""
    inner = {n: _remarked(m, reader) for n, m in body._modules.items() if isinstance(m, Body)}
    acts = reader.summary(body).acts
    if acts == body.is_marked_impure and all(body._modules[n] is m for n, m in inner.items()):
        return body
    new = body.copied()
    new._modules.update(inner)
    new.mark_impure(acts)
    return new
