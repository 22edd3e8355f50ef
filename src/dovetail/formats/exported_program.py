"""A graph as an ExportedProgram, its operations as they are: nothing is traced anew."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from dovetail.ir.graph_module import Program, attribute, copy_graph, copy_node, rebuild
from dovetail.ir.nodes import SYMBOLIC, is_projection
from dovetail.numerics.sample_inputs import random_inputs



def retraced(gm: GraphModule, marks: Mapping[str, Any]) -> ExportedProgram:
    """The program that torch.export makes of a graph, run node by node so that marks reach the new nodes."""
    examples: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if value is None:
            raise SaveError(
                "nothing is known of this input: `capture` the graph with example inputs first", node.name
            )
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, SYMBOLIC) for size in sizes):
            raise SaveError(
                "this input has sizes that vary, and the graph calls functions that are no operators: `capture` the model",
                node.name,
            )
        examples.append(value)
    traced = rebuild(gm, copy_graph(gm.graph))
    for node in traced.graph.nodes:
        if node.name in marks:
            node.meta["custom"] = {**node.meta.get("custom", {}), **marks[node.name]}
    traced.__dict__["forward"] = _node_by_node(traced)
    try:
        with torch.random.fork_rng(devices=[]):
            program = torch.export.export(traced, tuple(random_inputs(examples)), strict=False)
    except Exception as error:
        raise SaveError(
            f"torch.export cannot trace the graph: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    for node in program.graph.nodes:
        name_nothing_like_python(node)
    return program


def _node_by_node(program: Program) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        with traceback.preserve_node_meta():
            return Interpreter(program).run(*inputs)

    return forward


def name_nothing_like_python(node: Node) -> None:
    """Give defaults in full where an argument is called like a keyword, as `from` is: torch cannot read it back else."""
    target = node.target
    if not isinstance(target, OpOverload) or not any(
        keyword.iskeyword(a.name) for a in target._schema.arguments
    ):
        return
    listed = [a for a in target._schema.arguments if not a.kwarg_only]
    given = dict(zip([a.name for a in listed], node.args, strict=False)) | node.kwargs
    node.args = tuple(given.pop(a.name) if a.name in given else a.default_value for a in listed)
    node.kwargs = given


_PREFIXES = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}

# What exporters write that is no operator: arithmetic of sizes, and modes.
_EXPORTED = ("torch.sym_", "torch._sym_", "torch._C.", "torch.amp.", "builtins.round")

# Notes of tracers, which make up half of an archive and say nothing of the graph as it is now.
_NOTES = frozenset({"from_node", "desc"})


def exported(gm: GraphModule, marks: Mapping[str, Any] | None = None) -> ExportedProgram:
    """The program that a graph without regions is: called as the graph is, with its weights under their names.

    It is of the dialect that trains: writes to buffers and inputs stay where they are. `marks` are put into
    `node.meta["custom"]` by the names of nodes. Raises SaveError where the graph is none that an exporter could make.
    """
    if any(_is_foreign(node) for node in gm.graph.nodes):
        return retraced(gm, marks or {})
    return _Exporting(gm, marks or {}).run()


def _is_foreign(node: Node) -> bool:
    """Whether a node is one that a tracer of Python writes, and no exporter: those have Python for sizes alone."""
    target = node.target
    if node.op != "call_function" or isinstance(target, OpOverload | HigherOrderOperator):
        return node.op == "call_method"
    name = encode.function_name(target) or ""
    if isinstance(node.meta.get("val"), Tensor):
        return bool(name) and not is_projection(node)
    return name.startswith(("torch.", "builtins.")) and not name.startswith(_EXPORTED)


@dataclass
class _State:
    """Parameters and buffers by their names, as exporters keep them."""

    saved: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    others: dict[str, Any] = field(default_factory=dict[str, Any])


class _Exporting:
    def __init__(self, gm: GraphModule, marks: Mapping[str, Any]) -> None:
        self.gm, self.marks = gm, marks
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.specs: list[InputSpec] = []
        self.state = _State()
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
                state_dict=self.state.saved,
                range_constraints=_ranges(self.nodes),
                module_call_graph=[ModuleCallEntry(fqn="", signature=call)],
                example_inputs=None,
                constants=self.state.others,
                verifiers=[TrainingIRVerifier],
            )
        except Exception as error:
            raise SaveError(
                f"torch.export does not take the graph: {type(error).__name__}: {error}"
            ) from error

    def _lift(self) -> None:
        """Make every parameter and buffer an input, used or not, and every constant that is used."""
        gm, state = self.gm, self.state
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
            (state.saved if target in persistent else state.others)[target] = value
            kind = InputKind.PARAMETER if isinstance(value, nn.Parameter) else InputKind.BUFFER
            self._input(kind, target, value, read.pop(target, []), target in persistent)
        for target, readers in read.items():
            value = cast("Tensor", attribute(gm, target))
            state.others[target] = value
            self._input(InputKind.CONSTANT_TENSOR, target, value, readers)

    def _input(
        self, kind: InputKind, target: str, value: Tensor, readers: list[Node], persistent: bool | None = None
    ) -> None:
        stem = "".join(c if c.isalnum() else "_" for c in target)
        new = self.graph.create_node("placeholder", "", name=f"{_PREFIXES[kind]}_{stem}")
        new.target = new.name
        fakes = (n.meta.get("val") for n in readers)
        new.meta["val"] = next((self._homed(f) for f in fakes if isinstance(f, FakeTensor)), None)
        if new.meta["val"] is None:
            new.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.env.update(dict.fromkeys(readers, new))
        kept = persistent if kind is InputKind.BUFFER else None
        self.specs.append(InputSpec(kind, TensorArgument(name=new.name), target, persistent=kept))

    def _call(self) -> ModuleCallSignature:
        """Append the inputs in the order in which exporters have them, and tell how the program is called."""
        inputs = [n for n in self.nodes if n.op == "placeholder"]
        convention = convention_of(self.gm)
        if convention is None:
            in_spec = tuple_of([tuple_of([leaf_spec()] * len(inputs)), dict_of([], [])])
            order, names = list(range(len(inputs))), [n.name for n in inputs]
            out_spec = pytree.tree_structure(self.nodes[-1].args[0])
        else:
            in_spec, leaves, names = called(convention)
            places = {leaf: i for i, leaf in enumerate(convention.order)}
            order, out_spec = [places[leaf] for leaf in leaves], convention.out_spec
        for i in order:
            node = inputs[i]
            if "val" not in node.meta:
                raise SaveError(
                    "nothing is known of this input: `capture` the graph with example inputs first", node.name
                )
            self._copy(node)
            self.specs.append(InputSpec(InputKind.USER_INPUT, _argument(self.env[node]), None))
        return ModuleCallSignature(
            inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec, forward_arg_names=names
        )

    def _copy(self, node: Node) -> None:
        if node.op == "call_function":
            if not isinstance(node.target, OpOverload | HigherOrderOperator) and "val" not in node.meta:
                raise SaveError(
                    "nothing is known of its value: `capture` the graph with example inputs", node.name
                )
        elif node.op == "get_attr":
            if not isinstance(attribute(self.gm, cast("str", node.target)), GraphModule):
                raise SaveError(f"'{node.target}' is neither a tensor nor a graph", node.name)
        elif node.op != "placeholder":
            raise SaveError(
                f"a {node.op} has no place in an exported program: `capture` the model", node.name
            )
        new = self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        name_nothing_like_python(new)
        for key in _NOTES & new.meta.keys():
            del new.meta[key]
        if "val" in new.meta:
            new.meta["val"] = pytree.tree_map(self._homed, new.meta["val"])
        if node.name in self.marks:
            new.meta["custom"] = {**new.meta.get("custom", {}), **self.marks[node.name]}

    def _homed(self, value: Any) -> Any:
        """A fake tensor of the one mode that a program has; tracers may have used several."""
        if not isinstance(value, FakeTensor) or value.fake_mode is self.mode or not _is_fixed(value):
            return value
        with self.mode, torch.no_grad():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    def _results(self) -> list[OutputSpec]:
        made: list[Any] = []
        for result in pytree.tree_leaves(self.nodes[-1].args[0]):
            made.append(self.env[result] if isinstance(result, Node) else result)
        self.graph.output(tuple(made)).meta["val"] = None
        return [
            OutputSpec(
                OutputKind.USER_OUTPUT,
                _argument(r) if isinstance(r, Node) else ConstantArgument(name="", value=r),
                None,
            )
            for r in made
        ]


def called(convention: Convention) -> tuple[TreeSpec, list[int], list[str]]:
    """How exporters write the way a graph is called: `(args, kwargs)`, the leaves of the convention in that order, names."""
    slots = [slot for slot in convention.slots if slot.captured]
    args: list[tuple[str, TreeSpec, range]] = []
    kwargs: list[tuple[str, TreeSpec, range]] = []
    start = 0
    for slot, spec in zip(slots, children(convention.in_spec), strict=True):
        for name, one in _given(slot, spec):
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
    listed = [*args, *kwargs]
    return spec, [leaf for *_, leaves in listed for leaf in leaves], [name for name, *_ in listed]


def _given(slot: Slot, spec: TreeSpec) -> list[tuple[str, TreeSpec]]:
    """The arguments that one parameter took: several where it takes whatever else is given."""
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
    for kind, made in kinds.items():
        if isinstance(value, kind):
            return made(name=node.name)
    return ConstantArgument(name=node.name, value=value)


def _is_fixed(value: Tensor) -> bool:
    return value.layout is torch.strided and all(type(n) is int for n in (*value.shape, *value.stride()))


def _mode(nodes: list[Node]) -> FakeTensorMode:
    found = (getattr(node.meta.get("val"), "fake_mode", None) for node in nodes)
    return next((mode for mode in found if mode is not None), None) or FakeTensorMode()


def _ranges(nodes: list[Node]) -> dict[Any, Any]:
    """The bounds of all symbols that the graph's sizes are made of."""
    found: dict[Any, Any] = {}
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else (value,):
                if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                    bounds = size.node.shape_env.var_to_range
                    found |= {
                        s: bounds[s] for s in size.node.expr.free_symbols if s not in found and s in bounds
                    }
    return found
