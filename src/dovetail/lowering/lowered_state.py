"""The state of a lowered graph: backends by region, dispatchers beside the bodies, and the events of the lowering."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import InvalidArgument
from dovetail.ir.graph_module import attribute, copy_graph, rebuild
from dovetail.ir.meta_keys import LOWERING
from dovetail.ir.op_traits import overload_traits
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.profiler_ranges import CodeRange, install_ranges, range_label
from dovetail.ir.schema import viewed_operand
from dovetail.ir.weight_fetch import SENTINELS
from dovetail.ir.weight_guard import ContentGuard, version_sentinel
from dovetail.lowering.backend_protocol import Backend, by_name, identity
from dovetail.lowering.compile_region import CompiledRegion, make_compile_context
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.lowering.dispatch import DispatchedCall, Dispatcher
from dovetail.lowering.failures import LoweringFault
from dovetail.lowering.options import Options
from dovetail.lowering.verify_region import uncovered
from dovetail.outlining.inline import Flattener
from dovetail.outlining.region import Region, call_of, local_name, regions, write_call


@dataclass(frozen=True, slots=True)
class Event:
    """What a backend did with a body: code compiled or read from disk in so many seconds, or a fault.

    "untried" follows code that is used although it could not be run on sample inputs.
    """

    region: str
    key: str
    backend: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    trace: str = field(default="", repr=False)


_MAX_EVENTS = 1000


class LoweredState:
    """The assignment of regions to backends, and their dispatchers.

    Regions are identified by local names, which are unique in a graph, so that the state survives later passes.
    Copies and pickles keep the assignment and compile again when it is needed.
    """

    def __init__(self, assigned: Mapping[str, tuple[Backend, ...]], options: Options) -> None:
        self.assigned, self.options = dict(assigned), options
        self.events: list[Event] = []
        self.sites: dict[str, DispatchedCall] = {}
        # Data that backends keep, by their names.
        self.notes: dict[str, Any] = {}
        self.contents = ContentGuard(options.weight_check_interval)
        self._dispatchers: dict[tuple[Any, ...], Dispatcher] = {}
        self._by_name: dict[str, Dispatcher] = {}
        self._lock = reset_at_fork(threading.RLock())

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredState:
        state = self.restricted(self.assigned, memo)
        state.events = list(self.events)
        return state

    def restricted(self, names: Iterable[str], memo: dict[int, Any] | None = None) -> LoweredState:
        """Return the lowering of some of the regions, with the code that exists already; `memo` is that of deepcopy."""
        state = LoweredState({name: self.assigned[name] for name in names}, self.options)
        state.notes = copy.deepcopy(self.notes, memo)
        # Code is never copied; call sites of another graph prepare their own weights.
        state._dispatchers, state._by_name = dict(self._dispatchers), dict(self._by_name)
        return state

    def joined(self, other: LoweredState, without: Iterable[str] = ()) -> LoweredState:
        """Return this lowering without some of its regions and with those of another, with the code of both."""
        replaced = {*without, *other.assigned}
        state = self.restricted(name for name in self.assigned if name not in replaced)
        state.assigned |= other.assigned
        state.notes |= copy.deepcopy(other.notes)
        state.events = [*self.events, *other.events]
        state._dispatchers |= other._dispatchers
        state._by_name |= other._by_name
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        assigned = {name: tuple(_portable(b) for b in chain) for name, chain in self.assigned.items()}
        return _restored, (assigned, self.options, self.notes)

    def dispatcher(self, region: Region, backends: Sequence[Backend]) -> Dispatcher:
        """Return the dispatcher for a body and the backends that may run it."""
        unit = unit_of(region)
        key = (unit.key, unit.roles, tuple(id(b) for b in backends))
        with self._lock:
            dispatcher = self._dispatchers.get(key)
            if dispatcher is None:
                dispatcher = self._dispatchers[key] = Dispatcher(
                    unit,
                    backends,
                    make_compile_context(self.options),
                    lambda result, unit=unit: self.record(unit, result),
                    limit=self.options.recompile_limit,
                    strict=self.options.strict,
                )
            self._by_name[local_name(region.name)] = dispatcher
        return dispatcher

    def dispatchers(self) -> dict[str, Dispatcher]:
        """Return the dispatchers so far, by the local names of the regions."""
        return dict(self._by_name)

    def backend_of(self, name: str, otherwise: str | None = None) -> str | None:
        """Return the name of the backend that runs a region now; `otherwise` while nothing is compiled."""
        own = local_name(name)
        if own not in self.assigned:
            return otherwise
        site, dispatcher = self.sites.get(own), self._by_name.get(own)
        entry = site.entry if site else dispatcher.current_entry() if dispatcher else None
        return otherwise if entry is None else entry.backend

    def record(self, unit: CompileUnit, result: CompiledRegion | LoweringFault) -> None:
        """Add the result of a compilation to the events."""
        if isinstance(result, CompiledRegion):
            unverified = uncovered(unit, unit.values) if self.options.verify else None
            reason = "" if unverified is None else f"not verified in full: {unverified}"
            name, source = result.backend.name, result.source
            events = [Event(unit.region.name, unit.key, name, source, result.seconds, reason)]
            if result.untried:
                events.append(replace(events[0], outcome="untried", seconds=0.0, reason=result.untried))
        else:
            stage, reason = result.stage, result.reason
            events = [Event(result.region, unit.key, result.backend, stage, 0.0, reason, result.trace)]
        if len(self.events) < _MAX_EVENTS:
            self.events += events

    def note(self, region: str, backend: str, outcome: str, reason: str) -> None:
        """Add an event that concerns the whole graph."""
        if len(self.events) < _MAX_EVENTS:
            self.events.append(Event(region, "", backend, outcome, 0.0, reason))

    def calls(self, program: GraphModule) -> dict[str, int]:
        """Return how many regions of a graph have each body, by its key."""
        return Counter(unit_of(region).key for region in regions(program, nested=True))

    def execution_graph(self, program: GraphModule) -> Graph:
        """Return the operations of a program as one flat graph, with dispatched calls in place of lowered regions."""
        sites = self._sites(program)
        graph = Graph(tracer_cls=program.graph._tracer_cls)
        constants: dict[str, Node] = {}

        def get_constant(node: Node, target: str) -> Node:
            if target not in constants:
                constants[target] = graph.create_node("get_attr", target)
            return constants[target]

        env: dict[Node, Any] = {}
        flattener = Flattener(graph, lambda name: sites.get(local_name(name)), get_constant)
        ranges: list[CodeRange] = []
        for node in program.graph.nodes:
            start = graph._root._prev
            flattener.write(program, (node,), env)
            call = call_of(node.meta)
            if call is not None and node.name not in sites:
                ranges += _range_since(start, range_label(call.identity.kind, node.name))
        graph.set_codegen(copy.copy(program.graph._codegen))
        install_ranges(graph, ranges)
        for node in list(graph.nodes):
            if isinstance(node.target, DispatchedCall):
                sources = {i: _source_attribute(a) for i, a in enumerate(node.args) if isinstance(a, Node)}
                node.target.constants = frozenset(i for i, source in sources.items() if source is not None)
                counters = _sentinels(program, filter(None, sources.values()))
                # A view has the version counter of the attribute that it is a view of.
                counters += [s for i, s in sources.items() if s is not None and node.args[i].op != "get_attr"]
                if counters:
                    with graph.inserting_before(node):
                        node.kwargs = {SENTINELS: [get_constant(node, counter) for counter in counters]}
        return graph

    def _sites(self, program: GraphModule) -> dict[str, DispatchedCall]:
        for region in regions(program, nested=True):
            own = local_name(region.name)
            if own in self.assigned and own not in self.sites:
                dispatcher = self.dispatcher(region, self.assigned[own])
                self.sites[own] = DispatchedCall(
                    region.name, dispatcher, unit_of(region).lifted, self.notes, self.contents
                )
        return self.sites


def _range_since(start: Node, label: str) -> list[CodeRange]:
    """Return the range of the operations that were appended to a graph after `start`; none if there are none."""
    names: list[str] = []
    node = start._next
    while node.op != "root":
        names += [] if node.op == "get_attr" else [node.name]
        node = node._next
    return [CodeRange(names[0], names[-1], label)] if names else []


def _source_attribute(node: Node) -> str | None:
    """Return the attribute of the graph that a value is, or is always a view of, sharing its version counter."""
    at: Node | None = node
    while at is not None and at.op != "get_attr":
        # What may copy, as `reshape` does, may put a new value at the address of an older one.
        is_view = isinstance(at.target, OpOverload) and not overload_traits(at.target).reads_data
        at = viewed_operand(at) if is_view and len(at.all_input_nodes) == 1 else None
    return None if at is None else cast("str", at.target)


def _sentinels(program: GraphModule, targets: Iterable[str]) -> list[str]:
    """Return the counters of the batch norms whose statistics are among these attributes."""
    counters = dict.fromkeys(filter(None, map(version_sentinel, targets)))
    return [counter for counter in counters if isinstance(attribute(program, counter), Tensor)]


def _portable(backend: Backend) -> Backend | str:
    """Return a backend's name if that resolves to an equal one, else the backend."""
    try:
        again = by_name(backend.name)
    except InvalidArgument:
        return backend
    return backend.name if identity(again) == identity(backend) else backend


def _restored(
    assigned: dict[str, tuple[Backend | str, ...]], options: Options, notes: dict[str, Any]
) -> LoweredState:
    chains = {
        name: tuple(by_name(b) if isinstance(b, str) else b for b in chain)
        for name, chain in assigned.items()
    }
    state = LoweredState(chains, options)
    state.notes = notes
    return state


def lowered_state_of(gm: GraphModule) -> LoweredState | None:
    """Return the lowered state of a graph; None if it was not lowered."""
    state = gm.meta.get(LOWERING)
    return state if isinstance(state, LoweredState) else None


def with_lowering(
    gm: GraphModule, state: LoweredState | None, backends: Mapping[str, str | None] | None = None
) -> GraphModule:
    """Return a copy of a graph with a lowered state, or without any.

    `backends` are the names that regions show, by default of those that the state has code of.
    """
    if backends is None:
        backends = {} if state is None else {name: state.backend_of(name) for name in state.assigned}
    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            write_call(node, replace(call, backend=backends.get(node.name)).with_backends(backends))
    meta = {k: v for k, v in gm.meta.items() if k != LOWERING}
    if state is not None:
        meta[LOWERING] = state
    return rebuild(gm, graph, meta=meta)
