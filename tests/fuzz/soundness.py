"""Whether what is said of a node's effects is true of running it: nothing may happen that was not foretold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Interpreter, Node

from dovetail.ir.alias_analysis import AliasClasses, alias_classes
from dovetail.ir.effects import Effects, effects_of

from . import ops
from .observe import Snapshot
from .program import seed


class Untold(AssertionError):
    """A node did something that its effects do not say."""

    def __init__(self, what: str, node: Node, words: str) -> None:
        super().__init__(words)
        self.what, self.node = what, node


def watch(gm: GraphModule, state: Snapshot, inputs: Sequence[Any]) -> None:
    """Run a graph node by node, comparing each with its effects; raises Untold. State is left restored."""
    state.restore()
    seed(3)
    ops.LOG.clear()
    try:
        _Watcher(gm, state).run(*[x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    finally:
        torch.set_grad_enabled(True)
        state.restore()


class _Watcher(Interpreter):
    def __init__(self, gm: GraphModule, state: Snapshot) -> None:
        super().__init__(gm, garbage_collect_values=False)
        nodes = list(gm.graph.nodes)
        each = [effects_of(node, gm) for node in nodes]
        self.declared: dict[Node, Effects] = dict(zip(nodes, each, strict=True))
        self.classes: AliasClasses = alias_classes(gm, nodes, each)
        self.state = state

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        self._expect_operands(n)
        held = list(self._held())
        before = [_bits(tensor) for _, _, tensor in held]
        stream, log, grad = torch.get_rng_state(), len(ops.LOG), torch.is_grad_enabled()
        value = super().run_node(n)
        declared = self.declared[n]
        if not declared.random and not torch.equal(stream, torch.get_rng_state()):
            raise Untold("draws at random", n, f"{n.format_node()} draws at random")
        if not (declared.host_effect or declared.barrier) and len(ops.LOG) != log:
            raise Untold("acts on the world", n, f"{n.format_node()} acts on the world")
        if not declared.barrier and torch.is_grad_enabled() != grad:
            raise Untold("switches a mode", n, f"{n.format_node()} switches gradients")
        self._expect_writes(
            n, declared, [h for h, bits in zip(held, before, strict=True) if _bits(h[2]) != bits]
        )
        self._expect_sharing(n, value, held)
        return value

    def _expect_operands(self, n: Node) -> None:
        """A body is compiled for the values of its placeholders, so these are what arrives."""
        body = self.module.get_submodule(str(n.target)) if "dovetail.region" in n.meta else None
        if not isinstance(body, GraphModule):
            return
        for operand, parameter in zip(n.args, body.graph.find_nodes(op="placeholder"), strict=True):
            expected = parameter.meta.get("val")
            actual = self.env[operand] if isinstance(operand, Node) else operand
            if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
                shapes = list(expected.shape), list(actual.shape)
                if all(isinstance(size, int) for size in expected.shape) and shapes[0] != shapes[1]:
                    words = f"{n.format_node()} takes {shapes[0]} as '{parameter.name}', not {shapes[1]}"
                    raise Untold("takes other operands", n, words)

    def _held(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Every tensor there is now, by name and class of memory."""
        for node, value in self.env.items():
            for tensor in _tensors(value):
                yield node.name, self.classes.of(node), tensor
        for name, tensor in self.state.tensors.items():
            yield name, self.classes.of_state(tensor), tensor

    def _expect_writes(
        self, n: Node, declared: Effects, changed: list[tuple[str, int, torch.Tensor]]
    ) -> None:
        written = {self.classes.of(w) for w in declared.writes}
        written |= {self.classes.of_state(t) for t in declared.state_written}
        for name, memory, _ in changed:
            if memory not in written:
                raise Untold("writes", n, f"{n.format_node()} changed '{name}'")

    def _expect_sharing(self, n: Node, value: Any, held: list[tuple[str, int, torch.Tensor]]) -> None:
        mine = {_storage(t) for t in _tensors(value)}
        for name, memory, tensor in held:
            if _storage(tensor) in mine and memory != self.classes.of(n):
                raise Untold("shares memory", n, f"{n.format_node()} shares memory with '{name}'")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor) and x.numel()]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bits(tensor: torch.Tensor) -> Any:
    dense = tensor.detach()
    return (tuple(dense.shape), dense.contiguous().numpy().tobytes())
