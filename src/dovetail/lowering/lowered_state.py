"""What a lowered graph carries: who runs which region, the compiled state beside the bodies, and what happened."""

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
from dovetail.ir.graph_module import attribute
from dovetail.ir.meta_keys import LOWERING
from dovetail.ir.op_traits import of_overload
from dovetail.ir.process_state import released_by_fork
from dovetail.ir.schema import viewed_operand
from dovetail.ir.weight_guard import ContentGuard, sentinel_of
from dovetail.lowering.backend_protocol import by_name, identity
from dovetail.lowering.compile_region import CompiledRegion, compile_context_of
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.lowering.dispatch import Dispatcher, Site
from dovetail.lowering.failures import LoweringFault
from dovetail.lowering.options import Options
from dovetail.lowering.verify_region import uncovered
from dovetail.outlining.inline import Flattener
from dovetail.outlining.region import Region, regions


@dataclass(frozen=True, slots=True)
class Event:
    """What a backend did with a body: code made or read from disk in so many seconds, or a fault.

    "untried" comes after code that is used all the same, though it could not be run on made-up operands.
    """

    region: str
    key: str
    backend: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    trace: str = field(default="", repr=False)


_MOST_EVENTS = 1000


class LoweredState:
    """The assignment of regions to backends, and their dispatchers.

    Regions are known by their own names, which no other region of the graph ever has, so the record holds through
    later passes. Copies and pickles keep the assignment and make the compiled state again when it is needed.
    """

    def __init__(self, assigned: Mapping[str, tuple[Any, ...]], options: Options) -> None:
        self.assigned, self.options = dict(assigned), options
        self.events: list[Event] = []
        self.sites: dict[str, Site] = {}
        # What backends want to know again, by their names.
        self.notes: dict[str, Any] = {}
        self.contents = ContentGuard(options.weight_check_interval)
        self._dispatchers: dict[tuple[Any, ...], Dispatcher] = {}
        self._by_name: dict[str, Dispatcher] = {}
        self._lock = released_by_fork(threading.RLock())

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredState:
        made = LoweredState(self.assigned, self.options)
        made.events, made.notes = list(self.events), copy.deepcopy(self.notes, memo)
        # Code is never copied; call sites of another graph prepare their own weights.
        made._dispatchers, made._by_name = dict(self._dispatchers), dict(self._by_name)
        return made

    def restricted(self, names: Iterable[str]) -> LoweredState:
        """A lowering of some of the regions alone, by the code that is there already."""
        made = LoweredState({name: self.assigned[name] for name in names}, self.options)
        made.notes = copy.deepcopy(self.notes)
        made._dispatchers, made._by_name = dict(self._dispatchers), dict(self._by_name)
        return made

    def joined(self, other: LoweredState, without: Iterable[str] = ()) -> LoweredState:
        """This lowering without some of its regions, and with those of another, by the code that is there already."""
        gone = {*without, *other.assigned}
        made = self.restricted(name for name in self.assigned if name not in gone)
        made.assigned |= other.assigned
        made.notes |= copy.deepcopy(other.notes)
        made.events = [*self.events, *other.events]
        made._dispatchers |= other._dispatchers
        made._by_name |= other._by_name
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        assigned = {name: tuple(_portable(b) for b in chain) for name, chain in self.assigned.items()}
        return _restored, (assigned, self.options, self.notes)

    def dispatcher(self, region: Region, backends: Sequence[Any]) -> Dispatcher:
        """The one dispatcher for a body and the backends that may run it."""
        unit = unit_of(region)
        key = (unit.key, unit.roles, tuple(id(b) for b in backends))
        with self._lock:
            found = self._dispatchers.get(key)
            if found is None:
                found = self._dispatchers[key] = Dispatcher(
                    unit,
                    backends,
                    compile_context_of(self.options),
                    lambda what, unit=unit: self.tell(unit, what),
                    limit=self.options.recompile_limit,
                    strict=self.options.strict,
                )
            self._by_name[_own(region.name)] = found
        return found

    def backend_of(self, name: str, otherwise: str | None = None) -> str | None:
        """Who runs a region now; `otherwise` is the answer where that is not decided yet."""
        own = _own(name)
        if own not in self.assigned:
            return otherwise
        site, dispatcher = self.sites.get(own), self._by_name.get(own)
        entry = site.entry if site else dispatcher.entry_now() if dispatcher else None
        return otherwise if entry is None else entry.backend

    def tell(self, unit: CompileUnit, what: CompiledRegion | LoweringFault) -> None:
        """Write down what happened to a body."""
        more: list[Event] = []
        if isinstance(what, CompiledRegion):
            unseen = uncovered(unit, unit.values) if self.options.verify else None
            reason = "" if unseen is None else f"not verified in full: {unseen}"
            event = Event(unit.region.name, unit.key, what.backend.name, what.source, what.seconds, reason)
            if what.untried:
                more = [replace(event, outcome="untried", seconds=0.0, reason=what.untried)]
        else:
            event = Event(what.region, unit.key, what.backend, what.stage, 0.0, what.reason, what.trace)
        if len(self.events) < _MOST_EVENTS:
            self.events += [event, *more]

    def note(self, region: str, backend: str, outcome: str, reason: str) -> None:
        """Write down something that is about no body."""
        if len(self.events) < _MOST_EVENTS:
            self.events.append(Event(region, "", backend, outcome, 0.0, reason))

    def calls(self, program: GraphModule) -> dict[str, int]:
        """How many regions of a graph have each body, by the key of the unit it is."""
        return Counter(unit_of(region).key for region in regions(program, nested=True))

    def execution_graph(self, program: GraphModule) -> Graph:
        """The program's operations in one flat graph, calls of compiled code in place of lowered regions."""
        sites = self._sites(program)
        graph = Graph(tracer_cls=program.graph._tracer_cls)
        constants: dict[str, Node] = {}

        def held(node: Node, target: str) -> Node:
            if target not in constants:
                constants[target] = graph.create_node("get_attr", target)
            return constants[target]

        env: dict[Node, Any] = {}
        flattener = Flattener(graph, lambda name: sites.get(_own(name)), held)
        flattener.write(program, program.graph.nodes, env)
        graph.set_codegen(program.graph._codegen)
        for node in list(graph.nodes):
            if isinstance(node.target, Site):
                sources = {i: _held_by(a) for i, a in enumerate(node.args) if isinstance(a, Node)}
                node.target.constants = frozenset(i for i, source in sources.items() if source is not None)
                counters = _sentinels(program, filter(None, sources.values()))
                if counters:
                    with graph.inserting_before(node):
                        node.kwargs = {"sentinels": [held(node, counter) for counter in counters]}
        return graph

    def _sites(self, program: GraphModule) -> dict[str, Site]:
        for region in regions(program, nested=True):
            own = _own(region.name)
            if own in self.assigned and own not in self.sites:
                dispatcher = self.dispatcher(region, self.assigned[own])
                self.sites[own] = Site(
                    region.name, dispatcher, unit_of(region).lifted, self.notes, self.contents
                )
        return self.sites


