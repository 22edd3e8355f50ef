"""Effect analysis: what each node of a graph does besides computing a value.

A node may write memory, draw random numbers, act on the host (print, communicate, assert) or switch a mode for all that
follows. Effects come from the traits of the target (`ir.op_traits`), from a summary of the body for graphs that are called,
and from what users declare.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, checked_call, did_you_mean
from dovetail.ir.alias_analysis import alias_classes
from dovetail.ir.graph_module import Body, attribute, copy_graph, has_forward_hooks, rebuild, require_graph
from dovetail.ir.meta_keys import DECLARED
from dovetail.ir.op_traits import OpTraits, qualified_name, target_name, traits_of


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one node. `writes` and `aliases` are operands; `state_*` are tensors that no operand names."""

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    state_read: tuple[torch.Tensor, ...] = ()
    state_written: tuple[torch.Tensor, ...] = ()
    state_shared: tuple[torch.Tensor, ...] = ()  # state that the result may share memory with
    reads_data: bool = True
    random: bool = False
    host_effect: str = ""
    barrier: bool = False
    assumed_aliases: bool = False  # no schema declares the aliases; they only cannot be ruled out

    @property
    def pure(self) -> bool:
        """Whether the node only computes a value: it may be cloned, moved and dropped as far as data allows."""
        return not (self.writes or self.state_written or self.random or self.host_effect or self.barrier)


PURE = Effects()


@dataclass(frozen=True, slots=True)
class DeclaredEffects:
    """The effects of calling a module that is not traced into, as its attribute `declared_effects`.

    `writes` and `shares` concern its operands, `state` whether it writes its parameters and buffers.
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


def _nodes_at(node: Node, traits: OpTraits, names: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes among the arguments of these names."""
    nodes = [n for name in names for n in _tensor_nodes(traits.argument(node, name))]
    return tuple(dict.fromkeys(nodes))


def _of_call(node: Node, traits: OpTraits) -> Effects:
    writes: tuple[Node, ...] = ()
    if traits.writes_at(node):
        writes = _nodes_at(node, traits, traits.writes)
    assumed = False
    if traits.opaque:
        writes = aliases = tuple(node.all_input_nodes)
    elif traits.aliases is None:
        aliases, assumed = tuple(node.all_input_nodes), node.target is not operator.getitem
    else:
        aliases = _nodes_at(node, traits, traits.aliases)
        if not aliases and traits.composite:
            aliases, assumed = tuple(node.all_input_nodes), True
    return Effects(
        writes=writes,
        aliases=aliases,
        reads_data=traits.reads_data
        and not (node.target is operator.getitem and _is_basic_index(node.args[1])),
        random=traits.opaque or traits.draws_at(node),
        host_effect=traits.host_effect,
        barrier=traits.barrier,
        assumed_aliases=assumed,
    )


def _is_basic_index(index: Any) -> bool:
    """Whether indexing selects an item of a tuple or a view of a tensor, and so reads no data."""
    items = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items)


@dataclass(frozen=True, slots=True)
class BodySummary:
    """The effects of calling a sub-graph, in terms of its placeholders."""

    writes: frozenset[int]
    returns: frozenset[int]  # placeholders that a result may share memory with
    state_read: tuple[torch.Tensor, ...]
    state_written: tuple[torch.Tensor, ...]
    state_shared: tuple[torch.Tensor, ...]
    random: bool
    host_effect: str
    barrier: bool

    @property
    def has_effects(self) -> bool:
        return bool(self.writes or self.state_written or self.random or self.host_effect or self.barrier)


_SUMMARIES: WeakKeyDictionary[GraphModule, BodySummary] = WeakKeyDictionary()


