"""Decomposition of operations of a graph into simpler ones, by our formulas or torch's decompositions."""

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
from dovetail.ir.graph_module import Program, copy_node, pause_gc, rebuild
from dovetail.ir.nodes import is_projection, storage_keys, value_signature
from dovetail.ir.schema import is_aten, named_arguments, op_name, same_geometry
from dovetail.ir.shape_prop import call_with_values, fake_inference, fake_mode
from dovetail.outlining.region import call_of, walk
from dovetail.passes.fold_constants import UniqueNames
from dovetail.rules.patterns.trace import FakeEnvironment, trace
from dovetail.scheduling.formulas import FORMULAS, Formula

_aten = torch.ops.aten
_LOCATION_KEYS = ("stack_trace", "nn_module_stack", "custom")


def has_formula(node: Node) -> bool:
    """Return whether an operation has a formula of ours."""
    return node.op == "call_function" and node.target in FORMULAS


def decompose_nodes(gm: GraphModule, names: Iterable[str]) -> GraphModule:
    """Return the graph with some operations decomposed in place; raise ScheduleError for one that cannot be.

    Values are equal within float tolerance and keep dtype, sizes and strides. Operators without a formula of ours are
    decomposed as torch does it.
    """
    targets = set(names)
    nodes = {node.name: node for node in gm.graph.nodes}
    for name in sorted(targets - nodes.keys()):
        raise ScheduleError(f"'{name}' cannot be decomposed: {_why_missing(gm, name)}")
    rewriter = _DecomposeRewriter(gm)
    with pause_gc():
        forms = {node: rewriter.decomposition(node) for node in gm.graph.nodes if node.name in targets}
        with fake_inference(fake_mode(gm.graph.nodes)):
            return rewriter.write(forms)


def _why_missing(gm: GraphModule, name: str) -> str:
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None and any(member.name == name for member in walk(call)):
            return f"it is in region '{node.name}'; decompose that first"
    return "the graph has no such operation"


def _error(node: Node, reason: str) -> ScheduleError:
    return ScheduleError(f"'{node.name}' cannot be decomposed: {reason}")


@cache
def _torch_decompositions() -> dict[Any, Formula]:
    return cast("dict[Any, Formula]", core_aten_decompositions())


