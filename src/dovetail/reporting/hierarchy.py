"""The hierarchy of a program: its operations by module, regions as boxes with their bodies inside.

Operations are grouped by the path of the module that they came from. A module whose operations cannot be one box without a
cycle, because others run between two calls of it, is split into runs: the quotient graph of a level is sorted by Kahn's
algorithm (`ir.quotient_graph`), and groups on a cycle are divided into intervals of the graph's own order, whose quotient
is acyclic. Time is linear in the operations and their operands, for each level of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch.fx import GraphModule, Node

from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.module_paths import frames_of, path_of
from dovetail.ir.nodes import is_projection
from dovetail.ir.quotient_graph import topological_order
from dovetail.outlining.region import RegionCall, body_key, call_of, clone_of, lowering_view, results, walk
from dovetail.reporting.level_templates import Box, Operand, Templates, Totals, Value, level
from dovetail.reporting.operation_text import OperationTexts

_MOST_INPUTS = 12


@dataclass(eq=False)
class _Scope:
    """The operations of a graph or of a body, each with its name and meta in this call."""

    owner: GraphModule
    path: str
    values: dict[Node, Operand]
    nodes: list[Node] = field(default_factory=list[Node])
    names: list[str] = field(default_factory=list[str])
    metas: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    results: list[list[Value]] = field(default_factory=list[list[Value]])
    bodies: dict[int, _Scope] = field(default_factory=dict[int, "_Scope"])
    copies: set[int] = field(default_factory=set[int])
    """The positions of copies of operations that are elsewhere: they compute, but the program had them once."""
    read: set[Value] = field(default_factory=set[Value])
    call: RegionCall | None = None
    name: str = ""


@dataclass(eq=False)
class _ModuleGroup:
    """Operations of one module in a scope, by position: what becomes one level. `path` has the parts of the module's path."""

    label: str
    path: tuple[str, ...]
    positions: list[int]
    entries: list[_ModuleGroup | int] = field(default_factory=list[Any])
    box: Box | None = None


