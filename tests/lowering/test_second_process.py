"""Inductor's code on disk: a second process with the same program builds no kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent

# Lowers for calls without and with gradients, and tells what came of it.
PROGRAM = """
import json, os, sys
import torch, dovetail
from dovetail.ir.meta_keys import LOWERING
from dovetail.lowering.lower import lower

device, cache = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
x, w = torch.randn(3, 4, device=device), torch.randn(4, 4, device=device)

def f(x, w):
    return torch.tanh(torch.relu(x @ w) * 2)

gm = dovetail.capture(f, (x, w))
gm = dovetail.outline(gm, ["matmul", "relu", "mul", "tanh"], kind="block")
folders = [os.environ.get(n) for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
lowered = lower(gm, "inductor", cache=cache, on_error="raise")
with torch.no_grad():
    forward = torch.allclose(lowered(x, w), f(x, w), atol=1e-4)
x.requires_grad_(), w.requires_grad_()
loss = lowered(x, w).sum()
first = torch.autograd.grad(loss, [x, w], retain_graph=True)
second = torch.autograd.grad(loss, [x, w])
wanted = torch.autograd.grad(f(x, w).sum(), [x, w])
same = [torch.allclose(a, b, atol=1e-4) and torch.equal(a, c) for a, b, c in zip(first, wanted, second)]
now = [os.environ.get(n) for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
events = [(e.outcome, e.reason) for e in gm.meta.get(LOWERING, lowered.meta[LOWERING]).events]
print(json.dumps({"right": [forward, *same], "events": events, "put back": now == folders}))
"""


def run(device: str, folder: Path, log: Path, refused: str = "nothing") -> tuple[dict[str, Any], list[str]]:
    """What the program told, and the C++ files that were compiled meanwhile; some options may be refused."""
    compiler = folder / "cxx"
    if not compiler.exists():  # one that is written again would be another compiler
        compiler.write_text(
            f'#!/bin/sh\ncase "$*" in *-m{refused}*) echo "unknown option" >&2; exit 1;; esac\n'
            'echo "$@" >> "$CXX_LOG"\nexec g++ "$@"\n'
        )
        compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, str(folder / "cache")],
        env={**os.environ, "CXX": str(compiler), "CXX_LOG": str(log), "TMPDIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines() if log.exists() else []
    return json.loads(done.stdout.splitlines()[-1]), [line for line in lines if ".cpp " in line]


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_second_process_builds_no_kernel(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    report, built = run(device, tmp_path, tmp_path / "first")
    assert report == {"right": [True] * 3, "events": [["compiled", ""]] * 2, "put back": True}
    assert built or device == "cuda"

    report, built = run(device, tmp_path, tmp_path / "second")
    assert report == {"right": [True] * 3, "events": [["disk", ""]] * 2, "put back": True}
    assert built == []


@pytest.mark.long
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="there is nothing to refuse")
def test_a_compiler_that_is_older_than_the_processor_is_no_hindrance(tmp_path: Path) -> None:
    report, built = run("cpu", tmp_path, tmp_path / "first", refused="avx512")
    assert report == {"right": [True] * 3, "events": [["compiled", ""]] * 2, "put back": True}
    assert any("-mavx2" in line for line in built)
    report, built = run("cpu", tmp_path, tmp_path / "second")
    assert report["events"] == [["disk", ""]] * 2
    assert built == []


@pytest.mark.long
def test_a_library_that_was_being_written_when_a_process_was_killed_is_built_again(tmp_path: Path) -> None:
    run("cpu", tmp_path, tmp_path / "first")
    libraries = list((tmp_path / "cache" / "tools").rglob("*.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[:100])
    report, built = run("cpu", tmp_path, tmp_path / "second")
    assert report["right"] == [True] * 3
    assert all(outcome in ("disk", "compiled") for outcome, _ in report["events"])
    assert built
