"""Operations taken apart into simpler ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.errors import DovetailError, ScheduleError
from dovetail.graph.describe import describe
from dovetail.graph.module import Program, copy_node, rebuild, without_collector
from dovetail.graph.normalform import by_name, is_aten, op_name, same_geometry
from dovetail.outlining.record import call_of, walk
from dovetail.outlining.requests import is_projection
from dovetail.passes.constants import Names
from dovetail.passes.inferring import fake_mode, inferring, run_on, storage_keys
from dovetail.rules.matching.tracing import Stage, trace
from dovetail.scheduling.formulas import FORMULAS, Formula

_aten = torch.ops.aten
# What is known of where an operation came from; the rest of its meta is about the operation itself.
_KEPT = ("stack_trace", "nn_module_stack", "custom")


def can_be_taken_apart(node: Node) -> bool:
    """Whether an operation has a form of simpler ones that people would write by hand."""
    return node.op == "call_function" and node.target in FORMULAS


def decomposed(gm: GraphModule, names: Iterable[str]) -> GraphModule:
    """The graph with some operations written out in place, in one sweep; one that cannot be is a ScheduleError.

    Values are equal within float tolerance, and have the dtype, sizes and strides they had. What has no form of its
    own here is taken apart as torch does it.
    """
    wanted = set(names)
    known = {node.name: node for node in gm.graph.nodes}
    for name in sorted(wanted - known.keys()):
        raise ScheduleError(f"'{name}' cannot be taken apart: {_where(gm, name)}")
    writer = _Writer(gm)
    with without_collector():
        forms = {node: writer.form(node) for node in gm.graph.nodes if node.name in wanted}
        with inferring(fake_mode(gm.graph.nodes)):
            return writer.write(forms)


def _where(gm: GraphModule, name: str) -> str:
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None and any(member.name == name for member in walk(call)):
            return f"it is in region '{node.name}'; take that apart first"
    return "the graph has no such operation"


@cache
def _torch_forms() -> dict[Any, Formula]:
    return cast("dict[Any, Formula]", core_aten_decompositions())


def _formula(node: Node) -> tuple[Formula, bool]:
    """What writes an operation out, and whether that takes arguments by the names of the schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise ScheduleError(f"'{node.name}' cannot be taken apart: {target} is no operator of torch's")
    if target is _aten.detach.default:
        raise ScheduleError(f"'{node.name}' cannot be taken apart: {target} is as simple as it gets")
    if target in FORMULAS:
        return FORMULAS[target], True
    if target in _torch_forms():
        return _torch_forms()[target], False
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return target.decompose, False
    raise ScheduleError(f"'{node.name}' cannot be taken apart: nothing simpler is known for {target}")


