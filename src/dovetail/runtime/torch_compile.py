"""The backend of `torch.compile(model, backend="dovetail")`."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch._guards
from torch import SymFloat, SymInt, Tensor, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.export import Dim
from torch.fx import GraphModule
from torch.fx.node import map_arg

from dovetail.errors import CallMismatch, CaptureError, InvalidArgument
from dovetail.frontend.capture import capture
from dovetail.lowering.failures import Diagnostics, report
from dovetail.lowering.guards import active_autocast, disable_autocast
from dovetail.lowering.lower import lower_with
from dovetail.lowering.options import Options, recompile_limit_of
from dovetail.runtime.compile import make_preset
from dovetail.runtime.presets import CompilePreset, as_plan, whole_graph

_log = logging.getLogger("dovetail")
_PRESET = ("backends", "rules", "pipeline")
_OPTIONS = (*_PRESET, *(f.name for f in fields(Options) if f.name != "grad"))
_WHOLE_GRAPH_BACKEND = "inductor"
"""What runs a graph for which a plan has torch.compile: its default backend."""


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: it is captured as a model is, fused and lowered.

    `options` are those of `dovetail.compile`. Equal bodies are compiled once, also across graphs and graph breaks. A
    graph that cannot be captured runs as it is, with a warning; with `on_error="raise"` the error is raised. Where a
    plan has the model or the graph as it is, the graph runs as it is; where it has torch.compile, Inductor gets it
    whole.
    """
    if mode is not None:
        raise InvalidArgument(
            f"mode={mode!r} is Inductor's; give options to its backend: "
            f"options={{'backends': [Inductor(options={{...}})]}}."
        )
    preset = _preset(options)
    try:
        first = _lowered(gm, example_inputs, preset)
    except Exception as error:
        if preset.options.strict:
            raise
        report("fallback", f"a graph of torch.compile's runs as it is: {error}")
        return gm.forward
    return _DynamoCaptures(gm, preset, first)


