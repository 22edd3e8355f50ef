"""TorchScript by tracing, which removes Python between the operations."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled
from dovetail.lowering.guards import has_saved_tensor_hooks
from dovetail.lowering.region_support import suppress_warnings, why_effectful, why_not_static
from dovetail.numerics.sample_inputs import random_inputs
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_WARM_UPS = 2
_UNTRACED = ("data", "grad")


@checked_init()
class TorchScript(Backend):
    """Traces a region with `torch.jit.trace`, for the sizes of its operands.

    Random operations are not supported: unused ones would be dropped, which changes the random stream. Results that
    depend on no operand are not supported either: the same tensor would be returned in every call.
    """

    name = "torchscript"
    trains = True
    double_backward = True

    def __init__(self) -> None:
        self.version = f"1 {torch.__version__}"

    def supports(self, region: Region) -> Answer:
        reason = why_not_static(region) or why_effectful(region, "writes") or _why_not_dependent(region)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        grad = torch.is_grad_enabled() and any(e.requires_grad for e in examples)
        with suppress_warnings():
            module: Any = torch.jit.trace(
                flat(cast("Body", region.body)), tuple(_writable_inputs(examples)), check_trace=False
            )
        traced = Traced(module, grad, region.body)
        # The executor optimizes after some profiled runs: the verified code must be the final one.
        for _ in range(_WARM_UPS):
            traced(*_writable_inputs(examples))
        return traced

    def save(self, compiled: Traced) -> bytes:
        buffer = io.BytesIO()
        with suppress_warnings():
            torch.jit.save(compiled.module, buffer)
        return (b"g" if compiled.grad else b"-") + buffer.getvalue()

    def load(self, data: bytes, region: Region) -> Traced:
        with suppress_warnings():
            module: Any = torch.jit.load(io.BytesIO(data[1:]))
        return Traced(module, data[:1] == b"g", region.body)


def _why_not_dependent(region: Region) -> str | None:
    """Return which result depends on no operand, or seems not to for the tracer, or None."""
    dependent: set[Node] = set()
    for node in flat(cast("Body", region.body)).graph.nodes:
        if node.target is getattr and node.args[1] in _UNTRACED:
            return f"'{node.name}' reads `.{node.args[1]}`, which the tracer treats as a constant"
        if node.op == "placeholder" or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.op == "output":
            fixed = next((n for n in node.all_input_nodes if n not in dependent), None)
            return None if fixed is None else f"its result '{fixed.name}' depends on no operand"
    return None


class Traced:
    """A traced body. With gradients it runs without optimization, so that autograd records every operation.

    Under hooks on saved tensors the body runs instead: the interpreter wraps the exceptions that hooks raise, which
    checkpointing uses to stop a recomputation.
    """

    def __init__(self, module: Any, grad: bool, body: Callable[..., Any]) -> None:
        self.module, self.grad, self.body = module, grad, body

    def __call__(self, *operands: Any) -> Any:
        if not self.grad:
            return self.module(*operands)
        if has_saved_tensor_hooks():
            return self.body(*operands)
        # Optimized, whole subgraphs become one autograd node, which ignores some changes of grad mode and `detach`.
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            return self.module(*operands)


def _writable_inputs(examples: Sequence[Any]) -> list[Any]:
    """Return random operands that may be written in place."""
    return [a.clone() if a.requires_grad else a for a in random_inputs(examples)]
