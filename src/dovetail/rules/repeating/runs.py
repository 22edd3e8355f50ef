"""Where a sequence repeats itself: stretches that were there before, near or far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Of each width, as many kinds of stretches are looked at more closely as could matter.
_KINDS = 256


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` items from `start` on, equal to those from `start - distance` on.

    `covered` estimates how many items such stretches make up in all.
    """

    start: int
    distance: int
    length: int
    covered: int

    @property
    def in_a_row(self) -> bool:
        """Whether copies follow one another without a gap, so that the distance is a period."""
        return self.length >= self.distance


class Names:
    """Equal numbers for equal windows of a sequence, for widths that are powers of two.

    A width is named by pairs of names of half of it, so each costs no more than the first. Where every window that
    occurs twice does so within its own width, the sequence is nothing but rows of copies, and wider windows would
    tell nothing new.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        self.count = len(sequence)
        self.levels: list[list[int]] = []
        self.earlier: list[
            list[tuple[int, int]]
        ] = []  # by level: places, and how far back their name last was
        self._places: dict[int, dict[int, list[int]]] = {}
        names, width = list(sequence), 1
        while names:
            again = _seen_before(names)
            if not again and self.levels:
                break
            self.levels.append(names)
            self.earlier.append(again)
            if all(distance <= width for _, distance in again):
                break
            known: dict[tuple[int, int], int] = {}
            names = [known.setdefault(pair, len(known)) for pair in zip(names, names[width:], strict=False)]
            width *= 2

    def forward(self, i: int, j: int) -> int:
        """How many items are equal from two places on."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            names = self.levels[k]
            while max(i, j) + length < len(names) and names[i + length] == names[j + length]:
                length += 1 << k
        return length

    def backward(self, i: int, j: int) -> int:
        """How many items are equal before two places, those places not counted."""
        length = 0
        for k in range(len(self.levels) - 1, -1, -1):
            names, width = self.levels[k], 1 << k
            while min(i, j) - length - width >= 0 and (
                names[i - length - width] == names[j - length - width]
            ):
                length += width
        return length

    def places(self, start: int, length: int) -> list[int]:
        """Every place where the `length` items from `start` on occur, in order."""
        k = min(length.bit_length(), len(self.levels)) - 1
        names, width = self.levels[k], 1 << k
        if k not in self._places:
            by_name: dict[int, list[int]] = {}
            for i, name in enumerate(names):
                by_name.setdefault(name, []).append(i)
            self._places[k] = by_name
        found = [i for i in self._places[k][names[start]] if i + length <= self.count]
        for offset in (*range(width, length - width, width), length - width):
            found = [i for i in found if names[i + offset] == names[start + offset]]
        return found

    def stretches(self, least: int) -> list[Stretch]:
        """Stretches of at least `least` items that occurred before, each with its nearest earlier place.

        What covers most comes first.
        """
        if not self.levels:
            return []
        found: dict[int, dict[int, Stretch]] = {}
        for k in range(min(least.bit_length(), len(self.levels)) - 1, len(self.levels)):
            for start, distance, covered in self._best(k, least):
                rows = found.setdefault(distance, {})
                known = (s for s in rows.values() if s.start <= start < s.start + s.length)
                if not any(s.covered >= covered for s in known):
                    stretch = self._widest(start, distance, covered)
                    rows[stretch.start] = stretch
        every = [stretch for rows in found.values() for stretch in rows.values()]
        return sorted(every, key=lambda s: (-s.covered, -s.length, s.start, s.distance))

    def _best(self, k: int, least: int) -> list[tuple[int, int, int]]:
        """The first of each kind of stretch that windows of one width make up, where and how far back, with
        what all of its kind cover together."""
        names, width = self.levels[k], 1 << k
        kinds: dict[tuple[int, int, int, int], list[int]] = {}
        for start, distance, windows in self._runs(k):
            length = windows + width - 1
            if length < least:
                continue
            row = length >= distance
            covered = (length + distance) // distance * distance if row else length
            kind = (length, names[start], names[start + windows - 1], distance if row else 0)
            # The first of stretches with gaps between them was not seen before and counts too.
            known = kinds.setdefault(kind, [start, distance, 0 if row else length])
            known[2] += covered
        ranked = sorted(kinds.values(), key=lambda found: (-found[2], found[0]))
        return [(start, distance, covered) for start, distance, covered in ranked[:_KINDS]]

    def _runs(self, k: int) -> Iterator[tuple[int, int, int]]:
        """Windows that go on side by side with what they equal: the first, how far back, and how many."""
        begin = last = far = -2
        for place, distance in self.earlier[k]:
            if place == last + 1 and distance == far:
                last = place
                continue
            if begin >= 0:
                yield begin, far, last - begin + 1
            begin, last, far = place, place, distance
        if begin >= 0:
            yield begin, far, last - begin + 1

    def _widest(self, start: int, distance: int, covered: int) -> Stretch:
        back = self.backward(start, start - distance)
        length = back + self.forward(start, start - distance)
        if length >= distance:
            covered = max(covered, (length + distance) // distance * distance)
        return Stretch(start - back, distance, length, covered)


def _seen_before(names: list[int]) -> list[tuple[int, int]]:
    """The places whose name occurred before, ascending, and how far back that was."""
    last: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for i, name in enumerate(names):
        j = last.get(name)
        if j is not None:
            found.append((i, i - j))
        last[name] = i
    return found
