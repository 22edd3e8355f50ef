"""The search space of a program: states of its graph by pass order, their blocks, and the options of each block.

A state is the graph after some passes in some order. Orders that lead to structurally equal graphs are one state, so that
nothing is measured twice; the shortest pipeline stands for all. So are graphs that are equal but for regions that are
candidates anyway: fusing is a pass for what can follow it, merging of what it left or another round that takes regions in. Where there are more states than can be enumerated, a
sampler proposes pipelines, and what it proposes is measured like the others.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from dovetail.errors import DovetailError, InvalidArgument
from dovetail.ir.text_tables import counted
from dovetail.lowering.backend_protocol import Backend, backend_with_options, by_name, identity
from dovetail.outlining.inline import inline
from dovetail.outlining.region import Region, graph_key
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.merge_parallel.merge_plan import Branch
from dovetail.rules.rule import Decline
from dovetail.runtime.presets import Mode
from dovetail.tuning.apply_plan import describe_operands
from dovetail.tuning.block import Block, blocks_of, missing_gradients, operand_description, record_inputs
from dovetail.tuning.decisions import BackendChoice, PassChoice
from dovetail.tuning.plan_passes import group_signature, make_pass
from dovetail.tuning.region_candidates import (
    FUSING_ROUNDS,
    Pruned,
    RegionCandidate,
    candidate_operands,
    candidates_of,
    region_of,
    why_unsupported,
)

MAX_STATES = 24
"""States of the graph that are enumerated before a sampler takes over."""
TYPICAL_COMPILE_SECONDS: Mapping[str, float] = {
    "inductor": 3.0,
    "onnxruntime": 0.6,
    "openvino": 0.8,
    "tvm": 5.0,
    "xla": 1.5,
}
"""How long backends take to compile a body of a few operations, where the store has no measurement."""
UNKNOWN_COMPILE_SECONDS = 2.0
_NO_TIME = "not derived within the budget"
_MAX_ROUNDS = 2
_MAX_PASSES = 5
_MAX_MERGE_GROUPS = 3


@dataclass(eq=False)
class GraphState:
    """The graph after a pipeline, and its distinct blocks by key."""

    pipeline: tuple[PassChoice, ...]
    graph: GraphModule
    key: str
    blocks: Mapping[str, Block]

    @cached_property
    def flat_key(self) -> str:
        """The key of the graph without regions: states that differ only by these are one, by the shortest pipeline."""
        return graph_key(inline(self.graph))

    @property
    def label(self) -> str:
        return " -> ".join(map(str, self.pipeline)) or "no passes"


@dataclass(eq=False)
class BlockSpace:
    """The options of one distinct block: candidates, and the backends that take each of them."""

    block: Block
    operands: str
    candidates: list[RegionCandidate] = field(default_factory=list[RegionCandidate])
    backends: dict[int, list[BackendChoice]] = field(default_factory=dict[int, list[BackendChoice]])
    pruned: list[Pruned] = field(default_factory=list[Pruned])
    is_expanded: bool = False
    """Whether the candidates that are parts of the block are there."""
    _operands: dict[tuple[str, tuple[int, ...]], str] = field(
        default_factory=dict[tuple[str, tuple[int, ...]], str]
    )

    @cached_property
    def missing_gradients(self) -> str:
        return missing_gradients(self.block)

    def candidate_operands(self, candidate: RegionCandidate) -> str:
        """Return the operands of a candidate, as they arrive in the block; those of an equal body may be others."""
        known = (candidate.key, candidate.choice.members)
        if known not in self._operands:
            self._operands[known] = candidate_operands(self.block, candidate.choice)
        return self._operands[known]

    def add_operands(self, candidate: RegionCandidate, region: Region) -> str:
        """Record the operands of a candidate that is outlined already, and return them."""
        operands = self._operands[candidate.key, candidate.choice.members] = describe_operands(region)
        return operands

    def prune(self, pruned: Pruned) -> None:
        """Record a part of the space that is not measured, once."""
        if pruned not in self.pruned:
            self.pruned.append(pruned)

    @property
    def options(self) -> int:
        """The number of pairs of a candidate and a backend that takes it."""
        return sum(len(each) for each in self.backends.values())

    @property
    def log10_divisions(self) -> float:
        """The decimal logarithm of a lower bound of the number of divisions: choices of disjoint candidates."""
        taken: set[int] = set()
        total = 0.0
        for number, candidate in sorted(enumerate(self.candidates), key=lambda c: len(c[1].units)):
            if taken.isdisjoint(candidate.units):
                taken |= candidate.units
                total += math.log10(1 + len(self.backends.get(number, ())))
        return total


@dataclass(eq=False)
class SearchSpace:
    """What is searched for one graph."""

    key: str
    states: list[GraphState]
    blocks: dict[str, BlockSpace]
    choices: dict[str, tuple[BackendChoice, Backend]]
    pruned: list[Pruned] = field(default_factory=list[Pruned])
    is_complete: bool = True

    @property
    def options(self) -> int:
        return sum(space.options for space in self.blocks.values())

    @property
    def log10_programs(self) -> float:
        """The decimal logarithm of a lower bound of the number of programs."""
        logs = [sum(self.blocks[key].log10_divisions for key in state.blocks) for state in self.states]
        top = max(logs, default=0.0)
        return top + math.log10(sum(10 ** (each - top) for each in logs)) if logs else 0.0

    def expand(self, keys: Iterable[str], deadline: float = math.inf) -> None:
        """Derive the candidates that are parts of some blocks: only those of the best states are measured."""
        for key in keys:
            if self.blocks[key].is_expanded:
                continue
            if time.monotonic() >= deadline:
                self.blocks[key].prune(Pruned("the parts of the block", _NO_TIME))
                continue
            self.blocks[key] = block_space(self.blocks[key].block, self.choices)

    def calls(self, key: str) -> int:
        """Return how many calls of a block the states have at most."""
        return max((s.blocks[key].calls for s in self.states if key in s.blocks), default=0)

    @property
    def backends(self) -> list[BackendChoice]:
        """The backends that are searched, each with its defaults and with further options, the quickest to compile first."""
        choices = [choice for choice, _ in self.choices.values()]
        return sorted(choices, key=lambda c: TYPICAL_COMPILE_SECONDS.get(c.name, UNKNOWN_COMPILE_SECONDS))

    def backend(self, text: str) -> BackendChoice:
        """Return the backend with options that a text is for."""
        return self.choices[text][0]

    def identity_of(self, choice: BackendChoice) -> str:
        """Return a backend with its version and options, as measurements are stored by it."""
        return identity(self.choices[str(choice)][1])

    def __str__(self) -> str:
        lines = [
            f"at least 10^{self.log10_programs:.0f} programs: {counted(len(self.states), 'state')} of the graph, "
            f"{counted(len(self.blocks), 'distinct block')}, {counted(self.options, 'pair')} of region and backend",
            f"backends: {', '.join(self.choices) or 'none'}",
        ]
        for state in self.states:
            calls = sum(block.calls for block in state.blocks.values())
            lines.append(
                f"state {state.key[:12]}: {state.label} ({counted(calls, 'call')} of {counted(len(state.blocks), 'block')})"
            )
        for key, space in self.blocks.items():
            lines.append(
                f"block {key[:12]}: {space.block.label}, {len(space.block.units)} units, "
                f"{len(space.candidates)} candidates, {space.options} with a backend"
                + ("" if space.is_expanded else "; its parts are candidates if its state is among the best")
            )
            lines += [f"  pruned: {one.what}: {one.reason}" for one in space.pruned]
        lines += [f"pruned: {one.what}: {one.reason}" for one in self.pruned]
        return "\n".join(lines)


def explore(
    gm: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mode: Mode,
    backends: Sequence[Backend],
    *,
    max_states: int = MAX_STATES,
    deadline: float = math.inf,
) -> SearchSpace:
    """Return the search space of a captured graph, what of it can be derived before the `deadline` of a monotonic clock."""
    space = SearchSpace(graph_key(gm), [], {}, backend_choices(backends))
    blocks: dict[str, Block] = {}
    for pipeline, graph, key in _states(gm, mode, max_states, space, deadline):
        distinct, new = blocks_of(graph, blocks)
        record_inputs(graph, distinct, args, kwargs, grad=mode == "training")
        blocks.update({block_key: distinct[block_key] for block_key in new})
        space.states.append(GraphState(pipeline, graph, key, distinct))
    for key, block in blocks.items():
        is_first = key in space.states[0].blocks
        in_time = time.monotonic() < deadline
        if is_first or in_time:
            space.blocks[key] = block_space(block, space.choices, parts=is_first and in_time)
        if is_first and not in_time:
            space.blocks[key].prune(Pruned("the parts of the block", _NO_TIME))
    late = [state for state in space.states if not space.blocks.keys() >= state.blocks.keys()]
    space.pruned += [Pruned(state.label, _NO_TIME) for state in late]
    space.states = [state for state in space.states if state not in late]
    return space


def backend_choices(backends: Sequence[Backend]) -> dict[str, tuple[BackendChoice, Backend]]:
    """Return backends by text: each as it is, and with the options it names as worth trying."""
    choices: dict[str, tuple[BackendChoice, Backend]] = {}
    for backend in backends:
        choice = BackendChoice(backend.name)
        choices[str(choice)] = (choice, backend)
        if backend is not resolve_known(backend.name):
            continue  # options are of backends by name; this one may have been constructed with others
        for options in backend.variants:
            choice = BackendChoice(backend.name, options)
            choices[str(choice)] = (choice, backend_with_options(backend.name, options))
    return choices


def resolve_known(name: str) -> Backend | None:
    """Return the backend that a name stands for; None if it stands for none."""
    try:
        return by_name(name)
    except InvalidArgument:
        return None


def block_space(
    block: Block, choices: Mapping[str, tuple[BackendChoice, Backend]], *, parts: bool = True
) -> BlockSpace:
    """Return the candidates of a block, without `parts` it as a whole only, and which backends take them."""
    space = BlockSpace(block, operand_description(block.program, block.inputs), is_expanded=parts)
    defaults = [backend for choice, backend in choices.values() if not choice.options]
    space.candidates, space.pruned = candidates_of(block, defaults, parts=parts)
    declined: dict[tuple[str, str, str], str | None] = {}
    for number, candidate in enumerate(space.candidates):
        region = region_of(block, candidate.choice)
        operands = space.add_operands(candidate, region)
        for choice, backend in choices.values():
            pair = (candidate.key, operands, backend.name)
            if pair not in declined:
                declined[pair] = why_unsupported(region, backend)
                if (reason := declined[pair]) is not None:
                    space.pruned.append(Pruned(f"{candidate.label} by {backend.name}", reason))
            if declined[pair] is None:
                space.backends.setdefault(number, []).append(choice)
    return space


def _states(
    gm: GraphModule, mode: Mode, max_states: int, space: SearchSpace, deadline: float
) -> Iterator[tuple[tuple[PassChoice, ...], GraphModule, str]]:
    """Yield the distinct graphs that passes lead to, breadth first."""
    first = graph_key(gm)
    derived, states = {first}, {graph_key(inline(gm))}
    yield (), gm, first
    waiting: deque[tuple[tuple[PassChoice, ...], GraphModule]] = deque([((), gm)])
    while waiting:
        earlier, graph = waiting.popleft()
        for choice in next_passes(graph, earlier, mode) if len(earlier) < _MAX_PASSES else ():
            if time.monotonic() >= deadline:
                space.pruned.append(Pruned("further pass orders", _NO_TIME))
                return
            try:
                result = make_pass(choice)(graph)
            except DovetailError as error:
                space.pruned.append(Pruned(f"{choice} after {len(earlier)} passes", str(error)))
                continue
            key = first if result is graph else graph_key(result)
            if key in derived:
                continue
            derived.add(key)
            pipeline = (*earlier, choice)
            # Passes that follow may lead to another graph also where this one is no state of its own.
            waiting.append((pipeline, result))
            flat_key = "" if choice.name == "Fuse" else graph_key(inline(result))
            # What rounds of fusing make of operations is: candidates of a block are those of two rounds too.
            if choice.name == "Fuse" or flat_key in states:
                space.pruned.append(
                    Pruned(" -> ".join(map(str, pipeline)), "its regions are candidates without it")
                )
                continue
            if len(states) >= max_states:
                space.is_complete = False
                space.pruned.append(
                    Pruned("further pass orders", f"more than {max_states} distinct graphs; they are sampled")
                )
                return
            states.add(flat_key)
            yield pipeline, result, key


FUSING = tuple(
    PassChoice("Fuse", {"rules": name})
    for name in dict.fromkeys(itertools.chain(FUSING_ROUNDS, *FUSING_ROUNDS.values()))
    # The regions of `default` are those of `library`, and groups of what is left.
    if name != "default"
)
"""Fusing with each rule set that is searched.

