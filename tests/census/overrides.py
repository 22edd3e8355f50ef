"""What a model type needs beyond the general rules: fields of its configuration."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _resnet() -> dict[str, Any]:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    return {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}


def overrides(model_type: str) -> dict[str, Any]:
    """ "base": arguments of the configuration that is shrunk; "config": fields of the small one."""
    match model_type:
        case "conditional_detr" | "dab-detr" | "deformable_detr" | "detr" | "table-transformer":
            return {"base": _resnet()}
        case "cohere_compass_text":
            return {"config": {"rope_parameters": {"full_attention": ROPE}}}
        case "autoformer" | "informer" | "time_series_transformer":
            return {"base": {"prediction_length": 8, "context_length": 16}}
        case _:
            return {}
