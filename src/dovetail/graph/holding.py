"""Tensors that code fetches from the modules of its graph: all at once, and again only where something was written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph

from dovetail import torch_compat

HELD = "_held_tensors"


def writes_counter() -> Callable[[Any], int] | None:
    """What tells whether a dict was written since, at a fraction of the cost of looking; None where it does not."""
    version = torch_compat.DICT_VERSION.value
    if version is None:
        return None
    probe = nn.Module()
    before = version(probe.__dict__)
    probe.training = False
    return version if version(probe.__dict__) != before else None


dict_version = writes_counter()
"""How often a dict was written, to be compared with what it was; None where Python does not count."""


class Holder:
    """The tensors at some places below a module, as they are at each call.

    A place that only code of a class can tell (a property) is looked up every time, and so are all where Python does
    not count writes of dicts.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._paths = [target.split(".") for target in targets]
        # One value, for threads: the dicts that decide, how often they had been written, and what was found.
        self._last: tuple[list[dict[str, Any]], list[int], tuple[Any, ...]] | None = None

    def __call__(self, owner: nn.Module) -> tuple[Any, ...]:
        if dict_version is None or torch.compiler.is_compiling():
            return self._found(owner)
        last = self._last
        # A replica of a module shares its code and holds other tensors.
        if last is not None and last[0][0] is owner.__dict__ and list(map(dict_version, last[0])) == last[1]:
            return last[2]
        tables = self._tables(owner)
        if tables is None:
            return self._found(owner)
        # Counted before looking: what is written meanwhile is seen by the next call.
        versions = list(map(dict_version, tables))
        found = self._found(owner)
        self._last = (tables, versions, found)
        return found

    def _found(self, owner: nn.Module) -> tuple[Any, ...]:
        values: list[Any] = []
        for path in self._paths:
            value: Any = owner
            for atom in path:
                value = getattr(value, atom)
            values.append(value)
        return tuple(values)

    def _tables(self, owner: nn.Module) -> list[dict[str, Any]] | None:
        """Every dict that a lookup goes through, that of the module itself first; None if one goes through more."""
        tables: dict[int, dict[str, Any]] = {id(owner.__dict__): owner.__dict__}
        for path in self._paths:
            at = owner
            for atom in path[:-1]:
                tables[id(at.__dict__)], tables[id(at._modules)] = at.__dict__, at._modules
                child = at._modules.get(atom)
                if child is None or atom in at.__dict__ or hasattr(type(at), atom):
                    return None
                at = child
            places = (at.__dict__, at._parameters, at._buffers)
            if hasattr(type(at), path[-1]) or not any(path[-1] in place for place in places):
                return None
            tables.update((id(place), place) for place in places)
        return list(tables.values())


def hold_together(graph: Graph, is_tensor: Callable[[str], bool]) -> Holder | None:
    """Let a graph fetch its tensors by one call, which a Holder answers; None if it has none."""
    fetched = [node for node in graph.nodes if node.op == "get_attr" and is_tensor(cast("str", node.target))]
    if not fetched:
        return None
    with graph.inserting_before(fetched[0]):
        # To generated code a method is called as a module is.
        held = graph.create_node("call_module", HELD)
    targets: dict[str, int] = {}
    for node in fetched:
        place = targets.setdefault(cast("str", node.target), len(targets))
        node.op, node.target, node.args = "call_function", operator.getitem, (held, place)
    return Holder(list(targets))
