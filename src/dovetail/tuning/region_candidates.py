"""Candidates of a block: every set of operations that could be one region, with the structural hash of its body.

All rules propose, whatever their priorities and whether their candidates overlap: those of the library, vertical groups,
siblings, modules, what fusing with several rule sets gives, what each backend supports at most, and the block as a whole.
A candidate's body is built, and so hashed, without outlining it: in time linear in its own operations.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.fx import GraphModule, Node

from dovetail.errors import DovetailError
from dovetail.fusion.candidates import PlannedRegion, Planner, Proposed, Refused, collect
from dovetail.fusion.fuse import fuse
from dovetail.ir.nodes import is_projection
from dovetail.lowering.backend_protocol import Backend
from dovetail.outlining.bodies import Bodies
from dovetail.outlining.outline import Request, operands_of, outline
from dovetail.outlining.region import Region, body_key, regions
from dovetail.rules.horizontal import siblings
from dovetail.rules.op_classes import OpClass, classify
from dovetail.rules.partition import capability
from dovetail.rules.rule import Candidate, Rule, RuleContext, RuleSet
from dovetail.rules.vertical import groups
from dovetail.tuning.apply_plan import AlwaysPays, describe_operands
from dovetail.tuning.block import Block
from dovetail.tuning.decisions import RegionChoice
from dovetail.tuning.plan_passes import rule_set

EXISTING = "existing"
"""The rule of regions that a block has already."""
FUSING_ROUNDS: Mapping[str, Sequence[str]] = {
    "default": (),
    "library": ("groups", "siblings"),
    "groups": ("library", "siblings"),
}
"""The rule sets that fusing begins with, and those that a second round may have, by the names that plans have for them."""
MAX_CANDIDATES = 48
"""The most distinct bodies of a block that are compiled, those of the most operations that fuse first."""


@dataclass(frozen=True)
class RegionCandidate:
    """A possible region of a block: what a plan would say of it, its units, and the key of its body."""

    choice: RegionChoice
    units: frozenset[int]
    key: str
    rules: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.choice.kind} of {len(self.units)} operations"


@dataclass(frozen=True)
class Pruned:
    """A part of the search space that is not measured, and why."""

    what: str
    reason: str


def candidates_of(
    block: Block, backends: Sequence[Backend], limit: int = MAX_CANDIDATES, *, parts: bool = True
) -> tuple[list[RegionCandidate], list[Pruned]]:
    """Return the candidates of a block, those that cover most first, and what was pruned.

    Without `parts` they are the block as a whole and the regions that it has already.
    """
    context, pruned = block.context, list[Pruned]()
    planner = Planner(context, AlwaysPays())
    bodies = Bodies(block.program, {node.name for node in context.nodes})
    by_units: dict[tuple[Any, ...], RegionCandidate] = {}
    for proposed in itertools.chain(_whole(block), _parts(block, backends) if parts else ()):
        for plan in planner.plans(proposed):
            if isinstance(plan, Refused):
                pruned.append(Pruned(f"{proposed.candidate.kind} by '{proposed.rule.name}'", plan.reason))
                continue
            between = context.index.between(plan.draft.members)
            if between:
                reason = f"it is not convex: '{context.nodes[min(between)].name}' is between its operations"
                pruned.append(Pruned(f"{proposed.candidate.kind} by '{proposed.rule.name}'", reason))
                continue
            candidate = _candidate(block, bodies, plan)
            if candidate is None:
                continue
            key = (candidate.units, candidate.key)
            known = by_units.get(key)
            rules = (*(known.rules if known else ()), proposed.rule.name)
            # A kind of the library has a reference and kernels; that of a group says nothing more.
            is_named = known is None or (not known.choice.arguments and candidate.choice.arguments)
            kept = candidate if is_named else cast("RegionCandidate", known)
            by_units[key] = replace(kept, rules=tuple(dict.fromkeys(rules)))
    for candidate in _existing(block):
        by_units[candidate.units, candidate.key] = candidate
    ordered = sorted(by_units.values(), key=lambda c: (-len(c.units), c.choice.members, c.key))
    keys = list(dict.fromkeys(c.key for c in ordered))
    # The largest ones save most traffic, the smallest ones are what the others consist of.
    measured = {*keys[: limit - limit // 2], *keys[max(0, len(keys) - limit // 2) :]}
    for candidate in ordered:
        if candidate.key not in measured:
            pruned.append(Pruned(candidate.label, f"more than {limit} distinct candidates in the block"))
    return [c for c in ordered if c.key in measured], _folded(pruned)


def _folded(pruned: Iterable[Pruned]) -> list[Pruned]:
    counts = Counter(pruned)
    return [
        replace(one, what=f"{one.what} ({count} times)") if count > 1 else one
        for one, count in counts.items()
    ]


def _whole(block: Block) -> list[Proposed]:
    whole = _Fixed("whole", "whole", [[i for unit in block.units for i in unit]])
    return collect(block.context, RuleSet(whole)).candidates


def _parts(block: Block, backends: Sequence[Backend]) -> Iterator[Proposed]:
    from dovetail.rules import library

    context = block.context
    rules = RuleSet(library.ALL, groups(), siblings(), _Modules())
    yield from collect(context, rules).candidates
    for name, members in _fused_members(block):
        yield from collect(context, RuleSet(_Fixed(f"fuse_{name}", "group", members))).candidates
    anchors = [
        list(unit)
        for unit, op_class in ((u, classify(context)[u[0]]) for u in block.units)
        if op_class is OpClass.ANCHOR
    ]
    yield from collect(context, RuleSet(_Fixed("anchors", "anchor", anchors))).candidates
    for backend in backends:
        supported = _supported(block, backend)
        if supported is not None:
            rule = capability(
                lambda node, supported=supported: node in supported,
                "partition",
                name=f"partition_{backend.name}",
                min_size=2,
                join_siblings=True,
            )
            yield from collect(context, RuleSet(rule)).candidates


@dataclass(frozen=True, eq=False)
class _Fixed(Rule):
    """Proposes some sets of positions."""

    name: str
    kind: str
    members: list[list[int]]

    def propose(self, context: RuleContext) -> Iterator[Candidate]:
        for members in self.members:
            yield Candidate(self.name, self.kind, tuple(members))


@dataclass(frozen=True, eq=False)
class _Modules(Rule):
    """Proposes the operations of every module, at every depth."""

    name: str = "modules"
    kind: str = "module"

    def propose(self, context: RuleContext) -> Iterator[Candidate]:
        by_path: dict[str, list[int]] = {}
        for i, node in enumerate(context.nodes):
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            for path in node.meta.get("nn_module_stack") or {}:
                by_path.setdefault(str(path), []).append(i)
        for members in by_path.values():
            if sum(not is_projection(context.nodes[i]) for i in members) > 1:
                yield Candidate(self.name, self.kind, tuple(members))


def _fused_members(block: Block) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the operations of each region that fusing makes, by the names of its rule sets in order.

    Regions inside of one are flattened. Of a second round, and of the library, whose rules propose by themselves, these
    are only those that no other gives.
    """
    known: set[tuple[int, ...]] = set()
    once = {rules: _fused(block.program, rules) for rules in FUSING_ROUNDS}
    for rules in ("default", "groups"):
        members = _members_of_regions(block, once[rules])
        known.update(map(tuple, members))
        yield rules, members
    known.update(map(tuple, _members_of_regions(block, once["library"])))
    for first, following in FUSING_ROUNDS.items():
        for second in following:
            members = _members_of_regions(block, _fused(once[first], second))
            yield f"{first}_{second}", [each for each in members if tuple(each) not in known]
            known.update(map(tuple, members))


