"""Writes to weights that something was computed from: by address and version counter in every call, by contents in turn.

An in-place operation raises the version counter of a tensor. Not all writes do: those through `.data`, `.numpy()`, DLPack
or another tensor over the same memory, batch norm updating its statistics, fused optimizers. A batch norm raises the
counter of its `num_batches_tracked`, fused optimizers are counted by a hook on their steps, and for the rest the bytes
are compared with a CRC-32, a part of them in every call, so that all are within a fixed number of calls.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import operator
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dovetail.graph.forking import released_by_fork

CHECK_INTERVAL = 256
"""In how many calls the contents of every watched tensor are compared once, unless something else is asked for."""

_PIECE = 2**16
"""Bytes that are compared at once: about 15 µs, and what bounds the cost of a call for a small model."""

_VERSION = operator.attrgetter("_version")
_ADDRESS = Tensor.data_ptr
_STATISTICS = frozenset({"running_mean", "running_var"})

_steps = [0]


def fused_steps() -> int:
    """How many steps optimizers made by fused kernels since this was first asked; those raise no version counter."""
    _watch_optimizers()
    return _steps[0]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _steps[0] += 1


def write_state(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Addresses and version counters of tensors: different after every write that is counted."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors have no version counter
        versions = [0 if t.is_inference() else t._version for t in tensors]
    return fused_steps(), versions, list(map(_ADDRESS, tensors))


def sentinel_of(target: str) -> str | None:
    """The attribute whose version counter rises where the batch norm statistics at `target` are updated."""
    owner, _, name = target.rpartition(".")
    if name not in _STATISTICS:
        return None
    return f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"


class Piece:
    """Some bytes of a tensor, and their CRC-32 when it was last taken."""

    __slots__ = ("_bytes", "_tensor", "address", "checksum", "size")

    def __init__(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> None:
        # The tensor itself, and not an alias: it may be given other memory, and then these bytes may be gone.
        self._tensor, self.address = tensor, tensor.data_ptr()
        self.size = tensor.nbytes if stop is None else stop - start
        self._bytes = None if stop is None else _memory(self.address + start, self.size)
        self.checksum = self.current()

    def current(self) -> int | None:
        """The CRC-32 of the bytes as they are; None where the memory is no longer there."""
        if self._tensor.data_ptr() != self.address:
            return None
        if self._bytes is None:
            packed = self._tensor.detach().contiguous()
            return zlib.crc32(_memory(packed.data_ptr(), packed.nbytes))
        return zlib.crc32(self._bytes)

    def is_current(self) -> bool:
        return self.current() == self.checksum


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _pieces(tensor: Tensor) -> Iterator[Piece]:
    # Reading the memory of another device would wait for everything that was launched there.
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return
    if not is_dense(tensor):
        yield Piece(tensor)
        return
    for start in range(0, tensor.nbytes, _PIECE):
        yield Piece(tensor, start, min(start + _PIECE, tensor.nbytes))


def is_dense(value: Tensor) -> bool:
    """Whether elements fill their memory without gaps and none lies over another."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def packed_bytes(value: Tensor) -> Tensor:
    """The bytes of the elements in row-major order, as a vector."""
    flat = value.contiguous().reshape(-1)
    # A single element is contiguous whatever its stride, which only a copy makes one.
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class Checksums:
    """Checksums of the contents of some tensors; those that are not in the memory of the CPU have none."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.pieces = tuple(piece for tensor in tensors for piece in _pieces(tensor))

    @staticmethod
    def joined(parts: Iterable[Checksums]) -> Checksums:
        """Those of several as one."""
        joined = Checksums(())
        joined.pieces = tuple(piece for part in parts for piece in part.pieces)
        return joined

    def written(self) -> set[int]:
        """The addresses of tensors whose bytes are others than when the checksums were taken."""
        return {piece.address for piece in self.pieces if not piece.is_current()}

    def __eq__(self, other: object) -> bool:
        """Whether two are of the same contents."""
        if not isinstance(other, Checksums):
            return NotImplemented
        return [p.checksum for p in self.pieces] == [p.checksum for p in other.pieces]

    __hash__ = None  # type: ignore[assignment]


class ContentGuard:
    """Compares the contents of watched tensors with their checksums, a part of them in each call.

    Every piece is compared once in `interval` calls, and never with None. If one differs, all that is watched is
    compared at once: weights that were written together are used together.
    """

    def __init__(self, interval: int | None = CHECK_INTERVAL) -> None:
        self._turns: list[tuple[Piece, ...]] = [()] * (interval or 0)
        self._load = [0] * (interval or 0)
        self._calls = itertools.count()
        self._watched: dict[Any, tuple[Checksums, Callable[[], None], tuple[int, ...]]] = {}
        self._lock = released_by_fork(threading.RLock())
        # How often something was written unseen.
        self.generation = 0

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: Any, checksums: Checksums, on_write: Callable[[], None]) -> None:
        """Call `on_write`, once, when contents are others than the checksums tell; in place of what had this key."""
        with self._lock:
            self.forget(key)
            due: dict[int, list[Piece]] = {}
            least = [(load, i) for i, load in enumerate(self._load)]
            heapq.heapify(least)
            for piece in checksums.pieces if least else ():
                load, i = least[0]
                due.setdefault(i, []).append(piece)
                heapq.heapreplace(least, (load + piece.size, i))
            for i, pieces in due.items():
                self._turns[i] += tuple(pieces)
                self._load[i] += sum(piece.size for piece in pieces)
            self._watched[key] = (checksums, on_write, tuple(due))

    def forget(self, key: Any) -> None:
        """Watch no longer what has this key."""
        with self._lock:
            checksums, _, due = self._watched.pop(key, (None, None, ()))
            gone = set(map(id, checksums.pieces)) if checksums is not None else set[int]()
            for i in due:
                self._load[i] -= sum(piece.size for piece in self._turns[i] if id(piece) in gone)
                self._turns[i] = tuple(piece for piece in self._turns[i] if id(piece) not in gone)

    def step(self) -> None:
        """Compare what is due in this call."""
        if not self._watched or not self._turns:
            return
        for piece in self._turns[next(self._calls) % len(self._turns)]:
            if not piece.is_current():
                self.check()
                return

    def check(self) -> set[int]:
        """Compare everything; the addresses of what was written since its checksums were taken."""
        written: set[int] = set()
        with self._lock:
            for key, (checksums, on_write, _) in list(self._watched.items()):
                found = checksums.written()
                if found:
                    written |= found
                    self.generation += 1
                    self.forget(key)
                    on_write()
        return written
