"""Whole programs of a model: built from plans as `dovetail.compile` builds them, verified, and compared end to end.

Programs that are compared run in one process and share the weights. Every one is verified against the model before it is
timed: results, inputs, buffers, gradients and random numbers, within the tolerance that schedules are verified with.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import DovetailError
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.failures import Diagnostic, Kind
from dovetail.lowering.options import Options
from dovetail.numerics.compare import RunComparison
from dovetail.numerics.tolerance import Tolerance
from dovetail.runtime.compile import make_preset
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import ModelInputs, isolated_run
from dovetail.scheduling.verify_schedule import OriginalRuns, RunInputs, TrialRuns, copy_inputs
from dovetail.tuning.measurement import JSON, Measurement
from dovetail.tuning.plan import Plan
from dovetail.tuning.restored_runs import ModelWrites
from dovetail.tuning.timing import Interleaved, Run, Timer, Verdict, compare, noise_of, peak_bytes
from dovetail.tuning.trial import ComparisonTrial, ProgramSpec, ProgramTrial

EAGER, TORCH_COMPILE = "eager", "torch.compile"
"""Programs without dovetail."""
_ROUNDS, _MAX_ROUNDS = 10, 400
_UNPLANNED = frozenset[Kind]({"fallback", "limit", "failed", "stale", "unplanned"})
"""Diagnostics of programs whose calls run something else than what was to be measured."""
_PROGRAM_SECONDS = 1.5


class InvalidProgram(DovetailError):
    """A program does not compute what the model does."""


class _Unchanged:
    """A model that no schedule has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextlib.contextmanager
    def temporarily(self, state: object) -> Generator[nn.Module]:
        yield self._model


