"""Loading what `save` wrote. Nothing in a file is run or unpickled."""

from __future__ import annotations

import os
from typing import IO, Any

from torch import Tensor

from dovetail.errors import DovetailError, InvalidArgument, InvalidFile
from dovetail.graph.capturing import trees
from dovetail.graph.check import check
from dovetail.graph.module import Program, without_collector
from dovetail.interop.archive import Archive, storage_of
from dovetail.interop.decoding import Absent, Unreadable, index, rows
from dovetail.interop.restoring import Restorer, tensor_from


def load(path: str | os.PathLike[str] | IO[bytes]) -> Program:
    """The graph that `dovetail.save` wrote: the same text, regions, values and state, called and checked as before.

    Its regions run as they are until it is lowered. A file that is damaged, from a newer version or not one of ours
    raises InvalidFile; so does one in which the description of the graph or numbers of its tensors are others than were
    saved (by checksums: they tell accidents, and are no signature). Records for torch.export alone are not looked at.
    Files from anyone can be opened: they hold operators by name and numbers, no code.
    """
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "read", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to read from.")
    trees.prepare()
    archive = Archive(path)
    try:
        with without_collector():
            described = archive.description()
            program = Restorer(described, _tensors(archive, described)).restore()
            check(program)
            return program
    except InvalidFile:
        raise
    except Absent as reason:
        raise InvalidFile(archive.path, f"{reason}") from reason
    except (
        Unreadable,
        DovetailError,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        told = error if isinstance(error, Unreadable | DovetailError) else f"{type(error).__name__}: {error}"
        raise InvalidFile(archive.path, f"does not hold together: {told}.") from error
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
            place, device = storages[number], row[5]
            if place is not None and place not in places:
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
