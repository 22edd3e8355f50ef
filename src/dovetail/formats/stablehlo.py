"""Writes a graph as StableHLO in which every region is a composite with a function as its decomposition."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.formats.reexport import Reexporter
from dovetail.formats.stablehlo_ops import (
    StableHloSupport,
    import_graphs,
    missing,
    nested_operations,
    portable,
)
from dovetail.ir.graph_module import Body, GraphOwner, attribute, only_graph
from dovetail.lowering.backend_protocol import load_package
from dovetail.lowering.failures import UnsupportedOp
from dovetail.outlining.region import RegionCall, call_of, calls_in, results, unique_name, walk


@dataclass(frozen=True)
class CompositeCall:
    """A call of a region: the function of its body, its identity, and its numbers of operands and results."""

    target: str
    kind: str
    version: int
    attrs: Mapping[str, Any]
    operands: int
    results: int


def insert_composites(
    module: Any,
    main: str,
    calls: Mapping[str, Sequence[CompositeCall]],
    counts: Mapping[str, int],
    arguments: Sequence[str],
    updates: Sequence[str],
) -> None:
    """Put composites into a torch-mlir module.

    Each function takes the results of the regions it calls as its last arguments, and returns the operands of those
    calls as its last results, after the `counts` that are its own. A composite replaces each such pair.
    """
    ir = load_package("torch_mlir.ir")
    with module.context, ir.Location.unknown():
        for function in list(module.body.operations):
            name = ir.StringAttr(function.operation.attributes["sym_name"]).value
            _insert_calls(ir, function.operation, calls[name], counts[name])
            if name == main:
                _name_values(ir, function.operation, arguments, updates)
            else:
                function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        module.operation.verify()


def _insert_calls(ir: Any, function: Any, calls: Sequence[CompositeCall], count: int) -> None:
    block = function.regions[0].blocks[0]
    last = list(block.operations)[-1].operation
    operand = count
    own = len(block.arguments) - sum(call.results for call in calls)
    at = own
    for call in calls:
        placeholders = [block.arguments[at + i] for i in range(call.results)]
        with ir.InsertionPoint(last):
            composite = ir.Operation.create(
                "stablehlo.composite",
                results=[value.type for value in placeholders],
                operands=[last.operands[operand + i] for i in range(call.operands)],
                attributes={
                    "name": ir.StringAttr.get(call.kind),
                    "version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), call.version),
                    "composite_attributes": _attribute(ir, call.attrs),
                    "decomposition": ir.FlatSymbolRefAttr.get(call.target),
                },
            )
        for value, result in zip(placeholders, composite.results, strict=True):
            value.replace_all_uses_with(result)
        operand, at = operand + call.operands, at + call.results
    with ir.InsertionPoint(last):
        returned = ir.Operation.create("func.return", operands=[last.operands[i] for i in range(count)])
    last.erase()
    _sort(block, returned)
    for i in reversed(range(own, len(block.arguments))):
        block.erase_argument(i)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([a.type for a in block.arguments], [v.type for v in returned.operands])
    )


def _sort(block: Any, last: Any) -> None:
    """Sort the operations topologically by depth-first search, keeping the old order where possible."""
    waiting = [op.operation for op in block.operations]
    number = {op: i for i, op in enumerate(waiting)}
    done: set[int] = set()

    def needs(op: Any) -> list[int]:
        read: list[int] = []
        stack = [op]
        while stack:
            one = stack.pop()
            for value in one.operands:
                owner = getattr(value.owner, "operation", value.owner)
                if owner in number:
                    read.append(number[owner])
            for region in one.regions:
                for inner in region.blocks:
                    stack.extend(o.operation for o in inner.operations)
        return read

    before = [needs(op) for op in waiting]
    for start in range(len(waiting)):
        stack = [start]
        while stack:
            i = stack[-1]
            missing = [j for j in before[i] if j not in done and j != i]
            if i in done or not missing:
                stack.pop()
                if i not in done:
                    done.add(i)
                    if waiting[i] != last:
                        waiting[i].move_before(last)
            else:
                stack.extend(reversed(missing))


def _name_values(ir: Any, function: Any, arguments: Sequence[str], updates: Sequence[str]) -> None:
    """Write the names of arguments and updates beside them."""
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    named: list[dict[str, Any]] = [{"dovetail.name": ir.StringAttr.get(name)} for name in arguments]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in named])
    results: list[dict[str, Any]] = [{} for _ in range(len(kind.results) - len(updates))]
    results += [{"dovetail.name": ir.StringAttr.get(name)} for name in updates]
    function.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in results])


def _attribute(ir: Any, value: Any) -> Any:
    """Return JSON as an attribute: int64, float64, strings, lists, dictionaries; null is the unit attribute."""
    if value is None:
        return ir.UnitAttr.get()
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        kind = ir.IntegerType.get_signless(64 if abs(value) < 2**63 else 128)
        return ir.IntegerAttr.get(kind, value)
    if isinstance(value, float):
        return ir.FloatAttr.get_f64(value)
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, list):
        return ir.ArrayAttr.get([_attribute(ir, one) for one in cast("list[Any]", value)])
    return ir.DictAttr.get({k: _attribute(ir, v) for k, v in cast("Mapping[str, Any]", value).items()})


def _bytecode(module: Any) -> bytes:
    """Return a module as portable bytecode, which has no unit attribute: entries that are null are left out."""
    ir = load_package("torch_mlir.ir")
    with module.context:
        for op in nested_operations(module.operation):
            if op.operation.name == "stablehlo.composite":
                attrs = op.operation.attributes
                attrs["composite_attributes"] = _without_null(ir, attrs["composite_attributes"])
    return portable(module)


def _without_null(ir: Any, value: Any) -> Any:
    if isinstance(value, ir.DictAttr):
        entries: dict[str, Any] = {named.name: named.attr for named in value}
        kept = {k: _without_null(ir, v) for k, v in entries.items() if not isinstance(v, ir.UnitAttr)}
        return ir.DictAttr.get(kept)
    if isinstance(value, ir.ArrayAttr):
        items: list[Any] = list(value)
        if any(isinstance(item, ir.UnitAttr) for item in items):
            raise SaveError(
                "an attribute of a region is a list with null in it, which bytecode has no form for."
            )
        return ir.ArrayAttr.get([_without_null(ir, item) for item in items])
    return value


MAIN = "main"


class StableHlo(str):
    """The text of a module, with the names of the arguments and results of its function `main`, in order.

    It takes `inputs` and then `weights`, which are names of the graph's state dict; it returns the graph's results and
    then the new values of `updates`, which are names of weights or inputs that the graph writes.
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    updates: tuple[str, ...]


