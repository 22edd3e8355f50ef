"""Calls of modules that follow one another in the dataflow: a product, a batch norm, an activation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dovetail.errors import ScheduleError
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, attribute, copy_graph, rebuild
from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import by_name, normalised, op_name, written
from dovetail.outlining.request import Request
from dovetail.passes.fold_constants import Constants, UniqueNames
from dovetail.passes.fold_conv_batch_norm import Folded
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
class ModuleGroup:
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

    group: ModuleGroup
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


def chains(gm: GraphModule, groups: Iterable[ModuleGroup], part: str) -> list[Chain]:
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


def _calls(gm: GraphModule, groups: list[ModuleGroup]) -> dict[str, dict[str, list[Node]]]:
    """The operations of each call of each module that is named, by path and by call."""
    wanted = {path for group in groups for paths in group.paths for path in paths}
    calls: dict[str, dict[str, list[Node]]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_projection(node):
            for frame in frames_of(node):
                if frame.path in wanted:
                    calls.setdefault(frame.path, {}).setdefault(frame.key, []).append(node)
    return calls


def _chains_of(group: ModuleGroup, calls: Mapping[str, Mapping[str, list[Node]]], part: str) -> list[Chain]:
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


def _link(group: ModuleGroup, name: str, nodes: list[Node]) -> Link:
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


def _require_sequence(group: ModuleGroup, links: list[list[Link]]) -> None:
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


_OF_PRODUCT = ("weight", "bias")
_OF_NORM = ("weight", "bias", "running_mean", "running_var")


def why_not_folded(index: Index, chain: Chain) -> str:
    """Why the norm of a chain must stay; empty if its numbers can go into those of the product."""
    product, norm = chain.get("product"), chain.get("norm")
    if product is None or norm is None:
        return "there is no norm after a product"
    if not is_fixed(norm):
        return "the norm goes by the statistics of the batch"
    others = [user.name for user in product.value.users if user is not norm.node]
    if others:
        return f"the result of '{product.name}' is also used by '{others[0]}'"
    for node in _state(chain):
        if node.op != "get_attr":
            return f"'{node.name}' is computed, not a parameter or buffer"
        held = attribute(index.gm, cast("str", node.target))
        if type(held) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"'{node.name}' is a {type(held).__name__}, not a plain tensor"
        if index.position[node] in index.dependencies.written:
            return f"'{node.name}' is written by the model"
    before, after = product.value.meta.get("val"), norm.value.meta.get("val")
    weight = attribute(index.gm, cast("str", cast("Node", by_name(product.node)["weight"]).target))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return "the shapes are not known"
    # The norm is over the second dimension: that of the channels only where there is a batch and, after a linear
    # layer, nothing else.
    if before.dim() != cast("Tensor", weight).dim():
        return "the norm is not over the channels of the product"
    if not _same_place(before, after):
        return "the norm returns another dtype or other strides than the product"
    return ""


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two values have one dtype, device, shape and strides, for all sizes they may have."""
    if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
        return False
    # Strides of open sizes are written in several ways; none of this adds a guard.
    pairs = (*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True))
    return all(statically_known_true(m == n) for m, n in pairs)


def _state(chain: Chain) -> list[Node]:
    """Weights of the product and numbers of the norm."""
    product, norm = chain.get("product"), chain.get("norm")
    assert product is not None
    assert norm is not None
    given = [by_name(product.node).get(name) for name in _OF_PRODUCT]
    given += [by_name(norm.node).get(name) for name in _OF_NORM]
    return [node for node in given if isinstance(node, Node)]


def folded(gm: GraphModule, chains: Iterable[Chain]) -> tuple[GraphModule, list[Chain]]:
    """The graph with norms folded where they can be, and the chains in it; where none can be, the very graph."""
    listed = list(chains)
    index = Index(gm)
    fitting = {chain for chain in listed if not why_not_folded(index, chain)}
    if not fitting:
        return gm, listed
    writer = _FoldRewriter(gm)
    made = [writer.fold(chain) if chain in fitting else writer.moved(chain) for chain in listed]
    return writer.written(), made


class _FoldRewriter:
    """Writes a copy of a graph with some norms folded."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, copy_graph(gm.graph)
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.constants = Constants(gm, UniqueNames(gm))

    def written(self) -> Program:
        return self.constants.installed(rebuild(self.gm, self.graph))

    def moved(self, chain: Chain) -> Chain:
        """The same chain in the new graph."""
        return replace(
            chain,
            links=tuple(
                replace(link, node=self.nodes[link.node.name], value=self.nodes[link.value.name])
                for link in chain.links
            ),
        )

    def fold(self, chain: Chain) -> Chain:
        """The chain in the new graph without its norm."""
        here = self.moved(chain)
        product, norm = here.get("product"), here.get("norm")
        assert product is not None
        assert norm is not None
        state, target = dict.fromkeys(_state(here)), cast("OpOverload", product.node.target)
        weight, bias = self._weights(product.node, norm.node)
        given = normalised(product.node, by_name(product.node)) | {"weight": weight, "bias": bias}
        product.node.args, product.node.kwargs = written(target, given)
        # The value is the norm's, and so is its place in memory.
        product.node.meta["val"] = norm.value.meta["val"]
        norm.value.replace_all_uses_with(product.node)
        for node in (*reversed(norm.nodes), *state):
            if not node.users:
                self.graph.erase_node(node)
        return replace(here, links=tuple(link for link in here.links if link is not norm))

    def _weights(self, product: Node, norm: Node) -> tuple[Node, Node]:
        """Attributes for the weights of the one product."""
        of_product, of_norm = (
            normalised(node, by_name(node) | {"bias": by_name(node).get("bias")}) for node in (product, norm)
        )
        sources = [*(of_product[name] for name in _OF_PRODUCT), *(of_norm[name] for name in _OF_NORM)]
        is_transposed = "transpose" in op_name(product.target)
        names = self.constants.derive(
            [f"folded_{op_name(product.target)}_{name}" for name in _OF_PRODUCT],
            [cast("str", node.target) if isinstance(node, Node) else None for node in sources],
            Folded(of_norm["eps"], of_product["groups"] if is_transposed else None),
        )
        with self.graph.inserting_before(product):
            weight, bias = (self.graph.create_node("get_attr", name, name=name) for name in names)
        like, mean = of_product["weight"].meta.get("val"), of_norm["running_mean"].meta.get("val")
        if isinstance(like, FakeTensor):
            weight.meta["val"] = torch.empty_like(like, requires_grad=False)
            bias.meta["val"] = like.new_empty(mean.shape, requires_grad=False)
        return weight, bias
