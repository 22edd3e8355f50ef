"""The decomposed form of a program in one walk, for programs that decomposition hardly changes.

Torch decomposes by retracing the whole program, which takes longer than exporting it. Here the nodes that it would keep
are copied, and the few composite operators that it would decompose are run alone on their fake operands. Values on memory
that the program writes are functional tensors: views of them and writes to them run through torch's functionalization,
which emits what it would in a trace of the whole. The result is the same, names and values included; if that is not
certain, `decomposed` raises Unsure, and torch retraces the program.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, cast

import torch
import torch.fx.passes.shape_prop as shape_prop
import torch.fx.traceback as fx_traceback
import torch.utils._python_dispatch as python_dispatch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.frontend.decompose_ops import (
    FunctionalMemory,
    Operators,
    Unsure,
    dispatched_arguments,
    functional_kernel,
    functional_tensor,
    functionalization,
    inner_value,
    is_functional,
    recorded,
    returns_alias,
    same_form,
    synchronize,
    written_storages,
)
from dovetail.frontend.export_aliases import storage_of

_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT, InputKind.CONSTANT_TENSOR)

# A tensor literal is lifted and then detached in place; both must return a copy of the constant.
_LIFT, _DETACH = torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.detach_.default
_CLONE = torch.ops.aten.clone.default
_COPY = torch.ops.aten.copy.default
_VIEW_DTYPE = torch.ops.aten.view.dtype

# Left by the strict exporter only, whose names for shared tensors torch does not keep.
_STRICT = ("source_fn_stack", "example_value")

# Names that torch gives the inputs of a program whose inputs are flat.
_UNNAMED = re.compile(r"arg_\d+")

# What nodes that a tracer creates inherit from the node that it replays.
_REPLAYED = ("stack_trace", "custom") if hasattr(fx_traceback, "set_current_replay_node") else ()
_MUTATIONS = {
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}
_INHERITED = ("stack_trace", "nn_module_stack", "torch_fn", "quantization_tag", "custom")


@dataclasses.dataclass(frozen=True)
class Decomposed:
    """A functional graph with what its placeholders and results stand for."""

    graph: Graph
    graph_signature: ExportGraphSignature
    graph_module: GraphModule
    constants: Mapping[str, Any]
    range_constraints: Mapping[Any, Any]


def decomposed(program: ExportedProgram, signature: ExportGraphSignature) -> Decomposed:
    """Return what `run_decompositions({})` makes of the program; raise Unsure if that is not certain.

    Omitted from each node's meta: numbers and provenance that the tracer adds itself.
    """
    try:
        _check_modes()
        with torch.no_grad():
            return _Walk(program, signature).run()
    except Unsure:
        raise
    except Exception as error:
        # Fake kernels raise errors of all kinds, and private names of torch may be missing: torch decomposes instead.
        raise Unsure(f"the walk over it stopped: {type(error).__name__}: {error}") from error


def _check_modes() -> None:
    if python_dispatch._get_current_dispatch_mode() is not None or torch._C._len_torch_function_stack():
        raise Unsure("a mode is active that would see the operators")
    if torch._C._is_any_autocast_enabled():
        raise Unsure("autocast would be applied once more")


class _Walk:
    def __init__(self, program: ExportedProgram, signature: ExportGraphSignature) -> None:
        self.program = program
        self.signature = signature
        self.graph = Graph()
        # For each node of the program: a node, the nodes of its parts, or None for an operator without a result.
        self.new_of: dict[Node, Any] = {}
        # Nodes whose new value has another storage than the exported one.
        self.relocated: set[Node] = set()
        # Nodes whose new value has other strides than the exported one.
        self.restrided: set[Node] = set()
        self.constants: set[Node] = set()
        self.operators = Operators()
        self.memory = FunctionalMemory(written_storages(program.graph, _is_detached_constant))
        self.inherited: dict[str, Any] = {}
        # The tensor that operators run on for each new node, the node of each such tensor, and some as functional tensors.
        self.fakes: dict[Node, Tensor] = {}
        self.owners: dict[int, Node] = {}
        self.functional: dict[Node, Tensor] = {}

    def run(self) -> Decomposed:
        if self.program.range_constraints:
            raise Unsure("sizes are symbolic")
        if any(key in node.meta for node in self.program.graph.nodes for key in _STRICT):
            raise Unsure("the program was exported in strict mode")
        placeholders = self.program.graph.find_nodes(op="placeholder")
        inputs = list(zip(self.signature.input_specs, placeholders, strict=True))
        self._check_inputs(inputs)
        inputs = [inputs[i] for i in registration_order([spec for spec, _ in inputs])]
        for i, (_, node) in enumerate(inputs):
            self._placeholder(node, f"arg{i}_1")
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                raise Unsure(f"'{node.name}' is a {node.op}")
        self.inherited = {}
        mutations = self._mutations(inputs)
        results = map_arg(self.program.graph.output_node().args[0], self._new)
        output = self.graph.output((*(new for _, new in mutations), *cast("tuple[Any, ...]", results)))
        output.meta = dict(self.program.graph.output_node().meta)
        self.graph.eliminate_dead_code()
        mutations = [self._without_copy(spec, new) for spec, new in mutations]
        results = cast("tuple[Any, ...]", output.args[0])[len(mutations) :]
        self._name(placeholders)
        return Decomposed(
            self.graph,
            self._signature([spec for spec, _ in inputs], mutations, results),
            self.program.graph_module,
            self.program.constants,
            {},
        )

    def _mutations(self, inputs: Sequence[tuple[InputSpec, Node]]) -> list[tuple[OutputSpec, Node]]:
        """Return the results for inputs and buffers that are written, each with its last value."""
        mutations: list[tuple[OutputSpec, Node]] = []
        for spec, node in inputs:
            if node not in self.memory.tensors:
                continue
            new = self._synchronize(node)
            if new is self.new_of[node]:
                continue
            kind = _MUTATIONS.get(spec.kind)
            if kind is None:
                raise Unsure(f"'{node.name}', a {spec.kind.name}, is written")
            target = spec.target if kind is OutputKind.BUFFER_MUTATION else node.name
            mutations.append((OutputSpec(kind, TensorArgument(name=new.name), target), new))
        return mutations

    def _without_copy(self, spec: OutputSpec, new: Node) -> tuple[OutputSpec, Node]:
        """Return the value itself that is copied into a buffer last, as torch does."""
        if spec.kind is not OutputKind.BUFFER_MUTATION or new.target is not _COPY:
            return spec, new
        source = cast(Node, new.args[1])
        new.replace_all_uses_with(source)
        self.graph.erase_node(new)
        return spec, source

    def _check_inputs(self, inputs: Sequence[tuple[InputSpec, Node]]) -> None:
        constants: set[int] = set()
        for spec, node in inputs:
            if spec.kind not in _INPUTS:
                raise Unsure(f"'{node.name}' is a {spec.kind.name}")
            if spec.kind is not InputKind.CONSTANT_TENSOR:
                continue
            value = self.program.constants.get(cast(str, spec.target))
            if type(value) is not Tensor or value.requires_grad or id(value) in constants or not node.users:
                raise Unsure(f"'{node.name}' is not a single constant tensor with a reader")
            constants.add(id(value))
            self.constants.add(node)

    def _placeholder(self, node: Node, name: str) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            _require_dense(value)
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            raise Unsure(f"'{node.name}' is a {type(value).__name__}")
        new = self.graph.create_node("placeholder", node.target, (), {}, name)
        new.meta = dict(node.meta)
        if isinstance(value, Tensor):
            new.meta.setdefault("tensor_meta", shape_prop._extract_tensor_metadata(value))
        self.new_of[node] = new
        # A constant that is lifted is copied, though its exported value shares memory with the copy.
        is_copied = node in self.constants and all(user.target is _LIFT for user in node.users)
        if self.memory.holds(value) and not is_copied:
            self.memory.enter(node, self._functional_tensor(new))

    def _call(self, node: Node) -> None:
        target = node.target
        first = node.args[0] if node.args else None
        self.inherited = {key: node.meta[key] for key in _INHERITED if key in node.meta}
        if target is operator.getitem:
            self._getitem(node, cast(Node, first), cast(int, node.args[1]))
        elif not isinstance(target, OpOverload):
            raise Unsure(f"'{node.name}' calls {target}")
        elif target is _LIFT and first in self.constants:
            constant = self._new(first)
            with self._mode(node):
                value = _CLONE(constant.meta["val"])
            self._replace(node, self._add(node, _CLONE, (constant,), {}, value))
        elif _is_detached_constant(node):
            self._replace(node, self._new(cast(Node, first)))
        elif target._schema.is_mutable:
            is_whole = self.operators.is_functionalized(target)
            self._traced(node, functional_kernel(target) if is_whole else target.decompose)
        elif not self.operators.is_kept(target):
            self._traced(node, target.decompose)
        elif self.memory.reads(node) and returns_alias(target):
            self._traced(node, functional_kernel(target))
        else:
            args, kwargs = dispatched_arguments(target, node.args, node.kwargs)
            args, kwargs = map_arg((args, kwargs), self._new)
            self.new_of[node] = new = self._add(node, target, args, kwargs, self._value(node))
            if isinstance(new, Node) and self.memory.holds(node.meta.get("val")):
                self.memory.enter(node, self._functional_tensor(new))

    def _getitem(self, node: Node, whole: Node, position: int) -> None:
        tensors = self.memory.tensors.get(whole)
        if tensors is not None:
            self.memory.tensors[node] = tensors[position]
            return
        parts = self.new_of[whole]
        if not isinstance(parts, list):
            raise Unsure(f"'{node.name}' takes a part of a single value")
        self._replace(node, parts[position])

    def _traced(self, node: Node, function: Callable[..., Any]) -> None:
        """Add the operators that run instead of one: the parts of a composite, or what functionalization calls."""
        reads_memory = self.memory.reads(node)
        if reads_memory and node.target is _VIEW_DTYPE:
            raise Unsure(f"'{node.name}' is a view of another dtype of memory that is written")
        args, kwargs = map_arg((node.args, node.kwargs), self._operand)

        def run() -> Any:
            with functionalization() if reads_memory else nullcontext():
                return function(*args, **kwargs)

        result = self._recorded(node, run)
        self.memory.note_writes(node)
        if result is None or not node.users:
            self.new_of[node] = None
        elif not reads_memory or not self.memory.alias(node, result):
            self._replace(node, self._to_argument(node, result))

    def _recorded(self, node: Node, function: Callable[[], Any]) -> Any:
        calls, result = recorded(self.operators, self._mode(node), node.target, function)
        for call in calls:
            operands = tuple(self._to_argument(node, value) for value in call.args)
            named = {name: self._to_argument(node, value) for name, value in call.kwargs.items()}
            added = self._add(node, call.target, operands, named, call.result)
            nodes = added if isinstance(added, list) else [added]
            self.owners.update({id(part): new for part, new in zip(_parts(call.result), nodes, strict=False)})
        return result

    def _to_argument(self, node: Node, value: Any) -> Any:
        """Return an argument of a recorded call as an argument of a node."""
        if isinstance(value, Tensor):
            return self._owner(node, value)
        if isinstance(value, (list, tuple)):
            return [self._to_argument(node, part) for part in cast("Sequence[Any]", value)]
        return value

    def _owner(self, node: Node, value: Tensor) -> Node:
        if is_functional(value):
            value = inner_value(value)
        if id(value) not in self.owners:
            raise Unsure(f"'{node.name}' uses a tensor of unknown origin")
        return self.owners[id(value)]

    def _operand(self, old: Node) -> Any:
        """Return the tensor to run the readers of `old` on; each tensor belongs to one node only."""
        if old in self.memory.tensors:
            self._synchronize(old)
            return self.memory.tensors[old]
        return self._fake(self._new(old))

    def _fake(self, new: Node) -> Any:
        value = new.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        if new not in self.fakes:
            if value.requires_grad or self.owners.get(id(value), new) is not new:
                value = value.detach()
            self.fakes[new] = value
            self.owners[id(value)] = new
        return self.fakes[new]

    def _functional_tensor(self, new: Node) -> Tensor:
        if new not in self.functional:
            self.functional[new] = functional_tensor(self._fake(new))
        return self.functional[new]

    def _synchronize(self, old: Node) -> Node:
        """Replay the writes to other aliases since `old` was last read; return the node that has its value now."""
        tensor = self.memory.tensors[old]
        if isinstance(tensor, (list, tuple)):
            raise Unsure(f"'{old.name}' is used as one value, though it is a tuple")
        if self.memory.is_stale(old):
            current, replayed = self.inherited, self._owner(old, tensor).meta
            # As in torch, replayed views have the source line of the first ones.
            self.inherited = {**current, **{key: replayed[key] for key in _REPLAYED if key in replayed}}
            self._recorded(old, lambda: synchronize(tensor))
            self.inherited = current
        return self._owner(old, tensor)

    def _replace(self, node: Node, new: Any) -> None:
        """Let `new` (a node, or a list of nodes) replace `node` for its readers."""
        self.new_of[node] = new
        old = node.meta.get("val")
        values = [n.meta["val"] for n in new] if isinstance(new, list) else new.meta["val"]
        if not same_form(values, old):
            self._note_strides(node, values)
        if any(storage_of(a) != storage_of(b) for a, b in zip(_parts(values), _parts(old), strict=True)):
            self.relocated.add(node)
        if isinstance(new, Node) and self.memory.holds(old):
            self.memory.enter(node, self._functional_tensor(new))

    def _note_strides(self, node: Node, values: Any) -> None:
        """Note that a value has other strides than the exported one, because its operands have."""
        if not any(self._is_restrided(old) for old in node.all_input_nodes) or not same_form(
            values, node.meta.get("val"), strides=False
        ):
            raise Unsure(f"'{node.name}' comes out in another form")
        self.restrided.add(node)

    def _is_restrided(self, old: Node) -> bool:
        """Return whether the value of a node has other strides than the exported one."""
        if old in self.restrided:
            return True
        tensor = self.memory.tensors.get(old)
        if tensor is None or isinstance(tensor, (list, tuple)):
            return False
        value = self._owner(old, tensor).meta["val"]
        if not same_form(value, old.meta["val"], strides=False):
            raise Unsure(f"'{old.name}' comes out in another form")
        return not same_form(value, old.meta["val"])

    def _add(
        self, origin: Node, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Any:
        name = self.graph._target_to_str(target.overloadpacket.__name__)
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        inherited = {**self.inherited, "original_aten": target}
        node.meta = dict(inherited)
        if value is None:
            return node
        node.meta["val"] = value
        if isinstance(value, Tensor):
            _require_dense(value)
            node.meta["tensor_meta"] = shape_prop._extract_tensor_metadata(value)
            return node
        if not isinstance(value, (list, tuple)):
            raise Unsure(f"'{origin.name}' gives a {type(value).__name__}")
        return [self._item(node, i, part, inherited) for i, part in enumerate(cast("Sequence[Any]", value))]

    def _item(self, whole: Node, position: int, value: Any, inherited: Mapping[str, Any]) -> Node:
        if not isinstance(value, Tensor):
            raise Unsure(f"part {position} of {whole.target} is a {type(value).__name__}")
        _require_dense(value)
        item = self.graph.create_node("call_function", operator.getitem, (whole, position), {})
        item.meta = {**inherited, "val": value, "tensor_meta": shape_prop._extract_tensor_metadata(value)}
        return item

    def _value(self, node: Node) -> Any:
        """Return the exported value, recomputed if it shares memory with a value that was recomputed."""
        value = node.meta.get("val")
        is_restrided = any(self._is_restrided(old) for old in node.all_input_nodes)
        relocated = [old for old in node.all_input_nodes if old in self.relocated]
        storages = {storage_of(part) for old in relocated for part in _parts(old.meta["val"])}
        is_relocated = bool(storages) and any(
            storage_of(part) in storages for part in _parts(value) if isinstance(part, Tensor)
        )
        if not is_relocated and not is_restrided:
            return value
        args, kwargs = map_arg((node.args, node.kwargs), lambda old: self._new(old).meta["val"])
        with self._mode(node):
            recomputed = cast(Any, node.target)(*args, **kwargs)
        if not same_form(recomputed, value):
            self._note_strides(node, recomputed)
        if is_relocated:
            self.relocated.add(node)
        return recomputed

    def _new(self, old: Node) -> Node:
        if old in self.memory.tensors:
            return self._synchronize(old)
        new = self.new_of[old]
        if not isinstance(new, Node):
            raise Unsure(f"'{old.name}' is used as one value, though it is a tuple")
        return new

    def _mode(self, node: Node) -> FakeTensorMode:
        for old in (node, *node.all_input_nodes):
            for part in _parts(old.meta.get("val")):
                if isinstance(part, FakeTensor):
                    return part.fake_mode
        raise Unsure(f"'{node.name}' has no fake value")

    def _name(self, placeholders: Sequence[Node]) -> None:
        """Name the placeholders as in the program; torch would rename nodes that have the name of one of them."""
        names = {node.name for node in placeholders}
        for node in self.graph.nodes:
            if node.op == "call_function" and (node.name in names or _UNNAMED.fullmatch(node.name)):
                raise Unsure(f"an operator has the name of the input '{node.name}'")
        for node in placeholders:
            self.new_of[node].name = node.name

    def _signature(
        self, inputs: list[InputSpec], mutations: list[tuple[OutputSpec, Node]], results: Sequence[Any]
    ) -> ExportGraphSignature:
        # Placeholders were named after the mutations were collected.
        specs = [dataclasses.replace(spec, arg=TensorArgument(name=new.name)) for spec, new in mutations]
        for spec, result in zip(self.signature.output_specs, results, strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise Unsure(f"a result is a {spec.kind.name}")
            if isinstance(spec.arg, TensorArgument):
                spec = dataclasses.replace(spec, arg=TensorArgument(name=cast(Node, result).name))
            elif not isinstance(spec.arg, ConstantArgument):
                raise Unsure(f"a result is a {type(spec.arg).__name__}")
            specs.append(spec)
        return ExportGraphSignature(input_specs=inputs, output_specs=specs)


def _is_detached_constant(node: Node) -> bool:
    first = node.args[0] if node.target is _DETACH else None
    return isinstance(first, Node) and first.target is _LIFT


def registration_order(specs: Sequence[InputSpec]) -> list[int]:
    """Return the order of parameters, then buffers and constants, then inputs in a program that torch decomposed.

    It is that of a depth-first walk over the modules, each at the place where its first tensor was an input.
    """
    first: dict[str, int] = {}
    place: dict[int, tuple[Any, ...]] = {}
    for i, spec in enumerate(specs):
        if spec.target is None:
            place[i] = (2,)
            continue
        modules = accumulate(spec.target.split(".")[:-1], "{}.{}".format)
        is_parameter = spec.kind is InputKind.PARAMETER
        place[i] = (0 if is_parameter else 1, *(first.setdefault(path, i) for path in modules))
    return sorted(place, key=place.__getitem__)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(cast("Sequence[Any]", value))
    return [] if value is None else [value]


def _require_dense(value: Tensor) -> None:
    """Raise Unsure for tensors that tracing treats specially."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
        raise Unsure("a tensor is not a dense strided one")
    if value.is_conj() or value.is_neg():
        raise Unsure("a tensor is conjugated or negated only when it is read")
    if getattr(value, "_has_symbolic_sizes_strides", True):
        raise Unsure("sizes are symbolic")
