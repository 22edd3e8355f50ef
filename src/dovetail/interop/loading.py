"""Loading what `save` wrote. Nothing in a file is run or unpickled."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import IO, Any

import torch
from torch import Tensor

from dovetail.errors import DovetailError, InvalidArgument, InvalidFile, checked_call
from dovetail.graph.capturing import trees
from dovetail.graph.check import check
from dovetail.graph.module import Program, without_collector
from dovetail.interop.archive import Archive, storage_of
from dovetail.interop.decoding import Absent, Unreadable, index, rows, take
from dovetail.interop.functions import Trust
from dovetail.interop.restoring import Restorer, tensor_from


@checked_call()
def load(path: str | os.PathLike[str] | IO[bytes], *, trust: bool | Collection[str] = False) -> Program:
    """The graph that `dovetail.save` wrote: the same text, regions, values and state, called and checked as before.

    Its regions run as they are until it is lowered. A file that is damaged, from a newer version or not one of ours
    raises InvalidFile; so does one in which the description of the graph or numbers of its tensors are others than were
    saved (by checksums: they tell accidents, and are no signature). Records for torch.export alone are not looked at.

    Files from anyone can be opened: they hold operators by name and numbers, no code, and what they may cost is bounded
    by their size. A graph may call torch's own operators that compute with tensors, not those that open files or go
    around the checks of memory, nor operators of other libraries: `trust` names those that it may call beside (the
    operator "acme::mix", or the namespace "acme"), or is True for any.
    """
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "read", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to read from.")
    trusted = Trust(trust)
    trees.prepare()
    archive = Archive(path)
    try:
        with without_collector():
            described = archive.description()
            program = Restorer(described, _tensors(archive, described), trusted).restore()
            check(program)
            return program
    except InvalidFile:
        raise
    except Absent as reason:
        raise InvalidFile(archive.path, f"{reason}") from reason
    # What nobody vouches for can make torch and sympy raise anything, MemoryError included.
    except Exception as error:
        reason = (
            error if isinstance(error, Unreadable | DovetailError) else f"{type(error).__name__}: {error}"
        )
        raise InvalidFile(archive.path, f"does not hold together: {str(reason)[:2000]}.") from error
    finally:
        archive.close()


def _tensors(archive: Archive, described: dict[str, Any]) -> list[Tensor]:
    """The tensors of a graph, those that shared memory sharing it again."""
    places = archive.places()
    memory: dict[int, Any] = {}
    made: list[Tensor] = []
    storages = rows(described["storages"])
    # Older files have none.
    checksums = rows(described.get("checksums", [None] * len(storages)))
    for row in rows(described["tensors"]):
        number = index(rows(row)[0], storages)
        if number not in memory:
            place, device = storages[number], torch.device(take(str, row[5]))
            if device.type == "meta":
                raise Unreadable("a tensor of the graph is on the meta device")
            if place is not None and take(str, place) not in places:
                raise Unreadable(f"it has no numbers for '{place}', or only pickled ones, which are not read")
            try:
                data = (
                    b"" if place is None else archive.read(places[place], checksums[index(number, checksums)])
                )
                memory[number] = storage_of(data, device)
            except (RuntimeError, AssertionError) as error:
                raise Absent(f"holds tensors on '{device}', which is not there: {error}") from error
        made.append(tensor_from(row, memory[number]))
    return made
