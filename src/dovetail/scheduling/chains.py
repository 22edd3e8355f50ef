"""Calls of modules that follow one another in the dataflow: a product, a batch norm, an activation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch.fx import GraphModule, Node

from dovetail.errors import ScheduleError
from dovetail.graph.normalform import by_name, normalised, op_name
from dovetail.outlining.requests import Request, is_projection
from dovetail.rules.library import KINDS
from dovetail.scheduling.finders import frames_of, path_of

Role = Literal["product", "norm", "activation"]

_ORDER: tuple[Role, ...] = ("product", "norm", "activation")
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_PRODUCTS = frozenset({*_CONVOLUTIONS, *_TRANSPOSED, "linear"})
_FIXED_NORM = "_native_batch_norm_legit_no_training"
_NORMS = frozenset(
    {_FIXED_NORM, "_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
    | {"native_batch_norm", "batch_norm"}
)
_ACTIVATIONS = frozenset(
    {"relu", "silu", "tanh", "sigmoid", "hardswish", "gelu", "leaky_relu", "elu", "softplus", "hardsigmoid"}
    | {"hardtanh", "relu6", "mish", "selu", "celu", "log_sigmoid"}
)
_SEQUENCES = (
    "what is fused is a convolution (also transposed) or linear layer, a batch norm and an activation, in this order "
    "and at least two of them"
)


@dataclass(frozen=True)
class Group:
    """Modules to be fused: their names in the model, and every path that each has within the traced part."""

    names: tuple[str, ...]
    paths: tuple[frozenset[str], ...]
    backend: Any = None

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"


@dataclass(frozen=True, eq=False)
class Link:
    """One call of a module: the operation it is about, and the value it gives on."""

    name: str
    role: Role
    node: Node
    value: Node

    @property
    def input(self) -> Any:
        given = by_name(self.node)
        return given.get("input", given.get("self"))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node, *(user for user in self.node.users if is_projection(user)))


@dataclass(frozen=True, eq=False)
class Chain:
    """Calls of the modules of a group, each reading what the one before it gives, in the order of the dataflow."""

    group: Group
    links: tuple[Link, ...]

    def get(self, role: Role) -> Link | None:
        return next((link for link in self.links if link.role == role), None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for link in self.links for node in link.nodes)

    def request(self) -> Request:
        """The region of this chain, of the kind and with the attributes that rules give to such a region.

        What else reads a value in between gets it as a further result.
        """
        product, norm, activation = (self.get(role) for role in _ORDER)
        attrs: dict[str, Any] = {"activation": None, **_activated(activation)}
        arguments: dict[str, Any] = {"x": self.links[0].input}
        if product is not None:
            given = normalised(product.node, by_name(product.node))
            arguments |= {"weight": given["weight"], "bias": given.get("bias")}
            if op_name(product.node.target) != "linear":
                attrs |= {name: given[name] for name in ("stride", "padding", "dilation", "groups")}
            if op_name(product.node.target) in _TRANSPOSED:
                attrs |= {"output_padding": given["output_padding"]}
        kind = _kind(self)
        if kind != "linear_activation":
            attrs |= {"batch_norm": norm is not None, "training": norm is not None and not is_fixed(norm)}
        if norm is not None:
            given = normalised(norm.node, by_name(norm.node))
            arguments |= {"scale": given["weight"], "shift": given["bias"]}
            arguments |= {"mean": given.get("running_mean"), "variance": given.get("running_var")}
            attrs |= {"eps": given["eps"]}
        contract = KINDS.get(kind)
        if contract is not None:
            # Settings of an activation that the kind has no attribute for stay beside those it has.
            known = {name: value for name, value in attrs.items() if name in contract.attrs}
            attrs |= contract.complete(known)
        return Request(
            self.nodes,
            kind,
            version=contract.version if contract is not None else 1,
            attrs=attrs,
            escapes="output",
            rule="fuse_modules",
            arguments={name: value for name, value in arguments.items() if isinstance(value, Node)},
            results=(self.links[-1].value,),
        )


def _kind(chain: Chain) -> str:
    product = chain.get("product")
    if product is None:
        return "bn_act"
    if op_name(product.node.target) == "linear":
        is_whole = chain.get("norm") is None and chain.get("activation") is not None
        return "linear_activation" if is_whole else "linear_bn_act"
    return "conv_transpose_bn_act" if op_name(product.node.target) in _TRANSPOSED else "conv_bn_act"


def _activated(link: Link | None) -> dict[str, Any]:
    """An activation as rules describe it, by its name and what it is set to."""
    if link is None:
        return {}
    given = normalised(link.node, by_name(link.node))
    name = op_name(link.node.target)
    if name == "gelu":
        return {"activation": "gelu" if given["approximate"] == "none" else "gelu_tanh"}
    if name == "leaky_relu":
        return {"activation": name, "slope": given["negative_slope"]}
    if name == "hardtanh" and (given["min_val"], given["max_val"]) == (0, 6):
        return {"activation": "relu6"}
    settings = {k: v for k, v in given.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {"activation": name, **({} if settings == _default_settings(link.node) else settings)}


def _default_settings(node: Node) -> dict[str, Any]:
    """The numbers that an operator takes when it is not given any."""
    schema: Any = getattr(node.target, "_schema", None)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema else {}
    return {k: v for k, v in defaults.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def is_fixed(norm: Link) -> bool:
    """Whether a norm goes by the statistics it keeps, and not by those of the batch."""
    given = normalised(norm.node, by_name(norm.node))
    if given.get("running_mean") is None or given.get("running_var") is None:
        return False
    return op_name(norm.node.target) == _FIXED_NORM or given.get("training") is False


def chains(gm: GraphModule, groups: Iterable[Group], part: str) -> list[Chain]:
    """Every place where the modules of a group follow one another; ScheduleError where a group has none."""
    listed = list(groups)
    calls = _calls(gm, listed)
    found: list[Chain] = []
    taken: dict[Node, Chain] = {}
    for group in listed:
        here = _chains_of(group, calls, part)
        for chain in here:
            for link in chain.links:
                other = taken.setdefault(link.node, chain)
                if other is not chain:
                    raise ScheduleError(
                        f"{group} and {other.group} both take the same call of '{link.name}'; leave it to one of them"
                    )
        found += here
    return found


def _calls(gm: GraphModule, groups: list[Group]) -> dict[str, dict[str, list[Node]]]:
    """The operations of each call of each module that is named, by path and by call."""
    wanted = {path for group in groups for paths in group.paths for path in paths}
    calls: dict[str, dict[str, list[Node]]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_projection(node):
            for frame in frames_of(node):
                if frame.path in wanted:
                    calls.setdefault(frame.path, {}).setdefault(frame.key, []).append(node)
    return calls


def _chains_of(group: Group, calls: Mapping[str, Mapping[str, list[Node]]], part: str) -> list[Chain]:
    links: list[list[Link]] = []
    for name, paths in zip(group.names, group.paths, strict=True):
        here = [nodes for path in sorted(paths) for nodes in calls.get(path, {}).values()]
        if not here:
            raise ScheduleError(
                f"{group} cannot be fused: '{name}' computes nothing when {part} is called; {_SEQUENCES}"
            )
        links.append([_link(group, name, nodes) for nodes in here])
    links.sort(key=lambda of: _ORDER.index(of[0].role))
    _require_sequence(group, links)
    makers = [{link.value: link for link in of} for of in links]
    found: list[Chain] = []
    for last in links[-1]:
        walked = [last]
        for before in reversed(makers[:-1]):
            if not isinstance(walked[0].input, Node) or walked[0].input not in before:
                break
            walked.insert(0, before[walked[0].input])
        else:
            found.append(Chain(group, tuple(walked)))
    if not found:
        raise ScheduleError(f"{group} cannot be fused: {_why_none(links)}")
    return found


def _link(group: Group, name: str, nodes: list[Node]) -> Link:
    for role, known in zip(_ORDER, (_PRODUCTS, _NORMS, _ACTIVATIONS), strict=True):
        here = [node for node in nodes if op_name(node.target) in known]
        if len(here) == 1:
            return Link(name, role, here[0], _value(here[0]))
        if here:
            break
    listed = ", ".join(dict.fromkeys(op_name(node.target) or str(node.target) for node in nodes))
    raise ScheduleError(f"{group} cannot be fused: '{name}' computes {listed}; {_SEQUENCES}")


def _value(node: Node) -> Node:
    """The value that a call gives on: of an operation that returns several, the first."""
    taken = [user for user in node.users if is_projection(user) and user.args[1] == 0]
    return taken[0] if taken else node


def _require_sequence(group: Group, links: list[list[Link]]) -> None:
    roles = [of[0].role for of in links]
    twice = [of[0] for of in links if roles.count(of[0].role) > 1]
    if twice:
        raise ScheduleError(
            f"{group} cannot be fused: '{twice[0].name}' and '{twice[1].name}' are each a {twice[0].role}; {_SEQUENCES}"
        )


def _why_none(links: list[list[Link]]) -> str:
    """The first place where what should follow does not."""
    for before, after in pairwise(links):
        made = {link.value for link in before}
        if any(link.input in made for link in after):
            continue
        first, then = before[0], after[0]
        if any(link.input in {a.value for a in after} for link in before):
            return (
                f"'{first.name}' reads what '{then.name}' computes, and not the other way round; {_SEQUENCES}"
            )
        return f"'{then.name}' reads {_told(then.input)}, not what '{first.name}' computes"
    names = " and ".join(f"'{of[0].name}'" for of in links)
    return f"no call of {names} follows one of the others from end to end"


def _told(value: Any) -> str:
    if not isinstance(value, Node):
        return repr(value)
    if value.op == "placeholder":
        return f"the input '{value.name}'"
    if is_projection(value) and isinstance(value.args[0], Node):
        value = value.args[0]
    what, at = op_name(value.target) or value.name, path_of(value)
    what = "batch_norm" if what in _NORMS else what
    return f"the result of {what} in '{at}'" if at else f"the result of {what}"
