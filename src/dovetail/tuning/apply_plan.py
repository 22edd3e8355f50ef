"""Applying a plan to a captured graph: its passes, its regions and its backends, without measuring anything.

What the plan does not know follows the defaults: a graph without a decision is divided into repeated blocks and the
rest, a block without one is a single region, and a body without one goes to the backends of the call. What it knows but
cannot be done here follows the defaults too, and is reported with the reason.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import DovetailError, InvalidArgument, PlanMismatch
from dovetail.fusion.cost import Figures, Gain, Traffic
from dovetail.fusion.ledger import ledger_of, write_ledger
from dovetail.fusion.ledger_entries import Declined, Measured
from dovetail.ir.graph_module import as_program
from dovetail.ir.nodes import format_type, storage_key
from dovetail.lowering.assign import chain_for, preferences
from dovetail.lowering.backend_protocol import Backend, resolve
from dovetail.lowering.failures import Diagnostic
from dovetail.outlining.escapes import POLICIES, RegionDraft
from dovetail.outlining.region import (
    Region,
    RegionCall,
    call_of,
    graph_key,
    make_identity,
    path_prefixes,
    regions,
)
from dovetail.passes.pass_manager import Pass, Pipeline
from dovetail.passes.region_passes import Fuse
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext
from dovetail.runtime.presets import (
    ALL_CALLS,
    WHOLE,
    GradientGuard,
    Mode,
    PlannedGraph,
    blocks,
    default_pipeline,
    whole_graph,
)
from dovetail.tuning.decisions import (
    BackendChoice,
    BlockDecision,
    Decision,
    GraphDecision,
    RegionChoice,
)
from dovetail.tuning.environment import Environment, current_environment, current_settings
from dovetail.tuning.plan import SINGULAR, AnyDecision, ByScope, Plan, body_entry, body_key
from dovetail.tuning.plan_passes import PlannedPasses, make_backend

_MOST_NAMED = 8
Section = Literal["graphs", "blocks", "bodies"]
BY_DEFAULT = GraphDecision("by default")
"""The decision for a graph that a plan does not know."""


@dataclass(frozen=True)
class AlwaysPays(Traffic):
    """Traffic and launches saved, for the ledger; what a plan has measured is never refused by an estimate."""

    def gain(self, figures: Figures, draft: RegionDraft) -> Gain:
        estimate = super().gain(figures, draft)
        return replace(estimate, score=max(1, estimate.score))


@dataclass(frozen=True, eq=False)
class BlockRegion:
    """A region that a plan has for a block of a graph, by the names of its operations in the graph."""

    block: str
    choice: RegionChoice
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PlannedBoundaries(Rule):
    """Proposes the regions that a plan has for the blocks of a graph; a block that it does not know as one region.

    Blocks are those of the default pipeline: repeated blocks, and what is between them. `decide` returns the decision
    for the key of a block. A decision that does not describe regions of the block is passed to `reject` with the
    reason, and not used. `proposed` are the regions that the rule has proposed.
    """

    decide: Callable[[str], BlockDecision | None]
    reject: Callable[[str, BlockDecision, str], None] = lambda key, decision, reason: None
    name: str = "plan"
    kind: str = "planned"
    nests: bool = True
    proposed: list[BlockRegion] = field(default_factory=list[BlockRegion])

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        divided = Pipeline(list(blocks()))(context.gm)
        positions = context.index.names
        decisions: dict[str, BlockDecision | None] = {}
        for region in regions(divided):
            if region.name in positions:  # it is a region of the graph itself, not a block
                continue
            key, call = region.key, cast("RegionCall", call_of(region.node.meta))
            names = names_by_position(region, call)
            if key not in decisions:
                decisions[key] = self._decided(key, region, names)
            decision = decisions[key]
            if decision is None:
                members = tuple(positions[m.name] for m in call.members)
                yield Candidate(self.name, region.kind, members, version=region.version, escapes="output")
                continue
            for choice in decision.regions:
                members = tuple(names[i] for i in choice.members)
                self.proposed.append(BlockRegion(key, choice, members))
                yield self._candidate(choice, region, [positions[name] for name in names])

    def _decided(self, key: str, region: Region, names: list[str]) -> BlockDecision | None:
        decision = self.decide(key)
        if decision is None:
            return None
        operands = len(region.inputs)
        reason = next(filter(None, (_misfit(c, operands, len(names)) for c in decision.regions)), "")
        if not reason:
            ops = [node.op for node in region.body.graph.nodes]
            # A constant may be cloned into each region that reads it.
            members = Counter(i for c in decision.regions for i in c.taken if ops[i] != "get_attr")
            twice = next((i for i, count in members.items() if count > 1), None)
            if twice is None:
                return decision
            reason = f"position {twice} is in two regions, or in one twice"
        self.reject(key, decision, reason)
        return None

    def _candidate(self, choice: RegionChoice, block: Region, positions: list[int]) -> Candidate:
        escapes: str | dict[int, str] = choice.escapes.get("*", "auto")
        by_position = {positions[int(i)]: policy for i, policy in choice.escapes.items() if i != "*"}
        if by_position:
            # A policy for all is one for values that are read inside; that of one position is for a result too.
            others = _read_inside(choice, block) if escapes != "auto" else ()
            escapes = {**{positions[i]: escapes for i in others}, **by_position}
        return Candidate(
            choice.rule or self.name,
            choice.kind,
            tuple(positions[i] for i in choice.members),
            dict(choice.attrs) or None,
            choice.version,
            escapes,
            arguments={name: positions[i] for name, i in choice.arguments.items()} or None,
            results=tuple(None if i is None else positions[i] for i in choice.results),
        )


def _read_inside(choice: RegionChoice, block: Region) -> list[int]:
    """Return the positions of a region of a block whose values other operations of the region read."""
    nodes = list(block.body.graph.nodes)
    inside = {nodes[i] for i in choice.members}
    return [i for i in choice.members if not inside.isdisjoint(nodes[i].users)]


def describe_operands(region: Region) -> str:
    """Return what distinguishes calls of equal bodies: type and layout of operands, which are weights or share memory."""
    texts: list[str] = []
    storages: dict[int, int] = {}
    for number, node in enumerate(region.inputs):
        value = node.meta.get("val")
        text = format_type(value)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            alias = storages.setdefault(storage_key(value), number)
            text += f"={alias}" if alias != number else ""
        texts.append(f"{text} weight" if node.op == "get_attr" else text)
    return ", ".join(texts)


def body_entries(plan: Plan, region: Region) -> Iterator[str]:
    """Yield the keys under which a plan may have a region's body: for its operands, for any, then for other operands."""
    known = (body_entry(region.key, describe_operands(region)), region.key)
    yield from known
    yield from (entry for entry in plan.bodies if body_key(entry) == region.key and entry not in known)


