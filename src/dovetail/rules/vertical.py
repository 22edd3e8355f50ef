"""Vertical fusion by op classes: every operation joins what reads it, where the classes allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dovetail.errors import checked_call
from dovetail.ir.effects import PURE
from dovetail.outlining.escapes import why_not_redone
from dovetail.rules.op_classes import OpClass, classify, sizes
from dovetail.rules.op_predicate import Refusals, closed, ground, require_rule, weight, why_closed
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext


def untangle(context: RuleContext, group: list[int]) -> list[int]:
    """Groups by position, split where effect edges would make some of them depend on each other in a circle.

    `group[i]` is any number for the group of position `i`; numbers of parts that were split off are new. Along data
    edges alone the groups must be free of circles, with all readers of all but one member inside. Only groups on a
    circle are split, by how many effects of other groups they come after.
    """
    effects = context.index.dependencies.before
    if not effects:
        return group
    before = context.index.before
    numbers = {g: k for k, g in enumerate(dict.fromkeys(group))}
    of = [numbers[g] for g in group]
    needs: list[set[int]] = [set() for _ in numbers]
    for i, earlier in enumerate(before):
        needs[of[i]].update(of[j] for j in earlier if of[j] != of[i])
    circle = _circles(needs)
    if not circle:
        return group
    data = context.index.data
    phase = [0] * len(group)
    fresh: dict[tuple[int, int], int] = {}
    split = list(group)
    for i, earlier in enumerate(before):
        own = circle.get(of[i])
        if own is None:
            continue
        reads = data[i]
        for j in earlier:
            if circle.get(of[j]) == own:
                # An effect of another group: whatever comes after it is a part of its own.
                step = of[j] != of[i] and j not in reads
                phase[i] = max(phase[i], phase[j] + step)
        if phase[i]:
            split[i] = fresh.setdefault((of[i], phase[i]), len(group) + len(fresh))
    return split


def _circles(needs: Sequence[set[int]]) -> dict[int, int]:
    """For each vertex that is on a circle the number of its circle (a strongly connected component)."""
    count = len(needs)
    seen, low = [-1] * count, [0] * count
    on_stack = [False] * count
    stack: list[int] = []
    found: dict[int, int] = {}
    clock = 0
    for start in range(count):
        if seen[start] >= 0:
            continue
        walk = [(start, iter(needs[start]))]
        seen[start] = low[start] = clock
        clock += 1
        stack.append(start)
        on_stack[start] = True
        while walk:
            at, rest = walk[-1]
            for other in rest:
                if seen[other] < 0:
                    seen[other] = low[other] = clock
                    clock += 1
                    stack.append(other)
                    on_stack[other] = True
                    walk.append((other, iter(needs[other])))
                    break
                if on_stack[other]:
                    low[at] = min(low[at], seen[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[at])
                if low[at] == seen[at]:
                    members = [stack.pop()]
                    while members[-1] != at:
                        members.append(stack.pop())
                    for m in members:
                        on_stack[m] = False
                    if len(members) > 1:
                        found.update(dict.fromkeys(members, at))
    return found


_BROADCAST, _INJECTIVE = OpClass.BROADCAST, OpClass.INJECTIVE
_REDUCTION, _ANCHOR, _OPAQUE = OpClass.REDUCTION, OpClass.ANCHOR, OpClass.OPAQUE
_MOST_REASONS = 4


class Grouping:
    """The groups of one context, for regions of one kind.

    `groups` has the units of each group and those cloned into it. `group` has for each position the number of its
    group, `owner` the anchor that an operation follows, -1 if none.
    """

    def __init__(
        self, context: RuleContext, name: str, kind: str, min_size: int, nests: bool, grows: bool = True
    ) -> None:
        self.context, self.kind, self.nests, self.grows = context, kind, nests, grows
        self.on = ground(context)
        self.closed = closed(context, kind, nests, grows)
        self.classes = classify(context, self.closed)
        # What takes no producer in.
        self.shut = [shut or c >= _ANCHOR for shut, c in zip(self.closed, self.classes, strict=True)]
        self.weight = [1] * len(context.nodes)
        for i in context.calls:
            self.weight[i] = weight(context, i)
        self.most = context.limits.nodes or sum(self.weight)
        self.refused = Refusals(name)
        self._sizes: dict[int, object] = {}
        # What would follow an anchor if its group had room.
        self._no_room: dict[int, int] = {}
        self.owner = self._epilogues(self._followed())
        self.joined = self._join()
        self.group = self._untangled()
        self.groups = self._listed(min_size)

    def _alike(self, position: int, unit: int) -> bool:
        """Whether a value has the sizes of what a unit makes of it, as far as both are known."""
        known, nodes = self._sizes, self.context.nodes
        pair: list[object] = []
        for i in (position, unit):
            value = nodes[i].meta.get("val")
            if id(value) not in known:
                known[id(value)] = sizes(value)
            pair.append(known[id(value)])
        return pair[0] == pair[1] or pair[0] is None or pair[1] is None

    def _followed(self) -> list[int]:
        """For each unit the anchor whose elementwise epilogue it could be in, -1 if none; the deepest of several."""
        data, order, home, classes = self.context.index.data, self.context.order, self.on.home, self.classes
        label = [-1] * len(classes)
        anchors = {i for i in self.on.listed if classes[i] is _ANCHOR and not self.closed[i]}
        if not anchors:
            return label
        size = {i: self.weight[i] for i in anchors}
        for unit in self.on.listed:
            if unit in anchors:
                label[unit] = unit
                continue
            if classes[unit] > _BROADCAST or self.closed[unit]:
                continue
            best = -1
            for j in data[unit]:
                source = home[j]
                if label[source] < 0 or (best >= 0 and order[source] < order[best]):
                    continue
                if self._alike(j, unit):
                    best = source
            if best >= 0 and size[label[best]] + self.weight[unit] <= self.most:
                label[unit] = label[best]
                size[label[best]] += self.weight[unit]
            elif best >= 0:
                self._no_room[unit] = label[best]
        return label

    def _epilogues(self, label: list[int]) -> list[int]:
        """For each unit the anchor it follows: all paths from the anchor to the last that follows it stay inside."""
        sink = [-1] * len(label)
        for unit in reversed(self.on.listed):
            anchor = label[unit]
            if anchor < 0:
                continue
            sink[unit] = unit
            readers = self.on.readers[unit]
            if not readers:
                continue
            last = sink[readers[0]]
            if all(label[r] == anchor and sink[r] == last and self._feeds(unit, r) for r in readers):
                sink[unit] = last
        return [
            anchor if anchor >= 0 and sink[anchor] != anchor and sink[anchor] == sink[unit] else -1
            for unit, anchor in enumerate(label)
        ]

    def _feeds(self, unit: int, reader: int) -> bool:
        """Whether what a reader takes of a unit has the reader's own sizes."""
        if unit not in self.on.parts:
            return self._alike(unit, reader)
        home = self.on.home
        return all(self._alike(j, reader) for j in self.context.index.data[reader] if home[j] == unit)

    def _join(self) -> list[int]:
        """For each unit the last of its group."""
        classes, shut, weights = self.classes, self.shut, self.weight
        group = list(range(len(classes)))
        size = list(weights)
        for unit in reversed(self.on.listed):
            found = classes[unit]
            readers = self.on.readers[unit]
            if found is _OPAQUE or not readers or self.closed[unit]:
                continue
            last = group[readers[0]]
            fits = found is not _REDUCTION
            for reader in readers:
                if shut[reader] or group[reader] != last:
                    fits = False
                    break
            if fits and self._fits(unit, self.owner[last]) and size[last] + weights[unit] <= self.most:
                group[unit] = last
                size[last] += weights[unit]
            elif not self.refused.full:
                self._refuse(unit, readers, group)
        return group

    def _fits(self, unit: int, theirs: int) -> bool:
        """Whether an operation may be in a group that follows an anchor, or none (-1), by its class alone."""
        own = self.owner[unit]
        if own >= 0 or theirs >= 0:
            return own == theirs or (own < 0 and self.classes[unit] <= _BROADCAST)
        return self.classes[unit] <= _INJECTIVE

    def _untangled(self) -> list[int]:
        home, joined = self.on.home, self.joined
        if not self.context.index.dependencies.before:
            return [joined[unit] for unit in home]
        grown = {last for unit, last in enumerate(joined) if unit != last}
        group = [joined[home[i]] if joined[home[i]] in grown else i for i in range(len(home))]
        split = untangle(self.context, group)
        if split is not group:
            for unit in self.on.listed:
                last = split[unit]
                for reader in self.on.readers[unit]:
                    if group[reader] == group[unit] and split[reader] != last:
                        self.refused.add((unit, reader), "effects would be reordered", reader)
        return split

    def _listed(self, min_size: int) -> list[tuple[list[int], list[int]]]:
        members: dict[int, list[int]] = {}
        for unit in self.on.listed:
            if not self.closed[unit] and self.classes[unit] is not _OPAQUE:
                members.setdefault(self.group[unit], []).append(unit)
        clones = self._clones(members)
        cloned = {unit for units in clones.values() for unit in units}
        found: list[tuple[list[int], list[int]]] = []
        for number, units in members.items():
            copied = clones.get(number, [])
            if len(units) + len(copied) < min_size or not cloned.isdisjoint(units):
                continue
            if len(units) + len(copied) > 1 and all(self._is_view(u) for u in units):
                self.refused.add(tuple(units), "nothing but views: no value is computed", units[0])
                continue
            found.append((units, copied))
        return found

    def _is_view(self, unit: int) -> bool:
        told = self.context.index.dependencies.effects.get(unit, PURE)
        return bool(told.aliases) and not told.assumed_aliases

    def _clones(self, members: dict[int, list[int]]) -> dict[int, list[int]]:
        """What is cloned into which group: a group of one with readers that fit, all in one group, and others."""
        found: dict[int, list[int]] = {}
        copied: set[int] = set()
        size = {number: sum(self.weight[u] for u in units) for number, units in members.items()}
        anchors = {number: max(self.owner[u] for u in units) for number, units in members.items()}
        for unit in reversed(self.on.listed):
            readers = self.on.readers[unit]
            if len(readers) < 2 or len(members.get(self.group[unit], ())) != 1 or self.group[unit] in found:
                continue
            if self.classes[unit] > _INJECTIVE or self.owner[unit] >= 0:
                continue
            open_to = [r for r in readers if not self.shut[r] and self._fits(unit, anchors[self.group[r]])]
            fitting = {self.group[r] for r in open_to}
            if len(fitting) != 1 or len(open_to) == len(readers):
                continue
            into = fitting.pop()
            if into in copied or any(self.group[r] == into for r in set(readers).difference(open_to)):
                continue
            reason = why_not_redone(self.context.index, unit)
            if reason or size[into] + self.weight[unit] > self.most:
                reason = reason or "the group would be larger than the limit"
                self.refused.add((unit, *members[into]), f"not cloned into the group: {reason}", unit)
                continue
            found.setdefault(into, []).append(unit)
            size[into] += self.weight[unit]
            copied.add(unit)
        self.refused.found = [r for r in self.refused.found if r.members[0] not in copied]
        return found

    def _refuse(self, unit: int, readers: Sequence[int], group: list[int]) -> None:
        fusible = [r for r in readers if self.classes[r] is not _OPAQUE and not self.closed[r]]
        if fusible:
            reader = min(fusible, key=self.context.order.__getitem__)
            self.refused.add((unit, reader), self._why_apart(unit, reader, group)[0], reader)

    def _why_apart(self, unit: int, reader: int, group: Sequence[int]) -> list[str]:
        """Why an operation is not in one group with one that reads it, at least one reason."""
        name, other = self.context.nodes[unit].name, self.context.nodes[reader].name
        found: list[str] = []
        if self.classes[unit] in (_REDUCTION, _OPAQUE):
            found.append(f"'{name}' is {self.classes[unit].words}: nothing fuses behind it")
        if self.classes[reader] in (_ANCHOR, _OPAQUE):
            found.append(f"'{other}' is {self.classes[reader].words}: it takes no producer in")
        elsewhere = [r for r in self.on.readers[unit] if group[r] != group[reader]]
        if elsewhere:
            third = self.context.nodes[min(elsewhere, key=self.context.order.__getitem__)].name
            found.append(f"'{name}' is also read by '{third}', outside the group of '{other}'")
        if not found:
            full = self.owner[unit] >= 0 and self._no_room.get(reader) == self.owner[unit]
            found.append(self._too_large() if full else self._why_unfit(unit, group[reader]))
        return found

    def _too_large(self) -> str:
        return f"the group would be larger than {self.most} operations"

    def _why_unfit(self, unit: int, last: int) -> str:
        name = self.context.nodes[unit].name
        own, theirs = self.owner[unit], self.owner[last]
        if own < 0 and theirs < 0 and self.classes[unit] is _ANCHOR:
            return f"'{name}' is an anchor: only elementwise work of its shape may follow it"
        if self._fits(unit, theirs):
            return self._too_large()
        anchor = self.context.nodes[theirs if theirs >= 0 else own].name
        if theirs >= 0:
            kind = self.classes[unit].words if own < 0 else f"behind '{self.context.nodes[own].name}'"
            return f"'{name}' is {kind}: it cannot join what follows the anchor '{anchor}'"
        return (
            f"'{name}' follows the anchor '{anchor}', behind which only elementwise work of its shape fuses"
        )

    def why_not(self, early: int, late: int) -> list[str]:
        """Why two units are not in one group, empty if they are."""
        if early == late or (self.group[early] == self.group[late]):
            return []
        nodes, classes = self.context.nodes, self.classes
        found = [
            r for i in (early, late) if (r := why_closed(self.context, self.kind, self.nests, i, self.grows))
        ]
        if late in self.on.readers[early]:
            return found or self._why_apart(early, late, self.group)
        for i in (early, late):
            if classes[i] is _OPAQUE and not self.closed[i]:
                found.append(f"'{nodes[i].name}' is opaque: it fuses with nothing")
        path = self.context.index.path(early, late)
        if not path:
            return [*found, f"no value of '{nodes[early].name}' reaches '{nodes[late].name}'"]
        between = {self.on.home[i] for i in self.context.index.between((early, late))} - {early, late}
        hard = [i for i in between if classes[i] >= _REDUCTION or self.closed[i]]
        for i in sorted(hard, key=self.context.order.__getitem__)[:_MOST_REASONS]:
            found.append(f"between them lies '{nodes[i].name}', {classes[i].words}")
        units = [self.on.home[i] for i in path]
        steps = [(a, b) for a, b in pairwise(units) if self.group[a] != self.group[b]]
        return found or self._why_apart(*steps[0], self.group)


