"""Sampling of pass orders where there are too many to enumerate: Optuna's TPE proposes, coarse costs answer.

A pipeline is a few slots with a pass or none in each, and a choice of the groups of siblings that are merged. The
tree-structured Parzen estimator models which choices the cheap pipelines have in common. What it proposes is applied
and costs what its blocks cost as wholes; a graph that is known already costs nothing to evaluate.

Reference: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.division_search import DivisionSearch
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.plan_passes import make_pass
from dovetail.tuning.search_space import (
    FUSING,
    GraphState,
    SearchSpace,
    may_follow,
    merge_groups,
    next_passes,
)

_MAX_SAMPLES = 40
_SLOTS = 4
_NONE = "none"


class PassSampler:
    """Proposes pipelines by Optuna and adds the states they lead to."""

    def __init__(
        self,
        space: SearchSpace,
        blocks: DivisionSearch,
        new_state: Callable[[Sequence[PassChoice]], GraphState | None],
        *,
        seed: int = 0,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._failed: Any = optuna.trial.TrialState.FAIL
        self._space, self._blocks, self._new_state = space, blocks, new_state
        self._study: Any = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        first = space.states[0].graph
        choices = list(next_passes(first, (), blocks.mode))
        # Fusing first leaves other groups of siblings to merge.
        fused = [make_pass(c)(first) for c in choices if c.name == "Fuse"]
        self._groups = list(dict.fromkeys(g for graph in (first, *fused) for g in merge_groups(graph)))
        self._choices = {str(c): c for c in (*choices, *FUSING) if c.name != "MergeParallel"}
        merges = [c.options for c in choices if c.name == "MergeParallel"]
        self._merge_options = {k: v for each in merges[:1] for k, v in each.items() if k != "groups"}

    def run(self, measurer: Measurer, share: float) -> None:
        """Sample pipelines while there is time; equal graphs get the cost that is known."""
        for _ in range(_MAX_SAMPLES):
            if measurer.left(share) <= 0 or measurer.interrupted:
                return
            trial = self._study.ask()
            pipeline = self._suggest(trial)
            state = self._new_state(pipeline)
            if state is None:
                self._study.tell(trial, state=self._failed)
                continue
            if state not in self._space.states:
                self._space.states.append(state)
            self._blocks.measure_coarse(list(state.blocks), share)
            calls = {key: block.calls for key, block in state.blocks.items()}
            cost = self._blocks.coarse_seconds(calls)
            if cost > 0:
                self._study.tell(trial, cost)
            else:
                self._study.tell(trial, state=self._failed)

    def _suggest(self, trial: Any) -> tuple[PassChoice, ...]:
        names = [_NONE, "MergeParallel", *self._choices]
        groups = [
            g for i, g in enumerate(self._groups) if trial.suggest_categorical(f"group{i}", [True, False])
        ]
        pipeline: list[PassChoice] = []
        for slot in range(_SLOTS):
            name = trial.suggest_categorical(f"pass{slot}", names)
            if name == "MergeParallel" and groups:
                choice = PassChoice(name, {"groups": groups, **self._merge_options})
            elif name in self._choices:
                choice = self._choices[name]
            else:
                continue
            if may_follow(choice, pipeline):
                pipeline.append(choice)
        return tuple(pipeline)
