"""What fusing saves: a small cost model, to be replaced by whoever knows better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.errors import InvalidArgument, checked_init
from dovetail.fusion.figures import Figures
from dovetail.outlining.requests import Draft, is_projection


@dataclass(frozen=True, slots=True)
class Cost:
    """What running operations takes: bytes read and written, flops, launches, and the most bytes held at once."""

    bytes: int = 0
    flops: int = 0
    launches: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Gain:
    """What a region saves over its operations run one by one, and what it does a second time.

    `score` is what regions are compared by, in bytes. Sizes that are not known count as nothing.
    """

    bytes_saved: int = 0
    launches_saved: int = 0
    bytes_recomputed: int = 0
    score: int = 0


NOTHING = Gain()


class CostModel(Protocol):
    """Says what a region would save. `figures` has the sizes; the draft says what is inside and what leaves."""

    def gain(self, figures: Figures, draft: Draft) -> Gain:
        """What making a region of the draft saves while everything else stays as it is."""
        ...

    def freed(self, figures: Figures, position: int) -> Gain:
        """What is saved besides when an operation goes because every reader has a clone of it."""
        ...


@checked_init()
@dataclass(frozen=True)
class Traffic:
    """Counts memory traffic: values inside a region are neither stored nor loaded, operands are loaded once.

    A launch is worth `launch_bytes`; `flops_per_byte` operations that are done a second time cost one byte.
    """

    launch_bytes: int = 1 << 20
    flops_per_byte: int = 64

    def __post_init__(self) -> None:
        for name in ("launch_bytes", "flops_per_byte"):
            value = getattr(self, name)
            least = 1 if name == "flops_per_byte" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"{name}={value!r} is not an int of {least} or more.")

    def gain(self, figures: Figures, draft: Draft) -> Gain:
        """What making a region of the draft saves while everything else stays as it is."""
        apart, launches = _apart(figures, draft)
        own, again = _loads(figures, draft)
        saved = apart - own - _stores(figures, draft)
        busy = launches or not all(figures.free(i) for i in draft.clones)
        flops = sum(figures.work(i) for i in draft.clones) if draft.clones else 0
        fewer = launches - 1 if busy else 0
        score = saved - again - flops // self.flops_per_byte + fewer * self.launch_bytes
        return Gain(saved, fewer, again, score)

    def freed(self, figures: Figures, position: int) -> Gain:
        """What is saved besides when an operation goes because every reader has a clone of it."""
        if figures.free(position):
            return NOTHING
        reads = sum(figures.bytes(j) for j in figures.index.data[position])
        saved = reads + figures.bytes(position)
        work = figures.work(position) // self.flops_per_byte
        return Gain(saved, 1, 0, saved + work + self.launch_bytes)

    def apart(self, figures: Figures, draft: Draft) -> Cost:
        """What the operations of a draft take one by one."""
        moved, launches = _apart(figures, draft)
        flops = sum(figures.flops(i) for i in draft.members)
        return Cost(moved, flops, launches, _held(figures, draft))

    def together(self, figures: Figures, draft: Draft) -> Cost:
        """What they take as one, with what is cloned into the region."""
        own, again = _loads(figures, draft)
        flops = sum(figures.flops(i) for i in draft.inside)
        launched = not all(figures.free(i) for i in draft.inside)
        held = sum(figures.bytes(i) for i in _operands(figures, draft))
        held += sum(figures.bytes(i) for i in draft.outputs)
        return Cost(own + again + _stores(figures, draft), flops, int(launched), held)


def _apart(figures: Figures, draft: Draft) -> tuple[int, int]:
    """Bytes that the members read and write one by one, and how many of them are launched."""
    data, moved, launches = figures.index.data, 0, 0
    for i in draft.members:
        if figures.free(i):
            continue
        launches += 1
        moved += figures.bytes(i)
        for j in data[i]:
            moved += figures.bytes(j)
    return moved, launches


def _base(figures: Figures, position: int, draft: Draft) -> int:
    """Where a value really is: what it is a view of, as far as the views are inside."""
    members, clones = draft.members, draft.clones
    while position in members or position in clones:
        base = figures.view_of(position)
        if base is None:
            break
        position = base
    return position


def _loads(figures: Figures, draft: Draft) -> tuple[int, int]:
    """Bytes the region loads, each value once: what its own operations need, and what only clones do."""
    index, members, clones = figures.index, draft.members, draft.clones
    through: dict[int, set[int]] = {}
    needed: set[int] = set()
    for inside, own in ((members, True), (clones, False)):
        for i in inside:
            if figures.free(i):
                continue
            for j in index.data[i]:
                base = _base(figures, j, draft)
                if (base in members or base in clones) and index.nodes[base].op != "get_attr":
                    continue
                through.setdefault(base, set()).add(j)
                if own:
                    needed.add(base)
    loads = again = 0
    for base, ways in through.items():
        size = figures.bytes(base)
        if base not in ways:
            # A region that looks at a value through narrow views does not load the whole.
            narrow = sum(figures.bytes(j) for j in ways)
            size = min(size, narrow) if figures.known(base) else narrow
        if base in needed:
            loads += size
        else:
            again += size
    return loads, again


def _stores(figures: Figures, draft: Draft) -> int:
    """Bytes the region stores: its results, each memory once, and what it writes in place."""
    members, nodes = draft.members, figures.index.nodes
    stored: dict[Any, int] = {i: i for i in members if figures.writes(i)}
    for i in draft.outputs:
        base = _base(figures, i, draft)
        if base in members:
            # The same part of a tuple may have been taken twice.
            part = nodes[base].args if is_projection(nodes[base]) else base
            stored[part] = base
    return sum(figures.bytes(i) for i in stored.values())


def _operands(figures: Figures, draft: Draft) -> set[int]:
    inside = draft.members | draft.clones
    return {j for i in inside for j in figures.index.data[i] if j not in inside}


def _held(figures: Figures, draft: Draft) -> int:
    """The most bytes that are held at once while the members run one by one."""
    index, members, kept = figures.index, draft.members, set(draft.outputs)
    last: dict[int, int] = {}
    for i in draft.inside:
        if is_projection(index.nodes[i]):
            continue  # a tuple is held for as long as its parts are
        for j in index.data[i]:
            if j in members:
                last[_base(figures, j, draft)] = i
    held = most = sum(figures.bytes(i) for i in _operands(figures, draft))
    ends: dict[int, list[int]] = {}
    for value, at in last.items():
        ends.setdefault(at, []).append(value)
    for i in sorted(members):
        if not figures.free(i):
            held += figures.bytes(i)
            most = max(most, held)
        held -= sum(figures.bytes(v) for v in ends.get(i, ()) if v in members and v not in kept)
    return most
