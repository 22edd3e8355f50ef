"""What users say of operators and functions whose schema does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_call, did_you_mean
from dovetail.graph.effects import Reader, declared_in
from dovetail.graph.keys import DECLARED
from dovetail.graph.module import Body, copy_graph, rebuild, require_graph
from dovetail.graph.spellings import qualified_name, target_name


@checked_call()
def declare(gm: GraphModule, what: Mapping[Any, str]) -> GraphModule:
    """A graph in which calls of the given targets count as "ordered" (an effect) or "pure".

    Targets are operators (a packet means each of its overloads), functions, or names as `text` writes them. "ordered"
    is added to what is known; "pure" takes back what was assumed, never a write that a schema declares. Holds in
    regions too, and travels with the graph.
    """
    require_graph(gm)
    if not isinstance(what, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"declare takes a mapping from target to word, not a {type(what).__name__}.")
    known = dict(declared_in(gm))
    called = _called_names(gm)
    for target, word in what.items():
        if word not in ("ordered", "pure"):
            raise InvalidArgument(f"{word!r} for {target}: a call is declared 'ordered' or 'pure'.")
        names = _names(target)
        if not called.intersection(names):
            hint = did_you_mean(names[0], called, otherwise="`dovetail.text` shows the names.")
            raise InvalidArgument(f"no node of the graph calls {names[0]}. {hint}")
        known.update(dict.fromkeys(names, word))
    new = rebuild(gm, copy_graph(gm.graph), meta={**gm.meta, DECLARED: known})
    reader = Reader(new)
    for name, child in list(new._modules.items()):
        if isinstance(child, Body):
            new._modules[name] = _remarked(child, reader)
    return new


def _called_names(gm: GraphModule) -> set[str]:
    """What the nodes of a graph call, and those of the graphs it calls."""
    graphs = [m for m in gm.modules() if isinstance(m, GraphModule)]
    return {target_name(node) for graph in graphs for node in graph.graph.nodes}


def _names(target: Any) -> list[str]:
    if isinstance(target, str):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [str(target), *(f"{target}.{overload}" for overload in target.overloads())]
    if not callable(target):
        raise InvalidArgument(f"{target!r} cannot be called: declare an operator, a function, or its name.")
    return [qualified_name(target)]


def _remarked(body: Body, reader: Reader) -> Body:
    """The body, or a copy of it, with the mark that dead-code elimination asks for as it is to be now."""
    inner = {n: _remarked(m, reader) for n, m in body._modules.items() if isinstance(m, Body)}
    acts = reader.summary(body).acts
    if acts == body.is_marked_impure and all(body._modules[n] is m for n, m in inner.items()):
        return body
    new = body.copied()
    new._modules.update(inner)
    new.mark_impure(acts)
    return new
