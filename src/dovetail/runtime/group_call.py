"""Decisions that the ranks of a process group share, by keys of the group's store.

The problem is consensus. An object with compare-and-swap solves it for any number of processes that may be slow or stop
(M. Herlihy, "Wait-free synchronization", 1991), and the store of a process group has `compare_set`: each decision is one
key, and the first value that is set is that of every rank, whichever proposed it. Rank 0 proposes what it has decided; a
rank that has waited for it long enough proposes a fallback, which then holds for rank 0 as well when it comes late.
Larger values are written before, in parts under the proposing rank's own keys, so that a rank that is killed while it
writes leaves no decision. Nothing here is a collective: any rank may be missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail import torch_compat
from dovetail.errors import InvalidArgument
from dovetail.lowering.failures import one_line

_LOG = logging.getLogger("dovetail")
RANK_TIMEOUT = 300.0
"""Seconds that a rank waits for rank 0: less than ranks wait for each other in collectives of NCCL, which is 600."""
_PREFIX = "dovetail"
_PART_BYTES = 4 * 2**20
_SHORTEST, _LONGEST = 0.01, 0.5
"""Seconds between two looks into the store. A rank sleeps meanwhile: `wait` of a store holds its lock, and Ctrl-C back."""
_LOCK = threading.Lock()
_T = TypeVar("_T")


@dataclass(frozen=True)
class SharedValue:
    """A value that all ranks share, the rank that proposed it, and why it is not rank 0's, or has no data."""

    rank: int
    data: bytes
    note: str = ""


@dataclass
class _GroupHistory:
    """The calls in one process group so far, as one rank knows them.

    `own` has the number of this rank's calls by their digests, `of_rank_0` digest and description of rank 0's, by function.
    `excused` are those of rank 0 that this rank did not make and for which it has given up once: later calls do not.
    """

    own: Counter[str] = field(default_factory=Counter[str])
    of_rank_0: dict[str, list[tuple[str, str]]] = field(default_factory=dict[str, list[tuple[str, str]]])
    excused: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


_HISTORIES: WeakKeyDictionary[Any, _GroupHistory] = WeakKeyDictionary()


