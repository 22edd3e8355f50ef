"""A model that is ready to be tuned: captured, with its search space, its environment and the backends that are searched."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import CaptureError, DovetailError, InvalidArgument
from dovetail.frontend.capture import capture
from dovetail.lowering.backend_protocol import Backend, built_in, resolve, why_unusable
from dovetail.outlining.inline import inline
from dovetail.outlining.region import graph_key
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import isolated_run
from dovetail.tuning.block import Block, blocks_of, describe_call, record_inputs
from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.environment import Environment, current_environment
from dovetail.tuning.executor import TunedModel
from dovetail.tuning.plan_passes import make_pass
from dovetail.tuning.region_candidates import Pruned
from dovetail.tuning.search_space import GraphState, SearchSpace, block_space, explore
from dovetail.tuning.size_ranges import Range, SizedExample, dynamic_shapes_for

_LOG = logging.getLogger("dovetail")
_NOT_SEARCHED = {
    "eager": "it runs operations as they are",
    "aoti": "it is Inductor's code ahead of time",
    "int8": "it changes precision",
    "cuda_graphs": "it wraps another backend",
}
"""Built-in backends that are not searched unless they are named, and why."""


def prepare_range(
    model: nn.Module, example: SizedExample, backends: Any, deadline: float = math.inf
) -> Prepared:
    """Capture a model for a range of sizes; where these cannot be symbolic, for the example's own."""
    try:
        sizes = {example.pattern: (example.range,)}
        return prepare(model, example.args, example.kwargs, backends, sizes, deadline)
    except CaptureError as error:
        if example.range[0] == example.range[1]:
            raise
        _LOG.warning(
            "sizes from %d to %d are tuned for one of them, for they cannot be symbolic: %s",
            *example.range,
            error,
        )
        return prepare(model, example.args, example.kwargs, backends, deadline=deadline)


@dataclass(eq=False)
class Prepared:
    """A model that is ready to be tuned: captured, with its search space."""

    tuned: TunedModel
    backends: tuple[Backend, ...]
    space: SearchSpace
    environment: Environment
    operands: str
    label: str
    sizes: Mapping[str, tuple[Range, ...]] = field(default_factory=dict[str, tuple[Range, ...]])
    add_block: Callable[[Block], None] = lambda block: None
    """Makes a block of a new state available to trials."""

    def new_state(self, pipeline: Sequence[PassChoice]) -> GraphState | None:
        """Return the state that a pipeline leads to, one of the space if its graph is there already; None if refused."""
        graph = self._after(pipeline)
        if graph is None:
            return None
        key, flat_key = graph_key(graph), graph_key(inline(graph))
        unfused = [choice for choice in pipeline if choice.name != "Fuse"]
        if len(unfused) < len(pipeline):
            # Regions that no pass needs are candidates without fusing, and then so are others.
            unfused_graph = self._after(unfused)
            if unfused_graph is not None and graph_key(unfused_graph) == flat_key:
                pipeline, graph, key = unfused, unfused_graph, flat_key
        known = next((s for s in self.space.states if s.key == key or s.flat_key == flat_key), None)
        if known is not None:
            return known
        blocks, new = blocks_of(graph, {k: s.block for k, s in self.space.blocks.items()})
        tuned = self.tuned
        record_inputs(graph, blocks, tuned.args, tuned.kwargs, grad=tuned.mode == "training")
        for block_key in new:
            self.space.blocks[block_key] = block_space(blocks[block_key], self.space.choices, parts=False)
            self.add_block(blocks[block_key])
        return GraphState(tuple(pipeline), graph, key, blocks)

    def _after(self, pipeline: Sequence[PassChoice]) -> GraphModule | None:
        """Return the graph after a pipeline; None, with the reason among what is pruned, if a pass refuses it."""
        graph = self.space.states[0].graph
        try:
            for choice in pipeline:
                graph = make_pass(choice)(graph)
        except DovetailError as error:
            self.space.pruned.append(Pruned(" -> ".join(map(str, pipeline)), str(error)))
            return None
        return graph


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    backends: Any = None,
    sizes: Mapping[str, tuple[Range, ...]] | None = None,
    deadline: float = math.inf,
) -> Prepared:
    """Capture a model, for a range of `sizes` if it has one, and derive its search space until a `deadline`."""
    mode: Mode = "training" if model.training else "inference"
    named = dict(kwargs or {})
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, named))]
    device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    with torch.set_grad_enabled(mode == "training"), isolated_run(model):
        shapes = dynamic_shapes_for(sizes or {}, model.forward, args, named)
        graph = capture(model, args, named, dynamic_shapes=shapes)
        chosen = searched_backends(backends, device)
        space = explore(graph, args, named, mode, chosen, deadline=deadline)
    tuned = TunedModel(model, args, named, mode, device)
    operands = describe_call(model, pytree.tree_leaves((args, named)))
    ranges = [f", n from {low} to {high}" for each in (sizes or {}).values() for low, high in each]
    label = f"{type(model).__name__}, {mode}, {_inputs(args, named)}{''.join(ranges)}"
    return Prepared(tuned, chosen, space, current_environment(device), operands, label, sizes or {})


def searched_backends(backends: Any, device: torch.device) -> tuple[Backend, ...]:
    """Return the backends that are searched: those given, or all that are installed and do not change precision."""
    if backends is not None:
        if isinstance(backends, Mapping):
            raise InvalidArgument("a mapping by kind is for `lower` and `compile`; give a list of backends.")
        return () if isinstance(backends, (list, tuple)) and not backends else resolve(backends)
    available: list[Backend] = []
    for name in built_in():
        if name in _NOT_SEARCHED:
            continue
        backend = resolve(name)[0]
        missing = why_unusable(backend)
        if missing is None:
            available.append(backend)
        else:
            _LOG.info("backend '%s' is not searched: %s", name, missing)
    return tuple(available)


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the inputs of a call in a few words."""
    texts: list[str] = []
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor):
            texts.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        else:
            texts.append(repr(leaf) if isinstance(leaf, (int, float, bool, str)) else type(leaf).__name__)
    return ", ".join(texts)
