"""Running trials: programs are built as production builds them, verified, and timed beside a reference.

Everything here runs in a worker process, or in the process of the caller where the model cannot be sent to another. A
candidate that raises is a failed measurement with the reason; one that kills the process is recorded by its parent.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from dovetail.errors import InvalidArgument
from dovetail.frontend.capture import capture
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import Program, attribute
from dovetail.ir.schema import written_operands
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.lower import lower_with
from dovetail.lowering.options import Options
from dovetail.numerics.tolerance import relative_error
from dovetail.outlining.inline import inline
from dovetail.outlining.outline import outline
from dovetail.outlining.region import Region, regions
from dovetail.runtime.presets import Mode
from dovetail.scheduling.call_recording import copy_tensors
from dovetail.tuning.block import Block, take_out
from dovetail.tuning.decisions import BackendChoice
from dovetail.tuning.measurement import JSON, Measurement
from dovetail.tuning.model_programs import ModelPrograms
from dovetail.tuning.plan_passes import make_backend
from dovetail.tuning.region_candidates import outlined_with, region_of
from dovetail.tuning.restored_runs import preserved_buffers, restored
from dovetail.tuning.timing import Interleaved, Run, Timer, peak_bytes, recorded
from dovetail.tuning.trial import (
    BoundaryTrial,
    ComparisonTrial,
    DivisionsTrial,
    OperationsTrial,
    ProgramTrial,
    RegionTrial,
    Trial,
)

HOPELESS = 2.0
"""A body that takes this many times the time of its operations after three samples is not sampled further."""
_FIRST_ROUNDS, _MAX_ROUNDS, _SAMPLING_SECONDS = 3, 12, 0.5


@dataclass(eq=False)
class _Loaded:
    """A block in this process, and the values of all its nodes on its recorded inputs."""

    block: Block
    values: dict[Node, Any]


class TrialRunner:
    """Runs trials on blocks and a model that were loaded before."""

    def __init__(self, backends: Sequence[Backend], device: str = "cpu") -> None:
        self._backends = {backend.name: backend for backend in backends}
        self.device = torch.device(device)
        self._timer = Timer(self.device)
        self._blocks: dict[str, _Loaded] = {}
        self._model: ModelPrograms | None = None

    def load_block(self, block: Block) -> None:
        """Keep a block for the trials to come."""
        self._blocks[block.key] = _Loaded(block, {})

    def load_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Mode
    ) -> None:
        """Keep the model for the trials to come."""
        backends = list(self._backends.values())
        self._model = ModelPrograms(model, args, kwargs, mode, backends, self._timer)

    def run(self, trial: Trial) -> Measurement:
        """Return the result of a trial; a candidate that raises is a failure."""
        start = time.perf_counter()
        try:
            with torch.set_grad_enabled(trial.mode == "training"):
                return self._run(trial)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()
            text = " ".join(reason[:3])[:500]
            return Measurement((), failure=text, compile_seconds=time.perf_counter() - start)

    def _run(self, trial: Trial) -> Measurement:
        if isinstance(trial, OperationsTrial):
            return self._operations(trial)
        if isinstance(trial, RegionTrial):
            return self._region(trial)
        if isinstance(trial, BoundaryTrial):
            return self._boundary(trial)
        if isinstance(trial, DivisionsTrial):
            return self._divisions(trial)
        if self._model is None:
            raise InvalidArgument("no model is loaded.")
        if isinstance(trial, ProgramTrial):
            return self._model.measure(trial)
        if isinstance(trial, ComparisonTrial):
            return self._model.compare(trial)
        raise InvalidArgument(f"a {type(trial).__name__} cannot be measured.")

    def _values(self, key: str) -> tuple[Block, dict[Node, Any]]:
        loaded = self._blocks[key]
        if not loaded.values:
            program = loaded.block.program
            with preserved_buffers(program):
                loaded.values = _Values(program).record(copy_tensors(list(loaded.block.inputs)))
        return loaded.block, loaded.values

    def _operations(self, trial: OperationsTrial) -> Measurement:
        block, values = self._values(trial.block)
        training = trial.mode == "training"
        nodes = block.context.nodes
        runs = [_operation(block.program, nodes[unit[0]], values, training) for unit in block.units]
        whole = _repeatable(block, _step(block.program, block.inputs, training), block.inputs)
        interleaved = self._interleaved([whole, *runs], warm_up=1, pause=False)
        interleaved.sample(_FIRST_ROUNDS)
        interleaved.sample(_MAX_ROUNDS, time.monotonic() + 2 * _SAMPLING_SECONDS)
        whole_samples, *samples = interleaved.samples
        details: dict[str, JSON] = {"operations": samples}
        return Measurement(tuple(whole_samples), details=details)

    def _region(self, trial: RegionTrial) -> Measurement:
        block, values = self._values(trial.block)
        training = trial.mode == "training"
        region = region_of(block, trial.region)
        alone, inputs = _alone(outlined_with(block, [trial.region]), region, values)
        start = time.perf_counter()
        lowered = self._lowered(alone, {regions(alone)[0].key: trial.backend}, training, verify=True)
        compile_seconds = time.perf_counter() - start
        # Operations as they are run in the graph around them, without a call of the body.
        flat = inline(alone)
        error = _numeric_error(lowered, flat, inputs)
        run, reference = (
            _repeatable(block, _step(each, inputs, training), inputs) for each in (lowered, flat)
        )
        samples, details = self._beside(run, reference)
        return Measurement(
            tuple(samples),
            numeric_error=error,
            peak_bytes=peak_bytes(run, self.device),
            compile_seconds=compile_seconds,
            details=details,
        )

    def _beside(self, run: Run, reference: Run) -> tuple[list[float], dict[str, JSON]]:
        """Return samples of a run, and those of the reference; fewer of a run that is hopeless."""
        interleaved = self._interleaved([run, reference])
        until = time.monotonic() + _SAMPLING_SECONDS
        interleaved.sample(_FIRST_ROUNDS)
        samples, beside = interleaved.samples
        if min(samples) > HOPELESS * max(beside):
            return samples, {"reference": beside, "stopped": "hopeless"}
        interleaved.sample(2)
        interleaved.sample(_MAX_ROUNDS, until)
        return samples, {"reference": beside}

    def _interleaved(self, runs: Sequence[Run], **options: Any) -> Interleaved:
        return Interleaved([recorded(run, self.device) for run in runs], self._timer, **options)

    def _boundary(self, trial: BoundaryTrial) -> Measurement:
        dtype = cast("torch.dtype", getattr(torch, trial.dtype))
        value = torch.randn(trial.shape).to(trial.device, dtype)
        training = trial.mode == "training"
        pair = capture(_Pair(), (value,))
        names = [n.name for n in pair.graph.nodes if n.op == "call_function"]
        runs: list[Run] = []
        start = time.perf_counter()
        for members in (names[:2], names[2:], names):
            outlined: GraphModule = capture(_Pair(), (value,))
            chosen: dict[str, BackendChoice] = {}
            for part, backend in ((names[:2], trial.first), (names[2:], trial.second)):
                if part[0] in members and backend is not None:
                    outlined = outline(outlined, part, kind="probe")
            for region in regions(outlined):
                is_first = names[0] in region.nodes
                chosen[region.key] = cast("BackendChoice", trial.first if is_first else trial.second)
            lowered = self._lowered(outlined, chosen, training) if chosen else outlined
            runs.append(_step(lowered, (value,), training))
        unlowered = _step(pair, (value,), training)
        seconds = time.perf_counter() - start
        interleaved = self._interleaved([*runs, unlowered])
        interleaved.sample(_FIRST_ROUNDS + 2)
        first, second, both, neither = interleaved.samples
        # A boundary costs what two regions in a row take beyond each alone among operations as they are.
        extra = [b - a - c + n for a, c, b, n in zip(first, second, both, neither, strict=True)]
        return Measurement(
            tuple(both), compile_seconds=seconds, details={"boundary": statistics.median(extra)}
        )

    def _divisions(self, trial: DivisionsTrial) -> Measurement:
        block = self._blocks[trial.block].block
        training = trial.mode == "training"
        reference = _repeatable(block, _step(block.program, block.inputs, training), block.inputs)
        runs: list[Run] = []
        measured: list[int] = []
        failures: dict[str, JSON] = {}
        errors: dict[str, JSON] = {}
        start = time.perf_counter()
        for number, division in enumerate(trial.divisions):
            try:
                lowered = self.divided(block, [*division.regions], training)
                error = _numeric_error(lowered, block.program, block.inputs)
                if error is not None and not math.isfinite(error):
                    raise InvalidArgument(f"its results are off by {error}")
                errors[str(number)] = error
                run = _repeatable(block, _step(lowered, block.inputs, training), block.inputs)
                run()
            except (Exception, SystemExit) as error:
                failures[str(number)] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                continue
            measured.append(number)
            runs.append(run)
        seconds = time.perf_counter() - start
        interleaved = self._interleaved([reference, reference, *runs])
        interleaved.sample(_FIRST_ROUNDS + 3)
        interleaved.sample(_MAX_ROUNDS, time.monotonic() + 4 * _SAMPLING_SECONDS)
        as_it_is, again, *samples = interleaved.samples
        details: dict[str, JSON] = {
            "again": again,
            "divisions": {str(n): s for n, s in zip(measured, samples, strict=True)},
            "failures": failures,
            "errors": errors,
        }
        return Measurement(tuple(as_it_is), compile_seconds=seconds, details=details)

    def divided(
        self, block: Block, chosen: Sequence[tuple[Any, BackendChoice]], training: bool
    ) -> GraphModule:
        """Return a block's program with some regions, lowered."""
        if not chosen:
            return block.program
        backends = {region_of(block, region).key: backend for region, backend in chosen}
        return self._lowered(outlined_with(block, [region for region, _ in chosen]), backends, training)

    def _lowered(
        self, gm: GraphModule, chosen: Mapping[str, BackendChoice], training: bool, *, verify: bool = False
    ) -> GraphModule:
        plan = {key: [make_backend(choice, self._backends)] for key, choice in chosen.items()}
        options = Options(plan=plan, on_error="raise", verify=verify, smallest=1, grad=training)
        return lower_with(gm, [], options, progress=False)


