"""A fused graph as StableHLO: every region a composite, whose decomposition is a function of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.graph.module import Body, GraphOwner, attribute, only_graph
from dovetail.interop.stitching import Signature, Stitched, stitched
from dovetail.lowering.backends.foreign import NoForm
from dovetail.lowering.backends.retelling import Teller
from dovetail.lowering.backends.xla import Xla
from dovetail.lowering.stablehlo.importing import missing, module_of, portable
from dovetail.outlining.bodies import results
from dovetail.outlining.record import Call, call_of, walk

MAIN = "main"


class StableHlo(str):
    """The text of a module, and the names of what its function `main` takes and gives, in order.

    It takes `inputs` and then `weights`, which are names of the graph's state dict; it gives the graph's results and
    then the new values of `updates`, which are names of weights or inputs that the graph writes.
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    updates: tuple[str, ...]


@checked_call()
def to_stablehlo(gm: GraphModule | GraphOwner, *, path: str | Path | None = None) -> StableHlo:
    """A graph as a StableHLO module in which every region is a `stablehlo.composite`.

    A composite has the region's kind as its name ("dovetail." before one that names no vendor), its version, its attributes,
    and as decomposition a private function, one for each distinct body. Weights are arguments of `main`, so that the text
    stays small and nothing is baked in; arguments and updates carry their names in the attribute `dovetail.name`. What the
    graph writes it returns. Indices out of range are clamped, as StableHLO does. With a path the module is written
    there as well: as text, or where the name ends in ".mlirbc" as bytes that other versions of StableHLO read. Raises
    SaveError where StableHLO has no form of something.
    """
    gm = only_graph(gm)
    if path is not None and not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a path.")
    gone = missing()
    if gone is not None:
        raise SaveError(gone)
    program = _Program(gm)
    made = program.stitched()
    text = StableHlo(made.module)
    text.inputs, text.weights = tuple(program.inputs), tuple(program.weights)
    text.updates = tuple(program.updates)
    if path is not None:
        target = Path(path)
        _write(target, portable(made.module) if target.suffix == ".mlirbc" else str(text).encode())
    return text


def _write(target: Path, data: bytes) -> None:
    if target.is_dir():
        raise SaveError(f"'{target}' is a folder; give the path of a file")
    if not target.parent.is_dir():
        raise SaveError(f"there is no folder '{target.parent}'")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        written = Path(folder) / target.name
        written.write_bytes(data)
        os.replace(written, target)


@dataclass
class _Function:
    """A graph in the making and what is still to be put into it."""

    teller: Teller = field(default_factory=lambda: Teller(checks=False))
    env: dict[Node, Any] = field(default_factory=dict[Node, Any])
    calls: list[Signature] = field(default_factory=list[Signature])
    handed: list[Node] = field(default_factory=list[Node])


