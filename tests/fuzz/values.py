"""Filling in meta["val"]: what a capture would have written on each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp


class _Propagation(FakeTensorProp):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        n.meta.setdefault("val", None)
        return result


def annotate(gm: GraphModule, inputs: Sequence[Any], how: str) -> None:
    """Write meta["val"] on every node ("all"), with the first dimension symbolic, or only here and there."""
    symbolic = how == "symbolic"
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if symbolic else None)
    fakes = [_fake(mode, value, i, symbolic=symbolic) for i, value in enumerate(inputs)]
    enabled, seed = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        _Propagation(gm, mode).propagate_dont_convert_inputs(*fakes)
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_rng_state(seed)
    if how == "some":
        for i, node in enumerate(gm.graph.nodes):
            if i % 3 == 1:
                del node.meta["val"]


def _fake(mode: FakeTensorMode, value: Any, i: int, *, symbolic: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not symbolic:
        return mode.from_tensor(value)
    sizes = [
        DimDynamic.DYNAMIC if d == 0 and value.dim() > 1 else DimDynamic.STATIC for d in range(value.dim())
    ]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"x{i}"))
