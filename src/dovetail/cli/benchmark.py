"""`bench`: a model as it is, by torch.compile and by dovetail with each backend, verified and timed interleaved."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
import torch.utils._pytree as pytree
import typer
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.cli.command import BackendNames, Model
from dovetail.cli.console import Console
from dovetail.cli.entry_point import FAILURE, SUCCESS
from dovetail.cli.model_source import LoadedModel, ModelSource
from dovetail.cli.program_commands import load_model
from dovetail.errors import InvalidArgument
from dovetail.fusion.ledger import explain
from dovetail.ir.text_tables import counted, format_seconds
from dovetail.lowering.backend_protocol import Backend, resolve, why_unusable
from dovetail.lowering.failures import one_line
from dovetail.lowering.lower import lower
from dovetail.numerics.tolerance import Tolerance
from dovetail.outlining.region import regions
from dovetail.runtime.compile import compile
from dovetail.tuning.decisions import Spread
from dovetail.tuning.model_programs import EAGER, TORCH_COMPILE, ModelPrograms, is_decided
from dovetail.tuning.preparation import searched_backends
from dovetail.tuning.timing import Comparison, Interleaved, Run, Timer, compare, noise_of, recorded, spread_of

_ROUNDS, _MAX_ROUNDS = 5, 400
_TOO_NOISY = 0.5
_INDUCTOR = (TORCH_COMPILE, "inductor", "aoti")
"""What uses Inductor, whose start is once in a process."""


@dataclass
class BenchmarkRow:
    """One way to run a model: seconds to the first result and of a call, and whether it computes the same.

    `compared` is the time relative to eager's, `error` the largest relative error, `failure` why it was not measured.
    `lowered` says how many regions the backend runs, and whether their code was compiled or read from the disk cache.
    """

    name: str
    build: Callable[[], nn.Module]
    tolerance: Tolerance = field(default_factory=Tolerance)
    first_seconds: float | None = None
    seconds: Spread | None = None
    compared: Comparison | None = None
    error: float | None = None
    failure: str = ""
    lowered: str = ""
    run: Run | None = None

    def cells(self) -> list[str]:
        """Return the row of the table."""
        first = "" if self.first_seconds is None else format_seconds(self.first_seconds)
        if self.seconds is None:
            return [self.name, first, "", "", "", "", self.failure]
        spread = f"{format_seconds(self.seconds.low)} – {format_seconds(self.seconds.high)}"
        speedup, verdict = "", ""
        if self.compared is not None:
            speedup, verdict = f"{1 / self.compared.ratio:.2f}x", self.compared.verdict
            speedup = f"{speedup} {verdict}" if verdict in ("tie", "undecided") else speedup
        error = "" if self.error is None else f"{self.error:.1e}" if self.error else "0"
        return [self.name, first, format_seconds(self.seconds.median), spread, speedup, error, self.lowered]

    def document(self) -> dict[str, Any]:
        """Return the row as values of JSON."""
        return {
            "name": self.name,
            "first_seconds": self.first_seconds,
            "seconds": None if self.seconds is None else asdict(self.seconds),
            "relative_to_eager": None if self.compared is None else asdict(self.compared),
            "error": self.error,
            "failure": self.failure or None,
            "lowered": self.lowered or None,
        }


class Benchmark:
    """Programs of one model, built one after another and then timed interleaved, on the model's device, without gradients."""

    def __init__(self, loaded: LoadedModel, console: Console) -> None:
        self.console = console
        tensors = [*loaded.model.parameters(), *loaded.model.buffers(), *pytree.tree_leaves(loaded.args)]
        tensors += pytree.tree_leaves(dict(loaded.kwargs))
        self.device = next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
        self.timer = Timer(self.device)
        self.loaded = loaded
        self._programs = ModelPrograms(loaded.model, loaded.args, loaded.kwargs, "inference", [], self.timer)

    def rows(
        self, backends: Sequence[Backend], *, cold: bool = False, torch_compile: bool = True
    ) -> list[BenchmarkRow]:
        """Return rows that are built and verified but not timed, eager first, then torch.compile."""
        model = self.loaded.model
        rows = [BenchmarkRow(EAGER, lambda: model)]
        if torch_compile:
            rows.append(BenchmarkRow(TORCH_COMPILE, lambda: _torch_compiled(model)))
        for backend in backends:
            bound = Tolerance(bound=backend.bound)
            build = self._builder(backend, cache=not cold)
            rows.append(BenchmarkRow(f"dovetail: {backend.name}", build, bound))
        with torch.no_grad():
            self._programs.step(model)()
            if any(name in row.name for row in rows for name in _INDUCTOR):
                with self.console.step("starting Inductor", is_long=True):
                    torch.compile(torch.nn.GELU())(torch.ones(64, device=self.device))
            for row in rows:
                caches = _empty_caches() if cold and row.name != EAGER else contextlib.nullcontext()
                with self.console.step(f"building {row.name}", is_long=True), caches:
                    self._prepare(row)
        return rows

    def _builder(self, backend: Backend, *, cache: bool) -> Callable[[], nn.Module]:
        loaded = self.loaded
        if loaded.is_fused and isinstance(loaded.model, GraphModule):
            graph = loaded.model
            return lambda: lower(graph, [backend], grad=False, cache=cache, progress=False)
        args, kwargs = loaded.args, loaded.kwargs
        return lambda: compile(loaded.model, args, kwargs, backends=[backend], cache=cache)

    def _prepare(self, row: BenchmarkRow) -> None:
        start = time.perf_counter()
        try:
            module = row.build()
            run = self._programs.step(module)
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            row.first_seconds = time.perf_counter() - start
            if module is not self.loaded.model:
                row.lowered = _how_lowered(module)
                row.error = self._programs.verify(module, row.tolerance)
            row.run = recorded(run, self.device) if row.name == EAGER else run
        except Exception as error:
            if row.name == EAGER:
                raise
            row.failure = one_line(error).removeprefix("InvalidProgram: ")
        finally:
            torch.compiler.reset() if row.name == TORCH_COMPILE and row.failure else None

    def time(self, rows: Sequence[BenchmarkRow], seconds: float) -> float:
        """Time what runs, in rounds until all are decided or the time is over, and return the noise of the machine."""
        measured = [row for row in rows if row.run is not None]
        runs = [row.run for row in measured if row.run is not None]
        with torch.no_grad(), self.console.step("timing calls, interleaved", is_long=True):
            interleaved = Interleaved([*runs, runs[0]], self.timer)
            until = time.monotonic() + seconds
            interleaved.sample(_ROUNDS)
            while time.monotonic() < until and len(interleaved.samples[0]) < _MAX_ROUNDS:
                if len(interleaved.samples[0]) > 4 * _ROUNDS and is_decided(interleaved.samples):
                    break
                interleaved.sample(_ROUNDS, until)
        *samples, again = interleaved.samples
        noise = noise_of(samples[0], again)
        for row, own in zip(measured, samples, strict=True):
            row.seconds = spread_of(own)
            row.compared = None if row.name == EAGER else compare(own, samples[0], noise)
        return noise


