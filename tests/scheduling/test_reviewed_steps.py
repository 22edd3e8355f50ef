"""Steps that were wrong once: half-done ones, backends that decline, names of parameters, what verify overlooks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.lowering.guards import is_trial
from dovetail.scheduling.history import History
from dovetail.scheduling.schedule import Schedule, schedule

from .models import Block, Net, activation, mlp, net
from .refusing import refused
from .replacements import is_replaced, right, wrong


class Declining(dovetail.Backend):
    name = "declining"
    version = "1"

    def supports(self, region: dovetail.Region) -> Any:
        return dovetail.Decline("not today")

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        raise AssertionError


class Failing(Declining):
    name = "failing"

    def supports(self, region: dovetail.Region) -> Any:
        return True

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        raise RuntimeError("out of order")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(Declining(), "'declining' does not take it: not today"), (Failing(), "out of order")],
)
def test_a_backend_that_was_asked_for_and_does_not_take_a_region_is_an_error(backend: Any, reason: str):
    model, x = net(training=False)
    s = schedule(model, (x,))
    matches = s["blocks.*"].find(mlp)
    refused(s, reason, lambda: s.fuse(matches, backends=backend), dovetail.DovetailError)
    assert [r.backend for r in s.fuse(matches, backends=[Declining(), "torchscript"])] == ["torchscript"] * 3


def test_a_region_that_calls_something_of_the_users_names_what():
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.replace(right, s["blocks.0"].find(activation)[0])
    (region,) = s.fuse(s["blocks.0"].find(is_replaced), kind="mine")
    refused(s, "calls right, which is not a graph", lambda: s.lower(region, "torchscript"))


class Factored(nn.Linear):
    def forward(self, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor


def test_a_module_with_arguments_fixed_keeps_the_names_of_its_parameters():
    model, x = net(training=False)
    names = list(model.state_dict())
    s = schedule(model, (x,))
    s.replace(
        Factored(8, 8),
        "blocks.0.up",
        params={"weight": "weight", "bias": "bias"},
        concrete_args={"factor": 1.0},
        check=True,
    )
    assert list(s.build().state_dict()) == names
    assert isinstance(model.blocks[0].up, Factored)
    s.fuse(s["blocks.0"].find(mlp)) if s["blocks.0"].find(mlp) else None
    assert s.verify().gradients


def test_one_module_with_arguments_fixed_does_not_stand_in_two_places():
    model, x = net(training=False)
    s = schedule(model, (x,))
    new = Factored(8, 8)
    s.replace(new, "blocks.0.up", concrete_args={"factor": 1.0})
    refused(s, "more than one place", lambda: s.replace(new, "blocks.1.up", concrete_args={"factor": 1.0}))


def test_another_layout_does_not_fit():
    model, x = net(training=False)
    s = schedule(model, (x,))
    match = s["blocks.0"].find(activation)[0]
    refused(
        s, r"is float32\[4, 8\] \(sparse_coo\)", lambda: s.replace(lambda x: F.gelu(x).to_sparse(), match)
    )


def test_a_detach_is_not_taken_apart():
    model, x = net()
    s = schedule(model, (x,))
    s.decompose(s["blocks.0"].find(nn.BatchNorm1d))
    matches = s["blocks.0"].find(torch.ops.aten.detach)
    assert matches
    refused(s, "has no simpler form", lambda: s.decompose(matches))


def test_undo_within_a_step_is_refused():
    def taking_back(s: Schedule) -> None:
        s.fuse(s["blocks.0"].find(mlp))
        s.undo()

    model, x = net()
    s = schedule(model, (x,))
    s.fuse(s["blocks.1"].find(mlp))
    refused(s, "cannot undo others", lambda: s.apply(taking_back))


def test_a_primitive_that_builds_and_fails_leaves_the_model_as_it_was():
    def building(s: Schedule) -> None:
        s.fuse(s["blocks.0"].find(mlp))
        s.build()
        raise ValueError("no")

    model, x = net()
    s = schedule(model, (x,))
    with pytest.raises(ValueError, match="no"):
        s.apply(building)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_looking_at_a_built_model_keeps_what_it_was_traced_for():
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(mlp))
    s.build()(x[:2])
    run = model.blocks[0].forward.__self__
    assert len(run.cache.captures) == 2
    s["blocks.1"].find(mlp)
    s.fuse(s["blocks.2"].find(mlp))
    s.verify()
    assert model.blocks[0].forward.__self__ is run
    assert len(run.cache.captures) == 2


@dataclass
class Result:
    value: Tensor
    count: int


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("form", [lambda y: Result(y, 1), Holder, lambda y: [Result(y, 1)]])
def test_verify_compares_inside_of_objects(form: Any):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            return form(self.block(x))

    s = schedule(Model().eval(), (torch.randn(4, 8),))
    s.fuse(s["block"].find(mlp))
    assert s.verify().gradients
    s.undo()
    s.replace(wrong, s["block"].find(activation)[0])
    with pytest.raises(dovetail.VerificationError, match=r"result 0 .*value.* is off by") as caught:
        s.verify()
    assert caught.value.step == 1


@pytest.mark.parametrize(("new", "is_right"), [(right, True), (wrong, False)])
def test_a_python_number_is_as_close_as_what_it_was_read_from(new: Any, is_right: bool):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> float:
            return self.block(x).detach().square().sin().sum().item()

    torch.manual_seed(0)
    s = schedule(Model().eval(), (torch.randn(4, 8),))
    s.replace(new, s["block"].find(activation)[0])
    if is_right:
        s.verify()
    else:
        with pytest.raises(dovetail.VerificationError, match="result 0 is off by"):
            s.verify()


class Coarse(dovetail.Backend):
    """Allowed to be off by a twentieth; turns its results round if it is told to. Counts calls that are no trials."""

    name = "coarse"
    version = "1"
    bound = 0.05
    trains = False
    smallest = 1

    def __init__(self, turned: bool = False) -> None:
        self.turned, self.calls = turned, 0

    def supports(self, region: dovetail.Region) -> Any:
        return True

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        def run(*operands: Any) -> Any:
            self.calls += not is_trial()
            result = region.body(*operands)
            return tuple(m.flip(-1) for m in result) if self.turned else result

        return run


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).argmax(-1)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def test_whole_numbers_are_judged_where_a_bound_applies():
    torch.manual_seed(0)
    model = Picking().eval().requires_grad_(False)
    s = schedule(model, (torch.randn(64, 8),))
    s.fuse(s["head"].find(linear), backends=Coarse())
    s.verify()
    s.undo()
    s.fuse(s["head"].find(linear), backends=Coarse(turned=True))
    with pytest.raises(dovetail.VerificationError, match="has other integers"):
        s.verify()


def test_runs_of_verify_are_trials():
    model, x = net(training=False)
    s = schedule(model.requires_grad_(False), (x,))
    backend = Coarse()
    s.fuse(s["blocks.0"].find(mlp), backends=backend)
    s.build()
    backend.calls = 0
    s.verify(fresh=2)
    s["blocks.1"].find(mlp)
    assert backend.calls == 0
    model(x)
    assert backend.calls == 1


def test_escapes_by_node_are_not_saved():
    model, x = net(training=False)
    s = schedule(model, (x,))
    matches = s["blocks.0"].find(mlp)
    s.fuse(matches, escapes={matches[0].nodes[0]: "output"})
    with pytest.raises(dovetail.ScheduleError, match="given by node"):
        s.history.json()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"path": "nowhere"}, "no module matches 'nowhere'"),
        ({"find": {}}, "has one finder"),
        ({"find": {"operator": "aten.nothing"}}, "operator 'aten.nothing'"),
        ({"find": {"path": "("}}, "not a regular expression"),
        ({"find": {"rule": {"import": "no.such:rule"}}}, "cannot be imported"),
        ({"occurrence": "first"}, "needs number first"),
        ({"key": 3}, "computes something else"),
    ],
)
def test_a_broken_history_is_reported(change: dict[str, Any], reason: str):
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(mlp))
    history = History.load(s.history.json())
    history[1]["at"][0].update(change)
    t = schedule(Net().eval(), (x,))
    refused(t, rf"step 1 \(fuse\) cannot be replayed: .*{reason}", lambda: t.replay(history))


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (3, "targets cannot be read"),
        ([{}], "has no 'path'"),
        ([{"path": ""}], "has no 'find'"),
    ],
)
def test_a_step_that_lacks_something_is_reported(at: Any, reason: str):
    model, x = net(training=False)
    s = schedule(model, (x,))
    refused(s, reason, lambda: s.replay([{"do": "fuse", "at": at}]))


def test_a_replay_runs_the_model_once_for_all_parts():
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp))
    other, runs = Net().eval(), []
    other.head.register_forward_hook(lambda *_: runs.append(1))
    schedule(other, (x,)).replay(s.history)
    assert len(runs) == 1
