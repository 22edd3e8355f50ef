"""Where a file is written: beside what is there, which it replaces in one step once it is whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from dovetail.errors import SaveError


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that a path stands for, links followed; SaveError where no file can be written there."""
    if not os.fspath(path):
        raise SaveError("the path is empty; give the name of a file.")
    found = Path(os.path.realpath(path))
    if not found.parent.is_dir():
        raise SaveError(f"there is no folder '{found.parent}' to save to.")
    if found.is_dir():
        raise SaveError(f"'{path}' is a folder; give the name of a file.")
    # A device, a pipe, or a link that leads to itself: it would be gone afterwards.
    if os.path.lexists(found) and not stat.S_ISREG(os.lstat(found).st_mode):
        raise SaveError(f"'{path}' is no plain file and is not replaced; give the name of another.")
    return found


@contextlib.contextmanager
def replaced(target: Path) -> Generator[Path, None, None]:
    """A file to write, with the name of the target, in a folder of its own beside it; afterwards it is the target.

    What else was written to the folder is put beside the target, before it. Files have the rights of those they replace,
    or those of any new file. Where writing fails all stays as it was.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        written = Path(folder) / target.name
        yield written
        for made in sorted(Path(folder).iterdir(), key=lambda path: path == written):
            place = target.with_name(made.name)
            with open(made, "rb") as file:
                os.fsync(file.fileno())
            if place.exists():
                os.chmod(made, stat.S_IMODE(place.stat().st_mode))
            os.replace(made, place)
