"""After a fork the child uses nothing that the parent compiled, and does not wait for threads that are not there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"openvino": "openvino", "onnxruntime": "onnxruntime", "tvm": "tvm", "xla": "jaxlib"}
QUICK = ("openvino",)
CASES = (
    "calls",
    "calls the graph",
    "calls in another way",
    "compiles",
    "trains",
    "calls while others compile",
    "compiles while others compile",
    "loads data",
    "parent",
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.mark.parametrize(
    "backend",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.long)
        for n in (*PACKAGES, "inductor", "torchscript", "eager")
    ],
)
def test_a_forked_child(backend: str, tmp_path: Path) -> None:
    if backend in PACKAGES and importlib.util.find_spec(PACKAGES[backend]) is None:
        pytest.skip(f"{PACKAGES[backend]} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.lowering.forked", backend],
        cwd=ROOT,
        # With nothing in its cache Inductor builds in threads, which are not in a child.
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == [f"{case} right" for case in CASES]
