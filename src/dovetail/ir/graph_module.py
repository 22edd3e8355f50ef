"""`Program`, the GraphModule that every step returns, `Body`, which regions call, and the functions that build them."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Generator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument
from dovetail.ir import pickling
from dovetail.ir.html_repr import HtmlGraph
from dovetail.ir.meta_keys import DERIVED, LOWERING, REGION
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.profiler_ranges import (
    CodeRange,
    enter_range,
    exit_range,
    install_ranges,
    is_profiled,
    range_label,
)
from dovetail.ir.weight_fetch import TensorGuard, WeightFetch, merge_weight_fetches
from dovetail.ir.weight_guard import ContentGuard, RuntimeWeights

HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold the hooks of its calls."""
HOOK_TABLES = (
    *HOOK_KINDS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""All attributes of a module that describe its hooks."""

# Attributes that follow from the graph of a GraphModule, or must not be shared between two.
_WEIGHT_FETCH = "_weight_fetch"
_WEIGHTS = "_runtime_weights"
_CODE = ("_code", "_lineno_map", "_prologue_start")
_DERIVED = frozenset({"_graph", *_CODE, _WEIGHT_FETCH, _WEIGHTS})

# Held only while `forward` is missing: calls that have it take no lock.
_GENERATING = reset_at_fork(threading.RLock())


class _GeneratedForward:
    """A descriptor in place of a stale `forward`: looking it up generates the code, outside of any tracer."""

    def __get__(self, program: Program | None, owner: type) -> Any:
        if program is None:
            return self
        program.generate()
        return program.forward


class CodeProvider(Protocol):
    """What a Program runs in place of its own graph. Lowering puts one into `meta`, where copies and pickles keep it."""

    @property
    def contents(self) -> ContentGuard: ...

    def execution_graph(self, program: GraphModule) -> Graph:
        """Return the graph that the code of `program` is generated from."""
        ...


class Program(HtmlGraph, GraphModule):
    """A GraphModule that generates its Python code on first use and is copied and pickled as a whole.

    `copy.deepcopy` and `pickle` preserve node names, `meta`, hooks, buffer persistence and shared bodies; an ordinary
    GraphModule is traced again there and loses them.
    """

    forward: Any = _GeneratedForward()

    def recompile(self) -> PythonCode:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Mark the generated code as stale; it is generated when `forward` or `code` is next looked up."""
        if "forward" in vars(type(self)):
            del type(self).forward
        return None  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Bodies refer to modules and constants of this graph, any of which may have been replaced since.
        if self.__dict__.get("_lends"):
            self.refresh_bodies()
        return super().__call__(*args, **kwargs)

    def generate(self) -> None:
        """Generate the code, and that of the bodies it calls, where it is stale."""
        if "forward" not in vars(type(self)):
            with _GENERATING:
                if "forward" not in vars(type(self)):
                    bodies = [m for m in self._modules.values() if isinstance(m, Body)]
                    self.__dict__["_lends"] = not isinstance(self, Body) and any(b.borrows for b in bodies)
                    # Last: other threads run the code as soon as the class has it.
                    self._write_code()
        for child in self._modules.values():
            if isinstance(child, Program):
                child.generate()

    def _write_code(self) -> None:
        meta = self.__dict__.get("meta", {})
        provider: CodeProvider | None = meta.get(LOWERING)
        derivations = meta.get(DERIVED, ())
        if provider is None and not derivations:
            remove_ranges = install_ranges(
                self.graph, () if isinstance(self, Body) else _region_ranges(self.graph)
            )
            try:
                super().recompile()
            finally:
                remove_ranges()
            return
        # The graph that runs is not the one that is edited: there, regions stay calls of their bodies.
        run = copy_graph(self.graph) if provider is None else provider.execution_graph(self)
        fetch = merge_weight_fetches(run, lambda name: isinstance(attribute(self, name), Tensor))
        contents = ContentGuard() if provider is None else provider.contents
        self.__dict__.update({_WEIGHT_FETCH: fetch, _WEIGHTS: RuntimeWeights(derivations, contents)})
        # Another instance of the same class: no other thread may see the graph that runs in place of the edited one.
        writer = object.__new__(type(self))
        writer.__dict__.update(self.__dict__, _graph=run)
        GraphModule.recompile(writer)
        self.__dict__.update((name, writer.__dict__[name]) for name in _CODE)

    # Called by the generated code, where regions run as they are.
    _is_profiled = staticmethod(is_profiled)
    _enter_range = staticmethod(enter_range)
    _exit_range = staticmethod(exit_range)

    def _fetch_weights(self) -> tuple[Any, ...]:
        """Return the tensors that the code of a lowered graph reads: one by one they would cost more than small models."""
        if not torch.compiler.is_compiling():
            self.__dict__[_WEIGHTS](self)
        fetch: WeightFetch = self.__dict__[_WEIGHT_FETCH]
        return fetch(self)

    def trust_weights(self, guard: TensorGuard | None) -> None:
        """Do not compare weights that a guard covers in the next call on this thread: it was checked just now."""
        fetch: WeightFetch | None = self.__dict__.get(_WEIGHT_FETCH)
        if fetch is not None:
            fetch.trust(guard)

    @property
    def runtime_weights(self) -> RuntimeWeights | None:
        """What keeps buffers current that were computed from weights; None for a graph without such code."""
        self.generate()
        return self.__dict__.get(_WEIGHTS)

    def _recompile_submodules(self) -> list[tuple[str, PythonCode]]:
        # Bodies are shared with other graphs and generate their own code when it is stale.
        return []

    @property
    def code(self) -> str:
        with _GENERATING:  # the class has `forward` before the module has its source
            self.generate()
            return super().code

    def __str__(self) -> str:
        with _GENERATING:
            self.generate()
            return super().__str__()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if not isinstance(self, Body):
            self.refresh_bodies()
        return self

    def refresh_bodies(self) -> None:
        """Replace bodies that borrow what this graph no longer owns; they are shared with other graphs, so not edited."""
        for name, child in list(self._modules.items()):
            if isinstance(child, Body):
                self._modules[name] = child.refreshed(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        type(new).__name__ = type(self).__name__
        memo[id(self)] = new
        state = {k: v for k, v in self.__dict__.items() if k not in _DERIVED and k != "shape_env"}
        new.__dict__.update(copy.deepcopy(state, memo))
        new.__dict__["shape_env"] = self.__dict__.get("shape_env")
        new.graph = copy_graph(self.graph)
        return new

    def __copy__(self) -> Self:
        return _with_graph(type(self), self, copy_graph(self.graph))

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if k not in _DERIVED and k != "shape_env"}
        # torch pickles other GraphModules as code to be traced again; sub-graphs must come back as they were.
        state["_modules"] = {
            n: as_program(m) if isinstance(m, GraphModule) else m for n, m in self._modules.items()
        }
        return (_restore, (_base_class(type(self)), type(self).__name__, pickling.dump(self.graph)), state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _region_ranges(graph: Graph) -> list[CodeRange]:
    """Return the range of each call of a region."""
    calls = ((node.name, node.meta.get(REGION)) for node in graph.nodes if node.op == "call_module")
    return [
        CodeRange(name, name, range_label(call.identity.kind, name))
        for name, call in calls
        if call is not None
    ]


def _base_class(cls: type) -> type[Program]:
    """Return Program or Body: torch gives each GraphModule a class of its own."""
    return next(c for c in cls.__mro__ if c.__module__ == __name__ and issubclass(c, Program))


def _restore(cls: type[Program], class_name: str, table: bytes) -> Program:
    return _empty(cls, class_name, pickling.load(table))


def as_program(module: GraphModule) -> Program:
    """Return the module itself, or a program that runs its graph and owns the very same objects."""
    return module if isinstance(module, Program) else _with_graph(Program, module, copy_graph(module.graph))


def _empty(cls: type[Program], class_name: str, graph: Graph) -> Any:
    """Return a program that owns nothing yet. torch's constructor looks up every attribute, so it gets no nodes."""
    new = cls.__new__(cls)
    GraphModule.__init__(new, nn.Module(), Graph(), class_name)
    new.graph = graph
    return new


def _with_graph(cls: type[Program], root: nn.Module, graph: Graph) -> Any:
    new = _empty(cls, type(root).__name__, graph)
    for key, value in root.__dict__.items():
        if key not in _DERIVED:
            # One level deep: registering on the copy must not register on the original, while parameters,
            # buffers and children stay the same objects.
            new.__dict__[key] = copy.copy(value) if isinstance(value, (dict, set, list)) else value
    return new


class Body(Program):
    """The graph that a region calls. It owns no state, and borrows objects from the graph around it."""

    def borrow(self, name: str, value: object, target: str) -> None:
        """Refer to what the outermost graph has at `target`, unregistered, so that `state_dict` stays as it was."""
        if isinstance(value, Body):
            self.add_module(name, value)
        else:
            self.__dict__[name] = value
            self.__dict__.setdefault("_borrowed", {})[name] = target

    @property
    def borrowed(self) -> Mapping[str, str]:
        """The target of each borrowed object in the outermost graph, by its name in this body."""
        return self.__dict__.get("_borrowed", {})

    @property
    def borrows(self) -> bool:
        """Whether it, or a body nested in it, borrows anything."""
        inner = (m for m in self._modules.values() if isinstance(m, Body))
        return bool(self.__dict__.get("_borrowed")) or any(m.borrows for m in inner)

    def refreshed(self, owner: nn.Module) -> Body:
        """Return this body with what it borrows taken from `owner` as it is now; itself if nothing has changed."""
        borrowed: dict[str, str] = self.__dict__.get("_borrowed", {})
        now = {n: attribute(owner, target) for n, target in borrowed.items()}
        stale = {n: v for n, v in now.items() if v is not None and v is not self.__dict__[n]}
        inner = {n: m.refreshed(owner) for n, m in self._modules.items() if isinstance(m, Body)}
        if not stale and all(self._modules[n] is m for n, m in inner.items()):
            return self
        new = self.copied()
        new.__dict__.update(stale)
        new._modules.update(inner)
        return new

    def copied(self) -> Body:
        """Return another body with the same graph and the same borrowed objects, to be changed before it is used."""
        return _with_graph(Body, self, copy_graph(self.graph))

    @property
    def is_marked_impure(self) -> bool:
        return bool(self.__dict__.get("_is_impure"))

    def mark_impure(self, impure: bool) -> None:
        """Set whether FX's dead-code elimination must keep a call whose results are unused."""
        self.__dict__["_is_impure"] = impure


def called_body(owner: GraphModule, node: Node) -> Body | None:
    """Return the body that a node calls, None if it is not the call of a region."""
    body = attribute(owner, str(node.target)) if node.op == "call_module" else None
    return body if isinstance(body, Body) else None


def make_body(graph: Graph, class_name: str) -> Body:
    """Return a body around `graph`, with nothing borrowed yet."""
    return _empty(Body, class_name, graph)


def rebuild(
    root: nn.Module,
    graph: Graph,
    *,
    add: Mapping[str, nn.Module] | None = None,
    drop: frozenset[str] = frozenset(),
    meta: Mapping[str, Any] | None = None,
) -> Program:
    """Return a Program that runs `graph` and owns what `root` owns.

    Parameters, buffers (with their persistence), unused ones too, child modules, hooks, other attributes and `meta`
    are shared by reference; `add` registers children at the top, `drop` removes some.
    """
    new: Program = _with_graph(Program, root, graph)
    for name in drop:
        new._modules.pop(name, None)
    for name, module in (add or {}).items():
        new.add_module(name, module)
    if meta is not None:
        new.meta = dict(meta)
    return new


@contextlib.contextmanager
def pause_gc() -> Generator[None]:
    """Disable Python's cycle collector, which would scan a large graph again and again while it is being built."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def copy_graph(graph: Graph) -> Graph:
    """Return a copy with the same names, order, codegen and (shallowly) the same meta."""
    new = Graph(tracer_cls=graph._tracer_cls)
    env: dict[Node, Node] = {}
    for node in graph.nodes:
        env[node] = copy_node(new, node, env.__getitem__)
    new.set_codegen(graph._codegen)
    return new


def copy_node(graph: Graph, node: Node, to: Any, target: str | None = None) -> Node:
    """Append a copy of `node` to `graph`, arguments translated by `to`, its meta copied."""
    new = graph.create_node(
        node.op, target or node.target, map_arg(node.args, to), map_arg(node.kwargs, to), node.name, node.type
    )
    new.meta = dict(node.meta)
    return new


def attribute(root: nn.Module, target: str) -> Any:
    """Return the object that a `get_attr` or `call_module` target names; None if nothing is there."""
    value: Any = root
    for atom in target.split("."):
        value = getattr(value, atom, None)
        if value is None:
            return None
    return value


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class GraphOwner:
    """A module whose calls run graphs, which are captured when they are needed."""

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs captured so far."""
        return ()

    @property
    def diagnostics(self) -> tuple[Any, ...]:
        """Recompilations, fallbacks and limits reached so far."""
        return ()


class GraphParts:
    """A module of which parts were captured: each graph with the path of its part."""

    @property
    def part_graphs(self) -> tuple[tuple[str, GraphModule], ...]:
        """The present graphs of the parts that are captured so far, by the path of the part."""
        return ()


def require_graph(gm: object) -> GraphModule:
    """Return `gm` if it is a graph; raise InvalidArgument for anything else."""
    if isinstance(gm, GraphModule):
        return gm
    if isinstance(gm, GraphOwner):
        advice = "give one of its `graphs`, or the model that it was compiled from."
    elif isinstance(gm, nn.Module):
        advice = "`dovetail.capture(model, example_inputs)` makes one."
    else:
        advice = "`dovetail.capture` makes one of a model."
    raise InvalidArgument(f"expected a torch.fx.GraphModule, got {type(gm).__name__}; {advice}")


def graphs_of(gm: object) -> tuple[GraphModule, ...]:
    """Return the graph itself, or the graphs of a compiled model; raise InvalidArgument if it has none."""
    if not isinstance(gm, GraphOwner):
        return (require_graph(gm),)
    if not gm.graphs:
        if gm.diagnostics:
            raise InvalidArgument(f"the compiled model has no graphs: {gm.diagnostics[-1].message}")
        raise InvalidArgument(
            "the compiled model has no graphs yet: call it, or give example inputs to `dovetail.compile`."
        )
    return gm.graphs


def only_graph(gm: object) -> GraphModule:
    """Return the graph itself, or that of a compiled model; raise InvalidArgument unless it has exactly one."""
    graphs = graphs_of(gm)
    if len(graphs) != 1:
        raise InvalidArgument(
            f"the compiled model has {len(graphs)} graphs, one for each way it was called; give one of its `graphs`."
        )
    return graphs[0]


def set_attribute(program: Program, target: str, value: object) -> None:
    """Assign to a dotted target; modules on the path are copied, since others may share them."""
    at: nn.Module = program
    *path, name = target.split(".")
    for atom in path:
        known = at._modules.get(atom)
        child = nn.Module()
        if known is not None:
            entries = known.__dict__.items()
            child.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in entries})
        at._modules[atom] = child
        at = child
    setattr(at, name, value)
