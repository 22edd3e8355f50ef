"""Workers of a search on a Ray cluster: an actor for each slot of each node, started anew where one was lost.

A slot is a GPU, for a search on CUDA, or as many CPUs as the search has threads. Actors are placed node by node: Ray
reserves what a slot needs, and nodes that join later get workers when they are seen. Trials do not go through Ray; its
actors take them from the store, as workers that are started by hand do.

*Credentials.* The URL of the store is an argument of a method of the actor, which goes from process to process. Arguments
of its construction would be kept by the cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import InvalidArgument, TuningError
from dovetail.ir.text_tables import counted
from dovetail.tuning.environment import Environment
from dovetail.tuning.store import Store

_LOG = logging.getLogger("dovetail")
_LOOK_SECONDS = 1.0
_MOST_FAILURES = 3
"""A slot whose worker ended this many times in a row gets no other."""
_STEADY_SECONDS = 60.0
"""A worker that ran this long has not failed at its start."""
_ABSENT_SECONDS = 30.0
"""How long a cluster that had slots may have none before the search ends."""
_STOP_SECONDS = _CONNECT_SECONDS = 10.0
_OBJECT_STORE_BYTES = 80 << 20
"""Of a cluster that is started here: nothing is kept in its object store, and Ray takes no less."""
_ACCELERATOR = "accelerator_type:"
_NICENESS = "RAY_worker_niceness"
_REPORTS = "_worker_logs_enabled"


@dataclass(eq=False)
class _RayWorker:
    """The actor of a slot, and what its methods will return: `ready` once it runs, `ended` why it stopped."""

    node: str
    actor: Any
    ready: Any
    ended: Any
    started: float


@dataclass
class _SlotFailures:
    """How often the worker of a slot ended in a row, and when it is started again."""

    count: int = 0
    again: float = 0.0
    reason: str = ""


class RayEngine:
    """Starts workers of a store on the cluster that this process is or can be connected to, else on one of its own.

    `device` and `environment` are those of the search. A cluster that was started here is shut down with the workers.
    """

    def __init__(self, store: Store, device: torch.device, environment: Environment) -> None:
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgument(
                f"executor='ray' has slots for CPUs and CUDA, and the model is on '{device}'."
            )
        self._device = "cuda:0" if device.type == "cuda" else "cpu"
        self._threads = environment.threads
        self._kind = environment.device.partition(": ")[2].rpartition(",")[0]
        self._url = lambda: store.url  # a function, because dumps of attributes must not show a password
        self._store = store.name
        self.workers: dict[tuple[str, int], _RayWorker] = {}
        self._failures: dict[tuple[str, int], _SlotFailures] = {}
        self._nodes: list[Mapping[str, Any]] = []
        self._is_warned_of_hosts = False
        self._blocked, self._next_look = "", 0.0
        self._absent_since: float | None = None
        self._connection = contextlib.ExitStack()
        try:
            self._ray: Any = _connected(self._connection, self._threads)
            # Ray is asked for the driver's node once: it does not move.
            self._host = self._host_of_driver() if Path(store.name).is_absolute() else ""
            self._actor_class: Any = self._ray.remote(_worker_class())
        except BaseException:
            self._connection.close()
            raise

    def supervise(self) -> str:
        """Start workers in slots that have none; return why none can run, or nothing."""
        from ray.exceptions import RayError

        if time.monotonic() >= self._next_look:
            try:
                self._blocked = self._look()
            except RayError as error:
                self._blocked = f"the Ray cluster cannot be used: {_first_sentence(error)}"
            self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._blocked

    def _look(self) -> str:
        self._nodes = [node for node in self._ray.nodes() if node["Alive"]]
        slots = self._slots()
        self._remove_ended(slots)
        for slot, name in slots.items():
            failures = self._failures.setdefault(slot, _SlotFailures())
            is_due = failures.count < _MOST_FAILURES and time.monotonic() >= failures.again
            if slot not in self.workers and is_due:
                self.workers[slot] = self._start(slot[0], name)
        return self._why_blocked(slots)

    def why_waiting(self) -> str:
        """Return what the workers wait for that do not take trials yet."""
        waiting = self._pending()
        if not waiting:
            return f"{counted(len(self.workers), 'worker')} on Ray started, and have not loaded the model yet"
        what = f"{counted(len(waiting), 'worker')} on Ray start, or wait for slots that others use"
        return f"{what}: {self._described()}"

    def close(self) -> None:
        """End all workers, and the cluster if it was started here."""
        try:
            pending = {id(worker) for worker in self._pending()}
            running = [worker for worker in self.workers.values() if id(worker) not in pending]
            for worker in running:
                worker.actor.stop.remote()
            self._done([worker.ended for worker in running], timeout=_STOP_SECONDS)
        finally:
            for worker in self.workers.values():
                self._kill(worker)
            self.workers.clear()
            self._connection.close()

    def _slots(self) -> dict[tuple[str, int], str]:
        """Return the slots of all nodes, each as the node's identity and a number, with the node's name."""
        slots: dict[tuple[str, int], str] = {}
        others = 0
        for node in self._nodes:
            if self._host and node["NodeManagerAddress"] != self._host:
                others += 1
                continue
            resources = node["Resources"]
            if self._device == "cpu":
                count = int(resources.get("CPU", 0) // self._threads)
            else:
                count = int(min(resources.get("GPU", 0), resources.get("CPU", 0)))
                count = count if _has_kind(resources, self._kind) else 0
            slots.update({(node["NodeID"], number): _name(node) for number in range(count)})
        if others and not self._is_warned_of_hosts:
            self._is_warned_of_hosts = True
            _LOG.warning(
                "workers run on this host alone, and not on %s of the Ray cluster: the store '%s' is a file; give the "
                "URL of a PostgreSQL database",
                counted(others, "other node"),
                self._store,
            )
        return slots

    def _start(self, node: str, name: str) -> _RayWorker:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        needs = {"num_cpus": self._threads} if self._device == "cpu" else {"num_cpus": 1, "num_gpus": 1}
        actor = self._actor_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_concurrency=2,  # `stop` is called while `run` runs
            max_restarts=0,  # it would be without its URL
            **needs,
        ).remote()
        ready, ended = actor.is_ready.remote(), actor.run.remote(self._url(), self._device)
        return _RayWorker(name, actor, ready, ended, time.monotonic())

    def _remove_ended(self, slots: Mapping[tuple[str, int], str]) -> None:
        """Drop the workers of lost nodes, and those that ended, with the reason."""
        ended = self._done([worker.ended for worker in self.workers.values()])
        for slot, worker in list(self.workers.items()):
            if slot not in slots:
                _LOG.warning(
                    "a worker on Ray was lost with its node %s; its trial is taken again", worker.node
                )
            elif worker.ended in ended:
                self._count_failure(slot, worker)
            else:
                continue
            self._kill(self.workers.pop(slot))

    def _count_failure(self, slot: tuple[str, int], worker: _RayWorker) -> None:
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

        try:
            reason = self._ray.get(worker.ended)
        except RayError as error:
            lost = isinstance(error, ActorDiedError | ActorUnavailableError)
            reason = "its process was lost" if lost else _first_sentence(error)
        failures = self._failures[slot]
        if time.monotonic() - worker.started > _STEADY_SECONDS:
            failures.count = 0
        failures.count += 1
        failures.again = time.monotonic() + 2.0 ** (failures.count - 1)
        failures.reason = reason.removesuffix(".")
        _LOG.warning(
            "the worker on node %s of the Ray cluster ended: %s%s",
            worker.node,
            failures.reason,
            "; no other is started there" if failures.count == _MOST_FAILURES else "; another is started",
        )

    def _why_blocked(self, slots: Mapping[tuple[str, int], str]) -> str:
        usable = [slot for slot in slots if self._failures[slot].count < _MOST_FAILURES]
        if usable:
            self._absent_since = None
            return ""
        if slots:
            reasons = dict.fromkeys(f"{name}: {self._failures[slot].reason}" for slot, name in slots.items())
            return f"the workers on Ray end at once ({'; '.join(reasons)})"
        # The first look decides; later a node may be about to come back.
        if self._absent_since is None:
            self._absent_since = time.monotonic() if self._failures else -_ABSENT_SECONDS
        if time.monotonic() - self._absent_since < _ABSENT_SECONDS:
            return ""
        needs = f"{counted(self._threads, 'CPU')}, the threads of the search"
        if self._device != "cpu":
            needs = f"a GPU of the kind '{self._kind}' and a CPU"
        where = " on this host, where the file of the store is," if self._host else ""
        return f"no node of the Ray cluster{where} has {needs}; it has {self._described()}"

    def _described(self) -> str:
        return "; ".join(f"{_name(node)}: {_resources(node)}" for node in self._nodes) or "no node"

    def _pending(self) -> list[_RayWorker]:
        ready = self._done([worker.ready for worker in self.workers.values()])
        return [worker for worker in self.workers.values() if worker.ready not in ready]

    def _done(self, references: Sequence[Any], *, timeout: float = 0.0) -> list[Any]:
        """Return those of some results that are there, also failures, after at most so many seconds."""
        if not references:
            return []
        return self._ray.wait(list(references), num_returns=len(references), timeout=timeout)[0]

    def _kill(self, worker: _RayWorker) -> None:
        from ray.exceptions import RayError

        # One that is gone already is what is asked for.
        with contextlib.suppress(RayError):
            self._ray.kill(worker.actor, no_restart=True)

    def _host_of_driver(self) -> str:
        node = self._ray.get_runtime_context().get_node_id()
        return next((n["NodeManagerAddress"] for n in self._ray.nodes() if n["NodeID"] == node), "")


def require_ray() -> None:
    """Raise ModuleNotFoundError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(
            "executor='ray' needs ray, which is not installed; pip install 'dovetail[ray]'", name="ray"
        )


