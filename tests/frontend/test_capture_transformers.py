"""Small random Hugging Face models: outputs, training, and caches that grow from call to call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.frontend.capture import capture
from tests.frontend.test_capture_agreement import assert_alike, assert_same_leaves

transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    return transformers.BertModel(config)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_bert(mode: str) -> None:
    ids = tokens(8)
    mask = torch.ones_like(ids)
    assert_alike(bert().train(mode == "train"), lambda step: (ids,), {"attention_mask": mask}, tolerance=1e-4)


def test_llama_without_a_cache() -> None:
    model, ids = llama(), tokens(8)
    graph = capture(model, (ids,), {"use_cache": False})
    mine = graph(ids, use_cache=False)
    assert type(mine) is transformers.modeling_outputs.CausalLMOutputWithPast
    assert torch.equal(mine.logits, model(ids, use_cache=False).logits)


def test_llama_trains() -> None:
    ids = tokens(8)
    model = llama().train().requires_grad_(True)
    assert_alike(model, lambda step: (ids,), {"use_cache": False, "labels": ids}, steps=2, tolerance=1e-4)


def same_cache(mine: Any, theirs: Any) -> None:
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert_same_leaves([a.keys, a.values], [b.keys, b.values])


@pytest.mark.parametrize("given", [False, True], ids=["made by the model", "handed in empty"])
def test_llama_prefill(given: bool) -> None:
    model, ids = llama(), tokens(8)

    def kwargs() -> dict[str, Any]:
        cache = {"past_key_values": transformers.DynamicCache(config=model.config)} if given else {}
        return {"use_cache": True, **cache}

    example, mine, theirs = kwargs(), kwargs(), kwargs()
    graph = capture(model, (ids,), example)
    if given:
        assert example["past_key_values"].get_seq_length() == 0
    result, expected = graph(ids, **mine), model(ids, **theirs)
    assert torch.equal(result.logits, expected.logits)
    same_cache(result.past_key_values, expected.past_key_values)
    if given:
        assert result.past_key_values is mine["past_key_values"]


def test_llama_decodes_step_by_step_with_one_graph() -> None:
    model = llama()
    start = model(tokens(8), use_cache=True).past_key_values
    grows = [{2: torch.export.Dim.AUTO}] * 2
    graph = capture(
        model,
        (tokens(1),),
        {"past_key_values": copy.deepcopy(start), "use_cache": True},
        dynamic_shapes={"input_ids": None, "past_key_values": [grows, grows], "use_cache": None},
    )
    mine, theirs = copy.deepcopy(start), copy.deepcopy(start)
    for _ in range(3):
        a = graph(tokens(1), past_key_values=mine, use_cache=True)
        b = model(tokens(1), past_key_values=theirs, use_cache=True)
        assert torch.equal(a.logits, b.logits)
        assert a.past_key_values is mine
        same_cache(mine, theirs)
    concatenations = [n for n in graph.graph.nodes if n.target is torch.ops.aten.cat.default]
    assert all(len(n.args[0]) > 1 for n in concatenations)
