"""The file: an archive of torch.export with two records of our own, written in one go and read without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from dovetail.errors import InvalidFile, SaveError
from dovetail.interop.placing import replaced

FORMAT = 1
"""The version of the description. A file of a later one is refused; older ones must stay readable."""

HEADER, GRAPH = "dovetail_header.json", "dovetail_graph.json"
_WEIGHTS, _CONSTANTS = "data/weights", "data/constants"

# What Python raises for an archive whose tables do not fit: it seeks to where nothing is, or asks for a password.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    LookupError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    OverflowError,
)


def write(
    program: ExportedProgram, described: Mapping[str, Any], versions: Mapping[str, str], path: Any
) -> None:
    """Write program and description to a file, or to the target of a path (`target_of`)."""
    graph = json.dumps(described)
    header = {"format": FORMAT, **versions, "digest": hashlib.sha256(graph.encode()).hexdigest()}
    extra = {HEADER: json.dumps(header), GRAPH: graph}
    if not isinstance(path, Path):
        _write_archive(program, extra, path)
        return
    with replaced(path) as written, open(written, "wb") as file:
        _write_archive(program, extra, file)


def _write_archive(program: ExportedProgram, extra: dict[str, Any], file: Any) -> None:
    try:
        with warnings.catch_warnings():
            # Weights that are not contiguous are written whole, as any other.
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            torch.export.save(program, file, extra_files=extra)
    except OSError:
        raise
    except Exception as error:
        raise SaveError(f"torch.export cannot save the graph: {type(error).__name__}: {error}") from error


class Archive:
    """A file being read: its records, which are bytes and JSON, and nothing else is made of them."""

    def __init__(self, path: Any) -> None:
        self.path = path if isinstance(path, str | os.PathLike) else getattr(path, "name", "the file")
        # A file that is not there, or not to be read, is told by Python; what is in it is for us to tell.
        self._file = open(path, "rb") if isinstance(path, str | os.PathLike) else None  # noqa: SIM115
        try:
            self._zip = zipfile.ZipFile(self._file or path)
            names = self._zip.namelist()
        except _DAMAGED as error:
            self._close_file()
            raise InvalidFile(self.path, f"is no archive, or only the beginning of one: {error}.") from error
        self._root = names[0].split("/")[0] if names else ""
        self._names = frozenset(names)

    def close(self) -> None:
        self._zip.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def description(self) -> dict[str, Any]:
        """The description of the graph, if it is one of ours, whole, and of a version that can be read."""
        if not self.has(f"extra/{HEADER}"):
            is_export = self.has("models/model.json") or "serialized_exported_program.json" in self._names
            raise InvalidFile(
                self.path,
                "is an archive of torch.export without regions. "
                "`dovetail.capture(torch.export.load(path))` makes a graph of it."
                if is_export
                else "is not a file that `dovetail.save` wrote.",
            )
        header = self._json(f"extra/{HEADER}")
        version = header.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise InvalidFile(self.path, "does not say which version of the format it has.")
        if version > FORMAT:
            raise InvalidFile(
                self.path,
                f"has version {version} of the format and was saved by dovetail {header.get('dovetail')}; this is one that "
                f"reads up to version {FORMAT}. Load it with that dovetail, or a newer one.",
            )
        text = self.read(f"extra/{GRAPH}")
        if hashlib.sha256(text).hexdigest() != header.get("digest"):
            raise InvalidFile(
                self.path, "was changed since it was saved: the description of the graph is another one."
            )
        return self._parsed(text)

    def places(self) -> dict[str, str]:
        """The record that has the bytes of each weight and constant, by their names in the archive."""
        found: dict[str, str] = {}
        for folder, kind in ((_WEIGHTS, "weights"), (_CONSTANTS, "constants")):
            config = self._json(f"{folder}/model_{kind}_config.json").get("config")
            for name, row in cast("dict[str, Any]", config).items():
                if row["use_pickle"]:
                    continue
                found[f"{kind}:{name}"] = f"{folder}/{row['path_name']}"
        return found

    def has(self, record: str) -> bool:
        return f"{self._root}/{record}" in self._names

    def read(self, record: str, checksum: int | None = None) -> bytes:
        """The bytes of a record, whose checksum must hold; and be this one, if one is given."""
        try:
            # What is read is compared with the sum that the archive has, so that comparing the sums is enough.
            if checksum is not None and checksum != self._zip.getinfo(f"{self._root}/{record}").CRC:
                raise InvalidFile(
                    self.path, f"was changed since it was saved: its record '{record}' is another one."
                )
            return self._zip.read(f"{self._root}/{record}")
        except _DAMAGED as error:
            raise InvalidFile(
                self.path, f"is damaged: its record '{record}' cannot be read ({error})."
            ) from error

    def _json(self, record: str) -> dict[str, Any]:
        return self._parsed(self.read(record))

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(self.path, f"is damaged: {error}.") from error
        if not isinstance(found, dict):
            raise InvalidFile(self.path, "is damaged: a record is not what it must be.")
        return cast("dict[str, Any]", found)


def checksum_of(storage: torch.UntypedStorage) -> int:
    """The checksum that an archive has of memory with these bytes."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zlib.crc32(memoryview(cast("Any", data.cpu().numpy())))


def storage_of(data: bytes, device: str) -> torch.UntypedStorage:
    """Memory with these bytes on a device, aligned as torch aligns what it allocates."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    with warnings.catch_warnings():
        # The bytes cannot be written to; they are copied at once.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        made = torch.frombuffer(data, dtype=torch.uint8)
    return made.clone().to(device).untyped_storage()
