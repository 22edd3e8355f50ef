"""Buffers that were computed from weights (constant folding), kept current while the weights change.

A `Derivation` knows how to compute its buffers; `RuntimeWeights` runs in every call of a graph, compares what
`ir.weight_guard` knows of the weights, and computes the buffers again, in place, after a write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dovetail.errors import CallMismatch
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.weight_guard import Checksums, Chunk, ContentGuard, WeightFetch, mutation_stamp

Compute = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]


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