class _Program:
    """The functions of a module: that of the graph, and one for each distinct body."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.backend = gm, Xla()
        self.functions: dict[str, _Function] = {}
        self.counts: dict[str, int] = {}
        self.names: dict[Any, str] = {}
        self._taken: set[str] = {MAIN}
        self.inputs: list[str] = []
        self.weights: list[str] = []
        self.updates: list[str] = []

    def stitched(self) -> Stitched:
        """The whole module."""
        self._main()
        try:
            module = module_of({name: f.teller.graph for name, f in self.functions.items()})
        except NoForm as failure:
            raise SaveError(f"{failure}; this graph cannot be written as StableHLO.") from failure
        named = [*self.inputs, *self.weights]
        calls = {name: f.calls for name, f in self.functions.items()}
        return stitched(module, MAIN, calls, self.counts, named, self.updates)

    def _main(self) -> None:
        function = self.functions[MAIN] = _Function()
        listed = list(self.gm.graph.nodes)
        held: dict[str, Node] = {}
        for node in listed:
            if node.op == "placeholder" and (node.users or isinstance(node.meta.get("val"), Tensor)):
                function.env[node] = self._operand(function, node, node.meta.get("val"))
                self.inputs.append(node.name)
        for node in listed:
            target = str(node.target)
            if node.op == "get_attr" and node.users:
                if target not in held:
                    held[target] = self._operand(function, node, attribute(self.gm, target))
                    self.weights.append(target)
                function.env[node] = held[target]
        news: dict[str, Any] = {}
        for node in listed:
            if _is_update(node):
                news[self._updated(node, news)] = function.env[cast("Node", node.args[1])]
            elif node.op not in ("placeholder", "output", "get_attr"):
                self._write(function, self.gm, node, call_of(node.meta))
        self.updates.extend(news)
        leaves = pytree.tree_leaves(listed[-1].args)
        self._finish(function, MAIN, [leaf for leaf in leaves if leaf is not None], list(news.values()))

    def _updated(self, node: Node, news: dict[str, Any]) -> str:
        """The name of what is written; it must not be read after that."""
        written = cast("Node", node.args[0])
        later = [n for n in written.users if n is not node and n > node]
        if written.op not in ("placeholder", "get_attr") or later or node.users:
            raise SaveError("it writes what is read again; StableHLO has values only.", node.name)
        name = str(written.target) if written.op == "get_attr" else written.name
        if name in news:
            raise SaveError(f"'{name}' is written twice; StableHLO has values only.", node.name)
        return name

    def _operand(self, function: _Function, node: Node, value: Any) -> Node:
        if not isinstance(value, Tensor):
            raise SaveError(f"it is a {type(value).__name__}; StableHLO takes tensors only.", node.name)
        reason = None if value.dtype in self.backend.dtypes else f"StableHLO is not written in {value.dtype}"
        if any(isinstance(n, torch.SymInt) for n in value.shape):
            reason = "its sizes may vary, and StableHLO is written with fixed ones"
        if reason is not None:
            raise SaveError(f"{reason}; capture the graph otherwise.", node.name)
        return function.teller.operand(node.name, value.shape, value.dtype)

    def _write(self, function: _Function, owner: GraphModule, node: Node, call: Call | None) -> None:
        if call is not None:
            self._call(function, owner, node, call)
            return
        if node.op != "call_function":
            raise SaveError(f"it is a {node.op} of '{node.target}'; StableHLO has operators only.", node.name)
        reason = self.backend.why_not(node)
        if reason is not None:
            raise SaveError(f"{reason}; this graph cannot be written as StableHLO.", node.name)
        function.teller.write(node, function.env, self.backend.spelling)

    def _call(self, function: _Function, owner: GraphModule, node: Node, call: Call) -> None:
        """The results of a region as operands of the graph that calls it; they are put in their place afterwards."""
        body = cast("Body", attribute(owner, cast("str", node.target)))
        target = self._body(body, call)
        operands = [function.env[a] for a in cast("Iterable[Node]", node.args)]
        made = tuple(self._operand(function, n, n.meta.get("val")) for n in results(body))
        identity = call.identity
        kind = identity.kind if "." in identity.kind else f"dovetail.{identity.kind}"
        attrs = json.loads(identity.attrs)
        function.calls.append(Signature(target, kind, identity.version, attrs, len(operands), len(made)))
        function.handed.extend(operands)
        function.env[node] = made

    def _body(self, body: Body, call: Call) -> str:
        """The function of a body; there are two of one only where regions inside are said to be different things."""
        inner = tuple(c.identity for m in walk(call) if (c := call_of(m.meta)) is not None)
        key = (id(body), inner)
        if key in self.names:
            return self.names[key]
        name = self.names[key] = self._free(call.identity.kind)
        function = self.functions[name] = _Function()
        inside = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
        for node in body.graph.find_nodes(op="placeholder"):
            function.env[node] = self._operand(function, node, node.meta.get("val"))
        for node, member in zip(inside, call.members, strict=True):
            if node.op == "get_attr":
                raise SaveError(f"region '{name}' holds an object; StableHLO has tensors only.", node.name)
            self._write(function, body, node, call_of(member.meta))
        self._finish(function, name, results(body))
        return name

    def _free(self, kind: str) -> str:
        stem = f"{kind.replace('.', '_')}_body"
        name, i = stem, 0
        while name in self._taken:
            i += 1
            name = f"{stem}_{i}"
        self._taken.add(name)
        return name

    def _finish(self, function: _Function, name: str, nodes: Sequence[Any], news: Sequence[Any] = ()) -> None:
        made: list[Node] = []
        for node in nodes:
            if not isinstance(node, Node):
                raise SaveError(f"the graph returns {node!r}, and StableHLO has tensors only.")
            value = function.env[node]
            if isinstance(value, tuple) or not isinstance(value.meta["val"], Tensor):
                raise SaveError("it is returned whole; StableHLO has tensors only.", node.name)
            made.append(value)
        self.counts[name] = len(made) + len(news)
        function.teller.finish([*made, *news, *function.handed])


def _is_update(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default
