"""A job of four processes on gloo: what its ranks run is alike, though some are slow, differ, give up or are killed."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from dovetail.tuning.plan import Plan
from tests.runtime.rank_processes import PLAN, SIZE, work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback device")

Results = list[dict[str, Any]]


def run(folder: Path) -> Results:
    """Return the results of each rank, by case."""
    # The store outlives rank 0, as that of an elastic agent does.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = mp.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, store.port, folder)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        ends = time.monotonic() + 150
        # One that fails leaves the others waiting for it.
        while any(p.is_alive() for p in processes) and not any(p.exitcode == 1 for p in processes):
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def alike(ranks: Results, case: str, among: tuple[int, ...] = (0, 1, 2, 3)) -> list[str]:
    """The backends of a case, which are those of every rank, as are the results bit for bit."""
    first = ranks[among[0]][case]
    for rank in among[1:]:
        assert ranks[rank][case]["backends"] == first["backends"]
        assert ranks[rank][case]["result"] == first["result"]
    return first["backends"]


def ranks_choose_alike_although_they_would_not_alone(ranks: Results) -> None:
    assert [set(rank["alone"]["backends"]) for rank in ranks] == [{"first"}, {"second"}] * 2
    assert ranks[0]["alone"]["result"] != ranks[1]["alone"]["result"]
    assert set(alike(ranks, "together")) == {"first"}
    for rank in ranks[1:]:
        assert rank["together"]["events"] == ["shared: graph, code and plan are those of rank 0"]


def calls_that_only_some_ranks_make_agree(ranks: Results) -> None:
    assert len(alike(ranks, "later", (0, 1, 3))) > len(ranks[0]["together"]["backends"])
    assert "later" not in ranks[2]


def training_steps_are_alike(ranks: Results) -> None:
    assert set(alike(ranks, "training")) == {"first"}
    assert ranks[0]["training"]["gradients"]
    for rank in ranks[1:]:
        assert rank["training"]["gradients"] == ranks[0]["training"]["gradients"]


def a_rank_that_the_bundle_does_not_fit_follows_the_plan(ranks: Results) -> None:
    assert set(alike(ranks, "mismatch")) == {"first"}
    reasons = [event for event in ranks[3]["mismatch"]["events"] if event.startswith("unshared")]
    assert reasons == [
        "unshared: rank 3 compiles by the plan of rank 0, whose code is not used: threads is 2, and was 1 where it was "
        "written"
    ]
    assert not [event for event in ranks[2]["mismatch"]["events"] if event.startswith("unshared")]


def what_only_one_rank_compiles_keeps_no_other_from_agreeing(ranks: Results) -> None:
    assert "All ranks follow the arguments of rank 2" in ranks[2]["one rank"]["events"][0]
    assert "rank 0 has called it with a Net" in ranks[1]["two models"]["events"][0]
    assert ranks[1]["two models"]["seconds"] < 30
    alike(ranks, "two models", (0, 2, 3))
    alike(ranks, "all again")


def a_late_rank_0_follows_the_others(ranks: Results) -> None:
    assert set(alike(ranks, "late")) == {"second"}
    for rank in ranks:
        assert "rank 0 has not decided within 0.5 s. All ranks follow" in str(rank["late"]["events"])


def ranks_have_the_plan_of_rank_0_byte_for_byte(ranks: Results) -> None:
    assert {rank["tuned"] for rank in ranks} == {Plan.load(PLAN).to_json()}


def an_error_of_the_search_reaches_every_rank(ranks: Results) -> None:
    assert ranks[0]["failed"] == "no program of the model runs: out of memory"
    for rank in ranks[1:]:
        assert rank["failed"] == (
            "there is no plan: rank 0 raised TuningError: no program of the model runs: out of memory."
        )
    assert "ranks tune different models: rank 0 has called it with a Net" in ranks[1]["models"]


def ranks_that_gave_up_have_the_same_plan_as_rank_0(ranks: Results) -> None:
    assert {rank["too long"] for rank in ranks} == {Plan().to_json()}


def ranks_follow_the_plan_of_a_rank_0_that_was_killed(ranks: Results) -> None:
    assert set(alike(ranks, "killed", (1, 2))) == {"killed"}
    for rank in ranks[1:3]:
        assert "rank 0, whose code is not used: rank 0 has not decided within 3 s" in str(
            rank["killed"]["events"]
        )
        assert rank["killed"]["seconds"] < 20
    assert "killed" not in ranks[0]
    assert "killed" not in ranks[3]


def ranks_agree_without_rank_0(ranks: Results) -> None:
    assert len(set(alike(ranks, "without rank 0", (1, 2)))) == 1


CHECKS = (
    ranks_choose_alike_although_they_would_not_alone,
    calls_that_only_some_ranks_make_agree,
    training_steps_are_alike,
    a_rank_that_the_bundle_does_not_fit_follows_the_plan,
    what_only_one_rank_compiles_keeps_no_other_from_agreeing,
    a_late_rank_0_follows_the_others,
    ranks_have_the_plan_of_rank_0_byte_for_byte,
    an_error_of_the_search_reaches_every_rank,
    ranks_that_gave_up_have_the_same_plan_as_rank_0,
    ranks_follow_the_plan_of_a_rank_0_that_was_killed,
    ranks_agree_without_rank_0,
)


def test_what_four_ranks_run_is_alike(tmp_path: Path) -> None:
    # One test, for those of a file are divided among processes, each of which would start the job.
    pytest.importorskip("sqlalchemy")
    ranks = run(tmp_path)
    for check in CHECKS:
        check(ranks)
