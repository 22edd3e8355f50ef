"""dovetail behind `torch.compile(model, backend="dovetail")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch._guards
from torch import SymInt, Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument
from dovetail.graph.capture import capture
from dovetail.lowering.compile import make_recipe
from dovetail.lowering.recipe import Recipe

_OPTIONS = ("rules", "pipeline", *(f.name for f in fields(Recipe) if f.name not in ("pipeline", "grad")))


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: brought to the form that `capture` gives, fused and lowered.

    `options` are those of `dovetail.compile`. Equal bodies are compiled once, also across graphs and graph breaks.
    """
    if mode is not None:
        raise InvalidArgument(
            f"mode={mode!r} is Inductor's; give options to its backend: "
            f"options={{'backends': [Inductor(options={{...}})]}}."
        )
    recipe = _recipe(options)
    # Dynamo guards on grad mode and on which inputs require gradients, so both are known here.
    recipe = replace(recipe, grad=torch.is_grad_enabled())
    known = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    with torch._guards.tracing(None):
        graph = capture(_Flat(gm), tuple(_settled(v) for v in example_inputs), dynamic_shapes=_dynamic(known))
        lowered = recipe(graph)
    return lowered.forward


def _recipe(options: Mapping[str, Any] | None) -> Recipe:
    given = dict(options or {})
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise InvalidArgument(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(_OPTIONS))}.")
    return make_recipe(**given)[0]


class _Flat(nn.Module):
    """A graph of Dynamo's as a model with positional inputs, so that it is captured like any other."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__()
        self.graph_module = gm

    def forward(self, *inputs: Any) -> Any:
        return self.graph_module(*inputs)


def _settled(value: Any) -> Any:
    """An example input with its sizes as they were in the call that is being compiled."""
    if isinstance(value, SymInt):
        return int(cast("Any", value).node.hint)
    return value


def _dynamic(inputs: Sequence[Any]) -> Any:
    """Which sizes Dynamo left open, in the form that export takes; None if none is."""
    if not any(_open(v) for v in inputs):
        return None
    return {"inputs": tuple(_open(v) for v in inputs)}


def _open(value: Any) -> Any:
    if isinstance(value, SymInt):
        return Dim.DYNAMIC
    if isinstance(value, Tensor):
        dims = {i: Dim.DYNAMIC for i, n in enumerate(value.shape) if isinstance(n, SymInt)}
        return dims or None
    return None
