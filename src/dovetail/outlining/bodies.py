"""Bodies of regions: building them, and having one object for equal ones."""

from __future__ import annotations

import ctypes
import hashlib
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import InvalidGraph
from dovetail.ir.effects import declared_in, summary
from dovetail.ir.graph_module import (
    Body,
    Program,
    as_program,
    attribute,
    copy_node,
    install,
    make_body,
    rebuild,
)
from dovetail.ir.meta_keys import CANONICAL
from dovetail.ir.nodes import describe, symbol_ranges
from dovetail.ir.op_traits import qualified_name, target_name
from dovetail.outlining.region_call import call_of

Signature = tuple[Any, ...]


def literal(value: Any, ref: Callable[[Node], Any]) -> Any:
    """A node argument as a hashable value that keeps apart what Python calls equal: 1, 1.0, True, -0.0."""
    if isinstance(value, Node):
        return ref(value)
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind is float:
        return ("float", repr(value))
    if isinstance(value, (tuple, list)):
        return (
            "tuple" if isinstance(value, tuple) else "list",
            *(literal(v, ref) for v in cast("Sequence[Any]", value)),
        )
    if isinstance(value, dict):
        return ("dict", *((k, literal(v, ref)) for k, v in cast("dict[Any, Any]", value).items()))
    if isinstance(value, slice):
        return ("slice", *(literal(v, ref) for v in (value.start, value.stop, value.step)))
    if kind in (bool, str, complex):
        return (kind.__name__, repr(value))
    try:
        hash(value)
    except TypeError:
        return ("object", kind.__name__, repr(value))
    return value


class Refs(dict[Node, str]):
    """What stands for each node in a signature: `%n`, operands first."""

    def __call__(self, node: Node) -> str:
        return self[node]

    def add(self, node: Node) -> None:
        self[node] = f"%{len(self)}"


def signature(
    root: nn.Module,
    operands: Sequence[Node],
    inside: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[Any] | None = None,
) -> Signature:
    """A value that is equal for bodies that are exactly equal, argument order included, within this process.

    `values` are what the operands are when the body is called, if that is not what they were made as.
    """
    refs = Refs()
    rows: list[Any] = []
    for node in operands:
        refs.add(node)
    for value in values if values is not None else [n.meta.get("val") for n in operands]:
        rows.append(describe(value))
    for node in inside:
        target: Any = node.target
        if node.op == "get_attr" or node.op == "call_module":
            target = id(attribute(root, target))
        call = call_of(node.meta)
        rows.append(
            (
                node.op,
                target,
                tuple([literal(a, refs) for a in node.args]),
                literal(node.kwargs, refs) if node.kwargs else None,
                call.identity if call is not None else None,
            )
        )
        refs.add(node)
    return (len(operands), tuple(rows), tuple(refs[n] for n in outputs))


_SIGNATURES: WeakKeyDictionary[Body, Signature] = WeakKeyDictionary()


def signature_of(body: Body) -> Signature:
    found = _SIGNATURES.get(body)
    if found is None:
        nodes = list(body.graph.nodes)
        operands = [n for n in nodes if n.op == "placeholder"]
        found = _SIGNATURES[body] = signature(body, operands, nodes[len(operands) : -1], results(body))
    return found


def results(body: GraphModule) -> list[Node]:
    """The values a body returns: its output is always a flat tuple."""
    return list(cast("Iterable[Node]", body.graph.output_node().args[0]))


