"""Writes files atomically: to a temporary folder beside the target, which is then replaced in one step."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from dovetail.errors import SaveError


def resolve_target(path: str | os.PathLike[str]) -> Path:
    """Return the target of a path with links resolved; raise SaveError if no file can be written there."""
    if not os.fspath(path):
        raise SaveError("the path is empty; give the name of a file.")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise SaveError(f"there is no folder '{target.parent}' to save to.")
    if target.is_dir():
        raise SaveError(f"'{path}' is a folder; give the name of a file.")
    # Replacing a device, a pipe or a circular link would destroy it.
    if os.path.lexists(target) and not stat.S_ISREG(os.lstat(target).st_mode):
        raise SaveError(f"'{path}' is not a regular file and is not replaced; give another name.")
    return target


@contextlib.contextmanager
def atomic_replace(target: Path) -> Generator[Path, None, None]:
    """Yield a path with the name of the target in a temporary folder beside it, and replace the target afterwards.

    Other files written to the folder are moved beside the target before it. Files get the permissions of those they
    replace, or the default ones. If writing fails nothing changes.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        written = Path(folder) / target.name
        yield written
        for file_path in sorted(Path(folder).iterdir(), key=lambda path: path == written):
            destination = target.with_name(file_path.name)
            with open(file_path, "rb") as file:
                os.fsync(file.fileno())
            if destination.exists():
                os.chmod(file_path, stat.S_IMODE(destination.stat().st_mode))
            os.replace(file_path, destination)
