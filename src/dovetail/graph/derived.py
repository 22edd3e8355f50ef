"""Buffers that passes compute from the weights of a graph, computed again where these were written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dovetail.errors import CallMismatch
from dovetail.graph.forking import released_by_fork
from dovetail.graph.holding import Holder
from dovetail.graph.weight_guard import Checksums, ContentGuard, Piece, write_state

Compute = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]


@contextmanager
def _computing() -> Generator[None]:
    # Inference tensors could not be saved for a backward later.
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


class Derivation:
    """Buffers of a graph as a function of its weights. Graphs that share the buffers share the derivation.

    `sentinels` are attributes whose version counter rises where statistics among the sources are updated. A copy of a
    derivation, or one from a pickle, takes it that the weights have changed.
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
        self._state: Any = None
        self._lock = released_by_fork(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return Derivation, (self.results, self.sources, self.compute, self.sentinels)

    @property
    def watched(self) -> tuple[str, ...]:
        """All attributes that a write shows in."""
        return (*(source for source in self.sources if source is not None), *self.sentinels)

    def evaluate(self, held: Mapping[str, Tensor]) -> list[Tensor]:
        """The values for the weights as they are, whose state is kept."""
        sources = [None if source is None else held[source] for source in self.sources]
        with _computing():
            # Before they are read: what is written meanwhile is noticed by the next call.
            self._state = write_state([held[target] for target in self.watched])
            self.checksums = Checksums([source for source in sources if source is not None])
            return [value.detach() for value in self.compute(sources)]

    def is_current(self, held: Mapping[str, Tensor]) -> bool:
        """Whether no weight was written since the buffers were computed, as far as version counters go."""
        return self._state == write_state([held[target] for target in self.watched])

    def update_stale(self, owner: nn.Module, held: Mapping[str, Tensor]) -> None:
        """Compute the buffers again if a weight was written. A thread that comes meanwhile waits for them."""
        with self._lock:
            if not self.is_current(held):
                self.update(owner, held)

    def update(self, owner: nn.Module, held: Mapping[str, Tensor]) -> bool:
        """Compute the buffers again; whether they are others now."""
        with self._lock:
            changed = False
            for name, value in zip(self.results, self.evaluate(held), strict=True):
                buffer = self._buffer(owner, name, value)
                # A write that changes nothing would only let code be prepared again.
                if not torch.equal(buffer, value):
                    changed = True
                    # In place: code may read it where it is.
                    with _computing():
                        buffer.copy_(value)
            return changed

    def update_unseen(self, owner: nn.Module, held: Mapping[str, Tensor]) -> None:
        """Compute the buffers again without a look at them, which would wait for the device they are on."""
        with self._lock:
            for name, value in zip(self.results, self.evaluate(held), strict=True):
                self._buffer(owner, name, value).data.copy_(value)

    def _buffer(self, owner: nn.Module, name: str, value: Tensor) -> Tensor:
        buffer = owner.get_buffer(name)
        if buffer.shape != value.shape:
            listed = ", ".join(f"'{source}'" for source in self.sources if source is not None)
            raise CallMismatch(
                f"'{name}' was computed from {listed} with shape {tuple(buffer.shape)}, and would have shape "
                f"{tuple(value.shape)} now. Run the passes on a new capture."
            )
        return buffer


class _OnDevice(Piece):
    """Buffers on another device than the CPU: computed again when their turn comes, not compared."""

    __slots__ = ("_update",)

    def __init__(self, update: Callable[[], None], size: int) -> None:
        self._update, self.size, self.address = update, size, 0

    def is_current(self) -> bool:
        # What is recorded now would be done again in every replay.
        if not torch.cuda.is_current_stream_capturing():
            self._update()
        return True


class RuntimeWeights:
    """What a graph does about its weights when it is called: buffers computed again, contents compared."""

    def __init__(self, derivations: Iterable[Derivation], contents: ContentGuard) -> None:
        self.contents = contents
        self._all = tuple(derivations)
        self._derivations: list[Derivation] = []
        self._fetch: Holder | None = None
        self._targets: list[str] = []
        self._last: Any = None
        self._known: dict[Derivation, Checksums] = {}

    @property
    def has_copies(self) -> bool:
        """Whether something other than buffers of the graph was computed from weights."""
        return len(self.contents) > len(self._known)

    def __call__(self, owner: nn.Module) -> None:
        """Do what is due in this call."""
        if self._all:
            self._update(owner)
        self.contents.step()

    def check(self, owner: nn.Module) -> set[int]:
        """Compare everything; the addresses of what was written since something was computed from it."""
        written: set[int] = set()
        if self._all:
            held = self._held(owner)
            self._watch(owner)
            for derivation in self._derivations:
                tensors = [held[target] for target in derivation.sources if target is not None]
                if any(t.device.type != "cpu" for t in tensors) and derivation.update(owner, held):
                    written.update(t.data_ptr() for t in tensors)
        written |= self.contents.check()
        if self._all:
            self._update(owner)
        return written

    def _update(self, owner: nn.Module) -> None:
        if self._last is not None and write_state(self._fetched(owner)) == self._last:
            return
        held = self._held(owner)
        # In order: some are computed from others.
        for derivation in self._derivations:
            derivation.update_stale(owner, held)
        self._watch(owner)
        self._last = write_state(list(held.values()))

    def _held(self, owner: nn.Module) -> dict[str, Tensor]:
        tensors = self._fetched(owner)
        return dict(zip(self._targets, tensors, strict=True))

    def _fetched(self, owner: nn.Module) -> tuple[Tensor, ...]:
        try:
            if self._fetch is not None:
                return self._fetch(owner)
        except AttributeError:  # nothing else may need these weights, and somebody may have deleted them
            pass
        self._derivations = [d for d in self._all if _has_all(owner, (*d.watched, *d.results))]
        self._targets = list(dict.fromkeys(t for d in self._derivations for t in d.watched))
        self._fetch = Holder(self._targets)
        return self._fetch(owner)

    def _watch(self, owner: nn.Module) -> None:
        """Have the contents compared that buffers were computed from."""
        for derivation in self._derivations:
            checksums = derivation.checksums
            if self._known.get(derivation) is checksums:
                continue
            self._known[derivation] = checksums
            size = sum(owner.get_buffer(name).nbytes for name in derivation.results)

            def update(derivation: Derivation = derivation) -> None:
                derivation.update(owner, self._held(owner))
                self._watch(owner)

            def unseen(derivation: Derivation = derivation) -> None:
                derivation.update_unseen(owner, self._held(owner))
                self._known[derivation] = derivation.checksums

            if not checksums.pieces and any(
                owner.get_buffer(n).device.type != "cpu" for n in derivation.results
            ):
                checksums = Checksums(())
                checksums.pieces = (_OnDevice(unseen, size),)
            self.contents.watch(derivation, checksums, update)


def _has_all(owner: nn.Module, targets: Sequence[str]) -> bool:
    try:
        return all(isinstance(value, Tensor) for value in Holder(targets)(owner))
    except AttributeError:
        return False