def _formula(node: Node) -> tuple[Formula, bool]:
    """Return the decomposition of an operator, and whether it takes arguments by the names of the schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise _error(node, f"{target} is not an operator of torch")
    if target is _aten.detach.default:
        raise _error(node, f"{target} has no simpler form")
    if target in FORMULAS:
        return FORMULAS[target], True
    if target in _torch_decompositions():
        return _torch_decompositions()[target], False
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return target.decompose, False
    raise _error(node, f"{target} has no decomposition")


class _DecomposeRewriter:
    """Rewrites a graph with some operations decomposed; the decomposition of equal calls is traced once."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.names = UniqueNames(gm)
        self.graph = Graph(tracer_cls=gm.graph._tracer_cls)
        self.env: dict[Node, Any] = {}
        self.traced: dict[Any, Program] = {}

    def decomposition(self, node: Node) -> Program:
        """Return the decomposition of an operation as a graph of its operands."""
        formula, is_named = _formula(node)
        operands = list(node.all_input_nodes)
        if not all("val" in operand.meta for operand in operands) or "val" not in node.meta:
            raise _error(node, "the values of the graph are not known")
        key = _call_key(node, operands)
        if key not in self.traced:
            self.traced[key] = _trace_formula(node, operands, formula, is_named)
        return self.traced[key]

    def write(self, forms: dict[Node, Program]) -> Program:
        for node in self.gm.graph.nodes:
            if node in forms:
                self.env[node] = self._splice(node, forms[node])
            elif is_projection(node) and isinstance(parts := self.env[cast("Node", node.args[0])], tuple):
                self.env[node] = cast("tuple[Any, ...]", parts)[cast("int", node.args[1])]
            else:
                self.env[node] = copy_node(self.graph, node, self.env.__getitem__)
        self.graph.set_codegen(self.gm.graph._codegen)
        return rebuild(self.gm, self.graph)

    def _splice(self, node: Node, form: Program) -> Any:
        """Splice a decomposition in place of a node; return its new result, or a tuple of results."""
        inner: dict[Node, Any] = {}
        operands = iter([self.env[operand] for operand in node.all_input_nodes])
        for step in form.graph.nodes:
            if step.op == "placeholder":
                inner[step] = next(operands)
            elif step.op == "output":
                results = [inner[n] for n in cast("Sequence[Node]", step.args[0])]
                expected = node.meta["val"]
                if isinstance(expected, Tensor):
                    return self._like_original(node, results[0], expected)
                restored = {
                    i: self._like_original(node, result, expected[i])
                    for i, result in zip(_used_results(node), results, strict=True)
                }
                return tuple(restored.get(i) for i in range(len(expected)))
            else:
                args, kwargs = map_arg((step.args, step.kwargs), inner.__getitem__)
                inner[step] = self._call(node, step.target, args, kwargs)
        raise AssertionError("a graph without an output")

    def _like_original(self, node: Node, result: Node, expected: Tensor) -> Node:
        """Return a result with the strides of the original, in memory of its own if the original had that."""
        value = result.meta["val"]
        if value.dtype != expected.dtype or tuple(value.shape) != tuple(expected.shape):
            has, needs = (f"{v.dtype}{list(v.shape)}" for v in (value, expected))
            raise _error(node, f"the decomposition returns {has}, not {needs}")
        read = {key for operand in node.all_input_nodes for key in storage_keys(operand.meta["val"])}
        was_fresh = storage_keys(expected).isdisjoint(read)
        if not same_geometry(value, expected):
            result = self._with_strides(node, result, expected)
        if was_fresh and not storage_keys(result.meta["val"]).isdisjoint(read):
            result = self._call(node, _aten.clone.default, (result,), {})
        return result

    def _with_strides(self, node: Node, result: Node, expected: Tensor) -> Node:
        """Return a copy with the strides of the original, which later operations rely on."""
        dims, contiguous = range(expected.dim()), {"memory_format": torch.contiguous_format}
        order = sorted(dims, key=lambda d: (expected.stride(d), expected.shape[d]), reverse=True)
        inverse = [order.index(d) for d in dims]
        if order == inverse == list(dims):
            return self._call(node, _aten.clone.default, (result,), contiguous)
        permuted = self._call(node, _aten.permute.default, (result, order), {})
        dense = self._call(node, _aten.clone.default, (permuted,), contiguous)
        return self._call(node, _aten.permute.default, (dense, inverse), {})

    def _call(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        name = self.names.new(op_name(target) or getattr(target, "__name__", "part"))
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        new.meta = {key: node.meta[key] for key in _LOCATION_KEYS if key in node.meta}
        new.meta["val"] = call_with_values(new, lambda operand: operand.meta["val"])
        return new


def _used_results(node: Node) -> tuple[int, ...]:
    """Return the indices of the results of an operation that are used."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return (0,)
    if all(is_projection(user) for user in node.users):
        return tuple(sorted({cast("int", user.args[1]) for user in node.users}))
    return tuple(range(len(cast("Sequence[Any]", value))))


def _call_key(node: Node, operands: Sequence[Node]) -> Any:
    """Return the key of calls with the same decomposition."""
    number = {operand: f"operand {i}" for i, operand in enumerate(operands)}
    args = map_arg((node.args, node.kwargs), lambda n: cast("Any", number[n]))
    return (
        node.target,
        repr(args),
        _used_results(node),
        tuple(str(value_signature(n.meta["val"])) for n in operands),
    )


def _trace_formula(node: Node, operands: Sequence[Node], formula: Formula, is_named: bool) -> Program:
    env = FakeEnvironment()
    values = [env.fake_copy(operand.meta["val"]) for operand in operands]
    try:
        # Tensors that a formula creates must be fake like the operands; quick tracing takes care of that.
        with env.mode if env.symbols else nullcontext():
            form = trace(_as_function(node, operands, formula, is_named), values, quick=not env.symbols)
    except DovetailError as error:
        raise _error(node, str(error)) from error
    except Exception as error:
        raise _error(node, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    steps = [step for step in form.graph.nodes if step.op not in ("placeholder", "output")]
    strange = [s for s in steps if s.op != "call_function" or not (is_aten(s.target) or is_projection(s))]
    strange = [s for s in strange if "sym_size" not in str(s.target) and not _is_size_arithmetic(s)]
    if strange:
        raise _error(node, f"the decomposition of {node.target} has {strange[0].target} in it")
    if any(step.target is node.target for step in steps):
        raise _error(node, f"{node.target} has no simpler form")
    return form


def _is_size_arithmetic(step: Node) -> bool:
    return (
        step.op == "call_function"
        and not isinstance(step.meta.get("val"), Tensor)
        and not is_aten(step.target)
    )


def _as_function(
    node: Node, operands: Sequence[Node], formula: Formula, is_named: bool
) -> Callable[..., Any]:
    def function(*values: Any) -> tuple[Any, ...]:
        bound = dict(zip(operands, values, strict=True))
        if is_named:
            named = map_arg(named_arguments(node), bound.__getitem__)
            result = formula(**named)
        else:
            args, kwargs = cast("Any", map_arg((node.args, node.kwargs), bound.__getitem__))
            result = formula(*args, **kwargs)
        results = cast("Sequence[Any]", result) if isinstance(result, (tuple, list)) else (result,)
        return tuple(results[i] for i in _used_results(node))

    return function
