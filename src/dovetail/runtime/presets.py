"""From a captured graph to what runs its calls: the default pipelines of `compile`, and the interface of plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, LoweringError
from dovetail.fusion.cost import CostModel
from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.nodes import is_projection
from dovetail.lowering.assign import ALL
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.failures import Diagnostic
from dovetail.lowering.lower import lower_with
from dovetail.lowering.lowered_state import LoweredState, lowered_state_of
from dovetail.lowering.options import Options
from dovetail.outlining.region import Region, call_of, local_name, regions
from dovetail.passes.fold_constants import FoldConstants
from dovetail.passes.pass_manager import Pass, Pipeline
from dovetail.passes.region_passes import Fuse
from dovetail.rules.partition import capability
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext

REST = "rest"
WHOLE = "whole"
"""The kind of a region that is the whole graph."""
Mode = Literal["inference", "training"]
"""Whether code is compiled for calls with gradients."""
Execution = Literal["regions", "graph", "model", "torch.compile"]
"""What runs calls: lowered regions, the captured graph as it is, the model's own forward, or torch.compile of it."""
PlanPath: TypeAlias = str | os.PathLike[str]


def _is_not_a_region(node: Node) -> bool:
    return call_of(node.meta) is None


def blocks() -> tuple[Pass, ...]:
    """Return passes that leave nothing outside of regions: repeated blocks, each one body, and what is between them."""
    return (
        Fuse(repeats(), rounds=1),
        Fuse(capability(_is_not_a_region, REST, min_size=1, join_siblings=True), rounds=1),
    )


@dataclass(frozen=True)
class _WholeGraph(Rule):
    """Proposes all operations of a graph as one region, or refuses them for a `reason`."""

    name: str = WHOLE
    kind: str = WHOLE
    nests: bool = True
    reason: str = ""

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        operations = [
            i for i, node in enumerate(context.nodes) if node.op not in ("placeholder", "get_attr", "output")
        ]
        if self.reason:
            yield Refusal(self.name, tuple(operations), self.reason)
        elif operations:
            constants = [i for i, node in enumerate(context.nodes) if node.op == "get_attr"]
            yield Candidate(self.name, self.kind, (*operations, *constants), escapes="output")


def whole_graph(cost: CostModel | None = None) -> Pass:
    """Return a pass that makes the whole graph one region, unless it saves nothing by a `cost`, the default of `fuse`."""
    return Fuse(_WholeGraph(), rounds=1, cost=cost)


@dataclass(frozen=True)
class _BlocksUnused(Rule):
    """Refuses all operations for the reason why repeated blocks are not regions of their own."""

    reason: str
    name: str = "repeats"
    kind: str = "block"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        yield Refusal(self.name, tuple(range(len(context.nodes))), self.reason)