class HierarchyBuilder:
    """Builds hierarchies of programs out of common templates, so that equal parts of two have the same number."""

    def __init__(self) -> None:
        self.templates = Templates()
        self.texts = OperationTexts()
        self.placed: dict[str, int] = {}
        """The template of each operation and region of the graph built last, by name; nested regions by path."""

    def build(self, gm: GraphModule) -> Box:
        """Return the box of a whole graph."""
        self._uses: dict[Value, int] = {}
        self._weights: dict[str, Value] = {}
        self._values = 0
        self._classes: dict[str, str] = {}
        self._lowering = lowering_view(gm)
        self._counted = _original_names(gm)
        self.placed = {}
        scope = _Scope(gm, "", {})
        inputs = gm.graph.find_nodes(op="placeholder")
        for node in inputs:
            scope.values[node] = self._new_value()
        self._read(scope, [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")], None)
        returned = [scope.values[n] for n in gm.graph.output_node().all_input_nodes]
        for value in returned:
            self._use(scope, value)
        boxes = [*self._input_boxes(scope, inputs), *self._boxes(scope), self._output_box(returned)]
        return level(self.templates, "graph", boxes, "", own={"y": self._classes.get("", "")})

    # First all values are numbered and their uses counted, in every body.

    def _new_value(self) -> Value:
        self._values += 1
        self._uses[self._values] = 0
        return self._values

    def _use(self, scope: _Scope, operand: Operand) -> None:
        if isinstance(operand, int):
            self._uses[operand] += 1
            scope.read.add(operand)

    def _read(self, scope: _Scope, nodes: Iterable[Node], call: RegionCall | None) -> None:
        members = iter(call.members if call is not None else ())
        elements: dict[Node, list[Operand]] = {}
        for node in nodes:
            member = next(members, None)
            name, meta = (node.name, node.meta) if member is None else (member.name, member.meta)
            original = clone_of(node) if member is None else None if member.is_original else member.original
            if node.op == "get_attr":
                target = cast("str", node.target)
                borrowed = scope.owner.borrowed.get(target) if isinstance(scope.owner, Body) else None
                scope.values[node] = (member.target if member is not None else None) or borrowed or target
                continue
            if is_projection(node):
                source, place = cast("tuple[Node, int]", node.args[:2])
                parts = elements.get(source, [])
                scope.values[node] = (
                    parts[place] if -len(parts) <= place < len(parts) else scope.values[source]
                )
                continue
            inner_call = call_of(meta)
            body = attribute(scope.owner, cast("str", node.target)) if inner_call is not None else None
            is_call = inner_call is not None and isinstance(body, GraphModule)
            if inner_call is not None and isinstance(body, GraphModule):
                parts = self._read_call(scope, node, inner_call, body, name, meta)
            else:
                for used in node.all_input_nodes:
                    self._use(scope, scope.values[used])
                value = node.meta.get("val")
                count = len(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else 1
                parts = [self._new_value() for _ in range(max(1, count))]
            if original is not None and not is_call:
                if original in self._counted:
                    scope.copies.add(len(scope.nodes))
                self._counted.add(original)
            elements[node] = list(parts)
            scope.values[node] = parts[0] if parts else ""
            scope.nodes.append(node)
            scope.names.append(name)
            scope.metas.append(meta)
            scope.results.append([p for p in parts if isinstance(p, int)])

    def _read_call(
        self,
        scope: _Scope,
        node: Node,
        call: RegionCall,
        body: GraphModule,
        name: str,
        meta: Mapping[str, Any],
    ) -> list[Operand]:
        operands = [scope.values[a] for a in node.args if isinstance(a, Node)]
        inner = _Scope(
            body, _module_path(meta), {}, call=call, name=f"{scope.name}/{name}" if scope.name else name
        )
        values = [o if isinstance(o, int) else self._weight_value(o) for o in operands]
        for placeholder, value in zip(body.graph.find_nodes(op="placeholder"), values, strict=False):
            inner.values[placeholder] = value
        self._read(inner, [n for n in body.graph.nodes if n.op not in ("placeholder", "output")], call)
        # An operand that the body does not read is still drawn as one.
        for value in dict.fromkeys(values):
            if value not in inner.read:
                self._use(inner, value)
        scope.read |= inner.read
        scope.bodies[len(scope.nodes)] = inner
        return [inner.values[result] for result in results(body)]

    def _weight_value(self, path: str) -> Value:
        if path not in self._weights:
            self._weights[path] = self._new_value()
        return self._weights[path]

    # Then boxes are built from the inside out.

    def _boxes(self, scope: _Scope) -> list[Box]:
        """Return the boxes at the top of a scope, grouped by module, in topological order."""
        base = scope.path
        paths = [_relative_parts(_module_path(meta), base) for meta in scope.metas]
        for meta in scope.metas:
            for frame in frames_of(meta):
                self._classes.setdefault(frame.path, frame.class_name)
        leaves = [self._leaf(scope, i) for i in range(len(scope.nodes))]
        producer = {value: i for i, values in enumerate(scope.results) for value in values}
        needs = [{producer[v] for v in leaf.reads if v in producer} for leaf in leaves]
        top = _ModuleGroup("", (), list(range(len(leaves))))
        groups = [top]
        for group in groups:
            _divide(group, paths, needs)
            groups += [entry for entry in group.entries if isinstance(entry, _ModuleGroup)]
        for group in reversed(groups):
            boxes = [
                entry.box if isinstance(entry, _ModuleGroup) else leaves[entry] for entry in group.entries
            ]
            inner = [box for box in boxes if box is not None]
            if group is top:
                return inner
            prefix = ".".join(filter(None, (base, *group.path)))
            if len(group.positions) == 1:
                group.box = inner[0]
            else:
                group.box = level(
                    self.templates, "module", inner, prefix, own={"y": self._classes.get(prefix, "")}
                )
            group.box.label = group.label
        return []

    def _leaf(self, scope: _Scope, i: int) -> Box:
        node, values = scope.nodes[i], scope.results[i]
        provides = {value: self._uses[value] for value in values}
        body = scope.bodies.get(i)
        if body is not None and body.call is not None:
            return self._region(scope, i, body, body.call)
        text = self.texts.text(scope.owner, node)
        operands = [scope.values[n] for n in node.all_input_nodes]
        reads = dict.fromkeys((o for o in operands if isinstance(o, int)), 1)
        source = self.texts.sources.at(scope.metas[i].get("stack_trace") or "")
        totals = text.totals
        if i in scope.copies:
            # Inside a region the region pays for it, by what it reads again.
            totals = Totals() if scope.call is not None else replace(totals, operations=0, flops=0, bytes_before=0, launches_before=0)  # fmt: skip
        key = ("op", text.target, text.arguments, text.types, source, text.bytes_read, totals)
        record: dict[str, Any] = {"t": "op", "p": text.target, "a": text.arguments, "v": text.types}
        record["b"] = [text.bytes_read, text.bytes_written]
        if source is not None:
            record["s"] = source
        record["m"] = totals.as_list()
        template = self.templates.add(key, record, totals, Counter())
        self.placed.setdefault(scope.names[i], template)
        return Box(template, [scope.names[i]], operands, reads, provides)

    def _region(self, scope: _Scope, i: int, body: _Scope, call: RegionCall) -> Box:
        node = scope.nodes[i]
        outer = [scope.values[a] for a in node.args if isinstance(a, Node)]
        boxes = self._boxes(body)
        values = [o if isinstance(o, int) else self._weights[o] for o in outer]
        returned = [v for v in (body.values[r] for r in results(body.owner)) if isinstance(v, int)]
        added = sum((self.templates.totals[box.template] for box in boxes), Totals())
        bytes_saved, launches_saved = self.texts.saved(body.owner, {body.nodes[k].name for k in body.copies})
        totals = replace(
            added,
            fused=added.operations,
            bytes_after=max(0, added.bytes_after - bytes_saved),
            launches_after=max(0, added.launches_after - launches_saved),
        )
        own: dict[str, Any] = {
            "r": call.identity.kind,
            "h": call.identity.attrs,
            "e": body_key(body.owner)[:16],
        }
        backend = call.backend
        if self._lowering is not None:
            backend = self._lowering.backend_of(body.name, call.backend)
        for letter, value in (("w", backend), ("q", call.rule), ("n", call.round)):
            if value is not None:
                own[letter] = value
        if call.identity.version != 1:
            own["x"] = call.identity.version
        box = level(
            self.templates, "region", boxes, body.path, own=own, operands=list(dict.fromkeys(values)),
            results=returned, names=[scope.names[i]], totals=totals, kinds=[f"{call.identity.kind}@{backend or ''}"],
        )  # fmt: skip
        self.placed[body.name] = box.template
        weights = {value for value, operand in zip(values, outer, strict=True) if isinstance(operand, str)}
        box.operands = list(dict.fromkeys(outer))
        box.reads = {value: count for value, count in box.reads.items() if value not in weights}
        return box

    def _input_boxes(self, scope: _Scope, inputs: Sequence[Node]) -> list[Box]:
        """Return a box for each input of the graph, or one for all of many."""
        groups = [list(inputs)] if len(inputs) > _MOST_INPUTS else [[node] for node in inputs]
        boxes: list[Box] = []
        for group in groups:
            types = tuple(self.texts.type_number(n.meta.get("val")) for n in group)
            target = "input" if len(group) == 1 else f"{len(group)} inputs"
            template = self.templates.add(
                ("in", target, types), {"t": "in", "p": target, "v": types}, Totals(), Counter()
            )
            provides = {cast("int", scope.values[n]): self._uses[cast("int", scope.values[n])] for n in group}
            name = group[0].name if len(group) == 1 else f"{group[0].name}…{group[-1].name}"
            boxes.append(Box(template, [name], [], {}, provides))
        return boxes

    def _output_box(self, returned: Sequence[Operand]) -> Box:
        template = self.templates.add(("out",), {"t": "out", "p": "output", "v": ()}, Totals(), Counter())
        reads: dict[Value, int] = {}
        for value in returned:
            if isinstance(value, int):
                reads[value] = reads.get(value, 0) + 1
        return Box(template, ["output"], list(dict.fromkeys(returned)), reads, {})


def _original_names(gm: GraphModule) -> set[str]:
    """Return the names of the operations of a graph that are no copies, those inside regions included."""
    names: set[str] = set()
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            names.update(member.name for member in walk(call) if member.is_original)
        elif clone_of(node) is None:
            names.add(node.name)
    return names


def _module_path(meta: Mapping[str, Any]) -> str:
    return path_of(meta)


def _relative_parts(path: str, base: str) -> tuple[str, ...]:
    """Return the parts of a module's path below another; none if it is not below it."""
    if not path or path == base:
        return ()
    if not base:
        return tuple(path.split("."))
    return tuple(path[len(base) + 1 :].split(".")) if path.startswith(f"{base}.") else ()


def _divide(group: _ModuleGroup, paths: Sequence[tuple[str, ...]], needs: Sequence[set[int]]) -> None:
    """Set the entries of a group: its own operations, and groups of those in modules below, in topological order."""
    if len(group.positions) == 1:
        group.entries = [*group.positions]
        return
    depth = len(group.path)
    while group.path:
        heads = {paths[i][depth] if len(paths[i]) > depth else None for i in group.positions}
        head = next(iter(heads))
        if len(heads) > 1 or head is None:
            break
        group.path = (*group.path, head)
        group.label = f"{group.label}.{head}" if group.label else head
        depth += 1
    parts: dict[str, list[int]] = {}
    units: list[list[int]] = []
    for i in group.positions:
        if len(paths[i]) > depth:
            unit = parts.setdefault(paths[i][depth], [])
            if not unit:
                units.append(unit)
            unit.append(i)
        else:
            units.append([i])
    order, cyclic = _sorted_units(units, needs)
    if cyclic:
        units = [u for k, u in enumerate(units) if k not in cyclic] + _runs([units[k] for k in cyclic])
        units.sort(key=lambda unit: unit[0])
        order, _ = _sorted_units(units, needs)
    for k in order:
        first = units[k][0]
        if len(paths[first]) > depth:
            below = paths[first][depth:] if len(units[k]) == 1 else paths[first][depth : depth + 1]
            group.entries.append(_ModuleGroup(".".join(below), (*group.path, *below), units[k]))
        else:
            group.entries.append(first)


def _sorted_units(units: Sequence[Sequence[int]], needs: Sequence[set[int]]) -> tuple[list[int], set[int]]:
    """Return units in topological order, and those that are on a cycle."""
    owner = {i: k for k, unit in enumerate(units) for i in unit}
    before = [{owner[j] for i in unit for j in needs[i] if j in owner} - {k} for k, unit in enumerate(units)]
    order = topological_order(before, [unit[0] for unit in units])
    core = set(range(len(units))).difference(order)
    if not core:
        return order, core
    after: list[list[int]] = [[] for _ in units]
    for k in core:
        for j in before[k] & core:
            after[j].append(k)
    return order, core.difference(topological_order(after))


def _runs(units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the intervals of consecutive positions of one unit."""
    owner = {i: k for k, unit in enumerate(units) for i in unit}
    runs: list[list[int]] = []
    last = -1
    for i in sorted(owner):
        if owner[i] != last:
            runs.append([])
        runs[-1].append(i)
        last = owner[i]
    return runs
