"""Run as a script: a parent compiles and calls in threads, then children that it forks call, capture and compile.

Each line of standard output tells how a child ended: the case, and "right" or what went wrong.
"""

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dovetail
from dovetail.lowering.compile_region import COMPILING

_PATIENCE = 60.0


class Answers(Dataset[Tensor]):
    def __init__(self, run: Any, x: Tensor) -> None:
        self.run, self.x = run, x

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.run(self.x + index)


def ended(name: str, act: Callable[[], bool]) -> None:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            code = 0 if act() else 3
        except BaseException as error:  # whatever it is, the parent must know
            print(name, repr(error), flush=True)
            code = 4
        os._exit(code)
    start = time.monotonic()
    while time.monotonic() - start < _PATIENCE:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            print(name, "right" if code == 0 else f"ended with {code}", flush=True)
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(name, "hung", flush=True)


def main(backend: str) -> None:
    torch.set_num_threads(2)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    x = torch.randn(128, 64)
    fast = dovetail.compile(model, (x,), backends=[backend], cache=False)
    lowered = fast.graphs[0]

    def work() -> None:
        with torch.no_grad():
            for _ in range(5):
                fast(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.backend for r in dovetail.regions(lowered)] == [backend]
    # OpenMP's own threads do not survive a fork either, in torch alone.
    torch.set_num_threads(1)

    def same(run: Any, given: Tensor) -> bool:
        with torch.no_grad():
            return torch.allclose(run(given), model(given), atol=1e-4)

    def fresh() -> bool:
        return same(dovetail.compile(model, (x[:5],), backends=[backend], cache=False), x[:5])

    def held(lock: Any) -> Callable[[], None]:
        """Hold a lock in another thread while the process forks."""
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                taken.set()
                done.wait()

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        return done.set

    ended("calls", lambda: same(fast, x))
    ended("calls the graph", lambda: same(lowered, x))
    ended("calls in another way", lambda: same(fast, x[:7]))
    ended("compiles", fresh)
    ended("trains", lambda: bool(fast(x).sum().backward() is None and model[0].weight.grad is not None))
    # The very locks that another thread may hold when the process forks.
    release = [held(COMPILING), held(fast._captures._lock)]
    ended("calls while others compile", lambda: same(fast, x[:9]))
    ended("compiles while others compile", fresh)
    for each in release:
        each()
    loader = DataLoader(Answers(fast, x), num_workers=2, multiprocessing_context="fork", timeout=_PATIENCE)
    with torch.no_grad():
        right = all(torch.allclose(y[0], model(x + i), atol=1e-4) for i, y in enumerate(loader))
    print("loads data", "right" if right else "wrong", flush=True)
    print("parent", "right" if same(fast, x) else "wrong", flush=True)
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
