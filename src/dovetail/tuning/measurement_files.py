"""Measurements as files of JSON lines, for stores that share no database.

The first line names the format; the last one is the checksum of those before it. Between them each environment is a line,
followed by a line for each of its measurements, ordered by key and by digest: equal measurements are equal bytes in every
release of the format. Files are read twice, so that nothing of one that is not whole is stored, and in both directions
line by line, so that memory does not grow with the number of measurements.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from dovetail.errors import InvalidArgument, InvalidFile, checked_call
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.tuning.environment import Environment, canonical_json
from dovetail.tuning.measurement import Measurement, Subject
from dovetail.tuning.store import Store, open_existing

FORMAT, VERSION = "dovetail measurements", 1
BATCH = 256
"""How many measurements are stored in one transaction."""
_LONGEST_LINE = 2**28
_GZIP = b"\x1f\x8b"
_ADVICE = "Export the measurements again."


@dataclass(frozen=True)
class Import:
    """What came of an import: how many measurements were new, already in the store, or differ from those in it.

    Of those that differ the store's own are kept.
    """

    new: int
    present: int
    different: int


@checked_call()
def export_measurements(
    store: str | os.PathLike[str], path: str | os.PathLike[str], *, environment: str | None = None
) -> int:
    """Write the measurements of a store to a file, for stores that share no database; return how many there are.

    `store` is the path or URL of a store. The file has a line of JSON for each measurement, failures and finished
    searches included; equal measurements give equal bytes. It is compressed by gzip if its name ends in ".gz".
    `environment` is the key of the only environment that is written.
    """
    if environment is not None and not isinstance(environment, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"environment is the key of an environment, not {environment!r}.")
    target = resolve_target(_checked_path(path))
    with open_existing(store) as opened:
        chosen = [each for each in opened.environments() if environment in (None, each.key)]
        if environment is not None and not chosen:
            known = ", ".join(f"{each.key} ({each.device})" for each in opened.environments()) or "none"
            raise InvalidArgument(f"the store has no environment {environment!r}. It has {known}.")
        with atomic_replace(target) as written, _open_to_write(written) as file:
            return _write(opened, chosen, file)


@checked_call()
def import_measurements(path: str | os.PathLike[str], store: str | os.PathLike[str]) -> Import:
    """Add the measurements of a file to a store, which is created if it does not exist; return what was new.

    Measurements that the store has are kept. `path` is a file that `export_measurements` wrote; if a line of it is not
    valid, InvalidFile names the line and nothing is stored. An import that was interrupted is completed by another one.
    """
    source = os.fspath(_checked_path(path))
    with _open_to_read(source) as file:
        for _ in _results(source, file):
            pass
        with Store(store) as opened:
            new = present = different = 0
            for environment, results in _batches(source, file):
                added, other = opened.add(results, environment)
                new += len(added)
                different += len(other)
                present += len(results) - len(added) - len(other)
    return Import(new, present, different)


def _write(store: Store, environments: Iterable[Environment], file: IO[bytes]) -> int:
    checksum, count = hashlib.blake2b(digest_size=16), 0

    def write(line: Mapping[str, Any]) -> None:
        data = canonical_json(line).encode() + b"\n"
        checksum.update(data)
        file.write(data)

    write({"format": FORMAT, "version": VERSION, "release": version("dovetail")})
    for environment in environments:
        results = store.results(environment)
        first = next(results, None)
        if first is None:
            continue
        write({"environment": environment.to_json(), "key": environment.key})
        for subject, measurement in itertools.chain([first], results):
            values = {each.name: getattr(measurement, each.name) for each in fields(measurement)}
            error = measurement.numeric_error
            if error is not None and not math.isfinite(error):
                values["numeric_error"] = repr(error)
            write({"digest": subject.digest, "subject": asdict(subject), "measurement": values})
            count += 1
    file.write(canonical_json({"checksum": checksum.hexdigest()}).encode() + b"\n")
    return count


def _batches(path: str, file: IO[bytes]) -> Iterator[tuple[Environment, list[tuple[Subject, Measurement]]]]:
    for environment, group in itertools.groupby(_results(path, file), key=lambda each: each[0]):
        results = ((subject, measurement) for _, subject, measurement in group)
        while batch := list(itertools.islice(results, BATCH)):
            yield environment, batch


def _results(path: str, file: IO[bytes]) -> Iterator[tuple[Environment, Subject, Measurement]]:
    """Yield the measurements of a file from its beginning; raise InvalidFile for the first line that is not valid."""
    file.seek(0)
    first = file.readline(4096)
    _check_header(path, first)
    checksum = hashlib.blake2b(first, digest_size=16)
    environment, last = None, ("", "")
    for number in itertools.count(2):
        line = file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            what = (
                "is too long"
                if len(line) == _LONGEST_LINE
                else "is where the file ends, and is not its last line"
            )
            raise InvalidFile(path, f"is not whole: line {number} {what}. {_ADVICE}")
        try:
            record = _json_object(line)
            if "checksum" in record:
                if record != {"checksum": checksum.hexdigest()}:
                    raise ValueError("it is another checksum than that of the lines before it")
                if file.read(1):
                    raise ValueError("it ends the measurements, but not the file")
                return
            checksum.update(line)
            if "environment" in record:
                environment = _environment(record)
                place = (environment.key, "")
                result = None
            elif environment is None:
                raise ValueError("it is before the first environment")
            else:
                result = _result(record)
                place = (environment.key, result[0].digest)
            if place <= last:
                raise ValueError("it is out of order, or a repetition")
            last = place
        except (ValueError, OverflowError, RecursionError) as error:
            raise InvalidFile(path, f"cannot be imported: line {number}: {error}") from None
        if result is not None:
            yield environment, *result


def _check_header(path: str, line: bytes) -> None:
    try:
        header = _json_object(line)
    except (ValueError, RecursionError):
        header = {}
    if header.get("format") != FORMAT or type(header.get("version")) is not int:
        raise InvalidFile(path, "is not a file of measurements; give one that `export_measurements` wrote.")
    if header["version"] > VERSION:
        raise InvalidFile(
            path,
            f"was written by a newer release of dovetail: its format has version {header['version']}, this release reads "
            f"up to {VERSION}. Update dovetail.",
        )


def _environment(record: Mapping[str, Any]) -> Environment:
    _check_names(record, ("environment", "key"))
    environment = Environment.from_json(record["environment"])
    if environment.key != record["key"]:
        raise ValueError(f"it has the key {record['key']!r}, but its environment {environment.key!r}")
    return environment


def _result(record: Mapping[str, Any]) -> tuple[Subject, Measurement]:
    _check_names(record, ("digest", "subject", "measurement"))
    described, values = record["subject"], record["measurement"]
    _check_names(described, [each.name for each in fields(Subject)])
    _check_names(values, [each.name for each in fields(Measurement)])
    subject = Subject(**described)
    if subject.digest != record["digest"]:
        raise ValueError(f"it has the digest {record['digest']!r}, but its subject {subject.digest!r}")
    if not isinstance(values["samples"], list) or not isinstance(values["failure"], str):
        raise ValueError("it has samples that are not a list, or a failure that is not text")
    error = values["numeric_error"]
    if isinstance(error, str):
        if error not in ("nan", "inf", "-inf"):
            raise ValueError(f"it has {error!r} as numeric error")
        values["numeric_error"] = float(error)
    return subject, Measurement(**values)


def _json_object(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it has {constant} where a number belongs")

    try:
        value = json.loads(line.decode(), parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", value)


def _check_names(value: Any, names: Iterable[str]) -> None:
    if not isinstance(value, dict) or {*cast("dict[str, Any]", value)} != {*names}:
        raise ValueError(f"it has other fields than {', '.join(names)}")


def _checked_path(path: Any) -> str | os.PathLike[str]:
    if not isinstance(path, str | os.PathLike) or "\0" in os.fsdecode(cast("str", path)):
        raise InvalidArgument(f"path is the name of a file, not {path!r}.")
    return cast("str | os.PathLike[str]", path)


@contextlib.contextmanager
def _open_to_write(path: Path) -> Generator[IO[bytes]]:
    with open(path, "wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        # Without name and time in it, so that equal measurements are equal bytes.
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
            yield cast("IO[bytes]", compressed)


@contextlib.contextmanager
def _open_to_read(path: str) -> Generator[IO[bytes]]:
    try:
        with open(path, "rb") as file:
            is_compressed = file.read(2) == _GZIP
            file.seek(0)
            if not is_compressed:
                yield file
                return
            with (
                gzip.GzipFile(fileobj=file) as compressed,
                io.BufferedReader(cast("Any", compressed)) as lines,
            ):
                yield lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidFile(path, f"is not whole: {error}. {_ADVICE}") from None
    except OSError as error:
        raise InvalidFile(path, f"cannot be read: {error.strerror or error}.") from error