def names_by_position(region: Region, call: RegionCall) -> list[str]:
    """Return the names in the graph around a block of its operands and its operations, in the order of its body.

    Equal keys of bodies mean equal order, so that a position means the same operation in every equal block.
    """
    members = iter(call.members)
    inputs = iter(region.inputs)
    return [
        next(inputs).name if node.op == "placeholder" else next(members).name
        for node in region.body.graph.nodes
        if node.op != "output"
    ]


def _misfit(choice: RegionChoice, operands: int, count: int) -> str:
    """Return why a choice does not describe a region of a block with so many operands and nodes; "" if it does."""
    try:
        make_identity(choice.kind, choice.version, choice.attrs)
    except InvalidArgument as error:
        return str(error).removesuffix(".")
    if not choice.members:
        return f"a region of kind '{choice.kind}' has no operations"
    for i in choice.members:
        if not operands <= i < count:
            return f"position {i} is not an operation of the block, which are {operands} to {count - 1}"
    for key, policy in choice.escapes.items():
        if key != "*" and not (key.isdecimal() and int(key) < count):
            return f"'{key}' in escapes is neither a position of the block nor '*'"
        if policy not in POLICIES:
            return f"escapes {policy!r} is not one of {', '.join(POLICIES)}"
    bound = [*choice.arguments.values(), *(i for i in choice.results if i is not None)]
    outside = next((i for i in bound if not 0 <= i < count), None)
    return "" if outside is None else f"position {outside} is not in the block, which has {count}"


@dataclass(frozen=True)
class Unknown:
    """What a plan has no decision for: a graph, a block or a body, by the section of the plan that would have it."""

    section: Section
    key: str
    region: str = ""
    scopes: str = ""

    def __str__(self) -> str:
        of = f" of '{self.region}'" if self.region else ""
        only = f" (only for {self.scopes})" if self.scopes else ""
        return f"the {SINGULAR[self.section]} {self.key[:12]}{of}{only}"