@dataclass(frozen=True, repr=False)
class CompileGranularity(Pass):
    """Make regions of repeated blocks and what is between them, or one of the whole graph.

    Needs: nothing. Leaves: whichever the backend is estimated to compile faster by its `compile_cost`; the estimates
    are in the ledger, as the reason why the other one was not taken.
    """

    backend: Backend

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with its regions."""
        divided = Pipeline(list(blocks()))(gm)
        bodies = [region.body for region in first_by_key(regions(divided)).values()]
        cost = self.backend.compile_cost
        if cost is None or len(bodies) < 2:
            return divided
        counts = sum(map(_operation_count, bodies)), _operation_count(gm)
        of_blocks, of_whole = cost.seconds(len(bodies), counts[0]), cost.seconds(1, counts[1])
        estimate = (
            f"{len(bodies)} distinct bodies with {counts[0]} operations are estimated to compile in {of_blocks:.1f} s, "
            f"the whole graph with {counts[1]} in {of_whole:.1f} s"
        )
        if of_blocks <= of_whole:
            return Fuse(_WholeGraph(reason=estimate), rounds=1)(divided)
        whole = whole_graph()(gm)
        if any(self.backend.supports(region) is not True for region in regions(whole)):
            reason = f"'{self.backend.name}' does not take the whole graph"
            return Fuse(_WholeGraph(reason=reason), rounds=1)(divided)
        return Fuse(_BlocksUnused(estimate), rounds=1)(whole)


def _operation_count(gm: GraphModule) -> int:
    """Return the number of operations of a graph, those of nested regions included."""
    count, graphs = 0, [gm]
    while graphs:
        owner = graphs.pop()
        for node in owner.graph.nodes:
            if node.op == "call_module" and isinstance(
                body := attribute(owner, cast("str", node.target)), Body
            ):
                graphs.append(body)
            elif node.op in ("call_function", "call_method", "call_module"):
                count += not is_projection(node)
    return count


@dataclass(frozen=True)
class GradientGuard:
    """The calls that a plan's graph is for, by names of weights that passes of the plan make constants of.

    No gradient reaches a weight that is `detached`: such a graph is for calls in which none of them requires one. A graph
    whose passes were left out for the gradients of weights, `attached`, is for calls in which one of them requires one.
    """

    detached: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.detached or self.attached)


ALL_CALLS = GradientGuard()


@dataclass(frozen=True)
class CompiledGraph:
    """A captured graph, compiled: the graph that runs calls unless `execution` is otherwise, and what is to be reported.

    `cuda_graphs` is whether its calls are recorded as CUDA graphs, None if the caller of `compile` decides that.
    """

    program: GraphModule
    execution: Execution = "regions"
    cuda_graphs: bool | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    gradients: GradientGuard = ALL_CALLS


@dataclass(frozen=True)
class PlannedGraph:
    """What a plan decides for one captured graph: its regions, the backends of their bodies by key, what runs calls.

    `unlowered` are the names of nested regions that run as they are, whatever their bodies are elsewhere.
    """

    graph: GraphModule
    backends: Mapping[str, list[Backend]] = field(default_factory=dict[str, list[Backend]])
    unlowered: tuple[str, ...] = ()
    execution: Execution = "regions"
    cuda_graphs: bool | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    gradients: GradientGuard = ALL_CALLS


@runtime_checkable
class GraphPlan(Protocol):
    """Decisions that replace the default pipeline; `tuning.plan.Plan` implements it."""

    def planned(
        self, gm: GraphModule, *, mode: Mode, backends: Any, passes: Pass, strict: bool
    ) -> PlannedGraph:
        """Return the decisions for a captured graph.

        What is unknown follows `passes` and `backends`, the defaults. What does not apply is reported, or with
        `strict` raised.
        """
        ...

    def dynamic_shapes(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the `dynamic_shapes` that a call is to be captured with; None for the defaults."""
        ...

    @property
    def has_size_ranges(self) -> bool:
        """Whether `dynamic_shapes` gives calls ranges of sizes, which Dynamo's own captures do not follow."""
        ...


_READERS: list[Callable[[PlanPath], GraphPlan]] = []


def install_plan_reader(read: Callable[[PlanPath], GraphPlan]) -> None:
    """Set the function that reads the file of a plan, which imports what it needs when called."""
    _READERS[:] = [read]


def as_plan(plan: Any) -> tuple[GraphPlan | None, Mapping[str, Any] | None]:
    """Return a plan, or a mapping from the keys of bodies to backends; the plan in a file where a path is given."""
    if plan is None or isinstance(plan, Mapping):
        return None, plan
    if isinstance(plan, (str, os.PathLike)):
        return _READERS[0](plan), None
    if isinstance(plan, GraphPlan) and not isinstance(plan, type):
        return plan, None
    raise InvalidArgument(
        f"plan {plan!r}; give a dovetail.Plan, the path of one, or a mapping from the keys of bodies to backends."
    )


