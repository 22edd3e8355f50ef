"""What each rank of a job of four processes does: the cases one after the other, each with its results on disk."""

import functools
import importlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.tuning.plan import Plan
from tests.runtime.rank_groups import First, Net, Second, backends_of, events_of

SIZE = 4
X = torch.linspace(-1, 1, 32).reshape(4, 8)
PLAN = Path(__file__).parents[2] / "examples" / "llama.plan.json"


class Killed(First):
    """Ends the process of rank 0 that compiles by it."""

    name = "killed"

    def compile(self, region: Any, examples: Any) -> Any:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compile(region, examples)


class Rank:
    """One rank: its group, its folder, and the calls that all tests of it make."""

    def __init__(self, rank: int, store: Any, folder: Path) -> None:
        self.rank, self.store, self.folder = rank, store, folder
        self.group: Any = dist.group.WORLD
        self.results: dict[str, Any] = {}

    def compile(self, model: nn.Module | None = None, *, as_alone: bool = False, **options: Any) -> Any:
        options = {"backends": [First(), Second()], "rank_timeout": 60.0, **options}
        model, args = model or net(), options.pop("args", (X,))
        group = None if as_alone else self.group
        cache = self.folder / f"cache-{self.rank}-{as_alone}"
        with torch.set_grad_enabled(model.training):
            return dovetail.compile(model, args, cache=cache, process_group=group, **options)

    def keep(self, case: str, fast: Any, x: torch.Tensor = X, **more: Any) -> None:
        with torch.no_grad():
            result = fast(x).flatten().tolist()
        self.results[case] = {
            "backends": backends_of(fast),
            "result": result,
            "events": events_of(fast),
            **more,
        }

    def choose(self, first: bool, second: bool) -> None:
        First.is_active, Second.is_active = first, second

    def meet(self, name: str, count: int = SIZE) -> None:
        """Wait until so many ranks are here, so that each case begins on all of them at one time."""
        self.store.add(f"test/{name}", 1)
        while self.store.add(f"test/{name}", 0) < count:
            time.sleep(0.01)