@dataclass
class AppliedPlan:
    """What a plan decided for one graph, the divided graph, and the backends of its bodies by key.

    `bodies` has those that the plan decides: its choice and then the defaults, none for a body that runs as it is;
    `unlowered` are the names of regions inside of such bodies, which run as they are with them.
    `unknown` is what the plan has no decision for, `problems` are decisions that do not apply, with the reason, and
    `differences` those of the environments that the used decisions were measured in. `used` are the keys with decisions,
    `measured` the times of those that are applied. `gradients` are the calls that its passes are for.
    """

    decision: GraphDecision
    graph: GraphModule
    bodies: Mapping[str, list[Backend]] = field(default_factory=dict[str, list[Backend]])
    unlowered: list[str] = field(default_factory=list[str])
    unknown: list[Unknown] = field(default_factory=list[Unknown])
    problems: list[str] = field(default_factory=list[str])
    differences: list[str] = field(default_factory=list[str])
    used: set[str] = field(default_factory=set[str])
    gradients: GradientGuard = ALL_CALLS
    measured: dict[tuple[Section, str], Measured] = field(default_factory=dict[tuple[Section, str], Measured])

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yield what is to be reported of it."""
        for problem in self.problems:
            yield Diagnostic("stale", f"a decision of the plan is not applied: {problem}")
        if self.unknown:
            shown = ", ".join(map(str, self.unknown[:_MOST_NAMED]))
            more = f" and {len(self.unknown) - _MOST_NAMED} more" if len(self.unknown) > _MOST_NAMED else ""
            yield Diagnostic(
                "unplanned", f"the plan has no decision for {shown}{more}: the defaults are used"
            )
        if self.differences:
            what = ", ".join(self.differences)
            yield Diagnostic("environment", f"the plan was measured in another environment: {what}")


class PlanApplication:
    """A plan in one mode and environment, applied to graphs."""

    def __init__(self, plan: Plan, mode: Mode, environment: Environment) -> None:
        self.plan, self.environment = plan, environment
        self.mode: Mode = mode

    def apply(self, gm: GraphModule, defaults: Any = (), passes: Pass | None = None) -> AppliedPlan:
        """Return the graph with the passes and regions of the plan, and the backends of its bodies.

        `defaults` are the backends for what the plan does not know, as `lower` takes them; `passes` are for a graph of
        which it knows no block either, by default those of `compile` for these backends.
        """
        applied = AppliedPlan(BY_DEFAULT, gm)
        given = _by_name(defaults)
        key = graph_key(gm)
        decision = self._lookup(applied, self.plan.graphs, Unknown("graphs", key))
        if decision is not None and decision.execution != "regions":
            applied.decision = decision
            return _with_times(applied)
        if decision is not None:
            try:
                self._divide(applied, decision, given)
            except DovetailError as error:
                applied.problems.append(f"'{decision.label}' for the graph {key[:12]}: {error}")
                applied.measured.clear()
                decision = None
        if decision is None:
            self._divide_by_default(applied, passes or default_pipeline(list(given.values())))
        applied.bodies = self._backends(applied, defaults, given)
        return _with_times(applied)

    def _divide(self, applied: AppliedPlan, decision: GraphDecision, given: Mapping[str, Backend]) -> None:
        """Set the graph after the passes of a decision, divided into regions; raise if that cannot be done."""
        gm = graph = applied.graph
        backend = None if decision.whole is None else make_backend(decision.whole, given)
        passes = PlannedPasses(decision.label, self.mode)
        for choice in decision.pipeline:
            graph = passes.run(choice, graph)
        if backend is None:
            graph, _ = self._with_boundaries(applied, graph)
        else:
            graph = _largest_regions(graph, backend)
        applied.graph, applied.decision = graph, decision
        applied.gradients = passes.guard
        applied.problems += passes.problems
        if passes.problems:  # its time was measured with all passes
            applied.measured.pop(("graphs", graph_key(gm)), None)

    def _divide_by_default(self, applied: AppliedPlan, passes: Pass) -> None:
        """Divide the graph into its blocks, and these as far as they are known; if none is, by the default passes."""
        graph, is_known = applied.graph, False
        if self.plan.blocks:
            try:
                graph, is_known = self._with_boundaries(applied, applied.graph)
            except DovetailError as error:
                applied.problems.append(str(error))
        applied.graph = graph if is_known else passes(applied.graph)

    def _with_boundaries(self, applied: AppliedPlan, gm: GraphModule) -> tuple[GraphModule, bool]:
        """Return the graph with the regions of the plan for its blocks, and whether it knows any of these."""
        known: list[str] = []

        def decide(key: str) -> BlockDecision | None:
            decision = self._lookup(applied, self.plan.blocks, Unknown("blocks", key))
            known.extend([] if decision is None else [key])
            return decision

        def reject(key: str, decision: BlockDecision, reason: str) -> None:
            applied.problems.append(f"'{decision.label}' for the block {key[:12]}: {reason}")
            known.remove(key)
            applied.measured.pop(("blocks", key), None)

        rule = PlannedBoundaries(decide, reject)
        graph = Fuse(rule, rounds=1, cost=AlwaysPays(), on_error="raise")(gm)
        applied.problems += _refused(rule.proposed, gm, graph)
        return graph, bool(known)

    def _backends(
        self, applied: AppliedPlan, defaults: Any, given: Mapping[str, Backend]
    ) -> dict[str, list[Backend]]:
        """Return the backends of each body that the plan decides."""
        chains: dict[str, list[Backend]] = {}
        every = regions(applied.graph, nested=True)
        preferred = preferences(defaults, every)
        calls: dict[str, list[Region]] = {}
        for region in every:
            if "/" not in region.name:
                calls.setdefault(region.key, []).append(region)
        for key, (region, *equal) in calls.items():
            choice, is_decided = applied.decision.whole, applied.decision.whole is not None
            if not is_decided:
                entry = self._body_entry(applied, region)
                body = self._lookup(applied, self.plan.bodies, Unknown("bodies", entry, region.name))
                choice, is_decided = (None, False) if body is None else (body.backend, True)
            else:
                entry = key
            if not is_decided:
                continue
            try:
                first = [] if choice is None else [make_backend(choice, given)]
            except DovetailError as error:
                applied.problems.append(f"'{choice}' for the body {key[:12]} of '{region.name}': {error}")
                applied.measured.pop(("bodies", entry), None)
                continue
            others = chain_for(region, preferred) if first else ()
            chains[key] = [*first, *(b for b in others if b.name != first[0].name)]
            if applied.decision.whole is None:
                applied.problems += self._other_choices(region, choice, equal)
        as_it_is = {
            region.name for region in every if "/" not in region.name and chains.get(region.key) == []
        }
        applied.unlowered = [
            region.name
            for region in every
            if as_it_is.intersection(path_prefixes(region.name)) - {region.name}
        ]
        return chains

    def _other_choices(
        self, first: Region, choice: BackendChoice | None, equal: Sequence[Region]
    ) -> Iterator[str]:
        """Yield the decisions for other operands of a body that cannot be applied: one body has one backend."""
        for region in equal:
            entry = body_entry(region.key, describe_operands(region))
            other = self.plan.lookup(self.plan.bodies, entry, self.mode, self.environment)
            if other is not None and other.decision.backend != choice:
                yield (
                    f"'{other.decision.choice}' for the body {region.key[:12]} of '{region.name}': a body has one backend, "
                    f"and that of '{first.name}', which has an equal body, is {choice or 'none'}"
                )

    def _body_entry(self, applied: AppliedPlan, region: Region) -> str:
        """Return the key of the decision for a region's body: for its operands, for any, or else for other operands."""
        for entry in body_entries(self.plan, region):
            applicable = self.plan.lookup(self.plan.bodies, entry, self.mode, self.environment)
            if applicable is None:
                continue
            operands, measured = describe_operands(region), applicable.decision.operands
            if entry not in (region.key, body_entry(region.key, operands)):
                applied.differences.append(f"operands of '{region.name}' are {operands}, were {measured}")
            return entry
        return region.key

    def _lookup(
        self, applied: AppliedPlan, decisions: ByScope[AnyDecision], missing: Unknown
    ) -> AnyDecision | None:
        """Return the decision for a key; record that there is none, or how its environment differs."""
        applicable = self.plan.lookup(decisions, missing.key, self.mode, self.environment)
        if applicable is None:
            # A block that the plan does not know is a body that it need not know.
            if all(unknown.key != missing.key for unknown in applied.unknown):
                scopes = _scopes(self.plan, decisions, missing.key)
                applied.unknown.append(replace(missing, scopes=scopes))
            return None
        applied.used.add(missing.key)
        applied.measured[missing.section, missing.key] = _measured(missing.section, applicable.decision)
        applied.differences += [d for d in applicable.differences if d not in applied.differences]
        return applicable.decision


