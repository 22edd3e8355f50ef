"""`generate` of a compiled model: eager's tokens by compiled code, captured for prompt and step."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=64, eos_token_id=None, bos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "t5":
        config = transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            vocab_size=50,
            decoder_start_token_id=0,
            eos_token_id=None,
        )
        return transformers.T5ForConditionalGeneration(config).eval()
    if name == "whisper":
        config = transformers.WhisperConfig(
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=50,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            decoder_start_token_id=1,
        )
        model = transformers.WhisperForConditionalGeneration(config).eval()
        model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
        return model
    class_name, kind, more = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
        "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8, "sliding_window": 48}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    }[name]
    return getattr(transformers, class_name)(getattr(transformers, kind)(**DECODER, **more)).eval()


def prompt(name: str, n: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(n)
    if name == "whisper":
        return {"input_features": torch.randn(1, 8, 40)}
    return {"input_ids": torch.randint(2, 50, (1, n))}


def check(name: str, new: int, most: int) -> None:
    model = build(name)
    fast = dovetail.compile(model, backends="eager")
    options = {"max_new_tokens": new, "do_sample": False}
    expected = model.generate(**prompt(name), **options)
    assert torch.equal(fast.generate(**prompt(name), **options), expected)
    assert 2 <= len(fast.graphs) <= most
    assert {d.kind for d in fast.diagnostics} <= {"recompiled"}


def test_llama() -> None:
    check("llama", 30, 2)


def test_padding_is_masked_as_by_the_model() -> None:
    # `generate` derives the mask from the padding if `forward` has a parameter for it.
    model = build("llama")
    fast = dovetail.compile(model, backends="eager")
    ids = prompt("llama", 6)["input_ids"].repeat(2, 1)
    ids[0, :3] = 0
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_hidden_states_are_captured() -> None:
    # Hooks that record them are installed by the first call that returns them.
    model, ids = build("llama"), prompt("llama")["input_ids"]
    expected = build("llama")(ids, output_hidden_states=True, use_cache=False).hidden_states
    options = {"output_hidden_states": True, "use_cache": False}
    graph = dovetail.capture(model, (ids,), options)
    for states in (graph(ids, **options).hidden_states, model(ids, **options).hidden_states):
        assert len(states) == len(expected) == 3
        assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "gpt2", "t5", "whisper"])
def test_greedy_decoding(name: str) -> None:
    check(name, 30, 3)


@pytest.mark.long
def test_another_prompt_makes_its_length_dynamic() -> None:
    model = build("llama")
    fast = dovetail.compile(model, backends="eager")
    for n in (4, 6, 9):
        ids = prompt("llama", n)
        expected = model.generate(**ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(fast.generate(**ids, max_new_tokens=3, do_sample=False), expected)
    assert len(fast.graphs) <= 3


def test_a_static_cache_is_two_captures() -> None:
    model = build("llama")
    fast = dovetail.compile(model, backends="eager")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**prompt("llama"), **options)
    assert torch.equal(fast.generate(**prompt("llama"), **options), expected)
    assert len(fast.graphs) <= 3