class ModelPrograms:
    """The model with its example inputs, and the programs that were built for it."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mode: Mode,
        backends: Sequence[Backend],
        timer: Timer,
    ) -> None:
        self.model, self.mode = model, mode
        self._example = ModelInputs(args, kwargs)
        self._backends, self._timer = list(backends), timer
        self._built: dict[str, nn.Module] = {}
        self._captured: GraphModule | None = None
        trial = TrialRuns(cast("Any", _Unchanged(model)), self._example, None)
        self._inputs = RunInputs(self._example, "the example inputs", grad=mode == "training")
        self._runs = trial
        self._comparison: RunComparison | None = None
        self._writes: ModelWrites | None = None

    def build(self, program: ProgramSpec) -> nn.Module:
        """Return a module that runs a program, built once."""
        if program.key not in self._built:
            self._built[program.key] = self._build(program)
        return self._built[program.key]

    def _build(self, program: ProgramSpec) -> nn.Module:
        if not program.plan:
            return self.model if program.name == EAGER else cast("nn.Module", torch.compile(self.model))
        # A backend that declines or fails is a failed trial, not a program without it.
        options = Options(on_error="raise", grad=self.mode == "training")
        plan = Plan.from_json(program.plan)
        preset, _ = make_preset(options, backends=self._backends or [], plan=plan)
        compiled = CompiledModule(self.model, preset, dynamic_shapes=plan.dynamic_shapes)
        cache = compiled._captures
        args, kwargs = self._example.args, self._example.kwargs
        if self._captured is None:
            _, self._captured = cache.capture(args, kwargs)
        key = cache.guard_key()
        if key is None:
            raise InvalidProgram("the parameters of the model are replaced while it is measured")
        # The key is that of this module's own guards, which number the states of the model as they met them.
        cache.install(key, self._captured, args, kwargs)
        return compiled

    @staticmethod
    def require_planned(module: nn.Module) -> None:
        """Raise InvalidProgram if calls of a program did not run what its plan decides."""
        reported = cast("Sequence[Diagnostic]", getattr(module, "diagnostics", ()))
        faults = [each.message for each in reported if each.kind in _UNPLANNED]
        if faults:
            raise InvalidProgram(f"its calls do not run what the plan decides: {faults[0]}")

    def verify(self, module: nn.Module, tolerance: Tolerance | None = None) -> float:
        """Return the largest relative error of a program; raise InvalidProgram if it is beyond the tolerance."""
        if self._comparison is None:
            self._comparison = RunComparison(OriginalRuns(self._runs, self._inputs))
        actual = self._runs.run_module(module, self._inputs)
        difference = self._comparison.difference(actual, tolerance or Tolerance())
        if difference is not None:
            own = self._comparison.nondeterminism()
            reason = f"it does not compute the same: {difference}"
            raise InvalidProgram(
                reason
                if own is None
                else f"{reason}. It cannot be verified: the model differs from itself, {own}"
            )
        return self._comparison.largest_error(actual)

    def step(self, module: nn.Module) -> Run:
        """Return a call of a program on inputs of its own, in training followed by its backward.

        What calls of the model write begins each call as it is now, whichever program it is.
        """
        if self._writes is None:
            example = copy_inputs(self._example)
            self._writes = ModelWrites.of_call(self.model, self._call(self.model, example), _leaves(example))
        example = copy_inputs(self._example)
        return self._writes.restored(self._call(module, example), _leaves(example))

    def _call(self, module: nn.Module, example: ModelInputs) -> Run:
        args, kwargs = example.args, dict(example.kwargs)
        if self.mode == "inference":
            return lambda: module(*args, **kwargs)
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        leaves += [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.requires_grad]

        def step() -> None:
            results = [
                r
                for r in pytree.tree_leaves(module(*args, **kwargs))
                if isinstance(r, Tensor) and r.requires_grad
            ]
            if results and leaves:
                total = sum((r.float().sum() for r in results), torch.zeros((), device=self._timer.device))
                torch.autograd.grad(total, leaves, allow_unused=True)

        return step

    def measure(self, trial: ProgramTrial) -> Measurement:
        """Return a program's time beside the model's, whether it computes the same, and its peak memory.

        What the runs change in the model is restored.
        """
        with isolated_run(self.model):
            return self._measure(trial)

    def _measure(self, trial: ProgramTrial) -> Measurement:
        start = time.perf_counter()
        module = self.build(trial.program)
        run = self.step(module)
        with isolated_run(self.model):
            run()
        compile_seconds = time.perf_counter() - start
        error = self.verify(module) if module is not self.model else 0.0
        interleaved = Interleaved([run, self.step(self.model)], self._timer)
        interleaved.sample(3)
        interleaved.sample(_ROUNDS, time.monotonic() + _PROGRAM_SECONDS)
        self.require_planned(module)
        samples, beside = interleaved.samples
        return Measurement(
            tuple(samples),
            numeric_error=error,
            peak_bytes=peak_bytes(run, self._timer.device),
            compile_seconds=compile_seconds,
            details={"reference": beside, **_diagnostics(module)},
        )

    def compare(self, trial: ComparisonTrial) -> Measurement:
        """Return interleaved samples of some programs: rounds until each is separated from the best, or a tie.

        The first program is sampled twice in every round, which gives the noise.
        """
        with isolated_run(self.model):
            return self._compare(trial)

    def _compare(self, trial: ComparisonTrial) -> Measurement:
        start = time.perf_counter()
        failures: dict[str, JSON] = {}
        runs: dict[str, Run] = {}
        for program in trial.programs:
            try:
                module = self.build(program)
                if module is not self.model:
                    self.verify(module)
                run = self.step(module)
                with isolated_run(self.model):
                    run()
                self.require_planned(module)
                runs[program.key] = run
            except (Exception, SystemExit) as error:
                failures[program.key] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        compile_seconds = time.perf_counter() - start
        if not runs:
            return Measurement((), failure="no program runs", details={"failures": failures})
        keys = list(runs)
        interleaved = Interleaved([*runs.values(), runs[keys[0]]], self._timer, seed=trial.seed)
        until = time.monotonic() + trial.seconds
        interleaved.sample(_ROUNDS, math.inf)
        while len(interleaved.samples[0]) < _MAX_ROUNDS and time.monotonic() < until:
            if is_decided(interleaved.samples):
                break
            if not interleaved.sample(_ROUNDS, until):
                break
        *samples, again = interleaved.samples
        details: dict[str, JSON] = {
            "programs": dict(zip(keys, samples, strict=True)),
            "again": again,
            "failures": failures,
        }
        return Measurement(tuple(samples[0]), compile_seconds=compile_seconds, details=details)


def _leaves(example: ModelInputs) -> list[Any]:
    return pytree.tree_leaves((example.args, dict(example.kwargs)))


def is_decided(samples: Sequence[Sequence[float]]) -> bool:
    """Return whether every program is separated from the fastest one or a tie; the last samples repeat the first."""
    *programs, again = samples
    noise = noise_of(programs[0], again)
    best = min(range(len(programs)), key=lambda i: sorted(programs[i])[len(programs[i]) // 2])
    verdicts: list[Verdict] = [
        compare(other, programs[best], noise).verdict for i, other in enumerate(programs) if i != best
    ]
    return "undecided" not in verdicts


def _diagnostics(module: nn.Module) -> dict[str, JSON]:
    """Return what a compiled model reported while it was built, such as regions that fell back."""
    reported = getattr(module, "diagnostics", ())
    return {"diagnostics": [str(each) for each in reported]} if reported else {}
