"""A region as backends get it: constants as operands, and what its body does to the world around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dovetail.ir.effects import BodySummary, summarize_body
from dovetail.ir.graph_module import Body, attribute, make_body
from dovetail.ir.nodes import is_projection
from dovetail.numerics.sample_inputs import Domain, domains_of
from dovetail.outlining.inline import Flattener, flat, held_value
from dovetail.outlining.region import Region, body_key, call_of, results


@dataclass(frozen=True, eq=False)
class CompileUnit:
    """One distinct body to be compiled.

    `region` is the first call of it, its body with constants lifted to operands; `lifted` says where the outermost
    graph keeps those, in the order of the operands they became. `obstacle` says why nobody but itself can run it.
    """

    region: Region
    original: Body
    lifted: tuple[str, ...]
    key: str
    effects: BodySummary
    obstacle: str | None

    @property
    def roles(self) -> tuple[Any, ...]:
        """What the region is said to be, and which argument and result of its pattern each operand and result is.

        Equal bodies may differ in that, and so may what a backend makes of them.
        """
        region = self.region
        said = (region.kind, region.version, json.dumps(region.attrs, sort_keys=True))
        return (*said, tuple(region.arguments.items()), region.results)

    @cached_property
    def domains(self) -> Mapping[int, Domain]:
        """Which numbers the body computes with, for the operands that may not be just any."""
        return domains_of(flat(cast("Body", self.region.body)).graph)

    @property
    def values(self) -> list[Any]:
        """What is known of the operands, lifted ones last."""
        return [n.meta.get("val") for n in self.region.body.graph.nodes if n.op == "placeholder"]


@dataclass(frozen=True, slots=True)
class _Facts:
    # None for the body itself: facts that held it would keep it for ever.
    lifted_body: Body | None
    lifted: tuple[str, ...]
    key: str
    effects: BodySummary
    obstacle: str | None


_FACTS: WeakKeyDictionary[Body, _Facts] = WeakKeyDictionary()


def unit_of(region: Region) -> CompileUnit:
    """The unit a region's body is; facts are kept with the body."""
    body = cast("Body", region.body)
    facts = _FACTS.get(body)
    if facts is None:
        obstacle = _obstacle(body)
        lifted, targets = _lifted(body) if body.borrows and obstacle is None else (body, ())
        own = None if lifted is body else lifted
        facts = _FACTS[body] = _Facts(own, targets, body_key(lifted), summarize_body(lifted), obstacle)
    run = facts.lifted_body or body
    return CompileUnit(
        replace(region, body=run), body, facts.lifted, facts.key, facts.effects, facts.obstacle
    )


def _lifted(body: Body) -> tuple[Body, tuple[str, ...]]:
    """The body written out, with the tensors it holds as operands after the others."""
    graph = Graph()
    held: dict[str, Node] = {}
    constants: dict[str, Node] = {}
    objects: dict[str, Any] = {}

    def hold(node: Node, target: str) -> Node:
        if target not in held:
            value = held_value(body, target)
            if isinstance(value, Tensor):
                made = graph.create_node("placeholder", node.name)
                made.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
                constants[target] = made
            else:
                made = graph.create_node("get_attr", f"held_{len(objects)}")
                objects[cast("str", made.target)] = (value, target)
            held[target] = made
        return held[target]

    operands: list[Node] = []
    for node in body.graph.nodes:
        if node.op == "placeholder":
            operand = graph.create_node("placeholder", node.name, name=node.name)
            operand.meta = dict(node.meta)
            operands.append(operand)
    made = Flattener(graph, lambda _: None, hold).write_body(body, operands)
    # Operands come first, in the order in which they are given.
    for node in reversed([*operands, *constants.values()]):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
    graph.output(made)
    new = make_body(graph, type(body).__name__)
    new.training = body.training
    new.meta.update(body.meta)
    for name, (value, target) in objects.items():
        new.borrow(name, value, target)
    return new, tuple(constants)


def _obstacle(body: GraphModule) -> str | None:
    for node in body.graph.nodes:
        if node.op == "call_module":
            module = attribute(body, cast("str", node.target))
            inner = _obstacle(module) if isinstance(module, Body) else None
            if inner is not None:
                return inner
            if isinstance(module, nn.Module) and not isinstance(module, Body):
                return f"'{node.name}' calls {module._get_name()}, which is not a graph; leave it out of the region"
        elif node.op == "placeholder" and node.meta.get("val") is None:
            return f"nothing is known of its operand '{node.name}': capture the model, or set `meta['val']`"
    return None


_STOPS = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
Flags = tuple[bool, ...]


class GradAnalysis:
    """Follows gradients from parameters and inputs to the operands of regions.

    What it cannot know (a custom operator without a derivative) it takes for differentiable: a wrong guess costs a
    compilation, for every call is checked again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Body, Flags], tuple[Flags, Mapping[Node, bool]]] = {}

    def operands(self, gm: GraphModule) -> dict[str, Flags]:
        """For each region by its path, nested ones too, whether each operand requires gradients."""
        found: dict[str, Flags] = {}
        flags = self._follow(
            gm, gm.graph.nodes, {n: _asks(n) for n in gm.graph.nodes if n.op == "placeholder"}
        )
        self._collect(gm, list(gm.graph.nodes), flags, "", None, found)
        return found

    def _collect(
        self,
        owner: nn.Module,
        nodes: Sequence[Node],
        flags: Mapping[Node, bool],
        prefix: str,
        members: Sequence[Any] | None,
        found: dict[str, Flags],
    ) -> None:
        for i, node in enumerate(nodes):
            call = call_of(node.meta if members is None else members[i].meta)
            if call is None:
                continue
            name = f"{prefix}{node.name if members is None else members[i].name}"
            given = tuple(flags[a] for a in cast("tuple[Node, ...]", node.args))
            found[name] = given
            body = cast("Body", attribute(owner, cast("str", node.target)))
            inner = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
            if any(call_of(m.meta) is not None for m in call.members):
                self._collect(body, inner, self._body(body, given)[1], f"{name}/", call.members, found)

    def _body(self, body: Body, given: Flags) -> tuple[Flags, Mapping[Node, bool]]:
        known = self._known.get((body, given))
        if known is None:
            operands = [n for n in body.graph.nodes if n.op == "placeholder"]
            flags = self._follow(body, body.graph.nodes, dict(zip(operands, given, strict=True)))
            known = self._known[body, given] = (tuple(flags[n] for n in results(body)), flags)
        return known

    def _follow(self, owner: nn.Module, nodes: Any, flags: dict[Node, bool]) -> dict[Node, bool]:
        taken: dict[Node, Flags] = {}
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                value = attribute(owner, cast("str", node.target))
                flags[node] = isinstance(value, Tensor) and value.requires_grad
            elif is_projection(node) and node.args[0] in taken:
                flags[node] = taken[cast("Node", node.args[0])][cast("int", node.args[1])]
            elif isinstance(body := _body_of(owner, node), Body):
                taken[node] = self._body(body, tuple(flags[a] for a in cast("tuple[Node, ...]", node.args)))[
                    0
                ]
                flags[node] = any(taken[node])
            else:
                reached = any(flags[a] for a in node.all_input_nodes)
                flags[node] = reached and node.target not in _STOPS and _differentiable(node.meta.get("val"))
        return flags


def _asks(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def _body_of(owner: nn.Module, node: Node) -> Any:
    return attribute(owner, cast("str", node.target)) if node.op == "call_module" else None


def _differentiable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    if isinstance(value, (tuple, list)):
        return any(_differentiable(v) for v in cast("Sequence[Any]", value))
    return value is None
