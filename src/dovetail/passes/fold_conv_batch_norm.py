"""Folding batch norm with fixed statistics into the convolution or linear layer before it.

`fold_pairs` writes the graph and `folded_weights` has the arithmetic (Jacob et al., "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018, section 3.2); scheduling folds its chains with them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from dovetail.errors import checked_init
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, attribute, pause_gc, require_graph
from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import named_arguments, normalized_arguments, op_name, same_geometry, to_args_kwargs
from dovetail.ir.shape_prop import fake_inference, fake_mode
from dovetail.passes.fold_constants import GraphRewriter
from dovetail.passes.pass_manager import Finding, Pass, require_fuel

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset(
    {
        _aten.conv1d.default,
        _aten.conv2d.default,
        _aten.conv3d.default,
        _aten.conv1d.padding,
        _aten.conv2d.padding,
        _aten.conv3d.padding,
        _aten.convolution.default,
    }
)
_TRANSPOSED = frozenset(
    {
        _aten.conv_transpose1d.default,
        _aten.conv_transpose2d.input,
        _aten.conv_transpose3d.input,
    }
)
_WHOLE_NORMS = frozenset({_aten.batch_norm.default})
_EVAL_NORMS = frozenset({_aten._native_batch_norm_legit_no_training.default})
_FLAGGED_NORMS = frozenset({_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default})
_TRAIN_NORMS = frozenset(
    {_aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit.no_stats}
)
_OF_NORM = ("weight", "bias", "running_mean", "running_var")
_NORMS = _WHOLE_NORMS | _EVAL_NORMS | _FLAGGED_NORMS | _TRAIN_NORMS


@checked_init()
@dataclass(frozen=True, repr=False)
class FoldConvBatchNorm(Pass):
    """Fold batch norm in eval mode into the weights of the convolution before it.

    Needs: a convolution that only the norm reads, with weights, scale and statistics that are attributes of the graph
    and not written in it. Leaves: the convolution with a weight and a bias computed once, in buffers that are not in
    the `state_dict`; the parameters stay. When one of them or a statistic is written, the buffers are recomputed
    before the next call; writes that no version counter shows are detected within `weight_check_interval` calls.
    Gradients do not reach the parameters: for inference only.

    Values are equal within float tolerance: the scale is applied to the weights instead of the results. `fuel` is the
    largest number of changes.
    """

    fuel: int | None = None

    def __post_init__(self) -> None:
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with norms folded; the input graph itself if no norm can be folded."""
        with pause_gc():
            index = Index(require_graph(gm))
            index.require_order()
            pairs = [match for match in _find(index) if isinstance(match, FoldPair)][: self.fuel]
            return fold_pairs(index, pairs) if pairs else gm

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Return which norms would be folded, and why others that follow a convolution would not."""
        findings: list[Finding] = []
        folded = 0
        for match in _find(Index(require_graph(gm))):
            if isinstance(match, Finding):
                findings.append(match)
                continue
            names = (match.convolution.name, match.norm.name)
            spent = self.fuel is not None and folded >= self.fuel
            reason = f"the fuel of {self.fuel} is spent" if spent else ""
            findings.append(Finding(names, "the norm is folded into the convolution", reason))
            folded += not spent
        return tuple(findings)


@dataclass(frozen=True)
class FoldPair:
    """A convolution or linear layer, the batch norm after it, and the node that is the norm's result."""

    convolution: Node
    norm: Node
    result: Node


def _find(index: Index) -> Iterator[FoldPair | Finding]:
    for node in index.nodes:
        if node.op != "call_function" or node.target not in _NORMS:
            continue
        convolution = named_arguments(node).get("input")
        if not isinstance(convolution, Node) or convolution.target not in _CONVOLUTIONS | _TRANSPOSED:
            continue
        reason = _why_not(index, convolution, node)
        if reason:
            yield Finding((convolution.name, node.name), "", reason)
            continue
        result = node if node.target in _WHOLE_NORMS else next(iter(node.users))
        yield FoldPair(convolution, node, result)


def _why_not(index: Index, convolution: Node, norm: Node) -> str:
    given = normalized_arguments(norm)
    if given.get("running_mean") is None or given.get("running_var") is None:
        return "the norm keeps no running statistics: it normalises by those of the batch"
    if norm.target in _TRAIN_NORMS or given.get("training"):
        return "it normalises by the statistics of the batch; capture the model in eval mode"
    if len(convolution.users) > 1:
        others = sorted(user.name for user in convolution.users if user is not norm)
        return f"the convolution's result is also used by '{others[0]}'"
    if convolution.target in _TRANSPOSED or named_arguments(convolution).get("transposed"):
        return "it is a transposed convolution"
    parts = list(norm.users)
    if norm.target not in _WHOLE_NORMS and not (
        len(parts) == 1 and parts[0].target is operator.getitem and parts[0].args[1] == 0
    ):
        return "more than the normalised value is used of the norm"
    reason = why_not_constant(index, convolution, norm)
    if reason:
        return reason
    before = convolution.meta.get("val")
    after = (norm if norm.target in _WHOLE_NORMS else parts[0]).meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return "the shapes are not known: give the graph values with `capture`"
    arguments = normalized_arguments(convolution)
    if before.dim() != cast("Tensor", _held(index.gm, arguments["weight"])).dim():
        return "the convolution has no batch dimension"
    if not same_geometry(before, after):
        return "the norm returns another dtype or other strides than the convolution"
    return ""


