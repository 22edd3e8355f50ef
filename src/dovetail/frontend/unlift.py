"""Unlifting: from an exported program, whose parameters are inputs, to a graph that owns and updates them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.errors import CaptureError
from dovetail.frontend import model_copy
from dovetail.frontend.export import Exported
from dovetail.frontend.export_aliases import fresh_like, refused, source_meta, storage_at
from dovetail.frontend.input_guards import overlaps_itself
from dovetail.ir import source_location
from dovetail.ir.graph_module import Program, copy_node, rebuild
from dovetail.ir.schema import has_no_value, op_name, viewed_operand

_COPY = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default
_DETACH = torch.ops.aten.detach.default

# Operators whose derivative does not need the operand itself: autograd saves no reference to it.
_SAVES_NOTHING = """
    add sub rsub neg clone copy alias detach view reshape _unsafe_view expand permute transpose t slice select
    squeeze unsqueeze flatten unflatten cat stack index_copy index_put slice_scatter select_scatter
    diagonal_scatter scatter scatter_add index_add as_strided _to_copy to sum mean lerp zeros_like ones_like
    full_like empty_like eq ne lt le gt ge fill zero constant_pad_nd roll flip split chunk unbind
    sym_size bitwise_and bitwise_or logical_and logical_or logical_not where