def _fused(gm: GraphModule, rules: str) -> GraphModule:
    try:
        return fuse(gm, rule_set(rules))
    except DovetailError:
        return gm


def _members_of_regions(block: Block, fused: GraphModule) -> list[list[int]]:
    names = block.context.index.names
    members_of = [sorted(names[name] for name in region.nodes if name in names) for region in regions(fused)]
    return [members for members in members_of if members]


def _supported(block: Block, backend: Backend) -> set[Node] | None:
    """Return the operations that a backend takes alone; None if it takes the whole block or none of it."""
    nodes = block.context.nodes
    members = [nodes[i] for unit in block.units for i in unit]
    if _takes(block.program, backend, members):
        return None
    taken = {
        nodes[i]
        for unit in block.units
        if _takes(block.program, backend, [nodes[i] for i in unit])
        for i in unit
    }
    return taken or None


def _takes(program: GraphModule, backend: Backend, members: Sequence[Node]) -> bool:
    try:
        region = regions(outline(program, members, kind="probe"))[0]
        return backend.supports(region) is True
    except Exception:
        # A backend that raises when it is asked does not take it; lowering would report the same.
        return False


def _existing(block: Block) -> Iterator[RegionCandidate]:
    """Yield the regions that the block has already, made by a pass: backends are chosen for them as for others."""
    names = block.context.index.names
    for region in regions(block.program):
        position = names[region.name]
        choice = RegionChoice(region.kind, (position,), region.version, region.attrs, rule=EXISTING)
        yield RegionCandidate(choice, frozenset([block.unit_of[position]]), region.key, (EXISTING,))


