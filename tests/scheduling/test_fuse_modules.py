"""Modules fused by name: right where names alone mislead, folded in eval mode, kept in train mode."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.fuse_modules import fuse_modules
from tests.scheduling.chained import (
    CONV_BN_RELU,
    Between,
    CalledTwice,
    EscapingConv,
    EscapingNorm,
    Net,
    SharedConv,
    SharedReLU,
    awaken,
    by_torch,
    evaluated,
    image,
    norms,
    regions_of,
)

FAMILIES = {
    "conv1d": ([nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), nn.ReLU()], (2, 4, 7), "conv_bn_act"),
    "conv2d": ([nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)], (2, 4, 7, 7), "conv_bn_act"),
    "conv2d_same": (
        [nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6), nn.SiLU()],
        (2, 4, 7, 7),
        "conv_bn_act",
    ),
    "conv3d": (
        [nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6, affine=False), nn.ReLU()],
        (2, 4, 5, 5, 5),
        "conv_bn_act",
    ),
    "conv_relu": ([nn.Conv2d(4, 6, 3), nn.ReLU()], (2, 4, 7, 7), "conv_bn_act"),
    "linear_bn": ([nn.Linear(4, 6), nn.BatchNorm1d(6)], (3, 4), "linear_bn_act"),
    "linear_relu": ([nn.Linear(4, 6), nn.ReLU()], (3, 4), "linear_activation"),
    "bn_relu": ([nn.BatchNorm2d(4), nn.ReLU()], (2, 4, 5, 5), "bn_act"),
    "transposed": (
        [nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), nn.BatchNorm2d(6)],
        (2, 4, 5, 5),
        "conv_transpose_bn_act",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sequence_that_torch_fuses(family: str):
    modules, shape, kind = FAMILIES[family]
    model = nn.Sequential(*copy.deepcopy(modules)).eval()
    awaken(model)
    x = torch.randn(shape)
    fused = fuse_modules(model, [str(i) for i in range(len(model))], (x,))
    assert type(fused) is type(model)
    assert list(fused.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == (1 if family == "bn_relu" else 0)
    # A call that gives gradients keeps the norm.
    assert torch.equal(fused(x), model(x))
    assert [r.kind for r in regions_of(fused)] == [kind]
    model.train()
    fused.train()
    assert torch.equal(fused(x), model(x))
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_in_train_mode_it_trains_as_the_model_does():
    model = SharedReLU().train()
    fused = fuse_modules(model, [["conv", "bn", "relu"], ["other", "other_bn"]])
    for one in (model, fused):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            one(image() + step).square().sum().backward()
            optimizer.step()
    assert all(p.grad is not None for p in fused.parameters())
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()))
    assert [r.attrs["training"] for r in regions_of(fused)] == [True, True]
    # What is folded afterwards is what was trained.
    expected = evaluated(model.eval(), image())
    torch.testing.assert_close(evaluated(fused.eval(), image()), expected, rtol=1e-4, atol=1e-4)


def test_folded_weights_follow_the_parameters_and_statistics():
    x = image()
    model = Net().eval()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert isinstance(fused, Net)
    loaded = Net().eval()
    with torch.no_grad():
        loaded.conv.weight.mul_(2)
    fused.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(evaluated(fused, x), evaluated(loaded, x))
    with torch.no_grad():
        for one in (fused, loaded):
            one.bn.bias.add_(3)
    torch.testing.assert_close(evaluated(fused, x), evaluated(loaded, x))
    for one in (fused, loaded):
        one.bn.train()(torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)))
        one.bn.eval()
    torch.testing.assert_close(evaluated(fused, x), evaluated(loaded, x))
    for one in (fused, loaded):
        one.conv.weight.data.mul_(2)
        one.bn.running_mean.numpy()[:] += 1
    assert dovetail.refresh(fused) == 2
    torch.testing.assert_close(evaluated(fused, x), evaluated(loaded, x))
    fused.double()
    torch.testing.assert_close(evaluated(fused, x.double()), evaluated(loaded.double(), x.double()))
    assert norms(fused) == 0


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_folded_weights_follow_an_optimizer_in_eval_mode(kind: dict[str, bool]):
    model, x = Net().eval(), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    evaluated(fused, x)
    for one in (model, fused):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, **kind)
        one(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x), rtol=1e-4, atol=1e-4)
    assert norms(fused) == 0


def nothing(*_: object) -> None:
    """A hook."""


class Uncounted(nn.BatchNorm2d):
    """A norm that does not count its batches; what it writes into its statistics leaves no trace."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(input, *statistics, self.weight, self.bias, self.training, 0.5, self.eps)


