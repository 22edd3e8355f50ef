"""A schedule as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import cast

from torch import nn
from torch.fx import Node

from dovetail.graph.module import attribute
from dovetail.graph.text import text
from dovetail.lowering.backend import resolve
from dovetail.outlining.record import Call, call_of
from dovetail.scheduling.checkpointing import Checkpoint
from dovetail.scheduling.edits import PartGraph
from dovetail.scheduling.finders import path_of
from dovetail.scheduling.paths import around, below, is_within, joined
from dovetail.scheduling.state import State
from dovetail.scheduling.workspace import Workspace


def tree(work: Workspace, *, graphs: bool = False) -> str:
    """The modules of a model with what was done to them, neighbours that are equal on one line.

    Within a traced part only modules with something to tell are shown: its graph runs in their place. With `graphs`
    the graphs of traced parts follow.
    """
    with work.installation.instead(None) as model:
        news = _news(work.state, model)
    with work.exchanged() as model:
        lines = _lines(_Tree(work.state, news), model, "", type(model).__name__)
    if graphs:
        for (root, form), part in work.state.graphs.items():
            lines += ["", f"{root or 'the model'}, call {form}:", text(part.gm)]
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Tree:
    state: State
    news: Mapping[str, list[str]]

    def is_shown(self, path: str) -> bool:
        """Whether a module has a line: not if it is in a traced part and nothing is to be told of it."""
        root = self.state.root_of(path)
        return root in (None, path) or path in self.told

    @cached_property
    def told(self) -> set[str]:
        """The modules that there is something to tell of, and those around them."""
        return {outer for path in self.news for outer in around(path)}


def _lines(tree: _Tree, module: nn.Module, path: str, label: str) -> list[str]:
    """A module and those in it; the first line has no name yet unless it is the model."""
    said = tree.news.get(path)
    lines = [f"{label}  <- {', '.join(said)}" if said else label]
    children: list[tuple[str, list[str]]] = []
    for name, child in module._modules.items():
        inner = joined(path, name)
        if child is not None and child is not module and tree.is_shown(inner):
            children.append((name, _lines(tree, child, inner, _class_name(child))))
    for _, alike in groupby(children, key=lambda c: c[1]):
        folded = list(alike)
        first, *rest = folded[0][1]
        lines.append(f"  {_names([name for name, _ in folded])}: {first}")
        lines += [f"  {line}" for line in rest]
    return lines


def _names(names: list[str]) -> str:
    """Names of neighbours: numbers in a row as their first and last."""
    if len(names) > 2 and all(name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{names[0]}-{names[-1]}"
    return ", ".join(names)


def _class_name(module: nn.Module) -> str:
    return module._get_name()


def _news(state: State, model: nn.Module) -> dict[str, list[str]]:
    """What was done, by the path of the module that it was done to; the model is as it was given."""
    news: dict[str, list[str]] = {}
    for path in state.swaps:
        news.setdefault(path, []).append(f"in place of {_class_name(_old(state, model, path))}")
    for path, trace in state.traces.items():
        ways = len(trace.calls)
        news.setdefault(path, []).append("traced" if ways == 1 else f"traced, {ways} ways of calling")
        for place, told in _by_place(state, path, ways).items():
            news.setdefault(place, []).extend(told)
    for path in sorted(state.checkpoints):
        news.setdefault(path, []).append("checkpointed")
    for path, notes in state.notes.items():
        news.setdefault(path, []).extend(f"{key}={value!r}" for key, value in notes.items())
    return news


def _old(state: State, model: nn.Module, path: str) -> nn.Module:
    """What stood at a path before it was replaced, which may be a piece of something that was replaced too."""
    around = [outer for outer in state.swaps if outer != path and is_within(path, outer)]
    if not around:
        return model.get_submodule(path)
    outer = max(around, key=len)
    return state.swaps[outer].get_submodule(below(path, outer))


def _by_place(state: State, root: str, ways: int) -> dict[str, list[str]]:
    """Regions and replaced operations of a traced part, by the module that all their operations came from."""
    known = {
        joined(root, path) for path, _ in state.traces[root].module.named_modules(remove_duplicate=False)
    }
    forms = [_counted(state.graphs[root, form], root, known) for form in range(ways)]
    news: dict[str, list[str]] = {}
    for place in dict.fromkeys(place for form in forms for place in form):
        told = [_listed(form.get(place, Counter())) for form in forms]
        if all(words == told[0] for words in told):
            news[place] = told[0]
        else:
            news[place] = [f"{word} in call {i}" for i, words in enumerate(told) for word in words]
    return news


def _listed(counts: Counter[str]) -> list[str]:
    return [what if count == 1 else f"{count} {what}" for what, count in counts.items()]


def _counted(part: PartGraph, root: str, known: Set[str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for node in part.gm.graph.nodes:
        if node.op != "call_module":
            continue
        call = call_of(node.meta)
        told = _replaced(part, node) if call is None else _region(part, node, call)
        place = joined(root, path_of(node))
        counts.setdefault(place if place in known else root, Counter())[told] += 1
    return counts


def _replaced(part: PartGraph, node: Node) -> str:
    called = attribute(part.gm, cast("str", node.target))
    return f"calls {called._get_name()}"


def _region(part: PartGraph, node: Node, call: Call) -> str:
    """A region: who runs it, or for whom it was made who does not run it as it is called now."""
    kind, asked = call.identity.kind, part.backends.get(node.name)
    if asked is None:
        return kind
    backends = resolve(asked)
    if any(isinstance(backend, Checkpoint) for backend in backends):
        return f"{kind} checkpointed"
    return (
        f"{kind} by {call.backend}" if call.backend else f"{kind} for {' or '.join(b.name for b in backends)}"
    )
