"""Tuned programs against eager, torch.compile, ONNX Runtime and OpenVINO on the same model.

`python -m benchmarks.tune --out build/tune --write benchmarks/RESULTS.md` tunes what has no result in the folder yet, so that
it can be interrupted, and writes the tables of all results there. Every model is tuned in a process of its own. What is
compared then runs in another one, interleaved, the tuned program compiled and sampled twice (A/A): the same program differs
by up to 30 % between two processes, by where its weights happen to be in memory, and less within one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.backends_models import alone
from benchmarks.results import write_section
from benchmarks.tune_models import FORTY, TWELVE, example
from dovetail.tuning.timing import Comparison, Interleaved, Timer, compare, noise_of

TITLE = "Tuned programs against eager, torch.compile and other compilers"
BACKENDS = ("inductor", "onnxruntime", "openvino")
TUNED, AGAIN = "tuned", "tuned again"
METHODS = ("eager", "torch.compile", "onnxruntime", "openvino", TUNED, AGAIN)


def method(name: str, model: nn.Module, args: tuple[Any, ...], plan: str) -> Callable[..., Any]:
    """Return what runs a model by a method."""
    import dovetail

    if name == "eager":
        return model
    if name == "torch.compile":
        return torch.compile(model)
    if name in (TUNED, AGAIN):
        return dovetail.compile(model, args, plan=dovetail.Plan.load(plan), backends=[])
    try:
        return alone(name, model, args)
    except Exception as error:
        print(f"{name} alone: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return dovetail.compile(model, args, backends=[name], pipeline=whole())


def whole() -> Any:
    from dovetail.runtime.presets import whole_graph

    return whole_graph()


def measure_all(name: str, folder: Path, turns: int) -> None:
    """Write samples of all methods, one of each in every turn."""
    model, args = example(name)
    plan = str(folder / f"{_file(name)}.plan.json")
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, str] = {}
    with torch.no_grad():
        for m in METHODS:
            try:
                run = method(m, model, args, plan)
                run(*args)
                runs[m] = partial(run, *args)
            except Exception as error:
                errors[m] = f"{type(error).__name__}: {error}"[:300]
        interleaved = Interleaved(list(runs.values()), Timer(torch.device("cpu")))
        interleaved.sample(turns)
    samples: dict[str, list[float]] = {m: [] for m in METHODS}
    samples |= dict(zip(runs, interleaved.samples, strict=True))
    (folder / f"{_file(name)}.result.json").write_text(json.dumps({"samples": samples, "errors": errors}))


def tune_one(name: str, folder: Path, budget: float) -> None:
    """Tune one model; write the plan and what the search did."""
    from dovetail.tuning.preparation import prepare
    from dovetail.tuning.store import Store
    from dovetail.tuning.tune import run_search

    model, args = example(name)
    start = time.perf_counter()
    prepared = prepare(model, args, None, list(BACKENDS))
    preparing = time.perf_counter() - start
    with Store(folder / f"{_file(name)}.db") as store:
        searched = run_search(prepared, store, budget=budget)
    searched.plan.save(folder / f"{_file(name)}.plan.json")
    report, outcome = searched.report, searched.outcome
    winner = outcome.winner if outcome is not None else None
    row = {
        "programs_log10": report.programs_log10,
        "states": report.states,
        "blocks": report.blocks,
        "options": report.options,
        "measured": report.measured,
        "failures": report.failures,
        "compilations": report.compilations,
        "undecided": report.undecided,
        "confirmed": report.is_confirmed,
        "noise": report.noise,
        "correlation": report.rank_correlation,
        "phases": report.phases,
        "preparing": preparing,
        "seconds": time.perf_counter() - start,
        "winner": winner.program.name if winner is not None else "",
        "regions": sum(len(c.division.regions) for c in winner.choices.values()) if winner is not None else 0,
    }
    (folder / f"{_file(name)}.search.json").write_text(json.dumps(row))


def compared(row: dict[str, Any], other: str) -> Comparison:
    """Return the time of the tuned program relative to another's."""
    samples = row["samples"]
    noise = noise_of(samples[TUNED], samples[AGAIN])
    return compare(samples[TUNED], samples[other], noise)


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def best_of(row: dict[str, Any]) -> str:
    """Return the fastest of the methods without tuning."""
    others = [m for m in METHODS if m not in (TUNED, AGAIN) and row["samples"][m]]
    return min(others, key=lambda m: statistics.median(row["samples"][m]))


def rows_of(names: Sequence[str], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        path = folder / f"{_file(name)}.result.json"
        search = folder / f"{_file(name)}.search.json"
        if path.exists() and search.exists():
            yield name, json.loads(path.read_text()) | {"search": json.loads(search.read_text())}


def model_table(folder: Path) -> list[str]:
    lines = [
        "| model | eager ms | torch.compile | ONNX Runtime | OpenVINO | tuned | noise | tuned / best of the others | "
        "verdict | program |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows_of(TWELVE, folder):
        comparison = compared(row, best_of(row))
        cells = [_ms(row, m) for m in METHODS[:-1]]
        interval = f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}] of {best_of(row)}"
        winner = row["search"]["winner"].replace("|", "/")
        lines.append(
            f"| {name} | {' | '.join(cells)} | {comparison.noise:.1%} | {interval} | {comparison.verdict} | {winner} |"
        )
    return lines


