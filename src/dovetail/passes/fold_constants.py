"""Constant folding, and the buffers that passes add to a graph for what they compute once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.alias_analysis import alias_classes
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import PURE
from dovetail.ir.graph_module import Program, attribute, copy_node, pause_gc, rebuild, require_graph
from dovetail.ir.meta_keys import DERIVED
from dovetail.ir.pickling import overload_by_name
from dovetail.ir.schema import op_name
from dovetail.ir.shape_prop import call_with_values
from dovetail.ir.weight_guard import Compute, Derivation, is_dense, version_sentinel
from dovetail.passes.pass_manager import Finding, Pass, require_fuel


class UniqueNames:
    """Names that neither a node nor an attribute of a graph has."""

    def __init__(self, gm: GraphModule) -> None:
        self._used = {node.name for node in gm.graph.nodes}
        self._used.update(gm._modules, gm._parameters, gm._buffers, vars(gm), dir(type(gm)))
        self._next: dict[str, int] = {}

    def new(self, stem: str) -> str:
        number = self._next.get(stem, 0)
        while (name := f"{stem}_{number}") in self._used:
            number += 1
        self._next[stem] = number + 1
        self._used.add(name)
        return name


class Constants:
    """Constants to be added to a graph: buffers that move with it and are not in its `state_dict`."""

    def __init__(self, gm: GraphModule, names: UniqueNames) -> None:
        self._gm, self._names = gm, names
        self._values: dict[str, Tensor] = {}
        self._derivations: list[Derivation] = []

    def add(self, stems: Sequence[str], compute: Callable[[], Sequence[Tensor]]) -> list[str]:
        """Compute constants together and return the names of their attributes."""
        # Inference tensors cannot be saved for a later backward.
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            values = [value.detach() for value in compute()]
        names = [self._names.new(stem) for stem in stems]
        self._values.update(zip(names, values, strict=True))
        return names

    def derive(self, stems: Sequence[str], sources: Sequence[str | None], compute: Compute) -> list[str]:
        """Add constants that are a function of weights of the graph, recomputed after these are written."""
        held = {source: attribute(self._gm, source) for source in sources if source is not None}
        counters = dict.fromkeys(filter(None, map(version_sentinel, held)))
        held |= {c: value for c in counters if isinstance(value := attribute(self._gm, c), Tensor)}
        names = [self._names.new(stem) for stem in stems]
        derivation = Derivation(names, sources, compute, [c for c in counters if c in held])
        self._values.update(zip(names, derivation.evaluate(held), strict=True))
        self._derivations.append(derivation)
        return names

    def installed(self, program: Program) -> Program:
        """Register the constants on a program and return it."""
        for name, value in self._values.items():
            program.register_buffer(name, value, persistent=False)
        record_derivations(program, self._derivations)
        return program


def record_derivations(program: Program, derivations: Sequence[Derivation]) -> None:
    """Record that buffers of a program are recomputed when their sources are written."""
    if derivations:
        program.meta = {**program.meta, DERIVED: (*program.meta.get(DERIVED, ()), *derivations)}


class GraphRewriter:
    """A new graph in place of that of a graph module, written node by node; `env` maps old nodes to new ones."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.graph = Graph(tracer_cls=gm.graph._tracer_cls)
        self.graph.set_codegen(gm.graph._codegen)
        self.env: dict[Node, Any] = {}
        self.names = UniqueNames(gm)
        self.constants = Constants(gm, self.names)

    def copy(self, node: Node) -> Node:
        new = self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        return new

    def program(self) -> Program:
        """Return the program that runs the new graph, with its constants."""
        return self.constants.installed(rebuild(self.gm, self.graph))


@dataclass(frozen=True)
class Concatenated:
    """Concatenates weights, each viewed or cast as it was in the graph, and zeros of some width in between."""

    dim: int
    parts: tuple[Part, ...]

    def __call__(self, sources: Sequence[Tensor | None]) -> Sequence[Tensor]:
        values = iter(source for source in sources if source is not None)
        known = [part if isinstance(part, int) else _apply_steps(next(values), part) for part in self.parts]
        like = next(value for value in known if isinstance(value, Tensor))
        return [torch.cat([like.new_zeros(v) if isinstance(v, int) else v for v in known], self.dim)]


