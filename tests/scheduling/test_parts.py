"""Parts by path: globs, lists of parts, what is traced and what stays the model's own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import Block, activation, mlp, net


def test_a_path_a_glob_and_the_model_are_parts():
    model, x = net()
    s = schedule(model, (x,))
    assert s["blocks.0"].paths == ("blocks.0",)
    assert s["blocks.*"].paths == ("blocks.0", "blocks.1", "blocks.2")
    assert s["**.norm"].paths == ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")
    assert s["blocks.[01]"].paths == ("blocks.0", "blocks.1")
    assert s.paths == ("",)


def test_a_part_is_like_a_list():
    model, x = net()
    part = schedule(model, (x,))["blocks.*"]
    assert len(part) == 3
    assert [p.paths for p in part] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    assert part[-1].paths == ("blocks.2",)
    assert part[1:].paths == ("blocks.1", "blocks.2")
    assert part["norm"].paths == ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")
    assert part.modules == list(model.blocks)


def test_a_path_that_matches_nothing_is_an_error_that_names_what_there_is():
    model, x = net()
    s = schedule(model, (x,))
    with pytest.raises(dovetail.DovetailError, match=r"no module matches 'layers.\*.norm'.*blocks.\*.norm"):
        s["layers.*.norm"]


def test_looking_changes_nothing():
    model, x = net()
    s = schedule(model, (x,))
    before = s.text()
    assert len(s.find(mlp)) == 3
    assert s.text() == before
    assert "forward" not in model.__dict__


def test_tracing_leaves_no_trace_in_buffers_random_state_or_gradients():
    model, x = net()
    model(x).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    s = schedule(model, (x,))
    s["blocks.*"].fuse(s["blocks.*"].find(mlp))
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(
        torch.equal(a, b.grad)
        for a, b in zip(gradients, model.parameters(), strict=True)
        if b.grad is not None
    )
    assert torch.equal(random, torch.get_rng_state())


def test_what_is_not_touched_stays_the_models_own():
    model, x = net()
    s = schedule(model, (x,))
    modules = dict(model.named_modules())
    s["blocks.1"].fuse(s["blocks.1"].find(mlp))
    built = s.build()
    assert all(built.get_submodule(path) is module for path, module in modules.items())
    touched = [path for path, module in modules.items() if "forward" in module.__dict__]
    assert touched == ["blocks.1"]


class Twice(nn.Module):
    """One module called in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).sum(0) + self.block(x[0])


def test_there_is_one_trace_for_each_way_of_calling():
    model, x = Twice(), torch.randn(3, 4)
    expected = model(x)
    s = schedule(model, (x,))
    part = s["block"]
    assert len(part.graphs) == 2
    matches = part.find(activation)
    assert [m.form for m in matches] == [0, 1]
    regions = s.fuse(matches)
    assert [r.form for r in regions] == [0, 1]
    assert torch.equal(s.build()(x), expected)


def test_a_part_that_is_not_called_is_an_error():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    s = schedule(Unused(), (torch.randn(1, 2),))
    with pytest.raises(dovetail.DovetailError, match="'spare' was not called"):
        s["spare"].find(nn.Linear)


def test_a_list_of_modules_has_nothing_to_trace():
    model, x = net()
    with pytest.raises(
        dovetail.DovetailError, match=r"no forward of its own; take the modules in it: 'blocks.\*'"
    ):
        schedule(model, (x,))["blocks"].find(mlp)


def test_inputs_may_be_left_out_until_the_first_trace():
    model, x = net()
    s = schedule(model)
    assert len(s["blocks.*"]) == 3
    with pytest.raises(dovetail.InvalidArgument, match="tracing needs example inputs"):
        s["blocks.0"].find(mlp)
    s.example((x,))
    assert len(s["blocks.0"].find(mlp)) == 1


def test_steps_on_inner_parts_are_done_again_where_a_larger_part_is_traced():
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    s["blocks.*"].fuse(s["blocks.*"].find(mlp), kind="mlp")
    head = s.find("^head$")
    s.fuse(head, kind="head")
    assert [r.kind for r in s.regions] == ["mlp", "mlp", "mlp", "head"]
    assert torch.equal(s.build()(x), expected)


def test_a_hook_inside_of_a_part_is_detected_before_tracing():
    model, x = net()
    model.blocks[0].norm.register_forward_hook(lambda *_: None)
    s = schedule(model, (x,))
    before = s.text()
    with pytest.raises(dovetail.DovetailError, match=r"module 'norm' within 'blocks.0' has a forward hook"):
        s["blocks.0"].find(mlp)
    assert s.text() == before
    assert len(s["blocks.1"].find(mlp)) == 1


def test_a_hook_on_the_part_itself_runs_around_it():
    model, x = net(training=False)
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    expected = model(x)
    seen.clear()
    s = schedule(model, (x,))
    s["blocks.0"].fuse(s["blocks.0"].find(mlp))
    seen.clear()
    assert torch.equal(s.build()(x), expected)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("wrong", [3, lambda x: x, "model"])
def test_a_schedule_is_of_a_module(wrong: object):
    with pytest.raises(dovetail.InvalidArgument, match="schedule takes a module"):
        schedule(wrong)  # type: ignore[arg-type]


def test_inputs_are_a_tuple_and_a_dict():
    with pytest.raises(dovetail.InvalidArgument, match="args must be a tuple"):
        schedule(Block(), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(dovetail.InvalidArgument, match="kwargs must be a dict"):
        schedule(Block(), (), [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("args", [(torch.randn(2, 5),), ()])
def test_inputs_that_the_model_does_not_take_are_reported(args: tuple[Tensor, ...]):
    model, _ = net()
    with pytest.raises(dovetail.ScheduleError, match="does not run on the example inputs"):
        schedule(model, args)["blocks.0"].find(mlp)


@pytest.mark.parametrize("options", [{"params": 3}, {"concrete_args": 3}])
def test_mappings_of_a_replacement_are_dicts(options: dict[str, Any]):
    model, x = net()
    with pytest.raises(dovetail.InvalidArgument, match="is a dict by name, not a int"):
        schedule(model, (x,)).replace(nn.Linear(8, 2), "head", **options)
