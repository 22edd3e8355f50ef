"""Dump what dovetail does to many models and compare with the frozen dump: `python -m tests.baseline --jobs 2`.

`--write` freezes what is there now. `--only zoo/llama` looks at entries whose names begin so, and `--out DIR` writes
the text of each as a file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .renames import RENAMED
from .subjects import chosen, entries, quiet

FROZEN = Path(__file__).parent / "frozen.json.xz"
MOST_ENTRIES = 8
MOST_LINES = 40


def main() -> int:
    options = _options()
    began = time.monotonic()
    dumped = {n: text for n, text in sorted(_dump(options)) if n.startswith(options.only)}
    print(f"{len(dumped)} entries in {time.monotonic() - began:.0f} s", flush=True)
    if options.out is not None:
        _write_texts(options.out, dumped)
    if options.write:
        return _freeze(dumped)
    return _compared(_thawed(options.only), dumped)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__)
    parser.add_argument("--write", action="store_true", help="freeze what is there now")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only entries whose names begin so")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write each entry to a file in this folder")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("only the whole dump can be frozen")
    return options


def _dump(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    names = chosen(options.only)
    if options.jobs <= 1 or len(names) == 1:
        quiet()
        for name in names:
            yield from entries(name).items()
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, quiet) as pool:
        for dumped in pool.imap_unordered(entries, names):
            yield from dumped.items()
        pool.close()
        pool.join()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def _freeze(dumped: dict[str, str]) -> int:
    data = json.dumps(
        {"versions": _versions(), "entries": dumped}, ensure_ascii=False, sort_keys=True, indent=0
    )
    FROZEN.write_bytes(lzma.compress(data.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{FROZEN.stat().st_size / 1024:.0f} KiB, {len(data) / 2**20:.1f} MiB of text")
    return 0


def _thawed(prefix: str) -> dict[str, str]:
    """The frozen entries, in the words of today."""
    data: Any = json.loads(lzma.decompress(FROZEN.read_bytes()))
    if data["versions"] != _versions():
        print(f"frozen with {data['versions']}, and this is {_versions()}: expect differences")
    entries_now = {n: text for n, text in data["entries"].items() if n.startswith(prefix)}
    for old, new in RENAMED.items():
        pattern = re.compile(rf"(?<!\w)(?:{old})(?!\w)")
        entries_now = {n: pattern.sub(new, text) for n, text in entries_now.items()}
    return entries_now


def _compared(frozen: dict[str, str], dumped: dict[str, str]) -> int:
    differing = [n for n in sorted(frozen.keys() | dumped.keys()) if frozen.get(n) != dumped.get(n)]
    for name in differing[:MOST_ENTRIES]:
        print(f"\n{name}")
        before, after = (side.get(name, "no such entry\n").splitlines() for side in (frozen, dumped))
        lines = list(difflib.unified_diff(before, after, "frozen", "now", lineterm=""))
        print("\n".join(lines[:MOST_LINES]))
        if len(lines) > MOST_LINES:
            print(f"... and {len(lines) - MOST_LINES} lines more")
    if differing:
        print(f"\n{len(differing)} of {len(dumped)} entries differ:")
        print("\n".join(f"  {name}" for name in differing[:100]))
        return 1
    print("all as frozen" if dumped else "no such entries")
    return 0 if dumped else 1


def _write_texts(folder: Path, dumped: dict[str, str]) -> None:
    for name, text in dumped.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
