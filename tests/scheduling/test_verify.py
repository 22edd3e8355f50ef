"""Verifying a schedule: what is right passes, what is wrong is named and found among the steps."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import ScheduleError, VerificationError
from dovetail.scheduling.schedule import Schedule, schedule

from .models import Net, mlp, net
from .replacements import (
    copied,
    drawing,
    is_replaced,
    on_gelu,
    right,
    with_other_momentum,
    without_gradient,
    wrong,
    wrong_gradient,
)


def good_steps(training: bool = True) -> tuple[Net, Schedule]:
    """Two steps that are right, of two kinds."""
    model, x = net(training=training)
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(mlp))
    on_gelu(s, right, 2)
    return model, s


@pytest.mark.parametrize("training", [True, False])
def test_right_steps_pass(training: bool) -> None:
    model, x = net(training=training)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp))
    verdict = s.verify()
    assert (verdict.runs, verdict.results, verdict.gradients, verdict.buffers) == (2, 1, 26, 9)
    assert verdict.error == 0.0
    assert str(verdict) == (
        "verified in 2 runs: 1 result, 26 gradients, 9 buffers, random numbers; results the same to the last bit"
    )


@pytest.mark.parametrize("training", [True, False])
def test_a_replacement_that_rounds_otherwise_passes(training: bool) -> None:
    _, s = good_steps(training)
    assert s.verify(fresh=2).runs == 3
    assert s.verify(train=not training).runs == 2


def test_a_model_on_which_nothing_was_done_is_itself() -> None:
    model, x = net()
    assert schedule(model, (x,)).verify(fresh=0).runs == 1


@pytest.mark.parametrize(
    ("new", "what"),
    [
        (wrong, "result 0"),
        (wrong_gradient, "the gradient of 'blocks.0.up.weight'"),
        (without_gradient, "the gradient of 'blocks.0.up.weight'"),
        (drawing, "the random state of cpu"),
    ],
)
def test_a_wrong_function_is_named_and_located_among_the_steps(new: Callable[..., Any], what: str) -> None:
    _, s = good_steps()
    on_gelu(s, new)
    s.annotate(s.regions, tile=8)
    s["head"].annotate(last=True)
    with pytest.raises(
        VerificationError, match=rf"by step 3 \(replace {new.__name__} in 'blocks.1'\)"
    ) as raised:
        s.verify()
    assert (raised.value.what, raised.value.step) == (what, 3)
    assert raised.value.entry == s.history[3]
    assert f"on the example inputs, {what} " in str(raised.value)


def test_other_statistics_are_detected() -> None:
    _, s = good_steps()
    s["head"].annotate(last=True)
    s["blocks.1.stats"].replace(with_other_momentum(s["blocks.1.stats"].modules[0]))
    with pytest.raises(VerificationError) as raised:
        s.verify()
    assert (raised.value.what, raised.value.step) == ("buffer 'blocks.1.stats.running_mean'", 4)
    assert s.verify(train=False).buffers == 9


def test_the_first_of_two_wrong_steps_is_named() -> None:
    _, s = good_steps()
    on_gelu(s, wrong_gradient)
    s["head"].replace(nn.Linear(8, 2))
    with pytest.raises(VerificationError) as raised:
        s.verify()
    assert raised.value.step == 3
    assert raised.value.what.startswith("the gradient of")


def test_fresh_inputs_find_what_is_right_on_the_example_only() -> None:
    model, x = net(training=False)
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(x)
    hook.remove()

    class Remembering(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            result = super().forward(input)
            return result if torch.allclose(input, seen[0], atol=1e-4) else result + 1

    new = Remembering(8, 2)
    new.load_state_dict(model.head.state_dict())
    s = schedule(model, (x,))
    s["head"].replace(new)
    assert s.verify(fresh=0).runs == 1
    with pytest.raises(VerificationError, match=r"on fresh inputs \(number 1\), result 0 is off by 1 "):
        s.verify()


def test_nothing_is_left_changed() -> None:
    model, x = net()
    model(x).sum().backward()
    model.get_submodule("blocks.0.drop").eval()
    s = schedule(model, (x,))
    s["head"].replace(nn.Linear(8, 2))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}
    modes, result = [m.training for m in model.modules()], s["head"].modules[0]
    text, drawn = s.text(), torch.get_rng_state()
    for train in (None, True, False):
        with pytest.raises(VerificationError):
            s.verify(train=train)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is gradients[n][0] for n, p in model.named_parameters())
    assert all(torch.equal(*pair) for pair in gradients.values())
    assert [m.training for m in model.modules()] == modes
    assert result.training
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert s.text() == text


def test_a_built_model_stays_built() -> None:
    model, s = good_steps(training=False)
    _, x = net()
    s.build()
    before = model(x)
    s.verify()
    assert "forward" in model.blocks[0].__dict__
    assert torch.equal(model(x), before)


def test_verifying_refuses_the_step_that_fails() -> None:
    model, x = net()
    s = schedule(model, (x,))
    with s.verifying(fresh=0) as same:
        assert same is s
        s.fuse(s["blocks.0"].find(mlp))
        text = s.text()
        with pytest.raises(VerificationError) as raised:
            on_gelu(s, wrong)
        assert raised.value.step == 2
        assert raised.value.entry is not None
        assert raised.value.entry["do"] == "replace"
        assert s.text() == text
        assert len(s.history) == 2
        on_gelu(s, right)
    on_gelu(s, wrong, 2)
    with s.verifying(fresh=0), pytest.raises(VerificationError) as raised:
        s["head"].annotate(last=True)
    assert raised.value.step == 3


def test_what_is_applied_as_one_step_is_verified_once_at_its_end() -> None:
    model, x = net()
    s = schedule(model, (x,))

    def twice(s: Schedule) -> None:
        on_gelu(s, wrong)
        if mended:
            s.replace(right, s["blocks.1"].find(where=is_replaced)[0])

    text, mended = s.text(), False
    with s.verifying(fresh=0):
        with pytest.raises(VerificationError, match=r"by step 1 \(apply .*twice\)"):
            s.apply(twice)
        assert s.text() == text
        mended = True
        s.apply(twice)
    assert s.verify().runs == 2


GENERATOR = random.Random(0)


class Shuffled(nn.Module):
    """Draws from a generator that nobody puts back."""

    def forward(self, x: Tensor) -> Tensor:
        return x * GENERATOR.random()


class HostRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_a_model_that_is_not_deterministic_is_distinguished_from_a_wrong_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Shuffled())
    s = schedule(model, (torch.randn(2, 4),))
    s["0"].replace(copied(model[0]))
    with pytest.raises(VerificationError, match=r"the model is not deterministic.*result 0") as raised:
        s.verify()
    assert raised.value.step is None


def test_runs_that_are_compared_draw_the_same_numbers_of_python() -> None:
    model = nn.Sequential(nn.Linear(4, 4), HostRandom())
    s = schedule(model, (torch.randn(2, 4),))
    s["0"].replace(copied(model[0]))
    state = random.getstate()
    s.verify()
    assert random.getstate() == state


class TwoFaced(nn.Module):
    """Does something else while it is traced."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * (self.factor if torch.compiler.is_exporting() else 1.0)


