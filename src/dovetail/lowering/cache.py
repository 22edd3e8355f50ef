"""The disk cache of compiled code: a private folder that any number of processes share, bounded in size."""

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
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering import compile_unit
from dovetail.lowering.backend_protocol import Backend, backend_class, identity, package_version
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
"""Attributes of `torch.backends`. The older `allow_tf32` is an alias and may not be read after these were set."""


def precision() -> dict[str, Any]:
    """Return torch's settings of precision and determinism."""
    settings: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "matmul": _read(torch.get_float32_matmul_precision),
    }
    for name in _SWITCHES:
        settings[name] = _read(functools.partial(attrgetter(name), torch.backends))
    return settings


def restore_precision(settings: Mapping[str, Any]) -> None:
    """Apply what `precision` returned in another process."""
    now = precision()
    if now["matmul"] != settings["matmul"] and settings["matmul"] is not None:
        torch.set_float32_matmul_precision(settings["matmul"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.set_default_dtype(settings["dtype"])
    for name in _SWITCHES:
        if settings.get(name) is not None and now[name] != settings[name]:
            place, _, switch = name.rpartition(".")
            setattr(attrgetter(place)(torch.backends), switch, settings[name])


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (AttributeError, RuntimeError):  # not in this release, or two settings that torch cannot reconcile
        return None


@functools.cache
def toolchain() -> tuple[str, ...]:
    """Return the releases, the processor and the C++ compiler that code depends on, without running anything."""
    return (
        f"torch {torch.__version__}",
        f"python {sys.version}",
        *processor(),
        _compiler(os.environ.get("CXX")),
    )


def processor() -> tuple[str, str, str]:
    """Return the kind of processor that code is compiled for."""
    return platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor_model()


def _processor_model() -> str:
    """Return a hash of the processor's model and instruction sets: code for one may not run on another."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "features", "cpu implementer", "cpu part")
    lines = [line for line in first.splitlines() if line.lower().startswith(keys)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cpp_compiler(named: str | None = None) -> str | None:
    """Return the path of the C++ compiler that `CXX` or an argument names, or of the first usual one; None without."""
    named = os.environ.get("CXX") if named is None else named
    candidates = [named.split()[0]] if named and named.split() else ["g++", "clang++", "c++", "cl"]
    return next((p for p in map(shutil.which, candidates) if p is not None), None)


def _compiler(named: str | None) -> str:
    path = cpp_compiler(named or "")
    if path is None:
        return f"no compiler {named}"
    try:
        at = Path(path).resolve()
        facts = at.stat()
    except OSError:
        return f"{named} {path}"
    return f"{named} {at} {facts.st_size} {facts.st_mtime_ns}"


def device_identities(devices: Iterable[torch.device]) -> list[str]:
    """Return what distinguishes accelerators as far as their code goes."""
    identities: set[str] = set()
    for device in devices:
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            runtime = torch.version.cuda or torch.version.hip
            triton = [package_version(name) for name in ("triton", "pytorch-triton", "triton-rocm")]
            name = torch.cuda.get_device_name(device)
            identities.add(f"{name} {major}.{minor} {runtime} triton {', '.join(triton)}")
        else:
            identities.add(device.type)
    return sorted(identities)


def portable_key(unit: CompileUnit, backend: Backend, specialization: Specialization) -> str:
    """Return a hash of what code depends on besides the releases, the processor and the compiler of a machine."""
    facts = (
        _source_hash(backend_class(backend)),
        identity(backend),
        unit.key,
        unit.roles,
        specialization,
        device_identities(devices_of(unit.region.body)),
        torch.get_num_threads(),
        sorted(precision().items()),
    )
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()


def devices_of(gm: GraphModule) -> set[torch.device]:
    """Return the devices of the values in a graph."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return {v.device for v in values if isinstance(v, torch.Tensor)}


_MAGIC = b"dovetail 2\n"
_LIMIT = 4 * 2**30
_WRITES_BETWEEN_TIDYING = 32
_ABANDONED = 3600.0
_IN_USE: ContextVar[Cache | None] = ContextVar("dovetail_cache", default=None)


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache: its name, what it is, when it was last used, in seconds of the epoch, and its bytes.

    `kind` is "code" for an entry, "tool" for a file that a backend's compiler keeps, "partial" for one that is being
    written, or was when its process died.
    """

    path: Path
    name: str
    kind: Literal["code", "tool", "partial"]
    used: float
    size: int


@dataclass(frozen=True)
class DamagedEntry:
    """An entry of the cache that is not read, and why."""

    path: Path
    name: str
    reason: str


class Cache:
    """Compiled code by key, in a folder that only its user can write.

    Entries are loaded by backends that may execute them, so a folder or entry that others own or can write is not
    used. Errors of the disk do not raise: what cannot be read is a miss, what cannot be written is not kept, and the
    first such failure is a warning. Past `limit` bytes the least recently used entries are removed, except those used
    in the last `spared` seconds, which another process may be about to open.
    """

    def __init__(self, folder: str | Path, *, limit: int = _LIMIT, spared: float = 600.0) -> None:
        self.folder, self.limit, self.spared = Path(folder), limit, spared
        self._entries, self._tools = self.folder / "entries", self.folder / "tools"
        self._numbers = itertools.count()
        self._warned = False

    def key(self, unit: CompileUnit, backend: Backend, specialization: Specialization) -> str:
        """Return the key of an entry: a hash of all that the code of a backend for a body depends on."""
        return self.local_key(portable_key(unit, backend, specialization))

    def local_key(self, portable: str) -> str:
        """Return the key on this machine of code with a key that machines of the same kind share."""
        return hashlib.sha256(f"{portable}\n{toolchain()!r}".encode()).hexdigest()

    def read(self, key: str) -> bytes | None:
        """Return what was written under a key; None if there is nothing, or if it is incomplete."""
        path = self._path(key)
        try:
            if self._is_refused(path.parent, make=False):
                return None
            with path.open("rb") as file:
                if _why_not_private(os.fstat(file.fileno()), path) is not None:
                    return None
                content = file.read()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        head, data = content[:start], content[start:]
        if head != _header(key, data):
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Store bytes under a key atomically: readers see all of them or what was there before."""
        if len(data) > self.limit:
            return
        path = self._path(key)
        try:
            if self._is_refused(path.parent):
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
            self._warn(error)
            return
        if next(self._numbers) % _WRITES_BETWEEN_TIDYING == 0:
            self.tidy()

    def files(self) -> Iterator[CachedFile]:
        """Yield every file of the cache, those of the backends' tools included."""
        for used, size, path in self._files():
            is_entry = path.is_relative_to(self._entries)
            name = path.name if is_entry else path.relative_to(self._tools).as_posix()
            is_partial = is_entry and path.suffix == ".tmp"
            yield CachedFile(
                path, name, "partial" if is_partial else "code" if is_entry else "tool", used, size
            )

    def verify(self) -> list[DamagedEntry]:
        """Return the entries that `read` would not return; none is removed, and none counts as used."""
        damaged: list[DamagedEntry] = []
        for file in self.files():
            if file.kind != "code":
                continue
            try:
                places = (file.path.parent, file.path)
                reason = next(filter(None, (_why_not_private(p.stat(), p) for p in places)), None)
                content = file.path.read_bytes() if reason is None else b""
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as error:
                reason, content = str(error), b""
            start = len(_MAGIC) + hashlib.sha256().digest_size
            if reason is None and content[:start] != _header(file.name, content[start:]):
                is_other = not content.startswith(_MAGIC)
                reason = (
                    "it is not of the format of this version" if is_other else "its checksum does not match"
                )
            if reason is not None:
                damaged.append(DamagedEntry(file.path, file.name, reason))
        return damaged

    def size(self) -> int:
        """Return the size in bytes, the files of the backends' tools included."""
        return sum(size for _, size, _ in self._files())

    def tidy(self) -> None:
        """Remove partial files of processes that died and, past the limit, the least recently used ones."""
        now = time.time()
        files = sorted(self._files())
        for used, _, path in files:
            if path.suffix == ".tmp" and now - used > _ABANDONED:
                _remove(path)
        total = sum(size for _, size, _ in files)
        if total <= self.limit:
            return
        for used, size, path in files:
            # More is removed than the limit demands, so that not every write has to remove something.
            if total <= self.limit * 0.9 or now - used < self.spared:
                return
            _remove(path)
            total -= size
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def clear(self) -> None:
        """Remove all entries; loaded code is not affected."""
        for folder in (self._entries, self._tools):
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Let `tool_folder` return folders of this cache."""
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)

    def tools(self, name: str) -> Path | None:
        """Return a folder for files of a compiler, for this machine and compiler alone; None if it cannot be used."""
        digest = hashlib.sha256(repr(toolchain()).encode()).hexdigest()[:16]
        folder = self._tools / f"{name}-{digest}"
        try:
            return None if self._is_refused(folder) else folder
        except OSError as error:
            self._warn(error)
            return None

    def _is_refused(self, folder: Path, *, make: bool = True) -> bool:
        """Return whether a folder inside the cache, or one of its parents there, is not private to the user.

        Each is created by itself: `mkdir(parents=True)` would create the parents with default permissions.
        """
        if make:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for inner in (folder.parent, folder):
            if make:
                inner.mkdir(mode=0o700, exist_ok=True)
            reason = _why_not_private(inner.stat(), inner)
            if reason is not None:
                self._warn(reason)
                return True
        return False

    def _path(self, key: str) -> Path:
        return self._entries / key[:2] / key

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of last use, the size and the path of each file."""
        for top in (self._entries, self._tools):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = Path(folder, name)
                    try:
                        facts = path.lstat()
                    except OSError:  # removed meanwhile
                        continue
                    # Entries are touched when they are read. Files of tools are not; the access time, where the file
                    # system records it, is good enough: one that is missing is only written again.
                    used = facts.st_mtime if top == self._entries else max(facts.st_mtime, facts.st_atime)
                    yield used, facts.st_size, path

    def _warn(self, error: OSError | str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"compiled code is not kept in '{self.folder}': {error}.", stacklevel=2)


def tool_folder(name: str) -> Path | None:
    """Return a folder of the cache for files of a compiler, while a backend compiles or loads.

    None without a cache. It counts in the size of the cache, and files in it may be removed between uses.
    """
    cache = _IN_USE.get()
    return None if cache is None else cache.tools(name)


def default_folder() -> Path:
    """Return the default folder of the cache: `DOVETAIL_CACHE_DIR`, else one in the user's cache folder."""
    configured = os.environ.get("DOVETAIL_CACHE_DIR")
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()) / "dovetail"


_OPEN: dict[Path, Cache | None] = {}


def open_cache(where: bool | str | Path | None) -> Cache | None:
    """Return the cache in a folder, or in the default one if True; None, with a warning, if it cannot be used."""
    if where is None or where is False:
        return None
    try:
        folder = (default_folder() if where is True else Path(where).expanduser()).absolute()
    except RuntimeError:  # the user has no home
        return None
    if folder not in _OPEN:
        reason = _unusable(folder)
        _OPEN[folder] = None if reason is not None else Cache(folder)
        if reason is not None:
            warnings.warn(f"compiled code is not kept: {reason}.", stacklevel=2)
    return _OPEN[folder]


def _unusable(folder: Path) -> str | None:
    """Return why a folder cannot be used, creating it if it is missing; None if it can."""
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
    """Return why files there may be from another user; None if only the user can write there."""
    if not hasattr(os, "getuid"):
        return None
    if facts.st_uid != os.getuid():
        return f"'{path}' belongs to another user, and files there would be executed"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to '{path}', and files there would be executed; `chmod go-w` it"
    return None


def _header(key: str, data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + data).digest()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@functools.cache
def _source_hash(kind: type) -> str:
    """Return a hash of our release and of the sources that flatten bodies and of a backend, which may be edited."""
    text = hashlib.sha256(package_version("dovetail").encode())
    for module in (inline, compile_unit, sys.modules.get(kind.__module__)):
        with contextlib.suppress(OSError):
            text.update(Path(getattr(module, "__file__", None) or os.devnull).read_bytes())
    return text.hexdigest()