class _DynamoCaptures:
    """A graph of Dynamo, captured again for calls that pass Dynamo's guards and that no capture so far covers.

    A capture may specialize sizes that are symbolic for Dynamo.
    """

    def __init__(self, gm: GraphModule, preset: CompilePreset, first: Callable[..., Any]) -> None:
        self._gm, self._preset, self._runs = gm, preset, [first]
        self._refused = 0
        self._diagnostics = Diagnostics()
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        for run in self._runs:
            with contextlib.suppress(CallMismatch):  # raised before anything ran
                return run(*args)
        with self._lock:
            run = self._run_for(args)
        with contextlib.suppress(CallMismatch):
            return run(*args)
        return self._gm.forward(*args)

    def _run_for(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        limit = recompile_limit_of(self._preset.options.recompile_limit)
        reason = f"the recompile limit of {limit} is reached; raise `recompile_limit`"
        if len(self._runs) + self._refused < limit:
            try:
                self._runs.append(_lowered(self._gm, args, self._preset))
                return self._runs[-1]
            except Exception as error:
                if self._preset.options.strict:
                    raise
                self._refused += 1
                reason = str(error)
        message = f"calls of a graph of torch.compile's run it as it is: {reason}"
        self._diagnostics.report("fallback", message)
        return self._gm.forward


def _lowered(
    original: GraphModule, example_inputs: Sequence[Any], preset: CompilePreset
) -> Callable[..., Any]:
    _refuse_lost_gradients(original, example_inputs)
    gm = _without_checkpoints(original)
    gm, floats = _with_floats_specialized(gm, example_inputs)
    known = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    with torch._guards.tracing(None):
        graph = capture(
            _Flat(gm), tuple(_concrete(v) for v in example_inputs), dynamic_shapes=_dynamic(known)
        )
        with disable_autocast():
            compiled = preset(graph)
            if compiled.execution == "torch.compile":
                lowered = lower_with(whole_graph()(graph), _WHOLE_GRAPH_BACKEND, preset.options)
                compiled = replace(compiled, program=lowered)
    for event in compiled.diagnostics:
        report(event.kind, event.message)
    if compiled.execution in ("model", "graph"):
        return original.forward
    run = _guarded(compiled.program.forward, floats)
    if not active_autocast():
        return run

    def run_without_autocast(*args: Any) -> Any:
        # Dynamo guards on autocast, and its casts are in the captured graph.
        with disable_autocast():
            return run(*args)

    return run_without_autocast


def _without_checkpoints(gm: GraphModule) -> GraphModule:
    """Return the graph with bodies of activation checkpoints called directly: capture does not keep checkpoints."""
    checkpoints = gm.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    if not checkpoints:
        return gm
    _log.warning(
        "activation checkpoints are not kept (%d in this graph): what backward needs is stored, not computed again.",
        len(checkpoints),
    )
    graph = copy.deepcopy(gm.graph)
    bodies: dict[str, GraphModule] = {}
    for node in graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        name = cast("str", node.args[0].target)
        bodies[name] = _without_checkpoints(cast("GraphModule", gm.get_submodule(name)))
        with graph.inserting_before(node):
            call = graph.call_module(name, tuple(node.args[1:]))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    inlined = GraphModule(gm, graph)
    for name, body in bodies.items():
        setattr(inlined, name, body)
    return inlined


def _with_floats_specialized(
    gm: GraphModule, example_inputs: Sequence[Any]
) -> tuple[GraphModule, Mapping[int, float]]:
    """Return the graph with numbers in place of floats that Dynamo passes as tensors, and these by input.

    With dynamic=True that is every float, an eps or a dropout's probability too, and operators branch on them.
    """
    graph = copy.deepcopy(gm.graph)
    floats: dict[int, float] = {}
    for i, placeholder in enumerate(graph.find_nodes(op="placeholder")):
        for node in list(placeholder.users):
            if node.target != "item" or not isinstance(node.meta.get("example_value"), SymFloat):
                continue
            value = floats[i] = float(example_inputs[i].item())
            for user in list(node.users):
                user.args, user.kwargs = map_arg(
                    (user.args, user.kwargs), lambda n, node=node, value=value: value if n is node else n
                )
            graph.erase_node(node)
    return (GraphModule(gm, graph), floats) if floats else (gm, floats)


def _guarded(run: Callable[..., Any], floats: Mapping[int, float]) -> Callable[..., Any]:
    if not floats:
        return run

    def checked(*args: Any) -> Any:
        for i, value in floats.items():
            if args[i].item() != value:
                raise CallMismatch(
                    f"a number was {value} when the graph was captured and is {args[i].item()} here."
                )
        return run(*args)

    return checked


def _refuse_lost_gradients(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise for an autograd.Function, of which a capture has the forward only."""
    requires_grad = any(isinstance(v, Tensor) and v.requires_grad for v in example_inputs)
    if not (torch.is_grad_enabled() and requires_grad):
        return
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if getattr(node.target, "__name__", "") == "autograd_function_apply":
                raise CaptureError(
                    f"'{node.name}' applies a torch.autograd.Function, whose own backward formula tracing drops. "
                    f"Make it a custom operator (torch.library.custom_op with register_autograd)."
                )


def _preset(options: Mapping[str, Any] | None) -> CompilePreset:
    values = dict(options or {})
    unknown = sorted(set(values) - set(_OPTIONS))
    if unknown:
        raise InvalidArgument(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(_OPTIONS))}.")
    arguments = {name: values.pop(name) for name in _PRESET if name in values}
    plan, values["plan"] = as_plan(values.get("plan"))
    if plan is not None and plan.has_size_ranges:
        report(
            "stale",
            "the plan was tuned for ranges of sizes, which captures of torch.compile do not follow: what it decides for them "
            "is not applied. Use `dovetail.compile(model, args, plan=...)`.",
        )
    arguments["plan"] = plan
    # Dynamo guards on grad mode and on which inputs require gradients, so both are known here.
    return make_preset(Options(**values, grad=torch.is_grad_enabled()), **arguments)[0]


class _Flat(nn.Module):
    """A graph of Dynamo as a model with positional inputs, so that it is captured like any other."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__()
        self.graph_module = gm

    def forward(self, *inputs: Any) -> Any:
        return self.graph_module(*inputs)


def _concrete(value: Any) -> Any:
    """Return an example input with its sizes in the call that is being compiled."""
    if isinstance(value, SymInt):
        return int(cast("Any", value).node.hint)
    return value


def _dynamic(inputs: Sequence[Any]) -> Any:
    """Return the sizes that are symbolic for Dynamo, as `dynamic_shapes` for export; None if all are static."""
    shapes = tuple(_symbolic_dims(v) for v in inputs)
    return {"inputs": shapes} if any(shapes) else None


def _symbolic_dims(value: Any) -> Any:
    if isinstance(value, SymInt):
        return Dim.AUTO
    if isinstance(value, Tensor):
        dims = {i: Dim.AUTO for i, n in enumerate(value.shape) if isinstance(n, SymInt)}
        return dims or None
    return None
