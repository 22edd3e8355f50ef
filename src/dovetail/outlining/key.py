"""The canonical hash of a body: the same in every process, for every equal body, whatever its names."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from dovetail.graph.describe import describe, symbol_ranges
from dovetail.graph.module import Body, attribute
from dovetail.graph.spellings import qualified_name, target_name
from dovetail.outlining.bodies import Refs, literal, results
from dovetail.outlining.record import call_of

_KEYS: WeakKeyDictionary[GraphModule, str] = WeakKeyDictionary()


def key_of(body: GraphModule) -> str:
    """Structure, literals, dtypes, sizes, strides and devices, symbols by order of appearance; no names."""
    found = _KEYS.get(body)
    if found is None:
        found = hashlib.sha256("\n".join(_lines(body)).encode()).hexdigest()
        if isinstance(body, Body):
            _KEYS[body] = found
    return found


def _lines(body: GraphModule) -> list[str]:
    refs = Refs()
    symbols: dict[str, str] = {}
    ranges: dict[str, str] = {}
    lines: list[str] = []
    for node in body.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            lines.append(f"in {describe(value, symbols)}")
            ranges.update(symbol_ranges(value))
        elif node.op == "output":
            lines.append(f"out {_results(body, refs)}")
        else:
            args, kwargs = literal(node.args, refs), literal(node.kwargs, refs)
            call = call_of(node.meta)
            identity = f" {call.headline}" if call is not None else ""
            lines.append(f"{node.op} {_target(body, node)}{identity} {_written(args)} {_written(kwargs)}")
        refs.add(node)
    lines.extend(f"{short} in {ranges.get(name)}" for name, short in symbols.items())
    return lines


def _results(body: GraphModule, refs: Refs) -> Any:
    """What a graph returns; one that is not a region's body may return anything."""
    returned = body.graph.output_node().args[0]
    flat = isinstance(returned, (tuple, list)) and all(isinstance(n, Node) for n in returned)
    return [refs[n] for n in results(body)] if flat else _written(literal(returned, refs))


def _written(value: Any) -> str:
    """A literal as text that does not depend on where things lie in memory."""
    if isinstance(value, tuple):
        return f"({', '.join(_written(v) for v in cast('tuple[Any, ...]', value))})"
    if callable(value) and not isinstance(value, (torch.dtype, type)):
        return qualified_name(value)
    return repr(value)


def _target(body: GraphModule, node: Any) -> str:
    if node.op not in ("get_attr", "call_module"):
        return target_name(node)
    value = attribute(body, cast("str", node.target))
    if isinstance(value, GraphModule):
        return key_of(value)
    if isinstance(value, torch.Tensor):
        return f"{describe(value)} {_content(value)}"
    if isinstance(value, nn.Module):
        state = [(name, describe(t), _content(t)) for name, t in value.state_dict().items()]
        return f"{type(value).__module__}.{type(value).__qualname__} {value.extra_repr()} {value.training} {state}"
    return repr(value)


def _content(value: torch.Tensor) -> str:
    """A hash of the bytes of a tensor; empty where there are none to be read."""
    if value.layout is not torch.strided or value.device.type == "meta" or isinstance(value, FakeTensor):
        return ""
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return hashlib.sha256(data).hexdigest()
