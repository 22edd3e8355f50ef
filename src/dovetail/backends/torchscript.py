"""torch's older compiler, by tracing: no Python between the operations."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled, quiet, why_not_fixed, why_not_plain
from dovetail.lowering.guards import has_saving_hooks
from dovetail.numerics.sample_inputs import real_examples
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_WARM_UPS = 2
_UNTRACED = ("data", "grad")


@checked_init()
class TorchScript(Backend):
    """Traces a region with `torch.jit.trace`, for the sizes of its operands.

    It takes no random operations: dead ones among them would be dropped, and the random stream would be another. Nor
    what computes a result from nothing: it would compute that once, and give the same tensor every time.
    """

    name = "torchscript"
    trains = True
    double_backward = True

    def __init__(self) -> None:
        self.version = f"1 {torch.__version__}"

    def supports(self, region: Region) -> Answer:
        reason = why_not_fixed(region) or why_not_plain(region, "writes") or _why_not_fresh(region)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        grad = torch.is_grad_enabled() and any(e.requires_grad for e in examples)
        with quiet():
            module: Any = torch.jit.trace(
                flat(cast("Body", region.body)), tuple(_given(examples)), check_trace=False
            )
        made = Traced(module, grad, region.body)
        # Its executor watches some runs and then optimises: what is tried must be what will run.
        for _ in range(_WARM_UPS):
            made(*_given(examples))
        return made

    def save(self, compiled: Traced) -> bytes:
        buffer = io.BytesIO()
        with quiet():
            torch.jit.save(compiled.module, buffer)
        return (b"g" if compiled.grad else b"-") + buffer.getvalue()

    def load(self, data: bytes, region: Region) -> Traced:
        with quiet():
            module: Any = torch.jit.load(io.BytesIO(data[1:]))
        return Traced(module, data[:1] == b"g", region.body)


def _why_not_fresh(region: Region) -> str | None:
    """Which result depends on no operand, or for the tracer seems not to."""
    dependent: set[Node] = set()
    for node in flat(cast("Body", region.body)).graph.nodes:
        if node.target is getattr and node.args[1] in _UNTRACED:
            return f"'{node.name}' reads `.{node.args[1]}`, which the tracer takes for a constant"
        if node.op == "placeholder" or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.op == "output":
            fixed = next((n for n in node.all_input_nodes if n not in dependent), None)
            return None if fixed is None else f"its result '{fixed.name}' depends on no operand"
    return None


class Traced:
    """A traced body. Where gradients are recorded it runs operation by operation, so that autograd sees them all.

    Under hooks on saved tensors the body runs: what a hook raises, as checkpointing does to stop a recomputation, does
    not pass the interpreter as it is.
    """

    def __init__(self, module: Any, grad: bool, body: Callable[..., Any]) -> None:
        self.module, self.grad, self.body = module, grad, body

    def __call__(self, *operands: Any) -> Any:
        if not self.grad:
            return self.module(*operands)
        if has_saving_hooks():
            return self.body(*operands)
        # Optimised, whole stretches of it become one node of autograd's, which minds grad mode and `detach` less.
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            return self.module(*operands)


def _given(examples: Sequence[Any]) -> list[Any]:
    """Made-up operands that may be written in place."""
    return [a.clone() if a.requires_grad else a for a in real_examples(examples)]