class Bodies:
    """The distinct bodies of one graph and the attributes they are called by."""

    def __init__(self, root: GraphModule, taken: set[str]) -> None:
        self._root = root
        self._taken = taken
        self.added: dict[str, Body] = {}
        self.converted: dict[str, Program] = {}
        self._numbers: dict[str, int] = {}
        self._known: dict[Signature, tuple[Body, str]] = {}
        for name, module in root._modules.items():
            if isinstance(module, Body):
                self._known.setdefault(signature_of(module), (module, name))

    def share(
        self,
        kind: str,
        operands: Sequence[Node],
        inside: Sequence[Node],
        outputs: Sequence[Node],
        owner: GraphModule | None = None,
        values: Sequence[Any] | None = None,
    ) -> tuple[Body, str]:
        """The body that computes `outputs`, a new one only if no equal one is there, and its attribute's name.

        `owner` has what the nodes name, if that is not the graph itself; `values` are as `signature` takes them.
        """
        owner = owner or self._root
        key = signature(owner, operands, inside, outputs, values)
        found = self._known.get(key)
        if found is None:
            body = _build(self._lent(owner, inside), kind, operands, inside, outputs, values)
            _SIGNATURES[body] = key
            name = self._free_name(kind.replace(".", "_"))
            self.added[name] = body
            found = self._known[key] = (body, name)
        return found

    def _lent(self, owner: GraphModule, inside: Sequence[Node]) -> GraphModule:
        """The owner, with sub-graphs that a body borrows as programs, so that both hold one object in every copy."""
        for node in inside:
            if node.op in ("get_attr", "call_module"):
                value = attribute(owner, cast("str", node.target))
                if isinstance(value, GraphModule) and not isinstance(value, Program):
                    self.converted[cast("str", node.target)] = as_program(value)
        if not self.converted:
            return owner
        lender = rebuild(owner, Graph())  # what it owns is what counts, not what it runs
        for target, program in self.converted.items():
            install(lender, target, program)
        return lender

    def _free_name(self, stem: str) -> str:
        if keyword.iskeyword(stem):
            stem = f"{stem}_"
        number = self._numbers.get(stem, 1)
        name = stem if number == 1 else f"{stem}__{number}"
        while name in self._taken or hasattr(self._root, name):
            number += 1
            name = f"{stem}__{number}"
        self._numbers[stem] = number + 1
        self._taken.add(name)
        return name


def _build(
    root: nn.Module,
    kind: str,
    operands: Sequence[Node],
    inside: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[Any] | None,
) -> Body:
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, node in enumerate(operands):
        operand = env[node] = graph.create_node("placeholder", node.name, name=node.name)
        operand.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        if values is not None and values[i] is not node.meta.get("val"):
            operand.meta = {"val": values[i]}
    borrowed: dict[str, tuple[Any, str]] = {}
    for node in inside:
        target = None
        if node.op == "get_attr" or node.op == "call_module":
            value = attribute(root, cast("str", node.target))
            if value is None and node.op == "call_module":
                raise InvalidGraph(f"nothing is at '{node.target}'", node.name)
            target = _lend(borrowed, cast("str", node.target), value)
        env[node] = copy_node(graph, node, env.__getitem__, target)
    graph.output(tuple(env[n] for n in outputs)).meta["val"] = None
    body = make_body(graph, re.sub(r"\W", "_", kind))
    body.training = root.training
    if CANONICAL in getattr(root, "meta", {}):
        body.meta[CANONICAL] = None
    for name, (value, target) in borrowed.items():
        body.borrow(name, value, target)
    told = summary(body, declared_in(root))
    body.mark_impure(told.acts)
    return body


def _lend(borrowed: dict[str, tuple[Any, str]], target: str, value: Any) -> str:
    stem = name = re.sub(r"\W", "_", target)
    number = 1
    while (name in borrowed and borrowed[name][0] is not value) or hasattr(GraphModule, name):
        number += 1
        name = f"{stem}__{number}"
    borrowed[name] = (value, target)
    return name


def common_module_stack(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The modules that all operations come from, outermost first."""
    common: list[tuple[str, Any]] | None = None
    for meta in metas:
        items = list(meta.get("nn_module_stack", {}).items())
        if common is None:
            common = items
        else:
            same = 0
            while same < min(len(common), len(items)) and common[same][0] == items[same][0]:
                same += 1
            common = common[:same]
    return dict(common or ())


_KEYS: WeakKeyDictionary[GraphModule, str] = WeakKeyDictionary()


def body_key(body: GraphModule) -> str:
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
        return body_key(value)
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
