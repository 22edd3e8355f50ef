"""Which values of a graph will require gradients, told beforehand from the graph alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dovetail.graph.module import Body, attribute
from dovetail.outlining.bodies import results
from dovetail.outlining.record import call_of
from dovetail.outlining.requests import is_projection

_STOPS = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
Flags = tuple[bool, ...]


class Foresight:
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