def _connected(connection: contextlib.ExitStack, threads: int) -> Any:
    """Connect to the cluster of RAY_ADDRESS, or one that runs on this machine, or start one; return the module `ray`."""
    require_ray()
    import ray

    if ray.is_initialized():
        return ray
    address = _cluster_address()
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        own = {"address": "local", "num_cpus": max(threads, _cores()), "include_dashboard": False}
        options |= {**own, "object_store_memory": _OBJECT_STORE_BYTES}
        # Ray lowers the priority of its workers, whose times would be those of processes that others displace.
        if _NICENESS not in os.environ:
            os.environ[_NICENESS] = "0"
            connection.callback(os.environ.pop, _NICENESS, None)
    # Ray replaces the handler on the main thread.
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        connection.callback(signal.signal, signal.SIGTERM, handler)
    connection.enter_context(_without_reports())
    connection.callback(ray.shutdown)
    try:
        ray.init(**options)
    except (RuntimeError, ValueError, OSError) as error:
        what = (
            f"the Ray cluster at '{address}' cannot be used" if address else "no Ray cluster can be started"
        )
        raise TuningError(f"{what}: {_first_sentence(error)}.") from error
    return ray


def _cluster_address() -> str:
    """Return where a cluster answers, empty if there is none; raise TuningError if RAY_ADDRESS has one that does not.

    Ray itself tries an address for minutes and then ends the process. One that it has noted may be of a cluster that ended.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if "://" in given:
        return given
    services: Any = importlib.import_module("ray._private.services")
    try:
        address = str(services.canonicalize_bootstrap_address(given or "auto") or "")
    except ConnectionError:
        return ""
    except ValueError as error:
        raise TuningError(f"RAY_ADDRESS cannot be used: {_first_sentence(error)}.") from error
    host, _, port = address.rpartition(":")
    try:
        if address:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        if given:
            raise TuningError(
                f"the Ray cluster at '{given}', which is in RAY_ADDRESS, cannot be reached: {error}. Start it, or set "
                f"RAY_ADDRESS to 'local'."
            ) from error
        return ""
    return address


@contextlib.contextmanager
def _without_reports() -> Generator[None]:
    """Keep Ray from printing on stdout, where results of commands are, what it reports of lost nodes and processes.

    It does so with `log_to_driver=False` too, and has no public switch for it.
    """
    driver: Any = importlib.import_module("ray._private.worker")
    is_enabled = getattr(driver, _REPORTS, None)
    if is_enabled is None:
        yield
        return
    setattr(driver, _REPORTS, False)
    try:
        yield
    finally:
        setattr(driver, _REPORTS, is_enabled)


def _worker_class() -> type:
    """Return the class of the actors, which Ray sends by value: a node without dovetail can report that."""

    class TrialWorker:
        def __init__(self) -> None:
            self._stop = threading.Event()

        def is_ready(self) -> bool:
            return True

        def run(self, url: str, device: str) -> str:
            """Take trials until `stop`; return why that is not possible, empty after `stop`."""
            try:
                from dovetail.tuning.worker import serve

                serve(url, device=device, stop=self._stop)
            except ModuleNotFoundError as error:
                if error.name == "dovetail":
                    return "dovetail is not installed there; pip install 'dovetail[tune]', of the search's release"
                return str(error)
            except Exception as error:
                return str(error) or type(error).__name__
            return ""

        def stop(self) -> None:
            self._stop.set()

    return TrialWorker


def _cores() -> int:
    """Return the cores that this process may use; threads of one core disturb each other."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    numbers = os.sched_getaffinity(0)
    cores: set[str] = set()
    for number in numbers:
        path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text())
        except OSError:
            return len(numbers)
    return len(cores)


def _has_kind(resources: Mapping[str, float], kind: str) -> bool:
    """Return whether a node may have GPUs of a kind; where Ray names none, its workers check that.

    Ray's names are parts of the device's: "A100" of "NVIDIA A100-SXM4-40GB".
    """
    words = _words(kind)
    named = [_words(name) for key in resources if (name := key.removeprefix(_ACCELERATOR)) != key]
    return not named or any(
        words[start : start + len(name)] == name for name in named for start in range(len(words))
    )


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name.upper())


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def _resources(node: Mapping[str, Any]) -> str:
    """Return the CPUs and GPUs of a node, with their kinds, as text."""
    resources = node["Resources"]
    kinds = ", ".join(key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR))
    gpus = int(resources.get("GPU", 0))
    text = counted(int(resources.get("CPU", 0)), "CPU")
    return f"{text}, {counted(gpus, 'GPU')}{f' ({kinds})' if kinds else ''}" if gpus else text


def _first_sentence(error: BaseException) -> str:
    """Return the reason of an error of Ray, whose messages go over many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
