"""Cold start and steady state of compiled models against torch.compile and its regional forms.

    python -m benchmarks.compile [--layers 4 16 48] [--models "Llama 16" ...] [--device cpu] [--repeat 30] [--write FILE]

Cold: one process for each method and model, with caches of its own that are empty; from the call that compiles to the
first result, imports of the compilers included. Each method is rehearsed once beforehand with a small model, so that
Python's byte code is there as after an installation, and files are in memory for all alike. Depths of the zoo's Llama
against all regional forms, other models against torch.compile, `--turns` times in turns, medians. Steady: all methods in one
process, in turns, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.compile_models import MODELS, ONE_OPERATION
from benchmarks.compile_models import build as build_model
from benchmarks.outline import machine
from benchmarks.results import write_section

COLD = ("torch.compile", "layer by layer", "nested_compile_region", "dovetail")
MODES = ("reduce-overhead", "max-autotune")
STEADY = {"cpu": ("eager", *COLD), "cuda": ("eager", *COLD, MODES[0])}
TITLE = "Cold start and steady state of compiled models"


def build(layers: int, device: str, seq: int) -> tuple[nn.Module, torch.Tensor]:
    from dovetail.zoo import llama

    torch.manual_seed(0)
    if device == "cuda":
        config = llama.Config(
            vocab=32000, width=2048, hidden=5632, layers=layers, heads=32, kv_heads=8, seq=seq
        )
    else:
        config = llama.Config(vocab=1000, width=512, hidden=1408, layers=layers, heads=8, kv_heads=4, seq=seq)
    model = llama.Llama(config).eval().to(device)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    return model, torch.randint(0, config.vocab, (1, seq), device=device)


def compiled(method: str, model: nn.Module, *args: Any) -> Callable[..., Any]:
    if method == "eager":
        return model
    if method == "dovetail":
        import dovetail

        return dovetail.compile(model, args)
    if method == "layer by layer":
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile()
        return model
    if method == "nested_compile_region":
        kind: Any = type(model.layers[0])  # type: ignore[index]
        # A class of its own: the mark is on a function, and other methods use the same layers.
        marked = type(kind.__name__, (kind,), {})
        marked.forward = torch.compiler.nested_compile_region(_copied(kind.forward))
        for layer in model.layers:  # type: ignore[union-attr]
            layer.__class__ = marked
        return torch.compile(model)
    return torch.compile(model, mode=None if method == "torch.compile" else method)


def _copied(function: Any) -> Any:
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


def cold(method: str, model: nn.Module, args: tuple[Any, ...], device: str) -> dict[str, Any]:
    """Seconds from the call that compiles to the first result, in this process, and how much memory it took."""
    with torch.no_grad():
        model(*args)  # the libraries' own start is not the compiler's
        if device == "cuda":
            torch.cuda.synchronize()
        before = _peak_memory()
        start = time.perf_counter()
        run = compiled(method, model, *args)
        run(*args)
    if device == "cuda":
        torch.cuda.synchronize()
    timings: dict[str, Any] = {"seconds": time.perf_counter() - start}
    timings["MiB"] = (_peak_memory() - before) / 2**20
    if method == "dovetail":
        from dovetail.lowering.lowered_state import lowered_state_of

        events = [e for g in run.graphs for e in lowered_state_of(g).events]  # type: ignore[union-attr]
        timings["compilations"] = sum(e.outcome == "compiled" for e in events)
    return timings


def _peak_memory() -> int:
    """The largest size that this process had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cold_apart(method: str, what: list[str], device: str, bytecode: str) -> dict[str, Any]:
    """The same in a new process, for arguments that choose the model."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DOVETAIL_CACHE_DIR": f"{folder}/dovetail",
            "PYTHONPYCACHEPREFIX": bytecode,
            "PYTHONDONTWRITEBYTECODE": "",
        }
        env |= {"TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "benchmarks.compile", "--one", method, "--device", device, *what]
        ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": ran.stderr.strip().splitlines()[-1:]}


def steady(names: list[str], layers: int, device: str, seq: int, repeat: int) -> dict[str, float]:
    """Median milliseconds of each method, all in turns."""
    runs: dict[str, Callable[..., Any]] = {}
    ids = torch.empty(0)
    for method in names:
        model, ids = build(layers, device, seq)
        runs[method] = compiled(method, model, ids)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            for _ in range(3):
                run(ids)
        for _ in range(repeat):
            for name, run in runs.items():
                times[name].append(_once(run, ids, device))
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def _once(run: Callable[..., Any], ids: torch.Tensor, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(ids)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cold_rows(options: argparse.Namespace, seq: int, bytecode: str) -> list[str]:
    """A line for each depth; all methods are rehearsed first."""
    sized = ["--seq", str(seq), "--layers"]
    for method in options.methods:
        cold_apart(method, [*sized, "2"], options.device, bytecode)
    lines: list[str] = []
    for layers in options.layers:
        rows = {m: cold_apart(m, [*sized, str(layers)], options.device, bytecode) for m in options.methods}
        cells = [f"{r['seconds']:.1f}" if "seconds" in r else str(r["error"]) for r in rows.values()]
        lines.append(
            f"| {layers} | {' | '.join(cells)} | {rows.get('dovetail', {}).get('compilations', '')} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _model_rows(options: argparse.Namespace, bytecode: str) -> list[str]:
    """A line for each model, torch.compile and dovetail in turns."""
    methods = ("torch.compile", "dovetail")
    for method in methods:
        cold_apart(method, ["--models", ONE_OPERATION], options.device, bytecode)
    lines: list[str] = []
    least = 0.0
    for name in (ONE_OPERATION, *options.models):
        turns = [
            [cold_apart(method, ["--models", name], options.device, bytecode) for method in methods]
            for _ in range(options.turns)
        ]
        failed = [run["error"] for turn in turns for run in turn if "error" in run]
        if failed:
            lines.append(f"| {name} | {failed[0]} |")
            continue
        theirs, ours = (statistics.median(turn[i]["seconds"] for turn in turns) for i in range(2))
        memory = [statistics.median(turn[i]["MiB"] for turn in turns) for i in range(2)]
        least = least or theirs
        above = "" if theirs == least else f"{(ours - least) / (theirs - least):.2f}"
        cells = [f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}", above]
        cells += [str(turns[0][1]["compilations"]), *(f"{size:.0f}" for size in memory)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 16, 48])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=[ONE_OPERATION, *MODELS])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--seq", type=int)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--steady-layers", type=int, nargs="*", default=[16])
    parser.add_argument("--methods", nargs="*", default=list(COLD), choices=[*COLD, *MODES])
    parser.add_argument("--steady", nargs="*", choices=["eager", *COLD, *MODES])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    seq = options.seq or (512 if options.device == "cuda" else 64)
    if options.one:
        if len(options.models) == 1:
            model, args = build_model(options.models[0], options.device)
        else:
            model, ids = build(options.layers[0], options.device, seq)
            args = (ids,)
        print(json.dumps(cold(options.one, model, args, options.device)))
        return 0
    lines = ["Seconds to the first result, caches empty:", ""]
    with tempfile.TemporaryDirectory() as bytecode:
        if options.models:
            lines += [
                "| model | torch.compile | dovetail | ratio | above one operation¹ | compilations² | MiB³, torch.compile | dovetail |"
            ]
            lines += ["|---" * 8 + "|", *_model_rows(options, bytecode), ""]
        if options.layers:
            lines.append(f"| layers | {' | '.join(options.methods)} | compilations² |")
            lines.append("|---" * (len(options.methods) + 2) + "|")
            lines += _cold_rows(options, seq, bytecode)
    lines += [
        "",
        "¹ the ratio of what is above a torch.compile of one operation in the same run  ",
        "² bodies that dovetail's backend compiled  ",
        "³ growth of the largest size of the process",
        "",
        "Milliseconds per call, in turns:",
        "",
    ]
    names = STEADY[options.device] if options.steady is None else options.steady
    lines += [f"| layers | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for layers in options.steady_layers:
        timings = steady(list(names), layers, options.device, seq, options.repeat)
        lines.append(f"| {layers} | {' | '.join(f'{timings[n]:.2f}' for n in names)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    report = "\n".join([*lines, "", f"{where}; {machine()}", ""])
    print(report)
    if options.write:
        write_section(options.write, f"{TITLE}, {options.device}", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
