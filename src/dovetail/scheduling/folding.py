"""Batch norms of chains folded into the weights of the product before them, and folded again when these change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dovetail.graph.index import Index
from dovetail.graph.module import Program, attribute, copy_graph, rebuild
from dovetail.graph.normalform import by_name, normalised, op_name, written
from dovetail.graph.weight_guard import fused_steps
from dovetail.passes.constants import Constants, Names
from dovetail.passes.fold_conv_batch_norm import folded_weights
from dovetail.scheduling.chains import Chain, is_fixed

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


@dataclass(frozen=True, eq=False)
class Pair:
    """A product and a norm that are one product with other weights."""

    weight: Tensor
    bias: Tensor | None
    norm: tuple[Tensor | None, Tensor | None, Tensor, Tensor]
    eps: float
    groups: int | None
    counter: Tensor | None

    @property
    def sources(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias, *self.norm) if t is not None]

    @property
    def version(self) -> Any:
        """What another value of any of them shows in.

        Statistics are written without a trace where a norm trains; the count of its batches tells.
        """
        told = [t for t in (*self.sources, self.counter) if t is not None]
        try:
            return [fused_steps(), *((t._version, t.data_ptr()) for t in told)]
        except RuntimeError:  # tensors of inference mode do not count their writes
            return object()

    def computed(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one product."""
        if self.groups is None:
            return folded_weights(self.weight, self.bias, *self.norm, self.eps)
        # A transposed convolution has its output channels second, within each group.
        groups, (inputs, outputs, *kernel) = self.groups, self.weight.shape
        grouped = self.weight.reshape(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
        upright = grouped.reshape(groups * outputs, inputs // groups, *kernel)
        weight, bias = folded_weights(upright, self.bias, *self.norm, self.eps)
        back = weight.reshape(groups, outputs, inputs // groups, *kernel).transpose(1, 2)
        return back.reshape(self.weight.shape), bias


@dataclass(frozen=True, eq=False)
class Fold:
    """A folded pair of a graph, and the buffers that hold the weights of the one product."""

    pair: Pair
    weight: Tensor
    bias: Tensor


class Folds:
    """The folded pairs of a graph, whose weights follow the parameters and statistics they are made of."""

    def __init__(self, folds: Iterable[Fold] = ()) -> None:
        self._folds = tuple(folds)
        self._seen: list[Any] = [None] * len(self._folds)

    def refresh(self) -> None:
        """Compute the weights again where what they are made of has changed."""
        now = [fold.pair.version for fold in self._folds]
        if now == self._seen:
            return
        with torch.inference_mode(False), torch.no_grad():
            for fold, seen, version in zip(self._folds, self._seen, now, strict=True):
                if seen != version:
                    weight, bias = fold.pair.computed()
                    fold.weight.copy_(weight)
                    fold.bias.copy_(bias)
        self._seen = now

    def forget(self) -> None:
        """Take it that anything may have changed."""
        self._seen = [None] * len(self._folds)


def folded(gm: GraphModule, chains: Iterable[Chain]) -> tuple[GraphModule, list[Chain], Folds]:
    """The graph with norms folded where they can be, the chains in it, and what keeps its weights up to date.

    Where none can be, it is the very graph.
    """
    listed = list(chains)
    index = Index(gm)
    fitting = {chain for chain in listed if not why_not_folded(index, chain)}
    if not fitting:
        return gm, listed, Folds()
    writer = _Writer(gm)
    made = [writer.fold(chain) if chain in fitting else writer.moved(chain) for chain in listed]
    program, folds = writer.written()
    folds.refresh()
    return program, made, folds


class _Writer:
    """Writes a copy of a graph with some norms folded."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, copy_graph(gm.graph)
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.constants = Constants(gm, Names(gm))
        self.pairs: list[tuple[Pair, list[str]]] = []

    def written(self) -> tuple[Program, Folds]:
        program = self.constants.installed(rebuild(self.gm, self.graph))
        held = program._buffers.__getitem__
        folds = [Fold(pair, *(cast("Tensor", held(name)) for name in names)) for pair, names in self.pairs]
        return program, Folds(folds)

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
        pair, here = self._pair(chain), self.moved(chain)
        product, norm = here.get("product"), here.get("norm")
        assert product is not None
        assert norm is not None
        state, target = dict.fromkeys(_state(here)), cast("OpOverload", product.node.target)
        weight, bias = self._weights(pair, product.node)
        given = normalised(product.node, by_name(product.node)) | {"weight": weight, "bias": bias}
        product.node.args, product.node.kwargs = written(target, given)
        # The value is the norm's, and so is its place in memory.
        product.node.meta["val"] = norm.value.meta["val"]
        norm.value.replace_all_uses_with(product.node)
        for node in (*reversed(norm.nodes), *state):
            if not node.users:
                self.graph.erase_node(node)
        return replace(here, links=tuple(link for link in here.links if link is not norm))

    def _pair(self, chain: Chain) -> Pair:
        product, norm = chain.get("product"), chain.get("norm")
        assert product is not None
        assert norm is not None
        of_product, of_norm = (
            normalised(link.node, by_name(link.node) | {"bias": by_name(link.node).get("bias")})
            for link in (product, norm)
        )
        weight, bias = (self._held(of_product[name]) for name in _OF_PRODUCT)
        scale, shift, mean, variance = (self._held(of_norm[name]) for name in _OF_NORM)
        assert weight is not None
        assert mean is not None
        assert variance is not None
        owner, _, _ = cast("str", of_norm["running_mean"].target).rpartition(".")
        counter = attribute(self.gm, f"{owner}.num_batches_tracked" if owner else "num_batches_tracked")
        is_transposed = "transpose" in op_name(product.node.target)
        return Pair(
            weight,
            bias,
            (scale, shift, mean, variance),
            of_norm["eps"],
            of_product["groups"] if is_transposed else None,
            counter if isinstance(counter, Tensor) else None,
        )

    def _held(self, node: Any) -> Tensor | None:
        return attribute(self.gm, cast("str", node.target)) if isinstance(node, Node) else None

    def _weights(self, pair: Pair, product: Node) -> tuple[Node, Node]:
        """Attributes for the weights of the one product, which are computed later."""
        stems = [f"folded_{op_name(product.target)}_{name}" for name in _OF_PRODUCT]
        with torch.inference_mode(False):
            mean = pair.norm[2]
            empty = torch.empty_like(pair.weight), mean.new_empty(mean.shape, dtype=pair.weight.dtype)
            names = self.constants.add_all(stems, lambda: empty)
        self.pairs.append((pair, names))
        with self.graph.inserting_before(product):
            weight, bias = (self.graph.create_node("get_attr", name, name=name) for name in names)
        like = cast("Node", by_name(product)["weight"]).meta.get("val")
        if isinstance(like, FakeTensor):
            weight.meta["val"] = torch.empty_like(like, requires_grad=False)
            bias.meta["val"] = like.new_empty(mean.shape, requires_grad=False)
        return weight, bias