def cloned_units(block: Block, candidate: RegionCandidate) -> frozenset[int]:
    """Return the units that a candidate clones: they stay in the block where others read them."""
    choice = candidate.choice
    cloned = {*choice.members} - {*choice.taken}
    return frozenset(block.unit_of[i] for i in cloned if i in block.unit_of)


def region_of(block: Block, choice: RegionChoice) -> Region:
    """Return a candidate outlined in the block's program."""
    outlined = outlined_with(block, [choice])
    names = {block.context.nodes[i].name for i in choice.taken}
    if choice.rule == EXISTING:
        return next(r for r in regions(outlined) if r.name in names)
    return next(r for r in regions(outlined) if names.intersection(r.nodes))


def outlined_with(block: Block, choices: Iterable[RegionChoice]) -> GraphModule:
    """Return a block's program with some regions outlined, besides those it has."""
    requests = [request_of(block.program, choice) for choice in choices if choice.rule != EXISTING]
    return outline(block.program, requests) if requests else block.program


def candidate_operands(block: Block, choice: RegionChoice) -> str:
    """Return the operands of a candidate as they arrive in the block."""
    return describe_operands(region_of(block, choice))


def why_unsupported(region: Region, backend: Backend) -> str | None:
    """Return why a backend does not take a region; None if it does."""
    try:
        answer = backend.supports(region)
    except Exception as error:
        return f"`supports` raised {type(error).__name__}: {error}"
    return None if answer is True else answer.reason


def request_of(program: GraphModule, choice: RegionChoice) -> Request:
    """Return what outlines a region of a plan in the program of its block."""
    nodes = [n for n in program.graph.nodes if n.op != "output"]
    escapes = dict(choice.escapes)
    default = escapes.pop("*", "auto")
    return Request(
        [nodes[i] for i in choice.members],
        choice.kind,
        choice.version,
        dict(choice.attrs) or None,
        {nodes[int(i)]: policy for i, policy in escapes.items()} if escapes else default,
        rule=choice.rule,
        arguments={name: nodes[i] for name, i in choice.arguments.items()} or None,
        results=tuple(None if i is None else nodes[i] for i in choice.results),
    )


def _candidate(block: Block, bodies: Bodies, plan: PlannedRegion) -> RegionCandidate | None:
    """Return the candidate of a planned region; None unless it consists of whole units that are worth a call."""
    draft, nodes, index = plan.draft, block.context.nodes, block.context.index
    unit_of = block.unit_of
    units = frozenset(unit_of[i] for i in draft.members if i in unit_of)
    if not units or (len(units) < 2 and draft.rule != "anchors"):
        return None
    if any(i not in draft.members for k in units for i in block.units[k]):
        return None
    if not units.isdisjoint(block.copies):
        return None
    inside, outputs = [nodes[i] for i in draft.inside], [nodes[i] for i in draft.outputs]
    operands, values = operands_of(index, draft)
    body, _ = bodies.share(draft.identity.kind, operands, inside, outputs, values=values)
    position = index.position
    # As they were resolved here, so that nothing is decided again in a graph with this block.
    members = draft.members | draft.clones
    resolved = {i: policy for i, (policy, _) in draft.escapes.items() if i in members}
    resolved.update(dict.fromkeys(draft.clones, "duplicate"))
    choice = RegionChoice(
        kind=draft.identity.kind,
        members=tuple(sorted(members)),
        version=draft.identity.version,
        attrs=json.loads(draft.identity.attrs),
        arguments={name: position[node] for name, node in draft.arguments.items()},
        results=tuple(None if node is None else position[node] for node in draft.results),
        rule=draft.rule,
        escapes={str(i): policy for i, policy in sorted(resolved.items())},
    )
    return RegionCandidate(choice, units, body_key(body))