def _measured(section: Section, decision: Decision) -> Measured:
    """Return what a decision has measured, for the ledger."""
    second = decision.runner_up
    return Measured(
        SINGULAR[section],
        decision.label,
        decision.choice,
        None if decision.seconds is None else decision.seconds.median,
        "" if second is None else second.choice,
        None if second is None or second.seconds is None else second.seconds.median,
    )


def _with_times(applied: AppliedPlan) -> AppliedPlan:
    """Write what was measured into the ledger of the graph, a copy of it if it is still the input graph."""
    if applied.measured:
        applied.graph = copy.copy(as_program(applied.graph))
        times = tuple(applied.measured.values())
        write_ledger(applied.graph, replace(ledger_of(applied.graph), measured=times))
    return applied


def _largest_regions(gm: GraphModule, backend: Backend) -> GraphModule:
    """Return a graph as one region, or divided by the rules of a backend that takes only a part of it."""
    # What a plan has measured pays, a graph of one operation too.
    graph = whole_graph(AlwaysPays())(gm)
    wholes = [region for region in regions(graph) if region.kind == WHOLE]
    if wholes and (backend.rules is None or backend.supports(wholes[0]) is True):
        return graph
    if backend.rules is not None:
        divided = Fuse(backend.rules, rounds=1)(gm)
        if regions(divided):
            return divided
    reason = _reason(_new_refusals(gm, graph), [node.name for node in gm.graph.nodes])
    raise InvalidArgument(f"the graph cannot be one region: {reason}")


