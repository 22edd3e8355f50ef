"""A fused graph as StableHLO: every region a composite, whose decomposition is a function of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.formats.op_support import (
    WHOLE,
    XLA,
    ProbedSupport,
    SupportProbe,
    argument,
    why_risky,
    why_untried,
)
from dovetail.formats.reexport import MENDS, Reexporter
from dovetail.ir.graph_module import Body, GraphOwner, attribute, only_graph
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import load_package
from dovetail.lowering.failures import UnsupportedOp
from dovetail.outlining.bodies import results
from dovetail.outlining.region_call import RegionCall, call_of, walk


@dataclass(frozen=True)
class Signature:
    """One call of a region: the function of its body, its identity, how many operands and results it has."""

    target: str
    kind: str
    version: int
    attrs: Mapping[str, Any]
    operands: int
    results: int


@dataclass(frozen=True)
class Stitched:
    """A module with composites; `module` is torch-mlir's."""

    module: Any


def stitched(
    module: Any,
    main: str,
    calls: Mapping[str, Sequence[Signature]],
    counts: Mapping[str, int],
    arguments: Sequence[str],
    updates: Sequence[str],
) -> Stitched:
    """Put composites into a module.

    Each function takes the results of the regions it calls as its last arguments, and gives what they are called with as
    its last results, after the `counts` that are its own. In between, in its block, a composite belongs.
    """
    ir = load_package("torch_mlir.ir")
    with module.context, ir.Location.unknown():
        for function in list(module.body.operations):
            name = ir.StringAttr(function.operation.attributes["sym_name"]).value
            _put(ir, function.operation, calls[name], counts[name])
            if name == main:
                _symbol_name(ir, function.operation, arguments, updates)
            else:
                function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        module.operation.verify()
    return Stitched(module)


def _put(ir: Any, function: Any, calls: Sequence[Signature], count: int) -> None:
    block = function.regions[0].blocks[0]
    last = list(block.operations)[-1].operation
    handed = count
    own = len(block.arguments) - sum(call.results for call in calls)
    at = own
    for call in calls:
        standins = [block.arguments[at + i] for i in range(call.results)]
        with ir.InsertionPoint(last):
            made = ir.Operation.create(
                "stablehlo.composite",
                results=[value.type for value in standins],
                operands=[last.operands[handed + i] for i in range(call.operands)],
                attributes={
                    "name": ir.StringAttr.get(call.kind),
                    "version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), call.version),
                    "composite_attributes": _attribute(ir, call.attrs),
                    "decomposition": ir.FlatSymbolRefAttr.get(call.target),
                },
            )
        for value, result in zip(standins, made.results, strict=True):
            value.replace_all_uses_with(result)
        handed, at = handed + call.operands, at + call.results
    with ir.InsertionPoint(last):
        given = ir.Operation.create("func.return", operands=[last.operands[i] for i in range(count)])
    last.erase()
    _sort(block, given)
    for i in reversed(range(own, len(block.arguments))):
        block.erase_argument(i)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([a.type for a in block.arguments], [v.type for v in given.operands])
    )


def _sort(block: Any, last: Any) -> None:
    """Bring operations into an order in which each comes after what it reads, as near to the old one as can be."""
    waiting = [op.operation for op in block.operations]
    number = {op: i for i, op in enumerate(waiting)}
    done: set[int] = set()

    def needs(op: Any) -> list[int]:
        found: list[int] = []
        stack = [op]
        while stack:
            one = stack.pop()
            for value in one.operands:
                owner = getattr(value.owner, "operation", value.owner)
                if owner in number:
                    found.append(number[owner])
            for region in one.regions:
                for inner in region.blocks:
                    stack.extend(o.operation for o in inner.operations)
        return found

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


