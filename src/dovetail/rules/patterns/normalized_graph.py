"""Any graph as patterns are written: canonical ATen, each node with the operations of the graph it stands for."""

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

# Operators that a captured graph never has: they show that a graph is of AOTAutograd's dialect.
_AUTOGRAD_NAMES = """
    _softmax _log_softmax native_layer_norm native_group_norm convolution addmm mm bmm _unsafe_view nll_loss_forward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention convolution_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _fused_rms_norm
"""
_AUTOGRAD_ONLY = frozenset(_AUTOGRAD_NAMES.split())


class NormalizedGraph:
    """The graph that patterns are looked for in.

    `nodes` are canonical; `origins` tells for each the positions in the context that it stands for: one operation of a
    captured graph is one node here, while a leaf module may be several. `unseen` are positions whose memory is
    written by what was not run.
    """

    def __init__(
        self,
        root: nn.Module,
        nodes: list[Node],
        origins: dict[Node, tuple[int, ...]],
        parts: dict[int, set[Node]] | None = None,
        why_none: str = "",
        unseen: frozenset[int] = frozenset(),
    ) -> None:
        self.root, self.nodes, self.origins = root, nodes, origins
        self.unseen = unseen
        self.parts = parts or {}
        self.why_none = why_none
        self.by_target: dict[Any, list[Node]] = {}
        for node in nodes:
            if node.op == "call_function":
                self.by_target.setdefault(node.target, []).append(node)

    @cached_property
    def places(self) -> frozenset[int]:
        """The positions that something here stands for; the others change nothing, or nothing needs them."""
        return frozenset(i for places in self.origins.values() for i in places)

    @property
    def dialects(self) -> tuple[str, ...]:
        """The dialects that a pattern must be traced in to be found here."""
        if CANONICAL in getattr(self.root, "meta", {}):
            return (CAPTURED,)
        names = {t.overloadpacket.__name__ for t in self.by_target if isinstance(t, OpOverload)}
        return (CAPTURED, AUTOGRAD) if names & _AUTOGRAD_ONLY else (CAPTURED,)

    @property
    def dtypes(self) -> set[torch.dtype]:
        values = (n.meta.get("val") for n in self.nodes)
        return {v.dtype for v in values if isinstance(v, Tensor)}

    def members(self, nodes: Iterable[Node]) -> tuple[set[int], Node | None]:
        """The operations that nodes stand for, and one of the others that an operation only partly covered also is."""
        matched = dict.fromkeys(nodes)
        members = {i: None for node in matched for i in self.origins.get(node, ())}
        others = (other for i in members for other in self.parts.get(i, ()) if other not in matched)
        return set(members), next(others, None)