@checked_call()
def to_stablehlo(gm: GraphModule | GraphOwner, *, path: str | Path | None = None) -> StableHlo:
    """Return a graph as a StableHLO module in which every region is a `stablehlo.composite`.

    A composite has the region's kind as its name ("dovetail." before one without a vendor), its version, its attributes,
    and as decomposition a private function, one for each distinct body. Weights are arguments of `main`, so that the
    text stays small; arguments and updates carry their names in the attribute `dovetail.name`. What the graph writes it
    returns. Indices out of range are clamped, as StableHLO does. With a path the module is written there as well: as
    text, or as portable bytecode if the name ends in ".mlirbc", which lacks attributes that are None. Raises SaveError for an operation that cannot be
    converted.
    """
    gm = only_graph(gm)
    if path is not None and not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a path.")
    reason = missing()
    if reason is not None:
        raise SaveError(reason)
    program = _ProgramWriter(gm)
    module = program.module()
    text = StableHlo(module)
    text.inputs, text.weights = tuple(program.inputs), tuple(program.weights)
    text.updates = tuple(program.updates)
    if path is not None:
        with atomic_replace(resolve_target(path)) as file:
            file.write_bytes(_bytecode(module) if file.suffix == ".mlirbc" else str(text).encode())
    return text


@dataclass
class _Function:
    """A graph under construction, its calls of regions, and the operands of these calls."""

    exporter: Reexporter = field(default_factory=lambda: Reexporter(checks=False))
    env: dict[Node, Any] = field(default_factory=dict[Node, Any])
    calls: list[CompositeCall] = field(default_factory=list[CompositeCall])
    call_operands: list[Node] = field(default_factory=list[Node])


