"""Steps whose targets were removed from the model since, arguments that change meanwhile, and edited histories."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import ScheduleError

X = torch.randn(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t()


@pytest.mark.parametrize("removed", ["deleted", "none"])
def test_a_replaced_module_that_was_removed_is_not_put_back(removed: str) -> None:
    model = Net().eval()
    schedule = dovetail.schedule(model, (X,))
    schedule.replace(nn.GELU(), "act")
    if removed == "deleted":
        del model.act
    else:
        model.act = None  # type: ignore[assignment]
    before = dict(model._modules)
    with pytest.raises(ScheduleError, match="a step replaced the module at 'act', which was removed"):
        schedule.build()
    assert dict(model._modules) == before


def test_a_container_that_became_shorter_does_not_grow_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    outer = nn.Sequential(model)
    schedule = dovetail.schedule(outer, (X,))
    schedule.replace(nn.Tanh(), "0.1")
    outer[0] = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ScheduleError, match=r"'0\.1', which was removed"):
        schedule.build()
    assert len(outer[0]) == 1


def test_a_bound_parameter_that_was_removed_is_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()).eval()
    new = Product()
    schedule = dovetail.schedule(model, (X,))
    match = schedule.find(torch.ops.aten.linear.default)[0]
    (weight,) = [name for name in (n.name for n in match.nodes[0].all_input_nodes) if "weight" in name]
    schedule.replace(new, match, params={"w": weight})
    del new.w
    with pytest.raises(ScheduleError, match="binds the parameter 'w' of 'Product', which was removed since"):
        schedule.build()
    assert dict(new._buffers) == {}


def test_fixed_arguments_are_those_of_the_call() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU()).eval()
    fixed = {"k": 1.0}

    def scaled(x: Tensor, *, k: float) -> Tensor:
        return torch.relu(x) * k

    def factory(match: Any) -> Any:
        fixed["k"] += 1
        return scaled

    schedule = dovetail.schedule(model, (X,))
    expected = model(X)
    schedule.replace_all(schedule.find(torch.ops.aten.relu.default), factory, concrete_args=fixed)
    (step,) = [step for step in schedule.history if step["do"] == "replace_all"]
    assert step["concrete_args"] == {"k": 1.0}
    torch.testing.assert_close(schedule.build()(X), expected)
    schedule.release()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def test_a_module_that_is_never_called_is_refused_by_name() -> None:
    model = nn.Sequential(Net()).eval()
    schedule = dovetail.schedule(model, (X,))
    schedule.replace(Inner(), "0.b")
    schedule.fuse(schedule["0"].find(nn.ReLU)[0], kind="q")
    with pytest.raises(ScheduleError, match=r"has no operation of '0\.b\.unused'"):
        schedule.replace(nn.Linear(4, 4), "0.b.unused")


def relu_step(**entry: Any) -> list[dict[str, Any]]:
    schedule = dovetail.schedule(Net().eval(), (X,))
    region = schedule.fuse(schedule.find(torch.ops.aten.relu.default)[0], kind="q")
    schedule.lower(region, "eager")
    first, fuse, lower = schedule.history
    return [first, fuse, {**lower, **entry}]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"backend": None}, "the step 'lower' names no backend"),
        (
            {"at": [{"path": "", "find": {"operator": 5}, "occurrence": 0}]},
            "the operator '5', which does not",
        ),
    ],
)
def test_histories_that_were_edited_are_refused_with_their_cause(entry: dict[str, Any], reason: str) -> None:
    schedule = dovetail.schedule(Net().eval(), (X,))
    with pytest.raises(ScheduleError, match=reason):
        schedule.replay(relu_step(**entry))
    assert not schedule.history


def test_a_step_without_its_name_is_refused() -> None:
    steps = relu_step()
    del steps[-1]["do"]
    with pytest.raises(ScheduleError, match="has no 'do'"):
        dovetail.schedule(Net().eval(), (X,)).replay(steps)


def test_modules_around_one_shared_module_are_restored() -> None:
    shared = Product()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).eval()
    schedule = dovetail.schedule(model, (X,))
    for match in schedule.find(torch.ops.aten.linear.default):
        (weight,) = [n.name for n in match.nodes[0].all_input_nodes if "weight" in n.name]
        schedule.replace(nn.Sequential(shared), match, params={"0.w": weight})
    original = shared.w
    schedule.build()
    schedule.release()
    assert shared.w is original


@pytest.mark.parametrize("numbered", [False, True])
def test_parameters_of_modules_in_traced_parts_are_bound_by_name(numbered: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.l(x))

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()) if numbered else Block()

    model = nn.Sequential(block(), block()).eval()
    expected = model(X)
    schedule = dovetail.schedule(model, (X,))
    for match in schedule.find(torch.ops.aten.relu.default):
        schedule.fuse(match, kind="activation")
    schedule.replace_all(nn.Linear, lambda old: Product(), params={"w": "weight"})
    torch.testing.assert_close(schedule.build()(X), expected)
    schedule.release()