def normalized_graph_of(context: RuleContext) -> NormalizedGraph:
    """The shadow of a context's graph: itself where it is canonical, else made canonical or traced once."""
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
    """Whether an operator writes elsewhere than at the end of a captured graph, where results go into inputs."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return False
    return node.target is not torch.ops.aten.copy_.default or bool(node.users)


def _canonicalized(context: RuleContext) -> NormalizedGraph:
    program, _, made = canonicalize_traced(context.gm)
    origins: dict[Node, list[int]] = {}
    for old, new in made.items():
        if old.op != "call_module" or new.op == "call_function":
            origins.setdefault(new, []).append(context.index.position[old])
    return NormalizedGraph(program, list(program.graph.nodes), {n: tuple(p) for n, p in origins.items()})


def _traced(context: RuleContext) -> NormalizedGraph:
    """Run the graph on stand-ins and note which operation each traced node came from."""
    unknown = [n.name for n in context.nodes if n.op == "placeholder" and n.meta.get("val") is None]
    if unknown:
        why = f"the values of {', '.join(unknown[:4])} are not known; `capture(gm, args)` fills them in"
        return NormalizedGraph(context.gm, [], {}, why_none=why)
    replay = _Replay(context)
    try:
        with traceback.preserve_node_meta():
            program = trace(replay.run, replay.values, CAPTURED if replay.functional else AUTOGRAD)
    except Exception as error:  # a graph of others' making may call anything
        first = (str(error).splitlines() or [""])[0]
        return NormalizedGraph(
            context.gm, [], {}, why_none=f"it cannot be traced to operators: {type(error).__name__}: {first}"
        )
    return replay.shadow(program)


class _Replay:
    """The graph as a function of its inputs, attributes and the state of the leaf modules it calls.

    What is not known to be a plain computation is sealed: it is never run, and its results are inputs too.
    """

    def __init__(self, context: RuleContext) -> None:
        self.context = context
        self.sealed = {n for n in context.nodes if _is_opaque(context, n)}
        effects = context.index.dependencies.effects
        self.functional = not any(
            (n.op == "call_module" and _may_write(attribute(context.gm, cast("str", n.target))))
            or (n.op in ("call_function", "call_method") and i in effects and effects[i].writes)
            for i, n in enumerate(context.nodes)
            if n not in self.sealed
        )
        self.stage = FakeEnvironment()
        self.marks = _origin_markers(len(context.nodes))
        self.known: dict[Node, list[Any]] = {}
        self.several: dict[Node, bool] = {}
        self.unchanged: dict[Node, Node] = {}
        self.sources: list[tuple[Node, str | int | None]] = []
        self.values: list[Any] = []
        for node in context.nodes:
            if node.op == "placeholder":
                self._add(node, None, node.meta["val"])
            elif node in self.sealed:
                self._seal(node)
            elif node.op == "get_attr" and not is_subgraph(context.gm, node):
                self._add(node, None, attribute(context.gm, cast("str", node.target)))
            elif node.op == "call_module":
                module = attribute(context.gm, cast("str", node.target))
                for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    self._add(node, name, tensor)

    def _seal(self, node: Node) -> None:
        """Take what is known of a node's results for granted; numbers and None are no inputs of a trace."""
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        self.known[node] = list(cast("list[Any]", value)) if several else [value]
        self.several[node] = several
        for k, part in enumerate(self.known[node]):
            if isinstance(part, Tensor):
                self._add(node, k, part)

    def _add(self, node: Node, name: str | int | None, value: Any) -> None:
        self.sources.append((node, name))
        self.values.append(self.stage.stand_in(value))

    def run(self, *values: Any) -> Any:
        given: dict[Node, Any] = {}
        results = {node: list(known) for node, known in self.known.items()}
        state: dict[Node, dict[str, Any]] = {}
        for (node, name), value in zip(self.sources, values, strict=True):
            if name is None:
                given[node] = value
            elif isinstance(name, int):
                results[node][name] = value
            else:
                state.setdefault(node, {})[name] = value
        given.update((n, tuple(r) if self.several[n] else r[0]) for n, r in results.items())
        env: dict[Node, Any] = {}
        for i, node in enumerate(self.context.nodes):
            if node.op == "output":
                returned = [env[n] for n in node.all_input_nodes]
                return tuple(r for r in returned if isinstance(r, Tensor))
            with traceback.set_current_meta(self.marks[i]):
                env[node] = given[node] if node in given else self._call(node, env, state.get(node, {}))
            same = next((n for n in node.all_input_nodes if env[n] is env[node]), None)
            if same is not None and isinstance(env[node], Tensor):
                self.unchanged[node] = same
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

    def shadow(self, program: GraphModule) -> NormalizedGraph:
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
        # A cast to the dtype it has is no operation of the trace: it belongs to what it hands on.
        last = {i: node for node, (i,) in origins.items()}
        for node, same in self.unchanged.items():
            if at[same] in last:
                last[at[node]] = last[at[same]]
                origins[last[at[same]]] += (at[node],)
        effects = self.context.index.dependencies
        hidden = any((e := effects.effects.get(at[n])) is not None and e.writes for n in self.sealed)
        unseen = frozenset(effects.written) if hidden else frozenset[int]()
        return NormalizedGraph(program, list(program.graph.nodes), origins, parts, unseen=unseen)


def _is_opaque(context: RuleContext, node: Node) -> bool:
    """Whether running an operation could do more than compute: code of users, effects on the world, modes."""
    if node.op == "call_module":
        module = attribute(context.gm, cast("str", node.target))
        ours = type(module).__module__.startswith("torch.nn.") and not isinstance(module, GraphModule)
        return not ours or has_forward_hooks(module)
    if node.op not in ("call_function", "call_method"):
        return False
    told = traits_of(node)
    if told.opaque or told.higher_order or told.barrier or told.host_effect:
        return True
    # An operator of somebody else's is known by its schema alone.
    return isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prim", "prims")


def _origin_markers(count: int) -> list[Node]:
    """Nodes whose meta torch hands on to whatever is traced while they are current: one per position."""
    graph = Graph()
    marks = [graph.placeholder(f"position_{i}") for i in range(count)]
    for i, mark in enumerate(marks):
        mark.meta["custom"] = {ORIGIN: i}
    return marks


def _may_write(module: Any) -> bool:
    return (
        any(bool(getattr(m, "inplace", False)) for m in module.modules())
        if isinstance(module, nn.Module)
        else True
    )