class _ProgramWriter:
    """Writes the functions of a module: that of the graph, and one for each distinct body."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.backend = gm, StableHloSupport()
        self.functions: dict[str, _Function] = {}
        self.counts: dict[str, int] = {}
        self.names: dict[Any, str] = {}
        self._used: dict[str, int] = {MAIN: 0}
        self.inputs: list[str] = []
        self.weights: list[str] = []
        self.updates: list[str] = []

    def module(self) -> Any:
        """Return the module."""
        self._main()
        try:
            module = import_graphs({name: f.exporter.graph for name, f in self.functions.items()})
        except UnsupportedOp as failure:
            raise SaveError(f"{failure}; this graph cannot be written as StableHLO.") from failure
        named = [*self.inputs, *self.weights]
        calls = {name: f.calls for name, f in self.functions.items()}
        insert_composites(module, MAIN, calls, self.counts, named, self.updates)
        return module

    def _main(self) -> None:
        function = self.functions[MAIN] = _Function()
        weights: dict[str, Node] = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if node.users or isinstance(node.meta.get("val"), Tensor):
                function.env[node] = self._operand(function, node, node.meta.get("val"))
                self.inputs.append(node.name)
        calls = calls_in(self.gm)
        for node in calls:
            target = str(node.target)
            if node.op == "get_attr" and node.users:
                if target not in weights:
                    weights[target] = self._operand(function, node, attribute(self.gm, target))
                    self.weights.append(target)
                function.env[node] = weights[target]
        updated: dict[str, Any] = {}
        for node, call in calls.items():
            if node.target is torch.ops.aten.copy_.default:
                updated[self._updated(node, updated)] = function.env[cast("Node", node.args[1])]
            elif node.op != "get_attr":
                self._write(function, self.gm, node, call)
        self.updates.extend(updated)
        leaves = pytree.tree_leaves(self.gm.graph.output_node().args)
        self._finish(function, MAIN, [leaf for leaf in leaves if leaf is not None], list(updated.values()))

    def _updated(self, node: Node, updated: dict[str, Any]) -> str:
        """Return the name of the weight or input that is written, which must not be read later."""
        written = cast("Node", node.args[0])
        later = [n for n in written.users if n is not node and n > node]
        if written.op not in ("placeholder", "get_attr") or later or node.users:
            raise SaveError("it writes a tensor that is read again; StableHLO has values only.", node.name)
        name = str(written.target) if written.op == "get_attr" else written.name
        if name in updated:
            raise SaveError(f"'{name}' is written twice; StableHLO has values only.", node.name)
        return name

    def _operand(self, function: _Function, node: Node, value: Any) -> Node:
        if not isinstance(value, Tensor):
            raise SaveError(f"it is a {type(value).__name__}; StableHLO takes tensors only.", node.name)
        reason = None if value.dtype in self.backend.dtypes else f"StableHLO is not written in {value.dtype}"
        if any(isinstance(n, torch.SymInt) for n in value.shape):
            reason = "its sizes are symbolic, and StableHLO is written with static ones"
        if reason is not None:
            raise SaveError(
                f"{reason}; capture the graph with a supported dtype and static sizes.", node.name
            )
        return function.exporter.operand(node.name, value.shape, value.dtype)

    def _write(self, function: _Function, owner: GraphModule, node: Node, call: RegionCall | None) -> None:
        if call is not None:
            self._call(function, owner, node, call)
            return
        if node.op != "call_function":
            raise SaveError(f"it is a {node.op} of '{node.target}'; StableHLO has operators only.", node.name)
        reason = self.backend.why_not(node)
        if reason is not None:
            raise SaveError(f"{reason}; this graph cannot be written as StableHLO.", node.name)
        function.exporter.write(node, function.env, self.backend.decomposition)

    def _call(self, function: _Function, owner: GraphModule, node: Node, call: RegionCall) -> None:
        """Add the results of a region as operands of the calling function; `insert_composites` replaces them."""
        body = cast("Body", attribute(owner, cast("str", node.target)))
        target = self._body(body, call)
        operands = [function.env[a] for a in cast("Iterable[Node]", node.args)]
        outputs = tuple(self._operand(function, n, n.meta.get("val")) for n in results(body))
        identity = call.identity
        kind = identity.kind if "." in identity.kind else f"dovetail.{identity.kind}"
        attrs = json.loads(identity.attrs)
        function.calls.append(
            CompositeCall(target, kind, identity.version, attrs, len(operands), len(outputs))
        )
        function.call_operands.extend(operands)
        function.env[node] = outputs

    def _body(self, body: Body, call: RegionCall) -> str:
        """Return the function of a body, one for each identity of the regions inside it."""
        inner = tuple(c.identity for m in walk(call) if (c := call_of(m.meta)) is not None)
        key = (id(body), inner)
        if key in self.names:
            return self.names[key]
        name = self.names[key] = unique_name(f"{call.identity.kind.replace('.', '_')}_body", self._used)
        function = self.functions[name] = _Function()
        for node in body.graph.find_nodes(op="placeholder"):
            function.env[node] = self._operand(function, node, node.meta.get("val"))
        for node, inner_call in calls_in(body, call).items():
            if node.op == "get_attr":
                raise SaveError(f"region '{name}' holds an object; StableHLO has tensors only.", node.name)
            self._write(function, body, node, inner_call)
        self._finish(function, name, results(body))
        return name

    def _finish(
        self, function: _Function, name: str, nodes: Sequence[Any], updated: Sequence[Any] = ()
    ) -> None:
        outputs: list[Node] = []
        for node in nodes:
            if not isinstance(node, Node):
                raise SaveError(f"the graph returns {node!r}, and StableHLO has tensors only.")
            value = function.env[node]
            if isinstance(value, tuple) or not isinstance(value.meta["val"], Tensor):
                raise SaveError("it is returned as a tuple; StableHLO has tensors only.", node.name)
            outputs.append(value)
        self.counts[name] = len(outputs) + len(updated)
        function.exporter.finish([*outputs, *updated, *function.call_operands])
