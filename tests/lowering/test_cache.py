"""Compiled code on disk: whole or not at all, private, bounded, and never in the way."""

import errno
import os
import subprocess
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail.ir.meta_keys import LOWERING
from dovetail.lowering.backend_protocol import Compiled
from dovetail.lowering.cache import Cache, default_folder, open_cache, tool_folder, toolchain
from dovetail.lowering.compile_unit import unit_of
from dovetail.lowering.guards import specialization_of
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.lowering.faulty import Sound

A, B = "a" * 64, "b" * 64


class Saves(Sound):
    """Keeps nothing of a body but that it was compiled."""

    name = "saves"

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.compiled = 0
        self.folders: list[Path | None] = []

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        self.compiled += 1
        self.folders.append(tool_folder("saves"))
        return region.body

    def save(self, compiled: Compiled) -> bytes:
        return b"a body"

    def load(self, data: bytes, region: Region) -> Compiled:
        assert data == b"a body"
        self.folders.append(tool_folder("saves"))
        return region.body


class SaveRaises(Saves):
    name = "save_raises"

    def save(self, compiled: Compiled) -> bytes:
        raise RuntimeError("nothing to save")


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * 2


def program(kind: str = "twice", **attrs: Any) -> GraphModule:
    gm = dovetail.capture(scaled, (torch.ones(2, 3), torch.ones(2, 3)))
    return dovetail.outline(gm, ["add", "relu", "mul"], kind=kind, attrs=attrs)