class _Writer:
    """Writes a graph in which some operations are others; forms of equal calls are traced once."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.names = Names(gm)
        self.graph = Graph(tracer_cls=gm.graph._tracer_cls)
        self.env: dict[Node, Any] = {}
        self.traced: dict[Any, Program] = {}

    def form(self, node: Node) -> Program:
        """An operation as a graph of its operands."""
        formula, is_named = _formula(node)
        operands = list(node.all_input_nodes)
        if not all("val" in operand.meta for operand in operands) or "val" not in node.meta:
            raise ScheduleError(f"'{node.name}' cannot be taken apart: the values of the graph are not known")
        key = _signature(node, operands)
        if key not in self.traced:
            self.traced[key] = _traced(node, operands, formula, is_named)
        return self.traced[key]

    def write(self, forms: dict[Node, Program]) -> Program:
        for node in self.gm.graph.nodes:
            if node in forms:
                self.env[node] = self._spliced(node, forms[node])
            elif is_projection(node) and isinstance(parts := self.env[cast("Node", node.args[0])], tuple):
                self.env[node] = cast("tuple[Any, ...]", parts)[cast("int", node.args[1])]
            else:
                self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        self.graph.set_codegen(self.gm.graph._codegen)
        return rebuild(self.gm, self.graph)

    def _spliced(self, node: Node, form: Program) -> Any:
        """The operations of a form in place of a node; what its result is now, or its results."""
        inner: dict[Node, Any] = {}
        operands = iter([self.env[operand] for operand in node.all_input_nodes])
        for step in form.graph.nodes:
            if step.op == "placeholder":
                inner[step] = next(operands)
            elif step.op == "output":
                results = [inner[n] for n in cast("Sequence[Node]", step.args[0])]
                wanted = node.meta["val"]
                if isinstance(wanted, Tensor):
                    return self._as_it_was(node, results[0], wanted)
                made = {
                    i: self._as_it_was(node, result, wanted[i])
                    for i, result in zip(_used(node), results, strict=True)
                }
                return tuple(made.get(i) for i in range(len(wanted)))
            else:
                args, kwargs = map_arg((step.args, step.kwargs), inner.__getitem__)
                inner[step] = self._call(node, step.target, args, kwargs)
        raise AssertionError("a graph without an output")

    def _as_it_was(self, node: Node, made: Node, wanted: Tensor) -> Node:
        """A result in memory of its own if that is where it was, laid out as it was."""
        value = made.meta["val"]
        if value.dtype != wanted.dtype or tuple(value.shape) != tuple(wanted.shape):
            raise ScheduleError(
                f"'{node.name}' cannot be taken apart: the simpler form gives {value.dtype}{list(value.shape)}, "
                f"not {wanted.dtype}{list(wanted.shape)}"
            )
        read = {key for operand in node.all_input_nodes for key in storage_keys(operand.meta["val"])}
        was_fresh = storage_keys(wanted).isdisjoint(read)
        if not same_geometry(value, wanted):
            made = self._laid_out(node, made, wanted)
        if was_fresh and not storage_keys(made.meta["val"]).isdisjoint(read):
            made = self._call(node, _aten.clone.default, (made,), {})
        return made

    def _laid_out(self, node: Node, made: Node, wanted: Tensor) -> Node:
        """A copy with the dimensions in another order in memory; later operations rely on how it lies."""
        order = sorted(range(wanted.dim()), key=lambda d: (wanted.stride(d), wanted.shape[d]), reverse=True)
        back = [order.index(d) for d in range(wanted.dim())]
        if order == back == list(range(wanted.dim())):
            return self._call(node, _aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
        turned = self._call(node, _aten.permute.default, (made, order), {})
        whole = self._call(node, _aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        return self._call(node, _aten.permute.default, (whole, back), {})

    def _call(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        name = self.names.new(op_name(target) or getattr(target, "__name__", "part"))
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        new.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        new.meta["val"] = run_on(new, lambda operand: operand.meta["val"])
        return new


def _used(node: Node) -> tuple[int, ...]:
    """Which results of an operation are read: of several, those that are taken out unless it is read whole."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return (0,)
    if all(is_projection(user) for user in node.users):
        return tuple(sorted({cast("int", user.args[1]) for user in node.users}))
    return tuple(range(len(cast("Sequence[Any]", value))))


def _signature(node: Node, operands: Sequence[Node]) -> Any:
    """What tells calls apart that are written out differently."""
    number = {operand: f"operand {i}" for i, operand in enumerate(operands)}
    args = map_arg((node.args, node.kwargs), lambda n: cast("Any", number[n]))
    return node.target, repr(args), _used(node), tuple(str(describe(n.meta["val"])) for n in operands)


def _traced(node: Node, operands: Sequence[Node], formula: Formula, is_named: bool) -> Program:
    stage = Stage()
    values = [stage.stand_in(operand.meta["val"]) for operand in operands]
    try:
        # What a form makes out of nothing is to be of the same kind as the stand-ins; the quick way sees to that.
        with stage.mode if stage.symbols else nullcontext():
            form = trace(_calling(node, operands, formula, is_named), values, quick=not stage.symbols)
    except DovetailError as error:
        raise ScheduleError(f"'{node.name}' cannot be taken apart: {error}") from error
    except Exception as error:
        raise ScheduleError(
            f"'{node.name}' cannot be taken apart: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    steps = [step for step in form.graph.nodes if step.op not in ("placeholder", "output")]
    strange = [s for s in steps if s.op != "call_function" or not (is_aten(s.target) or is_projection(s))]
    strange = [s for s in strange if "sym_size" not in str(s.target) and not _counts(s)]
    if strange:
        raise ScheduleError(
            f"'{node.name}' cannot be taken apart: the simpler form of {node.target} has {strange[0].target} in it"
        )
    if any(step.target is node.target for step in steps):
        raise ScheduleError(f"'{node.name}' cannot be taken apart: {node.target} is as simple as it gets")
    return form


def _counts(step: Node) -> bool:
    """Whether a step is arithmetic on sizes."""
    return (
        step.op == "call_function"
        and not isinstance(step.meta.get("val"), Tensor)
        and not is_aten(step.target)
    )


def _calling(node: Node, operands: Sequence[Node], formula: Formula, is_named: bool) -> Callable[..., Any]:
    def function(*values: Any) -> tuple[Any, ...]:
        known = dict(zip(operands, values, strict=True))
        if is_named:
            named = map_arg(by_name(node), known.__getitem__)
            made = formula(**named)
        else:
            args, kwargs = cast("Any", map_arg((node.args, node.kwargs), known.__getitem__))
            made = formula(*args, **kwargs)
        several = cast("Sequence[Any]", made) if isinstance(made, (tuple, list)) else (made,)
        return tuple(several[i] for i in _used(node))

    return function
