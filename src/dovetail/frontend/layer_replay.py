"""Repeated layers are traced twice; further ones are written from those nodes, with their own weights.

torch.export runs every layer of a model on fake tensors, although most layers differ in their weights alone. While a
model is traced here, each call of a repeated layer is compared with earlier ones: the structure of the layer, its
arguments, and everything that the code executed in an earlier trace can read (`layer_state`), before that trace and now.
Once two traces of equal calls consist of the same operations, a further equal call is not run: the nodes of the last trace
are copied into the graph, with the arguments and weights of this call, and with values of their own. The graph is what a
full trace gives, and a further layer takes milliseconds.

What cannot be compared, or changes something that it may read, is traced: calls with arguments other than tensors and
plain values (caches), layers with hooks on their submodules, that call custom operators, or that return views of arguments
or weights. The reason is logged. A layer that hands tensors out by other means than its result is noticed when the model
returns (`LeakedValue`), and the model is traced again in full.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import SymInt, Tensor, nn
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node, Proxy
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_arg
from torch.utils._mode_utils import no_dispatch

from dovetail import torch_compat
from dovetail.frontend.calling_convention import is_cache
from dovetail.frontend.code_recorder import InstructionRecorder, activated, active_recorders, paused
from dovetail.frontend.layer_state import (
    LITERALS,
    LayerReads,
    ReplayedForward,
    Unrepeatable,
    describe_argument,
    describe_symbol,
    has_attributes,
    has_hooks,
    repeated_layers,
    size_key,
    torch_state,
    weights_of,
)
from dovetail.frontend.trace_dependencies import differences
from dovetail.frontend.value_state import Undescribable
from dovetail.ir.nodes import storage_key

_OF_TORCH = frozenset({"aten", "prims"})
"""Namespaces of operators whose fake kernels depend on their operands alone."""
_log = logging.getLogger(__name__)


class LeakedValue(Exception):
    """A repeated layer hands out a tensor by other means than its result."""


@dataclass(frozen=True)
class _ReturnedArgument:
    """A result that is one of the tensors among the arguments, by its position."""

    position: int


@dataclass(frozen=True)
class _Result:
    """A tensor that a layer has computed and returns: its node, and what the copy of it must be like."""

    node: Node
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self, mode: FakeTensorMode) -> Tensor:
        """Return a tensor like it."""
        with mode:
            new = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            # A leaf could not be written by the operations that follow.
            return new.requires_grad_().clone() if self.requires_grad else new


@dataclass(frozen=True, eq=False)
class _Trace:
    """A call of a layer that was traced.

    `depth` is the number of modules around its operations, itself included; `inputs` are the nodes of the tensors among
    the arguments, and of the weights; `updates` are the nodes that stand for some of these afterwards, because they were
    written or returned by an operator as they are. `calls` counts the calls of each submodule. `facts` are what the code
    that was executed could read.
    """

    layer: nn.Module
    path: str
    depth: int
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    updates: dict[int, Node]
    results: tuple[Any, ...]
    spec: Any
    calls: dict[str, int]
    reads: LayerReads
    facts: Mapping[str, str]

    def equals(self, other: _Trace) -> bool:
        """Return whether another trace has the same operations, with its own arguments and weights."""
        if len(self.nodes) != len(other.nodes) or self.spec != other.spec:
            return False
        nodes, inputs = dict(zip(self.inputs, other.inputs, strict=True)), set(other.inputs)
        for mine, its in zip(self.nodes, other.nodes, strict=True):
            if mine.target is not its.target or not _same_arguments(mine, its, nodes, inputs):
                return False
            nodes[mine] = its
        if {i: nodes[node] for i, node in self.updates.items()} != other.updates:
            return False
        pairs = zip(self.results, other.results, strict=True)
        return all(
            nodes[a.node] is b.node if isinstance(a, _Result) and isinstance(b, _Result) else a == b
            for a, b in pairs
        )


class _Group:
    """Layers of one structure, and the traces of their calls so far, by what they were called with."""

    def __init__(self) -> None:
        self.traces: dict[Any, list[_Trace]] = {}
        self.templates: dict[Any, list[_Trace]] = {}
        self.obstacle = ""
        """Why no further call is compared."""
        self._reads: dict[Any, LayerReads] = {}

    @property
    def reads(self) -> list[LayerReads]:
        """What the code of the traces so far can read, once for all traces that executed the same code."""
        return list(self._reads.values())

    def reads_of(self, executed: Mapping[Any, set[int]]) -> LayerReads:
        """Return what executed code can read."""
        reads = LayerReads(executed)
        return self._reads.setdefault(frozenset(reads.executed.items()), reads)

    def template(self, key: Any, facts: Mapping[LayerReads, Mapping[str, str]]) -> _Trace | None:
        """Return a trace to copy for a call whose code can read these facts; None without one."""
        templates = self.templates.get(key, ())
        return next((t for t in templates if facts.get(t.reads) == t.facts), None)

    def add(self, key: Any, trace: _Trace, before: Mapping[str, str] | None, is_symbolic: bool) -> None:
        """Keep a trace; as a template if what it could read did not change, and an equal one has its operations.

        Equal calls always have the same operations, unless sizes are symbolic: what computes a size is traced once.
        """
        if before is not None and before != trace.facts:
            raise Unrepeatable(f"it changes what it may read: {differences(before, trace.facts)[0]}")
        earlier = self.traces.setdefault(key, [])
        readers = [other for other in earlier if other.reads is trace.reads]
        alike = [other for other in readers if other.facts == trace.facts]
        if before is not None and any(other.equals(trace) for other in alike):
            self.templates.setdefault(key, []).append(trace)
        elif alike and before is not None and not is_symbolic:
            self.obstacle = (
                f"'{trace.path}' has other operations than '{alike[-1].path}', and nothing differs"
            )
        earlier.append(trace)
        if readers and not alike:
            _log.debug(
                "'%s' differs from '%s': %s",
                trace.path,
                readers[-1].path,
                differences(readers[-1].facts, trace.facts)[0],
            )


class LayerReplay:
    """The repeated layers of a model; its modules are changed while it is traced, so it must be a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copied: dict[str, str] = {}
        """The paths of replayed layers, and of those that they were copied from."""
        self._groups: dict[nn.Module, _Group] = {}
        self._used: dict[_Trace, None] = {}
        self._recorder = InstructionRecorder()
        named = list(model.named_modules(remove_duplicate=False))
        self._paths = {module: path for path, module in named}
        if len(self._paths) < len(named):
            return  # torch.export follows the paths of shared modules by proxies that call `forward` of the class
        for layers in repeated_layers(model):
            self._groups |= dict.fromkeys(layers, _Group())

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Replay layers while the model is traced; LeakedValue is raised when it returns if that was wrong."""
        if not self._groups or any(name.value is None for name in torch_compat.TRACED_PROXIES):
            yield
            return
        with contextlib.ExitStack() as changes:
            changes.enter_context(activated(self._recorder))
            for layer in self._groups:
                own = layer.forward
                layer.forward = functools.update_wrapper(ReplayedForward(self._call, layer, own), own)
                changes.callback(layer.__dict__.pop, "forward")
            changes.callback(self.model.register_forward_hook(self._at_end).remove)
            yield

    def _call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group, tracer = self._groups[layer], _tracer()
        if tracer is None or group.obstacle:
            return forward(*args, **kwargs)
        before: dict[LayerReads, dict[str, str]] = {}
        try:
            if self._recorder.obstacle:
                raise Unrepeatable(self._recorder.obstacle)
            # What is done here is no part of the trace.
            with torch._C.DisableTorchFunction(), paused(active_recorders()):
                call = _Call(layer, args, kwargs, tracer)
                for reads in group.reads:
                    with contextlib.suppress(Undescribable):
                        before[reads] = reads.facts(layer, call.describe_traced)
                template = group.template(call.key, before)
        except Unrepeatable as reason:
            _log.debug("a %s is traced: %s", type(layer).__name__, reason)
            return forward(*args, **kwargs)
        if template is not None:
            self.copied[self._paths[layer]] = self._paths[template.layer]
            self._used[template] = None
            self._recorder.add(template.reads.executed)
            with paused(active_recorders()):
                return call.replay(template)
        call.begin()
        with self._recorder.recording() as executed:
            result = forward(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction(), paused(active_recorders()):
                trace = call.traced(args, kwargs, result, group.reads_of(executed))
                group.add(call.key, trace, before.get(trace.reads), call.is_symbolic)
        except (Unrepeatable, Undescribable) as reason:
            _log.debug("'%s' is not repeated: %s", call.path, reason)
        return result

    def _at_end(self, module: nn.Module, args: Any, result: Any) -> None:
        tracer = _tracer()
        if tracer is None:
            return
        returned = {_node_of(leaf, tracer) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
        for trace in self._used:
            inner = set(trace.nodes)
            visible = {result.node for result in trace.results if isinstance(result, _Result)}
            visible.update(trace.updates.values())
            for node in inner - visible:
                if node in returned or any(user not in inner for user in node.users):
                    raise LeakedValue(f"'{node.name}' of '{trace.path}' is used outside of it")


class _Call:
    """One call of a layer: its arguments and weights as nodes, and a key that equal calls share."""

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any, tracer: Any) -> None:
        self.layer, self.tracer = layer, tracer
        self.path: str = tracer.path_of_module(layer)
        if tracer.enable_attr_proxy or tracer.num_calls.get(self.path) != 1:
            raise Unrepeatable("a module is shared, or called more than once")
        if has_hooks(layer):
            raise Unrepeatable("it has hooks")
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs), is_leaf=is_cache)
        self.described = tuple(map(describe_argument, self.leaves))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.values = [*self.tensors, *weights_of(layer)]
        if not self.values:
            raise Unrepeatable("no tensor is traced")
        self._refuse_weight_attributes()
        self.inputs = self._nodes_of(self.values)
        self._require_gradients = [value.requires_grad for value in self.values]
        storages = [storage_key(value) for value in self.values]
        shape_env = cast("FakeTensor", self.values[0]).fake_mode.shape_env
        self.is_symbolic = bool(shape_env is not None and shape_env.var_to_range)
        self.key = (
            repr(self.spec),
            self.described,
            torch_state(),
            tuple(map(self.inputs.index, self.inputs)),
            tuple(map(storages.index, storages)),
            len(tracer.module_stack),
            _calling_lines(),
        )
        self._calls_before: dict[str, int] = {}
        self._operands: dict[int, int] = {}
        for i, value in enumerate(self.values):
            self._operands.setdefault(id(value), i)
        self._last: Node = tracer.graph._root._prev

    def _refuse_weight_attributes(self) -> None:
        if any(has_attributes(weight) for weight in weights_of(self.layer)):
            raise Unrepeatable("a weight has attributes that the model has set while it is traced")

    def begin(self) -> None:
        """Remember how often modules were called before the call is traced."""
        self._calls_before = dict(self.tracer.num_calls)

    def _nodes_of(self, values: Sequence[Tensor]) -> tuple[Node, ...]:
        nodes = [_node_of(value, self.tracer) for value in values]
        if not all(nodes) or not all(isinstance(value, FakeTensor) for value in values):
            raise Unrepeatable("a tensor is not traced")
        return tuple(cast("list[Node]", nodes))

    def describe_traced(self, value: Any) -> str | None:
        """Return what describes a tensor or symbol of the trace; None for anything else."""
        if not isinstance(value, Tensor):
            return describe_symbol(value)
        if id(value) in self._operands:
            return f"operand {self._operands[id(value)]}"
        node = _node_of(value, self.tracer)
        if node is not None and has_attributes(value):
            raise Undescribable(f"'{node.name}' has attributes of its own")
        return None if node is None else f"node {node.name} {value.requires_grad}"

    def traced(self, args: Any, kwargs: Any, result: Any, reads: LayerReads) -> _Trace:
        """Return the trace of the call, after forward has run."""
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_cache)
        if spec != self.spec or any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
            raise Unrepeatable("it changes its arguments")
        values = [*self.tensors, *weights_of(self.layer)]
        is_assigned = any(a is not b for a, b in zip(values, self.values, strict=True))
        if is_assigned or tuple(map(describe_argument, self.leaves)) != self.described:
            raise Unrepeatable("it assigns a weight, or changes sizes, strides or gradients of an argument")
        if [value.requires_grad for value in values] != self._require_gradients:
            raise Unrepeatable("it writes values with gradients into a buffer without")
        self._refuse_weight_attributes()
        pairs = enumerate(zip(self.inputs, self._nodes_of(values), strict=True))
        updates = {i: after for i, (before, after) in pairs if after is not before}
        nodes = tuple(self._new_nodes())
        _require_copyable(nodes, values)
        returned, out_spec = pytree.tree_flatten(result)
        results = tuple(self._result(leaf) for leaf in returned)
        computed = [result.node for result in results if isinstance(result, _Result)]
        storages = [storage_key(leaf) for leaf in returned if isinstance(leaf, Tensor)]
        is_repeated = len(set(computed)) < len(computed) or len(set(storages)) < len(storages)
        if is_repeated or not {*computed, *updates.values()} <= {*nodes}:
            raise Unrepeatable("it returns one tensor twice, or one that it has not computed")
        counts = self.tracer.num_calls
        called = {p: n for p, n in counts.items() if n != self._calls_before.get(p)}
        calls = {p: n for p, n in called.items() if p.startswith(f"{self.path}.")}
        if len(calls) < len(called):
            raise Unrepeatable("it calls modules outside of it")
        depth = len(self.tracer.module_stack)
        held = {id(container) for container in _containers((args, kwargs))}

        def described(value: Any) -> str | None:
            held.add(id(value))
            return self.describe_traced(value)

        facts = reads.facts(self.layer, described)
        if not held.isdisjoint(map(id, _containers(result))):
            raise Unrepeatable("it returns a list, dict or other container that is held elsewhere")
        return _Trace(
            self.layer,
            self.path,
            depth,
            self.inputs,
            nodes,
            updates,
            results,
            out_spec,
            calls,
            reads,
            facts,
        )

    def _new_nodes(self) -> Iterator[Node]:
        node = self._last._next
        while node.op != "root":
            yield node
            node = node._next

    def _result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, LITERALS):
                raise Unrepeatable(f"it returns a {type(leaf).__name__}")
            return leaf
        at = next((i for i, tensor in enumerate(self.tensors) if tensor is leaf), None)
        if at is not None:
            return _ReturnedArgument(at)
        (node,) = self._nodes_of([leaf])
        inputs = {storage_key(value) for value in (*self.tensors, *weights_of(self.layer))}
        if has_attributes(leaf):
            raise Unrepeatable("a result has attributes of its own")
        if storage_key(leaf) in inputs or not _is_dense(leaf) or leaf.is_conj() or leaf.is_neg():
            raise Unrepeatable("it returns a view")
        return _Result(node, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)

    def replay(self, trace: _Trace) -> Any:
        """Copy the nodes of a trace, and return results like its own."""
        graph = self.tracer.graph
        nodes = dict(zip(trace.inputs, self.inputs, strict=True))
        values = [*self.tensors, *weights_of(self.layer)]
        mode = cast("FakeTensor", values[0]).fake_mode
        copies = _ValueCopies(mode)
        for old, new in nodes.items():
            copies.share(old.meta["val"], new.meta["val"])
        outer = {key: (path, _type_name(kind)) for key, (path, kind) in self.tracer.module_stack.items()}
        with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
            computed_tensors = {r.node: r.make(mode) for r in trace.results if isinstance(r, _Result)}
            live = {node: [tensor] for node, tensor in computed_tensors.items()}
            for node, tensor in computed_tensors.items():
                # Values before it have the same memory where it is written in place.
                copies.share(node.meta["val"], tensor)
            for i, node in trace.updates.items():
                live.setdefault(node, []).append(values[i])
            with torch.no_grad():
                for old in trace.nodes:
                    args, kwargs = (
                        map_arg(part, lambda n: nodes.get(n, n)) for part in (old.args, old.kwargs)
                    )
                    new = nodes[old] = graph.create_node(
                        old.op, old.target, args, kwargs, _name(old), old.type
                    )
                    inner = list(old.meta["nn_module_stack"].items())[trace.depth :]
                    moved = {self._moved(k, trace): (self._moved(p, trace), kind) for k, (p, kind) in inner}
                    new.meta = {**old.meta, "nn_module_stack": {**outer, **moved}}
                    for tensor in live.get(old, ()):
                        proxy = Proxy(new, self.tracer)
                        proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=self.tracer)
                    if old not in live:
                        new.meta["val"] = copies.copy(old.meta["val"])
        self.tracer.num_calls |= {self._moved(path, trace): count for path, count in trace.calls.items()}
        results = [self.tensors[r.position] if isinstance(r, _ReturnedArgument) else r for r in trace.results]
        results = [computed_tensors[r.node] if isinstance(r, _Result) else r for r in results]
        return pytree.tree_unflatten(results, trace.spec)

    def _moved(self, path: str, trace: _Trace) -> str:
        """Return the path of a module of this layer for one of the layer of a trace."""
        return self.path + path.removeprefix(trace.path) if path.startswith(trace.path) else path


class _ValueCopies:
    """Copies of the values of nodes, which share storages where the originals do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._by_storage: dict[int, Tensor] = {}

    def share(self, old: Any, new: Any) -> None:
        """Let copies of what shares memory with one value share it with another."""
        if isinstance(old, Tensor):
            self._by_storage.setdefault(storage_key(old), new)

    def copy(self, value: Any) -> Any:
        """Return a copy of a tensor, of those in a tuple or list, or anything else itself."""
        if isinstance(value, (tuple, list)):
            return type(cast("Any", value))([self.copy(one) for one in cast("Sequence[Any]", value)])
        if not isinstance(value, Tensor):
            return value
        key = storage_key(value)
        same = self._by_storage.get(key)
        if same is None:
            same = self._by_storage[key] = self._with_storage_of(value)
        if any(isinstance(n, SymInt) for n in (*value.shape, *value.stride(), value.storage_offset())):
            with self.mode:
                return torch.as_strided(same, value.shape, value.stride(), value.storage_offset())
        # Without the modes that are active: this is most of the time that a layer takes.
        with no_dispatch(), no_python_dispatcher():
            view = torch.empty(0, dtype=value.dtype, device="meta")
            view.set_(same.untyped_storage(), value.storage_offset(), value.shape, value.stride())  # pyright: ignore
            return FakeTensor(self.mode, view, value.device)

    def _with_storage_of(self, value: Tensor) -> Tensor:
        """Return a tensor with new memory, as much as another one has."""
        count = value.untyped_storage().nbytes() // value.element_size()
        if isinstance(count, SymInt):
            with self.mode:
                return torch.empty(count, dtype=value.dtype, device=value.device)
        with no_dispatch(), no_python_dispatcher():
            return torch.empty(count, dtype=value.dtype, device="meta")


