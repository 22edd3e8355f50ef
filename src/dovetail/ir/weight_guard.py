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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph
from torch.optim.optimizer import register_optimizer_step_post_hook

from dovetail import torch_compat
from dovetail.errors import CallMismatch
from dovetail.ir.process_state import reset_at_fork

CHECK_INTERVAL = 256
"""In how many calls the contents of every watched tensor are compared once, unless something else is asked for."""
_PIECE = 2**16
"""Bytes that are compared at once: about 15 µs, and what bounds the cost of a call for a small model."""
_VERSION = operator.attrgetter("_version")
_ADDRESS = Tensor.data_ptr
_STATISTICS = frozenset({"running_mean", "running_var"})
_steps = [0]


def fused_optimizer_steps() -> int:
    """How many steps optimizers made by fused kernels since this was first asked; those raise no version counter."""
    _watch_optimizers()
    return _steps[0]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _steps[0] += 1


def mutation_stamp(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Addresses and version counters of tensors: different after every write that is counted."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors have no version counter
        versions = [0 if t.is_inference() else t._version for t in tensors]
    return fused_optimizer_steps(), versions, list(map(_ADDRESS, tensors))


def version_sentinel(target: str) -> str | None:
    """The attribute whose version counter rises where the batch norm statistics at `target` are updated."""
    owner, _, name = target.rpartition(".")
    if name not in _STATISTICS:
        return None
    return f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"


class Chunk:
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


def _pieces(tensor: Tensor) -> Iterator[Chunk]:
    # Reading the memory of another device would wait for everything that was launched there.
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return
    if not is_dense(tensor):
        yield Chunk(tensor)
        return
    for start in range(0, tensor.nbytes, _PIECE):
        yield Chunk(tensor, start, min(start + _PIECE, tensor.nbytes))


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
        self._turns: list[tuple[Chunk, ...]] = [()] * (interval or 0)
        self._load = [0] * (interval or 0)
        self._calls = itertools.count()
        self._watched: dict[Any, tuple[Checksums, Callable[[], None], tuple[int, ...]]] = {}
        self._lock = reset_at_fork(threading.RLock())
        # How often something was written unseen.
        self.generation = 0

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: Any, checksums: Checksums, on_write: Callable[[], None]) -> None:
        """Call `on_write`, once, when contents are others than the checksums tell; in place of what had this key."""
        with self._lock:
            self.forget(key)
            due: dict[int, list[Chunk]] = {}
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


FETCH_METHOD = "_held_tensors"


def find_dict_version() -> Callable[[Any], int] | None:
    """What tells whether a dict was written since, at a fraction of the cost of looking; None where it does not."""
    version = torch_compat.DICT_VERSION.value
    if version is None:
        return None
    probe = nn.Module()
    before = version(probe.__dict__)
    probe.training = False
    return version if version(probe.__dict__) != before else None


dict_version = find_dict_version()
"""How often a dict was written, to be compared with what it was; None where Python does not count."""


class WeightFetch:
    """The tensors at some places below a module, as they are at each call.

    A place that only code of a class can tell (a property) is looked up every time, and so are all where Python does
    not count writes of dicts.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._paths = [target.split(".") for target in targets]
        # One value, for threads: the dicts that decide, how often they had been written, and what was found.
        self._last: tuple[list[dict[str, Any]], list[int], tuple[Any, ...]] | None = None

    def __call__(self, owner: nn.Module) -> tuple[Any, ...]:
        if dict_version is None or torch.compiler.is_compiling():
            return self._found(owner)
        last = self._last
        # A replica of a module shares its code and holds other tensors.
        if last is not None and last[0][0] is owner.__dict__ and list(map(dict_version, last[0])) == last[1]:
            return last[2]
        tables = self._tables(owner)
        if tables is None:
            return self._found(owner)
        # Counted before looking: what is written meanwhile is seen by the next call.
        versions = list(map(dict_version, tables))
        found = self._found(owner)
        self._last = (tables, versions, found)
        return found

    def _found(self, owner: nn.Module) -> tuple[Any, ...]:
        values: list[Any] = []
        for path in self._paths:
            value: Any = owner
            for atom in path:
                value = getattr(value, atom)
            values.append(value)
        return tuple(values)

    def _tables(self, owner: nn.Module) -> list[dict[str, Any]] | None:
        """Every dict that a lookup goes through, that of the module itself first; None if one goes through more."""
        tables: dict[int, dict[str, Any]] = {id(owner.__dict__): owner.__dict__}
        for path in self._paths:
            at = owner
            for atom in path[:-1]:
                tables[id(at.__dict__)], tables[id(at._modules)] = at.__dict__, at._modules
                child = at._modules.get(atom)
                if child is None or atom in at.__dict__ or hasattr(type(at), atom):
                    return None
                at = child
            places = (at.__dict__, at._parameters, at._buffers)
            if hasattr(type(at), path[-1]) or not any(path[-1] in place for place in places):
                return None
            tables.update((id(place), place) for place in places)
        return list(tables.values())


def merge_weight_fetches(graph: Graph, is_tensor: Callable[[str], bool]) -> WeightFetch | None:
    """Let a graph fetch its tensors by one call, which a Holder answers; None if it has none."""
    fetched = [node for node in graph.nodes if node.op == "get_attr" and is_tensor(cast("str", node.target))]
    if not fetched:
        return None
    with graph.inserting_before(fetched[0]):
        # To generated code a method is called as a module is.
        held = graph.create_node("call_module", FETCH_METHOD)
    targets: dict[str, int] = {}
    for node in fetched:
        place = targets.setdefault(cast("str", node.target), len(targets))
        node.op, node.target, node.args = "call_function", operator.getitem, (held, place)
    return WeightFetch(list(targets))


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
        self._lock = reset_at_fork(threading.RLock())

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
            self._state = mutation_stamp([held[target] for target in self.watched])
            self.checksums = Checksums([source for source in sources if source is not None])
            return [value.detach() for value in self.compute(sources)]

    def is_current(self, held: Mapping[str, Tensor]) -> bool:
        """Whether no weight was written since the buffers were computed, as far as version counters go."""
        return self._state == mutation_stamp([held[target] for target in self.watched])

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


class _OnDevice(Chunk):
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
        self._fetch: WeightFetch | None = None
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
        if self._last is not None and mutation_stamp(self._fetched(owner)) == self._last:
            return
        held = self._held(owner)
        # In order: some are computed from others.
        for derivation in self._derivations:
            derivation.update_stale(owner, held)
        self._watch(owner)
        self._last = mutation_stamp(list(held.values()))

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
        self._fetch = WeightFetch(self._targets)
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
        return all(isinstance(value, Tensor) for value in WeightFetch(targets)(owner))
    except AttributeError:
        return False
