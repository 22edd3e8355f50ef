"""Every attention, norm and MLP of small random Hugging Face models is proposed as what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail
from dovetail.rules.library import ATTENTION
from tests.rules.library.census import Census, census, outlined, parts_by_kind, same_results
from tests.rules.library.helpers import candidates

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
WITHOUT_WORDS = {k: v for k, v in SMALL.items() if k != "vocab_size"}
Build = Callable[[str], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def _built(model: str, config: Any, attention: str) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, model)._from_config(config, attn_implementation=attention)


def decoder(name: str, **settings: Any) -> Build:
    def build(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        config = getattr(transformers, f"{name}Config")(**GROUPED, **settings)
        return _built(f"{name}ForCausalLM", config, attention), (IDS,), {"use_cache": False}

    return build


def bert(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = _built("BertModel", transformers.BertConfig(**SMALL), attention)
    return model, (IDS,), {"attention_mask": torch.ones_like(IDS)}


def gpt2(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **tokens)
    return _built("GPT2LMHeadModel", config, attention), (IDS,), {"use_cache": False}


def t5(attention: str, feed_forward: str = "relu") -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, feed_forward_proj=feed_forward
    )
    kwargs = {"decoder_input_ids": IDS, "use_cache": False}
    return _built("T5ForConditionalGeneration", config, attention), (IDS,), kwargs


def gated_t5(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return t5(attention, "gated-gelu")


def vit(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = transformers.ViTConfig(**WITHOUT_WORDS, image_size=16, patch_size=8)
    return _built("ViTModel", config, attention), (torch.randn(2, 3, 16, 16),), {}


def whisper(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _WHISPER.items()}
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **sizes,
    )
    kwargs = {"decoder_input_ids": IDS, "use_cache": False}
    return _built("WhisperForConditionalGeneration", config, attention), (torch.randn(2, 8, 16),), kwargs


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}

MODELS: dict[str, tuple[Build, dict[str, int]]] = {
    "llama": (decoder("Llama"), {"rms_norm": 5, "attention": 2, "swiglu": 2}),
    "qwen2": (decoder("Qwen2"), {"rms_norm": 5, "attention": 2, "swiglu": 2}),
    "qwen3": (decoder("Qwen3", head_dim=8), {"rms_norm": 9, "attention": 2, "swiglu": 2}),
    "mixtral": (
        decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        {"rms_norm": 5, "attention": 2, "swiglu": 2},
    ),
    "bert": (bert, {"layer_norm": 5, "attention": 2, "linear_activation": 2}),
    "gpt2": (gpt2, {"layer_norm": 5, "attention": 2, "linear_activation": 2}),
    "t5": (t5, {"rms_norm": 12, "attention": 6, "linear_activation": 4}),
    "gated t5": (gated_t5, {"rms_norm": 12, "attention": 6, "geglu": 4}),
    "vit": (vit, {"layer_norm": 5, "attention": 2, "linear_activation": 2}),
    "whisper": (whisper, {"layer_norm": 12, "attention": 6, "linear_activation": 4}),
}


@cache
def looked_at(
    name: str, attention: str, *, mode: str = "eval", dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Census, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs = MODELS[name][0](attention)
    # A custom operator of transformers has no formula that tracing could keep.
    model = model.to(dtype).train(mode == "train").requires_grad_(name != "mixtral")
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    graph = dovetail.capture(model, args, {**kwargs, **more})
    return census(model, graph), args, {**kwargs, **more}


def assert_all_matched(name: str, report: Census) -> None:
    assert dict(parts_by_kind(report)) == MODELS[name][1]
    assert not report.unfound()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_every_part_is_matched(name: str, attention: str) -> None:
    report, args, kwargs = looked_at(name, attention)
    assert_all_matched(name, report)
    with torch.no_grad():
        before = pytree.tree_leaves(report.context.gm(*args, **kwargs))
        after = pytree.tree_leaves(outlined(report)(*args, **kwargs))
    tensors = [[v for v in values if isinstance(v, Tensor)] for values in (before, after)]
    assert same_results(*tensors)


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "vit"])
def test_every_part_is_matched_in_training(name: str, attention: str) -> None:
    report, _, _ = looked_at(name, attention, mode="train")
    assert_all_matched(name, report)
    if name in ("bert", "gpt2"):
        dropouts = {c.attrs["dropout"] for c in report.candidates if c.kind == "attention" and c.attrs}
        assert dropouts == {0.1}
    if name == "bert":
        assert report.count("dropout_add_layer_norm") == 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3", "bert"))]
)
def test_every_part_is_matched_in_bfloat16(name: str, attention: str) -> None:
    report, _, _ = looked_at(name, attention, dtype=torch.bfloat16)
    assert_all_matched(name, report)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral"])
def test_queries_and_keys_are_turned(name: str) -> None:
    report, _, _ = looked_at(name, "eager")
    assert sum(c.rule == "rotary" for c in report.candidates) == 4
    assert sum(c.rule == "rotary_pair" for c in report.candidates) == 2
    grouped = [c.attrs["groups"] for c in report.candidates if c.kind == "attention" and c.attrs]
    assert grouped.count(2) == 2


@pytest.mark.parametrize(("name", "tables"), [("bert", 3), ("gpt2", 2), ("llama", 1)])
def test_embeddings_and_their_norm(name: str, tables: int) -> None:
    report, _, _ = looked_at(name, "sdpa")
    norms = [c.attrs["tables"] for c in report.candidates if c.kind == "embedding_norm" and c.attrs]
    assert tables in norms


def test_the_loss_of_a_language_model() -> None:
    report, _, _ = looked_at("llama", "sdpa", labels=IDS)
    assert report.count("cross_entropy") == 1


def test_with_a_length_that_is_not_known() -> None:
    model, _, _ = MODELS["llama"][0]("sdpa")
    # Which lengths it holds for is for torch.export to say, and differs between its versions.
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None}
    graph = dovetail.capture(
        model.eval().requires_grad_(False), (IDS,), {"use_cache": False}, dynamic_shapes=shapes
    )
    (ids,) = [n for n in graph.graph.nodes if n.op == "placeholder" and n.name == "input_ids"]
    assert isinstance(ids.meta["val"].shape[1], torch.SymInt)
    assert_all_matched("llama", census(model, graph))


def test_decoding_with_a_cache() -> None:
    model, _, _ = MODELS["llama"][0]("sdpa")
    model = model.eval().requires_grad_(False)
    cache = model(IDS, use_cache=True).past_key_values
    grows = [{2: torch.export.Dim.AUTO}] * 2
    graph = dovetail.capture(
        model,
        (IDS[:, :1],),
        {"past_key_values": cache, "use_cache": True},
        dynamic_shapes={"input_ids": None, "past_key_values": [grows, grows], "use_cache": None},
    )
    assert_all_matched("llama", census(model, graph))


BATCHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", "BloomModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "deberta": (
        "DebertaV2Config",
        "DebertaV2Model",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    ),
}


# DeBERTa's module is scripted when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", BATCHED)
def test_attention_with_heads_among_the_batch(name: str) -> None:
    config, model, settings = BATCHED[name]
    built = _built(model, getattr(transformers, config)(**settings), "eager").eval().requires_grad_(False)
    graph = dovetail.capture(built, (IDS,), {"attention_mask": torch.ones_like(IDS)})
    matches = candidates(ATTENTION, graph)
    assert [c.rule for c in matches] == ["attention_of_batches"] * 2
    assert all(c.attrs is not None and c.attrs["mask_type"] != "none" for c in matches)
    assert all(c.arguments is not None and {"mask_4d", "bias"} <= set(c.arguments) for c in matches)
