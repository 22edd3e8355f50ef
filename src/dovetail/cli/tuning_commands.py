"""Commands about plans and measurements: tune, worker, plan show, diff and check, measurements export and import."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.command import BackendNames, Model
from dovetail.cli.console import Console
from dovetail.cli.entry_point import FAILURE, INTERRUPTED, SUCCESS, write_error
from dovetail.cli.model_source import ModelSource
from dovetail.cli.program_commands import load_model, require_folder
from dovetail.errors import PlanMismatch, TuningError
from dovetail.ir.text_tables import counted
from dovetail.lowering.backend_protocol import resolve
from dovetail.tuning.decisions import GraphDecision
from dovetail.tuning.measurement_files import export_measurements, import_measurements
from dovetail.tuning.plan import Plan
from dovetail.tuning.tune import DryRun, tune
from dovetail.tuning.worker import run_worker

StoreName = Annotated[str, typer.Option(metavar="FILE|URL", help="The store: a file, or on PostgreSQL.", show_default=False)]  # fmt: skip
MeasurementFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of measurements, compressed if it ends in .gz.", show_default=False)]  # fmt: skip
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `tune` or `Plan.save` wrote.", show_default=False)]  # fmt: skip


def tune_model(
    console: Console,
    source: ModelSource,
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the plan is written.")] = Path("plan.json"),
    budget: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="How long is searched.")] = 300.0,
    store: Annotated[str | None, typer.Option(metavar="FILE|URL", help="Keep measurements in a file or on PostgreSQL, for later searches.")] = None,
    executor: Annotated[str, typer.Option(metavar="NAME", help="local, workers (started by `dovetail worker`), or ray (started on a Ray cluster).")] = "local",
    backend: BackendNames = None,
    memory: Annotated[int | None, typer.Option(min=1, metavar="BYTES", help="Peak bytes of a call beyond the weights.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the search.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured, and measure nothing.")] = False,
) -> int:  # fmt: skip
    """Search the fastest program of a model.

    It is found by measuring, and written as a plan, which `dovetail.compile(model, args, plan=...)` applies.
    Without --train the plan is for inference, with it for training steps. Ctrl-C ends the search: the plan has the best
    program so far, and the exit code is 130.
    """
    resolve(backend or ())
    require_folder(output)
    loaded = load_model(console, source, model)
    options: dict[str, Any] = {
        "backends": backend,
        "memory": memory,
        "seed": seed,
        "store": store,
        "budget": budget,
        "executor": executor,
    }
    if dry_run:
        with console.step("deriving the search space", is_long=True):
            dry: DryRun = tune(loaded.model, loaded.args, loaded.kwargs, dry_run=True, **options)
        console.text(str(dry))
        facts = ("measurements", "stored", "compilations", "seconds", "least_budget")
        console.document({**loaded.summary(), **{name: getattr(dry, name) for name in facts}})
        return SUCCESS
    with _interrupts() as interrupts, _options_in_messages():
        plan: Plan = tune(loaded.model, loaded.args, loaded.kwargs, **options)
    plan.save(output)
    console.text(f"{loaded}\n", style="strong")
    decisions = [d for by_scope in plan.graphs.values() for d in by_scope.values()]
    for decision in decisions:
        _show_choice(console, decision)
    console.text(f"\nwrote {output}: compile(model, args, plan={str(output)!r}) applies it")
    console.document(
        {**loaded.summary(), "output": str(output), "interrupted": bool(interrupts), "plan": json.loads(plan.to_json())}
    )  # fmt: skip
    if interrupts:
        write_error("interrupted; the plan has the best program so far")
        return INTERRUPTED
    return SUCCESS


def worker(
    console: Console,
    store: Annotated[str, typer.Option(metavar="STORE", help="File or database of the searches.", show_default=False)],
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where trials run.")] = "cpu",
    idle: Annotated[float | None, typer.Option(min=0.0, metavar="SECONDS", help="End when there was no trial for so long.")] = None,
) -> None:  # fmt: skip
    """Measure trials of searches that share a store.

    Takes trials of `tune(..., executor="workers")` until Ctrl-C or SIGTERM: what it is measuring then is given back. Trials
    are code: use stores only that you trust.
    """
    measured = run_worker(store, device=device, idle=idle, report=console.text)
    console.text(f"{counted(measured, 'trial')} measured")
    console.document({"measured": measured})


def _show_choice(console: Console, decision: GraphDecision) -> None:
    seconds = f", {decision.seconds}" if decision.seconds else ""
    console.text(f"{decision.choice}{seconds}")
    if decision.runner_up is not None:
        second = decision.runner_up
        console.text(
            f"  runner-up: {second.choice}{f', {second.seconds}' if second.seconds else ''}{_why(second.reason)}"
        )
    # Medians of different comparisons are not of the same minutes: the reasons have the ratios within one.
    for other in decision.rejected:
        console.text(f"  rejected: {other.choice}{_why(other.reason)}", style="faint")
    if decision.evidence:
        console.text(f"  {decision.evidence}", style="faint")


def _why(reason: str) -> str:
    return f": {reason}" if reason else ""


_OPTIONS = {"`budget`": "--budget", "`memory`": "--memory", "dry_run=True": "--dry-run"}
"""Options of `tune` as they are in messages of the library, each with that of the command."""


@contextmanager
def _options_in_messages() -> Generator[None]:
    """Raise errors of a search with the options of the command in their messages."""
    try:
        yield
    except TuningError as error:
        text = str(error)
        for name, option in _OPTIONS.items():
            text = text.replace(name, option)
        raise TuningError(text) from error


@contextmanager
def _interrupts() -> Generator[list[int]]:
    """Collect interrupts, which `tune` takes as the end of the search and does not pass on."""
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if callable(before):
            before(number, frame)

    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which gets no interrupts either
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def show_plan(console: Console, plan: PlanFile) -> None:
    """Show the decisions of a plan.

    What was chosen, its time, what came second, and what was rejected, each with the reason.
    """
    loaded = Plan.load(plan)
    console.text(loaded.explain())
    console.document(json.loads(loaded.to_json()) if console.as_json else None)


def diff_plans(console: Console, first: PlanFile, second: PlanFile) -> int:
    """Show what two plans decide differently.

    Exits with 1 if anything.
    """
    lines = Plan.load(first).diff(Plan.load(second)).splitlines()
    for line in lines:
        console.text(line)
    console.text(f"{counted(len(lines), 'decision')} differ" if lines else "no difference", style="strong")
    console.document({"first": str(first), "second": str(second), "equal": not lines, "differences": lines})
    return FAILURE if lines else SUCCESS


def check_plan(
    console: Console,
    source: ModelSource,
    plan: PlanFile,
    model: Model,
    structure: Annotated[bool, typer.Option("--structure", help="Ignore the environment: check that the decisions fit the model.")] = False,
) -> int:  # fmt: skip
    """Check that a plan fits a model.

    Every decision that the model needs must be in the plan and apply here. Exits with 1 if not.
    """
    loaded_plan = Plan.load(plan)
    loaded = load_model(console, source, model)
    problems: tuple[str, ...] = ()
    try:
        with console.step("checking the plan"):
            loaded_plan.check(loaded.model, loaded.args, loaded.kwargs, environment=not structure)
    except PlanMismatch as mismatch:
        problems = mismatch.problems
    for problem in problems:
        console.text(f"- {problem}", style="bad")
    state = (
        f"{plan} does not fit {model}: {counted(len(problems), 'problem')}"
        if problems
        else f"{plan} fits {model}"
    )
    console.text(state, style="strong")
    console.document(
        {**loaded.summary(), "plan": str(plan), "fits": not problems, "problems": list(problems)}
    )
    return FAILURE if problems else SUCCESS


def export_store(
    console: Console,
    path: MeasurementFile,
    store: StoreName,
    environment: Annotated[str | None, typer.Option(metavar="KEY", help="Only those of an environment.")] = None,
) -> None:  # fmt: skip
    """Write the measurements of a store to a file.

    Another store takes them in by `measurements import`.
    """
    with console.step("writing the measurements"):
        count = export_measurements(store, path, environment=environment)
    console.text(f"wrote {path}: {counted(count, 'measurement')}")
    console.document({"path": str(path), "measurements": count})


def import_into_store(console: Console, path: MeasurementFile, store: StoreName) -> None:
    """Add the measurements of a file to a store.

    Those that the store has are kept. Nothing is added from a file that is not whole.
    """
    with console.step("adding the measurements"):
        added = import_measurements(path, store)
    different = f" ({added.different} of them with other values)" if added.different else ""
    console.text(
        f"{counted(added.new, 'measurement')} added, {added.present + added.different} already there{different}"
    )
    console.document({"path": str(path), **vars(added)})