"""
_SAVES_NO_OPERAND = frozenset(_SAVES_NOTHING.split())


@dataclass(frozen=True)
class Unlifted:
    """The program, its inputs in order, and the positions of the inputs that it writes to.

    `ungraded` are inputs that must not require gradients: the program would write or read values without their history.
    `graded` are those that did when it was exported.
    """

    program: Program
    inputs: tuple[Node, ...]
    mutated: frozenset[int]
    ungraded: frozenset[int] = frozenset()
    graded: frozenset[int] = frozenset()


def unlift(exported: Exported, root: nn.Module) -> Unlifted:
    """Return a Program on `root`, which becomes its own, that computes what `exported` does.

    Parameters and buffers become `get_attr` nodes under their own names, updates of buffers and inputs trailing
    `copy_` nodes. Results that share memory with a written input in the model share it here too.
    """
    return _Unlifting(exported, root).run()


class _Unlifting:
    def __init__(self, exported: Exported, root: nn.Module) -> None:
        self.source = exported.program
        self.aliases: Mapping[int, str] = exported.aliases
        self.names = exported.names
        self.detached = exported.detached
        self.count = exported.out_spec.num_leaves
        self.root = root
        self.graph = Graph()
        self.new_of: dict[Node, Node] = {}
        self.renamed: dict[str, str] = {}

    def run(self) -> Unlifted:
        signature = self.source.graph_signature
        nodes = list(self.source.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        specs = list(zip(placeholders, signature.input_specs, strict=True))
        user_inputs = [node for node, spec in specs if spec.kind.name == "USER_INPUT"]
        inputs = [self._input(node, name) for node, name in zip(user_inputs, self.names, strict=True)]
        owners = {spec.target: node for node, spec in specs if spec.target is not None}
        mutated_targets = {spec.target for spec in signature.output_specs if "MUTATION" in spec.kind.name}
        for node, spec in specs:
            if spec.kind.name != "USER_INPUT" and (node.users or spec.target in mutated_targets):
                self._attribute(node, spec)
        for node in nodes:
            if node.op == "get_attr":
                self._copied(node).target = self._subgraph(cast(str, node.target))
            elif node.op not in ("placeholder", "output"):
                self._copied(node)
        output = self.source.graph.output_node()
        results = cast("tuple[Any, ...]", output.args[0])
        by_name = {node.name: node for node in placeholders}
        self.renamed = {node.name: name for node, name in zip(user_inputs, self.names, strict=True)}
        writes: list[tuple[Node, Node]] = []
        returned: list[Any] = []
        for spec, result in zip(signature.output_specs, results, strict=True):
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                returned.append(result)
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
                writes.append((owners[cast(str, spec.target)], result))
            elif kind == "USER_INPUT_MUTATION":
                writes.append((by_name[cast(str, spec.target)], result))
            else:
                raise CaptureError(
                    f"the exported program returns a {kind}, which a captured graph cannot hold."
                )
        # What follows the model's own results was returned only so that decomposition does not drop it.
        last = self.graph.output(tuple(self._finish(writes, returned[: self.count])))
        last.meta = {**output.meta, "val": None}
        _drop_values(self.graph)
        program = rebuild(self.root, self.graph)
        written = {self.new_of[target] for target, _ in writes}
        mutated = frozenset(i for i, node in enumerate(inputs) if node in written)
        names = list(map(self._name, user_inputs))
        ungraded = frozenset(
            i
            for i, name in enumerate(names)
            if name in self.detached.ungraded or (name in self.detached.read_after and i in mutated)
        )
        graded = frozenset(i for i, name in enumerate(names) if name in self.detached.graded)
        return Unlifted(program, tuple(inputs), mutated, ungraded, graded)

    def _input(self, node: Node, name: str) -> Node:
        new = self.graph.create_node("placeholder", name, name=name)
        new.target = new.name
        new.meta = dict(node.meta)
        self.new_of[node] = new
        return new

    def _copied(self, node: Node) -> Node:
        new = copy_node(self.graph, node, self.new_of.__getitem__)
        self.new_of[node] = new
        return new

    def _attribute(self, node: Node, spec: Any) -> None:
        kind, target = spec.kind.name, cast(str, spec.target)
        if kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            target = model_copy.attach(self.root, target, self._constant(target, node))
        elif kind not in ("PARAMETER", "BUFFER"):
            raise CaptureError(
                f"the exported program takes a {kind} ('{node.name}'), which stands for an ordered effect "
                f"of a custom operator. Call that operator outside the model."
            )
        new = self.graph.create_node("get_attr", target, name=None)
        new.meta = {"val": node.meta.get("val")}
        self.new_of[node] = new

    def _constant(self, target: str, node: Node) -> object:
        value = self.source.constants[target]
        fake = node.meta.get("val")
        if isinstance(value, Tensor) and (value.requires_grad or getattr(fake, "requires_grad", False)):
            line = next((source_location.of_node(user) for user in node.users), None)
            what = "the model uses a tensor that requires gradients and that it does not own"
            advice = "Make it an attribute of the module that is captured, or pass the module that has it."
            raise CaptureError(source_location.located(what, line, advice))
        return value

    def _subgraph(self, target: str) -> str:
        value = operator.attrgetter(target)(self.source.graph_module)
        return model_copy.attach(
            self.root, target, as_program(value) if isinstance(value, GraphModule) else value
        )

    def _finish(self, writes: Sequence[tuple[Node, Node]], returned: Sequence[Any]) -> list[Any]:
        """Append the writes, and return the results: unaffected by the writes, unless they alias what is written."""
        real = [(target, source) for target, source in writes if source is not target]
        if not real:
            return [map_arg(result, self.new_of.__getitem__) for result in returned]
        self._refuse_trained(real)
        overwritten = {storage_at(target) for target, _ in real} - {None}
        saved: dict[Node, Node] = {}

        def value_before_writes(node: Node) -> Node:
            """Return a node that has the value of `node` before the writes, also after them."""
            if storage_at(node) not in overwritten:
                return self.new_of[node]
            if node not in saved:
                saved[node] = self._cloned(self.new_of[node])
            return saved[node]

        for target, _ in real:
            self._protect_operands(target)
        views = [self._path_to_write(i, result, real) for i, result in enumerate(returned)]
        sources = [value_before_writes(source) for _, source in real]
        results = [
            None if view is not None else map_arg(result, value_before_writes)
            for view, result in zip(views, returned, strict=True)
        ]
        for (target, origin), source in zip(real, sources, strict=True):
            self._refuse_overlapping(target, origin)
            is_detached = self._name(target) in self.detached.written
            into = self._detached(target) if is_detached else self.new_of[target]
            write = self.graph.create_node("call_function", _COPY, (into, source), {}, "copy_")
            write.meta = source_meta(origin)
        for i, view in enumerate(views):
            if view is not None:
                results[i] = self._replayed(*view)
        return results

    def _detached(self, target: Node) -> Node:
        """Return an alias without history of an input that the model writes through one: the input may be a leaf."""
        owner = self.new_of[target]
        new = self.graph.create_node("call_function", _DETACH, (owner,), {}, "detach")
        new.meta = dict(owner.meta)
        return new

    def _refuse_overlapping(self, target: Node, origin: Node) -> None:
        value = target.meta.get("val")
        if not isinstance(value, Tensor) or not overlaps_itself(value):
            return
        name = self._name(target)
        what = f"forward writes to '{name}', elements of which overlap in memory (an expanded input)"
        raise refused(what, origin, "Pass a clone of it.")

    def _refuse_trained(self, writes: Sequence[tuple[Node, Node]]) -> None:
        for target, source in writes:
            owner = self.new_of[target]
            if owner.op != "get_attr":
                continue
            value = operator.attrgetter(cast(str, owner.target))(self.root)
            if isinstance(value, Tensor) and value.requires_grad:
                what = f"forward writes to '{owner.target}', which requires gradients"
                advice = "Make it a buffer, update it outside the model, or call requires_grad_(False) on it."
                raise refused(what, source, advice)

    def _cloned(self, node: Node) -> Node:
        new = self.graph.create_node("call_function", _CLONE, (node,), {"memory_format": None}, "clone")
        new.meta = {**node.meta, "val": fresh_like(node.meta["val"])}
        return new

    def _protect_operands(self, target: Node) -> None:
        """Let operators that may save `target` for backward read a clone, which the write does not change."""
        owner = self.new_of[target]
        if not isinstance(target.meta.get("val"), Tensor) or not _may_be_saved(owner):
            return
        readers = list(owner.users)
        first = min(readers)
        with self.graph.inserting_before(first):
            clone = self._cloned(owner)
        clone.meta.update(source_meta(first))
        for reader in readers:
            if not _saves_nothing(reader) or viewed_operand(reader) is owner:
                reader.replace_input_with(owner, clone)

    def _path_to_write(
        self, position: int, result: Any, writes: Sequence[tuple[Node, Node]]
    ) -> tuple[Node, list[Node]] | None:
        """Return the written input that a result shares memory with, and the views from it to the result."""
        owner = self.aliases.get(position)
        targets = {source: target for target, source in writes if self._name(target) == owner}
        if not targets or not isinstance(result, Node):
            return None
        path: list[Node] = []
        at = result
        while at not in targets:
            path.append(at)
            base = _base(at)
            if base is None:
                return None
            at = base
        return targets[at], path[::-1]

    def _name(self, placeholder: Node) -> str:
        """Return the name of a placeholder before decomposition."""
        return self.renamed.get(placeholder.name, placeholder.name)

    def _replayed(self, target: Node, path: Sequence[Node]) -> Node:
        at = self.new_of[target]
        mode = at.meta["val"].fake_mode
        for old in path:
            base = cast(Node, _base(old))
            operands = {n: self.new_of[n] for n in old.all_input_nodes if n is not base} | {base: at}
            new = copy_node(self.graph, old, operands.__getitem__)
            arguments: Any = map_arg((new.args, new.kwargs), lambda n: n.meta.get("val"))
            with mode:
                new.meta["val"] = cast(Any, new.target)(*arguments[0], **arguments[1])
            at = new
        return at


def _base(node: Node) -> Node | None:
    """Return what a value is a view of; for one of several views, the operator that returns all of them."""
    if node.target is not operator.getitem:
        return viewed_operand(node)
    source = cast(Node, node.args[0])
    return source if viewed_operand(source) is not None else None


def _may_be_saved(owner: Node) -> bool:
    """Return whether an operator that reads the node, or a view of it, may save it for backward."""
    queue = [owner]
    for at in queue:
        for user in at.users:
            if not _saves_nothing(user):
                return True
            if viewed_operand(user) is at:
                queue.append(user)
    return False


def _saves_nothing(user: Node) -> bool:
    if user.op != "call_function" or not isinstance(user.target, OpOverload):
        return user.op == "output"
    value = user.meta.get("val")
    is_discrete = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return is_discrete or op_name(user.target) in _SAVES_NO_OPERAND


def _drop_values(graph: Graph) -> None:
    """Set `val` of every node, to None if an operator returns nothing of use."""
    for node in graph.nodes:
        node.meta.setdefault("val", None)
        if has_no_value(node):
            node.meta["val"] = None


def as_program(module: GraphModule) -> Program:
    """Return a sub-graph as a Program, nested ones too, with a `val` on each node."""
    inner = {
        name: as_program(child) for name, child in module._modules.items() if isinstance(child, GraphModule)
    }
    _drop_values(module.graph)
    for node in module.graph.find_nodes(op="output"):
        node.meta["val"] = None
    return rebuild(module, module.graph, add=inner)
