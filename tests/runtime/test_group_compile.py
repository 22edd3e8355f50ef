"""Ranks that compile one model run the same code: by rank 0's bundle, else its plan, else that of the rank that gave up."""

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail import torch_compat
from dovetail.frontend import capture as frontend
from dovetail.lowering import compile_region
from dovetail.runtime import bundle as bundles
from dovetail.runtime.group_compile import GroupPreset
from tests.runtime.rank_groups import First, Net, Second, backends_of, events_of, rank_groups

X = torch.randn(4, 8)


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    with rank_groups(dist.HashStore(), 2) as each:
        yield each


@pytest.fixture
def compile_on(groups: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compile on a rank, by default with the choice of backends that only this rank would take."""

    def compiled(rank: int, model: nn.Module | None = None, *, active: str = "", **options: Any) -> Any:
        active = active or ("first" if rank == 0 else "second")
        monkeypatch.setattr(First, "is_active", "first" in active)
        monkeypatch.setattr(Second, "is_active", "second" in active)
        options = {"backends": [First(), Second()], "cache": tmp_path / str(rank), **options}
        args = options.pop("args", (X,))
        model = model or Net().eval()
        with torch.set_grad_enabled(model.training):
            return dovetail.compile(model, args, process_group=groups[rank], rank_timeout=0.2, **options)

    return compiled


def test_a_rank_takes_graph_and_code_of_rank_0(
    compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().eval()
    zero = compile_on(0, model)
    assert set(backends_of(zero)) == {"first"}
    with monkeypatch.context() as patch:
        for owner, name in [(frontend, "_from_model"), (compile_region.Compilation, "_compile_inline")]:
            patch.setattr(owner, name, lambda *_, **__: pytest.fail("traced or compiled again"))
        one = compile_on(1, copy.deepcopy(model))
    assert backends_of(one) == backends_of(zero)
    with torch.no_grad():
        assert torch.equal(one(X), zero(X))
        assert not torch.equal(one(X), model(X))
        # Weights are each rank's own.
        one.layers[0].up.weight.mul_(2)
        assert not torch.equal(one(X), zero(X))
    assert events_of(one) == ["shared: graph, code and plan are those of rank 0"]
    assert "those of rank 0" in str(dovetail.explain(one))


def test_a_rank_that_the_bundle_does_not_fit_compiles_by_the_plan_of_rank_0(
    compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [Second(), First()]
    zero = compile_on(0, active="first second")
    monkeypatch.setattr(bundles, "processor", lambda: ("another",))
    one = compile_on(1, active="first second", backends=order, on_error="raise")
    assert backends_of(one) == backends_of(zero) == ["first"] * len(backends_of(zero))
    shared, unshared = sorted(events_of(one))
    assert shared == "shared: the backends of a graph are those of rank 0"
    assert unshared.startswith(
        "unshared: rank 1 compiles by the plan of rank 0, whose code is not used: processor is 'another'"
    )


def test_a_choice_that_a_rank_cannot_follow_is_reported(
    compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_on(0)
    monkeypatch.setattr(bundles, "processor", lambda: ("another",))
    one = compile_on(1)
    (differs,) = [event for event in events_of(one) if "does not run as" in event]
    assert differs.endswith("on rank 0 by tests.runtime.rank_groups.First first 1 []")
    assert "is run by the operations as they are" in differs


def test_a_late_rank_0_follows_the_rank_that_gave_up(compile_on: Callable[..., Any]) -> None:
    start = time.monotonic()
    one = compile_on(1, active="first second", backends=[Second(), First()])
    assert time.monotonic() - start < 30
    zero = compile_on(0, active="first second", backends=[First(), Second()])
    assert backends_of(zero) == backends_of(one) == ["second"] * len(backends_of(one))
    reason = "rank 0 has not decided within 0.2 s. All ranks follow the arguments of rank 1"
    assert events_of(one) == [f"unshared: rank 1 does not follow rank 0: {reason}"]
    assert f"unshared: rank 0 does not follow rank 0: {reason}" in events_of(zero)
    with torch.no_grad():
        assert one(X).shape == zero(X).shape


def test_the_plan_of_rank_0_is_that_of_all(compile_on: Callable[..., Any]) -> None:
    plan = dovetail.Plan()
    zero = compile_on(0, plan=plan)
    one = compile_on(1)
    assert zero.plan == one.plan == plan
    assert backends_of(one) == backends_of(zero)


def test_later_calls_agree_without_waiting(
    compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = (compile_on(rank, active="first second") for rank in (0, 1))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    longer = torch.randn(6, 8)
    with torch.no_grad():
        # Rank 0 takes what rank 1 has compiled first, although it would choose otherwise.
        monkeypatch.setattr(First, "is_active", False)
        one(longer)
        monkeypatch.setattr(First, "is_active", True)
        zero(longer)
    assert backends_of(zero) == backends_of(one)
    assert {*backends_of(one)} == {"first", "second"}
    assert "shared: the backends of a graph are those of rank 1" in events_of(zero)
    for each in (zero, one):
        assert "dimension 0 of 'x' from 4 to 6" in str(events_of(each))


def test_a_rank_that_was_overtaken_lowers_again(
    compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = compile_on(0, active="first second", args=None)
    one = compile_on(1, active="first second", args=None)
    preset, read = zero._captures.preset, type(zero._captures.preset.call).read
    assert isinstance(preset, GroupPreset)
    with torch.no_grad():
        monkeypatch.setattr(First, "is_active", False)
        one(X)
        monkeypatch.setattr(First, "is_active", True)
        # Rank 0 had begun before rank 1 was done.
        monkeypatch.setattr(type(preset.call), "read", lambda self, name: None)
        zero(X)
        monkeypatch.setattr(type(preset.call), "read", read)
    assert set(backends_of(zero)) == set(backends_of(one)) == {"second"}


def test_no_example_inputs_agree_in_the_first_call(compile_on: Callable[..., Any]) -> None:
    zero = compile_on(0, active="first second", args=None)
    one = compile_on(1, active="first second", args=None, backends=[Second(), First()])
    with torch.no_grad():
        zero(X), one(X)
    assert set(backends_of(one)) == {"first"}
    assert backends_of(one) == backends_of(zero)


def test_a_job_that_finds_the_keys_of_the_last_one_agrees(
    compile_on: Callable[..., Any], groups: list[Any]
) -> None:
    both = {"active": "first second"}
    before = [compile_on(rank, **both) for rank in (0, 1)]
    with rank_groups(torch_compat.GROUP_STORE.value(groups[0]), 2) as again:
        groups[:] = again
        after = [compile_on(rank, **both, backends=[Second(), First()]) for rank in (0, 1)]
    assert backends_of(after[0]) == backends_of(after[1]) == backends_of(before[0])


def test_training_steps_agree(compile_on: Callable[..., Any]) -> None:
    model = Net().train()
    gradients: list[Any] = []
    for rank in (0, 1):
        own = copy.deepcopy(model)
        fast = compile_on(rank, own)
        fast(X).sum().backward()
        gradients.append([p.grad for p in own.parameters()])
        assert set(backends_of(fast)) == {"first"}
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_errors_of_rank_0_reach_the_others(compile_on: Callable[..., Any]) -> None:
    class Undone(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such device")

    with pytest.raises(Exception, match="no such device"):
        compile_on(0, Undone().eval(), on_error="raise")
    with pytest.raises(Exception, match="no such device"):
        compile_on(1, Undone().eval(), on_error="raise")


def test_arguments_that_cannot_be_sent_are_each_ranks_own(compile_on: Callable[..., Any]) -> None:
    class Local(First):
        pass

    zero = compile_on(0, active="first second", backends=[Local(), Second()])
    one = compile_on(1, active="first second")
    assert backends_of(one) == backends_of(zero)
    assert "it follows its own arguments, not those of rank 0: they cannot be pickled" in str(events_of(one))


def test_ranks_with_other_models_compile_by_themselves(compile_on: Callable[..., Any]) -> None:
    zero, one = compile_on(0, Net(2).eval()), compile_on(1, Net(3).eval())
    assert set(backends_of(zero)) == {"first"}
    assert set(backends_of(one)) == {"second"}
    assert "rank 0 has called it with a Net of" in str(events_of(one))


def test_copies_in_other_processes_decide_by_themselves(compile_on: Callable[..., Any]) -> None:
    zero = compile_on(0)
    again = pickle.loads(pickle.dumps(zero))
    assert not isinstance(again._captures.preset, GroupPreset)
    assert isinstance(copy.deepcopy(zero)._captures.preset, GroupPreset)


def test_a_bundle_has_what_is_decided_already(compile_on: Callable[..., Any], tmp_path: Path) -> None:
    path = dovetail.bundle(compile_on(0), tmp_path / "net.bundle")
    with pytest.raises(dovetail.InvalidArgument, match="give a bundle or process_group"):
        compile_on(0, bundle=path, backends=None)
    one = compile_on(1)
    dovetail.bundle(one, tmp_path / "again.bundle")


def test_a_store_that_is_gone_leaves_ranks_their_own_arguments(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False)
    with rank_groups(client, 2) as groups, torch.no_grad():
        del server
        fast = dovetail.compile(Net().eval(), (X,), backends=[First()], process_group=groups[1])
        assert set(backends_of(fast)) == {"first"}
        assert "the store of the process group cannot be used" in events_of(fast)[0]
        fast(torch.randn(9, 8))


def test_a_rank_that_refuses_a_call_is_in_step_in_the_next_one(compile_on: Callable[..., Any]) -> None:
    model = Net().eval()
    compile_on(0, model)
    with pytest.raises(dovetail.InvalidArgument, match="check_capture"):
        compile_on(1, model, check_capture=3)
    # The second call is not taken for the first one, which is decided already.
    one = compile_on(1, model)
    assert any("rank 0 has not decided within 0.2 s" in event for event in events_of(one))