def why_not_constant(index: Index, convolution: Node, norm: Node) -> str:
    """Return why weights and statistics are not constants of the graph that can be folded; empty if they are."""
    weights = {k: named_arguments(convolution).get(k) for k in ("weight", "bias")}
    statistics = {k: named_arguments(norm).get(k) for k in _OF_NORM}
    for node in (*weights.values(), *statistics.values()):
        if node is None:
            continue
        if not isinstance(node, Node) or node.op != "get_attr":
            return f"{_named(node)} is computed, not an attribute of the graph"
        held = _held(index.gm, node)
        if type(held) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"'{node.name}' is a {type(held).__name__}, not a plain tensor"
        if index.position[node] in index.dependencies.written:
            return f"'{node.name}' is written in this graph"
    return ""


def _named(value: object) -> str:
    return f"'{value.name}'" if isinstance(value, Node) else repr(value)


def _held(gm: GraphModule, node: Any) -> Any:
    return attribute(gm, cast("str", node.target))


def fold_pairs(index: Index, pairs: list[FoldPair]) -> Program:
    """Return the graph with these norms folded; the operators before them keep their names."""
    return _Folding(index, pairs).write()


class _Folding(GraphRewriter):
    def __init__(self, index: Index, pairs: list[FoldPair]) -> None:
        super().__init__(index.gm)
        self.index, self.pairs = index, pairs

    def write(self) -> Program:
        folded = {pair.convolution: pair for pair in self.pairs}
        gone = {node for pair in self.pairs for node in (pair.norm, pair.result, *_dead_projections(pair))}
        gone |= self._unread(gone | folded.keys())
        with fake_inference(fake_mode(self.index.nodes)):
            for node in self.index.nodes:
                if node in folded:
                    self.env[folded[node].result] = self._fold(folded[node])
                elif node not in gone:
                    self.copy(node)
        return self.program()

    def _unread(self, rewritten: set[Node]) -> set[Node]:
        """Return the attributes that only folded nodes read, without the inputs of the convolutions."""
        read = {n for node in rewritten for n in node.all_input_nodes if n.op == "get_attr"}
        inputs = {named_arguments(pair.convolution)["input"] for pair in self.pairs}
        return {n for n in read if all(user in rewritten for user in n.users)} - inputs

    def _fold(self, pair: FoldPair) -> Node:
        old, target = pair.convolution, cast("OpOverload", pair.convolution.target)
        weight, bias = self._weights(pair, target)
        arguments = normalized_arguments(old)
        arguments |= {"input": self.env[cast("Node", arguments["input"])], "weight": weight, "bias": bias}
        args, kwargs = to_args_kwargs(target, arguments)
        new = self.graph.create_node("call_function", target, args, kwargs, old.name, old.type)
        # The value and its layout are the norm's, the source location is the convolution's.
        new.meta = {**old.meta, "val": pair.result.meta["val"]}
        return new

    def _weights(self, pair: FoldPair, target: OpOverload) -> tuple[Node, Node]:
        old = pair.convolution
        given = normalized_arguments(old, named_arguments(old) | {"bias": named_arguments(old).get("bias")})
        norm = normalized_arguments(pair.norm)

        nodes = (given["weight"], given["bias"], *(norm[k] for k in _OF_NORM))
        names = self.constants.derive(
            [f"folded_{op_name(target)}_weight", f"folded_{op_name(target)}_bias"],
            [None if node is None else cast("str", cast("Node", node).target) for node in nodes],
            Folded(norm["eps"], given["groups"] if target in _TRANSPOSED else None),
        )
        weight, bias = (self.graph.create_node("get_attr", name, name=name) for name in names)
        like = cast("Node", given["weight"]).meta.get("val")
        if isinstance(like, FakeTensor):
            weight.meta["val"] = torch.empty_like(like, requires_grad=False)
            mean = cast("Node", norm["running_mean"]).meta.get("val")
            shape = mean.shape if isinstance(mean, Tensor) else like.shape[:1]
            bias.meta["val"] = like.new_empty(shape, requires_grad=False)
        return weight, bias


def _dead_projections(pair: FoldPair) -> list[Node]:
    users = (user for user in pair.norm.users if is_projection(user) and user is not pair.result)
    return [user for user in users if not user.users]


@dataclass(frozen=True)
class Folded:
    """`folded_weights` as a function of weights and statistics; `groups` are those of a transposed convolution."""

    eps: float
    groups: int | None = None

    def __call__(self, sources: Sequence[Tensor | None]) -> Sequence[Tensor]:
        weight, bias, scale, shift, mean, variance = cast("Sequence[Tensor]", sources)
        if self.groups is None:
            return folded_weights(weight, bias, scale, shift, mean, variance, self.eps)
        # A transposed convolution has its output channels second, within each group.
        groups, (inputs, outputs, *kernel) = self.groups, weight.shape
        grouped = weight.reshape(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
        upright = grouped.reshape(groups * outputs, inputs // groups, *kernel)
        folded, offset = folded_weights(upright, bias, scale, shift, mean, variance, self.eps)
        back = folded.reshape(groups, outputs, inputs // groups, *kernel).transpose(1, 2)
        return back.reshape(weight.shape), offset


def folded_weights(
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of the convolution that computes a convolution followed by a norm."""
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    factor = torch.rsqrt(variance.to(wide) + eps)
    if scale is not None:
        factor = factor * scale.to(wide)
    offset = (bias.to(wide) if bias is not None else torch.zeros_like(factor)) - mean.to(wide)
    offset = offset * factor
    if shift is not None:
        offset = offset + shift.to(wide)
    widened = weight.to(wide) * factor.reshape(-1, *([1] * (weight.dim() - 1)))
    return widened.to(weight.dtype), offset.to(weight.dtype)
