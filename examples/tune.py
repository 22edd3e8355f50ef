"""Tune a small Llama, save the plan, apply it, and deploy it as a bundle: `python examples/tune.py [seconds] [plan.json]`.

It needs `pip install 'dovetail[tune]'` and at least one compiler; measurements are kept in `build/tune-example.db`, so that
a second run is short.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dovetail
from dovetail import zoo

STORE = Path("build/tune-example.db")


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(seconds: float = 120.0, path: str = "build/llama.plan.json") -> None:
    entry = zoo.get("llama")
    model, args = entry.build("small").eval(), entry.example_inputs("small", batch=1).args
    STORE.parent.mkdir(exist_ok=True)
    print(dovetail.tune(model, args, store=STORE, dry_run=True))
    plan = dovetail.tune(model, args, budget=seconds, store=STORE)
    plan.save(path)
    print(plan.explain())
    with torch.no_grad():
        fast = dovetail.compile(model, args, plan=path)
        torch.testing.assert_close(fast(*args), model(*args), rtol=1e-3, atol=1e-4)
        print(
            f"eager {milliseconds(lambda: model(*args)):.2f} ms, tuned {milliseconds(lambda: fast(*args)):.2f} ms"
        )
        # For continuous integration: an error, with what changed, once the plan no longer fits the model.
        dovetail.Plan.load(path).check(model, args)

        # For deployment: graphs and code in one file, from which a process starts without tracing or compiling.
        bundle = dovetail.bundle(fast, Path(path).with_suffix(".bundle"))
        start = time.perf_counter()
        deployed = dovetail.compile(model, args, bundle=bundle, on_error="raise")
        torch.testing.assert_close(deployed(*args), fast(*args))
        print(f"first result from the bundle in {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main(*(float(a) if i == 0 else a for i, a in enumerate(sys.argv[1:3])))  # type: ignore[arg-type]
