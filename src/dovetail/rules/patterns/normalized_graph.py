"""The normalized graph that patterns are matched in: canonical ATen, each node with the operations it comes from.

A canonical graph is used as it is, a graph of ATen operators is canonicalized, and any other (functions, methods, leaf
modules) is run once on fake copies of its inputs and traced, with each traced node marked by the node that was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, cast

import torch
import torch.fx.traceback as traceback
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.ir.canonicalize import canonicalize_traced
from dovetail.ir.effects import is_subgraph
from dovetail.ir.graph_module import attribute, has_forward_hooks
from dovetail.ir.meta_keys import CANONICAL, ORIGIN
from dovetail.ir.nodes import is_projection
from dovetail.ir.op_traits import traits_of
from dovetail.rules.patterns.template import has_tensors
from dovetail.rules.patterns.trace import AUTOGRAD, CAPTURED, FakeEnvironment, trace
from dovetail.rules.rule import RuleContext

# Operators that a captured graph never has; they identify AOTAutograd's dialect.
_AUTOGRAD_NAMES = """
    _softmax _log_softmax native_layer_norm native_group_norm convolution addmm mm bmm _unsafe_view nll_loss_forward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention convolution_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _fused_rms_norm
"""
_AUTOGRAD_ONLY = frozenset(_AUTOGRAD_NAMES.split())


class NormalizedGraph:
    """A graph as canonical ATen.

    `origins` maps each node to the positions of the context's graph that it comes from, `parts` each position to its nodes
    where there may be more than one, as for a leaf module. `hidden_writes` are positions whose memory may be written by
    operations that were not run. `failure` is the reason why there is no such graph, "" if there is.
    """

    def __init__(
        self,
        root: nn.Module,
        nodes: list[Node],
        origins: dict[Node, tuple[int, ...]],
        parts: dict[int, set[Node]] | None = None,
        failure: str = "",
        hidden_writes: frozenset[int] = frozenset(),
    ) -> None:
        self.root, self.nodes, self.origins = root, nodes, origins
        self.parts, self.failure, self.hidden_writes = parts or {}, failure, hidden_writes
        self.by_target: dict[Any, list[Node]] = {}
        for node in nodes:
            if node.op == "call_function":
                self.by_target.setdefault(node.target, []).append(node)

    @cached_property
    def covered(self) -> frozenset[int]:
        """The positions that some node comes from; the others are no-ops or dead."""
        return frozenset(i for positions in self.origins.values() for i in positions)

    @property
    def dialects(self) -> tuple[str, ...]:
        """The dialects in which patterns must be traced to match here."""
        if CANONICAL in getattr(self.root, "meta", {}):
            return (CAPTURED,)
        names = {t.overloadpacket.__name__ for t in self.by_target if isinstance(t, OpOverload)}
        return (CAPTURED, AUTOGRAD) if names & _AUTOGRAD_ONLY else (CAPTURED,)

    @property
    def dtypes(self) -> set[torch.dtype]:
        values = (n.meta.get("val") for n in self.nodes)
        return {v.dtype for v in values if isinstance(v, Tensor)}

    def members(self, nodes: Iterable[Node]) -> tuple[set[int], Node | None]:
        """Return the positions that nodes come from, and another node of one of these positions, if there is any."""
        matched = dict.fromkeys(nodes)
        members = {i: None for node in matched for i in self.origins.get(node, ())}
        others = (other for i in members for other in self.parts.get(i, ()) if other not in matched)
        return set(members), next(others, None)


def normalized_graph_of(context: RuleContext) -> NormalizedGraph:
    """Return the normalized graph of a context, an analysis."""
    gm = context.gm
    if all(_is_aten(node) for node in context.nodes) and not any(
        _writes_before_end(n) for n in context.nodes
    ):
        if CANONICAL in gm.meta:
            return NormalizedGraph(gm, context.nodes, {n: (i,) for i, n in enumerate(context.nodes)})
        return _canonicalized(context)
    return _traced(context)


def _is_aten(node: Node) -> bool:
    if node.op == "call_method":
        return False
    if node.op == "call_module":
        return node.meta.get("val") is not None or not node.meta
    if node.op != "call_function" or isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return True
    value = node.meta.get("val")
    return is_projection(node) or (value is not None and not has_tensors(value))


def _writes_before_end(node: Node) -> bool:
    """Whether an operator writes anywhere but at the end of a captured graph, where results are copied into inputs."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return False
    return node.target is not torch.ops.aten.copy_.default or bool(node.users)


