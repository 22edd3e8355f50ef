"""What a model type needs beyond the general rules: fields of its configuration."""

from __future__ import annotations

from typing import Any

import torch

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _resnet() -> dict[str, Any]:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    return {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
    }


def _trajectory() -> dict[str, torch.Tensor]:
    sizes = {"states": 17, "actions": 4, "rewards": 1, "returns_to_go": 1}
    given = {name: torch.randn(2, 8, n) for name, n in sizes.items()}
    return {
        **given,
        "timesteps": torch.arange(8).expand(2, 8).contiguous(),
        "attention_mask": torch.ones(2, 8),
    }


def overrides(model_type: str) -> dict[str, Any]:
    """ "base": arguments of the configuration that is shrunk; "config": fields of the small one; "inputs": its call."""
    words = torch.randint(3, 100, (2, 8))
    match model_type:
        case "conditional_detr" | "dab-detr" | "deformable_detr" | "detr" | "table-transformer":
            return {"base": _resnet()}
        case "cohere_compass_text":
            return {"config": {"rope_parameters": {"full_attention": ROPE}}}
        case "bamba":
            return {"config": {"attn_layer_indices": [1]}}
        case "recurrent_gemma":
            return {"config": {"block_types": ["recurrent", "attention"]}}
        case "chameleon" | "emu3":
            return {"config": {"vocabulary_map": {"<image>": 5}}}
        case "dbrx":
            return {"config": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}}}
        case "deepseek_ocr2_text" | "unlimited_ocr_text":
            return {"config": {"mlp_layer_types": ["dense", "sparse"]}}
        case "eomt" | "eomt_dinov3" | "videomt":
            return {"config": {"num_blocks": 1}}
        case "ernie4_5_vl_moe_text":
            return {"config": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}}
        case "esm":
            return {"config": {"pad_token_id": 1, "mask_token_id": 4}}
        case "mamba2":
            return {"config": {"num_heads": 8, "head_dim": 16, "n_groups": 1}}
        case "falcon_h1":
            return {"config": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}}
        case "zamba2":
            return {"config": {"attention_head_dim": 32, "attention_hidden_size": 128}}
        case "xlstm":
            return {"config": {"qk_dim_factor": 1.0, "num_blocks": 2}}
        case "hunyuan_v1_moe" | "hunyuan_v1_dense":
            return {"config": {"head_dim": 16}}
        case "lxmert":
            features = {"visual_feats": torch.randn(2, 4, 2048), "visual_pos": torch.rand(2, 4, 4)}
            return {"inputs": {"input_ids": words, **features}}
        case "idefics":
            pixels = {
                "pixel_values": torch.randn(2, 1, 3, 64, 64),
                "image_attention_mask": torch.ones(2, 8, 1),
            }
            return {"inputs": {"input_ids": words, **pixels}}
        case "pix2struct":
            return {"inputs": {"flattened_patches": torch.rand(2, 16, 770), "decoder_input_ids": words}}
        case "siglip2" | "siglip2_vision_model":
            text = {"input_ids": words} if model_type == "siglip2" else {}
            mask = {"pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64)}
            patches = {"pixel_values": torch.randn(2, 16, 192), "spatial_shapes": torch.tensor([[4, 4]] * 2)}
            return {"inputs": {**text, **patches, **mask}}
        case "speecht5":
            return {
                "inputs": {
                    "input_values": torch.randn(2, 8, 64),
                    "decoder_input_values": torch.randn(2, 8, 64),
                }
            }
        case "timesfm":
            padding = torch.zeros(2, 64, dtype=torch.int64)
            series = {"past_values": torch.randn(2, 64), "past_values_padding": padding}
            return {"inputs": {**series, "freq": torch.zeros(2, 1, dtype=torch.int64)}}
        case "decision_transformer":
            return {"inputs": _trajectory()}
        case "autoformer" | "informer" | "time_series_transformer":
            return {"base": {"prediction_length": 8, "context_length": 16}}
        case _:
            return {}
