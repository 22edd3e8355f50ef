"""The layers of real models are found without their names, whichever tracer made the graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail import zoo
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from dovetail.rules.rule import RuleContext
from tests.rules.repeat_helpers import applied, bodies, proposed, relisted, requests, same_run, to_the_end

transformers = pytest.importorskip("transformers")

LAYERS = 16


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.arange(16).reshape(2, 8)


def layer_of(node: Any, prefix: str) -> str | None:
    """The layer that the tracer says an operation came from."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        before, separator, rest = path.partition(prefix)
        if separator:
            return f"{before}{separator}{rest.partition('.')[0]}"
    return None


def covers_layers(context: RuleContext, candidates: list[Any], prefix: str) -> None:
    """Each candidate is one layer: all of its operations, and nothing else."""
    by_layer: dict[str, set[int]] = {}
    for i, node in enumerate(context.nodes):
        layer = layer_of(node, prefix)
        if layer is not None and node.op.startswith("call"):
            by_layer.setdefault(layer, set()).add(i)
    assert len(by_layer) == LAYERS
    assert {frozenset(c.members) for c in candidates} == {frozenset(m) for m in by_layer.values()}


def one_body_for_all(context: RuleContext, candidates: list[Any]) -> GraphModule:
    assert len(candidates) == LAYERS
    out = dovetail.outline(context.gm, requests(context, candidates))
    dovetail.check(out)
    assert len(dovetail.regions(out)) == LAYERS
    assert bodies(out) == 1
    return out


def test_captured(llama: nn.Module, tokens: torch.Tensor) -> None:
    gm = dovetail.capture(llama, (tokens,), {"use_cache": False})
    context, candidates, _ = proposed(repeats(), gm)
    out = one_body_for_all(context, candidates)
    covers_layers(context, candidates, "model.layers.")
    assert torch.equal(
        out(tokens, use_cache=False).logits,
        llama(tokens, use_cache=False).logits,
    )
    assert applied(repeats(), out) is out
    # Neither names nor the listing matter.
    other, again, _ = proposed(repeats(), relisted(gm, 3))
    assert {frozenset(other.nodes[i].meta["original"] for i in c.members) for c in again} == {
        frozenset(context.nodes[i].name for i in c.members) for c in candidates
    }


def test_exported(llama: nn.Module, tokens: torch.Tensor) -> None:
    exported = torch.export.export(llama, (tokens,), {"use_cache": False})
    gm = exported.graph_module
    context, candidates, _ = proposed(repeats(), gm)
    out = one_body_for_all(context, candidates)
    # Assertions stay with what they are about: each layer has one result.
    assert all(len(region.outputs) == 1 for region in dovetail.regions(out))
    state = {**dict(llama.named_parameters()), **dict(llama.named_buffers()), **exported.constants}
    inputs = [state[s.target] for s in exported.graph_signature.input_specs if s.target is not None]
    assert same_run(gm, out, *inputs, tokens, False)


def test_as_dynamo_hands_it_to_a_backend(llama: nn.Module, tokens: torch.Tensor) -> None:
    seen: list[Any] = []

    def backend(gm: GraphModule, examples: Any) -> Any:
        context, candidates, _ = proposed(repeats(), gm)
        covers_layers(context, candidates, "model.layers.")
        seen.append(one_body_for_all(context, candidates))
        return seen[-1]

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(llama, backend=backend)(tokens, use_cache=False)
        assert torch.equal(got.logits, llama(tokens, use_cache=False).logits)
    assert len(seen) == 1


def test_traced_by_make_fx(llama: nn.Module, tokens: torch.Tensor) -> None:
    state = {**dict(llama.named_parameters()), **dict(llama.named_buffers())}

    def run(state: Any, ids: torch.Tensor) -> Any:
        return torch.func.functional_call(llama, state, (ids,), {"use_cache": False}).logits

    gm = make_fx(run, tracing_mode="fake")(state, tokens)
    assert not any("nn_module_stack" in node.meta for node in gm.graph.nodes)
    context, candidates, _ = proposed(repeats(), gm)
    out = one_body_for_all(context, candidates)
    assert torch.equal(out(state, tokens), llama(tokens, use_cache=False).logits)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["mlp", "llama", "bert", "vit", "mamba", "moe"])
def test_layers_of_the_zoo(name: str, training: bool) -> None:
    entry = zoo.get(name)
    inputs = entry.example_inputs("tiny")
    gm = dovetail.capture(entry.build("tiny", layers=3).train(training), inputs.args, inputs.kwargs)
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 3
    assert bodies(out) == 1
    assert applied(repeats(), out) is out
    assert same_run(gm, out, *inputs.args, **inputs.kwargs)


def test_stages_of_a_resnet() -> None:
    entry = zoo.get("resnet")
    inputs = entry.example_inputs("tiny")
    gm = dovetail.capture(entry.build("tiny", stages=(3, 4)).eval(), inputs.args, inputs.kwargs)
    context, candidates, refused = proposed(repeats(), gm)
    out = dovetail.outline(gm, requests(context, candidates))
    assert len(dovetail.regions(out)) == 3 + 3
    assert bodies(out) == 2
    assert same_run(gm, out, *inputs.args)
    # The first block of the second stage halves the image.
    assert any("stride=[2, 2]" in refusal.reason for refusal in refused)


def test_steps_of_a_recurrent_model() -> None:
    entry = zoo.get("lstm")
    inputs = entry.example_inputs("tiny")
    gm = dovetail.capture(entry.build("tiny").eval(), inputs.args, inputs.kwargs)
    out = applied(repeats(), gm)
    # Two layers of six steps: the first one has one state for both of its own, the last leaves none behind.
    assert len(dovetail.regions(out)) == 2 * 6
    assert bodies(out) == 3
    assert same_run(gm, out, *inputs.args)


def test_norms_inside_of_layers() -> None:
    entry = zoo.get("llama")
    inputs = entry.example_inputs("tiny")
    gm = dovetail.capture(entry.build("tiny", layers=3).eval(), inputs.args, inputs.kwargs)
    out = to_the_end(repeats(nested=True), gm)
    nested = dovetail.regions(out, nested=True)
    inner = [region for region in nested if len(region.nodes) == 6]
    assert len(inner) == 2 * 3 + 1  # two norms in each layer, and the last one
    assert len({id(region.body) for region in inner}) == 1
    assert len(dovetail.regions(out)) == 3 + 1
    assert same_run(gm, out, *inputs.args)


def test_training_graphs_forward_and_backward() -> None:
    entry = zoo.get("llama")
    inputs = entry.example_inputs("tiny")
    model = entry.build("tiny", layers=4).train()
    reference = copy.deepcopy(model)
    seen: list[int] = []

    def compiler(gm: GraphModule, examples: Any) -> Any:
        out = applied(repeats(), gm)
        seen.append(len(dovetail.regions(out)))
        assert bodies(out) == 1
        return make_boxed_func(out)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    compiled(*inputs.args).sum().backward()
    expected = reference(*inputs.args)
    expected.sum().backward()
    assert seen == [4, 4]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