def _symbol_name(ir: Any, function: Any, arguments: Sequence[str], updates: Sequence[str]) -> None:
    """Write the names of arguments and updates beside them."""
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    named: list[dict[str, Any]] = [{"dovetail.name": ir.StringAttr.get(name)} for name in arguments]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in named])
    plain = len(kind.results) - len(updates)
    given: list[dict[str, Any]] = [{} for _ in range(plain)]
    given += [{"dovetail.name": ir.StringAttr.get(name)} for name in updates]
    function.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in given])


def _attribute(ir: Any, value: Any) -> Any:
    """JSON as attributes: whole numbers of 64 bits, float64, text, lists, dictionaries; null is the unit."""
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


PACKAGE = "torch_mlir"
_PIPELINES = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
    # Where an operation came from is a path on this machine.
    "builtin.module(strip-debuginfo)",
)
_CONVERTING = released_by_fork(threading.Lock())


def missing() -> str | None:
    """What to install; None if it is there."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "torch_mlir is not installed; pip install 'dovetail[stablehlo]'"
    return None


def module_of(graphs: Mapping[str, Graph]) -> Any:
    """A module with a function for each graph, in StableHLO; every node has a fake of its value.

    Products are as exact as torch makes them: in float32 throughout, unless torch was told otherwise.
    """
    ir = load_package("torch_mlir.ir")
    manager = load_package("torch_mlir.passmanager").PassManager
    importing = load_package("torch_mlir.extras.fx_importer").FxImporter
    with _CONVERTING:
        context = ir.Context()
        load_package("torch_mlir.dialects.torch").register_dialect(context)
        try:
            importer = importing(context=context)
            for name, graph in graphs.items():
                importer.import_stateless_graph(graph, func_name=name)
            module = importer.module
            with context:
                for pipeline in _PIPELINES:
                    manager.parse(pipeline).run(module.operation)
        except Exception as error:
            raise UnsupportedOp(_reason(error)) from error
        with context, ir.Location.unknown():
            _settle(ir, module)
    return module


def portable(module: Any) -> bytes:
    """A module as bytes that StableHLO has read for twelve weeks, and will read for years."""
    library = load_package("torch_mlir._mlir_libs._stablehlo")
    needed = library.StablehloCompatibilityRequirement.WEEK_12
    return library.serialize_portable_artifact(
        module, library.get_version_from_compatibility_requirement(needed)
    )


def operations(owner: Any) -> Iterator[Any]:
    """All operations inside of one, those of nested regions included."""
    for region in owner.regions:
        for block in region.blocks:
            for op in list(block.operations):
                yield op
                yield from operations(op)


def _settle(ir: Any, module: Any) -> None:
    """Leave nothing but StableHLO and functions, and say how exact products are."""
    exact = torch.get_float32_matmul_precision() == "highest"
    word = "HIGHEST" if exact else "DEFAULT"
    precision = ir.Attribute.parse(f"[#stablehlo<precision {word}>, #stablehlo<precision {word}>]")
    for op in list(operations(module.operation)):
        name = op.operation.name
        if name == "arith.constant":
            with ir.InsertionPoint(op):
                made = ir.Operation.create(
                    "stablehlo.constant",
                    results=[op.operation.result.type],
                    attributes={"value": op.operation.attributes["value"]},
                )
            op.operation.result.replace_all_uses_with(made.result)
            op.operation.erase()
        elif name == "stablehlo.compare" and _is_unsigned(ir, op):
            op.operation.attributes["compare_type"] = ir.Attribute.parse(
                "#stablehlo<comparison_type UNSIGNED>"
            )
        elif name == "stablehlo.compare" and op.operation.parent.name == "stablehlo.sort":
            # What is no number is the largest of all, as it is in torch.
            if "FLOAT" in str(op.operation.attributes["compare_type"]):
                op.operation.attributes["compare_type"] = ir.Attribute.parse(
                    "#stablehlo<comparison_type TOTALORDER>"
                )
        elif name in ("stablehlo.dot_general", "stablehlo.convolution"):
            op.operation.attributes["precision_config"] = precision
        elif name.partition(".")[0] not in ("stablehlo", "func", "builtin"):
            raise UnsupportedOp(f"torch-mlir leaves a {name}")


def _is_unsigned(ir: Any, op: Any) -> bool:
    kind = ir.RankedTensorType(op.operation.operands[0].type).element_type
    return str(kind) == "i1" or str(kind).startswith("ui")


_FAILED = re.compile(r"(?:failed to legalize|unsupported|expected|error:)[^\n]*?'([a-z_0-9.]+)'")
_CALLED = re.compile(r'name = "(torch\.[a-z_0-9.A-Z]+)"')


def _reason(error: BaseException) -> str:
    text = str(error)
    found = _CALLED.search(text) or _FAILED.search(text)
    if found is not None:
        return f"torch-mlir has no StableHLO form of {found.group(1)}"
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch-mlir does not convert it: {line.strip()[:200]}"


MAIN = "main"


class StableHloSupport(ProbedSupport):
    """Which operations torch-mlir writes as StableHLO such that XLA computes what torch does."""

    name = "stablehlo"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.float64, *WHOLE})
    flushes_denormals: ClassVar[bool] = True

    def judge(self) -> SupportProbe:
        return _judge()


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

    teller: Reexporter = field(default_factory=lambda: Reexporter(checks=False))
    env: dict[Node, Any] = field(default_factory=dict[Node, Any])
    calls: list[Signature] = field(default_factory=list[Signature])
    handed: list[Node] = field(default_factory=list[Node])


class _Program:
    """The functions of a module: that of the graph, and one for each distinct body."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.backend = gm, StableHloSupport()
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
        except UnsupportedOp as failure:
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

    def _write(self, function: _Function, owner: GraphModule, node: Node, call: RegionCall | None) -> None:
        if call is not None:
            self._call(function, owner, node, call)
            return
        if node.op != "call_function":
            raise SaveError(f"it is a {node.op} of '{node.target}'; StableHLO has operators only.", node.name)
        reason = self.backend.why_not(node)
        if reason is not None:
            raise SaveError(f"{reason}; this graph cannot be written as StableHLO.", node.name)
        function.teller.write(node, function.env, self.backend.spelling)

    def _call(self, function: _Function, owner: GraphModule, node: Node, call: RegionCall) -> None:
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

    def _body(self, body: Body, call: RegionCall) -> str:
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


