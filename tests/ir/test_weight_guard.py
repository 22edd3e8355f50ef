"""Contents are compared in turns: every byte once in the interval, and about the same number of bytes in each call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.ir.weight_fetch import DictSnapshot, dict_version, mutation_stamp
from dovetail.ir.weight_guard import Checksums, Chunk, ContentGuard, packed_bytes, version_sentinel

PIECE = 2**16


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks that were compared, in order."""
    seen: list[Chunk] = []
    is_current = Chunk.is_current

    def spied(chunk: Chunk) -> bool:
        seen.append(chunk)
        return is_current(chunk)

    monkeypatch.setattr(Chunk, "is_current", spied)
    return seen


def never() -> None:
    raise AssertionError("nothing was written")


@pytest.mark.parametrize("interval", [1, 3, 8, 64])
@pytest.mark.parametrize("sizes", [[5], [100_000], [4, 300_000, 7, 70_000, 1], [16] * 500])
def test_every_chunk_has_its_turn(interval: int, sizes: list[int], compared: list[Chunk]) -> None:
    guard = ContentGuard(interval)
    for i, size in enumerate(sizes):
        guard.watch(i, Checksums([torch.randn(size)]), never)
    total, each = 4 * sum(sizes), list[int]()
    for _ in range(interval):
        before = len(compared)
        guard.step()
        each.append(sum(chunk.size for chunk in compared[before:]))
    assert sum(each) == total
    assert set(Counter(map(id, compared)).values()) == {1}
    assert max(each) <= total / interval + PIECE
    compared.clear()
    for _ in range(2 * interval):
        guard.step()
    assert set(Counter(map(id, compared)).values()) == {2}


def test_what_is_watched_anew_does_not_delay_the_others() -> None:
    guard, weight, other = ContentGuard(4), torch.randn(8), torch.randn(8)
    written: list[str] = []
    guard.watch("weight", Checksums([weight]), lambda: written.append("weight"))
    weight.data.add_(1)
    for _ in range(4):
        guard.watch("other", Checksums([other]), never)
        guard.step()
    assert written == ["weight"]


def test_no_interval_compares_on_demand_alone() -> None:
    guard, weight = ContentGuard(None), torch.randn(8)
    written: list[int] = []
    guard.watch("weight", Checksums([weight]), lambda: written.append(1))
    weight.numpy()[3] = 9
    for _ in range(10):
        guard.step()
    assert not written
    assert guard.check() == {weight.data_ptr()}
    assert guard.check() == set()
    assert written == [1]


def test_memory_that_is_gone_is_not_read() -> None:
    weight = torch.randn(100_000)
    checksums = Checksums([weight])
    weight.untyped_storage().resize_(0)
    assert checksums.written()
    weight = torch.randn(100_000)
    checksums = Checksums([weight])
    weight.data = torch.randn(5)
    assert checksums.written()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(6, 6)[::2, ::3],
        torch.randn(1).expand(5),
        torch.randn(3).to(torch.complex64),
        torch.randn(3).to(torch.bfloat16),
        torch.ones(3, dtype=torch.bool),
        torch.tensor(2.0),
    ],
)
def test_any_tensor_of_the_cpu(tensor: torch.Tensor) -> None:
    checksums = Checksums([tensor])
    assert not checksums.written()
    tensor.data[(0,) * tensor.dim()] = 0
    assert checksums.written()


def test_what_has_no_bytes() -> None:
    for tensor in (torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        assert not Checksums([tensor]).chunks


def test_state_of_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        frozen = torch.ones(2)
    tensor = torch.ones(2)
    before = mutation_stamp([frozen, tensor])
    assert mutation_stamp([frozen, tensor]) == before
    tensor.add_(1)
    assert mutation_stamp([frozen, tensor]) != before


def test_sentinels() -> None:
    assert version_sentinel("a.b.running_mean") == "a.b.num_batches_tracked"
    assert version_sentinel("running_var") == "num_batches_tracked"
    assert version_sentinel("a.running_mean.weight") is None


def test_one_look_per_tensor_and_call() -> None:
    """What a call pays for 100 batch norms: a version counter and an address each, and no more."""
    reads: Counter[Any] = Counter()

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads[func] += 1
            return super().__torch_function__(func, types, args, kwargs)

    state = [b.as_subclass(Watched) for _ in range(100) for b in nn.BatchNorm2d(4).state_dict().values()]
    reads.clear()
    mutation_stamp(state)
    assert reads == {Tensor._version.__get__: 500, Tensor.data_ptr: 500}


@pytest.mark.parametrize("index", [(slice(0, 1), 0), (slice(None), 1), (0, 0), (slice(0, 0), 0), ...])
def test_bytes_of_any_layout(index: Any) -> None:
    value = torch.randn(2, 3)[index]
    assert bytes(packed_bytes(value).tolist()) == value.numpy().tobytes()


@pytest.mark.parametrize("checks", range(6))
@pytest.mark.parametrize("count", [1, 32, 33, 100])
def test_a_snapshot_notices_a_write_to_any_dict(count: int, checks: int) -> None:
    for at in {0, count // 2, count - 1}:
        dicts: list[dict[str, int]] = [{} for _ in range(count)]
        snapshot = DictSnapshot(dicts)
        assert all(snapshot.is_current() for _ in range(checks)) is (dict_version is not None or not checks)
        dicts[at]["written"] = 1
        assert not snapshot.is_current()
        del dicts[at]["written"]
        assert not any(snapshot.is_current() for _ in range(6))
