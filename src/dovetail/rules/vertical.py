"""Vertical fusion by op classes: the `groups` rule.

The problem is producer-consumer fusion of a DAG under one-output groups, as TVM's FuseOps solves it: an operation
fuses with its immediate post-dominator (the nearest operation that all paths from it lead to) and all that is between,
where their classes allow. Two linear sweeps over the units in structural order suffice. The forward sweep labels the
elementwise operations that could be the epilogue of an anchor; the backward sweep finds for each unit whether all of
its readers are in one group, which makes the last of that group its post-dominator, without a dominator tree. Groups
grown along data edges alone are acyclic together; effect edges may close cycles, and the strongly connected components
(Tarjan 1972) of the graph of groups are then split by how many effects of other groups precede each operation. All
steps take O(nodes + edges), sorting aside.

References: Chen et al., "TVM: An Automated End-to-End Optimizing Compiler for Deep Learning", OSDI 2018, section 3;
Tarjan, "Depth-First Search and Linear Graph Algorithms", SIAM J. Comput. 1(2), 1972.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dovetail.errors import checked_call
from dovetail.ir.effects import PURE
from dovetail.outlining.escapes import why_not_clone
from dovetail.rules.fusion_units import (
    UnitPlan,
    UnitRule,
    check_rule_options,
)
from dovetail.rules.op_classes import OpClass, classify, describe_class, known_sizes
from dovetail.rules.rule import Candidate, Proposal, Rule, RuleContext


def split_cyclic_groups(context: RuleContext, group: list[int]) -> list[int]:
    """Return the group of each position after splitting groups that effect edges make depend on each other.

    `group[i]` is the number of the group of position `i`; the parts split off get new numbers. Along data edges alone
    the groups must be acyclic, with all readers of all but one member inside. Only groups on a cycle are split, by how
    many effects of other groups they come after.
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
    component = _strongly_connected(needs)
    if not component:
        return group
    data = context.index.data
    phase = [0] * len(group)
    fresh: dict[tuple[int, int], int] = {}
    split = list(group)
    for i, earlier in enumerate(before):
        own = component.get(of[i])
        if own is None:
            continue
        reads = data[i]
        for j in earlier:
            if component.get(of[j]) == own:
                # After an effect of another group, a new part begins.
                step = of[j] != of[i] and j not in reads
                phase[i] = max(phase[i], phase[j] + step)
        if phase[i]:
            split[i] = fresh.setdefault((of[i], phase[i]), len(group) + len(fresh))
    return split


