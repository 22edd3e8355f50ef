"""What stands out in a program: layers that are not fused like the others, what costs most, what fell back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from dovetail.fusion.ledger import Ledger, rules_of
from dovetail.fusion.ledger_entries import Declined
from dovetail.ir.module_paths import format_ranges, is_within, path_of
from dovetail.ir.text_tables import counted, percent
from dovetail.outlining.region import call_of, walk
from dovetail.reporting.level_templates import Box, Templates

_MOST_LAYERS = 12
_MOST_REASONS = 2
_MOST_LETTERS = 300
_COMPILED = ("compiled", "disk", "untried")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One of the numbered modules of a list: its path, its template and the names in it."""

    path: str
    index: int
    template: int
    names: Sequence[str]


def findings(
    gm: GraphModule, box: Box, templates: Templates, ledger: Ledger, seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return what stands out, each with the places it is about: `module:` and a path, or the name of a region."""
    rows = list(_unlike_layers(gm, box, templates, ledger))
    rows += _most_expensive(box, templates, seconds)
    return rows


def fallbacks(ledger: Ledger) -> list[str]:
    """Return what backends failed at, one line each."""
    return [
        f"{entry.region}, {entry.backend}: {entry.outcome}: {entry.reason}"[:_MOST_LETTERS]
        for entry in ledger.lowered
        if entry.outcome not in _COMPILED
    ]


def _most_expensive(box: Box, templates: Templates, seconds: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    if seconds:
        name = max(seconds, key=seconds.__getitem__)
        share = percent(seconds[name], sum(seconds.values()))
        text = f"{name} takes the most time: {share} of what was measured."
        yield {"sort": "cost", "text": text, "at": [name]}
        return
    best: tuple[int, str, int] | None = None
    for name, template in _regions_and_operations(box, templates):
        cost = templates.totals[template].bytes_after
        if templates.records[template]["t"] == "region" and (best is None or cost > best[0]):
            best = (cost, name, template)
    if best is not None:
        cost, name, template = best
        whole = templates.totals[box.template].bytes_after or 1
        equal = _occurrences(box.template, templates.records)[template]
        share = f"{percent(cost, whole)} of the bytes, modelled"
        together = (
            f"; {percent(equal * cost, whole)} with {counted(equal - 1, 'equal region')}" if equal > 1 else ""
        )
        yield {
            "sort": "cost",
            "text": f"{name} is the region that moves the most: {share}{together}.",
            "at": [name],
        }


def _occurrences(root: int, records: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """Return how often each template occurs in a program, outside of regions."""
    counts = Counter({root: 1})
    # Templates refer to earlier ones only, so that in descending order each count is complete before it is passed on.
    for number in range(root, -1, -1):
        if counts[number] and records[number]["t"] != "region":
            for row in records[number].get("c", ()):
                counts[row[0]] += counts[number]
    return counts


def _regions_and_operations(box: Box, templates: Templates) -> Iterator[tuple[str, int]]:
    """Yield the regions and operations of a program by name, those of equal layers once, nothing inside regions."""
    sizes = template_sizes(templates.records)
    stack = [(box.template, 0)]
    while stack:
        number, offset = stack.pop()
        record = templates.records[number]
        if record["t"] in ("op", "region"):
            yield box.names[offset], number
        elif record["t"] == "fold":
            stack.append((record["u"], offset))
        else:
            for row in record.get("c", ()):
                stack.append((row[0], offset))
                offset += sizes[row[0]]


def template_sizes(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of names in each template; templates refer to earlier ones only."""
    sizes: list[int] = []
    for record in records:
        own = int(record["t"] == "region" or "c" not in record)
        sizes.append(own + sum(sizes[row[0]] for row in record.get("c", ())))
    return sizes


def _unlike_layers(
    gm: GraphModule, box: Box, templates: Templates, ledger: Ledger
) -> Iterator[dict[str, Any]]:
    for path, layers in _layer_lists(box, templates):
        by_kinds: dict[Any, list[_Layer]] = {}
        for layer in layers:
            by_kinds.setdefault(_signature(templates, layer), []).append(layer)
        if len(by_kinds) < 2:
            continue
        usual, most = max(by_kinds.items(), key=lambda item: (len(item[1]), item[1][-1].index))
        if len(most) < 2:
            continue
        for signature, others in list(by_kinds.items())[:_MOST_LAYERS]:
            if signature != usual:
                text = _difference(gm, path, others, most, ledger, templates)
                yield {"sort": "differs", "text": text, "at": [f"module:{others[0].path}"]}


def _signature(templates: Templates, layer: _Layer) -> Any:
    return tuple(sorted(templates.kinds[layer.template].items()))


def _layer_lists(box: Box, templates: Templates) -> Iterator[tuple[str, list[_Layer]]]:
    """Yield the numbered modules of each list of modules; lists within equal layers once."""
    records, sizes = templates.records, template_sizes(templates.records)
    stack: list[tuple[int, int, str]] = [(box.template, 0, "")]
    while stack:
        number, offset, path = stack.pop()
        layers: list[_Layer] = []
        level = [(number, offset, "", True)]
        inner: dict[int, tuple[int, int, str]] = {}
        while level:
            at, start, label, opens = level.pop()
            record = records[at]
            if opens or record["t"] in ("fold", "chunk") or (record["t"] == "repeat" and not label):
                end = start + int(record["t"] == "region")
                for row in record.get("c", ()):
                    level.append((row[0], end, row[2] if len(row) > 2 else "", False))
                    end += sizes[row[0]]
            elif record["t"] in ("module", "repeat", "region"):
                below = ".".join(filter(None, (path, label)))
                if label.isdecimal():
                    layers.append(_Layer(below, int(label), at, box.names[start : start + sizes[at]]))
                if record["t"] != "region":
                    inner.setdefault(at, (at, start, below))
        stack += inner.values()
        if len(layers) > 2:
            yield path, sorted(layers, key=lambda layer: layer.index)


def _difference(
    gm: GraphModule,
    path: str,
    others: Sequence[_Layer],
    usual: Sequence[_Layer],
    ledger: Ledger,
    templates: Templates,
) -> str:
    """Return in words how some layers are fused otherwise than most, and why."""
    which, most = (
        f"{path}.{format_ranges([layer.index for layer in layers])}" if path else format_ranges([layer.index for layer in layers])
        for layers in (others, usual)
    )  # fmt: skip
    here, there = templates.kinds[others[0].template], templates.kinds[usual[0].template]
    missing, extra = there - here, here - there
    changes = [
        f"no {_kind_text(kind, n)}" if not here[kind] else f"{n} fewer {_kind_text(kind, 1)}"
        for kind, n in missing.items()
    ]
    changes += [f"{'also' if changes else 'in addition'} {_kind_text(kind, n)}" for kind, n in extra.items()]
    text = f"{which} {'is' if len(others) == 1 else 'are'} not fused like {most}: {', '.join(changes)}."
    reasons = list(_reasons(gm, others[0], {kind.partition("@")[0] for kind in missing}, ledger))
    return f"{text} {' '.join(reasons)}".strip()[: 2 * _MOST_LETTERS]


def _kind_text(kind: str, count: int) -> str:
    name, _, backend = kind.partition("@")
    by = f" by {backend}" if backend else ""
    return f"{name}{by}" + (f" ×{count}" if count > 1 else "")


def _reasons(gm: GraphModule, layer: _Layer, kinds: set[str], ledger: Ledger) -> Iterator[str]:
    kind_of = {rule.name: rule.kind for rule in rules_of(ledger)}
    inside = set(layer.names)
    fused = {(region.kind, name) for region in ledger.accepted for name in region.nodes}
    misses: dict[str, Declined] = {}
    for entry in ledger.declined:
        kind = entry.kind or kind_of.get(entry.rule, entry.rule)
        known = misses.get(kind)
        if kind not in kinds or not inside.intersection(entry.nodes):
            continue
        # What did become a region of the kind is not what is missing.
        if any((kind, name) in fused for name in entry.nodes):
            continue
        if known is None or _nearness(entry) > _nearness(known):
            misses[kind] = entry
    for kind, entry in list(misses.items())[:_MOST_REASONS]:
        near = f" ({entry.matched} of {entry.wanted} operations matched)" if entry.wanted else ""
        yield f"{kind}: {entry.reason}{near}."
    if not misses:
        for name in list(_regions_across(gm, layer.path, inside))[:_MOST_REASONS]:
            yield f"Region {name} around it takes some of its operations."


def _nearness(entry: Declined) -> tuple[bool, float]:
    return not entry.folded, entry.matched / (entry.wanted or 1)


def _regions_across(gm: GraphModule, path: str, inside: set[str]) -> Iterator[str]:
    """Yield the regions outside a module that contain operations of it."""
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None and node.name not in inside:
            paths = Counter(is_within(path_of(member.meta), path) for member in walk(call))
            if paths[True] and paths[False]:
                yield node.name