def net(layers: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(layers).eval()


def refuse_collectives() -> None:
    def refuse(name: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{name} is a collective")

    names = [*dist.distributed_c10d.__all__, "_store_based_barrier"]
    collectives = ("all_", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv", "isend")
    for name in names:
        if name.startswith((*collectives, "monitored_barrier", "batch_isend")):
            setattr(dist, name, functools.partial(refuse, name))
            setattr(dist.distributed_c10d, name, functools.partial(refuse, name))
    for name in ("allgather", "allreduce", "alltoall", "broadcast", "barrier", "gather", "reduce", "scatter"):
        setattr(dist.ProcessGroup, name, functools.partial(refuse, name))


def slow(rank: Rank) -> None:
    """Ranks choose differently by themselves, and alike together, though one is slow."""
    is_even = rank.rank % 2 == 0
    rank.choose(is_even, not is_even)
    rank.keep("alone", rank.compile(as_alone=True))
    rank.meet("slow")
    if rank.rank == 1:
        time.sleep(1.5)
    if rank.rank == 0:
        time.sleep(0.5)
    fast = rank.compile()
    rank.keep("together", fast)
    rank.choose(first=True, second=True)
    if rank.rank != 2:  # a call that not every rank makes
        rank.keep("later", fast, torch.ones(6, 8))


def training(rank: Rank) -> None:
    is_even = rank.rank % 2 == 0
    rank.choose(is_even, not is_even)
    model = net().train()
    fast = rank.compile(model)
    fast(X).square().sum().backward()
    gradients = [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]
    rank.keep("training", fast, gradients=gradients)


def mismatch(rank: Rank) -> None:
    """The bundle does not fit on rank 3, which has other settings and would try the backends in another order."""
    rank.choose(first=True, second=True)
    order = [First(), Second()]
    if rank.rank == 3:
        torch.set_num_threads(2)
        order.reverse()
    rank.keep("mismatch", rank.compile(backends=order))
    torch.set_num_threads(1)


def some(rank: Rank) -> None:
    """Rank 2 compiles what no other does, and rank 1 another model than the others."""
    if rank.rank == 2:
        rank.keep("one rank", rank.compile(net(3), rank_timeout=0.2))
    start = time.monotonic()
    rank.keep("two models", rank.compile(net(4 if rank.rank == 1 else 1)), seconds=time.monotonic() - start)
    rank.meet("two models")
    rank.keep("all again", rank.compile(net(5)))


def late(rank: Rank) -> None:
    """The others give up before rank 0 comes."""
    if rank.rank == 0:
        rank.meet("given up")
    order = [First(), Second()] if rank.rank == 0 else [Second(), First()]
    rank.keep("late", rank.compile(net(6), backends=order, rank_timeout=0.5))
    if rank.rank != 0:
        rank.meet("given up")


def tuned(rank: Rank) -> None:
    """Rank 0 searches, fails, and takes too long; the others only wait."""
    module: Any = importlib.import_module("dovetail.tuning.tune")

    def search(work: Callable[[], Plan]) -> Callable[..., Any]:
        def run(*_: Any, **__: Any) -> Any:
            assert rank.rank == 0, "searches"
            return SimpleNamespace(plan=work())

        return run

    def plan() -> Plan:
        time.sleep(0.5)
        return Plan.load(PLAN)

    def failing() -> Plan:
        raise dovetail.TuningError("no program of the model runs: out of memory")

    def too_long() -> Plan:
        while rank.store.add("test/no plan", 0) < SIZE - 1:
            time.sleep(0.01)
        return Plan.load(PLAN)

    module.prepare = lambda *_, **__: None
    options: dict[str, Any] = {"process_group": rank.group, "progress": False}
    module.run_search = search(plan)
    rank.results["tuned"] = dovetail.tune(net(), (X,), budget=5.0, **options).to_json()
    module.run_search = search(failing)
    try:
        dovetail.tune(net(), (X,), budget=5.0, **options)
    except dovetail.TuningError as error:
        rank.results["failed"] = str(error)
    try:
        rank.results["models"] = dovetail.tune(net(2 if rank.rank == 1 else 1), (X,), budget=5.0, **options)
    except dovetail.TuningError as error:
        rank.results["models"] = str(error)
    rank.meet("tuned models")
    module.run_search = search(too_long)
    rank.results["too long"] = dovetail.tune(net(), (X,), budget=0.3, rank_timeout=0.2, **options).to_json()
    rank.store.add("test/no plan", int(rank.rank != 0))


def killed(rank: Rank) -> None:
    """Rank 3 is killed before it compiles, rank 0 while it does; then rank 0 is missing from the start."""
    if rank.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.choose(first=True, second=True)
    order = [Killed(), Second()] if rank.rank == 0 else [Second(), Killed()]
    start = time.monotonic()
    fast = rank.compile(net(7), backends=order, rank_timeout=3.0)
    rank.keep("killed", fast, seconds=time.monotonic() - start)
    order = [First(), Second()] if rank.rank == 1 else [Second(), First()]
    rank.keep("without rank 0", rank.compile(net(8), backends=order, rank_timeout=0.3))


CASES: tuple[Callable[[Rank], None], ...] = (slow, training, mismatch, some, late, tuned, killed)


def work(rank: int, port: int, folder: Path) -> None:
    logging.getLogger("dovetail").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    refuse_collectives()
    each = Rank(rank, store, folder)
    for case in CASES:
        if case is not killed:
            each.meet(case.__name__)
        else:
            (folder / f"{rank}.json").write_text(json.dumps(each.results))
            each.meet("all have written")
        case(each)
    (folder / f"{rank}.json").write_text(json.dumps(each.results))
    os._exit(0)  # a group that has lost ranks cannot be destroyed