class _Values(Interpreter):
    """Runs a program and keeps the value of every node as it was when it was computed."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program, garbage_collect_values=False)

    def record(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        self.run(*inputs, enable_io_processing=False)
        return dict(self.env)


def _alone(
    outlined: GraphModule, region: Region, values: Mapping[Node, Any]
) -> tuple[Program, tuple[Any, ...]]:
    """Return a region of a graph as a program of its own, and the operands of its call."""
    region = next(r for r in regions(outlined) if r.name == region.name)
    members = [region.node, *region.outputs]
    program = take_out(Index(outlined), region.key, members, region.inputs).program
    by_name = {node.name: value for node, value in values.items()}
    inputs = [by_name[node.name] for node in program.graph.find_nodes(op="placeholder")]
    return program, tuple(copy_tensors(inputs))


def _repeatable(block: Block, run: Run, inputs: Any) -> Run:
    """Return a run of a block, or of a part of it, whose calls all begin with the same inputs and buffers."""
    return restored(run, (inputs, list(block.program.buffers()))) if block.writes else run


def _operation(program: GraphModule, node: Node, values: Mapping[Node, Any], training: bool) -> Run:
    """Return what runs one operation, on operands of its own."""
    args, kwargs = copy_tensors(map_arg((node.args, node.kwargs), lambda n: _leaf(values[n], training)))
    target: Any = attribute(program, cast("str", node.target)) if node.op == "call_module" else node.target
    if node.op == "call_method":
        name, (owner, *rest) = cast("str", node.target), args
        return lambda: getattr(owner, name)(*rest, **kwargs)

    def call() -> object:
        return target(*args, **kwargs)

    run = _with_backward(call, (args, kwargs)) if training else call
    return restored(run, (args, kwargs)) if written_operands(node) else run


def _leaf(value: Any, training: bool) -> Any:
    if training and isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _step(program: nn.Module, inputs: Sequence[Any], training: bool) -> Run:
    """Return a call of a program, or in training its forward and backward."""
    run = getattr(program, "forward", program)
    if not training:
        return lambda: run(*inputs)
    leaves = [_leaf(value, training) for value in inputs]
    return _with_backward(lambda: run(*leaves), (leaves, list(program.parameters())))


def _with_backward(run: Run, operands: Any) -> Run:
    """Return a run followed by the gradients of its results for all operands that require them."""
    leaves = [v for v in pytree.tree_leaves(operands) if isinstance(v, Tensor) and v.requires_grad]
    ones: list[Tensor] = []

    def step() -> None:
        results = [r for r in pytree.tree_leaves(run()) if isinstance(r, Tensor) and r.requires_grad]
        if not results or not leaves:
            return
        if not ones:
            ones.extend(torch.ones_like(r) for r in results)
        torch.autograd.grad(results, leaves, ones, allow_unused=True)

    return step


def _numeric_error(program: nn.Module, reference: nn.Module, inputs: Sequence[Any]) -> float | None:
    """Return the largest relative error of a program's results; None if they are not floating-point numbers.

    Both begin with the same random numbers. Whether the error is allowed is decided by verification.
    """
    with _same_random_numbers(), preserved_buffers(reference):
        actual = pytree.tree_leaves(program(*copy_tensors(list(inputs))))
    with _same_random_numbers(), preserved_buffers(reference):
        expected = pytree.tree_leaves(reference(*copy_tensors(list(inputs))))
    errors = [
        relative_error(a, e)
        for a, e in zip(actual, expected, strict=True)
        if isinstance(a, Tensor) and isinstance(e, Tensor) and e.dtype.is_floating_point
    ]
    return max(errors) if errors else None


@contextlib.contextmanager
def _same_random_numbers() -> Generator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class _Pair(nn.Module):
    """Two parts of two operations each, the second of which reads the result of the first."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x) * 0.5) + 0.25
