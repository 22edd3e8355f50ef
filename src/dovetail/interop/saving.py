"""Saving: a graph with its regions in a file that torch.export opens as well."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import IO, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.graph.module import GraphOwner, only_graph, without_collector
from dovetail.interop import archive
from dovetail.interop.describing import Describer
from dovetail.interop.exported import exported
from dovetail.interop.placing import target_of
from dovetail.outlining.inline import inline
from dovetail.outlining.record import Call, call_of

MARK = "dovetail"
"""The key in `node.meta["custom"]` of the regions that an operation is in, outermost first."""


@checked_call()
def save(gm: GraphModule | GraphOwner, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a graph to a file from which `dovetail.load` makes it again: regions, shared bodies, weights, ledger.

    The file is an archive of torch.export too: `torch.export.load(path)` opens it with the regions inlined and told in
    `node.meta["custom"]["dovetail"]`. Backends are not saved: a loaded graph runs as it is until it is lowered again.
    A graph that holds Python code (modules that are called, hooks, functions of one's own) is refused with a
    SaveError. A file that was there is replaced in one step and keeps its rights; a link keeps leading to it.
    """
    gm = only_graph(gm)
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "write", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to write to.")
    target = target_of(path) if isinstance(path, str | os.PathLike) else path
    with without_collector():
        describer = Describer(gm)
        described = describer.describe()
        program = exported(inline(gm), marks(gm))
        described["storages"] = _places(program, describer)
        described["checksums"] = _checksums(describer)
        if describer.encoder.dropped:
            listed = "; ".join(f"{key} ({why})" for key, why in describer.encoder.dropped.items())
            warnings.warn(f"node meta that has no form in a file was left out: {listed}", stacklevel=2)
        versions = {"dovetail": version("dovetail"), "torch": torch.__version__}
        archive.write(program, described, versions, target)


def marks(gm: GraphModule) -> dict[str, dict[str, Any]]:
    """For each operation, by the name that it has once all regions are inlined, the regions it is in."""
    found: dict[str, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            for name, mark in _marks(call, node.name, []):
                # What is taken out of a nested region has the name of the operation inside it.
                if len(found.get(name, {MARK: ()})[MARK]) < len(mark[MARK]):
                    found[name] = mark
    return found


def _marks(call: Call, name: str, above: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    identity = call.identity
    own = {
        "region": name,
        "kind": identity.kind,
        "version": identity.version,
        "attrs": json.loads(identity.attrs),
    }
    inside = [*above, own]
    for member in call.members:
        inner = call_of(member.meta)
        if inner is not None:
            yield from _marks(inner, f"{name}/{member.name}", inside)
        elif member.is_original:
            yield member.name, {MARK: inside}


def _places(program: ExportedProgram, describer: Describer) -> list[str | None]:
    """For each piece of memory that the graph's tensors lie in, what the archive has it as; None for empty ones."""
    known: dict[Any, str] = {}
    for kind, held in (("weights", program.state_dict), ("constants", program.constants)):
        for name, value in held.items():
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                known.setdefault(_place(value), f"{kind}:{name}")
    found: dict[int, str | None] = {}
    for row, value in zip(describer.rows, describer.tensors, strict=True):
        if row[0] in found:
            continue
        if not value.untyped_storage().nbytes():
            found[row[0]] = None
            continue
        if value.device.type != "cpu" and not _fills_its_memory(value):
            raise SaveError(
                f"a tensor of shape {tuple(value.shape)} on {value.device} is a part of a larger one. Replace it by a clone."
            )
        if _place(value) not in known:
            name = f"{MARK}_{row[0]}"
            program.constants[name] = value.detach()
            known[_place(value)] = f"constants:{name}"
        found[row[0]] = known[_place(value)]
    return [found[number] for number in range(len(found))]


def _checksums(describer: Describer) -> list[int]:
    """For each piece of memory, the checksum of what is in it."""
    found: dict[int, int] = {}
    for row, value in zip(describer.rows, describer.tensors, strict=True):
        if row[0] not in found:
            found[row[0]] = archive.checksum_of(value.untyped_storage())
    return [found[number] for number in range(len(found))]


def _place(value: Tensor) -> tuple[str, int]:
    return str(value.device), value.untyped_storage().data_ptr()


def _fills_its_memory(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()
