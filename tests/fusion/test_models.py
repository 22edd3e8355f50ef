"""Real models fused with the default rules: the same bits, gradients, and the regions that a table says."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail import zoo
from tests.outlining.test_models import assert_same, assert_trains

TABLE = Path(__file__).parents[1] / "golden" / "regions.json"
Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def table_of(gm: GraphModule) -> dict[str, list[int]]:
    """For each kind how many regions there are, and how many distinct bodies."""
    outlined = dovetail.regions(gm)
    counts = Counter(r.kind for r in outlined)
    return {
        kind: [n, len({id(r.body) for r in outlined if r.kind == kind})] for kind, n in sorted(counts.items())
    }


def expect(name: str, gm: GraphModule) -> None:
    """Compare with the table; with DOVETAIL_GOLDEN=write in the environment, write it.

    Another version of torch exports other operations, so the table holds for one version only.
    """
    if not torch.__version__.startswith("2.13"):
        return
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table = table_of(gm)
    if os.environ.get("DOVETAIL_GOLDEN") == "write":
        known[name] = table
        rows = (f"  {json.dumps(k)}: {json.dumps(known[k])}" for k in sorted(known))
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    assert known.get(name) == table


def fuse_twice(gm: GraphModule) -> GraphModule:
    before = dovetail.text(gm)
    fused = dovetail.fuse(gm, on_error="raise")
    assert dovetail.text(gm) == before
    dovetail.check(fused)
    assert dovetail.text(dovetail.fuse(fused, on_error="raise")) == dovetail.text(fused)
    assert dovetail.text(dovetail.inline(fused)) == before
    assert dovetail.explain(fused).errors == ()
    return fused


@pytest.mark.parametrize("name", zoo.names())
def test_a_zoo_model(name: str) -> None:
    entry = zoo.get(name)
    model, example = entry.build("tiny").eval(), entry.example_inputs("tiny")
    fused = fuse_twice(dovetail.capture(model, example.args, example.kwargs))
    assert_same(model, fused, example.args, example.kwargs)
    expect(f"zoo {name}", fused)


@pytest.mark.parametrize("name", zoo.names())
def test_a_zoo_model_trains(name: str) -> None:
    entry = zoo.get(name)
    model, example = entry.build("tiny").train(), entry.example_inputs("tiny")
    fused = fuse_twice(dovetail.capture(copy.deepcopy(model), example.args, example.kwargs))
    assert_trains(model, fused, example.args, example.kwargs)


def _tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(0, 60, (2, length), generator=torch.Generator().manual_seed(length))


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def _decoder(name: str, **options: Any) -> Model:
    import transformers

    config = getattr(transformers, f"{name}Config")(**_SMALL, num_key_value_heads=2, vocab_size=64, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, (_tokens(),), {"use_cache": False}


def _bert(**options: Any) -> Model:
    import transformers

    config = transformers.BertConfig(**_SMALL, vocab_size=64, **options)
    return (
        transformers.BertModel(config),
        (_tokens(),),
        {"attention_mask": torch.ones(2, 8, dtype=torch.long)},
    )


def _gpt2(**options: Any) -> Model:
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, **options)
    return transformers.GPT2LMHeadModel(config), (_tokens(),), {"use_cache": False}


def _t5(**options: Any) -> Model:
    import transformers

    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
        **options,
    )
    ids = {"decoder_input_ids": _tokens(6), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), (_tokens(),), ids


def _vit(**options: Any) -> Model:
    import transformers

    config = transformers.ViTConfig(**_SMALL, image_size=16, patch_size=8, num_labels=5, **options)
    return transformers.ViTForImageClassification(config), (torch.randn(2, 3, 16, 16),), {}


def _whisper(**options: Any) -> Model:
    import transformers

    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **options,
    )
    ids = {"decoder_input_ids": _tokens(6), "use_cache": False}
    return transformers.WhisperForConditionalGeneration(config), (torch.randn(2, 8, 32),), ids


MODELS: dict[str, Callable[..., Model]] = {
    "llama": lambda **o: _decoder("Llama", **o),
    "qwen2": lambda **o: _decoder("Qwen2", **o),
    "qwen3": lambda **o: _decoder("Qwen3", head_dim=8, **o),
    "mixtral": lambda **o: _decoder("Mixtral", num_local_experts=2, num_experts_per_tok=1, **o),
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_model(name: str, attention: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name](attn_implementation=attention)
    model = model.eval().requires_grad_(False)
    fused = fuse_twice(dovetail.capture(model, args, kwargs))
    assert_same(model, fused, args, kwargs)
    expect(f"{name} {attention}", fused)
