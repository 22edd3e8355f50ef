"""A schedule as text."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dovetail.graph.text import text
from dovetail.outlining.region import regions
from dovetail.scheduling.paths import is_within
from dovetail.scheduling.workspace import Workspace


def tree(work: Workspace, *, graphs: bool = False) -> str:
    """The modules of a model, one line each, with what was done to them; equal neighbours without news are folded."""
    with work.exchanged() as model:
        lines = _lines(work, model, "", 0)
    if graphs:
        for (root, form), part in work.state.graphs.items():
            lines += ["", f"{root or 'the model'}, call {form}:", text(part.gm)]
    return "\n".join(lines)


def _lines(work: Workspace, module: nn.Module, path: str, depth: int) -> list[str]:
    name = path.rpartition(".")[2] or "model"
    said = _news(work, path)
    lines = [f"{'  ' * depth}{name}: {type(module).__name__}{f'  <- {said}' if said else ''}"]
    if path in work.state.traces:
        return lines
    folded: tuple[str, list[str]] | None = None
    count = 0

    def flush() -> None:
        if folded is not None:
            first, *rest = folded[1]
            lines.extend([f"{first}{f'  (x{count})' if count > 1 else ''}", *rest])

    for child_name, child in module.named_children():
        inner = f"{path}.{child_name}" if path else child_name
        made = _lines(work, child, inner, depth + 1)
        key = "\n".join(made).replace(child_name, "", 1)
        if folded is not None and folded[0] == key and not _is_touched(work, inner):
            count += 1
            continue
        flush()
        folded, count = (key, made), 1
    flush()
    return lines


def _is_touched(work: Workspace, path: str) -> bool:
    state = work.state
    return any(is_within(p, path) for p in (*state.traces, *state.swaps, *state.checkpoints, *state.notes))


def _news(work: Workspace, path: str) -> str:
    state = work.state
    said: list[str] = []
    if path in state.swaps:
        said.append("replaced")
    if path in state.traces:
        calls = len(state.traces[path].calls)
        said.append("traced" if calls == 1 else f"traced, {calls} ways of calling")
        made: Counter[str] = Counter()
        for (root, form), part in state.graphs.items():
            if root == path and form == 0:
                for region in regions(part.gm):
                    made[f"{region.kind}{f' by {region.backend}' if region.backend else ''}"] += 1
                made.update(
                    f"replaced by {node.target}"
                    for node in part.gm.graph.nodes
                    if node.op == "call_module" and not _is_region(part.gm, node)
                )
        said += [f"{kind}{f' x{count}' if count > 1 else ''}" for kind, count in made.items()]
    if path in state.checkpoints:
        said.append("checkpointed")
    if path in state.notes:
        said += [f"{key}={value!r}" for key, value in state.notes[path].items()]
    return ", ".join(said)


def _is_region(gm: nn.Module, node: object) -> bool:
    from dovetail.outlining.record import call_of

    return call_of(node.meta) is not None  # type: ignore[attr-defined]
