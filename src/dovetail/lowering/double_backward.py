"""Double backward: where the backward of compiled code is itself differentiated, it goes through the body.

A compiler differentiates its code once, and its node in the autograd graph, a `torch.autograd.Function`, either raises
when its backward is differentiated or gives gradients that depend on nothing. The node of each call therefore gets an
`apply` of its own, which autograd looks up on the instance: an ordinary backward runs as compiled; one that records
itself (`create_graph=True`) or runs inside a transform (`is_grads_batched=True`) computes the body anew from the same
operands, differentiably.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.fx import Node

from dovetail.errors import LoweringError
from dovetail.frontend.tensor_effects import autograd_history
from dovetail.ir.graph_module import Body
from dovetail.ir.schema import named_arguments
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.lowering.guards import disable_autocast, has_saved_tensor_hooks
from dovetail.outlining.inline import flat
from dovetail.outlining.region import results

_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
_VERSION = operator.attrgetter("_version")
_BATCH_NORM_TRAINING = "aten._native_batch_norm_legit_functional"
_RUNNING = ("running_mean", "running_var")
Tap = tuple[int, int, bool]
"""The index of a result, of the node's output that it is, and whether it is a view of that output."""


class TwiceDifferentiable:
    """Compiled code for calls that autograd records; the body where the backward of such a call is differentiated.

    It raises LoweringError there if the body cannot be computed again from the operands: it draws random numbers, or its
    results depend on an operand that it writes.
    """

    def __init__(self, run: Callable[..., Any], unit: CompileUnit, backend: str) -> None:
        self.run, self.unit, self.backend = run, unit, backend
        self._is_transparent = False

    def __call__(self, *operands: Any) -> Any:
        results = self.run(*operands)
        if self._is_transparent:
            return results
        node, taps = _single_node(results, operands)
        if node is None:
            self._refuse_interior(results, operands)
        else:
            _Backward(self, node, taps, operands).install(node)
        return results

    def obstacle(self, results: Sequence[int]) -> str | None:
        """Return why the body cannot be recomputed for these results; None if it can."""
        effects = self.unit.effects
        if effects.random:
            return "it draws random numbers, and the body would draw others"
        if effects.host_effect:
            return f"it acts on the host ({effects.host_effect})"
        if effects.writes and _depends_on_written(
            cast("Body", self.unit.region.body), effects.writes, results
        ):
            return "its results depend on an operand that it has written"
        return None

    def refused(self, reason: str) -> LoweringError:
        """Return the error of a backward that cannot be differentiated."""
        return LoweringError(
            self.unit.region.name,
            self.backend,
            f"its backward cannot be differentiated (create_graph=True): {reason}. Lower it with a backend that autograd "
            f"sees through, such as 'eager'",
        )

    def _refuse_interior(self, results: Any, operands: Sequence[Any]) -> None:
        """Let each Function among several nodes raise when its backward is differentiated."""
        inner = [node for node in _reached(results, operands) if isinstance(node, BackwardCFunction)]
        self._is_transparent = not inner
        for node in inner:
            _Refusing(self, node).install(node)


