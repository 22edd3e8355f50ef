"""The first result of a second process: from a bundle, from the disk cache, and with empty caches.

    python -m benchmarks.warm_start [--models "Llama 16" ...] [--backends inductor ...] [--device cpu] [--turns 3] [--write FILE]

One process for each cell, after one that has written the bundle and the cache. Measured from `import dovetail`, torch and the
model being there, to the first result; a bundle is opened with a disk cache that is empty.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile_models import MODELS, ONE_OPERATION
from benchmarks.compile_models import build as build_model
from benchmarks.results import write_section

TITLE = "First result of a second process"
BACKENDS = ("inductor", "onnxruntime", "openvino")
STARTS = ("cold", "cache", "bundle")
_UNUSED = ("torch._inductor.compile_fx", "torch._dynamo", "torch.export.exported_program", "sympy")


def start(kind: str, name: str, backend: str, device: str, folder: Path) -> dict[str, Any]:
    """Compile in this process, and return the seconds to the first result and what was imported for it."""
    model, args = build_model(name, device)
    bundle, cache = folder / "bundle", folder / ("again" if kind == "bundle" else "cache")
    given: dict[str, Any] = {"bundle": bundle} if kind == "bundle" else {"backends": backend}
    before = set(sys.modules)
    with torch.no_grad():
        model(*args)  # the libraries' own start is not the compiler's
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        import dovetail

        fast = dovetail.compile(model, args, cache=cache, on_error="raise", **given)
        compiled = time.perf_counter() - begun
        fast(*args)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        imported = [name for name in _UNUSED if name in sys.modules and name not in before]
        if kind == "cold":
            dovetail.bundle(fast, bundle)
    outcomes = {event.outcome for event in dovetail.explain(fast).lowered}
    return {
        "seconds": seconds,
        "call": seconds - compiled,
        "outcomes": sorted(outcomes),
        "imported": imported,
    }


def start_apart(kind: str, what: list[str], folder: str, bytecode: str) -> dict[str, Any]:
    """The same in a new process."""
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor-{kind}",
        "TRITON_CACHE_DIR": f"{folder}/triton-{kind}",
        "PYTHONPYCACHEPREFIX": bytecode,
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-m", "benchmarks.warm_start", "--one", kind, "--folder", folder, *what]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": "; ".join(ran.stderr.strip().splitlines()[-1:])}


def _row(name: str, backend: str, device: str, turns: int, bytecode: str) -> str:
    what = ["--models", name, "--backends", backend, "--device", device]
    cells: list[str] = []
    imported = ""
    with tempfile.TemporaryDirectory() as folder:
        for kind in STARTS:
            runs = [start_apart(kind, what, folder, bytecode) for _ in range(1 if kind == "cold" else turns)]
            failed = [run["error"] for run in runs if "error" in run]
            if failed:
                return f"| {name} | {backend} | {failed[0]} |"
            cells.append(f"{statistics.median(run['seconds'] for run in runs):.2f}")
            if kind == "bundle":
                cells.append(f"{statistics.median(run['call'] for run in runs):.3f}")
                imported = ", ".join(runs[0]["imported"]) or "none"
        size = (Path(folder) / "bundle").stat().st_size / 2**20
    return f"| {name} | {backend} | {' | '.join(cells)} | {size:.1f} | {imported} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="*", default=["Llama 16", "BERT 12", "ResNet-50"], choices=[ONE_OPERATION, *MODELS]
    )
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.one:
        (name,), (backend,) = options.models, options.backends
        print(json.dumps(start(options.one, name, backend, options.device, options.folder)))
        return 0
    lines = [
        "Seconds from `import dovetail` to the first result; the model is there, torch imported. From the disk cache and from a",
        f"bundle: medians of {options.turns} processes.",
        "",
        "| model | backend | caches empty | disk cache | bundle | of it the call | MiB of the bundle | imported for it¹ |",
        "|---" * 8 + "|",
    ]
    with tempfile.TemporaryDirectory() as bytecode:
        for name in options.models:
            for backend in options.backends:
                lines.append(_row(name, backend, options.device, options.turns, bytecode))
                print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"¹ of {', '.join(f'`{each}`' for each in _UNUSED)}"]
    from benchmarks.outline import machine

    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    report = "\n".join([*lines, "", f"{where}; {machine()}", ""])
    print(report)
    if options.write:
        write_section(options.write, f"{TITLE}, {options.device}", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