Steps = tuple[tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""Operators by name or functions, each with its arguments; `...` stands for the value."""
Part = int | Steps


def chain_of(node: Node) -> tuple[str, Steps]:
    """Return the attribute that a node reads, and the views and casts between the two."""
    steps: list[Any] = []
    while node.op != "get_attr":
        args, kwargs = (map_arg(g, lambda _: cast("Any", ...)) for g in (node.args, dict(node.kwargs)))
        # Operators cannot be pickled.
        target = node.target.name() if isinstance(node.target, OpOverload) else node.target
        steps.append((target, tuple(cast("Any", args)), tuple(cast("Any", kwargs).items())))
        node = node.all_input_nodes[0]
    return cast("str", node.target), tuple(reversed(steps))


def _apply_steps(value: Tensor, steps: Steps) -> Tensor:
    for target, args, kwargs in steps:
        call = overload_by_name(target) if isinstance(target, str) else target
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        args, keywords = pytree.tree_unflatten([value if leaf is ... else leaf for leaf in leaves], spec)
        value = call(*args, **keywords)
    return value


# Their results are uninitialized memory.
_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


@checked_init()
@dataclass(frozen=True, repr=False)
class FoldConstants(Pass):
    """Compute masks, positions and the like once, where they depend on constants of the graph only.

    Needs: values, as `capture` records them. Leaves: each as a buffer that is not in the `state_dict`, bit for bit equal
    to what every call computed. Not folded are parameters, buffers and what depends on them, because they may be loaded
    or trained; what is returned or written, because every call has its own; single operations without operands; and
    results of more than `limit` bytes. `fuel` is the largest number of changes.
    """

    limit: int = 2**24
    fuel: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"limit {self.limit!r}: give a number of bytes, 0 and more.")
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with constants folded; the input graph itself if nothing is constant."""
        with pause_gc():
            index = Index(require_graph(gm))
            index.require_order()
            constants = [node for node, reason in self._find(index) if not reason][: self.fuel]
            return _fold(index, constants) if constants else gm

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Return what would be computed once, and what could be but is not."""
        findings: list[Finding] = []
        folded = 0
        for node, reason in self._find(Index(require_graph(gm))):
            if not reason and self.fuel is not None and folded >= self.fuel:
                reason = f"the fuel of {self.fuel} is spent"
            findings.append(Finding((node.name,), "" if reason else "it is computed once", reason))
            folded += not reason
        return tuple(findings)

    def _find(self, index: Index) -> Iterator[tuple[Node, str]]:
        """Yield the constant values that other nodes read, in order, each with the reason why it is not folded, or ""."""
        constant = _constant_nodes(index)
        read: set[Node] = set()
        candidates: list[tuple[Node, str]] = []
        for node in reversed(index.nodes):
            if node not in constant:
                read.update(operand for operand in node.all_input_nodes if operand in constant)
            elif node in read and node.all_input_nodes:
                reason = self._why_not(node)
                candidates.append((node, reason))
                if reason:
                    read.update(node.all_input_nodes)
        yield from reversed(candidates)

    def _why_not(self, node: Node) -> str:
        value = cast("Tensor", node.meta["val"])
        size = value.numel() * value.element_size()
        if size > self.limit:
            return f"it has {size} bytes, more than {self.limit}"
        if not is_dense(value):
            return "its elements are not dense in memory"
        return ""


def _constant_nodes(index: Index) -> set[Node]:
    """Return the nodes that can be computed now and are neither written nor returned."""
    effects, written = index.dependencies.effects, index.dependencies.written
    if index.dependencies.switches_modes:
        return set()
    nodes = index.nodes
    classes = alias_classes(index.gm, nodes, [effects.get(i, PURE) for i in range(len(nodes))])
    outgoing = {classes.of(node) for node in nodes[-1].all_input_nodes}
    known: set[Node] = set()
    for i, node in enumerate(nodes):
        if (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and op_name(node.target) not in _UNINITIALIZED
            and all(operand in known for operand in node.all_input_nodes)
            and effects.get(i, PURE).pure
            and i not in written
            and classes.of(node) not in outgoing
            and _has_static_layout(node.meta.get("val"))
        ):
            known.add(node)
    return known


def _has_static_layout(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    fixed = all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))
    return fixed and not value.is_complex() and value.device.type != "meta"


def _fold(index: Index, nodes: list[Node]) -> Program:
    folded, needed = set(nodes), set(nodes)
    for node in reversed(index.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)

    def compute() -> list[Tensor]:
        values: dict[Node, Tensor] = {}
        for node in index.nodes:
            if node in needed:
                values[node] = call_with_values(node, values.__getitem__)
        return [values[node] for node in nodes]

    rewriter = GraphRewriter(index.gm)
    stems = [f"folded_{op_name(cast('OpOverload', node.target))}" for node in nodes]
    names = dict(zip(nodes, rewriter.constants.add(stems, compute), strict=True))
    dead: set[Node] = set()
    for node in reversed(index.nodes):
        if node in needed and node not in folded and all(u in dead or u in folded for u in node.users):
            dead.add(node)
    for node in index.nodes:
        if node in folded:
            new = rewriter.env[node] = rewriter.graph.create_node("get_attr", names[node], name=node.name)
            new.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        elif node not in dead:
            rewriter.copy(node)
    return rewriter.program()
