"""Captures of models with repeated layers, replayed and traced in full, and their comparison."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import config
from dovetail.frontend import export, layer_replay
from dovetail.ir.nodes import storage_keys

DEPTH = 5


class Replays:
    """Counts the layers that were replayed in captures."""

    def __init__(self) -> None:
        self.instances: list[layer_replay.LayerReplay] = []

    def __call__(self, model: nn.Module) -> layer_replay.LayerReplay:
        self.instances.append(layer_replay.LayerReplay(model))
        return self.instances[-1]

    @property
    def count(self) -> int:
        return len(self.instances[-1].copied)


def facts(gm: GraphModule) -> list[Any]:
    """Everything about the nodes of a graph that must not depend on how it was traced."""
    storages: dict[int, int] = {}
    rows: list[Any] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        tensors = [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Tensor)]
        dense = [v for v in tensors if not torch._C._functorch.is_batchedtensor(v)]
        shared = [storages.setdefault(key, len(storages)) for v in dense for key in storage_keys(v)]
        rows.append(
            (
                node.name,
                node.op,
                str(node.target),
                str(node.args),
                str(node.kwargs),
                [(tuple(map(str, v.shape)), tuple(map(str, v.stride())), v.dtype, v.device) for v in tensors],
                [(v.requires_grad, type(v).__name__, str(v.storage_offset())) for v in tensors],
                shared,
                list((node.meta.get("nn_module_stack") or {}).items()),
                re.sub(r"<eval_with_key>\.\d+", "", node.meta.get("stack_trace") or ""),
            )
        )
    return rows


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    replays: Replays,
    monkeypatch: pytest.MonkeyPatch,
    reset: Callable[[], Any] = lambda: None,
    **options: Any,
) -> int:
    """Compare both ways of capturing a model, and return how many layers were replayed; `reset` is called before each run."""
    reset()
    monkeypatch.setattr(config, "replay_layers", True)
    exported: list[list[Any]] = []
    decompose, retraced = export.decompose, export.retraced
    traces: list[str] = []

    def recorded_decompose(program: Any) -> Any:
        exported.append(facts(program.graph_module))
        return decompose(program)

    def recorded_retrace(*given: Any) -> Any:
        traces.append("fast" if config.replay_layers else "slow")
        return retraced(*given)

    monkeypatch.setattr(export, "decompose", recorded_decompose)
    monkeypatch.setattr(export, "retraced", recorded_retrace)
    fast = dovetail.capture(model, args, **options)
    count = replays.count
    monkeypatch.setattr(config, "replay_layers", False)
    reset()
    slow = dovetail.capture(model, args, **options)
    monkeypatch.setattr(config, "replay_layers", True)
    if "dynamic_shapes" not in options:  # nodes for sizes that nothing uses have taken numbers
        for mine, full in zip(exported[0], exported[1], strict=True):
            assert mine == full
    assert traces.count("fast") == traces.count("slow")
    for mine, full in zip(facts(fast), facts(slow), strict=True):
        assert mine == full
    kwargs = options.get("kwargs") or {}
    reset()
    torch.manual_seed(1)
    expected = model(*args, **kwargs)
    torch.manual_seed(1)
    results = fast(*args, **kwargs)
    leaves, spec = torch.utils._pytree.tree_flatten(expected)
    others, other_spec = torch.utils._pytree.tree_flatten(results)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return count


class Layer(nn.Module):
    """A layer with a view, a result of several values, and an attribute that differs between layers."""

    def __init__(self, index: int, width: int = 8) -> None:
        super().__init__()
        self.layer_idx = index
        self.linear, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        a, b = self.linear(self.norm(x)).chunk(2, dim=-1)
        return x + torch.tanh(a.reshape(-1, 2, 4)).reshape(x.shape) * b * scale


class Stack(nn.Module):
    """Layers one after the other, after one that lets all of them have inputs with gradients."""

    def __init__(self, make: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(make(i) for i in range(depth))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Namespace:
    """An object with attributes."""

    scale: Any = 1.0


SHARED = Namespace()


class Scaled(Layer):
    """A layer whose result is scaled by what `scale` returns."""

    value = 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * self.scale()

    def scale(self) -> Any:
        return 1.0
