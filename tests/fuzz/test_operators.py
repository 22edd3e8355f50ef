"""Every operator in torch's own database, called in every way an FX graph can: does it do what its effects say?"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from .observe import Snapshot
from .soundness import Untold, watch

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@pytest.mark.long
def test_no_operator_does_more_than_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    untold: dict[str, str] = {}
    tried = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database has samples at the edge of what an operator takes
        for op in _database(monkeypatch):
            for call in _calls(op):
                try:
                    tried += _watched(call)
                except Untold as error:
                    untold.setdefault(f"{call[1]} {error.what}", str(error).splitlines()[0])
    assert not untold, "\n".join(untold.values())
    assert tried > 5000


def _database(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch's list of operators with samples. It asks for a test helper that is not needed for the list."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def _calls(op: Any) -> Iterator[Call]:
    """An operator as function, method, in-place method, packet and overload, and what it calls in turn."""
    for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        if getattr(op.op, "__name__", "<lambda>") != "<lambda>":
            yield "call_function", op.op, args, kwargs
        for variant in (op.method_variant, op.inplace_variant):
            name = getattr(variant, "__name__", "")
            if hasattr(torch.Tensor, name):
                yield "call_method", name, args, kwargs
        packet = getattr(torch.ops.aten, op.aten_name or op.name, None) if "." not in op.name else None
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield "call_function", packet, args, kwargs
            for name in packet.overloads():
                yield "call_function", getattr(packet, name), args, kwargs
        yield from _inner_calls(op.op, args, kwargs)


def _inner_calls(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    calls: list[Call] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(("call_function", func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    try:
        with Recorder():
            function(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    except Exception:  # some samples are there to be refused
        return []
    return calls


def _watched(call: Call) -> bool:
    """Run one call as a graph of one node; False if the sample does not fit this way of calling."""
    op, target, args, kwargs = call
    given: list[torch.Tensor] = []
    graph = Graph()

    def placeholder(value: torch.Tensor) -> Any:
        given.append(value.detach().clone())
        return graph.placeholder(f"x{len(given)}")

    try:
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (args, kwargs))
        graph.output(graph.create_node(op, target, node_args, node_kwargs))
        gm = GraphModule(nn.Module(), graph)
        if all(x.layout is torch.strided for x in given):
            watch(gm, Snapshot(gm), given)
            return True
    except Untold:
        raise
    except Exception:  # another overload's arguments, or something FX cannot hold
        return False
    return False
