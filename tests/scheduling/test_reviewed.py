"""What others look at: torch.compile, export, stand-ins for parameters, hooks, inference mode."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.schedule import Schedule, schedule

from .models import Block, Net, activation, mlp, net
from .refusing import refused


class Scaled(nn.Module):
    """Not what it stands for, so that it shows whether it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def tripled(x: Tensor) -> Tensor:
    return x * 3


def replaced(new: Any) -> tuple[Schedule, nn.Module, Tensor]:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.replace(new, s["blocks.0"].find(activation)[0])
    return s, s.build(), x


@pytest.mark.parametrize("new", [tripled, Scaled()])
def test_torch_compile_sees_what_was_replaced(new: Any):
    torch.compiler.reset()
    s, built, x = replaced(new)
    compiled = torch.compile(built, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), built(x))
    s.undo()
    torch.testing.assert_close(compiled(x), net(training=False)[0](x))


def test_torch_compile_for_other_sizes_keeps_what_was_replaced():
    torch.compiler.reset()
    _, built, x = replaced(tripled)
    compiled = torch.compile(built, backend="eager")
    compiled(x)
    torch.testing.assert_close(compiled(x[:2]), built(x[:2]))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_has_what_was_replaced_and_owns_its_parameters(strict: bool):
    _, built, x = replaced(Scaled())
    program = torch.export.export(built, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), built(x))
    assert not program.constants
    assert len(program.graph_signature.parameters) == len(dict(built.named_parameters()))


def test_a_built_model_can_be_captured():
    s, built, x = replaced(tripled)
    s.fuse(s["blocks.1"].find(mlp))
    assert torch.equal(dovetail.capture(built, (x,))(x), built(x))


def test_stand_ins_for_parameters_reach_the_graph():
    _, built, x = replaced(tripled)
    doubled = {name: p.detach() * 2 for name, p in built.named_parameters()}
    result = torch.func.functional_call(built, doubled, (x,))
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(2)
    assert torch.equal(result, built(x))


def test_stand_ins_in_a_call_that_nothing_was_done_for():
    _, built, x = replaced(tripled)
    inputs = {name: p.detach() for name, p in built.named_parameters()}
    with pytest.raises(dovetail.ScheduleError, match="Call it with such inputs first"):
        torch.func.functional_call(built, inputs, (x[:2],))
    expected = built(x[:2])
    assert torch.equal(torch.func.functional_call(built, inputs, (x[:2],)), expected)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_a_part_run(kind: str):
    model, x = net(training=False)
    seen: list[int] = []
    getattr(model.blocks[1], kind)(lambda *_: seen.append(1))
    s = schedule(model, (x.requires_grad_(),))
    s.fuse(s["blocks.*"].find(mlp))
    s.build()(x).sum().backward()
    assert seen == [1]


def test_a_hook_on_all_modules_is_refused():
    model, x = net(training=False)
    s = schedule(model, (x,))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refused(s, "a hook is set on all modules", lambda: s["blocks.0"].find(mlp))
    finally:
        handle.remove()
    assert s["blocks.0"].find(mlp)


def test_everything_works_in_inference_mode():
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    with torch.inference_mode():
        regions = s.fuse(s["blocks.*"].find(mlp))
        s.replace(F.gelu, s["blocks.0"].find(nn.LayerNorm)[0])
        s.undo()
        s.checkpoint(regions[0])
        s.checkpoint("head")
        s.verify()
        assert torch.equal(s.build()(x), expected)
        assert model(torch.randn(7, 8)).shape == (7, 2)
    model(x).sum().backward()
    assert model.blocks[0].up.weight.grad is not None


def test_a_model_created_in_inference_mode_is_reported():
    with torch.inference_mode():
        model = Net().eval()
    s = schedule(model, (torch.randn(4, 8),))
    with pytest.raises(
        dovetail.CaptureError, match=r"'up.weight' of the model was created in torch.inference_mode"
    ):
        s["blocks.0"].find(mlp)


def test_a_compiled_model_is_reported():
    model, x = net()
    s = schedule(torch.compile(model, backend="eager"), (x,))  # type: ignore[arg-type]
    refused(s, "the model is compiled by torch.compile", lambda: s.find(mlp))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_schedule_is_not_copied(copied: Any):
    model, x = net()
    with pytest.raises(dovetail.ScheduleError, match="Copy the model"):
        copied(schedule(model, (x,)))


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_module_with_two_names_is_one_part():
    x = torch.randn(4, 8)
    s = schedule(Twice().eval(), (x,))
    assert len(s["*"].find(mlp)) == 1
    s.replace(tripled, s["a"].find(activation)[0])
    expected = s.build()(x)
    s.fuse(s["b"].find(nn.LayerNorm))
    assert torch.equal(s.build()(x), expected)
    assert [r.kind for r in s["b"].regions] == ["LayerNorm"]


class Around(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + 1


def test_a_part_around_a_module_that_was_traced_elsewhere_is_refused():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Block()
            self.two = Around(self.one)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    s = schedule(Both().eval(), (torch.randn(4, 8),))
    s.replace(tripled, s["one"].find(activation)[0])
    refused(s, "'two.block' is the module that was traced as 'one'", lambda: s["two"].find(mlp))


def test_a_glob_over_containers_and_what_is_in_them_finds_each_match_once():
    model, x = net()
    s = schedule(model, (x,))
    assert [m.path for m in s["**"].find(mlp)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(s["blocks.**"].find(torch.ops.aten.linear)) == 6
    refused(s, "has no forward of its own", lambda: s["blocks"].find(mlp))


def test_modules_within_parts_of_which_not_all_have_them():
    model, x = net()
    s = schedule(model, (x,))
    assert s["**"]["norm"].paths == ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")
    with pytest.raises(dovetail.DovetailError, match="no module matches 'nothing'"):
        s["**"]["nothing"]
    with pytest.raises(IndexError, match="there are 3 parts"):
        s["blocks.*"][3]


def test_a_match_of_another_schedule_is_refused():
    model, x = net()
    s, t = schedule(model, (x,)), schedule(net()[0], (x,))
    match = t["blocks.0"].find(mlp)[0]
    refused(s, "is of another schedule", lambda: s.fuse(match), dovetail.InvalidArgument)


@pytest.mark.parametrize(
    ("what", "reason"),
    [(F.gelu, "cannot read the signature of gelu"), (nn.GELU(), r"not a GELU itself: find\(GELU\)")],
)
def test_what_cannot_be_a_pattern_is_reported(what: Any, reason: str):
    model, x = net()
    with pytest.raises(dovetail.InvalidArgument, match=reason):
        schedule(model, (x,))["blocks.0"].find(what)
