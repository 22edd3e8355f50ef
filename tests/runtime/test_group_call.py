"""Ranks share one value for each decision, whichever of them is slow, late, gone or calls something else."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail import torch_compat
from dovetail.runtime import group_call
from dovetail.runtime.group_call import GroupCall
from tests.runtime.rank_groups import Net, rank_groups

X = torch.randn(4, 8)


def stores(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(folder / "store"), 4),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
    }


@pytest.fixture(params=["hash", "file", "tcp"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Any]]:
    with rank_groups(stores(tmp_path)[request.param](), 4) as each:
        yield each


def calls(groups: list[Any], *, seconds: float = 5.0, model: nn.Module | None = None) -> list[GroupCall]:
    model = model or Net()
    return [GroupCall(group, "compile", model, (X,), None, seconds=seconds) for group in groups]


def test_every_rank_has_the_value_that_came_first(groups: list[Any]) -> None:
    ranks = calls(groups)
    values = [ranks[rank].decide("plan", f"by {rank}".encode(), "late") for rank in (2, 0, 1, 3)]
    assert {(value.rank, value.data, value.note) for value in values} == {(2, b"by 2", "late")}
    assert ranks[0].read("plan") == values[0]
    assert ranks[0].read("other") is None


def test_ranks_that_decide_at_one_moment_share_one_value(groups: list[Any]) -> None:
    ranks, barrier, values = calls(groups), threading.Barrier(4), list[Any]()

    def decide(rank: GroupCall, number: int) -> None:
        barrier.wait()
        values.append(rank.decide(f"plan {number}", bytes([rank.rank]) * 1000))

    for number in range(5):
        values.clear()
        threads = [threading.Thread(target=decide, args=(rank, number)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(values) == 4
        assert len({(value.rank, value.data) for value in values}) == 1


def test_values_of_any_size_arrive_and_are_deleted_by_the_last_reader(
    groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_call, "_PART_BYTES", 1000)
    ranks, data = calls(groups), bytes(range(256)) * 20
    ranks[0].decide("code", data)
    for rank in ranks[1:]:
        assert rank.wait("code")[0] == group_call.SharedValue(0, data)
        assert not rank.failure
        rank.release("code")
    # The decision stays, its data are gone, and no rank waits for them.
    assert ranks[1].read("code") == group_call.SharedValue(0, b"", "what rank 0 has decided was deleted")
    assert not ranks[1].failure


def test_a_damaged_value_is_not_used(groups: list[Any]) -> None:
    ranks = calls(groups)
    ranks[0].decide("code", b"right")
    ranks[0]._store.set(f"{ranks[0]._key}/code/0/0", b"wrong")
    assert ranks[1].wait("code") == (None, ranks[1].failure)
    assert "another digest" in ranks[1].failure


def test_a_rank_waits_for_rank_0_and_not_longer_than_it_may(groups: list[Any]) -> None:
    ranks = calls(groups, seconds=0.5)
    threading.Timer(0.2, lambda: ranks[0].decide("plan", b"late")).start()
    value, reason = ranks[1].wait("plan")
    assert value is not None
    assert (value.data, reason) == (b"late", "")
    start = time.monotonic()
    value, reason = ranks[1].wait("code")
    assert (value, reason) == (None, "rank 0 has not decided within 0.5 s")
    assert time.monotonic() - start < 0.6


def test_waiting_can_be_interrupted(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calls(groups)[1].wait("plan")


def test_a_rank_with_another_model_does_not_wait(groups: list[Any]) -> None:
    (first,) = calls(groups[:1])
    (other,) = calls(groups[1:2], model=Net(3))
    value, reason = other.wait("plan")
    assert value is None
    assert reason.startswith(
        "rank 0 has called it with a Net of 560 weights in train mode for (float32[4, 8] on cpu)"
    )
    assert reason.endswith("and rank 1 with a Net of 840 weights in train mode for (float32[4, 8] on cpu)")
    # It takes nothing of the other model's, and rank 0 nothing of its.
    assert other.decide("plan", b"other").rank == 1
    assert first.decide("plan", b"first").rank == 0


def test_calls_belong_together_by_model_and_number_in_any_order(groups: list[Any]) -> None:
    small, large = Net(1), Net(2)
    zero = [calls(groups[:1], model=model)[0] for model in (small, large, large)]
    one = [calls(groups[1:2], model=model)[0] for model in (large, small, large)]
    for number, call in enumerate(zero):
        call.decide("plan", str(number).encode())
    values = [call.read("plan") for call in one]
    assert [value and value.data for value in values] == [b"1", b"0", b"2"]


def test_a_call_of_rank_0_alone_is_excused_once(groups: list[Any]) -> None:
    (extra,) = calls(groups[:1], model=Net(3))
    extra.decide("plan", b"extra")
    (one,) = calls(groups[1:2], seconds=0.1)
    assert "rank 0 has called it with" in one.wait("plan")[1]
    # From here on the rank is ahead of rank 0, and waits.
    (ahead,) = calls(groups[1:2], model=Net(4), seconds=0.1)
    assert ahead.wait("plan")[1] == "rank 0 has not decided within 0.1 s"
    # Another one is not excused.
    calls(groups[:1], model=Net(5))
    (other,) = calls(groups[1:2], model=Net(6), seconds=0.1)
    assert "a Net of 1400 weights" in other.wait("plan")[1]
    (zero,) = calls(groups[:1])
    zero.decide("plan", b"late")
    # Where rank 0 has begun the call, what else it has called does not matter.
    calls(groups[:1], model=Net(7))
    assert one.wait("code")[1] == "rank 0 has not decided within 0.1 s"
    assert one.decide("plan", b"").data == b"late"


def test_what_distinguishes_calls_and_what_does_not(groups: list[Any]) -> None:
    def key(model: nn.Module, *args: Any, **kwargs: Any) -> str:
        return group_call._identity("compile", model, args, kwargs)[0]

    def renamed(model: nn.Module) -> nn.Module:
        model.layers.add_module("x", model.layers[0])  # type: ignore[union-attr, operator, index]
        return model

    same = key(Net(), X)
    assert key(Net(), torch.zeros(4, 8)) == same  # other weights, other values
    others = [
        key(Net().eval(), X),
        key(Net().half(), X),
        key(renamed(Net()), X),
        key(Net(), X[:2]),
        key(Net(), X.double()),
        key(Net(), x=X),
        key(Net(), X, True),
        group_call._identity("tune", Net(), (X,), None)[0],
        group_call._identity("compile", Net(), None, None)[0],
    ]
    with torch.no_grad():
        others.append(key(Net(), X))
    assert len({same, *others}) == len(others) + 1


def test_a_store_that_is_gone_leaves_each_rank_its_own_value() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False)
    with rank_groups(client, 2) as groups:
        call = calls(groups[1:])[0]
        del server
        value, reason = call.wait("plan")
        assert value is None
        assert reason == call.failure
        assert "the store of the process group cannot be used: DistNetworkError" in reason
        assert call.decide("plan", b"own") == group_call.SharedValue(1, b"own")


def test_groups_that_are_none_are_refused() -> None:
    for group, match in [
        (3, "of which this process is a rank"),
        (dist.GroupMember.NON_GROUP_MEMBER, "of which this process is a rank"),
        ("WORLD", "give a torch.distributed.ProcessGroup"),
        (dist.ProcessGroup(dist.HashStore(), 0, 1), "was destroyed"),
    ]:
        with pytest.raises(dovetail.InvalidArgument, match=match):
            dovetail.compile(Net(), process_group=group)
        with pytest.raises(dovetail.InvalidArgument, match=match):
            dovetail.tune(Net(), (X,), process_group=group)
    for seconds in (0, -1.0, float("inf"), "5", True, None):
        with pytest.raises(dovetail.InvalidArgument, match="rank_timeout"):
            dovetail.compile(Net(), rank_timeout=seconds)  # type: ignore[arg-type]
        with pytest.raises(dovetail.InvalidArgument, match="rank_timeout"):
            dovetail.tune(Net(), (X,), rank_timeout=seconds)  # type: ignore[call-overload]


def test_a_decision_is_text_that_other_releases_can_refuse(groups: list[Any]) -> None:
    (call,) = calls(groups[:1])
    call.decide("plan", b"data", "why")
    rank, note, parts, digest = json.loads(call._store.get(f"{call._key}/plan"))
    assert (rank, note, parts, len(digest)) == (0, "why", 1, 64)


def test_descriptions_show_no_texts_and_take_weights_without_sizes() -> None:
    digest, description = group_call._identity("compile", nn.LazyLinear(4).eval(), (X, "secret", 7), None)
    assert description == "a LazyLinear of 0 weights in eval mode for (float32[4, 8] on cpu, str, int)"
    assert digest != group_call._identity("compile", nn.LazyLinear(4).eval(), (X, "other", 7), None)[0]


def test_a_torch_that_does_not_give_the_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_groups(dist.HashStore(), 1) as groups:
        monkeypatch.setattr(
            torch_compat, "GROUP_STORE", replace(torch_compat.GROUP_STORE, path="torch.distributed.absent")
        )
        with pytest.raises(dovetail.InvalidArgument, match="does not give the store of a group"):
            dovetail.compile(Net(), process_group=groups[0])