def _strongly_connected(needs: Sequence[set[int]]) -> dict[int, int]:
    """Return for each vertex on a cycle its strongly connected component, by Tarjan's algorithm without recursion."""
    count = len(needs)
    visited, low = [-1] * count, [0] * count
    clock = itertools.count()
    stack: list[int] = []
    walk: list[tuple[int, Iterator[int]]] = []
    components: dict[int, int] = {}

    def enter(vertex: int) -> None:
        visited[vertex] = low[vertex] = next(clock)
        stack.append(vertex)
        walk.append((vertex, iter(needs[vertex])))

    for start in range(count):
        if visited[start] < 0:
            enter(start)
        while walk:
            at, rest = walk[-1]
            for other in rest:
                if visited[other] < 0:
                    enter(other)
                    break
                low[at] = min(low[at], visited[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[at])
                if low[at] == visited[at]:
                    members = [stack.pop()]
                    while members[-1] != at:
                        members.append(stack.pop())
                    for member in members:
                        visited[member] = count  # a finished component lowers nothing
                    if len(members) > 1:
                        components.update(dict.fromkeys(members, at))
    return components


_BROADCAST, _INJECTIVE = OpClass.BROADCAST, OpClass.INJECTIVE
_REDUCTION, _ANCHOR, _OPAQUE = OpClass.REDUCTION, OpClass.ANCHOR, OpClass.OPAQUE
_MAX_REASONS = 4


class Grouping(UnitPlan):
    """The groups of one graph, for regions of one kind.

    `groups` are the units of each group and those cloned into it, `group` the number of each position's group,
    `owner` the anchor in whose epilogue a unit is, -1 if none.
    """

    def __init__(self, context: RuleContext, rule: Groups) -> None:
        super().__init__(context, rule, grows=rule.grows)
        self.classes = classify(context, self.excluded)
        self.takes_no_producer = [
            excluded or c >= _ANCHOR for excluded, c in zip(self.excluded, self.classes, strict=True)
        ]
        self._sizes = known_sizes(context)
        # Units that would follow an anchor if its group were not at the limit.
        self._over_limit: dict[int, int] = {}
        self.owner = self._epilogues(self._followable_anchors())
        self.joined = self._join()
        self.group = self._acyclic_groups()
        self.groups = self._collect(rule.min_size)

    def _same_sizes(self, position: int, unit: int) -> bool:
        """Whether the values at two positions have the same sizes, as far as both are known."""
        one, two = (self._sizes(self.context.nodes[i]) for i in (position, unit))
        return one == two or one is None or two is None

    def _followable_anchors(self) -> list[int]:
        """Return for each unit the anchor whose epilogue it could be in, -1 if none; the deepest if there are more."""
        data, order, classes = self.context.index.data, self.context.order, self.classes
        unit_of = self.units.unit_of
        label = [-1] * len(classes)
        anchors = {i for i in self.units.ordered if classes[i] is _ANCHOR and not self.excluded[i]}
        if not anchors:
            return label
        size = {i: self.weights[i] for i in anchors}
        for unit in self.units.ordered:
            if unit in anchors:
                label[unit] = unit
                continue
            if classes[unit] > _BROADCAST or self.excluded[unit]:
                continue
            best = -1
            for j in data[unit]:
                source = unit_of[j]
                if label[source] < 0 or (best >= 0 and order[source] < order[best]):
                    continue
                if self._same_sizes(j, unit):
                    best = source
            if best >= 0 and size[label[best]] + self.weights[unit] <= self.max_weight:
                label[unit] = label[best]
                size[label[best]] += self.weights[unit]
            elif best >= 0:
                self._over_limit[unit] = label[best]
        return label

    def _epilogues(self, label: list[int]) -> list[int]:
        """Return for each unit the anchor it follows: all paths from the anchor to its epilogue's last unit stay inside."""
        sink = [-1] * len(label)
        for unit in reversed(self.units.ordered):
            anchor = label[unit]
            if anchor < 0:
                continue
            sink[unit] = unit
            readers = self.units.readers[unit]
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
        """Whether the values a reader reads of a unit have the reader's own sizes."""
        if unit not in self.units.projections:
            return self._same_sizes(unit, reader)
        unit_of, reads = self.units.unit_of, self.context.index.data[reader]
        return all(self._same_sizes(j, reader) for j in reads if unit_of[j] == unit)

    def _join(self) -> list[int]:
        """Return for each unit the last unit of its group."""
        classes, weights = self.classes, self.weights
        group = list(range(len(classes)))
        size = list(weights)
        for unit in reversed(self.units.ordered):
            readers = self.units.readers[unit]
            if classes[unit] is _OPAQUE or not readers or self.excluded[unit]:
                continue
            last = group[readers[0]]
            fits = classes[unit] is not _REDUCTION and all(
                group[reader] == last and not self.takes_no_producer[reader] for reader in readers
            )
            if fits and self._fits(unit, self.owner[last]) and size[last] + weights[unit] <= self.max_weight:
                group[unit] = last
                size[last] += weights[unit]
            elif not self.refused_enough:
                self._refuse(unit, readers, group)
        return group

    def _fits(self, unit: int, theirs: int) -> bool:
        """Whether the class of a unit allows it in a group whose last unit follows anchor `theirs` (-1: none)."""
        own = self.owner[unit]
        if own >= 0 or theirs >= 0:
            return own == theirs or (own < 0 and self.classes[unit] <= _BROADCAST)
        return self.classes[unit] <= _INJECTIVE

    def _acyclic_groups(self) -> list[int]:
        unit_of, joined = self.units.unit_of, self.joined
        if not self.context.index.dependencies.before:
            return [joined[unit] for unit in unit_of]
        grown = {last for unit, last in enumerate(joined) if unit != last}
        group = [joined[unit] if joined[unit] in grown else i for i, unit in enumerate(unit_of)]
        split = split_cyclic_groups(self.context, group)
        if split is not group:
            for unit in self.units.ordered:
                last = split[unit]
                for reader in self.units.readers[unit]:
                    if group[reader] == group[unit] and split[reader] != last:
                        self.refuse((unit, reader), "effects would be reordered", reader)
        return split

    def _collect(self, min_size: int) -> list[tuple[list[int], list[int]]]:
        members: dict[int, list[int]] = {}
        for unit in self.units.ordered:
            if not self.excluded[unit] and self.classes[unit] is not _OPAQUE:
                members.setdefault(self.group[unit], []).append(unit)
        clones = self._clones(members)
        cloned = {unit for units in clones.values() for unit in units}
        groups: list[tuple[list[int], list[int]]] = []
        for number, units in members.items():
            copied = clones.get(number, [])
            if len(units) + len(copied) < min_size or not cloned.isdisjoint(units):
                continue
            if len(units) + len(copied) > 1 and all(self._is_view(u) for u in units):
                self.refuse(tuple(units), "only views and reshapes: no value is computed", units[0])
                continue
            groups.append((units, copied))
        return groups

    def _is_view(self, unit: int) -> bool:
        effects = self.context.index.dependencies.effects.get(unit, PURE)
        return bool(effects.aliases) and not effects.assumed_aliases

    def _clones(self, members: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return the units to clone into each group: those alone in their group, of whose readers some fit one group."""
        clones: dict[int, list[int]] = {}
        copied: set[int] = set()
        size = {number: sum(self.weights[u] for u in units) for number, units in members.items()}
        anchors = {number: max(self.owner[u] for u in units) for number, units in members.items()}
        for unit in reversed(self.units.ordered):
            readers = self.units.readers[unit]
            if len(readers) < 2 or len(members.get(self.group[unit], ())) != 1 or self.group[unit] in clones:
                continue
            if self.classes[unit] > _INJECTIVE or self.owner[unit] >= 0:
                continue
            fitting = [
                r
                for r in readers
                if not self.takes_no_producer[r] and self._fits(unit, anchors[self.group[r]])
            ]
            targets = {self.group[r] for r in fitting}
            if len(targets) != 1 or len(fitting) == len(readers):
                continue
            into = targets.pop()
            if into in copied or any(self.group[r] == into for r in set(readers).difference(fitting)):
                continue
            reason = why_not_clone(self.context.index, unit)
            if reason or size[into] + self.weights[unit] > self.max_weight:
                reason = reason or "the group would be larger than the limit"
                self.refuse((unit, *members[into]), f"not cloned into the group: {reason}", unit)
                continue
            clones.setdefault(into, []).append(unit)
            size[into] += self.weights[unit]
            copied.add(unit)
        self.refusals = [r for r in self.refusals if r.members[0] not in copied]
        return clones

    def _refuse(self, unit: int, readers: Sequence[int], group: list[int]) -> None:
        fusible = [r for r in readers if self.classes[r] is not _OPAQUE and not self.excluded[r]]
        if fusible:
            reader = min(fusible, key=self.context.order.__getitem__)
            self.refuse((unit, reader), self._why_apart(unit, reader, group)[0], reader)

    def _why_apart(self, unit: int, reader: int, group: Sequence[int]) -> list[str]:
        """Return why a unit is not in one group with one that reads it, at least one reason."""
        name, other = self.context.nodes[unit].name, self.context.nodes[reader].name
        reasons: list[str] = []
        if self.classes[unit] in (_REDUCTION, _OPAQUE):
            reasons.append(f"'{name}' is {self._describe(unit)}: nothing is fused after it")
        if self.classes[reader] in (_ANCHOR, _OPAQUE):
            reasons.append(f"'{other}' is {self._describe(reader)}: what it reads is not fused into it")
        elsewhere = [r for r in self.units.readers[unit] if group[r] != group[reader]]
        if elsewhere:
            third = self.context.nodes[min(elsewhere, key=self.context.order.__getitem__)].name
            reasons.append(f"'{name}' is also read by '{third}', outside the group of '{other}'")
        if not reasons:
            full = self.owner[unit] >= 0 and self._over_limit.get(reader) == self.owner[unit]
            reasons.append(self._too_large() if full else self._why_unfit(unit, reader, group[reader]))
        return reasons

    def _describe(self, unit: int) -> str:
        return describe_class(self.context, unit, self.classes[unit])

    def _too_large(self) -> str:
        return f"the group would be larger than {self.max_weight} operations"

    def _why_unfit(self, unit: int, reader: int, last: int) -> str:
        name, other = self.context.nodes[unit].name, self.context.nodes[reader].name
        own, theirs = self.owner[unit], self.owner[last]
        if own < 0 and theirs < 0 and self.classes[unit] is _ANCHOR:
            what = self._describe(unit)
            return f"'{name}' is {what}, and '{other}' after it is not elementwise work of its shape"
        if self._fits(unit, theirs):
            return self._too_large()
        anchor = self.context.nodes[theirs if theirs >= 0 else own].name
        if theirs >= 0:
            kind = self._describe(unit) if own < 0 else f"fused after '{self.context.nodes[own].name}'"
            return (
                f"'{name}' is {kind}: it cannot join what is fused after '{anchor}', {self._describe(theirs)}"
            )
        what = f"'{anchor}', {self._describe(own)}"
        return f"'{name}' is fused after {what}, and '{other}' is not elementwise work of its shape"

    def why_not(self, early: int, late: int) -> list[str]:
        """Return why two units are not in one group: their classes, what is between them, other readers."""
        if early == late or self.group[early] == self.group[late]:
            return []
        nodes, classes = self.context.nodes, self.classes
        reasons = [why for unit in (early, late) if (why := self.why_excluded(unit))]
        if late in self.units.readers[early]:
            return reasons or self._why_apart(early, late, self.group)
        for i in (early, late):
            if classes[i] is _OPAQUE and not self.excluded[i]:
                reasons.append(f"'{nodes[i].name}' is {self._describe(i)}")
        path = self.context.index.path(early, late)
        if not path:
            return [*reasons, f"no value of '{nodes[early].name}' reaches '{nodes[late].name}'"]
        between = {self.units.unit_of[i] for i in self.context.index.between((early, late))} - {early, late}
        hard = [i for i in between if classes[i] >= _REDUCTION or self.excluded[i]]
        for i in sorted(hard, key=self.context.order.__getitem__)[:_MAX_REASONS]:
            reasons.append(f"between them is '{nodes[i].name}', {self._describe(i)}")
        units = [self.units.unit_of[i] for i in path]
        steps = [(a, b) for a, b in itertools.pairwise(units) if self.group[a] != self.group[b]]
        return reasons or self._why_apart(*steps[0], self.group)


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
    """A rule for vertical (producer-consumer) fusion by op classes and post-dominators.

    An operation is in a group with its immediate post-dominator and all operations between. Elementwise, broadcast and
    injective operations fuse with one another and into a reduction, after which nothing fuses. An anchor is followed
    by elementwise work of its shape, and no producer fuses into it; if an operation could follow more than one anchor,
    the deepest takes it. A group returns one value, and saves bytes or launches unless `min_size` is 1. An operation that would stay alone because some of its readers do
    not fuse with it is cloned into the one group that does, if recomputing it is cheap. Groups of views alone are not
    proposed. Regions of other kinds are taken in by the class of their bodies unless `grows` is off; with `nests`,
    those of the rule's own kind too.
    """
    return Groups(kind, name, priority, min_size, nests, grows)


@dataclass(frozen=True)
class Groups(UnitRule):
    """The rule that `groups` returns."""

    kind: str = "group"
    name: str = "groups"
    priority: int = -10
    min_size: int = 2
    nests: bool = False
    grows: bool = True

    def __post_init__(self) -> None:
        check_rule_options(self.name, self.kind, self.priority, min_size=(self.min_size, 1))

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Yield groups that are legal each and all together, and refusals of pairs that do not fuse."""
        grouping = context.analysis(self.plan)
        for units, clones in grouping.groups:
            yield Candidate(
                self.name,
                self.kind,
                grouping.units.positions([*units, *clones]),
                escapes=dict.fromkeys(clones, "duplicate") if clones else "output",
                priority=self.priority,
                divisible=True,
                must_save=self.min_size > 1,
            )
        yield from grouping.refusals

    def plan(self, context: RuleContext) -> Grouping:
        return Grouping(context, self)
