"""Every model of the zoo runs, trains, exports, and is the same whenever it is built."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from dovetail import zoo

MODES = pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
EACH = pytest.mark.parametrize("entry", [zoo.get(name) for name in zoo.names()], ids=zoo.names())
HERE = Path(zoo.__file__).parent


def call(model: nn.Module, inputs: zoo.Inputs) -> list[Tensor]:
    return pytree.tree_leaves(model(*inputs.args, **inputs.kwargs))


def weighted_sum(outputs: list[Tensor]) -> Tensor:
    # A plain sum would be blind to everything before a norm.
    source = torch.Generator().manual_seed(1)
    return torch.stack([(out * torch.randn(out.shape, generator=source)).sum() for out in outputs]).sum()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def all_equal(left: Any, right: Any) -> bool:
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def export(model: nn.Module, inputs: zoo.Inputs) -> ExportedProgram:
    # torch may warn about itself while it exports; only warnings that point into the zoo count.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exported = torch.export.export(model, inputs.args, inputs.kwargs, strict=False)
        lowered = exported.run_decompositions({})
    assert not [warning for warning in seen if HERE in Path(warning.filename).parents]
    return lowered


@EACH
@MODES
def test_runs_forward_and_backward(entry: zoo.ZooModel, train: bool) -> None:
    model = entry.build().train(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = call(model, entry.example_inputs())
        weighted_sum(outputs).backward()
    assert all(out.isfinite().all() and out.std() > 0.01 for out in outputs)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # Softmax ignores a shift of all scores of a query, so a key bias gets rounding noise at most.
        assert parameter.grad.any() or name.endswith("key.bias"), name


@EACH
def test_weights_and_inputs_repeat(entry: zoo.ZooModel) -> None:
    first, second = state(entry.build()), state(entry.build())
    assert first.keys() == second.keys()
    assert all_equal(first, second)
    inputs, again, other = entry.example_inputs(), entry.example_inputs(), entry.example_inputs(seed=1)
    assert all_equal((inputs.args, inputs.kwargs), (again.args, again.kwargs))
    assert not all_equal(inputs.args, other.args)


@EACH
def test_global_random_state_is_untouched(entry: zoo.ZooModel) -> None:
    before = torch.get_rng_state()
    entry.build()
    entry.example_inputs()
    assert torch.equal(torch.get_rng_state(), before)


@EACH
@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_every_size_takes_its_inputs(entry: zoo.ZooModel, size: str) -> None:
    inputs = entry.example_inputs(size, batch=3)
    with torch.device("meta"):
        model = entry.build(size).eval()
    args, kwargs = pytree.tree_map(to_meta, (inputs.args, inputs.kwargs))
    assert all(out.shape[0] == 3 for out in call(model, zoo.Inputs(args, kwargs)))


@EACH
@MODES
def test_exports(entry: zoo.ZooModel, train: bool) -> None:
    model, inputs = entry.build().train(train), entry.example_inputs()
    lowered = export(model, inputs)
    if not train:
        torch.testing.assert_close(call(lowered.module(), inputs), call(model, inputs))


def test_moe_counts_its_routing_in_train_mode_only() -> None:
    entry = zoo.get("moe")
    model, inputs = entry.build(), entry.example_inputs()
    tokens = inputs.args[0].numel()
    model.eval()(*inputs.args)
    counts = [buffer for name, buffer in model.named_buffers() if name.endswith("router_counts")]
    assert [int(count.sum()) for count in counts] == [0, 0]
    model.train()(*inputs.args)
    assert [int(count.sum()) for count in counts] == [2 * tokens, 2 * tokens]
    mutated = export(model, inputs).graph_signature.buffers_to_mutate.values()
    assert sorted(mutated) == ["layers.0.experts.router_counts", "layers.1.experts.router_counts"]


def test_llama_ties_its_head_by_option() -> None:
    tied, untied = zoo.get("llama").build(), zoo.get("llama").build(tie=False)
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    assert not any("inv_freq" in name for name in tied.state_dict())


@pytest.mark.parametrize("name", ["llama", "mamba", "lstm"])
def test_no_output_sees_a_later_input(name: str) -> None:
    entry = zoo.get(name)
    model, (x,) = entry.build().eval(), entry.example_inputs().args
    changed = x.clone()
    changed[:, -1] = entry.example_inputs(seed=1).args[0][:, -1]
    (before,), (after,) = call(model, zoo.Inputs((x,), {})), call(model, zoo.Inputs((changed,), {}))
    torch.testing.assert_close(after[:, :-1], before[:, :-1])
    assert not torch.equal(after[:, -1], before[:, -1])


def test_bert_ignores_masked_positions() -> None:
    entry = zoo.get("bert")
    model, inputs = entry.build().eval(), entry.example_inputs()
    mask = inputs.kwargs["attention_mask"]
    hidden = (inputs.args[0] + 1) % 64
    changed = torch.where(mask.bool(), inputs.args[0], hidden)
    assert not torch.equal(changed, inputs.args[0])
    _, expected = call(model, inputs)
    _, pooled = call(model, zoo.Inputs((changed,), inputs.kwargs))
    torch.testing.assert_close(pooled, expected)


@EACH
def test_unknown_size_lists_the_sizes(entry: zoo.ZooModel) -> None:
    with pytest.raises(ValueError, match=r"'huge'.*tiny, small, base"):
        entry.build("huge")
    with pytest.raises(ValueError, match=r"'huge'.*tiny, small, base"):
        entry.example_inputs("huge")


@EACH
def test_unknown_override_is_named(entry: zoo.ZooModel) -> None:
    with pytest.raises(TypeError, match="'colour'"):
        entry.build(colour="red")


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'gpt'.*mlp, llama, bert"):
        zoo.get("gpt")


def test_a_configuration_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        zoo.get("llama").build(kv_heads=3)