class GroupCall:
    """One call of a function that the ranks of a process group make, each for itself.

    Calls belong together if function, structure and sizes of model and arguments, and their number among such calls are
    equal, whatever else the ranks call in between: make it before checking what other ranks may have given otherwise.
    `seconds` bounds the time that a rank waits for rank 0, all in all.
    Once the store cannot be used, `failure` has the reason, and decisions are the rank's own. `mismatch` has what rank 0
    has called in place of this call, as soon as this rank has met that while it waited.
    """

    def __init__(
        self,
        group: Any,
        function: str,
        model: nn.Module,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        seconds: float = RANK_TIMEOUT,
    ) -> None:
        self._store: Any = _store_of(group)
        self.rank, self.size = cast("int", group.rank()), cast("int", group.size())
        self.failure = self.mismatch = ""
        self._start, self.seconds = time.monotonic(), seconds
        self._function, (self._digest, self.description) = function, _identity(function, model, args, kwargs)
        with _LOCK:
            self._history = _HISTORIES.setdefault(group, _GroupHistory())
            self._history.own[self._digest] += 1
            self._number = self._history.own[self._digest]
            self._key = f"{_PREFIX}/{self._digest}/{self._number}"
            if self.rank == 0:
                calls = self._history.of_rank_0.setdefault(function, [])
                calls.append((self._digest, self.description))
                self._try(None, self._store.set, self._call_key(len(calls)), json.dumps(calls[-1]))

    def decide(self, name: str, data: bytes, note: str = "") -> SharedValue:
        """Propose a value for a decision; return the one that all ranks share, which may be another rank's."""
        own = SharedValue(self.rank, data, note)
        return self._try(own, self._propose, f"{self._key}/{name}", own)

    def read(self, name: str) -> SharedValue | None:
        """Return the value of a decision; None while there is none."""
        return self._try(None, self._read, f"{self._key}/{name}")

    def wait(self, name: str) -> tuple[SharedValue | None, str]:
        """Return the value of a decision as soon as there is one; None, and why it is not awaited any longer.

        That is the end of the time, a store that cannot be used, or a call of rank 0 with another model in place of this one.
        """
        pause, is_reported = _SHORTEST, False
        while True:
            decision = self.read(name)
            if decision is not None:
                return decision, ""
            self.mismatch = self._other_call()
            left = self._start + self.seconds - time.monotonic()
            if self.failure or self.mismatch:
                return None, self.failure or self.mismatch
            if left <= 0:
                return None, f"rank 0 has not decided within {self.seconds:.3g} s"
            if not is_reported:
                _LOG.info("rank %d waits for the %s of rank 0, up to %.0f s", self.rank, name, left)
                is_reported = True
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST)

    def release(self, name: str) -> None:
        """State that this rank does not read the value any more; the last one but the proposing rank deletes it."""
        self._try(None, self._release, f"{self._key}/{name}")

    def _call_key(self, number: int) -> str:
        return f"{_PREFIX}/{self._function}/{number}"

    def _other_call(self) -> str:
        """Return what rank 0 has called and this rank has not, up to this call; "" without any.

        Nothing is in place of this call where rank 0 has begun it.
        """
        with _LOCK:
            calls = self._history.of_rank_0.setdefault(self._function, [])
            while stored := self._try(None, self._stored, self._call_key(len(calls) + 1)):
                digest, description = json.loads(stored)
                calls.append((digest, description))
            counts = Counter(digest for digest, _ in calls)
            if counts[self._digest] >= self._number:
                return ""
            counts.clear()
            for number, (digest, description) in enumerate(calls):
                counts[digest] += 1
                excuse = (self._function, number)
                if counts[digest] > self._history.own[digest] and excuse not in self._history.excused:
                    self._history.excused.add(excuse)
                    return f"rank 0 has called it with {description}, and rank {self.rank} with {self.description}"
        return ""

    def _try(self, otherwise: _T, function: Callable[..., Any], *arguments: Any) -> _T:
        """Return the result of an operation on the store; a value of the caller's once the store cannot be used."""
        if self.failure:
            return otherwise
        try:
            return function(*arguments)
        except (RuntimeError, OSError) as error:  # those of torch.distributed are RuntimeErrors
            self.failure = f"the store of the process group cannot be used: {one_line(error)}"
            return otherwise

    def _stored(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def _propose(self, key: str, own: SharedValue) -> SharedValue:
        if self._store.check([key]):
            return cast("SharedValue", self._read(key))
        parts = range(0, len(own.data), _PART_BYTES)
        for number, at in enumerate(parts):
            self._store.set(f"{key}/{self.rank}/{number}", own.data[at : at + _PART_BYTES])
        digest = hashlib.sha256(own.data).hexdigest()
        manifest = json.dumps([self.rank, own.note, len(parts), digest])
        decided = self._store.compare_set(key, "", manifest)
        if decided == manifest.encode():
            return own
        self._delete(key, self.rank, len(parts))
        return self._decoded(key, decided)

    def _read(self, key: str) -> SharedValue | None:
        manifest = self._stored(key)
        return None if manifest is None else self._decoded(key, manifest)

    def _decoded(self, key: str, manifest: bytes) -> SharedValue:
        rank, note, parts, digest = json.loads(manifest)
        keys = [f"{key}/{rank}/{number}" for number in range(parts)]
        if keys and not self._store.check(keys):  # `get` would wait for it
            return SharedValue(rank, b"", f"what rank {rank} has decided was deleted")
        data = b"".join(map(self._store.get, keys))
        if hashlib.sha256(data).hexdigest() != digest:
            raise OSError(f"a value of rank {rank} has another digest than it was written with")
        return SharedValue(rank, data, note)

    def _release(self, key: str) -> None:
        if self._store.add(f"{key}/readers", 1) == self.size - 1:
            rank, _, parts, _ = json.loads(self._store.get(key))
            self._delete(key, rank, parts)

    def _delete(self, key: str, rank: int, parts: int) -> None:
        for number in range(parts):
            self._store.delete_key(f"{key}/{rank}/{number}")


def require_rank_timeout(seconds: Any) -> None:
    """Raise for what is no number of seconds that a rank can wait."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise InvalidArgument(f"rank_timeout {seconds!r}; give a positive number of seconds.")


def _store_of(group: Any) -> Any:
    """Return the store of a process group, in which keys are the group's own."""
    if not torch.distributed.is_available():
        raise InvalidArgument(f"process_group {group!r}: this torch has no torch.distributed; leave it out.")
    if not isinstance(group, torch.distributed.ProcessGroup):
        member = " of which this process is a rank" if isinstance(group, int) else ""
        raise InvalidArgument(
            f"process_group {group!r}; give a torch.distributed.ProcessGroup{member}, such as "
            f"torch.distributed.group.WORLD."
        )
    get = torch_compat.GROUP_STORE.value
    if get is None:
        raise InvalidArgument(
            f"process_group: torch {torch.__version__} does not give the store of a group; leave it out."
        )
    try:
        return get(group)
    except KeyError:
        raise InvalidArgument("the process group was destroyed; give one that is initialized.") from None


def _identity(
    function: str, model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return a digest of what equal calls on different ranks have in common, and a description of it.

    Of tensors these are names, sizes and dtypes, not contents, and of devices the type: each rank has its own.
    """
    kind = type(model)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = [
        (name, type(m).__qualname__, m.training) for name, m in model.named_modules(remove_duplicate=False)
    ]
    inputs = [_leaf_text(leaf) for leaf in leaves]
    # Texts and numbers may be the user's own.
    shown = [t if isinstance(v, Tensor) else type(v).__name__ for v, t in zip(leaves, inputs, strict=True)]
    facts = (
        function,
        f"{kind.__module__}.{kind.__qualname__}",
        [(name, _leaf_text(tensor)) for name, tensor in tensors],
        modules,
        str(spec),
        inputs,
        torch.is_grad_enabled(),
    )
    digest = hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()
    mode = "train" if model.training else "eval"
    called = "" if args is None else f" for ({', '.join(shown[:4])}{', …' if len(shown) > 4 else ''})"
    count = sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter))
    return digest, f"a {kind.__name__} of {count} weights in {mode} mode{called}"


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        if is_lazy(leaf):
            return "uninitialized"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device.type}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__qualname__
