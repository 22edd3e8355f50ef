"""Guards on weights: were tensors written since something was computed from them.

An in-place operation raises the version counter of a tensor. Not all writes do: those through `.data`, `.numpy()`, DLPack
or another tensor over the same memory, batch norm updating its statistics, fused optimizers. A batch norm raises the
counter of its `num_batches_tracked`, fused optimizers are counted by a hook on their steps (`mutation_stamp` has all of
these, and is compared in every call), and for the rest `ContentGuard` compares the bytes with a checksum, a part of them in
every call, so that all are compared within a fixed number of calls.

Buffers that passes computed from weights (constant folding) are kept current by these guards: a `Derivation` knows how to
compute them, and `RuntimeWeights`, which runs in every call of a graph, computes them again, in place, after a write.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dovetail.errors import CallMismatch
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.weight_fetch import WeightFetch, mutation_stamp

try:
    # Five times as fast as CRC-32, which every call pays for a part of the weights.
    from xxhash import xxh3_64_intdigest as _checksum
except ModuleNotFoundError:
    from zlib import crc32 as _checksum

CHECK_INTERVAL = 256
"""The default number of calls in which the contents of every watched tensor are compared once."""
_CHUNK_BYTES = 2**16
"""Bytes that are compared at once, in a few µs, which bounds the cost of a call for a small model."""
_STATISTICS = frozenset({"running_mean", "running_var"})


def version_sentinel(target: str) -> str | None:
    """Return the attribute whose version counter rises when the batch norm statistics at `target` are updated."""
    owner, _, name = target.rpartition(".")
    if name not in _STATISTICS:
        return None
    return f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"


class Chunk:
    """A range of a tensor's bytes, and their checksum when the chunk was created."""

    __slots__ = ("_bytes", "_tensor", "address", "checksum", "size")

    def __init__(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> None:
        # The tensor itself, not an alias: it may be given other memory, and then these bytes may be freed.
        self._tensor, self.address = tensor, tensor.data_ptr()
        self.size = tensor.nbytes if stop is None else stop - start
        self._bytes = None if stop is None else _memory(self.address + start, self.size)
        self.checksum = self.current()

    def current(self) -> int | None:
        """Return the checksum of the bytes now; None if the tensor has other memory."""
        if self._tensor.data_ptr() != self.address:
            return None
        if self._bytes is None:
            packed = self._tensor.detach().contiguous()
            return _checksum(_memory(packed.data_ptr(), packed.nbytes))
        return _checksum(self._bytes)

    def is_current(self) -> bool:
        return self.current() == self.checksum


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _chunks(tensor: Tensor) -> Iterator[Chunk]:
    # Reading the memory of another device would wait for everything that was launched there.
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return
    if not is_dense(tensor):
        yield Chunk(tensor)
        return
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield Chunk(tensor, start, min(start + _CHUNK_BYTES, tensor.nbytes))


def is_dense(value: Tensor) -> bool:
    """Whether elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def packed_bytes(value: Tensor) -> Tensor:
    """Return the bytes of the elements in row-major order, as a vector."""
    flat = value.contiguous().reshape(-1)
    # A single element is contiguous whatever its stride; only a copy has stride one.
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class Checksums:
    """Checksums of the contents of tensors; only tensors on the CPU have any."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.chunks = tuple(chunk for tensor in tensors for chunk in _chunks(tensor))

    @staticmethod
    def joined(parts: Iterable[Checksums]) -> Checksums:
        """Return all the checksums of several as one."""
        joined = Checksums(())
        joined.chunks = tuple(chunk for part in parts for chunk in part.chunks)
        return joined

    def written(self) -> set[int]:
        """Return the addresses of tensors whose bytes have changed since the checksums were computed."""
        return {chunk.address for chunk in self.chunks if not chunk.is_current()}

    def __eq__(self, other: object) -> bool:
        """Whether the contents are the same."""
        if not isinstance(other, Checksums):
            return NotImplemented
        return [p.checksum for p in self.chunks] == [p.checksum for p in other.chunks]

    __hash__ = None  # type: ignore[assignment]


class ContentGuard:
    """Compares the contents of watched tensors with their checksums, a part of them in each call.

    Every chunk is compared once in `interval` calls, and never with None. If one differs, all watched tensors are
    compared at once: weights that were written together are used together.
    """

    def __init__(self, interval: int | None = CHECK_INTERVAL) -> None:
        self._schedule: list[tuple[Chunk, ...]] = [()] * (interval or 0)
        self._load = [0] * (interval or 0)
        self._calls = itertools.count()
        self._watched: dict[Any, tuple[Checksums, Callable[[], None], tuple[int, ...]]] = {}
        self._lock = reset_at_fork(threading.RLock())
        # How many writes were detected.
        self.generation = 0

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: Any, checksums: Checksums, on_write: Callable[[], None]) -> None:
        """Call `on_write`, once, when contents no longer match the checksums; replaces what was watched by this key."""
        with self._lock:
            self.forget(key)
            due: dict[int, list[Chunk]] = {}
            least = [(load, i) for i, load in enumerate(self._load)]
            heapq.heapify(least)
            for chunk in checksums.chunks if least else ():
                load, i = least[0]
                due.setdefault(i, []).append(chunk)
                heapq.heapreplace(least, (load + chunk.size, i))
            for i, chunks in due.items():
                self._schedule[i] += tuple(chunks)
                self._load[i] += sum(chunk.size for chunk in chunks)
            self._watched[key] = (checksums, on_write, tuple(due))

    def forget(self, key: Any) -> None:
        """Stop watching what has this key."""
        with self._lock:
            checksums, _, due = self._watched.pop(key, (None, None, ()))
            removed = set(map(id, checksums.chunks)) if checksums is not None else set[int]()
            for i in due:
                self._load[i] -= sum(chunk.size for chunk in self._schedule[i] if id(chunk) in removed)
                self._schedule[i] = tuple(chunk for chunk in self._schedule[i] if id(chunk) not in removed)

    def step(self) -> None:
        """Compare the chunks that are due in this call."""
        if not self._watched or not self._schedule:
            return
        for chunk in self._schedule[next(self._calls) % len(self._schedule)]:
            if not chunk.is_current():
                self.check()
                return

    def check(self) -> set[int]:
        """Compare everything. Return the addresses of tensors written since their checksums were computed."""
        written: set[int] = set()
        with self._lock:
            for key, (checksums, on_write, _) in list(self._watched.items()):
                addresses = checksums.written()
                if addresses:
                    written |= addresses
                    self.generation += 1
                    self.forget(key)
                    on_write()
        return written