def _torch_compiled(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model)
    return compiled


def _how_lowered(module: nn.Module) -> str:
    """Return how many regions a backend runs, and where their code is from; empty for what has none."""
    graphs = [module] if isinstance(module, GraphModule) else getattr(module, "graphs", ())
    every = [region for gm in graphs for region in regions(gm)]
    if not every:
        return ""
    lowered = sum(region.backend is not None for region in every)
    entries = [entry for gm in graphs for entry in explain(gm).lowered]
    compiled = sum(entry.outcome == "compiled" for entry in entries)
    cached = sum(entry.outcome == "disk" for entry in entries)
    code = ", ".join(
        text
        for text in (f"{compiled} compiled" * bool(compiled), f"{cached} from the cache" * bool(cached))
        if text
    )
    reason = next((entry.reason for entry in entries if entry.reason and not lowered), "")
    return ", ".join(filter(None, (f"{lowered} of {len(every)}", code or reason)))


@contextlib.contextmanager
def _empty_caches() -> Generator[None]:
    """Give Inductor and Triton folders of their own that are empty."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name) for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def chosen_backends(names: Sequence[str] | None, device: torch.device) -> tuple[Backend, ...]:
    """Return the backends of some names, by default all that can be used here and do not change precision."""
    if names is None:
        return searched_backends(None, device)
    backends = resolve(list(names))
    for backend in backends:
        missing = why_unusable(backend)
        if missing is not None:
            raise InvalidArgument(f"backend '{backend.name}' cannot be used here: {missing}.")
    return backends


def noise_text(noise: float) -> str:
    """Return how far a run differs from itself on this machine, in words."""
    if noise > _TOO_NOISY:
        return "the machine is too busy now to compare anything: a run differs from itself by more than half"
    return f"a run differs from itself by {100 * noise:.1f} %"


COLUMNS = ("program", "first result", "a call", "95 % of the median", "speedup", "error", "regions")
RIGHT = (1, 2, 3, 4, 5)
OPTIONAL = (3, 5, 1)


def bench(
    console: Console,
    source: ModelSource,
    model: Model,
    backend: BackendNames = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long calls are timed at most.")] = 10.0,
    torch_compile: Annotated[bool, typer.Option("--torch-compile/--no-torch-compile", help="Measure torch.compile too.")] = True,
    cold: Annotated[bool, typer.Option("--cold", help="Compile everything: use no disk caches for first results.")] = False,
) -> int:  # fmt: skip
    """Measure a model by every usable backend.

    Eager, torch.compile, and dovetail with each backend that can be used here, verified against eager.
    The first result includes compiling; the start of Inductor, once in a process, is not counted. Calls are timed in
    turns, without gradients. A file that is fused already is lowered as it is. Exits with 1 if a program fails or
    computes something else.
    """  # fmt: skip
    if source.train:
        raise InvalidArgument("bench measures inference; `tune --train` measures training steps.")
    resolve(backend or ())
    loaded = load_model(console, source, model)
    benchmark = Benchmark(loaded, console)
    backends = chosen_backends(backend, benchmark.device)
    console.text(f"{loaded}\n", style="strong")
    rows = benchmark.rows(backends, cold=cold, torch_compile=torch_compile)
    noise = benchmark.time(rows, seconds)
    failed = [number for number, row in enumerate(rows) if row.failure]
    console.table(COLUMNS, [row.cells() for row in rows], right=RIGHT, bad=failed, optional=OPTIONAL)
    caches = "no disk caches" if cold else "disk caches as they were"
    console.text(
        f"\n{counted(torch.get_num_threads(), 'thread')}, {caches}; {noise_text(noise)}",
        style="faint",
    )
    console.document(
        {**loaded.summary(), "device": str(benchmark.device), "threads": torch.get_num_threads(),
         "noise": noise, "cold": cold, "programs": [row.document() for row in rows]}
    )  # fmt: skip
    return FAILURE if failed else SUCCESS