def search_table(folder: Path) -> list[str]:
    lines = [
        "| model | programs at least | states | blocks | region × backend | compilations | measurements | failures | "
        "rank correlation | s | confirmed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows_of(TWELVE, folder):
        s = row["search"]
        correlation = "" if s["correlation"] is None else f"{s['correlation']:.2f}"
        lines.append(
            f"| {name} | 10^{s['programs_log10']:.0f} | {s['states']} | {s['blocks']} | {s['options']} | "
            f"{s['compilations']} | {s['measured']} | {s['failures']} | {correlation} | {s['seconds']:.0f} | "
            f"{'yes' if s['confirmed'] else 'no'} |"
        )
    return lines


def _ms(row: dict[str, Any], name: str) -> str:
    samples = row["samples"][name]
    return f"{statistics.median(samples) * 1e3:.3f}" if samples else "fails"


def subgraph_lines(folder: Path) -> list[str]:
    rows = list(rows_of(FORTY, folder))
    if not rows:
        return []
    against = {m: [compared(row, m) for _, row in rows if row["samples"][m]] for m in METHODS[:4]}
    best = [compared(row, best_of(row)) for _, row in rows]
    compiled = [
        compare(row["samples"]["torch.compile"], row["samples"]["eager"], compared(row, "eager").noise)
        for _, row in rows
    ]
    lines = [
        f"{len(rows)} subgraphs of 24 operations. Slower than eager beyond the noise: "
        f"{sum(c.verdict == 'slower' for c in against['eager'])} tuned, "
        f"{sum(c.verdict == 'slower' for c in compiled)} by torch.compile. "
        f"Slower than the best of the four: {sum(c.verdict == 'slower' for c in best)}, faster: "
        f"{sum(c.verdict == 'faster' for c in best)}, tie: {sum(c.verdict == 'tie' for c in best)}, "
        f"undecided: {sum(c.verdict == 'undecided' for c in best)}.",
        "",
        "| geometric mean of the speed of tuned over | |",
        "|---|---|",
    ]
    for name, comparisons in against.items():
        lines.append(f"| {name} | {math.exp(-statistics.mean(math.log(c.ratio) for c in comparisons)):.2f} |")
    lines += [
        "",
        "| subgraph | eager ms | torch.compile | ONNX Runtime | OpenVINO | tuned | noise | / best | program |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, row in rows:
        comparison = compared(row, best_of(row))
        cells = " | ".join(_ms(row, m) for m in METHODS[:-1])
        lines.append(
            f"| {name} | {cells} | {comparison.noise:.1%} | {comparison.ratio:.3f} {comparison.verdict} | "
            f"{row['search']['winner']} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/tune"))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--models", nargs="*", default=[*TWELVE, *FORTY])
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--subgraph-budget", type=float, default=45.0)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--tune", help="tune one model")
    parser.add_argument("--compare", help="measure one model that was tuned")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compare:
        measure_all(options.compare, options.out, options.turns)
        return 0
    if options.tune:
        tune_one(options.tune, options.out, options.budget)
        return 0
    for name in options.models:
        budget = options.subgraph_budget if "/" in name else options.budget
        steps = {
            "search": ["--tune", name, "--budget", str(budget)],
            "result": ["--compare", name, "--turns", str(options.turns)],
        }
        for kind, arguments in steps.items():
            if not (options.out / f"{_file(name)}.{kind}.json").exists():
                command = [sys.executable, "-m", "benchmarks.tune", *arguments, "--out", str(options.out)]
                status = subprocess.run(command, check=False).returncode
                if status:
                    print(f"{name}: {arguments[0]} ended with {status}", file=sys.stderr, flush=True)
                    break
        if name not in dict(rows_of([name], options.out)):
            continue
        row = dict(rows_of([name], options.out))[name]
        comparison = compared(row, best_of(row))
        print(
            f"{name}: {comparison.ratio:.3f} {comparison.verdict} of {best_of(row)} (noise {comparison.noise:.1%}), "
            f"{row['search']['winner']}",
            flush=True,
        )
    if options.write is not None:
        write_section(options.write, TITLE, text(options.out))
    return 0


def text(folder: Path) -> str:
    """Return the section of the results."""
    from dovetail.tuning.environment import current_environment

    here = current_environment()
    packages = ", ".join(f"{n} {v}" for n, v in here.packages if n in ("onnxruntime", "openvino"))
    head = [
        "`make bench-tune` measures this: all programs of a model in one process, interleaved, every sample the median of",
        "several calls in the steady state; the tuned program is compiled twice, which gives the noise (A/A). ONNX Runtime",
        "and OpenVINO run the whole model as their own documentation has it, without any guard.",
        "",
        f"Measured on {here.device}, {here.threads} threads, torch {here.torch}, {packages}.",
        "",
    ]
    return "\n".join(
        [*head, *model_table(folder), "", *search_table(folder), "", *subgraph_lines(folder), ""]
    )


if __name__ == "__main__":
    sys.exit(main())
