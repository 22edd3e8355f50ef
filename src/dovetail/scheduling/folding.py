"""Batch norms of chains folded into the weights of the product before them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dovetail.graph.index import Index
from dovetail.graph.module import Program, attribute, copy_graph, rebuild
from dovetail.graph.normalform import by_name, normalised, op_name, written
from dovetail.passes.constants import Constants, Names
from dovetail.passes.fold_conv_batch_norm import Folded
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


def folded(gm: GraphModule, chains: Iterable[Chain]) -> tuple[GraphModule, list[Chain]]:
    """The graph with norms folded where they can be, and the chains in it; where none can be, the very graph."""
    listed = list(chains)
    index = Index(gm)
    fitting = {chain for chain in listed if not why_not_folded(index, chain)}
    if not fitting:
        return gm, listed
    writer = _Writer(gm)
    made = [writer.fold(chain) if chain in fitting else writer.moved(chain) for chain in listed]
    return writer.written(), made


class _Writer:
    """Writes a copy of a graph with some norms folded."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, copy_graph(gm.graph)
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.constants = Constants(gm, Names(gm))

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
