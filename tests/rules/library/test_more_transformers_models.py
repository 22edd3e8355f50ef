"""Attention, norms and feed-forward layers of models that spell them in ways of their own, found by the default rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dovetail
from tests.rules.library.helpers import assert_references

transformers = pytest.importorskip("transformers")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
WORDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
SIZES = {k: v for k, v in WORDS.items() if k != "vocab_size"}
IDS = torch.randint(3, 50, (2, 10), generator=torch.Generator().manual_seed(0))
WITH_MASK = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
WITHOUT_CACHE = {"input_ids": IDS, "use_cache": False}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
AUDIO = {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def built(name: str, kwargs: dict[str, Any], **config: Any) -> Built:
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}Model")(settings).eval(), (), kwargs


def gpt_oss() -> Built:
    config = transformers.GptOssConfig(
        **WORDS,
        **TOKENS,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    model = transformers.GptOssModel._from_config(config, attn_implementation="eager")
    return model.eval().requires_grad_(False), (), WITHOUT_CACHE


def funnel() -> Built:
    """One attention: the model itself keeps the length of what it last ran on, which is no tensor."""
    from transformers.models.funnel import modeling_funnel as funnel

    torch.manual_seed(0)
    config = transformers.FunnelConfig(vocab_size=50, block_sizes=[1], d_model=32, n_head=4, d_head=8)
    x = torch.randn(2, 10, 32)
    types = torch.randint(0, 2, (2, 10))
    inputs = funnel.FunnelAttentionStructure(config).init_attention_inputs(x, torch.ones(2, 10), types)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = funnel.FunnelRelMultiheadAttention(config, 0)

        def forward(self, x: Tensor, inputs: Any) -> Tensor:
            return self.inner(x, x, x, inputs)[0]

    model = Attention().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model, (x, inputs), {}


IMAGE = {"pixel_values": torch.randn(2, 3, 16, 16)}
LAYOUT = {"max_2d_position_embeddings": 64, "coordinate_size": 6, "shape_size": 4, "visual_embed": False}
MODELS: dict[str, tuple[Callable[[], Built], dict[str, int]]] = {
    "codegen": (
        lambda: built(
            "CodeGen",
            WITHOUT_CACHE,
            vocab_size=50,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            **TOKENS,
        ),
        {"attention": 2},
    ),
    "xlnet": (
        lambda: built("XLNet", WITH_MASK, vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=48),
        {"attention": 2},
    ),
    "funnel": (funnel, {"attention": 1}),
    "wav2vec2": (
        lambda: built("Wav2Vec2", {"input_values": torch.randn(2, 100)}, **WORDS, **AUDIO),
        {"attention": 2, "group_norm": 1},
    ),
    "hubert": (
        lambda: built("Hubert", {"input_values": torch.randn(2, 100)}, **WORDS, **AUDIO),
        {"attention": 2, "group_norm": 1},
    ),
    "bit": (
        lambda: built("Bit", IMAGE, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4),
        {"group_norm": 7},
    ),
    "segformer": (
        lambda: built(
            "Segformer",
            IMAGE,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
        ),
        {"attention": 2, "mix_ffn": 2},
    ),
    "deberta without positions": (
        lambda: built("Deberta", WITH_MASK, **WORDS),
        {"attention": 2, "layer_norm": 4},
    ),
    "gpt-oss": (gpt_oss, {"attention": 2}),
    "deberta": (lambda: built("Deberta", WITH_MASK, **WORDS, **RELATIVE), {"attention": 2}),
    "deberta-v2": (lambda: built("DebertaV2", WITH_MASK, **WORDS, **RELATIVE), {"attention": 2}),
    "groupvit": (
        # The other softmaxes assign each token to one group: what they multiply is no weight.
        lambda: built(
            "GroupViTVision",
            IMAGE,
            **SIZES,
            depths=[1, 1],
            num_group_tokens=[4, 2],
            num_output_groups=[4, 2],
            image_size=16,
            patch_size=4,
        ),
        {"attention": 4, "softmax": 2},
    ),
    "layoutlmv3": (
        lambda: built(
            "LayoutLMv3",
            {"input_ids": IDS, "bbox": torch.randint(0, 30, (2, 10, 1)).repeat(1, 1, 4)},
            **WORDS,
            **LAYOUT,
        ),
        {"attention": 2},
    ),
}
QUICK = frozenset({"xlnet", "funnel", "bit", "segformer"})
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in MODELS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_parts_are_matched(name: str) -> None:
    build, expected = MODELS[name]
    model, args, kwargs = build()
    graph = dovetail.capture(model, args, kwargs)
    fused = dovetail.fuse(graph)
    kinds = Counter(region.kind for region in dovetail.regions(fused))
    assert {kind: kinds[kind] for kind in expected} == expected
    assert_references(fused)
    same, fine = _run(model, graph, args, kwargs), _run(model, fused, args, kwargs)
    assert all(torch.equal(a, b) for a, b in zip(same, fine, strict=True))
    for a, b in zip(_run(model, model, args, kwargs), fine, strict=True):
        torch.testing.assert_close(a, b)


def _run(model: nn.Module, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The results of a call, and the gradients of the parameters where there are any."""
    torch.manual_seed(1)
    results = [x for x in tree_leaves({"out": function(*args, **kwargs)}) if isinstance(x, Tensor)]
    weights = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        return results
    loss = torch.stack([x.sin().sum() for x in results if x.requires_grad]).sum()
    return [*results, *(g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None)]
