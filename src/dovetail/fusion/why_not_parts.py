"""`why_not`: operations, modules and source lines as questions; why they are not one region, or in none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import UnknownNode, did_you_mean
from dovetail.fusion.coverage import coverage, is_operation
from dovetail.fusion.operation_locations import (
    FusionRecord,
    NodeLocation,
    Reasons,
    locate_operation,
    make_context,
    operation_locations,
    region_text,
    regions_around,
)
from dovetail.fusion.outside import OutsideOperations, outside_operations
from dovetail.fusion.why_not import is_given, near_text, obstacle, rule_reasons, why_not_together
from dovetail.ir.graph_module import attribute
from dovetail.ir.module_paths import frames_of, is_within, matches_path
from dovetail.ir.nodes import is_projection
from dovetail.ir.source_location import lines_of
from dovetail.ir.text_tables import counted, generic, quoted
from dovetail.outlining.inline import inline
from dovetail.rules.rule import RuleContext

_SOURCE_LINE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
_MOST_RECORDED = 5
_MOST_HOMES = 6
_MOST_GROUPS = 4
_MOST_NEIGHBORS = 4


@dataclass(frozen=True)
class _Target:
    """What was asked about: a label for messages, and the names of operations. `module` is a path, if it is one."""

    label: str
    names: tuple[str, ...]
    module: str = ""


class _Question:
    """One graph, with its regions and with all of them inlined, in which targets are looked up."""

    def __init__(self, gm: GraphModule, record: FusionRecord) -> None:
        self.gm, self.record = gm, record
        self.context = make_context(gm, record)
        self.places = operation_locations(self.context)
        self.flat: RuleContext = make_context(inline(gm), record) if self.context.calls else self.context

    def target(self, item: str | Node) -> _Target:
        """Return what an item denotes: an operation, else a source line, else a module."""
        name = item.name if isinstance(item, Node) else item
        if isinstance(item, Node) or not isinstance(name, str) or name in self.places:  # pyright: ignore[reportUnnecessaryIsInstance]
            place = locate_operation(self.context, self.places, item)
            return _Target(f"'{place.name}'", (str(name),))
        line = _SOURCE_LINE.fullmatch(name)
        if line is not None:
            return self._line(name, line["file"], int(line["line"]))
        return self._module(name)

    def _operations(self) -> Iterable[Node]:
        return (node for node in self.flat.nodes if is_operation(node))

    def _line(self, text: str, file: str, number: int) -> _Target:
        inside: list[str] = []
        near: set[int] = set()
        for node in self._operations():
            trace = str(node.meta.get("stack_trace") or node.stack_trace or "")
            lines = [at for at in lines_of(trace) if at.file == file or at.file.endswith(f"/{file}")]
            near.update(at.number for at in lines)
            if any(at.number == number for at in lines):
                inside.append(node.name)
        if not inside:
            closest = sorted(near, key=lambda other: (abs(other - number), other))[:3]
            advice = (
                f"The nearest lines with operations are {', '.join(map(str, sorted(closest)))}."
                if closest
                else "No operation of this graph comes from that file."
            )
            raise UnknownNode("why_not: no operation comes from this line", [text], advice)
        return _Target(f"line {text}", tuple(inside))

    def _module(self, path: str) -> _Target:
        inside: list[str] = []
        paths: set[str] = set()
        for node in self._operations():
            own = {frame.path for frame in frames_of(node.meta)}
            paths |= own
            if any(matches_path(path, p) for p in own if p) or any(
                is_within(p, path) for p in own if p and path
            ):
                inside.append(node.name)
        if not inside:
            if path and isinstance(attribute(self.gm, path), nn.Module):
                what = "why_not: this module has no operations in the graph"
                advice = "It was not called, or it computes nothing here, as dropout does in evaluation."
                raise UnknownNode(what, [path], advice)
            known = [*self.places, *sorted(path for path in paths if path)]
            advice = did_you_mean(path, known, otherwise="`dovetail.text` lists the names of operations.")
            raise UnknownNode("why_not: no such operation, module or source line", [path], advice)
        return _Target(f"module '{path}'", tuple(inside), path)

    def outside(self) -> OutsideOperations:
        """Return the operations in no region."""
        record = self.record
        return outside_operations(
            [coverage(self.gm)], record.declined, record.never, is_fused=record.was_fused
        )


def why_not(
    graphs: Sequence[GraphModule], first: str | Node, second: str | Node | None, record: FusionRecord
) -> Reasons:
    """Return all known reasons, in the last of the graphs that has what is asked about."""
    items = [first] if second is None else [first, second]
    error: UnknownNode | None = None
    for gm in reversed(graphs):
        question = _Question(gm, record)
        try:
            targets = [question.target(item) for item in items]
        except UnknownNode as unknown:
            error = error or unknown
            continue
        return _answer(question, targets)
    raise error or UnknownNode("why_not: no such operation", [str(first)])


def _answer(question: _Question, targets: list[_Target]) -> Reasons:
    names = tuple(dict.fromkeys(name for target in targets for name in target.names))
    if all(len(target.names) == 1 for target in targets):
        places = [question.places[target.names[0]] for target in targets]
        if len(places) == 1:
            return _why_outside(question, places[0])
        return why_not_together(question.context, places[0], places[1], question.record)
    label = " and ".join(target.label for target in targets)
    verb = "have" if len(targets) > 1 else "has"
    return _why_apart(question, _Target(label, names, targets[0].module if len(targets) == 1 else ""), verb)


def _why_outside(question: _Question, place: NodeLocation) -> Reasons:
    """Return why one operation is in no region, or in which it is."""
    name, record = place.name, question.record
    around = regions_around(place)
    if around:
        what = "is itself" if place.call is not None else "is in"
        return Reasons([f"'{name}' {what} {region_text(*around[-1])}."])
    outside = next((o for o in question.outside() if o.name == name), None)
    reasons = [] if outside is None else [f"'{name}' is in no region: {outside.explanation}."]
    others = [*_recorded(record, {name}, at_least=1), *_with_neighbors(question, name)]
    for reason in others:
        if (outside is None or outside.reason not in reason) and not is_given(reason, reasons):
            reasons.append(reason)
    reasons += [f"rule '{e.rule}' failed and was left out: {e.error}" for e in record.errors]
    return Reasons(dict.fromkeys(reasons) or [f"'{name}' is in no region: no rule asked for it."])


def _with_neighbors(question: _Question, name: str) -> list[str]:
    """Return what the rules answer about an operation and what it reads or is read by."""
    context = question.flat
    if name not in context.index.names:
        return []
    node = context.nodes[context.index.names[name]]
    readers = [(user, "which reads it") for user in node.users if is_operation(user)]
    producers = [(other, "which it reads") for other in node.all_input_nodes if is_operation(other)]
    reasons: list[str] = []
    for other, how in [*readers, *producers][:_MOST_NEIGHBORS]:
        ends = sorted((context.index.position[node], context.index.position[other]))
        answers = rule_reasons(context, question.record, *ends)
        reasons += [f"with '{other.name}', {how}: {answer}" for answer in answers]
    return reasons


def _why_apart(question: _Question, target: _Target, verb: str) -> Reasons:
    """Return why some operations are not one region: where they are, what prevents it, and what was declined."""
    inside, record = set(target.names), question.record
    homes: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name in target.names:
        place = question.places.get(name)
        around = regions_around(place) if place is not None else []
        home = around[0][0] if around else ""
        texts[home] = region_text(*around[0]) if around else "no region"
        homes.setdefault(home, []).append(name)
    count = counted(len(target.names), "operation")
    if len(homes) == 1 and "" not in homes:
        home = next(iter(homes))
        others = _operations_of(question, home) - inside
        more = f", which has {counted(len(others), 'other operation')} too" if others else ""
        return Reasons(
            [
                f"{target.label}, {count}, {'are' if verb == 'have' else 'is'} together already, in {texts[home]}{more}."
            ]
        )
    reasons = [f"{target.label} {verb} {count}: {_homes_text(question, homes, texts)}."]
    reasons += [
        f"'{name}' may not be taken: {record.never[name]}." for name in target.names if name in record.never
    ]
    reasons += _obstacles(question, target)
    reasons += _recorded(record, inside, at_least=2)
    groups = OutsideOperations(o for o in question.outside() if o.name in inside).grouped()
    for group in groups[:_MOST_GROUPS]:
        members = quoted([o.name for o in group.operations])
        reasons.append(f"in no region, {members}: {group.operations[0].explanation}.")
    return Reasons(dict.fromkeys(reasons))


def _homes_text(question: _Question, homes: Mapping[str, list[str]], texts: Mapping[str, str]) -> str:
    """Return how many operations are in which regions, those of one kind together, and which are in none."""
    by_kind: dict[str, list[str]] = {}
    for home in homes:
        call = question.places[home].call if home else None
        by_kind.setdefault(call.identity.kind if call is not None else "", []).append(home)
    parts: list[str] = []
    for kind, regions in by_kind.items():
        names = [name for home in regions for name in homes[home]]
        if not kind:
            parts.append(f"{len(names)} in no region, {quoted(names)}")
        elif len(regions) == 1:
            parts.append(f"{len(names)} in {texts[regions[0]]}")
        else:
            parts.append(f"{len(names)} in {len(regions)} regions of kind '{kind}', {quoted(regions, 2)}")
    more = [f"others in {counted(len(parts) - _MOST_HOMES, 'more kind')}"] if len(parts) > _MOST_HOMES else []
    return "; ".join([*parts[:_MOST_HOMES], *more])


def _operations_of(question: _Question, home: str) -> set[str]:
    """Return the operations inside an outermost region."""
    return {
        node.name
        for node in question.flat.nodes
        if is_operation(node)
        and (place := question.places.get(node.name)) is not None
        and place.regions
        and place.regions[0][0] == home
    }


def _obstacles(question: _Question, target: _Target) -> list[str]:
    context = question.flat
    positions = {context.index.names[name] for name in target.names if name in context.index.names}
    positions |= {
        context.index.position[user]
        for i in positions
        for user in context.nodes[i].users
        if is_projection(user)
    }
    between = sorted(context.index.between(positions))
    if between:
        names = quoted([context.nodes[i].name for i in between])
        return [
            f"they alone cannot be one region: {names} depend on some of them, and others depend on these."
        ]
    reason = obstacle(context, positions)
    if reason:
        return [f"they cannot be one region: {reason}."]
    advice = f': `dovetail.rules.modules("{target.module}", kind=...)` does' if target.module else ""
    return [f"nothing prevents one region of all of them; no rule asked for it{advice}."]


def _recorded(record: FusionRecord, names: set[str], *, at_least: int) -> list[str]:
    """Return the refusals of the ledger that name so many of the operations, the nearest first."""
    entries: list[Any] = []
    for entry in record.declined:
        hits = names.intersection((*entry.nodes, entry.place))
        if len(hits) >= min(at_least, len(names)):
            entries.append(entry)
    entries.sort(key=lambda e: (e.folded, -e.matched))
    alike = {(e.rule, generic(e.reason)): e for e in reversed(entries)}
    reasons = [
        f"rule '{e.rule}' declined {quoted(e.nodes)} in round {e.round}{near_text(e)}: {e.reason}."
        for e in reversed(list(alike.values()))
    ]
    left = len(reasons) - _MOST_RECORDED
    return [*reasons[:_MOST_RECORDED], *([f"... and {counted(left, 'more refusal')}."] if left > 0 else [])]