@pytest.mark.parametrize(
    ("factor", "how"), [(2.0, "is off by"), (1 + 2e-7, "nothing was done that may change a number")]
)
def test_a_trace_that_is_wrong_is_distinguished_from_what_was_done_with_it(factor: float, how: str) -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4), TwoFaced(factor)), (torch.randn(2, 4),))
    s["0"].annotate(first=True)
    s.fuse(s["1"].find(torch.ops.aten.relu.default))
    with pytest.raises(
        VerificationError, match=rf"{how}.*by tracing '1' in step 2 \(fuse in '1'\)"
    ) as raised:
        s.verify()
    assert raised.value.step == 2


def test_a_model_that_cannot_run_is_no_fault_of_a_step() -> None:
    s = schedule(nn.Linear(4, 4), (torch.randn(2, 3),))
    with pytest.raises(ScheduleError, match="the model itself cannot be run on the example inputs"):
        s.verify()


def test_fresh_inputs_that_the_model_refuses_are_reported() -> None:
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if bool((input < 0).any()):
                raise ValueError("negative")
            return super().forward(input)

    s = schedule(Picky(4, 4), (torch.rand(2, 4),))
    verdict = s.verify()
    assert verdict.runs == 1
    assert verdict.notes == (
        "fresh inputs (number 1): the model itself does not take them (ValueError: negative)",
    )
