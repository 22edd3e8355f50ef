"""Blocks: the parts of a graph that boundaries are chosen in, each taken out as a program that runs alone.

The default pipeline divides a graph into repeated blocks and what is between them; blocks with equal bodies are one
block. Its program has the operations in the order of the body, so that a position means the same operation in every
block with the same key; weights are attributes as in the whole graph, and all other operands are inputs. The inputs are
recorded in one run of the graph: they have the sizes, strides and aliasing that they really have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn import Module, Parameter

from dovetail.frontend.calling_convention import convention_of
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, as_program, attribute, copy_node
from dovetail.ir.meta_keys import CANONICAL
from dovetail.ir.nodes import storage_key
from dovetail.ir.op_traits import target_name
from dovetail.outlining.region import RegionCall, call_of, regions
from dovetail.passes.pass_manager import Pipeline
from dovetail.rules.fusion_units import fusion_units
from dovetail.rules.rule import RuleContext
from dovetail.runtime.presets import blocks
from dovetail.scheduling.call_recording import copy_tensors
from dovetail.tuning.restored_runs import preserved_buffers


@dataclass(eq=False)
class Block:
    """One distinct block: its key, its program with recorded inputs, and how many calls of it the graph has.

    An operation with the getitems that project its tuple is one unit; `units` has the positions of each, `edges` the
    pairs of a unit and one that must come after it.
    """

    key: str
    label: str
    program: Program
    inputs: tuple[Any, ...] = ()
    calls: int = 1
    copies: frozenset[int] = field(default_factory=frozenset[int])
    """Units that are clones of operations of another block."""

    @cached_property
    def context(self) -> RuleContext:
        """The block as rules see it."""
        return RuleContext(self.program)

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """The positions of each operation, in the order of the block."""
        grouped = fusion_units(self.context)
        return [
            (i, *grouped.projections.get(i, ()))
            for i, node in enumerate(self.context.nodes)
            if node.op not in ("placeholder", "get_attr", "output") and grouped.unit_of[i] == i
        ]

    @cached_property
    def unit_of(self) -> dict[int, int]:
        """The unit of each position that is in one."""
        return {position: k for k, positions in enumerate(self.units) for position in positions}

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of a unit and another that reads its value or must come after it."""
        unit_of, before = self.unit_of, self.context.index.before
        pairs = [
            (unit_of[j], k)
            for k, positions in enumerate(self.units)
            for i in positions
            for j in before[i]
            if j in unit_of and unit_of[j] != k
        ]
        return list(dict.fromkeys(pairs))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the analyses, which refer to the graph by node.
        return Block, (self.key, self.label, self.program, self.inputs, self.calls, self.copies)

    @cached_property
    def writes(self) -> bool:
        """Whether its program writes to its inputs or buffers."""
        return bool(self.context.index.dependencies.written)

    def operation(self, unit: int) -> str:
        """Return the name of a unit's operator."""
        return target_name(self.context.nodes[self.units[unit][0]])


@dataclass(frozen=True)
class _BlockCall:
    """One call of a block: names of its operands and operations in the graph, and positions of clones among these."""

    operands: tuple[str, ...]
    members: tuple[str, ...]
    clones: tuple[int, ...]
    kind: str


def divide_into_blocks(gm: GraphModule) -> dict[str, list[_BlockCall]]:
    """Return the calls of each distinct block of a graph, by key.

    A region that the graph has already, and that no block contains, is a block of one operation.
    """
    calls: dict[str, list[_BlockCall]] = {}
    by_name = {node.name: node for node in gm.graph.nodes}
    for region in regions(Pipeline(list(blocks()))(gm)):
        record = cast("RegionCall", call_of(region.node.meta))
        names, clones = [m.name for m in record.members], [i for i, m in enumerate(record.members) if m.clone]
        earlier = by_name.get(region.node.name)
        if earlier is not None and call_of(earlier.meta) is not None:
            names, clones = [earlier.name, *(user.name for user in earlier.users)], []
        operands = tuple(node.name for node in region.inputs)
        call = _BlockCall(operands, tuple(names), tuple(clones), region.kind)
        calls.setdefault(region.key, []).append(call)
    return calls


def blocks_of(
    gm: GraphModule, known: Mapping[str, Block] | None = None
) -> tuple[dict[str, Block], list[str]]:
    """Return the distinct blocks of a graph by key, without inputs unless they are known, and the keys that are new."""
    index = Index(gm)
    distinct: dict[str, Block] = {}
    new: list[str] = []
    for key, calls in divide_into_blocks(gm).items():
        block = (known or {}).get(key)
        if block is None:
            block = _take_out(index, key, calls[0])
            new.append(key)
        distinct[key] = replace(block, calls=len(calls))
    return distinct, new


def _take_out(index: Index, key: str, call: _BlockCall) -> Block:
    """Return a block as a program that runs alone."""
    nodes, names = index.nodes, index.names
    members = [nodes[names[name]] for name in call.members]
    block = take_out(index, key, members, [nodes[names[name]] for name in call.operands], call.kind)
    positions = [len(call.operands) + i for i in call.clones]
    return replace(block, copies=frozenset(block.unit_of[i] for i in positions if i in block.unit_of))


