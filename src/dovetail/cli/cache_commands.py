"""Commands about the disk cache of compiled code: `cache list`, `cache clear`, `cache verify`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.console import Console
from dovetail.cli.entry_point import FAILURE, SUCCESS
from dovetail.errors import InvalidArgument
from dovetail.ir.text_tables import amount, counted
from dovetail.lowering.cache import Cache, CachedFile, default_folder

Folder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="The folder of the cache.", show_default="DOVETAIL_CACHE_DIR, or ~/.cache/dovetail"),
]  # fmt: skip


def _cache(folder: Path | None) -> Cache:
    """Return the cache in a folder, without creating it."""
    if folder is not None and not folder.expanduser().is_dir():
        raise InvalidArgument(f"there is no folder '{folder}'.")
    return Cache(default_folder() if folder is None else folder.expanduser())


def list_cache(
    console: Console,
    folder: Folder = None,
    every: Annotated[bool, typer.Option("--all", help="Show every file.")] = False,
) -> None:
    """Show what is in the cache, and how much."""
    cache = _cache(folder)
    files = sorted(cache.files(), key=lambda file: -file.used)
    total = sum(file.size for file in files)
    console.text(
        f"{cache.folder}: {counted(len(files), 'file')}, {amount(total)} of at most {amount(cache.limit)}"
    )
    if files and every:
        rows = [[file.name, file.kind, amount(file.size), _time(file.used)] for file in files]
        console.text()
        console.table(("name", "what", "size", "last used"), rows, right=(2,))
    elif files:
        rows = [
            [what, str(len(group)), amount(sum(f.size for f in group)), _time(max(f.used for f in group))]
            for what, group in _grouped(files).items()
        ]
        console.text()
        console.table(("what", "files", "size", "last used"), rows, right=(1, 2))
    described: list[dict[str, Any]] = [
        {"name": f.name, "kind": f.kind, "bytes": f.size, "used": f.used, "path": str(f.path)} for f in files
    ]
    console.document({"folder": str(cache.folder), "bytes": total, "limit": cache.limit, "files": described})


def clear_cache(console: Console, folder: Folder = None) -> None:
    """Remove everything from the cache.

    Code that processes have loaded is not affected.
    """
    cache = _cache(folder)
    files = list(cache.files())
    total = sum(file.size for file in files)
    cache.clear()
    console.text(f"{cache.folder}: removed {counted(len(files), 'file')}, {amount(total)}")
    console.document({"folder": str(cache.folder), "removed": len(files), "bytes": total})


def verify_cache(
    console: Console,
    folder: Folder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
) -> int:
    """Check every entry against its checksum.

    Exits with 1 if one is damaged. A damaged entry does no harm: it is compiled again when it is needed.
    """
    cache = _cache(folder)
    with console.step("reading the cache"):
        damaged = cache.verify()
    entries = sum(file.kind == "code" for file in cache.files())
    for entry in damaged:
        console.text(f"{entry.name}: {entry.reason}", style="bad")
        if remove:
            entry.path.unlink(missing_ok=True)
    removed = ", removed" if remove and damaged else ""
    state = f"{len(damaged)} damaged{removed}" if damaged else "all whole"
    console.text(f"{cache.folder}: {counted(entries, 'entry').replace('entrys', 'entries')}, {state}")
    console.document(
        {"folder": str(cache.folder), "entries": entries, "removed": bool(removed),
         "damaged": [{"name": e.name, "reason": e.reason, "path": str(e.path)} for e in damaged]}
    )  # fmt: skip
    return FAILURE if damaged and not remove else SUCCESS


def _grouped(files: Sequence[CachedFile]) -> dict[str, list[CachedFile]]:
    """Return files by what they are: entries, partial ones, and the files of each compiler."""
    groups: dict[str, list[CachedFile]] = {}
    for file in files:
        compiler = file.name.partition("/")[0].rpartition("-")[0]
        names = {
            "code": "compiled code and graphs",
            "partial": "partial entries",
            "tool": f"files of {compiler}",
        }
        groups.setdefault(names[file.kind], []).append(file)
    return groups


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
