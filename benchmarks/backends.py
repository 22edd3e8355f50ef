"""Compilers through dovetail against the same compilers on the whole model, torch.compile and eager.

    python -m benchmarks.backends [--models ...] [--methods ...] [--repeat 12] [--cold ...] [--write FILE]

Steady: one process for each method, in turns of a few calls, medians. First result: one process for each method and model,
with empty caches, from the call that compiles to the first result, imports of the compiler included; capturing counts.
What a method gives is compared with eager before it is measured. "mixture" is by region: the model is cut into blocks,
each measured with every backend, and into regions as large as one backend takes them, and the fastest of that is used.
A call that takes more than two seconds is timed once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from benchmarks.backends_models import LARGE, Args, alone, build
from benchmarks.outline import machine
from benchmarks.results import write_section

FOREIGN = ("onnxruntime", "openvino", "tvm", "xla")
TITLE = "Other compilers, through dovetail and on the whole model"
# There is no way of XLA's own for torch modules that runs with every torch: torchax does not import with 2.13.
ALONE = ("onnxruntime", "openvino", "tvm")
METHODS = ("torch.compile", *FOREIGN, *(f"{name} alone" for name in ALONE), "mixture")
TOLERANCE = 2e-4


def compiled(method: str, model: nn.Module, args: Args) -> Callable[..., Any]:
    if method == "eager":
        return model
    if method == "torch.compile":
        return torch.compile(model)
    if method.endswith(" alone"):
        return alone(method.removesuffix(" alone"), model, args)
    import dovetail

    if method == "mixture":
        from benchmarks.backends_mixing import mixture

        return mixture(model, args, ("openvino", "onnxruntime"))
    return dovetail.compile(model, args, backends=[method])


def cold(method: str, name: str) -> dict[str, Any]:
    """Seconds from the call that compiles to the first result, in this process."""
    model, args = build(name)
    start = time.perf_counter()
    with torch.no_grad():
        compiled(method, model, args)(*args)
    return {"seconds": time.perf_counter() - start}


def cold_apart(method: str, name: str, bytecode: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DOVETAIL_CACHE_DIR": f"{folder}/dovetail",
            "PYTHONPYCACHEPREFIX": bytecode,
            "PYTHONDONTWRITEBYTECODE": "",
        }
        command = [sys.executable, "-m", "benchmarks.backends", "--one", method, "--models", name]
        ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=900)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": (ran.stderr.strip().splitlines() or ["?"])[-1]}


def serve(method: str, name: str) -> None:
    """Compile, then time as many calls as each line of the input asks for; one line of JSON for each."""
    model, args = build(name)
    with torch.no_grad():
        run = compiled(method, model, args)
        _compare(model(*args), run(*args))
        print(json.dumps([_once(run, args)]), flush=True)
        for line in sys.stdin:
            print(json.dumps([_once(run, args) for _ in range(int(line))]), flush=True)


_CALLS, _SLOW = 3, 2.0
"""How many calls of a turn count, and after how many seconds a call is not made again."""


class Worker:
    """One method in a process of its own, which does nothing between its turns: pools of threads do not meet."""

    def __init__(self, method: str, name: str, command: list[str] | None = None) -> None:
        command = command or [
            sys.executable,
            "-m",
            "benchmarks.backends",
            "--serve",
            method,
            "--models",
            name,
        ]
        pipe = subprocess.PIPE
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._output, text=True)
        self.times: list[float] = []
        self.error = ""
        first = self._answer() or []
        self.slow = max(first, default=0.0) > _SLOW
        if self.slow:
            self.times = first

    def turn(self) -> None:
        assert self._process.stdin
        # The first call of a turn finds the caches as others left them.
        try:
            print(1 + _CALLS, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.error = f"its process ended with {self._process.wait()}"
            return
        self.times += (self._answer() or [])[-_CALLS:]

    def close(self) -> str:
        """End the process; what it said last."""
        self._process.communicate()
        self._output.seek(0)
        return (self._output.read().strip().splitlines() or [""])[-1]

    def _answer(self) -> list[float] | None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("["):
                return json.loads(line)
        self.error = f"its process ended with {self._process.wait()}"
        return None


def steady(name: str, methods: list[str], repeat: int) -> dict[str, float | str]:
    """Median milliseconds of each method, all in turns, or why it has none."""
    workers = {method: Worker(method, name) for method in ["eager", *methods]}
    for _ in range(repeat):
        for worker in workers.values():
            if not worker.error and not worker.slow:
                worker.turn()
    timings: dict[str, float | str] = {}
    for method, worker in workers.items():
        printed = worker.close()
        timings[method] = worker.error or statistics.median(worker.times) * 1e3
        if worker.error or method == "mixture":
            print(f"{name}, {method}: {worker.error} {printed}", file=sys.stderr, flush=True)
    return timings


def _once(run: Callable[..., Any], args: Args) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def _compare(expected: Any, actual: Any) -> None:
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=False)
    for a, b in pairs:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            error = ((a - b).norm() / a.norm()).item()
            if not error < TOLERANCE:
                raise ValueError(f"off by {error:.1e} of the size of the result")


def _cells(timings: dict[str, float | str], methods: list[str], form: str) -> str:
    numbers = [v for k, v in timings.items() if isinstance(v, float) and k != "eager"]
    best = min(numbers, default=0.0)
    cells: list[str] = []
    for method in methods:
        value = timings.get(method, "")
        text = format(value, form) if isinstance(value, float) else ("–" if value else "")
        cells.append(f"**{text}**" if value == best else text)
    return " | ".join(cells)


def main() -> int:
    from dovetail import zoo

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[*LARGE, *zoo.names()])
    parser.add_argument("--cold", nargs="*", default=list(LARGE), help="models whose first result is timed")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(cold(options.one, options.models[0])))
        return 0
    if options.serve:
        serve(options.serve, options.models[0])
        return 0
    lines = [*_steady_rows(options), "", *_cold_rows(options)]
    report = "\n".join([*lines, "", f"CPU; {machine()}", ""])
    print(report)
    if options.write:
        write_section(options.write, TITLE, report)
    return 0


def _steady_rows(options: argparse.Namespace) -> list[str]:
    columns = ["eager", *options.methods]
    lines = ["Milliseconds per call, in turns:", "", f"| model | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name in options.models:
        timings = steady(name, options.methods, options.repeat)
        lines.append(f"| {name} | {_cells(timings, columns, '.2f')} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _cold_rows(options: argparse.Namespace) -> list[str]:
    columns = list(options.methods)
    lines = ["Seconds to the first result, caches empty:", "", f"| model | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    with tempfile.TemporaryDirectory() as bytecode:
        if options.cold:
            for method in columns:
                cold_apart(method, "mlp", bytecode)
        for name in options.cold:
            rows = {m: cold_apart(m, name, bytecode) for m in columns}
            timings = {m: r.get("seconds", r.get("error", "")) for m, r in rows.items()}
            lines.append(f"| {name} | {_cells(timings, columns, '.1f')} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    sys.exit(main())