def _containers(value: Any) -> list[Any]:
    """Return the containers in a nested value that can be changed."""
    nodes: list[Any] = []

    def visit(node: Any) -> bool:
        nodes.append(node)
        return False

    pytree.tree_leaves(value, is_leaf=visit)
    return [n for n in nodes if type(n) in pytree.SUPPORTED_NODES and not isinstance(n, tuple)]


def _tracer() -> Any:
    """Return the tracer of torch.export that is active; None without one."""
    mode = proxy_tensor.get_proxy_mode()
    tracer = getattr(mode, "tracer", None)
    return tracer if hasattr(tracer, "module_stack") and hasattr(tracer, "submodule_paths") else None


def _calling_lines() -> tuple[Any, ...]:
    """Return the lines that are being executed, which are in the stack traces of nodes."""
    frame: Any = sys._getframe(2)
    lines: list[Any] = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _node_of(value: Tensor, tracer: Any) -> Node | None:
    slot: Any = proxy_tensor.get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.proxy.node


def _name(node: Node) -> str | None:
    """Return the name that the tracer gives nodes of this operator."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else None


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage, so that a clone has its strides."""
    if any(isinstance(size, SymInt) for size in (*tensor.shape, *tensor.stride())):
        strides: list[Any] = []
        stride: Any = 1
        for size in reversed(tensor.shape):
            strides.append(size_key(stride))
            stride = stride * size
        return [*map(size_key, tensor.stride())] == strides[::-1]
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i]))
    count = 1
    for i in order:
        if tensor.shape[i] != 1 and tensor.stride(i) != count:
            return False
        count *= tensor.shape[i]
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == count * tensor.element_size()


