"""Real models, outlined and back: forward bit for bit, gradients, optimizer steps, buffers, randomness."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail import EffectOrder, EmptyRegion, RegionError, Request, zoo
from tests.outlining.helpers import same_meta


def runs(gm: GraphModule, length: int = 4, gap: int = 2) -> list[Request]:
    """Requests for stretches of the listing, about two thirds of all operations."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    groups = [calls[i : i + length] for i in range(0, len(calls) - length, length + gap)]
    return [
        Request(nodes, "stretch")
        for nodes in groups
        if any(n.target is not sys.modules["operator"].getitem for n in nodes)
    ]


def scattered(gm: GraphModule, seed: int, count: int = 12) -> GraphModule:
    """Regions of operations picked anywhere, as many as are legal, nested into each other as it comes."""
    rng = random.Random(seed)
    total = 0
    for _ in range(count):
        calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_module")]
        start = rng.randrange(len(calls))
        picked = rng.sample(calls[start : start + 10], k=min(4, len(calls) - start))
        try:
            gm = dovetail.outline(
                gm, picked, kind="piece", escapes=rng.choice(["auto", "output", "duplicate"])
            )
            total += 1
        except (RegionError, EmptyRegion, EffectOrder):
            continue
    assert total
    return gm


def leaves(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return model(*args, **kwargs)


def loss_of(out: Any) -> torch.Tensor:
    return sum((v.float().square().mean() for v in leaves(out) if v.is_floating_point()), torch.zeros(()))


def assert_same(model: nn.Module, gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The outlined graph against a copy of the model, which has not seen any of the runs."""
    reference = copy.deepcopy(model)
    expected, state = call(reference, args, kwargs), None
    state = torch.get_rng_state()
    got = call(gm, args, kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    assert all(torch.equal(a, b) for a, b in zip(leaves(got), leaves(expected), strict=True))
    reference_state, have = reference.state_dict(), gm.state_dict()
    assert list(reference_state) == list(have)
    assert all(torch.equal(reference_state[k], have[k]) for k in reference_state)


def assert_trains(model: nn.Module, gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (reference, gm)]
    for _ in range(3):
        for m, optimizer in zip((reference, gm), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(call(m, args, kwargs)).backward()
            optimizer.step()
        for (name, a), (_, b) in zip(reference.named_parameters(), gm.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)
    for (name, a), (_, b) in zip(reference.named_buffers(), gm.named_buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6, msg=name)


def there_and_back(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gm = dovetail.capture(copy.deepcopy(model), args, kwargs)
    dovetail.check(gm)
    for new in (dovetail.outline(gm, runs(gm)), scattered(gm, 0), scattered(gm, 1)):
        dovetail.check(new)
        back = dovetail.inline(new)
        assert dovetail.text(back) == dovetail.text(gm)
        assert same_meta(gm, back)
    assert_same(model, dovetail.outline(gm, runs(gm)), args, kwargs)
    fresh = dovetail.capture(copy.deepcopy(model), args, kwargs)
    assert_same(model, scattered(fresh, 0), args, kwargs)
    if model.training:
        fresh = dovetail.capture(copy.deepcopy(model), args, kwargs)
        assert_trains(model, dovetail.outline(fresh, runs(fresh)), args, kwargs)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", list(zoo.names()))
def test_zoo(name, training):
    entry = zoo.get(name)
    inputs = entry.example_inputs("tiny")
    there_and_back(entry.build("tiny").train(training), inputs.args, inputs.kwargs)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def hugging_face(family: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the family with a small random configuration, and inputs for it."""
    import transformers as t

    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    if family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False))
    elif family == "qwen":
        model = t.Qwen2ForCausalLM(t.Qwen2Config(**SMALL, num_key_value_heads=2, use_cache=False))
    elif family == "bert":
        model = t.BertModel(t.BertConfig(**SMALL))
    elif family == "gpt2":
        model = t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
        )
    elif family == "t5":
        config = t.T5Config(
            d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, use_cache=False
        )
        return t.T5ForConditionalGeneration(config), (), {"input_ids": ids, "decoder_input_ids": ids}
    elif family == "vit":
        small = {
            k: SMALL[k]
            for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        }
        model = t.ViTModel(t.ViTConfig(**small, image_size=16, patch_size=4))
        return model, (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),), {}
    else:
        raise ValueError(family)
    return model, (), {"input_ids": ids}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", ["llama", "qwen", "bert", "gpt2", "t5", "vit"])
def test_hugging_face(family, training):
    torch.manual_seed(0)
    model, args, kwargs = hugging_face(family)
    there_and_back(model.train(training), args, kwargs)