Not with `repeats`, for the blocks of the search are repeated blocks, and not first with `siblings`: those could no longer
be merged, and nothing takes them in.
"""


def next_passes(gm: GraphModule, pipeline: Sequence[PassChoice], mode: Mode) -> Iterator[PassChoice]:
    """Yield the passes that may come next: each once, fusing once for each rule set, merging for every choice of groups."""
    inference = mode == "inference"
    choices = [PassChoice("FoldConstants"), PassChoice("FoldConvBatchNorm")] if inference else []
    choices.append(PassChoice("Cleanup"))
    choices.append(PassChoice("ChannelsLast", {} if inference else {"materialise": False}))
    yield from (choice for choice in choices if may_follow(choice, pipeline))
    if may_follow(PassChoice("MergeParallel"), pipeline):
        for signatures in _subsets(merge_groups(gm)):
            options: dict[str, Any] = {"groups": list(signatures)}
            yield PassChoice("MergeParallel", {**options, "materialise": True} if inference else options)
    yield from (choice for choice in FUSING if may_follow(choice, pipeline))


def may_follow(choice: PassChoice, pipeline: Sequence[PassChoice]) -> bool:
    """Return whether a pass may come after others: not twice, and rounds of fusing each with other rules."""
    if choice.name != "Fuse":
        return all(choice.name != earlier.name for earlier in pipeline)
    rounds = [earlier.options["rules"] for earlier in pipeline if earlier.name == "Fuse"]
    rules = choice.options["rules"]
    return rules in (FUSING_ROUNDS[rounds[0]] if rounds else FUSING_ROUNDS) and len(rounds) < _MAX_ROUNDS


def merge_groups(gm: GraphModule) -> list[str]:
    """Return the distinct groups of sibling products of a graph, in the order in which they appear."""
    signatures: dict[str, None] = {}

    def record(branches: Iterable[Branch]) -> Decline:
        signatures[group_signature(branches)] = None
        return Decline("only listed")

    MergeParallel(guard=record).explain(gm)
    return list(signatures)


def _subsets(groups: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every choice of a few groups; of many, all and each alone."""
    if len(groups) <= _MAX_MERGE_GROUPS:
        for size in range(len(groups), 0, -1):
            yield from itertools.combinations(groups, size)
        return
    yield tuple(groups)
    yield from ((group,) for group in groups)
