"""What cannot be fused by name: told with the reason, and the model is as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.scheduling.fuse_modules import fuse_modules
from dovetail.scheduling.schedule import schedule
from tests.scheduling.chained import (
    CONV_BN_RELU,
    Between,
    Net,
    NormFirst,
    SharedReLU,
    evaluated,
    fused_graphs,
    image,
)


@pytest.mark.parametrize(
    ("make", "groups", "reason"),
    [
        (Between, CONV_BN_RELU, "'bn' reads the result of mul, not what 'conv' computes"),
        (NormFirst, [["other_bn", "relu"]], "'other_bn' computes nothing when the model is called"),
        (NormFirst, [["conv", "bn"]], "'bn' reads the result of conv2d in 'other', not what 'conv' computes"),
        (NormFirst, [["bn", "relu", "conv"]], "'bn' reads the result of conv2d in 'other', not what 'conv'"),
        (SharedReLU, [["conv", "bn", "relu"], ["bn", "relu"]], "both take the same call of 'bn'"),
        (Net, [["conv", "other"]], "'other' computes nothing"),
        (SharedReLU, [["conv", "other"]], "'conv' and 'other' are each a product"),
    ],
)
def test_what_does_not_follow_one_another_is_refused(make: type[Net], groups: list[list[str]], reason: str):
    model = make().eval()
    with pytest.raises(ScheduleError, match=reason):
        fuse_modules(model, groups, (image(),), inplace=True)
    assert fused_graphs(model) == {}


def test_without_example_inputs_the_first_call_reports():
    fused = fuse_modules(Between(), CONV_BN_RELU)
    for training in (True, False):
        with pytest.raises(ScheduleError, match="'bn' reads the result of mul, not what 'conv' computes"):
            fused.train(training)(image())


@pytest.mark.parametrize(
    ("names", "error", "reason"),
    [
        (["conv", "bm"], ScheduleError, "no module matches 'bm'"),
        (["conv"], ScheduleError, "names one module"),
        ([[]], ScheduleError, "names no module"),
        (["conv", "conv"], ScheduleError, "names the same module twice"),
        ([["conv", "bn"], ["bn", "conv"]], ScheduleError, "is to be fused twice"),
        (["conv", ""], InvalidArgument, "'' is not the name of a module"),
        (["conv*", "bn"], InvalidArgument, r"'conv\*' is not the name of a module"),
        ([], InvalidArgument, "takes lists of module names"),
        ("conv", InvalidArgument, "takes lists of module names"),
        (["conv", ["bn"]], InvalidArgument, "takes lists of module names"),
    ],
)
def test_wrong_names_are_refused_at_once(names: Any, error: type[Exception], reason: str):
    with pytest.raises(error, match=reason):
        fuse_modules(Net(), names)


def noting(seen: list[str], name: str) -> Callable[..., None]:
    """A hook that notes that it ran."""

    def hook(*_: Any) -> None:
        seen.append(name)

    return hook


def test_other_mistakes_are_refused_at_once():
    model = Net()
    with pytest.raises(InvalidArgument, match="write inplace=True"):
        fuse_modules(model, CONV_BN_RELU, True)  # pyright: ignore[reportArgumentType]
    model.bn = nn.BatchNorm2d(5)
    with pytest.raises(ScheduleError, match="'conv' is of 4 and 'bn' is of 5 channels"):
        fuse_modules(model, CONV_BN_RELU)
    with pytest.raises(InvalidArgument, match="lazy modules; call it once"):
        fuse_modules(nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()), ["0", "1"])
    hooked = Net()
    hooked.bn.register_forward_hook(noting([], "bn"))
    with pytest.raises(ScheduleError, match="module 'bn' within the model has a forward hook"):
        fuse_modules(hooked, CONV_BN_RELU)
    s = schedule(Net(), (image(),))
    s.fuse(s.find(nn.ReLU))
    with pytest.raises(InvalidArgument, match="built by a schedule"):
        fuse_modules(s.build(), CONV_BN_RELU)


def test_a_call_that_cannot_be_captured_is_tried_once():
    model, x = Net().eval(), image()
    model.bn.momentum = None  # in training it computes with the number of calls
    fused = fuse_modules(model, CONV_BN_RELU, (x,)).train()
    with pytest.warns(UserWarning, match="a call runs the model as it is"):
        result = fused(x)
    assert torch.equal(result, model.train()(x))
    for _ in range(10):
        assert torch.equal(fused(x), model(x))
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(evaluated(fused.eval(), x), evaluated(model.eval(), x))


def test_hooks_around_what_is_fused_run_and_later_ones_inside_are_not_lost():
    model, x = Net().eval(), image()
    seen: list[str] = []
    model.register_forward_hook(noting(seen, "model"))
    fused = fuse_modules(model, CONV_BN_RELU, (x,), inplace=True)
    assert fused is model
    seen.clear()
    evaluated(model, x)
    assert seen == ["model"]
    model.bn.register_forward_hook(noting(seen, "bn"))
    with pytest.warns(UserWarning, match="'bn' within the model has a forward hook"):
        evaluated(model, x)
    assert seen == ["model", "bn", "model"]