def _held_by(node: Node) -> str | None:
    """Where the graph holds the tensor that a value is or is always a view of, which shares its version counter."""
    at: Node | None = node
    while at is not None and at.op != "get_attr":
        at = viewed_operand(at) if len(at.all_input_nodes) == 1 and _is_always_a_view(at.target) else None
    return None if at is None else cast("str", at.target)


def _sentinels(program: GraphModule, targets: Iterable[str]) -> list[str]:
    """The counters of the batch norms whose statistics are at some of these places."""
    counters = dict.fromkeys(filter(None, map(sentinel_of, targets)))
    return [counter for counter in counters if isinstance(attribute(program, counter), Tensor)]


def _is_always_a_view(target: Any) -> bool:
    # What may copy, as `reshape` does, may put a new value where an older one lay.
    return isinstance(target, OpOverload) and not of_overload(target).looks


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _portable(backend: Any) -> Any:
    """A backend's name where that is enough to have it again, else itself."""
    try:
        again = by_name(backend.name)
    except InvalidArgument:
        return backend
    return backend.name if identity(again) == identity(backend) else backend


def _restored(assigned: dict[str, tuple[Any, ...]], options: Options, notes: dict[str, Any]) -> LoweredState:
    made = {name: by_name(name) for chain in assigned.values() for name in chain if isinstance(name, str)}
    lowering = LoweredState(
        {n: tuple(made[b] if isinstance(b, str) else b for b in chain) for n, chain in assigned.items()},
        options,
    )
    lowering.notes = notes
    return lowering


def lowering_of(gm: GraphModule) -> LoweredState | None:
    """What a graph carries of its lowering, if it was lowered."""
    found = gm.meta.get(LOWERING)
    return found if isinstance(found, LoweredState) else None