@functools.cache
def _judge() -> SupportProbe:
    return SupportProbe(lambda graph: module_of({"main": graph}), _table, _sifted, _FORESEEN, MENDS)


def _table() -> Mapping[Any, Callable[..., Any]]:
    return load_package("torch_mlir.extras.fx_decomp_util").get_decomposition_table()


_FORESEEN = frozenset(
    {
        "aten.scaled_dot_product_attention.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.unbind.int",
        "aten.diff.default",
        "aten.einsum.default",
    }
)
"""Operators that torch-mlir is known to take only when they are written out; of some einsums it would die."""


def _sifted(node: Node) -> str | None:
    return why_untried(XLA, node) or _why_wrong(node) or why_risky(node)


def _why_wrong(node: Node) -> str | None:
    """Why an operation would not give in XLA what it gives in torch, where that is a matter of its arguments."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    if name in ("std", "var", "std_mean", "var_mean"):
        taken, made = (_numel(n) for n in (node.args[0], node))
        if (argument(node, "correction") or 0) * made > taken:
            return "its correction is larger than what it is taken from"
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    if name in _OF_SIGNED and isinstance(value, Tensor) and value.dtype is torch.uint8:
        return f"torch-mlir takes uint8 for int8 in {node.target}"
    return None


_OF_SIGNED = frozenset(("all", "amax", "amin", "any", "argmax", "argmin", "max", "max_pool2d", "min"))


def _numel(node: Any) -> int:
    value = node.meta["val"]
    return (value if isinstance(value, Tensor) else value[0]).numel()