def _of_leaf(node: Node, module: nn.Module) -> Effects:
    """Return the effects of a module that was not traced into: of torch.nn, declared, or else arbitrary ones.

    Its mode does not count: `train` and `eval` may be called after the region was outlined.
    """
    inputs = tuple(node.all_input_nodes)
    read = (*module.parameters(), *module.buffers())
    declared = getattr(module, "declared_effects", None)
    if isinstance(declared, DeclaredEffects):
        return Effects(
            writes=inputs if declared.writes else (),
            aliases=inputs,
            state_read=read,
            state_written=read if declared.state else (),
            random=declared.random,
            assumed_aliases=not (declared.writes or declared.shares),
        )
    random = in_place = False
    written: list[torch.Tensor] = []
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules."):
            return Effects(inputs, inputs, read, read, read, random=True, host_effect="an unknown module")
        random |= isinstance(part, (nn.modules.dropout._DropoutNd, nn.RReLU))
        dropout = getattr(part, "dropout", 0)
        random |= isinstance(dropout, float) and dropout > 0
        random |= isinstance(part, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
        in_place |= bool(getattr(part, "inplace", False))
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            written.extend(part.buffers(recurse=False))
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            written.append(part.weight)
    hooked = any(map(has_forward_hooks, module.modules()))
    return Effects(
        writes=inputs if in_place else (),
        aliases=inputs,
        state_read=read,
        state_written=tuple(written),
        random=random or hooked,
        host_effect="a module with hooks" if hooked else "",
        assumed_aliases=not in_place,
    )


def is_subgraph(root: nn.Module, node: Node) -> bool:
    """Whether a node fetches the sub-graph of a higher-order operator, which cannot be an operand of a region."""
    return node.op == "get_attr" and isinstance(attribute(root, cast("str", node.target)), GraphModule)


class EffectAnalysis:
    """Computes effects in one graph and in all that it calls; what users declared counts at every depth."""

    def __init__(self, root: nn.Module, declared: Mapping[str, str] | None = None) -> None:
        self.declared: Mapping[str, str] = declared if declared is not None else declared_targets(root)
        self._summaries: dict[int, BodySummary] = {}

    def effects(self, node: Node, root: nn.Module) -> Effects:
        """The effects of running `node` of a graph owned by `root`."""
        if node.op in ("placeholder", "get_attr", "output"):
            return PURE
        effects = self._undeclared(node, root)
        word = self.declared.get(target_name(node)) if self.declared else None
        if word == "ordered":
            return replace(effects, host_effect=effects.host_effect or "declared as ordered")
        if word == "pure":
            # Writes that the schema declares stay; only those assumed of an unknown target go.
            writes = () if node.op != "call_module" and traits_of(node).opaque else effects.writes
            return replace(effects, writes=writes, random=False, host_effect="", assumed_aliases=True)
        return effects

    def _undeclared(self, node: Node, root: nn.Module) -> Effects:
        if node.op == "call_module":
            return self._of_module_call(node, root)
        traits = traits_of(node)
        if traits.pure or (traits.gathers and not any(isinstance(a, (list, tuple)) for a in node.args)):
            return PURE
        if traits.gathers:
            return Effects(aliases=tuple(node.all_input_nodes))
        if traits.higher_order:
            return self._of_higher_order(node, root)
        return _of_call(node, traits)

    def _of_module_call(self, node: Node, root: nn.Module) -> Effects:
        module = attribute(root, cast("str", node.target))
        if not isinstance(module, nn.Module):
            missing = "a module that is not there"
            return Effects(writes=tuple(node.all_input_nodes), random=True, host_effect=missing)
        if not isinstance(module, GraphModule):
            return _of_leaf(node, module)
        body = self.summary(module)

        def operands(indices: Iterable[int]) -> tuple[Node, ...]:
            nodes = [n for i in indices if i < len(node.args) for n in _tensor_nodes(node.args[i])]
            return tuple(dict.fromkeys(nodes))

        written, returned = operands(body.writes), operands(body.returns)
        if node.kwargs:
            returned = tuple(node.all_input_nodes)
            written = returned if body.writes else ()
        return Effects(
            writes=written,
            aliases=returned,
            state_read=body.state_read,
            state_written=body.state_written,
            state_shared=body.state_shared,
            random=body.random,
            host_effect=body.host_effect or ("hooks" if has_forward_hooks(module) else ""),
            barrier=body.barrier,
        )

    def _of_higher_order(self, node: Node, root: nn.Module) -> Effects:
        """Return the union of the sub-graphs' effects; operands are not distinguished: one write is a write to each."""
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr" or not is_subgraph(root, n)]
        graphs = [
            attribute(root, cast("str", n.target)) for n in node.all_input_nodes if is_subgraph(root, n)
        ]
        name = cast("HigherOrderOperator", node.target).name()
        if not graphs:
            pure = name.startswith("auto_functionalized") or name.endswith("_functional")
            if pure:
                return Effects(aliases=tuple(inputs), assumed_aliases=True)
            mutates = "mutation" in name
            return Effects(
                writes=tuple(inputs),
                aliases=tuple(inputs),
                random=not mutates,
                host_effect="" if mutates else f"higher-order operator {name}",
            )
        bodies = [self.summary(g) for g in graphs]
        first = next((s.host_effect for s in bodies if s.host_effect), "")
        return Effects(
            writes=tuple(inputs) if any(s.writes for s in bodies) else (),
            aliases=tuple(inputs),
            state_read=tuple(t for s in bodies for t in s.state_read),
            state_written=tuple(t for s in bodies for t in s.state_written),
            state_shared=tuple(t for s in bodies for t in s.state_shared),
            random=any(s.random for s in bodies),
            host_effect=first or ("a token of order" if name == "with_effects" else ""),
            barrier=any(s.barrier for s in bodies),
            assumed_aliases=True,
        )

    def summary(self, body: GraphModule) -> BodySummary:
        """Return the effects of calling `body`; cached for bodies of regions, which never change."""
        known = self._summaries.get(id(body)) or (_SUMMARIES.get(body) if not self.declared else None)
        if known is not None:
            return known
        nodes = list(body.graph.nodes)
        each = [self.effects(node, body) for node in nodes]
        placeholders = [n for n in nodes if n.op == "placeholder"]
        classes = alias_classes(body, nodes, each)
        touched = {classes.of(w) for e in each for w in e.writes}
        returned = {classes.of(n) for n in body.graph.output_node().all_input_nodes}
        state_written = [t for e in each for t in e.state_written]
        state_read = [t for e in each for t in e.state_read]
        for node in nodes:
            if node.op == "get_attr":
                value = attribute(body, cast("str", node.target))
                if isinstance(value, torch.Tensor):
                    state_read.append(value)
                    if classes.of(node) in touched:
                        state_written.append(value)
        summary = BodySummary(
            writes=frozenset(i for i, p in enumerate(placeholders) if classes.of(p) in touched),
            returns=frozenset(i for i, p in enumerate(placeholders) if classes.of(p) in returned),
            state_read=tuple(state_read),
            state_written=tuple(state_written),
            state_shared=tuple(t for t in state_read if classes.of_state(t) in returned),
            random=any(e.random for e in each),
            host_effect=next((e.host_effect for e in each if e.host_effect), ""),
            barrier=any(e.barrier for e in each),
        )
        self._summaries[id(body)] = summary
        if isinstance(body, Body) and not self.declared:
            _SUMMARIES[body] = summary
        return summary


def effects_of(node: Node, root: nn.Module) -> Effects:
    """Return the effects of running `node` of a graph owned by `root`."""
    return EffectAnalysis(root).effects(node, root)


def summarize_body(body: GraphModule, declared: Mapping[str, str] | None = None) -> BodySummary:
    """Return the effects of calling `body`, with what users declared in the graph around it."""
    return EffectAnalysis(body, declared or {}).summary(body)


def declared_targets(root: nn.Module) -> Mapping[str, str]:
    """Return what users declared of targets in a graph, by qualified name."""
    return cast("dict[str, str]", getattr(root, "meta", {}).get(DECLARED, {}))


@checked_call()
def declare(gm: GraphModule, what: Mapping[Any, str]) -> GraphModule:
    """Return a graph in which calls of the given targets count as "ordered" (an effect) or "pure".

    Targets are operators (a packet means each of its overloads), functions, or names as `text` writes them. "ordered"
    adds an effect; "pure" removes assumed effects, never a write that a schema declares. The declaration holds in
    regions too, and is part of the graph.
    """
    require_graph(gm)
    if not isinstance(what, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"declare takes a mapping from target to word, not a {type(what).__name__}.")
    known = dict(declared_targets(gm))
    called = _called_names(gm)
    for target, word in what.items():
        if word not in ("ordered", "pure"):
            raise InvalidArgument(f"{word!r} for {target}: a call is declared 'ordered' or 'pure'.")
        names = _target_names(target)
        if not called.intersection(names):
            hint = did_you_mean(names[0], called, otherwise="`dovetail.text` shows the names.")
            raise InvalidArgument(f"no node of the graph calls {names[0]}. {hint}")
        known.update(dict.fromkeys(names, word))
    new = rebuild(gm, copy_graph(gm.graph), meta={**gm.meta, DECLARED: known})
    analysis = EffectAnalysis(new)
    for name, child in list(new._modules.items()):
        if isinstance(child, Body):
            new._modules[name] = _with_current_mark(child, analysis)
    return new


def _called_names(gm: GraphModule) -> set[str]:
    """Return the names of all call targets of a graph and of the graphs it calls."""
    graphs = [m for m in gm.modules() if isinstance(m, GraphModule)]
    return {target_name(node) for graph in graphs for node in graph.graph.nodes}


def _target_names(target: Any) -> list[str]:
    if isinstance(target, str):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [str(target), *(f"{target}.{overload}" for overload in target.overloads())]
    if not callable(target):
        raise InvalidArgument(f"{target!r} cannot be called: declare an operator, a function, or its name.")
    return [qualified_name(target)]


def _with_current_mark(body: Body, analysis: EffectAnalysis) -> Body:
    """Return the body, or a copy of it if what dead-code elimination must know of its effects has changed."""
    inner = {n: _with_current_mark(m, analysis) for n, m in body._modules.items() if isinstance(m, Body)}
    has_effects = analysis.summary(body).has_effects
    if has_effects == body.is_marked_impure and all(body._modules[n] is m for n, m in inner.items()):
        return body
    new = body.copied()
    new._modules.update(inner)
    new.mark_impure(has_effects)
    return new