Compute = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]
"""Computes the values of derived buffers from weights."""


@contextmanager
def _outside_modes() -> Generator[None]:
    # Inference tensors could not be saved for a backward later.
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


class Derivation:
    """Buffers of a graph as a function of its weights. Graphs that share the buffers share the derivation.

    `sentinels` are attributes whose version counter rises when statistics among the sources are updated. A copy of a
    derivation, or one from a pickle, assumes that the weights have changed.
    """

    def __init__(
        self,
        results: Sequence[str],
        sources: Sequence[str | None],
        compute: Compute,
        sentinels: Sequence[str] = (),
    ) -> None:
        self.results, self.sources, self.compute = tuple(results), tuple(sources), compute
        self.sentinels = tuple(sentinels)
        self.checksums = Checksums(())
        self._stamp: Any = None
        self._lock = reset_at_fork(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return Derivation, (self.results, self.sources, self.compute, self.sentinels)

    @property
    def watched(self) -> tuple[str, ...]:
        """All attributes that are compared to detect a write."""
        return (*(source for source in self.sources if source is not None), *self.sentinels)

    def evaluate(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values for the current weights, and store the stamp and checksums of those."""
        sources = [None if source is None else weights[source] for source in self.sources]
        with _outside_modes():
            # Before they are read, so that the next call notices what is written meanwhile.
            self._stamp = mutation_stamp([weights[target] for target in self.watched])
            self.checksums = Checksums([source for source in sources if source is not None])
            return [value.detach() for value in self.compute(sources)]

    def is_current(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether no weight was written since the buffers were computed, as far as version counters go."""
        return self._stamp == mutation_stamp([weights[target] for target in self.watched])

    def update_stale(self, owner: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Compute the buffers again if a weight was written; other threads wait for them."""
        with self._lock:
            if not self.is_current(weights):
                self.update(owner, weights)

    def update(self, owner: nn.Module, weights: Mapping[str, Tensor]) -> bool:
        """Compute the buffers again. Return whether they have changed."""
        with self._lock:
            changed = False
            for name, value in zip(self.results, self.evaluate(weights), strict=True):
                buffer = self._buffer(owner, name, value)
                # A write that changes nothing would only make compiled code refresh its copies.
                if not torch.equal(buffer, value):
                    changed = True
                    # In place: compiled code may hold its address.
                    with _outside_modes():
                        buffer.copy_(value)
            return changed

    def update_unchecked(self, owner: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Compute the buffers again without comparing, which would wait for the device they are on."""
        with self._lock:
            for name, value in zip(self.results, self.evaluate(weights), strict=True):
                self._buffer(owner, name, value).data.copy_(value)

    def _buffer(self, owner: nn.Module, name: str, value: Tensor) -> Tensor:
        buffer = owner.get_buffer(name)
        if buffer.shape != value.shape:
            sources = ", ".join(f"'{source}'" for source in self.sources if source is not None)
            raise CallMismatch(
                f"'{name}' was computed from {sources} with shape {tuple(buffer.shape)}, and would have shape "
                f"{tuple(value.shape)} now. Run the passes on a new capture."
            )
        return buffer


class _DeviceChunk(Chunk):
    """Buffers on another device than the CPU: computed again when they are due, not compared."""

    __slots__ = ("_update",)

    def __init__(self, update: Callable[[], None], size: int) -> None:
        self._update, self.size, self.address = update, size, 0

    def is_current(self) -> bool:
        # A CUDA graph that is being captured would repeat the update in every replay.
        if not torch.cuda.is_current_stream_capturing():
            self._update()
        return True


class RuntimeWeights:
    """Keeps derived buffers current when a graph is called, and compares contents of weights in turn."""

    def __init__(self, derivations: Iterable[Derivation], contents: ContentGuard) -> None:
        self.contents = contents
        self._all = tuple(derivations)
        self._derivations: list[Derivation] = []
        self._fetch: WeightFetch | None = None
        self._targets: list[str] = []
        self._last: Any = None
        self._known: dict[Derivation, Checksums] = {}

    @property
    def has_copies(self) -> bool:
        """Whether something other than buffers of the graph was computed from weights."""
        return len(self.contents) > len(self._known)

    def __call__(self, owner: nn.Module) -> None:
        """Update stale buffers, and compare the contents that are due in this call."""
        if self._all:
            self._update(owner)
        self.contents.step()

    def check(self, owner: nn.Module) -> set[int]:
        """Compare everything. Return the addresses of weights written since something was computed from them."""
        written: set[int] = set()
        if self._all:
            weights = self._weights(owner)
            self._watch(owner)
            for derivation in self._derivations:
                tensors = [weights[target] for target in derivation.sources if target is not None]
                if any(t.device.type != "cpu" for t in tensors) and derivation.update(owner, weights):
                    written.update(t.data_ptr() for t in tensors)
        written |= self.contents.check()
        if self._all:
            self._update(owner)
        return written

    def _update(self, owner: nn.Module) -> None:
        if self._last is not None and mutation_stamp(self._fetched(owner)) == self._last:
            return
        weights = self._weights(owner)
        # In order: some are computed from others.
        for derivation in self._derivations:
            derivation.update_stale(owner, weights)
        self._watch(owner)
        self._last = mutation_stamp(list(weights.values()))

    def _weights(self, owner: nn.Module) -> dict[str, Tensor]:
        tensors = self._fetched(owner)
        return dict(zip(self._targets, tensors, strict=True))

    def _fetched(self, owner: nn.Module) -> tuple[Tensor, ...]:
        try:
            if self._fetch is not None:
                return self._fetch(owner)
        except AttributeError:  # weights that nothing else needs may have been deleted
            pass
        self._derivations = [d for d in self._all if _has_all(owner, (*d.watched, *d.results))]
        self._targets = list(dict.fromkeys(t for d in self._derivations for t in d.watched))
        self._fetch = WeightFetch(self._targets)
        return self._fetch(owner)

    def _watch(self, owner: nn.Module) -> None:
        """Watch the contents that buffers were computed from."""
        for derivation in self._derivations:
            checksums = derivation.checksums
            if self._known.get(derivation) is checksums:
                continue
            self._known[derivation] = checksums
            size = sum(owner.get_buffer(name).nbytes for name in derivation.results)

            def update(derivation: Derivation = derivation) -> None:
                derivation.update(owner, self._weights(owner))
                self._watch(owner)

            def update_unchecked(derivation: Derivation = derivation) -> None:
                derivation.update_unchecked(owner, self._weights(owner))
                self._known[derivation] = derivation.checksums

            if not checksums.chunks and any(
                owner.get_buffer(n).device.type != "cpu" for n in derivation.results
            ):
                checksums = Checksums(())
                checksums.chunks = (_DeviceChunk(update_unchecked, size),)
            self.contents.watch(derivation, checksums, update)


def _has_all(owner: nn.Module, targets: Sequence[str]) -> bool:
    try:
        return all(isinstance(value, Tensor) for value in WeightFetch(targets)(owner))
    except AttributeError:
        return False
