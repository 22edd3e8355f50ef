"""Regions as backends get them, with constants lifted to operands, and the analysis of their gradient flags."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dovetail.ir.dependencies import dependencies
from dovetail.ir.effects import BodySummary, summarize_body
from dovetail.ir.graph_module import Body, attribute, make_body
from dovetail.ir.nodes import is_projection
from dovetail.ir.shape_prop import call_with_values, fake_inference, fake_mode
from dovetail.numerics.sample_inputs import Domain, domains_of
from dovetail.outlining.inline import Flattener, copy_placeholders, flat, held_value
from dovetail.outlining.region import Region, body_key, results


@dataclass(frozen=True, eq=False)
class CompileUnit:
    """One distinct body to compile.

    `region` is the first call of it, its body with constants lifted to operands; `lifted` are the attributes of the
    outermost graph that hold those, in the order of the operands. `obstacle` is why no backend can compile it.
    """

    region: Region
    original: Body
    lifted: tuple[str, ...]
    key: str
    effects: BodySummary
    obstacle: str | None

    @property
    def roles(self) -> tuple[Any, ...]:
        """The identity of the region, and the roles of its operands and results in the pattern.

        Equal bodies may differ in these, and so may the code of a backend for them.
        """
        region = self.region
        identity = (region.kind, region.version, json.dumps(region.attrs, sort_keys=True))
        return (*identity, tuple(region.arguments.items()), region.results)

    @cached_property
    def domains(self) -> Mapping[int, Domain]:
        """The domains of the operands that may not be any number."""
        return domains_of(flat(cast("Body", self.region.body)).graph)

    @property
    def values(self) -> list[Any]:
        """The fake values of the operands, lifted ones last."""
        return [n.meta.get("val") for n in self.region.body.graph.find_nodes(op="placeholder")]


@dataclass(frozen=True, slots=True)
class _Facts:
    # None for the body itself: a reference to the key would keep it alive for ever.
    lifted_body: Body | None
    lifted: tuple[str, ...]
    key: str
    effects: BodySummary
    obstacle: str | None


_FACTS: WeakKeyDictionary[Body, _Facts] = WeakKeyDictionary()


def unit_of(region: Region) -> CompileUnit:
    """Return the unit of a region; its facts are cached by the body."""
    body = cast("Body", region.body)
    facts = _FACTS.get(body)
    if facts is None:
        obstacle = _obstacle(body)
        lifted, targets = _lift_constants(body) if body.borrows and obstacle is None else (body, ())
        own = None if lifted is body else lifted
        effects = summarize_body(lifted)
        if obstacle is None and effects.writes:
            obstacle = _reshaped_operand(body)
        facts = _FACTS[body] = _Facts(own, targets, body_key(lifted), effects, obstacle)
    run = facts.lifted_body or body
    return CompileUnit(
        replace(region, body=run), body, facts.lifted, facts.key, facts.effects, facts.obstacle
    )


def _lift_constants(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return the body flattened, with its tensor constants as operands after the others, and their attributes."""
    graph = Graph()
    held: dict[str, Node] = {}
    constants: dict[str, Node] = {}
    objects: dict[str, Any] = {}

    def hold(node: Node, target: str) -> Node:
        if target not in held:
            value = held_value(body, target)
            if isinstance(value, Tensor):
                new_node = graph.create_node("placeholder", node.name)
                # In generated code an operand is called by its target; another one may have this node's.
                new_node.target = new_node.name
                new_node.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
                constants[target] = new_node
            else:
                new_node = graph.create_node("get_attr", f"held_{len(objects)}")
                objects[cast("str", new_node.target)] = (value, target)
            held[target] = new_node
        return held[target]

    operands = copy_placeholders(body.graph, graph)
    outputs = Flattener(graph, lambda _: None, hold).write_body(body, operands)
    # Placeholders come first, in the order of the call.
    for node in reversed([*operands, *constants.values()]):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
    graph.output(outputs)
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
            return f"its operand '{node.name}' has no known value: capture the model, or set `meta['val']`"
    return None


def _reshaped_operand(body: Body) -> str | None:
    """Return which operand is given other sizes or strides in place: code takes operands of fixed shape, one by one."""
    reshapes = dependencies(body, list(body.graph.nodes)).inplace_reshapes
    if reshapes is None:
        return None
    changed = (n for n in body.graph.find_nodes(op="placeholder") if reshapes.is_changed(n))
    return next(
        (f"it changes the sizes or strides of its operand '{n.name}' in place" for n in changed), None
    )