def _require_copyable(nodes: Sequence[Node], inputs: Sequence[Tensor]) -> None:
    """Raise Unrepeatable unless all nodes are operations whose values can be copied."""
    dtypes = {storage_key(value): value.dtype for value in inputs}
    for node in nodes:
        if node.op != "call_function" or "unbacked_bindings" in node.meta or "val" not in node.meta:
            raise Unrepeatable(f"'{node.name}' is not an operation with known values")
        if isinstance(node.target, OpOverload) and node.target.namespace not in _OF_TORCH:
            raise Unrepeatable(f"'{node.name}' is a custom operator")
        for value in pytree.tree_leaves(node.meta["val"]):
            if not isinstance(value, Tensor):
                continue
            is_strided = type(value) is FakeTensor and value.layout is torch.strided
            if not is_strided or dtypes.setdefault(storage_key(value), value.dtype) != value.dtype:
                raise Unrepeatable(f"'{node.name}' is a view of another dtype, or not a dense tensor")


def _same_arguments(first: Node, second: Node, nodes: dict[Node, Node], inputs: set[Node]) -> bool:
    mine, spec = pytree.tree_flatten((first.args, dict(first.kwargs)))
    its, other = pytree.tree_flatten((second.args, dict(second.kwargs)))
    if spec != other:
        return False

    def match(a: Any, b: Any) -> bool:
        if not isinstance(a, Node):
            return _same(a, b)
        # What comes from elsewhere must not be an input of the other call, or it would be taken for its own.
        return nodes[a] is b if a in nodes else a is b and b not in inputs

    return all(map(match, mine, its))


def _same(first: Any, second: Any) -> bool:
    """Return whether two values are the same object, or equal plain values or containers of such."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, LITERALS):
        return repr(first) == repr(second)
    if isinstance(first, (list, tuple)):
        return len(cast("Any", first)) == len(second) and all(map(_same, cast("Any", first), second))
    if isinstance(first, functools.partial):
        parts = ((f.func, f.args, f.keywords) for f in cast("list[functools.partial[Any]]", [first, second]))
        return _same(*parts)
    if isinstance(first, dict):
        mine = cast("dict[Any, Any]", first)
        return list(mine) == list(second) and all(_same(value, second[key]) for key, value in mine.items())
    return False
