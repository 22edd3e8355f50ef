"""`Plan.check`: whether a plan still fits a model, for continuous integration.

The model is captured as `compile` does and the plan is applied, without compiling: everything that `compile` would only
report is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, PlanMismatch
from dovetail.lowering.assign import Assigner, preferences
from dovetail.lowering.options import Options
from dovetail.outlining.region import graph_key, local_name, regions
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.runtime.presets import CompiledGraph, Mode, first_by_key
from dovetail.tuning.apply_plan import AppliedPlan, PlanApplication, Section, environment_of
from dovetail.tuning.decisions import Decision
from dovetail.tuning.environment import Environment
from dovetail.tuning.plan import ByScope, Plan

_MOST_LABELS = 3


class _CapturePipeline:
    """The pipeline of captures that are not compiled."""

    strict = True

    def __call__(self, gm: GraphModule) -> CompiledGraph:
        return CompiledGraph(gm)


def capture_for_plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
) -> GraphModule:
    """Return the graph that `compile` captures for a call, whose key a plan has, in the ranges of sizes of the plan."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"a plan is for a module, not for a {type(model).__name__}.")
    shapes = None if plan is None else plan.dynamic_shapes
    cache = CaptureCache(model, _CapturePipeline(), dynamic_shapes=shapes, cuda_graphs=False)
    return cache.capture(args, kwargs)[1]


def check_plan(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    environment: bool,
) -> None:
    """Raise PlanMismatch unless every decision that a model needs is in the plan and applies; see `Plan.check`."""
    if not isinstance(environment, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"environment {environment!r}; give True or False.")
    gm = capture_for_plan(model, args, kwargs, plan)
    mode: Mode = "training" if gm.training else "inference"
    if environment:
        problems = list(_problems(plan, gm, mode, environment_of(gm)))
        advice = "Tune the model again, or give environment=False to check its structure only."
    else:
        # Each environment has decisions of its own, which may differ from those of the others.
        scopes = [scope for scope in plan.graphs.get(graph_key(gm), {}) if scope.mode == mode]
        measured = {scope.environment: plan.environments[scope.environment] for scope in scopes}
        problems = [
            problem
            for here in measured.values() or [environment_of(gm)]
            for problem in _problems(plan, gm, mode, here, environment=False)
        ]
        advice = "Tune the model again."
    if problems:
        raise PlanMismatch(dict.fromkeys(problems), advice)


def _problems(
    plan: Plan, gm: GraphModule, mode: Mode, here: Environment, *, environment: bool = True
) -> Iterator[str]:
    """Yield what a graph needs and a plan does not have, or has and does not apply, in an environment."""
    # A plan for inference was measured without gradients, and is checked for such calls.
    with torch.set_grad_enabled(mode == "training"):
        applied = PlanApplication(plan, mode, here).apply(gm)
    yield from applied.problems
    for unknown in applied.unknown:
        yield f"there is no decision for {unknown}{_unused(plan, unknown.section, mode, applied)}"
    if environment:
        yield from _declined(applied)
        yield from (f"the environment is another one: {what}" for what in applied.differences)


def _unused(plan: Plan, section: Section, mode: Mode, applied: AppliedPlan) -> str:
    """Return the labels of decisions that the graph does not use: what is unknown may have been one of them."""
    decisions: ByScope[Decision] = getattr(plan, section)
    labels = dict.fromkeys(
        decision.label
        for key, by_scope in sorted(decisions.items())
        if key not in applied.used
        for scope, decision in by_scope.items()
        if scope.mode == mode
    )
    shown = ", ".join(f"'{label}'" for label in list(labels)[:_MOST_LABELS])
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    return f"; the model has nothing that fits {shown}{more}" if labels else ""


def _declined(applied: AppliedPlan) -> Iterator[str]:
    """Yield the bodies that the backend of the plan does not support here."""
    if applied.decision.execution != "regions":
        return
    every = regions(applied.graph, nested=True)
    options = Options(plan=applied.bodies)
    assigner = Assigner(every, preferences(dict(applied.bodies), every), options)
    reasons = {(fault.region, fault.backend): fault.reason for fault in assigner.declined}
    for key, region in first_by_key(regions(applied.graph)).items():
        chain = applied.bodies.get(key)
        assigned = assigner.chains.get(local_name(region.name), ())
        if chain and (not assigned or assigned[0].name != chain[0].name):
            reason = reasons.get((region.name, chain[0].name), "it is not assigned to it")
            yield f"'{chain[0].name}' does not run the body {key[:12]} of '{region.name}': {reason}"
