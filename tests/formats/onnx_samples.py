"""Calls of operators from torch's own database, each as a graph of one node with what is known of its values."""

from __future__ import annotations

import operator
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.formats.onnx.region_model import TRANSLATIONS

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


@dataclass
class Sample:
    """One call: the graph, the tensors it is given, and what torch makes of them."""

    target: OpOverload
    gm: GraphModule
    given: list[Tensor]
    expected: list[Tensor]


def database() -> list[Any]:
    """torch's list of operators with samples. It asks for a test helper that is not needed for the list."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def samples(dtype: torch.dtype, each: int) -> Iterator[Sample]:
    """Samples of every operator that has an ONNX translation, so many of each way of calling it."""
    for op in database():
        if dtype not in op.dtypes:
            continue
        for i, sample in enumerate(op.sample_inputs("cpu", dtype)):
            if i >= each:
                break
            for call in _calls(op, (sample.input, *sample.args), dict(sample.kwargs)):
                as_graph = _sample(call)
                if as_graph is not None:
                    yield as_graph


def _calls(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    packet = getattr(torch.ops.aten, op.aten_name or op.name, None) if "." not in op.name else None
    names = {op.name.rpartition(".")[2], op.aten_name}
    packets = [getattr(torch.ops.aten, n, None) for n in names if n] + [packet]
    for candidate in packets:
        if isinstance(candidate, torch._ops.OpOverloadPacket):
            for name in candidate.overloads():
                yield getattr(candidate, name), args, kwargs
    recorded: list[Call] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorded.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    try:
        with Recorder():
            op.op(*pytree.tree_map_only(Tensor, torch.clone, args), **kwargs)
    except Exception:  # some samples are there to be refused
        return
    yield from recorded


def _sample(call: Call) -> Sample | None:
    """The call as a graph; None where it has no translation, or these are not its arguments."""
    target, args, kwargs = call
    if str(target) not in TRANSLATIONS:
        return None
    given: list[Tensor] = []
    graph = Graph()

    def placeholder(value: Tensor) -> Any:
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = value
        given.append(value.detach().clone())
        return node

    try:
        expected = target(*pytree.tree_map_only(Tensor, torch.clone, args), **kwargs)
        node_args, node_kwargs = pytree.tree_map_only(Tensor, placeholder, (args, kwargs))
    except Exception:  # another overload's arguments
        return None
    node = graph.create_node("call_function", target, node_args, node_kwargs)
    is_sequence = isinstance(expected, (tuple, list))
    values = list(expected) if is_sequence else [expected]
    tensors = [*given, *values]
    if not values or not all(isinstance(v, Tensor) and v.layout is torch.strided for v in tensors):
        return None
    node.meta["val"] = tuple(values) if is_sequence else expected
    results = [node]
    if is_sequence:
        results = []
        for i, value in enumerate(values):
            part = graph.call_function(operator.getitem, (node, i))
            part.meta["val"] = value
            results.append(part)
    graph.output(tuple(results))
    return Sample(target, GraphModule(nn.Module(), graph), given, values)