def _canonicalized(context: RuleContext) -> NormalizedGraph:
    program, _, replacements = canonicalize_traced(context.gm)
    origins: dict[Node, list[int]] = {}
    for old, new in replacements.items():
        if old.op != "call_module" or new.op == "call_function":
            origins.setdefault(new, []).append(context.index.position[old])
    return NormalizedGraph(program, list(program.graph.nodes), {n: tuple(p) for n, p in origins.items()})


def _traced(context: RuleContext) -> NormalizedGraph:
    """Trace the graph on fake copies of its inputs, and record which operation each traced node comes from."""
    unknown = [n.name for n in context.nodes if n.op == "placeholder" and n.meta.get("val") is None]
    if unknown:
        failure = f"the values of {', '.join(unknown[:4])} are not known; `capture(gm, args)` fills them in"
        return NormalizedGraph(context.gm, [], {}, failure=failure)
    replay = _Replay(context)
    try:
        with traceback.preserve_node_meta():
            program = trace(replay.run, replay.values, CAPTURED if replay.functional else AUTOGRAD)
    except Exception as error:  # a user's graph may call anything
        first = (str(error).splitlines() or [""])[0]
        failure = f"it cannot be traced to operators: {type(error).__name__}: {first}"
        return NormalizedGraph(context.gm, [], {}, failure=failure)
    return replay.normalized(program)


