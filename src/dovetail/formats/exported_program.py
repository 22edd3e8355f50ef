"""Converts a graph to an ExportedProgram with the same operations, without tracing it again where possible."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.fx.traceback as traceback
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._export.verifier import TrainingIRVerifier
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import TreeSpec

from dovetail.errors import SaveError
from dovetail.formats.archive import encode
from dovetail.frontend.calling_convention import (
    Convention,
    Slot,
    children,
    context_of,
    convention_of,
    dict_of,
    leaf_spec,
    tuple_of,
)
from dovetail.ir.graph_module import attribute, copy_graph, copy_node, rebuild
from dovetail.ir.nodes import SYMBOLIC, is_projection
from dovetail.numerics.sample_inputs import random_inputs


def _retrace(gm: GraphModule, marks: Mapping[str, Any]) -> ExportedProgram:
    """Return the program that torch.export traces from a graph, node by node, so that marks reach the new nodes."""
    examples: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if value is None:
            raise SaveError(
                "the value of this input is unknown: `capture` the graph with example inputs first", node.name
            )
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, SYMBOLIC) for size in sizes):
            raise SaveError(
                "this input has sizes that vary, and the graph calls functions that are not operators: `capture` the model",
                node.name,
            )
        examples.append(value)
    traced = rebuild(gm, copy_graph(gm.graph))
    for node in traced.graph.nodes:
        if node.name in marks:
            node.meta["custom"] = {**node.meta.get("custom", {}), **marks[node.name]}

    def forward(*inputs: Any) -> Any:
        with traceback.preserve_node_meta():
            return Interpreter(traced).run(*inputs)

    traced.__dict__["forward"] = forward
    try:
        with torch.random.fork_rng(devices=[]):
            program = torch.export.export(traced, tuple(random_inputs(examples)), strict=False)
    except Exception as error:
        raise SaveError(
            f"torch.export cannot trace the graph: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    for node in program.graph.nodes:
        _avoid_keyword_arguments(node)
    return program


def _avoid_keyword_arguments(node: Node) -> None:
    """Pass arguments by position if one is named like a Python keyword, as `from` is: torch cannot load it otherwise."""
    target = node.target
    if not isinstance(target, OpOverload) or not any(
        keyword.iskeyword(a.name) for a in target._schema.arguments
    ):
        return
    positional = [a for a in target._schema.arguments if not a.kwarg_only]
    named = dict(zip([a.name for a in positional], node.args, strict=False)) | node.kwargs
    node.args = tuple(named.pop(a.name) if a.name in named else a.default_value for a in positional)
    node.kwargs = named


_PREFIXES = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}

# Functions that exporters write beside operators: arithmetic of sizes, and modes.
_EXPORTED = ("torch.sym_", "torch._sym_", "torch._C.", "torch.amp.", "builtins.round")

# Notes of tracers, which make up half of an archive and do not describe the current graph.
_NOTES = frozenset({"from_node", "desc"})


def exported(gm: GraphModule, marks: Mapping[str, Any] | None = None) -> ExportedProgram:
    """Return a graph without regions as a program with the same calling convention and names of weights.

    It is in the training dialect: writes to buffers and inputs stay in place. `marks` are put into
    `node.meta["custom"]` by the names of nodes. Raises SaveError if the graph cannot be an exported program.
    """
    if any(_is_traced_python(node) for node in gm.graph.nodes):
        return _retrace(gm, marks or {})
    return _Exporter(gm, marks or {}).run()


def _is_traced_python(node: Node) -> bool:
    """Whether a node calls Python that a symbolic tracer writes and exporters do not, which use Python for sizes only."""
    target = node.target
    if node.op != "call_function" or isinstance(target, OpOverload | HigherOrderOperator):
        return node.op == "call_method"
    name = encode.function_name(target) or ""
    if isinstance(node.meta.get("val"), Tensor):
        return bool(name) and not is_projection(node)
    return name.startswith(("torch.", "builtins.")) and not name.startswith(_EXPORTED)


class _Exporter:
    def __init__(self, gm: GraphModule, marks: Mapping[str, Any]) -> None:
        self.gm, self.marks = gm, marks
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.specs: list[InputSpec] = []
        self.state_dict: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}
        self.mode = _mode(self.nodes)

    def run(self) -> ExportedProgram:
        self._lift()
        call = self._call()
        for node in self.nodes:
            if node not in self.env and node.op != "output":
                self._copy(node)
        results = self._results()
        signature = ExportGraphSignature(self.specs, results)
        try:
            return ExportedProgram(
                root=self.gm,
                graph=self.graph,
                graph_signature=signature,
                state_dict=self.state_dict,
                range_constraints=_ranges(self.nodes),
                module_call_graph=[ModuleCallEntry(fqn="", signature=call)],
                example_inputs=None,
                constants=self.constants,
                verifiers=[TrainingIRVerifier],
            )
        except Exception as error:
            raise SaveError(
                f"torch.export does not take the graph: {type(error).__name__}: {error}"
            ) from error

    def _lift(self) -> None:
        """Make every parameter and buffer an input, used or not, and every constant that is used."""
        gm = self.gm
        persistent = gm.state_dict(keep_vars=True)
        named = {
            **dict(gm.named_parameters(remove_duplicate=False)),
            **dict(gm.named_buffers(remove_duplicate=False)),
        }
        read: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.op == "get_attr" and isinstance(attribute(gm, cast("str", node.target)), Tensor):
                read.setdefault(cast("str", node.target), []).append(node)
        for target, value in named.items():
            (self.state_dict if target in persistent else self.constants)[target] = value
            kind = InputKind.PARAMETER if isinstance(value, nn.Parameter) else InputKind.BUFFER
            self._input(kind, target, value, read.pop(target, []), target in persistent)
        for target, readers in read.items():
            value = self.constants[target] = cast("Tensor", attribute(gm, target))
            self._input(InputKind.CONSTANT_TENSOR, target, value, readers)

    def _input(
        self, kind: InputKind, target: str, value: Tensor, readers: list[Node], persistent: bool | None = None
    ) -> None:
        stem = "".join(c if c.isalnum() else "_" for c in target)
        new = self.graph.create_node("placeholder", "", name=f"{_PREFIXES[kind]}_{stem}")
        new.target = new.name
        fakes = (n.meta.get("val") for n in readers)
        new.meta["val"] = next((self._in_mode(f) for f in fakes if isinstance(f, FakeTensor)), None)
        if new.meta["val"] is None:
            new.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.env.update(dict.fromkeys(readers, new))
        persistent = persistent if kind is InputKind.BUFFER else None
        self.specs.append(InputSpec(kind, TensorArgument(name=new.name), target, persistent=persistent))

    def _call(self) -> ModuleCallSignature:
        """Append the inputs in the order of exporters, and return the call signature."""
        inputs = [n for n in self.nodes if n.op == "placeholder"]
        convention = convention_of(self.gm)
        if convention is None:
            in_spec = tuple_of([tuple_of([leaf_spec()] * len(inputs)), dict_of([], [])])
            order, names = list(range(len(inputs))), [n.name for n in inputs]
            out_spec = pytree.tree_structure(self.nodes[-1].args[0])
        else:
            in_spec, leaves, names = _call_spec(convention)
            places = {leaf: i for i, leaf in enumerate(convention.order)}
            order, out_spec = [places[leaf] for leaf in leaves], convention.out_spec
        for i in order:
            node = inputs[i]
            if "val" not in node.meta:
                raise SaveError(
                    "the value of this input is unknown: `capture` the graph with example inputs first",
                    node.name,
                )
            self._copy(node)
            self.specs.append(InputSpec(InputKind.USER_INPUT, _argument(self.env[node]), None))
        return ModuleCallSignature(
            inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec, forward_arg_names=names
        )

    def _copy(self, node: Node) -> None:
        if node.op == "call_function":
            if not isinstance(node.target, OpOverload | HigherOrderOperator) and "val" not in node.meta:
                raise SaveError("its value is unknown: `capture` the graph with example inputs", node.name)
        elif node.op == "get_attr":
            if not isinstance(attribute(self.gm, cast("str", node.target)), GraphModule):
                raise SaveError(f"'{node.target}' is neither a tensor nor a graph", node.name)
        elif node.op != "placeholder":
            raise SaveError(
                f"a {node.op} has no place in an exported program: `capture` the model", node.name
            )
        new = self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        _avoid_keyword_arguments(new)
        for key in _NOTES & new.meta.keys():
            del new.meta[key]
        if "val" in new.meta:
            new.meta["val"] = pytree.tree_map(self._in_mode, new.meta["val"])
        if node.name in self.marks:
            new.meta["custom"] = {**new.meta.get("custom", {}), **self.marks[node.name]}

    def _in_mode(self, value: Any) -> Any:
        """Return a fake tensor of the program's only fake mode; tracers may have used others."""
        if not isinstance(value, FakeTensor) or value.fake_mode is self.mode or not _is_fixed(value):
            return value
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return fake.requires_grad_(value.requires_grad)

    def _results(self) -> list[OutputSpec]:
        leaves = pytree.tree_leaves(self.nodes[-1].args[0])
        results = [self.env[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
        self.graph.output(tuple(results)).meta["val"] = None
        return [
            OutputSpec(
                OutputKind.USER_OUTPUT,
                _argument(r) if isinstance(r, Node) else ConstantArgument(name="", value=r),
                None,
            )
            for r in results
        ]


def _call_spec(convention: Convention) -> tuple[TreeSpec, list[int], list[str]]:
    """Return the spec `(args, kwargs)` of exporters, the leaves of the convention in that order, and argument names."""
    slots = [slot for slot in convention.slots if slot.captured]
    args: list[tuple[str, TreeSpec, range]] = []
    kwargs: list[tuple[str, TreeSpec, range]] = []
    start = 0
    for slot, spec in zip(slots, children(convention.in_spec), strict=True):
        for name, one in _arguments_of(slot, spec):
            leaves = range(start, start + one.num_leaves)
            start += one.num_leaves
            named = slot.by_name or slot.kind in (
                inspect.Parameter.KEYWORD_ONLY,
                inspect.Parameter.VAR_KEYWORD,
            )
            (kwargs if named else args).append((name, one, leaves))
    spec = tuple_of(
        [
            tuple_of([one for _, one, _ in args]),
            dict_of([n for n, *_ in kwargs], [one for _, one, _ in kwargs]),
        ]
    )
    arguments = [*args, *kwargs]
    return spec, [leaf for *_, leaves in arguments for leaf in leaves], [name for name, *_ in arguments]


def _arguments_of(slot: Slot, spec: TreeSpec) -> list[tuple[str, TreeSpec]]:
    """Return the arguments of one parameter: any number for a variadic one."""
    if slot.kind is inspect.Parameter.VAR_POSITIONAL:
        return [(f"{slot.name}_{i}", one) for i, one in enumerate(children(spec))]
    if slot.kind is inspect.Parameter.VAR_KEYWORD:
        return list(zip(context_of(spec), children(spec), strict=True))
    return [(slot.name, spec)]


def _argument(node: Node) -> Any:
    value = node.meta.get("val")
    kinds = {
        Tensor: TensorArgument,
        torch.SymInt: SymIntArgument,
        torch.SymFloat: SymFloatArgument,
        torch.SymBool: SymBoolArgument,
    }
    for kind, argument_type in kinds.items():
        if isinstance(value, kind):
            return argument_type(name=node.name)
    return ConstantArgument(name=node.name, value=value)


def _is_fixed(value: Tensor) -> bool:
    return value.layout is torch.strided and all(type(n) is int for n in (*value.shape, *value.stride()))


def _mode(nodes: list[Node]) -> FakeTensorMode:
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in nodes)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode()


def _ranges(nodes: list[Node]) -> dict[Any, Any]:
    """Return the ranges of all symbols in the graph's sizes."""
    ranges: dict[Any, Any] = {}
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else (value,):
                if isinstance(size, SYMBOLIC):
                    bounds = size.node.shape_env.var_to_range
                    ranges |= {
                        s: bounds[s] for s in size.node.expr.free_symbols if s not in ranges and s in bounds
                    }
    return ranges