@dataclass(frozen=True)
class CompilePreset:
    """What is done to every captured graph of a model: the pipeline or plan, the backends and the options."""

    pipeline: Pass
    backends: Any
    options: Options
    plan: GraphPlan | None = None

    @property
    def strict(self) -> bool:
        """Whether a call that cannot be captured is an error."""
        return self.options.strict

    def __call__(self, gm: GraphModule) -> CompiledGraph:
        """Return the lowered graph, or what the plan decides for it."""
        if self.plan is None:
            return CompiledGraph(lower_with(self.pipeline(gm), self.backends, self.options))
        trains = gm.training if self.options.grad is None else self.options.grad
        planned = self.plan.planned(
            gm,
            mode="training" if trains else "inference",
            backends=self.backends,
            passes=self.pipeline,
            strict=self.strict,
        )
        graph, diagnostics = planned.graph, list(planned.diagnostics)
        if planned.execution == "regions":
            others = self.backends if isinstance(self.backends, Mapping) else {ALL: self.backends}
            preferred = {**others, **dict.fromkeys(planned.unlowered, ())}
            # Backends that other ranks run a body by come before those of the plan.
            chosen = {**planned.backends, **(self.options.plan or {})}
            graph = lower_with(graph, preferred, replace(self.options, plan=chosen))
            diagnostics += self._unused_backends(graph, planned)
        return CompiledGraph(
            graph, planned.execution, planned.cuda_graphs, tuple(diagnostics), planned.gradients
        )

    def _unused_backends(self, lowered: GraphModule, planned: PlannedGraph) -> Iterator[Diagnostic]:
        """Yield the bodies that the backend of the plan does not run, with the reason; with `strict` raise it."""
        state = lowered_state_of(lowered)
        by_key = first_by_key(regions(lowered))
        for key, chain in planned.backends.items():
            region = by_key.get(key)
            if region is None or not chain or state is None or _is_used(chain[0], region, state):
                continue
            name, unit = chain[0].name, unit_of(region)
            faults = [e.reason for e in state.events if (e.key, e.backend) == (unit.key, name) and e.reason]
            reason = faults[-1] if faults else "it is not assigned to it"
            if self.strict:
                raise LoweringError(region.name, name, f"the plan's choice for this body: {reason}")
            what = f"the plan runs the body {key[:12]} of '{region.name}' by '{name}', which is not used: {reason}"
            yield Diagnostic("stale", what)


def first_by_key(every: Iterable[Region]) -> dict[str, Region]:
    """Return the first region with each body, by its key."""
    by_key: dict[str, Region] = {}
    for region in every:
        by_key.setdefault(region.key, region)
    return by_key


def _is_used(backend: Backend, region: Region, state: LoweredState) -> bool:
    assigned = state.assigned.get(local_name(region.name), ())
    # Nothing is compiled yet for operands that only calls determine.
    return bool(assigned) and assigned[0].name == backend.name and region.backend in (None, backend.name)


def default_pipeline(backends: Any, rules: Any = None) -> Pipeline:
    """Return the passes for some backends.

    Compilers get repeated blocks as large as possible, or the whole graph if it compiles faster. Rules go first if the caller names some, or if a backend has
    kernels for kinds, which the rules of the library find. If a backend has rules of its own, what is between its
    regions goes to the others: a block that contains some could not be assigned as a whole. Such a backend may lack
    the operations that compute masks and positions, which are folded before.
    """
    own_rules = [b.rules for b in backends if b.rules is not None]
    if rules is None and own_rules:
        return Pipeline([FoldConstants(), *map(Fuse, own_rules), blocks()[-1]])
    named = rules is not None or any(b.kernels for b in backends)
    if not named:
        has_cost = bool(backends) and backends[0].compile_cost is not None
        return Pipeline([CompileGranularity(backends[0])] if has_cost else list(blocks()))
    return Pipeline([Fuse(rules), *blocks()])


def as_pipeline(value: Any) -> Pass:
    """Return a pass, or a list of them as a pipeline."""
    if isinstance(value, Pass):
        return value
    if isinstance(value, (list, tuple)):
        return Pipeline(list(value))  # pyright: ignore[reportUnknownArgumentType]
    raise InvalidArgument(f"pipeline {value!r} is neither a pass nor a list of passes.")