def test_statistics_that_were_written_without_a_trace_are_folded_anew():
    model, x = Net().eval(), image()
    model.bn = Uncounted(4).eval()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    # With a hook inside, the model's own forward runs.
    hook = fused.get_submodule("relu").register_forward_hook(nothing)
    with pytest.warns(UserWarning, match="has a forward hook"):
        evaluated(fused.train(), x)
    hook.remove()
    evaluated(model.train(), x)
    torch.testing.assert_close(evaluated(fused.eval(), x), evaluated(model.eval(), x))
    assert norms(fused) == 0


def test_threads_may_make_the_first_call_at_once():
    model, x = Net().eval(), image()
    fused, expected = fuse_modules(model, CONV_BN_RELU), model(x).detach()
    result: list[Tensor] = []

    def work(grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            result.extend(fused(x).detach() for _ in range(4))

    threads = [threading.Thread(target=work, args=(bool(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(result) == 16
    for value in result:
        torch.testing.assert_close(value, expected)


def test_parameters_get_their_gradients_in_eval_mode():
    x = image()
    model = Net().eval()
    fused = fuse_modules(model, CONV_BN_RELU)
    evaluated(fused, x)
    for one in (model, fused):
        one(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in fused.named_parameters()}, expected)
    # Frozen, the input still gets its own through folded weights.
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for one, given in zip((model, fused), inputs, strict=True):
        one.requires_grad_(False)(given).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def test_what_runs_in_inference_mode_first_runs_with_gradients_later():
    x = image()
    model = Net().eval().requires_grad_(False)
    fused = fuse_modules(model, CONV_BN_RELU)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), model(x))
    inputs = x.clone().requires_grad_()
    fused(inputs).sum().backward()
    assert inputs.grad is not None
    for one in (fused, model):
        one.get_parameter("bn.bias").add_(1)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize(
    ("make", "groups", "left"),
    [
        (Net, [["relu", "conv", "bn"]], 0),
        (SharedReLU, [["conv", "bn", "relu"], ["other", "other_bn"]], 0),
        (SharedConv, [["other", "bn"], ["other", "other_bn"]], 1),
        (EscapingConv, CONV_BN_RELU, 1),
        (EscapingNorm, [["conv", "bn"]], 0),
        (CalledTwice, CONV_BN_RELU, 0),
    ],
)
def test_the_dataflow_decides(make: type[Net], groups: list[list[str]], left: int):
    x = image()
    model = make().eval()
    fused = fuse_modules(model, groups, (x,))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == left
    assert len(regions_of(fused)) == (2 if make is CalledTwice else len(groups))
    assert torch.equal(fused(x), model(x))
    assert torch.equal(fused.train()(x), model.train()(x))
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("make", [SharedReLU, EscapingConv, Between])
def test_names_alone_would_have_been_wrong(make: type[Net]):
    model, x = make().eval(), image()
    assert not torch.allclose(by_torch(model, CONV_BN_RELU, x), evaluated(model, x), atol=1e-2)


def test_a_norm_over_something_else_than_the_channels_is_kept():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(5, 5), nn.BatchNorm1d(5)
            awaken(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x))

    model, x = Tokens().eval(), torch.randn(2, 5, 5)
    assert not torch.allclose(by_torch(model, ["linear", "bn"], x), evaluated(model, x), atol=1e-2)
    fused = fuse_modules(model, ["linear", "bn"], (x,))
    assert torch.equal(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == 1


def test_images_with_channels_last_are_folded_and_stay_so():
    model, x = Net().eval(), image().to(memory_format=torch.channels_last)
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    for inputs in (x, torch.cat([x, x])[..., 1:]):
        result, expected = evaluated(fused, inputs), evaluated(model, inputs)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
    assert norms(fused) == 0


def test_under_autocast_the_casts_are_those_of_the_model():
    model, x = Net().eval(), image()
    fused = fuse_modules(model, CONV_BN_RELU, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(evaluated(fused, x), evaluated(model, x))
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))


def test_a_frozen_norm_in_a_model_that_trains():
    model, x = Net().train(), image()
    model.bn.eval()
    fused = fuse_modules(model, CONV_BN_RELU)
    for one in (model, fused):
        one(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in fused.parameters()], [p.grad for p in model.parameters()])
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == 0


def test_a_norm_without_statistics_is_kept():
    model = Net().eval()
    model.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()
    fused, x = fuse_modules(model, CONV_BN_RELU, (image(),)), image()
    assert torch.equal(evaluated(fused, x), evaluated(model, x))
    assert [r.attrs["training"] for r in regions_of(fused)] == [True]


def test_weights_that_are_computed_are_not_folded():
    model = Net().eval()
    nn.utils.parametrizations.weight_norm(model.conv)
    fused, x = fuse_modules(model, CONV_BN_RELU, (image(),)), image()
    torch.testing.assert_close(evaluated(fused, x), evaluated(model, x))
    assert norms(fused) == 1