@checked_call()
def groups(
    kind: str = "group",
    *,
    name: str = "groups",
    priority: int = -10,
    min_size: int = 2,
    nests: bool = False,
    grows: bool = True,
) -> Rule:
    """A rule for classic vertical fusion by op classes and post-dominators.

    An operation is in a group with the nearest operation that all readers of its value lead to, and with all that
    lies between. Elementwise, broadcast and injective operations fuse with one another and into a reduction, behind
    which nothing fuses. An anchor is followed by elementwise work of its shape, and takes no producer in. Of
    several anchors that one operation could follow, the deepest takes it. A group returns one value; an operation
    that would stay alone, for some of its readers do not fuse with it, is cloned into the one group that does, if
    redoing it is cheap. Groups of nothing but views are not made. Regions of other kinds are taken in by the class of
    what they compute, unless `grows` is off; with `nests`, those of its own kind too.
    """
    return Groups(kind, name, priority, min_size, nests, grows)


@dataclass(frozen=True)
class Groups(Rule):
    """The rule that `groups` makes."""

    kind: str = "group"
    name: str = "groups"
    priority: int = -10
    min_size: int = 2
    nests: bool = False
    grows: bool = True

    def __post_init__(self) -> None:
        require_rule(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Groups that are legal each and all together, and the pairs that looked fusible and were not."""
        plan = context.analysis(self._plan)
        on = ground(context)
        for units, clones in plan.groups:
            yield Candidate(
                self.name,
                self.kind,
                on.positions([*units, *clones]),
                escapes=dict.fromkeys(clones, "duplicate") if clones else "output",
                priority=self.priority,
                divisible=True,
            )
        yield from plan.refused.found

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        """Why two positions are not in one group: by their classes, what lies between them, who else reads."""
        home, plan = ground(context).home, context.analysis(self._plan)
        early, late = sorted((home[first], home[second]), key=context.order.__getitem__)
        return plan.why_not(early, late)

    def _plan(self, context: RuleContext) -> Grouping:
        return Grouping(context, self.name, self.kind, self.min_size, self.nests, self.grows)