class _Replay:
    """The graph as a function of its inputs, attributes and the state of the leaf modules it calls.

    Operations that may do more than compute are opaque: they are never run, and their results are inputs too.
    """

    def __init__(self, context: RuleContext) -> None:
        self.context = context
        self.opaque = {n for n in context.nodes if _is_opaque(context, n)}
        effects = context.index.dependencies.effects
        self.functional = not any(
            (n.op == "call_module" and _may_write(attribute(context.gm, cast("str", n.target))))
            or (n.op in ("call_function", "call_method") and i in effects and effects[i].writes)
            for i, n in enumerate(context.nodes)
            if n not in self.opaque
        )
        self.fake_env = FakeEnvironment()
        self.markers = _origin_markers(len(context.nodes))
        self.opaque_results: dict[Node, list[Any]] = {}
        self.returns_tuple: dict[Node, bool] = {}
        self.unchanged: dict[Node, Node] = {}
        self.projections: dict[Node, tuple[Node, int, int]] = {}
        self.sources: list[tuple[Node, str | int | None]] = []
        self.values: list[Any] = []
        for node in context.nodes:
            if node.op == "placeholder":
                self._add(node, None, node.meta["val"])
            elif node in self.opaque:
                self._add_opaque(node)
            elif node.op == "get_attr" and not is_subgraph(context.gm, node):
                self._add(node, None, attribute(context.gm, cast("str", node.target)))
            elif node.op == "call_module":
                module = attribute(context.gm, cast("str", node.target))
                for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    self._add(node, name, tensor)

    def _add_opaque(self, node: Node) -> None:
        """Make the results of an opaque node inputs of the trace; numbers and None among them are constants."""
        value = node.meta.get("val")
        is_tuple = isinstance(value, (tuple, list))
        self.opaque_results[node] = list(cast("list[Any]", value)) if is_tuple else [value]
        self.returns_tuple[node] = is_tuple
        for k, part in enumerate(self.opaque_results[node]):
            if isinstance(part, Tensor):
                self._add(node, k, part)

    def _add(self, node: Node, name: str | int | None, value: Any) -> None:
        self.sources.append((node, name))
        self.values.append(self.fake_env.fake_copy(value))

    def run(self, *values: Any) -> Any:
        inputs: dict[Node, Any] = {}
        results = {node: list(values) for node, values in self.opaque_results.items()}
        state: dict[Node, dict[str, Any]] = {}
        for (node, name), value in zip(self.sources, values, strict=True):
            if name is None:
                inputs[node] = value
            elif isinstance(name, int):
                results[node][name] = value
            else:
                state.setdefault(node, {})[name] = value
        inputs.update((n, tuple(r) if self.returns_tuple[n] else r[0]) for n, r in results.items())
        env: dict[Node, Any] = {}
        for i, node in enumerate(self.context.nodes):
            if node.op == "output":
                returned = [env[n] for n in node.all_input_nodes]
                return tuple(r for r in returned if isinstance(r, Tensor))
            with traceback.set_current_meta(self.markers[i]):
                env[node] = inputs[node] if node in inputs else self._call(node, env, state.get(node, {}))
            same = next((n for n in node.all_input_nodes if env[n] is env[node]), None)
            if same is not None and isinstance(env[node], Tensor):
                self.unchanged[node] = same
            if is_projection(node) and isinstance(node.args[1], int):
                source = cast("Node", node.args[0])
                self.projections[node] = (source, node.args[1] % len(env[source]), len(env[source]))
        return ()

    def _call(self, node: Node, env: dict[Node, Any], state: dict[str, Any]) -> Any:
        args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], cast("str", node.target))(*args[1:], **kwargs)
        if node.op == "call_function":
            return cast("Callable[..., Any]", node.target)(*args, **kwargs)
        module = attribute(self.context.gm, cast("str", node.target))
        if node.op == "get_attr":
            return module
        return torch.func.functional_call(module, state, args, kwargs)

    def normalized(self, program: GraphModule) -> NormalizedGraph:
        inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        at = self.context.index.position
        origins: dict[Node, tuple[int, ...]] = {}
        parts: dict[int, set[Node]] = {}
        for node, (source, _) in zip(inputs, self.sources, strict=True):
            origins[node] = (at[source],)
        for node in program.graph.nodes:
            custom = node.meta.get("custom") or {}
            if node.op == "call_function" and ORIGIN in custom:
                i = cast("int", custom[ORIGIN])
                origins[node] = (i,)
                parts.setdefault(i, set()).add(node)
        # The trace has the elements of a tuple where it has the operation: a projection belongs to its element.
        elements = {(origins[n], n.args[1]): n for n in origins if is_projection(n)}
        for node, (source, part, count) in self.projections.items():
            element = elements.get(((at[source],), part))
            if element is not None and _length(cast("Node", element.args[0])) == count:
                origins[element] += (at[node],)
        # A no-op (a cast to the same dtype) leaves no node in the trace: it belongs to the node it returns.
        last = {i: node for node, positions in origins.items() for i in positions}
        for node, same in self.unchanged.items():
            if at[same] in last:
                last[at[node]] = last[at[same]]
                origins[last[at[same]]] += (at[node],)
        dependencies = self.context.index.dependencies
        hidden = any((e := dependencies.effects.get(at[n])) is not None and e.writes for n in self.opaque)
        written = frozenset(dependencies.written) if hidden else frozenset[int]()
        return NormalizedGraph(program, list(program.graph.nodes), origins, parts, hidden_writes=written)


def _length(node: Node) -> int | None:
    value = node.meta.get("val")
    return len(cast("tuple[Any, ...]", value)) if isinstance(value, (tuple, list)) else None


def _is_opaque(context: RuleContext, node: Node) -> bool:
    """Whether running an operation may do more than compute: users' code, effects on the host, modes."""
    if node.op == "call_module":
        module = attribute(context.gm, cast("str", node.target))
        ours = type(module).__module__.startswith("torch.nn.") and not isinstance(module, GraphModule)
        return not ours or has_forward_hooks(module)
    if node.op not in ("call_function", "call_method"):
        return False
    op = traits_of(node)
    if op.opaque or op.higher_order or op.barrier or op.host_effect:
        return True
    # Of operators of other libraries only the schema is known.
    return isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prim", "prims")


def _origin_markers(count: int) -> list[Node]:
    """Return one node per position, whose meta torch copies to whatever is traced while it is current."""
    graph = Graph()
    markers = [graph.placeholder(f"position_{i}") for i in range(count)]
    for i, marker in enumerate(markers):
        marker.meta["custom"] = {ORIGIN: i}
    return markers


def _may_write(module: Any) -> bool:
    return not isinstance(module, nn.Module) or any(getattr(m, "inplace", False) for m in module.modules())