def planned_graph(
    plan: Plan, gm: GraphModule, mode: Mode, backends: Any, passes: Pass, strict: bool
) -> PlannedGraph:
    """Return what a plan decides for a captured graph in the environment of this process."""
    applied = PlanApplication(plan, mode, environment_of(gm)).apply(gm, backends, passes)
    if strict and applied.problems:
        raise PlanMismatch(applied.problems)
    return PlannedGraph(
        applied.graph,
        applied.bodies,
        tuple(applied.unlowered),
        execution=applied.decision.execution,
        cuda_graphs=applied.decision.cuda_graphs,
        diagnostics=tuple(applied.diagnostics()),
        gradients=applied.gradients,
    )


def environment_of(gm: GraphModule) -> Environment:
    """Return the environment of this process for the device that a graph is on; with several, not the CPU."""
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    return _environment_for((*values, *gm.parameters(), *gm.buffers()))


def environment_of_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Environment:
    """Return the environment of this process for the device that a model and its inputs are on."""
    held = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return _environment_for((*held, *pytree.tree_leaves((args, dict(kwargs)))))


def _environment_for(values: Iterable[Any]) -> Environment:
    tensors = (value for value in values if isinstance(value, Tensor))
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return _environment(device, torch.get_num_threads(), current_settings())


@cache
def _environment(device: torch.device, threads: int, settings: tuple[tuple[str, str], ...]) -> Environment:
    """Return the environment for a device; looking up what is installed takes longer than most of the passes."""
    return current_environment(device)


def _by_name(backends: Any) -> dict[str, Backend]:
    chains = cast("Mapping[str, Any]", backends).values() if isinstance(backends, Mapping) else [backends]
    return {backend.name: backend for chain in chains for backend in resolve(chain)}


def _scopes(plan: Plan, decisions: ByScope[Any], key: str) -> str:
    """Return the modes and devices that a plan has decisions for; "" if it has none for the key."""
    scopes = decisions.get(key, {})
    return ", ".join(sorted({f"{s.mode} on {plan.environments[s.environment].device}" for s in scopes}))


def _refused(proposed: Iterable[BlockRegion], before: GraphModule, after: GraphModule) -> Iterator[str]:
    """Yield the planned regions that were not made, with the reasons of the ledger, equal ones once."""
    owners: dict[str, str] = {}
    for region in regions(after):
        call = cast("RegionCall", call_of(region.node.meta))
        owners.update((member.name, region.kind) for member in call.members if not member.clone)
    refusals: list[Declined] | None = None
    reported: set[tuple[str, int]] = set()
    for planned in proposed:
        same = (planned.block, id(planned.choice))
        if same in reported or any(owners.get(name) == planned.choice.kind for name in planned.names):
            continue
        reported.add(same)
        refusals = _new_refusals(before, after) if refusals is None else refusals
        where = f"a region '{planned.choice.kind}' of the block {planned.block[:12]}"
        yield f"{where} is refused, and its operations run as they are: {_reason(refusals, planned.names)}"


def _new_refusals(before: GraphModule, after: GraphModule) -> list[Declined]:
    earlier = set(ledger_of(before).declined)
    return [entry for entry in ledger_of(after).declined if entry not in earlier]


def _reason(refusals: Iterable[Declined], names: Collection[str]) -> str:
    inside = set(names)
    reasons = (entry.reason for entry in refusals if not inside.isdisjoint(entry.nodes))
    return next(reasons, "the ledger has no reason").removesuffix(".")