def take_out(
    index: Index,
    key: str,
    members: Sequence[Node],
    operands: Sequence[Node] | None = None,
    kind: str = "part",
) -> Block:
    """Return some operations of a graph, in its order, as a program that runs alone; weights are attributes of it."""
    gm, inside = index.gm, set(members)
    if operands is None:
        operands = list(dict.fromkeys(n for node in members for n in node.all_input_nodes if n not in inside))
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in operands:
        if node.op == "get_attr":
            env[node] = copy_node(graph, node, env.__getitem__)
        else:
            operand = env[node] = graph.create_node("placeholder", node.name, name=node.name)
            operand.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
    for node in members:
        env[node] = copy_node(graph, node, env.__getitem__)
    returned = [n for n in members if any(user not in inside for user in n.users)]
    graph.output(tuple(env[n] for n in returned)).meta["val"] = None
    program = as_program(GraphModule(gm, graph, "Block"))
    program.training = gm.training
    if CANONICAL in gm.meta:
        program.meta[CANONICAL] = gm.meta[CANONICAL]
    return Block(key, _label(kind, members), program)


def _label(kind: str, members: Sequence[Node]) -> str:
    """Return a readable name: the module path that the operations share, and their number."""
    paths = [
        str(list(stack.values())[-1][0]).split(".")
        for node in members
        if (stack := node.meta.get("nn_module_stack"))
    ]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    place = ".".join(part for part in shared if part) or "the model"
    return f"{place}, {kind} of {len(members)} operations"


class _Recorder(Interpreter):
    """Runs a graph and copies the operands of some blocks as they are when all of them are computed."""

    def __init__(self, gm: GraphModule, operands_of: Mapping[str, Sequence[Node]]) -> None:
        super().__init__(gm)
        self.recorded: dict[str, tuple[Any, ...]] = {}
        self._operands = operands_of
        self._missing = {key: set(nodes) for key, nodes in operands_of.items()}
        self._values: dict[Node, Any] = {}
        self._keys: dict[Node, list[str]] = {}
        for key, nodes in operands_of.items():
            for node in nodes:
                self._keys.setdefault(node, []).append(key)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self._keys:
            self._values[n] = value
            for key in self._keys[n]:
                self._missing[key].discard(n)
                if not self._missing[key]:
                    operands = tuple(self._values[node] for node in self._operands[key])
                    self.recorded[key] = tuple(copy_tensors(operands))
        return value


def record_inputs(
    gm: GraphModule,
    blocks: Mapping[str, Block],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
) -> None:
    """Run a graph once and give blocks without inputs those of their first call."""
    by_name = {node.name: node for node in gm.graph.nodes}
    missing = {key: block for key, block in blocks.items() if not block.inputs}
    operands_of = {
        key: [by_name[n.name] for n in block.program.graph.find_nodes(op="placeholder")]
        for key, block in missing.items()
    }
    operands_of = {key: nodes for key, nodes in operands_of.items() if nodes}
    if not operands_of:
        return
    convention = convention_of(gm)
    flat: Sequence[Any] = args
    if convention is not None:
        flat = convention.flat_inputs(args, dict(kwargs))
    recorder = _Recorder(gm, operands_of)
    with torch.set_grad_enabled(grad), preserved_buffers(gm):
        recorder.run(*copy_tensors(list(flat)), enable_io_processing=False)
    for key, inputs in recorder.recorded.items():
        missing[key].inputs = inputs


def operand_description(program: GraphModule, inputs: Sequence[Any]) -> str:
    """Return the operands of a program: dtype, sizes, strides and aliasing of its inputs, and which are weights.

    In training also which of the weights have no gradients: their products are half the work.
    """
    values = iter(inputs)
    first: dict[int, int] = {}
    texts: list[str] = []
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            continue
        is_weight = node.op == "get_attr"
        value = attribute(program, cast("str", node.target)) if is_weight else next(values)
        frozen = "frozen " if program.training and is_weight and _is_frozen(value) else ""
        role = f" {frozen}weight" if is_weight else " grad" if _requires_grad(value) else ""
        texts.append(f"{_describe(value, first, len(texts))}{role}")
    return ", ".join(texts)


def describe_call(model: Module, leaves: Sequence[Any]) -> str:
    """Return the inputs of a call of a model, and in training which gradients a step computes."""
    first: dict[int, int] = {}
    texts = [
        f"{_describe(value, first, i)}{' grad' if model.training and _requires_grad(value) else ''}"
        for i, value in enumerate(leaves)
    ]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if model.training and frozen:
        digest = hashlib.blake2b("\n".join(frozen).encode(), digest_size=4).hexdigest()
        texts.append(f"{len(frozen)} frozen weights ({digest})")
    return ", ".join(texts)


def missing_gradients(block: Block) -> str:
    """Return which operands of a block have no gradients, in training; "" if all that may have them do."""
    program, values = block.program, iter(block.inputs)
    if not program.training:
        return ""
    missing: list[str] = []
    for number, node in enumerate(program.graph.nodes):
        if node.op == "placeholder":
            value = next(values)
            is_missing = isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
        else:
            is_missing = node.op == "get_attr" and _is_frozen(attribute(program, cast("str", node.target)))
        missing += [str(number)] if is_missing else []
    return f"without gradients of {', '.join(missing)}" if missing else ""


def _is_frozen(value: Any) -> bool:
    return isinstance(value, Parameter) and value.is_floating_point() and not value.requires_grad


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _describe(value: Any, first: dict[int, int], number: int) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    text = f"{dtype}{list(value.shape)}"
    if value.layout is torch.strided:
        if not value.is_contiguous():
            text += f"/{list(value.stride())}"
        alias = first.setdefault(storage_key(value), number)
        text += f"={alias}" if alias != number else ""
    return text