_DETACHES = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.detach_.default,
        torch.detach,
        torch.detach_,
        "detach",
        "detach_",
    }
)
Flags = tuple[bool, ...]


class GradAnalysis:
    """A forward dataflow analysis of `requires_grad`, from parameters and inputs to the operands of regions.

    Which results of an operator with more than one are differentiable, autograd is asked. Unknown cases (a custom
    operator without a derivative) count as differentiable: a wrong answer costs a compilation, for every call is guarded.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Body, Flags], tuple[Flags, dict[Node, bool]]] = {}
        self._of_operator: dict[tuple[Any, int, Flags], Flags | None] = {}

    def operands(self, gm: GraphModule, candidates: Iterable[Region]) -> dict[str, Flags]:
        """Return whether each operand of each region requires gradients, by region name.

        `candidates` are all regions of the graph, each before those nested in it.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        inside = {"": self._follow(gm, gm.graph.nodes, {n: _requires_grad(n) for n in placeholders})}
        by_region: dict[str, Flags] = {}
        for region in candidates:
            flags = inside[region.name.rpartition("/")[0]]
            operands = tuple(flags[a] for a in cast("tuple[Node, ...]", region.node.args))
            by_region[region.name] = operands
            inside[region.name] = self._analyze(cast("Body", region.body), operands)[1]
        return by_region

    def _analyze(self, body: Body, operands: Flags) -> tuple[Flags, dict[Node, bool]]:
        known = self._known.get((body, operands))
        if known is None:
            placeholders = body.graph.find_nodes(op="placeholder")
            flags = self._follow(body, body.graph.nodes, dict(zip(placeholders, operands, strict=True)))
            known = self._known[body, operands] = (tuple(flags[n] for n in results(body)), flags)
        return known

    def _follow(self, owner: nn.Module, nodes: Any, flags: dict[Node, bool]) -> dict[Node, bool]:
        outputs: dict[Node, Flags] = {}
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                value = attribute(owner, cast("str", node.target))
                flags[node] = isinstance(value, Tensor) and value.requires_grad
            elif is_projection(node) and node.args[0] in outputs:
                flags[node] = outputs[cast("Node", node.args[0])][cast("int", node.args[1])]
            elif isinstance(body := _body_of(owner, node), Body):
                operands = tuple(flags[a] for a in cast("tuple[Node, ...]", node.args))
                outputs[node] = self._analyze(body, operands)[0]
                flags[node] = any(outputs[node])
            else:
                reached = any(flags[a] for a in node.all_input_nodes)
                value = node.meta.get("val")
                flags[node] = reached and not _detaches(node) and _is_differentiable(value)
                if flags[node] and isinstance(value, (tuple, list)):
                    of_results = self._results_of_operator(node, flags)
                    if of_results is not None:
                        outputs[node] = of_results
        return flags

    def _results_of_operator(self, node: Node, flags: Mapping[Node, bool]) -> Flags | None:
        """Return which results of an operator require gradients; None if that is not known."""
        key = (node.target, len(node.meta["val"]), tuple(flags[a] for a in node.all_input_nodes))
        if key not in self._of_operator:
            try:
                self._of_operator[key] = _differentiable_results(node, flags)
            except Exception:  # not all operators run on fake tensors with gradients
                self._of_operator[key] = None
        return self._of_operator[key]


def _differentiable_results(node: Node, flags: Mapping[Node, bool]) -> Flags | None:
    def operand(source: Node) -> Any:
        value = source.meta["val"]
        return value.detach().requires_grad_(flags[source]) if isinstance(value, Tensor) else value

    mode = fake_mode(node.all_input_nodes)
    if mode is None:
        return None
    with fake_inference(mode), torch.enable_grad():
        values = call_with_values(node, operand)
    return tuple(isinstance(value, Tensor) and value.requires_grad for value in values)


def _detaches(node: Node) -> bool:
    return node.target in _DETACHES or (node.target is getattr and node.args[1:2] == ("data",))


def _requires_grad(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def _body_of(owner: nn.Module, node: Node) -> Any:
    return attribute(owner, cast("str", node.target)) if node.op == "call_module" else None


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    if isinstance(value, (tuple, list)):
        return any(_is_differentiable(v) for v in cast("Sequence[Any]", value))
    return value is None
