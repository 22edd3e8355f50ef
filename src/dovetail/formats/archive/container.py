"""The file: an archive of torch.export with two records of our own, written in one go and read without pickle."""

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
from dovetail.formats.atomic_write import replaced

FORMAT = 1
"""The version of the description. A file of a later one is refused; older ones must stay readable."""
HEADER, GRAPH = "dovetail_header.json", "dovetail_graph.json"
_WEIGHTS, _CONSTANTS = "data/weights", "data/constants"

# What a record of ours may cost to read, before any of it is read. A header is a few hundred bytes, and torch writes
# about a hundred bytes for each entry of the directory, of which there is one per tensor.
_LARGEST_HEADER = 2**16
_LARGEST_DIRECTORY = 2**26
_MOST_ENTRIES = 2**18

# A description has some 35 lists and objects and 800 bytes for each node of a graph; each of those that is parsed
# takes some hundred bytes of memory, and each value in it a pointer.
_LARGEST_DESCRIPTION = 2**29
_MOST_CONTAINERS = 2**23
_MOST_ITEMS = 2**25
_END, _END64, _LOCATOR64, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_STORED, _ENCRYPTED = 0, 1


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
    """A file being read: its records, which are bytes and JSON, and nothing else is made of them.

    Records are read as they are stored, each within the file and no more than the file has bytes in all, so that reading
    costs no more memory than the file is long. Compressed ones are refused: `save` writes none.
    """

    def __init__(self, path: Any) -> None:
        is_path = isinstance(path, str | os.PathLike)
        self.path = path if is_path else getattr(path, "name", "the file")
        # Opening a pipe would wait for whoever writes to it. A file that is not there is told by Python.
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
        """The description of the graph, if it is one of ours, whole, and of a version that can be read."""
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
            raise InvalidFile(self.path, "does not say which version of the format it has.")
        if version > FORMAT:
            raise InvalidFile(
                self.path,
                f"has version {version} of the format and was saved by dovetail {str(header.get('dovetail'))[:40]}; this "
                f"is one that reads up to version {FORMAT}. Load it with that dovetail, or a newer one.",
            )
        text = self.read(f"extra/{GRAPH}", largest=_LARGEST_DESCRIPTION)
        if hashlib.sha256(text).hexdigest() != header.get("digest"):
            raise InvalidFile(
                self.path, "was changed since it was saved: the description of the graph is another one."
            )
        return self._parsed(text)

    def places(self) -> dict[str, str]:
        """The record that has the bytes of each weight and constant, by their names in the archive."""
        found: dict[str, str] = {}
        for folder, kind in ((_WEIGHTS, "weights"), (_CONSTANTS, "constants")):
            config = self._json(f"{folder}/model_{kind}_config.json", _LARGEST_DIRECTORY).get("config")
            for name, row in cast("dict[str, Any]", config).items():
                if row["use_pickle"]:
                    continue
                found[f"{kind}:{name}"] = f"{folder}/{row['path_name']}"
        return found

    def has(self, record: str) -> bool:
        return f"{self._root}/{record}" in self._entries

    def read(self, record: str, checksum: int | None = None, largest: int | None = None) -> bytes:
        """The bytes of a record, whose checksum must hold; and be this one, if one is given."""
        entry = self._entries.get(f"{self._root}/{record}")
        if entry is None:
            raise self._damaged(record, "it is missing")
        if entry.method != _STORED or entry.flags & _ENCRYPTED:
            raise self._damaged(record, "it is compressed or encrypted, as `dovetail.save` writes none")
        if entry.size != entry.packed or entry.size > self._left:
            raise self._damaged(record, "it is larger than the file, or overlaps another")
        if largest is not None and entry.size > largest:
            raise self._damaged(record, f"it has {entry.size} bytes, and at most {largest} are read")
        self._left -= entry.size
        if checksum is not None and checksum != entry.checksum:
            raise InvalidFile(
                self.path, f"was changed since it was saved: its record '{record}' is another one."
            )
        head = self._at(entry.offset, 30)
        start = entry.offset + 30 + sum(struct.unpack("<HH", head[26:])) if len(head) == 30 else 0
        data = self._at(start, entry.size) if head[:4] == _LOCAL else b""
        if len(data) != entry.size or zlib.crc32(data) != entry.checksum:
            raise self._damaged(record, "its bytes are not those that were written")
        return data

    def _damaged(self, record: str, why: str) -> InvalidFile:
        return InvalidFile(self.path, f"is damaged: its record '{record[:200]}' cannot be read ({why}).")

    def _at(self, offset: int, count: int) -> bytes:
        """At most `count` bytes from a place in the file."""
        if not 0 <= offset <= self._size:
            return b""
        self._file.seek(offset)
        data = self._file.read(min(count, self._size - offset))
        if not isinstance(data, bytes):
            raise InvalidFile(self.path, "is open as text; open it with mode 'rb'.")
        return data

    def _directory(self) -> dict[str, _ArchiveEntry]:
        """The records of the archive by their names, from the directory at its end."""
        where = max(0, self._size - 65_557)
        tail = self._at(where, 65_557)
        end = tail.rfind(_END)
        if end < 0 or len(tail) - end < 22:
            raise InvalidFile(self.path, "is no archive, or only the beginning of one.")
        size, offset = struct.unpack("<LL", tail[end + 12 : end + 20])
        last = where + end
        locator = self._at(last - 20, 20)
        if locator[:4] == _LOCATOR64:
            # The larger form of the same record stands before the place that leads to it.
            record = self._at(struct.unpack("<Q", locator[8:16])[0], 56)
            if record[:4] == _END64 and len(record) == 56:
                size, offset = struct.unpack("<QQ", record[40:56])
                last = struct.unpack("<Q", locator[8:16])[0]
        before = last - size - offset  # what stands before the archive in the file
        if size > min(_LARGEST_DIRECTORY, last) or before < 0:
            raise InvalidFile(
                self.path, "is no archive, or only the beginning of one: its directory is damaged."
            )
        return self._listed(self._at(last - size, size), before)

    def _listed(self, directory: bytes, before: int) -> dict[str, _ArchiveEntry]:
        entries: dict[str, _ArchiveEntry] = {}
        at = 0
        while at < len(directory):
            row = directory[at : at + 46]
            if len(row) < 46 or row[:4] != _ENTRY or len(entries) >= _MOST_ENTRIES:
                raise InvalidFile(self.path, "is damaged: its directory does not list records.")
            flags, method = struct.unpack("<HH", row[8:12])
            checksum, packed, size, *lengths = struct.unpack("<LLLHHH", row[16:34])
            (offset,) = struct.unpack("<L", row[42:46])
            names = directory[at + 46 : at + 46 + lengths[0]]
            extra = directory[at + 46 + lengths[0] : at + 46 + lengths[0] + lengths[1]]
            size, packed, offset = _wide(extra, [size, packed, offset])
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
            found = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(self.path, f"is damaged: {type(error).__name__}: {error}.") from error
        if not isinstance(found, dict):
            raise InvalidFile(self.path, "is damaged: a record is not what it must be.")
        return cast("dict[str, Any]", found)


class _ArchiveEntry(NamedTuple):
    """What the directory of an archive has of a record."""

    method: int
    flags: int
    checksum: int
    packed: int
    size: int
    offset: int


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Size, packed size and offset, those that do not fit in four bytes from the extra field that has them."""
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
    raise ValueError(f"{name} is not a number of JSON")


def checksum_of(storage: torch.UntypedStorage) -> int:
    """The checksum that an archive has of memory with these bytes."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zlib.crc32(memoryview(cast("Any", data.cpu().numpy())))


def storage_of(data: bytes, device: torch.device) -> torch.UntypedStorage:
    """Memory with these bytes on a device, aligned as torch aligns what it allocates."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    with warnings.catch_warnings():
        # The bytes cannot be written to; they are copied at once.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        made = torch.frombuffer(data, dtype=torch.uint8)
    return made.clone().to(device).untyped_storage()
