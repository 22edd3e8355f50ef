"""The built model: the very modules, trained, moved, copied, saved and compiled as any other."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dovetail
from dovetail.scheduling.schedule import Schedule, schedule
from tests.scheduling.models import Net, mlp, net


def fused(model: Net, x: torch.Tensor) -> Schedule:
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp))
    return s


def regions_run(model: nn.Module, x: torch.Tensor) -> int:
    """How many regions the parts of a built model ran."""
    seen: list[str] = []
    with torch.profiler.profile() as profile:
        model(x)
    seen = [event.name for event in profile.events()]
    return sum("mlp" in name for name in seen)


def test_nothing_changes_before_build_and_release_takes_it_off():
    model, x = net()
    s = fused(model, x)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert s.build() is model
    assert [i for i, block in enumerate(model.blocks) if "forward" in block.__dict__] == [0, 1, 2]
    assert s.release() is model
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_names_order_and_parameters_stay():
    model, x = net()
    names, parameters = list(model.state_dict()), list(model.parameters())
    built = fused(model, x).build()
    assert list(built.state_dict()) == names
    assert all(a is b for a, b in zip(built.parameters(), parameters, strict=True))


def test_steps_after_build_take_effect_at_once():
    model, x = net(training=False)
    s = schedule(model, (x,))
    built = s.build()
    s.fuse(s["blocks.0"].find(mlp))
    assert "forward" in built.blocks[0].__dict__
    s.undo()
    assert "forward" not in built.blocks[0].__dict__


def test_other_batch_sizes_and_the_other_mode_get_the_same_regions():
    model, x = net()
    other, _ = net()
    built = fused(model, x).build()
    runner = built.blocks[0].forward.__self__
    for training in (True, False):
        built.train(training)
        other.train(training)
        for rows in (2, 3):
            torch.manual_seed(0)
            result = built(x[:rows])
            torch.manual_seed(0)
            assert torch.equal(result, other(x[:rows]))
    programs = [form.program for form in runner.cache.captures]
    assert len(programs) == 4  # the second size is captured with the number of rows open
    assert [[r.kind for r in dovetail.regions(gm)] for gm in programs] == [["mlp"]] * 4


def test_weights_that_are_loaded_or_replaced_are_used():
    model, x = net(training=False)
    other, _ = net(training=False)
    built = fused(model, x).build()
    built(x)
    torch.manual_seed(5)
    state = Net().state_dict()
    built.load_state_dict(state)
    other.load_state_dict(state)
    assert torch.equal(built(x), other(x))
    for m in (built, other):
        m.blocks[0].up.weight = nn.Parameter(torch.ones(8, 8))
    assert torch.equal(built(x), other(x))


def test_a_hook_put_inside_after_build_is_run():
    model, x = net(training=False)
    built = fused(model, x).build()
    expected = built(x)
    seen: list[int] = []
    handle = built.blocks[0].norm.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="module 'norm' within 'Block' has a forward hook"):
        assert torch.equal(built(x), expected)
    built(x)
    assert seen == [1, 1]
    handle.remove()
    assert torch.equal(built(x), expected)
    assert seen == [1, 1]


def test_another_precision():
    model, x = net(training=False)
    other, _ = net(training=False)
    built = fused(model, x).build().double()
    assert torch.equal(built(x.double()), other.double()(x.double()))


def test_a_deep_copy_is_a_model_of_its_own():
    model, x = net(training=False)
    built = fused(model, x).build()
    expected = built(x)
    copied = copy.deepcopy(built)
    assert copied.blocks[0].forward.__self__.module is copied.blocks[0]
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        copied.blocks[0].up.weight.zero_()
    assert not torch.equal(copied(x), expected)
    assert torch.equal(built(x), expected)


def test_a_built_model_pickles_with_its_steps():
    model, x = net(training=False)
    built = fused(model, x).build()
    loaded = pickle.loads(pickle.dumps(built))
    assert torch.equal(loaded(x), built(x))
    (form,) = loaded.blocks[0].forward.__self__.cache.captures
    assert [r.kind for r in dovetail.regions(form.program)] == ["mlp"]


@pytest.mark.parametrize("training", [True, False])
def test_torch_compile_works_over_it(training: bool):
    model, x = net(training=training)
    other, _ = net(training=training)
    compiled = torch.compile(fused(model, x).build(), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    result = compiled(x)
    torch.manual_seed(0)
    expected = other(x)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_built_model_is_not_scheduled_again():
    model, x = net()
    s = fused(model, x)
    s.build()
    with pytest.raises(dovetail.InvalidArgument, match="is built by a schedule"):
        schedule(model, (x,))
    s.release()
    assert schedule(model, (x,)).paths == ("",)