class _Override:
    """An `apply` for one node; it holds the node weakly, for the node holds it."""

    def __init__(self, code: TwiceDifferentiable, node: Any) -> None:
        self.code, self.node = code, weakref.ref(node)

    def install(self, node: Any) -> None:
        node.apply = self.apply
        # From torch 2.13 on a node may be given its gradients in one list.
        if hasattr(node, "apply_boxed"):
            node.apply_boxed = self.apply_boxed

    def apply(self, *grads: Any) -> Any:
        return self.backward(grads, cast("Any", type(self.node())).apply, grads)

    def apply_boxed(self, grads: list[Any]) -> Any:
        return self.backward(grads, cast("Any", type(self.node())).apply_boxed, (grads,))

    def backward(self, grads: Sequence[Any], compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        raise NotImplementedError


class _Refusing(_Override):
    def backward(self, grads: Sequence[Any], compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        if torch.is_grad_enabled():
            name = type(self.node()).__name__
            raise self.code.refused(f"{name} is one of several autograd nodes of its code")
        return compiled(self.node(), *args)


class _Backward(_Override):
    def __init__(
        self, code: TwiceDifferentiable, node: Any, taps: Sequence[Tap], operands: tuple[Any, ...]
    ) -> None:
        self.code, self.node, self.taps = code, weakref.ref(node), taps
        # Autograd saves tensors so that hooks see them, which costs more than the rest of the call.
        self.operands: _Saved | _Held | None = (
            _Saved(operands) if has_saved_tensor_hooks() else _Held(operands)
        )

    def backward(self, grads: Sequence[Any], compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        held = self.operands
        keep = _keeps_graph()
        if held is None or not (torch.is_grad_enabled() or _transform() is not None):
            result = compiled(self.node(), *args)
        else:
            result = self._through_body(grads, held)
        if not keep:
            self.operands = None
        return result

    def _through_body(self, grads: Sequence[Any], held: _Saved | _Held) -> tuple[Any, ...]:
        code, node = self.code, cast("Any", self.node())
        reason = code.obstacle([i for i, _, _ in self.taps])
        if reason is not None:
            raise code.refused(reason)
        operands = held.restore()
        if operands is None:
            raise code.refused("one of its operands has been modified by an inplace operation")
        records = torch.is_grad_enabled()
        writes = code.unit.effects.writes
        with torch.enable_grad(), disable_autocast():
            # Of one operand that is computed from another, only what reaches the body directly is needed.
            fresh = [_fresh(a, i in writes) for i, a in enumerate(operands)]
            results = code.unit.region.body(*fresh)
        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        for i, number, is_view in self.taps:
            value, grad = results[i], grads[number]
            value = value._base if is_view and value._base is not None else value
            if grad is None or number in outputs or not value.requires_grad:
                continue
            if value.shape != grad.shape[grad.dim() - value.dim() :]:
                raise code.refused(f"result {i} is a view of another tensor than in the body")
            outputs[number] = (value, grad)
        edges = [_edge(a) for a in operands]
        inputs = [i for i, edge in enumerate(edges) if edge is not None and edge in node.next_functions]
        gradients: Sequence[Any] = [None] * len(inputs)
        if outputs and inputs:
            gradients = torch.autograd.grad(
                [value for value, _ in outputs.values()],
                [fresh[i] for i in inputs],
                [grad for _, grad in outputs.values()],
                create_graph=records,
                allow_unused=True,
            )
        # A tensor that is several operands may have one place among the node's inputs, or several: autograd adds up.
        total: dict[Any, Any] = {}
        for i, grad in zip(inputs, gradients, strict=True):
            before = total.get(edges[i])
            total[edges[i]] = grad if before is None else before if grad is None else before + grad
        places = iter(edge for edge in node.next_functions if edge[0] is not None)
        return tuple(total.pop(next(places), None) if needed else None for needed in node.needs_input_grad)


class _Held:
    """Operands as they are, with their version counters."""

    __slots__ = ("operands", "versions")

    def __init__(self, operands: tuple[Any, ...]) -> None:
        self.operands = operands
        self.versions = _versions(operands)

    def restore(self) -> Sequence[Any] | None:
        """Return the operands; None if one has been written since."""
        return self.operands if self.versions == _versions(self.operands) else None


class _Saved:
    """Operands saved as autograd saves tensors, so that its hooks on those (checkpointing, offloading) apply."""

    __slots__ = ("node", "operands")

    def __init__(self, operands: tuple[Any, ...]) -> None:
        tensors = [a for a in operands if isinstance(a, Tensor)]
        self.operands = [None if isinstance(a, Tensor) else a for a in operands]
        self.node: Any = cast("Any", _Save.apply(*tensors)).grad_fn

    def restore(self) -> Sequence[Any]:
        """Return the operands; torch raises if one has been written since."""
        tensors = iter(self.node.saved_tensors)
        return [next(tensors) if a is None else a for a in self.operands]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0, dtype=torch.float32)


def _versions(operands: tuple[Any, ...]) -> list[int]:
    try:
        return list(map(_VERSION, operands))
    except (AttributeError, RuntimeError):  # a number has no version counter, nor has an inference tensor
        return [_VERSION(a) if isinstance(a, Tensor) and not a.is_inference() else 0 for a in operands]


def _fresh(value: Any, written: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if written:
        return value.detach().clone()
    return value.view_as(value) if value.requires_grad else value


def _edge(value: Any) -> tuple[Any, int] | None:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _single_node(results: Any, operands: Sequence[Any]) -> tuple[Any, list[Tap]]:
    """Return the Function that all differentiable results come from, and how; None if they have several."""
    node: Any = None
    taps: list[Tap] = []
    operand_ids = [id(a) for a in operands]
    for i, value in enumerate(results):
        if not isinstance(value, Tensor) or not value.requires_grad:
            continue
        source, is_view = value, False
        if value._is_view():
            source = cast("Tensor", value._base)
            if id(source) in operand_ids or any(
                isinstance(a, Tensor) and source is a._base for a in operands
            ):
                continue  # a view of an operand, which autograd sees as one
            is_view = not isinstance(value.grad_fn, BackwardCFunction)
            source = source if is_view else value
        elif id(value) in operand_ids:
            continue
        origin = source.grad_fn
        if not isinstance(origin, BackwardCFunction) or (node is not None and origin is not node):
            return None, []
        node = origin
        taps.append((i, source.output_nr, is_view))
    return node, taps


def _reached(results: Any, operands: Sequence[Any]) -> Iterator[Any]:
    """Return the autograd nodes between results and operands."""
    return autograd_history(results, (edge[0] for edge in map(_edge, operands) if edge is not None))


def _depends_on_written(body: Body, writes: frozenset[int], indices: Sequence[int]) -> bool:
    """Return whether a result, given by its index, depends on the value of an operand before it was written.

    The statistics that a batch norm keeps while it trains are not what it normalises by.
    """
    flat_body = flat(body)
    graph = flat_body.graph
    operands = graph.find_nodes(op="placeholder")
    tainted: set[Node] = {operands[i] for i in writes}
    for node in graph.nodes:
        read: Sequence[Node] = node.all_input_nodes
        if node.target is operator.getitem and str(node.args[0].target).startswith(_BATCH_NORM_TRAINING):
            norm = node.args[0]
            named = named_arguments(norm)
            if named.get("training") and node.args[1] < 3:
                read = [v for k, v in named.items() if isinstance(v, Node) and k not in _RUNNING]
        if not tainted.isdisjoint(read):
            tainted.add(node)
    outputs = results(flat_body)
    return any(outputs[i] in tainted for i in indices)