def outcomes(gm: GraphModule) -> list[str]:
    return [event.outcome for event in gm.meta[LOWERING].events]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.read(A) is None
    cache.write(A, b"one")
    cache.write(A, b"two")
    assert cache.read(A) == b"two"
    assert cache.read(B) is None
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "moved"])
def test_an_entry_that_is_not_whole_is_a_miss_and_is_removed(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.write(A, b"some code")
    (path,) = files(tmp_path)
    data = path.read_bytes()
    if damage == "moved":
        cache.write(B, b"other code")
        other = next(p for p in files(tmp_path) if p != path)
        other.replace(path)
    else:
        path.write_bytes(
            {"flipped": data[:-1] + b"\0", "cut": data[:-3], "emptied": b""}[damage],
        )
    assert cache.read(A) is None
    assert not files(tmp_path)


def test_concurrent_writers_never_show_half_an_entry(tmp_path: Path) -> None:
    payloads = [bytes([i]) * 5000 for i in range(4)]
    seen: set[bytes | None] = set()

    def write(data: bytes) -> None:
        cache = Cache(tmp_path)
        for _ in range(40):
            cache.write(A, data)
            seen.add(cache.read(A))

    threads = [threading.Thread(target=write, args=(data,)) for data in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen <= set(payloads)
    assert len(files(tmp_path)) == 1


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(A, b"code")
    left = [tmp_path / "entries" / A[:2] / name for name in (".old.tmp", ".new.tmp")]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    cache.tidy()
    assert not left[0].exists()
    assert left[1].exists()
    assert cache.read(A) == b"code"


def test_past_the_limit_what_was_unused_longest_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=4000, spared=100)
    keys = [f"{i:064}" for i in range(6)]
    for i, key in enumerate(keys[:5]):
        cache.write(key, bytes(600))
        os.utime(next(p for p in files(tmp_path) if p.name == key), (1000 + i, 1000 + i))
    tools = cache.tools("compiler")
    assert tools is not None
    (tools / "old.so").write_bytes(bytes(900))
    os.utime(tools / "old.so", (1002, 1002))
    assert cache.read(keys[0]) is not None  # used now, so the others are older
    cache.tidy()
    assert cache.size() <= 4000
    assert [cache.read(k) is not None for k in keys[:5]] == [True, False, True, True, True]
    (tools / "new.so").write_bytes(bytes(900))
    cache.tidy()
    assert not (tools / "old.so").exists()
    assert (tools / "new.so").exists()


def test_what_was_just_used_stays_even_past_the_limit(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1000, spared=100)
    cache.write(A, bytes(900))
    cache.write(B, bytes(900))
    cache.tidy()
    assert cache.read(A) is not None
    cache.write("c" * 64, bytes(5000))
    assert cache.read("c" * 64) is None, "larger than the whole cache may be"


def test_clearing_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(A, b"code")
    (cache.tools("compiler") or tmp_path).joinpath("kernel.so").write_bytes(b"code")
    assert cache.size() > 0
    cache.clear()
    assert cache.size() == 0
    cache.write(A, b"again")
    assert cache.read(A) == b"again"


def test_the_folder_is_private(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "mine")
    assert cache is not None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert open_cache(tmp_path / "mine") is cache
    assert open_cache(False) is None


@pytest.mark.parametrize("who", ["group", "others", "owner"])
def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod({"group": 0o770, "others": 0o707, "owner": 0o700}[who])
    if who == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another" if who == "owner" else "others can write"):
        assert open_cache(folder) is None
    assert open_cache(folder) is None, "told once"


@pytest.mark.parametrize("inner", ["entries", "tools"])
@pytest.mark.parametrize("who", ["group", "others", "owner"])
def test_a_folder_inside_that_others_can_write_is_not_used(
    tmp_path: Path, inner: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    (folder / inner).mkdir(parents=True)
    folder.chmod(0o700)
    (folder / inner).chmod({"group": 0o770, "others": 0o707, "owner": 0o700}[who])
    if who == "owner":
        of_another(monkeypatch, folder / inner)
    with pytest.warns(UserWarning, match="belongs to another" if who == "owner" else "others can write"):
        assert open_cache(folder) is None


def of_another(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let a folder belong to another user."""
    honest, number = os.stat, path.stat().st_ino

    def lying(at: Any, *args: Any, **kwargs: Any) -> Any:
        facts = honest(at, *args, **kwargs)
        if facts.st_ino != number:
            return facts
        return os.stat_result([*facts[:4], 12345, *facts[5:10]])

    monkeypatch.setattr(os, "stat", lying)


@pytest.mark.parametrize("inner", ["entries", f"entries/{A[:2]}", f"entries/{A[:2]}/{A}"])
def test_what_others_can_write_once_it_is_in_use_is_not_read(tmp_path: Path, inner: str) -> None:
    cache = Cache(tmp_path)
    cache.write(A, b"code")
    assert cache.read(A) == b"code"
    mode = (tmp_path / inner).stat().st_mode
    (tmp_path / inner).chmod(mode | 0o022)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert cache.read(A) is None
        assert cache.tools("compiler") is not None
    (tmp_path / inner).chmod(mode)
    assert cache.read(A) == b"code"


def test_a_tool_gets_no_folder_that_others_can_write(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    folder = cache.tools("compiler")
    assert folder is not None
    for open_to_all in (folder, folder.parent):
        open_to_all.chmod(0o777)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert cache.tools("compiler") is None
        open_to_all.chmod(0o700)
    assert cache.tools("compiler") == folder


def test_folders_inside_are_private_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o002)
    try:
        cache = Cache(tmp_path / "mine")
        cache.write(A, b"code")
        cache.tools("compiler")
    finally:
        os.umask(former)
    inside = [path for path in (tmp_path / "mine").rglob("*") if path.is_dir()]
    assert len(inside) == 4
    assert {path.stat().st_mode & 0o777 for path in inside} == {0o700}
    assert cache.read(A) == b"code"


def test_where_no_folder_can_be_created_there_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="not kept"):
        assert open_cache(tmp_path / "file" / "cache") is None


def test_a_full_disk_is_reported_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        cache.write(A, b"code")
    cache.write(A, b"code")
    assert not files(tmp_path)


def test_where_code_is_kept_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOVETAIL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "dovetail"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "dovetail"
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"


def test_the_key_distinguishes_what_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)

    def key(gm: GraphModule, backend: Any, *args: Any) -> str:
        return cache.key(unit_of(dovetail.regions(gm)[0]), backend, specialization_of(args or (x, x)))

    x = torch.ones(2, 3)
    first = key(program(), Saves())
    assert key(program(), Saves()) == first
    others = [
        key(program(), Saves("2")),
        key(program(), SaveRaises()),
        key(program("other"), Saves()),
        key(program(mode="fast"), Saves()),
        key(program(), Saves(), x.requires_grad_(), x),
        key(program(), Saves(), torch.ones(3, 2).t(), x),
    ]
    torch.set_float32_matmul_precision("high")
    try:
        others.append(key(program(), Saves(), x.detach(), x.detach()))
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(key(program(), Saves(), x.detach(), x.detach()))
    monkeypatch.undo()
    monkeypatch.setattr("dovetail.lowering.cache.toolchain", lambda: ("another compiler",))
    others.append(key(program(), Saves(), x.detach(), x.detach()))
    assert len({first, *others}) == len(others) + 1


def test_code_is_compiled_once_and_then_read(tmp_path: Path) -> None:
    gm = program()
    backend, again = Saves(), Saves()
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    one = lower(gm, backend, cache=tmp_path)
    two = lower(gm, again, cache=tmp_path)
    assert (backend.compiled, again.compiled) == (1, 0)
    assert (outcomes(one), outcomes(two)) == (["compiled"], ["disk"])
    assert torch.equal(two(x, y), gm(x, y))
    # Both times its tools had the same private folder, and none outside of compiling.
    assert {*backend.folders, *again.folders} == {open_cache(tmp_path).tools("saves")}  # type: ignore[union-attr]
    assert tool_folder("saves") is None

    other = Saves()
    assert outcomes(lower(gm, other, cache=False)) == ["compiled"]
    assert other.folders == [None]


def test_an_entry_that_cannot_be_loaded_is_compiled_anew(tmp_path: Path) -> None:
    gm = program()
    lower(gm, Saves(), cache=tmp_path)
    (path,) = files(tmp_path / "entries")
    cache = Cache(tmp_path)
    cache.write(path.name, b"of another format")
    assert outcomes(lower(gm, Saves(), cache=tmp_path)) == ["compiled"]
    assert outcomes(lower(gm, Saves(), cache=tmp_path)) == ["disk"]
    path.write_bytes(b"torn")
    assert outcomes(lower(gm, Saves(), cache=tmp_path)) == ["compiled"]


def test_what_cannot_be_saved_is_used_all_the_same(tmp_path: Path) -> None:
    gm = program()
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    lowered = lower(gm, SaveRaises(), cache=tmp_path, on_error="raise")
    assert torch.equal(lowered(x, y), gm(x, y))
    assert dovetail.regions(lowered)[0].backend == "save_raises"
    assert not files(tmp_path / "entries")


def test_looking_up_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    toolchain.cache_clear()
    x = torch.ones(2, 3)
    cache = Cache(tmp_path)
    assert (
        cache.read(cache.key(unit_of(dovetail.regions(program())[0]), Saves(), specialization_of((x, x))))
        is None
    )
