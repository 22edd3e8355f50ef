"""The file: an archive of torch.export with two additional records, written atomically and read without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.export import ExportedProgram

from dovetail.errors import InvalidFile, SaveError
from dovetail.formats.atomic_write import atomic_replace

FORMAT = 1
"""The version of the description. A file of a later version is refused; earlier ones must stay readable."""
HEADER, GRAPH = "dovetail_header.json", "dovetail_graph.json"
_WEIGHTS, _CONSTANTS = "data/weights", "data/constants"

# Limits that are checked before a record is read. A header is a few hundred bytes, and torch writes about a hundred
# bytes for each entry of the directory, of which there is one per tensor.
_LARGEST_HEADER = 2**16
_LARGEST_DIRECTORY = 2**26
_MOST_ENTRIES = 2**18

# A description has about 35 lists and objects and 800 bytes for each node of a graph; each parsed one takes about a
# hundred bytes of memory, and each value in it a pointer.
_LARGEST_DESCRIPTION = 2**29
_MOST_CONTAINERS = 2**23
_MOST_ITEMS = 2**25
_END, _END64, _LOCATOR64, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_STORED, _ENCRYPTED = 0, 1


def write_archive(
    program: ExportedProgram, description: Mapping[str, Any], versions: Mapping[str, str], path: Any
) -> None:
    """Write program and description to an open file, or to a path from `resolve_target`."""
    graph = json.dumps(description)
    header = {"format": FORMAT, **versions, "digest": hashlib.sha256(graph.encode()).hexdigest()}
    extra = {HEADER: json.dumps(header), GRAPH: graph}
    if not isinstance(path, Path):
        _write_archive(program, extra, path)
        return
    with atomic_replace(path) as written, open(written, "wb") as file:
        _write_archive(program, extra, file)


def _write_archive(program: ExportedProgram, extra: dict[str, Any], file: Any) -> None:
    try:
        with warnings.catch_warnings():
            # Weights that are not contiguous are written in full like any other.
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            torch.export.save(program, file, extra_files=extra)
    except OSError:
        raise
    except Exception as error:
        raise SaveError(f"torch.export cannot save the graph: {type(error).__name__}: {error}") from error


class Archive:
    """A reader of the records of a file, as bytes and JSON.

    Records are read as they are stored, each within the file and in total no more bytes than the file has, so that
    reading needs no more memory than the file is long. Compressed records are refused: `save` writes none.
    """

    def __init__(self, path: Any) -> None:
        is_path = isinstance(path, str | os.PathLike)
        self.path = path if is_path else getattr(path, "name", "the file")
        # Opening a pipe would block. Python reports a missing file.
        if is_path and not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidFile(self.path, "is a folder or a device, not a file.")
        self._own = open(path, "rb") if is_path else None  # noqa: SIM115
        self._file: Any = self._own or path
        try:
            self._size = self._file.seek(0, os.SEEK_END)
            self._left = self._size
            self._entries = self._directory()
        except InvalidFile:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise InvalidFile(self.path, f"cannot be read: {type(error).__name__}: {error}.") from error
        self._root = next(iter(self._entries), "").split("/")[0]

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def description(self) -> dict[str, Any]:
        """Return the description of the graph; raise InvalidFile if it is missing, changed or of a later version."""
        if not self.has(f"extra/{HEADER}"):
            is_export = self.has("models/model.json") or "serialized_exported_program.json" in self._entries
            raise InvalidFile(
                self.path,
                "is an archive of torch.export without regions. "
                "`dovetail.capture(torch.export.load(path))` makes a graph of it."
                if is_export
                else "is not a file that `dovetail.save` wrote.",
            )
        header = self._json(f"extra/{HEADER}", _LARGEST_HEADER)
        version = header.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise InvalidFile(self.path, "has no format version.")
        if version > FORMAT:
            raise InvalidFile(
                self.path,
                f"has version {version} of the format and was saved by dovetail {str(header.get('dovetail'))[:40]}; this "
                f"dovetail reads up to version {FORMAT}. Load it with that dovetail, or a newer one.",
            )
        text = self.read(f"extra/{GRAPH}", largest=_LARGEST_DESCRIPTION)
        if hashlib.sha256(text).hexdigest() != header.get("digest"):
            raise InvalidFile(
                self.path, "was changed since it was saved: the checksum of its description does not match."
            )
        return self._parsed(text)

    def places(self) -> dict[str, str]:
        """Return the record with the bytes of each weight and constant, by name in the archive."""
        records: dict[str, str] = {}
        for folder, kind in ((_WEIGHTS, "weights"), (_CONSTANTS, "constants")):
            config = self._json(f"{folder}/model_{kind}_config.json", _LARGEST_DIRECTORY).get("config")
            for name, row in cast("dict[str, Any]", config).items():
                if row["use_pickle"]:
                    continue
                records[f"{kind}:{name}"] = f"{folder}/{row['path_name']}"
        return records

    def has(self, record: str) -> bool:
        return f"{self._root}/{record}" in self._entries

    def read(self, record: str, checksum: int | None = None, largest: int | None = None) -> bytes:
        """Return the bytes of a record after verifying its checksum, which must equal `checksum` if one is given."""
        entry = self._entries.get(f"{self._root}/{record}")
        if entry is None:
            raise self._damaged(record, "it is missing")
        if entry.method != _STORED or entry.flags & _ENCRYPTED:
            raise self._damaged(record, "it is compressed or encrypted, which `dovetail.save` does not write")
        if entry.size != entry.packed or entry.size > self._left:
            raise self._damaged(record, "it is larger than the file, or overlaps another")
        if largest is not None and entry.size > largest:
            raise self._damaged(record, f"it has {entry.size} bytes, and at most {largest} are read")
        self._left -= entry.size
        if checksum is not None and checksum != entry.checksum:
            raise InvalidFile(
                self.path,
                f"was changed since it was saved: the checksum of its record '{record}' does not match.",
            )
        head = self._at(entry.offset, 30)
        start = entry.offset + 30 + sum(struct.unpack("<HH", head[26:])) if len(head) == 30 else 0
        data = self._at(start, entry.size) if head[:4] == _LOCAL else b""
        if len(data) != entry.size or zlib.crc32(data) != entry.checksum:
            raise self._damaged(record, "its checksum does not match")
        return data

    def _damaged(self, record: str, why: str) -> InvalidFile:
        return InvalidFile(self.path, f"is damaged: its record '{record[:200]}' cannot be read ({why}).")

    def _at(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes at an offset of the file."""
        if not 0 <= offset <= self._size:
            return b""
        self._file.seek(offset)
        data = self._file.read(min(count, self._size - offset))
        if not isinstance(data, bytes):
            raise InvalidFile(self.path, "is open as text; open it with mode 'rb'.")
        return data

    def _directory(self) -> dict[str, _ArchiveEntry]:
        """Return the records of the archive by name, from the directory at its end."""
        where = max(0, self._size - 65_557)
        tail = self._at(where, 65_557)
        end = tail.rfind(_END)
        if end < 0 or len(tail) - end < 22:
            raise InvalidFile(self.path, "is not an archive, or is truncated.")
        size, offset = struct.unpack("<LL", tail[end + 12 : end + 20])
        last = where + end
        locator = self._at(last - 20, 20)
        if locator[:4] == _LOCATOR64:
            # The 64-bit variant of the record precedes its locator.
            record = self._at(struct.unpack("<Q", locator[8:16])[0], 56)
            if record[:4] == _END64 and len(record) == 56:
                size, offset = struct.unpack("<QQ", record[40:56])
                last = struct.unpack("<Q", locator[8:16])[0]
        before = last - size - offset  # bytes in front of the archive
        if size > min(_LARGEST_DIRECTORY, last) or before < 0:
            raise InvalidFile(self.path, "is not an archive, or is truncated: its directory is damaged.")
        return self._parse_directory(self._at(last - size, size), before)

    def _parse_directory(self, directory: bytes, before: int) -> dict[str, _ArchiveEntry]:
        entries: dict[str, _ArchiveEntry] = {}
        at = 0
        while at < len(directory):
            row = directory[at : at + 46]
            if len(row) < 46 or row[:4] != _ENTRY or len(entries) >= _MOST_ENTRIES:
                raise InvalidFile(self.path, "is damaged: its directory cannot be parsed.")
            flags, method = struct.unpack("<HH", row[8:12])
            checksum, packed, size, *lengths = struct.unpack("<LLLHHH", row[16:34])
            (offset,) = struct.unpack("<L", row[42:46])
            names = directory[at + 46 : at + 46 + lengths[0]]
            extra = directory[at + 46 + lengths[0] : at + 46 + lengths[0] + lengths[1]]
            size, packed, offset = _zip64_numbers(extra, [size, packed, offset])
            name = names.decode("utf-8", "surrogateescape")
            if name in entries:
                raise InvalidFile(self.path, f"is damaged: it has the record '{name[:200]}' twice.")
            entries[name] = _ArchiveEntry(method, flags, checksum, packed, size, offset + before)
            at += 46 + sum(lengths)
        return entries

    def _json(self, record: str, largest: int) -> dict[str, Any]:
        return self._parsed(self.read(record, largest=largest))

    def _parsed(self, text: bytes) -> dict[str, Any]:
        if text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS or text.count(b",") > _MOST_ITEMS:
            raise InvalidFile(self.path, "is damaged: a record holds more values than a graph can have.")
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(self.path, f"is damaged: {type(error).__name__}: {error}.") from error
        if not isinstance(value, dict):
            raise InvalidFile(self.path, "is damaged: a record is not a JSON object.")
        return cast("dict[str, Any]", value)


class _ArchiveEntry(NamedTuple):
    """A record in the directory of an archive."""

    method: int
    flags: int
    checksum: int
    packed: int
    size: int
    offset: int


def _zip64_numbers(extra: bytes, numbers: list[int]) -> list[int]:
    """Return size, packed size and offset, from the extra field if they do not fit in four bytes."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            return [next(wide, n) if n == 0xFFFFFFFF else n for n in numbers]
        at += 4 + length
    return numbers


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def checksum_of(storage: torch.UntypedStorage) -> int:
    """Return the checksum of a storage as in the directory of an archive."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zlib.crc32(memoryview(cast("Any", data.cpu().numpy())))


def storage_from(data: bytes, device: torch.device) -> torch.UntypedStorage:
    """Return a storage with these bytes on a device, aligned like torch's allocations."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    with warnings.catch_warnings():
        # The bytes cannot be written to; they are copied at once.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        tensor = torch.frombuffer(data, dtype=torch.uint8)
    return tensor.clone().to(device).untyped_storage()
