"""Compiled code on disk: a private folder that any number of processes read and write, bounded in size."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering import compile_unit
from dovetail.lowering.backend_protocol import identity
from dovetail.lowering.compile_unit import CompileUnit
from dovetail.outlining import inline

_SWITCHES = (
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
)
"""Attributes of `torch.backends`. The older `allow_tf32` says the same and may not be read after these were set."""


def precision() -> dict[str, Any]:
    """How exact and how repeatable torch is asked to be, as plain values."""
    found: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "matmul": _read(torch.get_float32_matmul_precision),
    }
    for name in _SWITCHES:
        found[name] = _read(functools.partial(attrgetter(name), torch.backends))
    return found


def set_precision(wanted: Mapping[str, Any]) -> None:
    """Bring torch to what `precision` told in another process."""
    now = precision()
    if now["matmul"] != wanted["matmul"] and wanted["matmul"] is not None:
        torch.set_float32_matmul_precision(wanted["matmul"])
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["warn_only"])
    torch.set_default_dtype(wanted["dtype"])
    for name in _SWITCHES:
        if wanted.get(name) is not None and now[name] != wanted[name]:
            place, _, switch = name.rpartition(".")
            setattr(attrgetter(place)(torch.backends), switch, wanted[name])


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (
        AttributeError,
        RuntimeError,
    ):  # not in this release, or set in two ways that torch cannot reconcile
        return None


@functools.cache
def toolchain() -> tuple[str, ...]:
    """The releases, the processor and the C++ compiler that code is made with; found without running anything."""
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor())
    return (
        f"torch {torch.__version__}",
        f"python {sys.version}",
        *processor,
        _compiler(os.environ.get("CXX")),
    )


def _processor() -> str:
    """The model and the instruction sets of the processor: code made for one may not run on another."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "features", "cpu implementer", "cpu part")
    lines = [line for line in first.splitlines() if line.lower().startswith(wanted)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _compiler(named: str | None) -> str:
    candidates = [named.split()[0]] if named and named.split() else ["g++", "clang++", "c++", "cl"]
    path = next((p for p in map(shutil.which, candidates) if p is not None), None)
    if path is None:
        return f"no compiler {named}"
    try:
        at = Path(path).resolve()
        facts = at.stat()
    except OSError:
        return f"{named} {path}"
    return f"{named} {at} {facts.st_size} {facts.st_mtime_ns}"


def devices(found: Iterable[torch.device]) -> list[str]:
    """What tells accelerators apart as far as code for them goes."""
    told: set[str] = set()
    for device in found:
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            runtime = torch.version.cuda or torch.version.hip
            told.add(f"{torch.cuda.get_device_name(device)} {major}.{minor} {runtime} triton {_triton()}")
        else:
            told.add(device.type)
    return sorted(told)


@functools.cache
def _triton() -> str:
    for name in ("triton", "pytorch-triton", "triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


_MAGIC = b"dovetail 1\n"
_LIMIT = 4 * 2**30
_WRITES_BETWEEN_TIDYING = 32
_ABANDONED = 3600.0
_IN_USE: ContextVar[Cache | None] = ContextVar("dovetail_cache", default=None)


class Cache:
    """Compiled code by key, in a folder that only its user can write.

    Entries are loaded by backends that may execute what they hold, so a folder that others own or can write is not
    used, nor one inside it, nor an entry. Nothing here raises for what a disk does: what cannot be read is a miss, what cannot be written is not kept,
    and the first such failure is told as a warning. Past `limit` bytes what was unused longest goes first; what was
    used in the last `spared` seconds stays, for another process may be about to open it.
    """

    def __init__(self, folder: str | Path, *, limit: int = _LIMIT, spared: float = 600.0) -> None:
        self.folder, self.limit, self.spared = Path(folder), limit, spared
        self._entries, self._tools = self.folder / "entries", self.folder / "tools"
        self._numbers = itertools.count()
        self._told = False

    def key(self, of: CompileUnit, backend: Any, situation: Specialization) -> str:
        """The name of an entry: a hash of all that the code of a backend for a body depends on."""
        values = [n.meta.get("val") for n in of.region.body.graph.nodes]
        found = {v.device for v in values if isinstance(v, torch.Tensor)}
        facts = (
            _written(type(backend)),
            identity(backend),
            of.key,
            of.roles,
            situation,
            toolchain(),
            devices(found),
            torch.get_num_threads(),
            sorted(precision().items()),
        )
        return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()

    def read(self, key: str) -> bytes | None:
        """What was written under a key; None where nothing was, or where it is not whole."""
        path = self._path(key)
        try:
            if self._refused(path.parent, make=False):
                return None
            with path.open("rb") as file:
                if _why_not_private(os.fstat(file.fileno()), path) is not None:
                    return None
                found = file.read()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        head, data = found[:start], found[start:]
        if head != _header(key, data):
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep bytes under a key; whoever reads sees all of them or what was there before."""
        if len(data) > self.limit:
            return
        path = self._path(key)
        try:
            if self._refused(path.parent):
                return
            handle, name = tempfile.mkstemp(prefix=f".{key[:8]}-", suffix=".tmp", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_header(key, data) + data)
                os.replace(name, path)
            except BaseException:
                _remove(Path(name))
                raise
        except OSError as error:
            self._tell(error)
            return
        if next(self._numbers) % _WRITES_BETWEEN_TIDYING == 0:
            self.tidy()

    def size(self) -> int:
        """The bytes of all that is kept, what the tools of backends keep included."""
        return sum(size for _, size, _ in self._files())

    def tidy(self) -> None:
        """Remove what processes that died have left half-written and, past the limit, what was unused longest."""
        now = time.time()
        files = sorted(self._files())
        for used, _, path in files:
            if path.suffix == ".tmp" and now - used > _ABANDONED:
                _remove(path)
        total = sum(size for _, size, _ in files)
        if total <= self.limit:
            return
        for used, size, path in files:
            # Some room is made beyond the limit, so that not every write has to make its own.
            if total <= self.limit * 0.9 or now - used < self.spared:
                return
            _remove(path)
            total -= size
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def clear(self) -> None:
        """Remove everything kept; what runs stays as it is."""
        for folder in (self._entries, self._tools):
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Let backends find a folder for their tools here, as `tool_folder` tells."""
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)

    def tools(self, name: str) -> Path | None:
        """A folder for what a compiler keeps by itself, for this machine and compiler alone; None if there is none."""
        digest = hashlib.sha256(repr(toolchain()).encode()).hexdigest()[:16]
        folder = self._tools / f"{name}-{digest}"
        try:
            return None if self._refused(folder) else folder
        except OSError as error:
            self._tell(error)
            return None

    def _refused(self, folder: Path, *, make: bool = True) -> bool:
        """Whether a folder inside the cache, or one on the way to it, is not as private as the cache must be.

        Each is made by itself: `mkdir(parents=True)` would give those on the way whatever rights new folders have.
        """
        if make:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for inner in (folder.parent, folder):
            if make:
                inner.mkdir(mode=0o700, exist_ok=True)
            reason = _why_not_private(inner.stat(), inner)
            if reason is not None:
                self._tell(reason)
                return True
        return False

    def _path(self, key: str) -> Path:
        return self._entries / key[:2] / key

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each file was last used, its size, and where it is."""
        for top in (self._entries, self._tools):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = Path(folder, name)
                    try:
                        facts = path.lstat()
                    except OSError:  # gone meanwhile
                        continue
                    # Entries are touched when they are read. Files of tools are not; where the file system notes
                    # when they were read, to the day, that will do, and one that is missing is only made again.
                    used = facts.st_mtime if top == self._entries else max(facts.st_mtime, facts.st_atime)
                    yield used, facts.st_size, path

    def _tell(self, error: OSError | str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(f"compiled code is not kept in '{self.folder}': {error}.", stacklevel=2)


def tool_folder(name: str) -> Path | None:
    """While a backend compiles or loads: a folder of the cache for what its compiler keeps by itself.

    None where nothing is to be kept. It is counted in the size of the cache, and files in it may vanish between uses.
    """
    cache = _IN_USE.get()
    return None if cache is None else cache.tools(name)


def default_folder() -> Path:
    """Where code is kept unless a folder is given: `DOVETAIL_CACHE_DIR`, else in the user's cache folder."""
    given = os.environ.get("DOVETAIL_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()) / "dovetail"


_OPEN: dict[Path, Cache | None] = {}


def open_cache(where: bool | str | Path | None) -> Cache | None:
    """The cache in a folder, or in the default one if True; None, with a warning, where a folder cannot be used."""
    if where is None or where is False:
        return None
    try:
        folder = (default_folder() if where is True else Path(where).expanduser()).absolute()
    except RuntimeError:  # nobody's home
        return None
    if folder not in _OPEN:
        reason = _unusable(folder)
        _OPEN[folder] = None if reason is not None else Cache(folder)
        if reason is not None:
            warnings.warn(f"compiled code is not kept: {reason}.", stacklevel=2)
    return _OPEN[folder]


def _unusable(folder: Path) -> str | None:
    """Why nothing may be kept in a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for inner in (folder, folder / "entries", folder / "tools"):
            reason = _why_not_private(inner.stat(), inner) if inner == folder or inner.exists() else None
            if reason is not None:
                return reason
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.R_OK | os.X_OK) else f"'{folder}' cannot be read"


def _why_not_private(facts: os.stat_result, path: Path) -> str | None:
    """Why what lies somewhere may be from someone else; None if only the user can have put it there."""
    if not hasattr(os, "getuid"):
        return None
    if facts.st_uid != os.getuid():
        return f"'{path}' belongs to another user, and what lies there would be executed"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to '{path}', and what lies there would be executed; `chmod go-w` it"
    return None


def _header(key: str, data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + data).digest()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@functools.cache
def _written(kind: type) -> str:
    """Our own release, and the text of what writes bodies out and of a backend: those change between releases."""
    try:
        release = version("dovetail")
    except PackageNotFoundError:
        release = ""
    text = hashlib.sha256(release.encode())
    for module in (inline, compile_unit, sys.modules.get(kind.__module__)):
        with contextlib.suppress(OSError):
            text.update(Path(getattr(module, "__file__", None) or os.devnull).read_bytes())
    return text.hexdigest()
