"""Chains of module calls in the dataflow: a convolution or linear layer, a batch norm, an activation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dovetail.errors import ScheduleError
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import attribute
from dovetail.ir.module_paths import frames_of, path_of
from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, normalized_arguments, op_name
from dovetail.outlining.outline import Request
from dovetail.passes.fold_conv_batch_norm import FoldPair, fold_pairs, why_not_constant
from dovetail.rules.library import KINDS

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
    """Modules to be fused: their names in the model, and all paths of each within the traced part."""

    names: tuple[str, ...]
    paths: tuple[frozenset[str], ...]
    backend: Any = None

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"


@dataclass(frozen=True, eq=False)
class Link:
    """One call of a module: its operation and its value."""

    name: str
    role: Role
    node: Node
    value: Node

    @property
    def input(self) -> Any:
        arguments = named_arguments(self.node)
        return arguments.get("input", arguments.get("self"))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node, *(user for user in self.node.users if is_projection(user)))


@dataclass(frozen=True, eq=False)
class Chain:
    """Calls of the modules of a group in the order of the dataflow, each reading the value of the one before."""

    group: ModuleGroup
    links: tuple[Link, ...]

    def get(self, role: Role) -> Link | None:
        return next((link for link in self.links if link.role == role), None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for link in self.links for node in link.nodes)

    def request(self) -> Request:
        """Return the request for the region of this chain, with the kind and attributes that rules give to it.

        A value in between that is used elsewhere becomes a further result.
        """
        product, norm, activation = (self.get(role) for role in _ORDER)
        attrs: dict[str, Any] = {"activation": None, **_activation_attrs(activation)}
        arguments: dict[str, Any] = {"x": self.links[0].input}
        if product is not None:
            given = normalized_arguments(product.node)
            arguments |= {"weight": given["weight"], "bias": given.get("bias")}
            if op_name(product.node.target) != "linear":
                attrs |= {name: given[name] for name in ("stride", "padding", "dilation", "groups")}
            if op_name(product.node.target) in _TRANSPOSED:
                attrs |= {"output_padding": given["output_padding"]}
        kind = _kind(self)
        if kind != "linear_activation":
            attrs |= {
                "batch_norm": norm is not None,
                "training": norm is not None and not uses_running_stats(norm),
            }
        if norm is not None:
            given = normalized_arguments(norm.node)
            arguments |= {"scale": given["weight"], "shift": given["bias"]}
            arguments |= {"mean": given.get("running_mean"), "variance": given.get("running_var")}
            attrs |= {"eps": given["eps"]}
        contract = KINDS.get(kind)
        if contract is not None:
            # Settings of an activation without an attribute of the kind are kept beside the others.
            attributes = {name: value for name, value in attrs.items() if name in contract.attrs}
            attrs |= contract.complete(attributes)
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


def _activation_attrs(link: Link | None) -> dict[str, Any]:
    """Return the name of an activation and its settings as attributes of a region."""
    if link is None:
        return {}
    arguments = normalized_arguments(link.node)
    name = op_name(link.node.target)
    if name == "gelu":
        return {"activation": "gelu" if arguments["approximate"] == "none" else "gelu_tanh"}
    if name == "leaky_relu":
        return {"activation": name, "slope": arguments["negative_slope"]}
    if name == "hardtanh" and (arguments["min_val"], arguments["max_val"]) == (0, 6):
        return {"activation": "relu6"}
    settings = {k: v for k, v in arguments.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {"activation": name, **({} if settings == _default_settings(link.node) else settings)}


def _default_settings(node: Node) -> dict[str, Any]:
    """Return the default numbers of an operator."""
    schema: Any = getattr(node.target, "_schema", None)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema else {}
    return {k: v for k, v in defaults.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def uses_running_stats(norm: Link) -> bool:
    """Return whether a norm uses its running statistics, and not those of the batch."""
    arguments = normalized_arguments(norm.node)
    if arguments.get("running_mean") is None or arguments.get("running_var") is None:
        return False
    return op_name(norm.node.target) == _FIXED_NORM or arguments.get("training") is False


def find_chains(gm: GraphModule, groups: Iterable[ModuleGroup], part: str) -> list[Chain]:
    """Return every chain of the modules of a group; raise ScheduleError for a group without one."""
    requested = list(groups)
    calls = _calls_by_module(gm, requested)
    result: list[Chain] = []
    owners: dict[Node, Chain] = {}
    for group in requested:
        group_chains = _chains_of(group, calls, part)
        for chain in group_chains:
            for link in chain.links:
                other = owners.setdefault(link.node, chain)
                if other is not chain:
                    raise ScheduleError(
                        f"{group} and {other.group} both take the same call of '{link.name}'; leave it to one of them"
                    )
        result += group_chains
    return result


def _calls_by_module(gm: GraphModule, groups: list[ModuleGroup]) -> dict[str, dict[str, list[Node]]]:
    """Return the operations of the modules of groups by path and by call."""
    module_paths = {path for group in groups for paths in group.paths for path in paths}
    calls: dict[str, dict[str, list[Node]]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_projection(node):
            for frame in frames_of(node.meta):
                if frame.path in module_paths:
                    calls.setdefault(frame.path, {}).setdefault(frame.key, []).append(node)
    return calls


def _chains_of(group: ModuleGroup, calls: Mapping[str, Mapping[str, list[Node]]], part: str) -> list[Chain]:
    links: list[list[Link]] = []
    for name, paths in zip(group.names, group.paths, strict=True):
        module_calls = [nodes for path in sorted(paths) for nodes in calls.get(path, {}).values()]
        if not module_calls:
            raise ScheduleError(
                f"{group} cannot be fused: '{name}' computes nothing when {part} is called; {_SEQUENCES}"
            )
        links.append([_link_of(group, name, nodes) for nodes in module_calls])
    links.sort(key=lambda of: _ORDER.index(of[0].role))
    _require_sequence(group, links)
    makers = [{link.value: link for link in of} for of in links]
    matched: list[Chain] = []
    for last in links[-1]:
        walked = [last]
        for before in reversed(makers[:-1]):
            if not isinstance(walked[0].input, Node) or walked[0].input not in before:
                break
            walked.insert(0, before[walked[0].input])
        else:
            matched.append(Chain(group, tuple(walked)))
    if not matched:
        raise ScheduleError(f"{group} cannot be fused: {_first_gap(links)}")
    return matched


def _link_of(group: ModuleGroup, name: str, nodes: list[Node]) -> Link:
    for role, operators in zip(_ORDER, (_PRODUCTS, _NORMS, _ACTIVATIONS), strict=True):
        candidates = [node for node in nodes if op_name(node.target) in operators]
        if len(candidates) == 1:
            node = candidates[0]
            # The value of an operation that returns a tuple is its first element.
            firsts = (user for user in node.users if is_projection(user) and user.args[1] == 0)
            return Link(name, role, node, next(firsts, node))
        if candidates:
            break
    operations = ", ".join(dict.fromkeys(op_name(node.target) or str(node.target) for node in nodes))
    raise ScheduleError(f"{group} cannot be fused: '{name}' computes {operations}; {_SEQUENCES}")


def _require_sequence(group: ModuleGroup, links: list[list[Link]]) -> None:
    roles = [of[0].role for of in links]
    twice = [of[0] for of in links if roles.count(of[0].role) > 1]
    if twice:
        raise ScheduleError(
            f"{group} cannot be fused: '{twice[0].name}' and '{twice[1].name}' are each a {twice[0].role}; {_SEQUENCES}"
        )


def _first_gap(links: list[list[Link]]) -> str:
    """Return where the chain of links breaks first."""
    for before, after in pairwise(links):
        values = {link.value for link in before}
        if any(link.input in values for link in after):
            continue
        first, then = before[0], after[0]
        if any(link.input in {a.value for a in after} for link in before):
            return (
                f"'{first.name}' reads what '{then.name}' computes, and not the other way round; {_SEQUENCES}"
            )
        return f"'{then.name}' reads {_describe_source(then.input)}, not what '{first.name}' computes"
    names = " and ".join(f"'{of[0].name}'" for of in links)
    return f"no call of {names} follows one of the others from end to end"


def _describe_source(value: Any) -> str:
    if not isinstance(value, Node):
        return repr(value)
    if value.op == "placeholder":
        return f"the input '{value.name}'"
    if is_projection(value) and isinstance(value.args[0], Node):
        value = value.args[0]
    what, at = op_name(value.target) or value.name, path_of(value.meta)
    what = "batch_norm" if what in _NORMS else what
    return f"the result of {what} in '{at}'" if at else f"the result of {what}"


def fold_norms(gm: GraphModule, chains: Iterable[Chain]) -> tuple[GraphModule, list[Chain]]:
    """Fold the norms of chains into the products before them where possible; return the graph and the chains in it.

    The graph itself is returned where no norm can be folded.
    """
    requested, index = list(chains), Index(gm)
    pairs = {chain: pair for chain in requested if (pair := _foldable_pair(index, chain)) is not None}
    if not pairs:
        return gm, requested
    folded = fold_pairs(index, list(pairs.values()))
    nodes = {node.name: node for node in folded.graph.nodes}
    return folded, [
        replace(
            chain,
            links=tuple(
                replace(link, node=nodes[link.node.name], value=nodes[link.value.name])
                for link in chain.links
                if chain not in pairs or link.role != "norm"
            ),
        )
        for chain in requested
    ]


def _foldable_pair(index: Index, chain: Chain) -> FoldPair | None:
    """Return the product and norm of a chain; None where the norm must stay."""
    product, norm = chain.get("product"), chain.get("norm")
    if product is None or norm is None or not uses_running_stats(norm):
        return None
    if set(product.value.users) != {norm.node} or any(n.users for n in norm.nodes[1:] if n is not norm.value):
        return None
    if why_not_constant(index, product.node, norm.node):
        return None
    before, after = product.value.meta.get("val"), norm.value.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    # The norm is over the second dimension: that of the channels only where there is a batch and, after a linear
    # layer, nothing else.
    weight = attribute(index.gm, cast("str", cast("Node", named_arguments(product.node)["weight"]).target))
    if before.dim() != cast("Tensor", weight).dim() or not _same_layout(before, after):
        return None
    return FoldPair(product.node, norm.node, norm.value)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two values have one dtype, device, shape and strides, for all sizes they may have."""
    if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
        return False
    # Symbolic strides have different but equal forms; none of this adds a guard.
    pairs = (*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True))
    return all(statically_known_true(m == n) for m, n in pairs)
